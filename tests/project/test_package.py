"""What is installed, and what importing it costs."""

import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import succeed
from packaging.requirements import Requirement
from threadpoolctl import threadpool_info

import infonce
from infonce._names import extra as extra_of

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests"
    )
    return done.stdout


def test_import_waits_for_no_framework() -> None:
    """It loads few modules beyond those of NumPy, which the caller has imported."""
    heavy = "cupy torch jax mpi4py numba matplotlib sklearn click rich threadpoolctl scipy"
    code = (
        "import sys, numpy; n = len(sys.modules); import infonce\n"
        f"print(len(sys.modules) - n, [m for m in {heavy.split()} if m in sys.modules])"
    )
    number, _, loaded = run(code).strip().partition(" ")
    assert loaded == "[]"
    assert int(number) < 60


def test_import_from_a_checkout_that_is_not_installed() -> None:
    """-S: without the links of an editable install, which .pth files make."""
    code = (
        "import sys, infonce, infonce.distributed.schedule, infonce.kernels, numpy as np\n"
        "assert not any('editable' in str(finder) for finder in sys.meta_path)\n"
        "print(*infonce.kernels.__path__, infonce.clip_loss(np.eye(2), np.eye(2), scale=1.0))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path, loss = done.stdout.split()
    assert path == str(ROOT / "kernels")
    assert float(loss) == pytest.approx(math.log1p(1 / math.e))


def test_types_of_mapped_packages_are_known() -> None:
    """mypy sees what infonce imports from `kernels` and `distributed`, which are not Any."""
    pytest.importorskip("mypy")
    code = (
        "from infonce.kernels.problem import WORKSPACE\n"
        "from infonce.distributed.transports.choice import describe\n"
        "reveal_type(WORKSPACE); reveal_type(describe)"
    )
    command = [sys.executable, ROOT / "tests" / "typecheck.py", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    for found in ("int", "def (on_gpu: bool) -> dict[str, str]"):
        assert f'Revealed type is "{found}"' in done.stdout, done.stdout + done.stderr


def test_every_public_name_is_documented_and_typed() -> None:
    for name in infonce.__all__:
        if name != "__version__":
            assert getattr(infonce, name).__doc__
    assert (Path(infonce.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("name", "near"),
    [("info_nce", "info_nce_loss"), ("clip", "clip_loss"), ("InfoNCE", "info_nce_loss"),
     ("ntxent_loss", "nt_xent_loss"), ("Metric", "Metrics"), ("torchh", "torch"), ("simclr", "")],
)  # fmt: skip
def test_a_name_that_is_not_there_tells_what_is(name: str, near: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(infonce, name)
    message = str(caught.value)
    assert message.startswith(f"module 'infonce' has no attribute {name!r}")
    assert (f"(did you mean {near}" in message) == bool(near)
    losses = ("clip", "distill", "gte", "info_nce", "lit", "nt_xent", "siglip", "sup_con")
    assert message.endswith("losses are " + ", ".join(f"{loss}_loss" for loss in losses))


@pytest.mark.extras
def test_adapters_are_attributes() -> None:
    for module in ("distributed", "jax", "torch"):
        pytest.importorskip({"distributed": "mpi4py"}.get(module, module))
    lines = run(
        "import infonce, sys\n"
        "for name in ('distributed', 'jax', 'torch'):\n"
        "    loaded = 'infonce.' + name in sys.modules\n"
        "    module = getattr(infonce, name)\n"
        "    try: module.clip\n"
        "    except AttributeError as error: print(loaded, module.clip_loss.__name__, error)"
    ).splitlines()
    for module, line in zip(("distributed", "jax", "torch"), lines, strict=True):
        missing = f"False clip_loss module 'infonce.{module}' has no attribute 'clip'"
        assert line.startswith(missing)
        assert "clip_loss?)" in line


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_framework_that_is_missing_is_named_with_its_extra(library: str) -> None:
    """Imports of the adapter and of its modules name the extra. `hasattr` is False."""
    inner = {"jax": "optax", "torch": "open_clip"}[library]
    output = run(
        f"import sys; sys.modules[{library!r}] = None\n"
        "import importlib, infonce\n"
        f"print(hasattr(infonce, {library!r}))\n"
        f"try: infonce.{library}\n"
        "except AttributeError as error: print(error)\n"
        f"for name in ('infonce.{library}', 'infonce.{library}.{inner}'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    ).splitlines()
    assert output[0] == "False"
    assert len(output) == 4
    for line in output[1:]:
        assert f"needs {library}, which is not installed" in line
        assert line.endswith(f"pip install 'infonce-kernels[{library}]'")


def test_another_module_that_is_missing_keeps_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, extra_of("torch"):
        importlib.import_module("torch_needs_this")
    assert str(caught.value) == "No module named 'torch_needs_this'"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: other workers may build at the same time."""
    pytest.importorskip("setuptools", minversion="64")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT, folder / "copy", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "tests")
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(folder), str(folder / "copy")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel_file,) = folder.glob("infonce_kernels-*.whl")
    return wheel_file


def test_wheel(wheel: Path) -> None:
    """Kernels and distributed are installed inside infonce, never under their bare names."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"infonce"}
    for wanted in (
        "infonce/py.typed", "infonce/torch/__init__.pyi", "infonce/jax/__init__.pyi",
        "infonce/kernels/solve.py", "infonce/distributed/__init__.py",
        "infonce/reference/clip.py", "infonce/cli.py",
    ):  # fmt: skip
        assert wanted in names or wanted.replace(".py", "/__init__.py") in names
    for source in (ROOT / "kernels").rglob("*.*"):
        if source.suffix in (".py", ".cu", ".cuh"):
            assert f"infonce/{source.relative_to(ROOT)}" in names
    assert any(name.endswith("licenses/LICENSE") or name.endswith("/LICENSE") for name in names)


def distribution(wheel: Path) -> importlib.metadata.Distribution:
    folder = f"infonce_kernels-{infonce.__version__}.dist-info"
    return importlib.metadata.PathDistribution(zipfile.Path(wheel) / folder)  # type: ignore[arg-type]


def test_description_stands_without_the_repository(wheel: Path) -> None:
    """A package index has no files beside the README: no pictures, no links but to the web."""
    about = distribution(wheel).metadata
    assert (about["Name"], about["Version"]) == ("infonce-kernels", infonce.__version__)
    assert about["Description-Content-Type"] == "text/markdown"
    text = about.get_payload() or about["Description"]  # type: ignore[attr-defined]
    readme = (ROOT / "README.md").read_text()
    headings = re.findall(r"^#+ .*", readme, re.MULTILINE)
    assert len(headings) > 5
    assert re.findall(r"^#+ .*", text, re.MULTILINE) == headings
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert code.findall(text) == code.findall(readme)
    text, readme = code.sub("", text), code.sub("", readme)
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert any(not target.startswith("http") for target in targets)
    for target in re.findall(r"\]\(([^)]*)\)|<img", text):
        assert target.startswith(("https://", "http://"))
    for target in targets:  # files are named, and in the source distribution's folders
        if target.startswith("docs/"):
            assert f"`{target}`" in text
            assert (ROOT / target).exists()


def extra(wheel: Path, name: str) -> dict[str, Requirement]:
    """The requirements that `pip install infonce-kernels[name]` adds on Linux."""
    wanted = [Requirement(line) for line in distribution(wheel).requires or ()]
    environment = {"extra": name, "platform_system": "Linux"}
    return {r.name: r for r in wanted if r.marker and r.marker.evaluate(environment)}


@pytest.mark.parametrize("cuda", [12, 13])
def test_extras_for_gpus_bring_all_that_is_loaded(wheel: Path, cuda: int) -> None:
    """NVRTC, cuBLAS, the headers of CuPy's own kernels (cudart) and NCCL, all for CuPy's CUDA."""
    brought = extra(wheel, f"cuda{cuda}")
    assert set(brought) == {f"cupy-cuda{cuda}x", "cuda-toolkit", f"nvidia-nccl-cu{cuda}"}
    toolkit = brought["cuda-toolkit"]
    assert toolkit.extras == {"nvrtc", "cublas", "cudart"}
    versions = [f"{major}.{minor}" for major in (11, 12, 13, 14) for minor in (0, 9)]
    assert list(toolkit.specifier.filter(versions)) == [f"{cuda}.0", f"{cuda}.9"]


def test_extras_that_info_names_bring_the_library(wheel: Path) -> None:
    optional = json.loads(succeed("info", "--json", "--no-compile"))["optional"]
    for library, state in optional.items():
        (name,) = re.findall(r"^pip install 'infonce-kernels\[(\w+)\]'$", state["from"])
        assert library in extra(wheel, name)


def test_workers_share_the_machine() -> None:
    """tests/conftest.py sets its environment variables before NumPy reads them."""
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in os.environ
    if "PYTEST_XDIST_WORKER" in os.environ:
        most = int(os.environ["OMP_NUM_THREADS"])
        blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
        assert "OPENBLAS_NUM_THREADS" in os.environ or blas[0]["num_threads"] <= most


def test_plugin_that_warns_of_workers(tmp_path: Path) -> None:
    """pytest-benchmark, wherever it is installed: its warning must not end the session."""
    (tmp_path / "benchmarking.py").write_text(
        "import warnings\ndef pytest_configure(): warnings.warn('disabled under xdist')\n"
    )
    (tmp_path / "benchmarking-1.dist-info").mkdir()
    about = {"METADATA": "Name: benchmarking\nVersion: 1\n",
             "entry_points.txt": "[pytest11]\nbenchmark = benchmarking\n"}  # fmt: skip
    for file, text in about.items():
        (tmp_path / "benchmarking-1.dist-info" / file).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/losses/test_schedules.py"],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_skips_for_want_of_a_gpu_are_one_line(tmp_path: Path) -> None:
    """Beside the other reasons, which stay, by place."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "skip = pytest.mark.skip\n"
        "@skip(reason='no GPU: no device')\n@pytest.mark.parametrize('i', range(9))\n"
        "def test_kernel(i): pass\n"
        "@skip(reason='this torch sees no GPU')\ndef test_tensor(): pass\n"
        "@skip(reason='needs another library')\ndef test_other(): pass\n"
        "def test_at_once(): pytest.skip('needs 2 GPUs, found 0')\n"
        "def test_few(): pytest.skip('needs 2 GPUs, found 1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-n", "1", "-c", os.devnull, "--rootdir", tmp_path,
         "-o", f"pythonpath={ROOT / 'tests' / 'emulator'}", "-p", "no:cacheprovider", tmp_path],
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 3, done.stdout
    assert "SKIPPED [11] tests: no GPU: no device" in lines
    for reason in ("needs another library", "needs 2 GPUs, found 1"):
        assert any(line.endswith(reason) for line in lines)
