"""Required libraries, recorded runs, style of figures, sliders."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import infonce

COLOURS = ["#0b4f6c", "#e4572e", "#3a9d5d", "#8a4fff", "#e0a100", "#17a2b8", "#7a7a7a", "#c2185b"]


def require(*modules: str, records: bool = False) -> None:
    """ImportError with the install command if a library of the notebook is missing; with `records`,
    FileNotFoundError if there are no recorded runs."""
    wanted = ("matplotlib", *modules)
    missing = [name for name in wanted if not _is_installed(name)]
    if missing:
        raise ImportError(
            f"this notebook needs {', '.join(missing)}: "
            "python -m pip install 'infonce-kernels[notebooks]'"
        )
    if records:
        benchmarks()
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(
        {
            "figure.dpi": 84,
            "figure.titlesize": 11,
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=COLOURS),
            "legend.frameon": False,
            "image.cmap": "viridis",
        }
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def benchmarks() -> Path:
    """The folder of the benchmarks and their recorded runs, in a checkout or a source distribution:
    that of the notebook, or that of infonce."""
    here = Path.cwd()
    for root in (here, *here.parents, Path(infonce.__file__).parents[1]):
        if (root / "benchmarks" / "results" / "gpu.json").is_file():
            return root / "benchmarks"
    raise FileNotFoundError(
        "this notebook draws the recorded runs in benchmarks/results, which the wheel of infonce "
        f"does not have: put it into a checkout or a source distribution (it runs in {here})"
    )


def record(name: str, skipped: str | None = None) -> Any:
    """A recorded run. None, after a message, if there are none and a part can be `skipped`."""
    try:
        return json.loads((benchmarks() / "results" / name).read_text())
    except FileNotFoundError as error:
        if skipped is None:
            raise
        print(f"No records: skips {skipped}.\n({error})")
        return None


def gpu(skipped: str) -> Any:
    """CuPy if there is a GPU; otherwise None, after a message with what is `skipped`."""
    from infonce.cli import machine

    cuda = machine.cuda()
    if not cuda.startswith("available"):
        print(f"No GPU: skips {skipped}.\n({cuda})")
        return None
    import cupy

    print(f"GPU {cuda}")
    return cupy


def device() -> str:
    """The processor that the notebook runs on."""
    from infonce.cli import machine

    return machine.describe_cpu(machine.cpu())


def figure(
    title: str,
    *,
    sizes: str,
    dtype: str,
    on: str | None = None,
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A figure with a caption: device (default: this processor), sizes and dtype.

    Returns the figure and its axes, as `matplotlib.pyplot.subplots` does.
    """
    import matplotlib.pyplot as plt

    size = size or (3.2 * columns + 0.8, 2.7 * rows + 0.7)
    drawn, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", **options)
    drawn.suptitle(title, fontweight="bold")
    drawn.supxlabel(f"{on or device()}; {sizes}; {dtype}", fontsize=7, color="#555555")
    return drawn, axes


def heat(axes: Any, x: Any, y: Any, z: Any, **options: Any) -> Any:
    """z [len(y), len(x)] in colours; red if it is infinite or NaN."""
    import numpy as np

    axes.set_facecolor("#d62728")
    return axes.pcolormesh(x, y, np.ma.masked_invalid(z), shading="nearest", **options)


def log_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """These ticks on a logarithmic axis, whose own ticks are one or none in a decade."""
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def explore(draw: Callable[..., Any], **choices: tuple[Any, Sequence[Any]]) -> None:
    """Call `draw` with the value of each (value, all values). With ipywidgets, sliders below its
    picture draw it again."""
    draw(**{name: value for name, (value, _) in choices.items()})
    if not (_is_installed("ipywidgets") and _is_installed("IPython")):
        return
    from IPython import display, get_ipython

    if get_ipython() is None:
        return
    import ipywidgets
    import matplotlib.pyplot as plt

    plt.show()  # the picture of these values stays if there are no sliders, as in documents
    sliders = {
        name: ipywidgets.SelectionSlider(
            options=list(values), value=value, description=name, continuous_update=False,
            layout={"width": "30em"}, style={"description_width": "8em"},
        )
        for name, (value, values) in choices.items()
    }  # fmt: skip
    picture = ipywidgets.Output()

    def again(_change: Any) -> None:
        with picture:
            picture.clear_output(wait=True)
            draw(**{name: slider.value for name, slider in sliders.items()})
            plt.show()

    for slider in sliders.values():
        slider.observe(again, "value")
    display.display(ipywidgets.VBox([*sliders.values(), picture]))
