"""Plots of the documentation, from a record of benchmarks/gpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tables import CEILING, LIBRARY, NAMES, OTHERS, Row, case_name, ceiling_tflops

WIDTH = 512  # of the features whose results are drawn


def draw(results: Path, name: str) -> None:
    """The plots of a record that has some to draw."""
    record = json.loads((results / f"{name}.json").read_text())
    try:
        if any(drawn(row) and row["method"] == "torch" for row in record["results"]):
            roofline(record, results / f"{name}.png")
            time_and_memory(record, results / f"{name}-peers.png")
        if _ratios(record):
            over_compiled(record, results / f"{name}-shapes.png")
    except ImportError as error:
        print(f"{name}.png is not drawn: {error}", file=sys.stderr)


def drawn(row: Row) -> bool:
    """Whether a result is a point of the plot."""
    kind = row.get("loss"), row.get("dtype"), row.get("dim"), row.get("gradient")
    return kind == ("clip", "bfloat16", WIDTH, True) and "median_s" in row


def _curves(
    axes: Any, rows: Iterable[Row], field: str, factor: float, wanted: Callable[[str], bool]
) -> None:
    """One line for each contender: `field` against the batch."""
    rows = [row for row in rows if wanted(row["method"]) and row.get(field) is not None]
    for method in sorted({row["method"] for row in rows}, key=lambda m: (m not in NAMES, m)):
        points: dict[int, float] = {}
        for row in rows:  # of two sections, the first counts
            if row["method"] == method:
                points.setdefault(row["size"], row[field] * factor)
        style = {LIBRARY: "ko-", CEILING: "k--"}.get(method, "o-")
        line = zip(*sorted(points.items()), strict=True)
        axes.plot(*line, style, label=NAMES.get(method, method))
    sizes = sorted({row["size"] for row in rows})
    axes.set(xscale="log", xlabel="rows in the batch")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def roofline(record: Mapping[str, Any], path: Path) -> None:
    """Plot useful TFLOP/s of CLIP against the batch, beside what cuBLAS reaches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    label = f"cuBLAS, product of {record['gemm']['size']} rows"
    axes.axhline(ceiling_tflops(record), color="gray", linestyle=":", label=label)
    _curves(axes, filter(drawn, record["results"]), "gflops", 1e-3, lambda method: True)
    axes.set(
        ylabel="useful TFLOP/s", ylim=(0, None),
        title=f"CLIP loss and gradient, bfloat16, width {WIDTH}, on {record['device']}",
    )  # fmt: skip
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


def over_compiled(record: Mapping[str, Any], path: Path) -> None:
    """Plot CLIP's time over torch.compile's, against the width and against the batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (along, fixed, label) in zip(
        figure.subplots(1, 2),
        (("dim", "size", "features in a row"), ("size", "dim", "rows in the batch")),
        strict=True,
    ):
        lines: dict[Any, dict[str, dict[int, float]]] = {}  # of a fixed value, by method
        for row, ratio in _ratios(record):
            method_line = lines.setdefault(row[fixed], {}).setdefault(row["method"], {})
            method_line.setdefault(row[along], ratio)  # of two sections, the first counts
        value = max(lines, key=lambda name: max(map(len, lines[name].values())))
        for method, points in lines[value].items():
            style = {LIBRARY: "ko-", CEILING: "k--"}.get(method, "o-")
            line = zip(*sorted(points.items()), strict=True)
            axes.plot(*line, style, label=NAMES.get(method, method))
        axes.axhline(1, color="gray", linestyle=":")
        axes.set(xscale="log", xlabel=label, ylim=(0, None), ylabel="time over torch.compile's")
        places = sorted({at for points in lines[value].values() for at in points})
        ticks = [at for i, at in enumerate(places) if i == 0 or at > 1.05 * places[i - 1]]
        axes.set_xticks(ticks, [str(at) for at in ticks], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(f"{value} {'rows' if fixed == 'size' else 'features'}", fontsize="medium")
    figure.suptitle(f"CLIP loss and gradient, bfloat16, on {record['device']}", fontsize="medium")
    labelled = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()[:-1]}
    figure.legend(labelled.values(), labelled.keys(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def _ratios(record: Mapping[str, Any]) -> list[tuple[Row, float]]:
    """Results of CLIP in bfloat16, and their times over torch.compile's in the same section."""
    rows = [
        row
        for row in record["results"]
        if (row.get("loss"), row.get("dtype")) == ("clip", "bfloat16")
        and row.get("section") in ("widths", "portable")
        and "median_s" in row
    ]
    compiled = {
        (row["section"], case_name(row)): row["median_s"]
        for row in rows
        if row["method"] == "torch.compile"
    }
    pairs = ((row, compiled.get((row["section"], case_name(row)))) for row in rows)
    return [
        (row, row["median_s"] / time) for row, time in pairs if time and row["method"] not in OTHERS
    ]


def time_and_memory(record: Mapping[str, Any], path: Path) -> None:
    """Plot time and memory of CLIP against the batch, beside the other projects."""
    from matplotlib.figure import Figure

    shown = (*NAMES, *OTHERS)
    rows = [row for row in record["results"] if drawn(row)]
    compared = {row["size"] for row in rows if row["method"] in OTHERS}
    rows = [row for row in rows if row["size"] in compared]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, rows, "median_s", 1e3, lambda method: method in shown)
    _curves(right, rows, "peak_bytes", 2**-20, lambda method: method in shown)
    left.set(yscale="log", ylabel="milliseconds")
    right.set(yscale="log", ylabel="MiB beyond inputs and gradients")
    title = f"CLIP loss and gradient, bfloat16, width {WIDTH}, on {record['device']}"
    figure.suptitle(title, fontsize="medium")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=100)
