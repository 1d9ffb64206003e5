"""The report of `infonce loss --compare`: its numbers, its table, its plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comparison import MEASURES, Comparison, PrecisionError
from .common import stdout
from .loss_report import facts_table, input_names, numbers_table, set_log_axes


def table(found: Comparison, report: Mapping[str, Any]) -> None:
    """Prints the comparison, and the facts of the report."""
    headings, *lines = found.table()
    numbers = numbers_table(headings)
    numbers.title, numbers.title_justify = f"{found.loss} loss: errors, relative to float64", "left"
    for line in lines:
        if line[0]:  # the first line of a temperature
            numbers.add_section()
        numbers.add_row(*line)
    console = stdout(numbers)
    console.print(numbers)
    console.print(facts_table(report))


def figure(figures: Any, found: Comparison, report: Mapping[str, Any]) -> Any:
    """The errors against the temperature, on logarithmic axes; `figures` is matplotlib.figure.

    An error of 0 has no place on such an axis, and is left out. The share of lost elements has a
    linear axis.
    """
    temperatures = sorted(found.losses)
    lines: dict[tuple[str, str], list[PrecisionError]] = {}
    for error in sorted(found.errors, key=lambda error: error.temperature):
        lines.setdefault((error.precision, error.grad_dtype), []).append(error)
    precisions = list(dict.fromkeys(precision for precision, _ in lines))
    drawing = figures.Figure(figsize=(9, 6.5), layout="constrained")
    shapes = ", ".join(" x ".join(map(str, shape)) for shape in found.shapes.values())
    title = f"{found.loss} loss of {input_names(report)} ({shapes}), relative to float64"
    drawing.suptitle(title, fontsize=9, parse_math=False)
    panels = drawing.subplots(2, 2, sharex=True).flat
    for axes, (title, measure) in zip(panels, MEASURES.items(), strict=True):
        is_share = title == "lost to underflow"
        for (precision, grad_dtype), errors in lines.items():
            values = np.array([measure(error) for error in errors])
            values = 100 * values if is_share else np.where(values == 0, np.nan, values)
            # of two lines of a 16-bit precision, the one with float32 gradients is dashed
            is_second = (precision, grad_dtype) != next(k for k in lines if k[0] == precision)
            axes.plot(
                temperatures, values, "x--" if is_second else "o-", ms=5,
                color=f"C{precisions.index(precision)}", label=f"{precision}, {grad_dtype}",
            )  # fmt: skip
        axes.set_title(f"{title}, %" if is_share else title, fontsize=9)
        set_log_axes(axes, temperatures, log_values=not is_share)
        if is_share:
            axes.set_ylim(-4, 104)
    for axes in drawing.axes[2:]:
        axes.set_xlabel("temperature")
    handles, names = drawing.axes[0].get_legend_handles_labels()
    drawing.legend(
        handles, names, title="precision, dtype of gradients", loc="outside lower center",
        ncols=len(lines), fontsize=7, title_fontsize=7, columnspacing=1,
    )  # fmt: skip
    return drawing
