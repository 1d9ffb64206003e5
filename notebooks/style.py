"""Shared by the notebooks: required libraries, style of figures, sliders in live notebooks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"  # recorded runs
COLOURS = ["#0b4f6c", "#e4572e", "#3a9d5d", "#8a4fff", "#e0a100", "#17a2b8", "#7a7a7a", "#c2185b"]


def require(*modules: str) -> None:
    """ImportError with the install command if a library of the notebook is missing."""
    wanted = ("infonce.kernels", "matplotlib", *modules)
    missing = [name for name in wanted if not _found(name)]
    if missing:
        raise ImportError(
            f"this notebook needs {', '.join(missing)}; from the checkout's root: "
            "python -m pip install -e '.[notebooks]'"
        )
    import matplotlib as mpl

    mpl.rcParams.update(
        {
            "figure.dpi": 84,
            "figure.titlesize": 11,
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": mpl.cycler(color=COLOURS),
            "legend.frameon": False,
            "image.cmap": "viridis",
        }
    )


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def gpu(skipped: str) -> Any:
    """CuPy if there is a GPU; otherwise None, after a message with what is `skipped`."""
    from infonce.cli import machine

    found = machine.cuda()
    if not found.startswith("available"):
        print(f"No GPU: skips {skipped}.\n({found})")
        return None
    import cupy

    print(f"GPU {found}")
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
    """z [len(y), len(x)] in colours; red where it is infinite or NaN."""
    import numpy as np

    axes.set_facecolor("#d62728")
    return axes.pcolormesh(x, y, np.ma.masked_invalid(z), shading="nearest", **options)


def explore(draw: Callable[..., Any], **choices: tuple[Any, Sequence[Any]]) -> None:
    """Call `draw` with the value of each (value, all values); in a live notebook, with sliders.

    Sliders need ipywidgets and a live notebook: Jupyter and VS Code set these variables.
    """
    live = any(name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID"))
    if not (live and _found("ipywidgets")):
        draw(**{name: value for name, (value, _) in choices.items()})
        return
    import ipywidgets

    ipywidgets.interact(
        draw,
        **{
            name: ipywidgets.SelectionSlider(
                options=list(values), value=value, layout={"width": "30em"},
                style={"description_width": "8em"},
            )
            for name, (value, values) in choices.items()
        },
    )  # fmt: skip
