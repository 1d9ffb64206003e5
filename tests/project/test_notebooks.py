"""The notebooks: what is committed has its plots, and every cell still runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def plots(notebook: Any) -> list[str]:
    """The PNG pictures among the outputs."""
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    return [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]


def said(notebook: Any) -> str:
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    return "".join(o.text for o in outputs if o.output_type == "stream")


def test_all_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_log_sum_exp", "02_precision_ladder", "03_order_and_determinism", "04_tiles_and_ring",
        "05_training", "06_gpu_speed", "07_variants",
    ]  # fmt: skip


@named
def test_committed_with_its_plots(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not run from top to bottom"
    assert len(plots(notebook)) >= 4
    assert path.stat().st_size < 600_000
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert "GPU" in said(notebook)


@named
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own machinery
def test_runs(path: Path) -> None:
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    recorded = len(plots(notebook))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    # beside other tests: threads of BLAS that wait for a core cost more than they bring
    client.execute(env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert len(plots(notebook)) == recorded
    assert "No GPU: skips" in said(notebook) or "GPU available" in said(notebook)


@named
def test_says_what_to_install(path: Path) -> None:
    """Its first cell, where a library is missing."""
    first = code_cells(nbformat.read(path, as_version=4))[0].source
    without = f"import sys; sys.modules['matplotlib'] = None\n{first}"
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, cwd=FOLDER, timeout=60
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this notebook needs matplotlib; from the checkout's root:")
    assert last.endswith("pip install -e '.[notebooks]'")
