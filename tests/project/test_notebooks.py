"""The notebooks: what is committed has its plots, and every cell still runs."""

import importlib.machinery
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from infonce.notebooks import style

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALLER = {  # of what takes long, fewer of the same kind
    "02_precision_ladder": {
        "np.geomspace(0.005, 1, 12)": "np.geomspace(0.005, 1, 3)",
        "np.arange(3, 11)": "np.arange(3, 9)",
        "np.arange(9, 17)": "np.arange(9, 13)",
        "pairs(2048, 512": "pairs(512, 512",
        "np.linspace(0.2, 1.0, 17)": "np.linspace(0.2, 1.0, 5)",
    },
    "05_training": {
        "[32, 64, 128, 256, 512, 1024]": "[32, 1024]",
        "EPOCHS = 30": "EPOCHS = 4",
        "epochs=40": "epochs=10",
    },
    "07_variants": {"SEEDS = (0, 1)": "SEEDS = (0,)"},
}
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def plots(notebook: Any) -> list[str]:
    """The PNG pictures among the outputs."""
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    return [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]


def printed(notebook: Any) -> str:
    outputs = (output for cell in code_cells(notebook) for output in cell.outputs)
    return "".join(o.text for o in outputs if o.output_type == "stream")


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
    assert "GPU" in printed(notebook)
    assert len(NOTEBOOKS) == 8


@named
@pytest.mark.parametrize("has_records", [False, True])
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own machinery
def test_runs_in_a_folder_of_its_own(path: Path, has_records: bool, tmp_path: Path) -> None:
    """Beside an installation, which has no recorded runs, and beside a checkout, which has some.
    One notebook shows what those that read records do without them."""
    pytest.importorskip("ipykernel")
    code = path.read_text()
    reads_records = "style.record(" in code
    if not has_records and reads_records and path.stem != "03_order_and_determinism":
        pytest.skip("this notebook runs with its records")
    if has_records and not reads_records:
        pytest.skip("this notebook reads no recorded runs")
    installation, folder = tmp_path / "installation", tmp_path / "folder"
    installation.mkdir()
    folder.mkdir()
    runpy.run_path(str(FOLDER.parent / "tests" / "typecheck.py"))["link_packages"](installation)
    for long, short in SMALLER.get(path.stem, {}).items():
        assert code.count(long) == 1, long
        code = code.replace(long, short)
    (folder / path.name).write_text(code)
    notebook = nbformat.read(folder / path.name, as_version=4)
    committed_plots = len(plots(notebook))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    # beside other tests: threads of BLAS that wait for a core cost more than they bring
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environment |= {} if has_records else {"PYTHONPATH": str(installation)}
    client.execute(env=environment)
    skipped = printed(notebook).count("No records: skips")
    assert (skipped == 0) == (has_records or not reads_records)
    assert committed_plots - skipped <= len(plots(notebook)) <= committed_plots
    assert "No GPU: skips" in printed(notebook) or "GPU available" in printed(notebook)
    assert [file.name for file in folder.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import sys; sys.modules['matplotlib'] = None",
         "ImportError: this notebook needs matplotlib: python -m pip install "
         "'infonce-kernels[notebooks]'"),
        # a wheel far from a checkout
        ("import infonce; infonce.__file__ = '/nowhere/lib/infonce/__init__.py'",
         "FileNotFoundError: this notebook draws the recorded runs in benchmarks"),
    ],
)  # fmt: skip
def test_first_cells_say_what_is_missing(before: str, words: str, tmp_path: Path) -> None:
    """A library, or records."""
    cells = {
        path.stem: code_cells(nbformat.read(path, as_version=4))[0].source for path in NOTEBOOKS
    }
    assert all("\nstyle.require(" in cell for cell in cells.values())
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{cells['06_gpu_speed']}"], capture_output=True,
        text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith(words)


def test_records_that_are_missing_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert style.record("gpu.json")["results"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(style.infonce, "__file__", "/nowhere/lib/infonce/__init__.py")
    assert style.record("gpu.json", skipped="a table") is None
    assert capsys.readouterr().out.startswith("No records: skips a table.")
    with pytest.raises(FileNotFoundError, match="recorded runs"):
        style.record("gpu.json")


class Slider:
    """The part of ipywidgets' SelectionSlider that `explore` needs."""

    def __init__(self, *, value: Any, **_layout: Any) -> None:
        self.value, self.watchers = value, []

    def observe(self, watcher: Any, name: str) -> None:
        assert name == "value"
        self.watchers.append(watcher)

    def move(self, value: Any) -> None:
        self.value = value
        for watcher in self.watchers:
            watcher({})


def test_sliders_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved slider draws again if ipywidgets and a kernel are there. Without them there is no
    slider."""
    shown: list[Any] = []
    widgets = types.ModuleType("ipywidgets")
    widgets.__spec__ = importlib.machinery.ModuleSpec("ipywidgets", None)
    widgets.SelectionSlider, widgets.Output, widgets.VBox = Slider, MagicMock, list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr(ipython.display, "display", shown.append)
    drawn: list[tuple[int, str]] = []

    def draw(rows: int, form: str) -> None:
        drawn.append((rows, form))

    choices = {"rows": (8, [8, 16]), "form": ("fp16", ["fp16", "bf16"])}
    style.explore(draw, **choices)  # no kernel
    assert drawn == [(8, "fp16")]
    assert not shown
    monkeypatch.setattr(ipython, "get_ipython", MagicMock())
    style.explore(draw, **choices)
    ((rows, form, _picture),) = shown
    rows.move(16)
    form.move("bf16")
    assert drawn[1:] == [(8, "fp16"), (16, "fp16"), (16, "bf16")]
