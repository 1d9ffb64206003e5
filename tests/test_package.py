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
