"""What is installed, and what importing it costs."""

import importlib.metadata
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import infonce

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests"
    )
    return done.stdout


def test_import_waits_for_no_framework() -> None:
    heavy = "cupy torch jax mpi4py numba matplotlib sklearn click rich threadpoolctl scipy"
    code = f"import infonce, sys; print([m for m in {heavy.split()} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_import_is_quick() -> None:
    """Beyond NumPy's own import, which the caller has paid for."""
    code = (
        "import time, numpy; t = time.perf_counter(); import infonce;print(time.perf_counter() - t)"
    )
    assert statistics.median(float(run(code)) for _ in range(5)) < 0.15


def test_every_public_name_is_documented_and_typed() -> None:
    for name in infonce.__all__:
        if name != "__version__":
            assert getattr(infonce, name).__doc__
    assert (Path(infonce.__file__).parent / "py.typed").exists()
    assert importlib.metadata.version("infonce") == infonce.__version__


@pytest.mark.parametrize(
    ("name", "near"),
    [("info_nce", "info_nce_loss"), ("clip", "clip_loss"), ("InfoNCE", "info_nce_loss"),
     ("ntxent_loss", "nt_xent_loss"), ("Metric", "Metrics"), ("torchh", "torch"), ("simclr", "")],
)  # fmt: skip
def test_a_name_that_is_not_there_tells_what_is(name: str, near: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(infonce, name)
    said = str(caught.value)
    assert said.startswith(f"module 'infonce' has no attribute {name!r}")
    assert (f"(did you mean {near}" in said) == bool(near)
    assert said.endswith("losses are clip_loss, info_nce_loss, lit_loss, nt_xent_loss, siglip_loss")


@pytest.mark.parametrize("module", ["distributed", "jax", "torch"])
def test_adapters_are_attributes(module: str) -> None:
    pytest.importorskip({"distributed": "mpi4py"}.get(module, module))
    code = (
        "import infonce, sys\n"
        f"loaded = 'infonce.{module}' in sys.modules\n"
        f"function = infonce.{module}.clip_loss\n"
        f"try: infonce.{module}.clip\n"
        "except AttributeError as error: print(loaded, function.__name__, error)"
    )
    said = run(code)
    assert said.startswith(f"False clip_loss module 'infonce.{module}' has no attribute 'clip'")
    assert "clip_loss?)" in said


def test_wheel(tmp_path: Path) -> None:
    """Kernels and distributed are installed inside infonce, never under their bare names."""
    pytest.importorskip("setuptools", minversion="64")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("infonce-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"infonce"}
    for wanted in (
        "infonce/py.typed", "infonce/kernels/blocks.py", "infonce/distributed/__init__.py",
        "infonce/reference/clip.py", "infonce/cli.py",
    ):  # fmt: skip
        assert wanted in names or wanted.replace(".py", "/__init__.py") in names
    for source in (ROOT / "kernels" / "cuda").glob("*.cu*"):
        assert f"infonce/kernels/cuda/{source.name}" in names
    assert any(name.endswith("licenses/LICENSE") or name.endswith("/LICENSE") for name in names)
