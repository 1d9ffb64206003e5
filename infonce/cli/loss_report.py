"""The report of `infonce loss`: its numbers, its tables, its plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from .. import spec
from ..checks.teacher import ALL_LOSSES
from ..checks.validation import human
from ..result import LossAndGrad
from ..spec import DEFAULTS, PREFIX_OPTIONS, SOFTMAX_OPTIONS, Loss
from .common import TEACHER, TEACHER_FEATURES, flag, stdout
from .embeddings import LossFiles

SIDES = ("rows", "columns")


def build_report(
    record: Mapping[str, Any], options: Mapping[str, Any], results: Sequence[LossAndGrad]
) -> dict[str, Any]:
    """The numbers of a call, and how they were computed. `results` has one result for each
    temperature, and `record` comes from `record_options`."""
    return {
        **(_numbers(results[0]) if len(results) == 1 else _by_temperature(record, results)),
        "retrieval": _retrieval(results[0]),
        "method": options["method"],
        "precision": options["precision"],
    }


def record_inputs(sources: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, Any]:
    """The source, shape and dtype of the features, by argument."""
    return {
        name: {"source": source, "shape": features[name].shape, "dtype": str(features[name].dtype)}
        for name, source in sources.items()
    }


def record_options(
    kind: Loss, files: LossFiles, options: Mapping[str, Any], temperatures: Sequence[float] | None
) -> dict[str, Any]:
    """The options on which the loss depends: `scale` as it was used, and arrays by their path."""
    scale = kind.scale if options["scale"] is None else options["scale"]
    record: dict[str, Any] = {"temperature": None, "scale": scale}
    if temperatures is not None:
        record = {"temperature": temperatures, "scale": [1 / t for t in temperatures]}
        if len(temperatures) == 1:
            record = {name: values[0] for name, values in record.items()}
    if kind.sigmoid:
        record["bias"] = options.get("bias", kind.bias)
    names = [
        name
        for name in SOFTMAX_OPTIONS
        if name not in ("guide", *spec.ARRAY_OPTIONS, *kind.refused)
    ]
    record |= {name: options[name] for name in ("normalize", *names)}
    record |= {name: str(path) for name, path in files.arrays.items()}
    record |= {"in_batch": options["in_batch"]} if "own" in files.arrays else {}
    record |= {name: options[name] for name in PREFIX_OPTIONS if options[name] is not None}
    record |= {name: [*map(str, paths)] for name, paths in files.sides.items()}
    record |= {"guide": list(files.guides)} if files.guides else {}
    numbers = [name for name in TEACHER if name in options and name not in TEACHER_FEATURES]
    record |= {name: options[name] for name in numbers}
    record.update(files.teacher)
    return record


def _by_temperature(
    record: Mapping[str, Any], results: Sequence[LossAndGrad]
) -> dict[str, list[dict[str, Any]]]:
    """The numbers of each of several temperatures."""
    runs = zip(record["temperature"], record["scale"], results, strict=True)
    return {
        "by_temperature": [
            {"temperature": temperature, "scale": scale, **_numbers(result)}
            for temperature, scale, result in runs
        ]
    }


def _numbers(result: LossAndGrad) -> dict[str, Any]:
    """The loss and the log-sum-exps of a result."""
    value = {"total": float(result.loss), "unweighted": _directions(result)}
    return {"value": value, "lse": _lse(result)}


def _directions(result: LossAndGrad) -> dict[str, float | None]:
    """Mean loss over rows and over columns; None for those that the loss does not have."""
    if result.metrics is None:
        return {"rows": None, "columns": None}
    columns = result.metrics.column_loss
    return {
        "rows": float(result.metrics.row_loss),
        "columns": None if columns is None else float(columns),
    }


def _retrieval(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    """Share of positives that rank first, and among the first five; None if the loss is NaN."""
    if result.metrics is None or not math.isfinite(result.loss):
        return None
    top1, top5 = result.metrics.top(1), result.metrics.top(5)
    return {
        side: {"top1": first, "top5": fifth}
        for side, first, fifth in zip(SIDES, top1, top5, strict=True)
        if first is not None and fifth is not None
    }


def _lse(result: LossAndGrad) -> dict[str, dict[str, float]] | None:
    if result.lse is None:
        return None
    sides = result.lse if isinstance(result.lse, tuple) else (result.lse,)
    return {
        side: {"min": float(lse.min()), "mean": float(lse.mean()), "max": float(lse.max())}
        for side, lse in zip(SIDES, sides, strict=False)
    }


def _words(name: str, value: Any) -> str:
    """An option as it is written on the command line."""
    if value is True:
        return flag(name)
    values = value if isinstance(value, list) else [value]
    if name in ("temperature", *PREFIX_OPTIONS):
        return f"{flag(name)} {','.join(f'{v:.6g}' for v in values)}"
    return " ".join(
        f"{flag(name)} {v:.6g}" if isinstance(v, float) else f"{flag(name)} {v}" for v in values
    )


def tables(report: Mapping[str, Any]) -> None:
    """Prints the report."""
    several = "by_temperature" in report
    title = f"{report['loss']} loss"
    table = _of_temperatures(report) if several else _of_directions(report)
    if not several:
        title += f" {report['value']['total']:.6g}"
    table.title, table.title_justify = title, "left"
    console = stdout(table)
    console.print(table if len(table.columns) > 1 else title)
    if ALL_LOSSES[report["loss"]].sigmoid:
        console.print(
            "A sigmoid loss judges each pair by itself: it has no softmax over rows or columns, so "
            "no loss by direction, no log-sum-exp and no ranking."
        )
    console.print(facts_table(report))


def _of_directions(report: Mapping[str, Any]) -> Table:
    """The means over rows and over columns; columns and lines without values are left out."""
    retrieval, lse = report["retrieval"] or {}, report["lse"] or {}
    rows: list[tuple[str, str, Mapping[str, Any]]] = [
        (_mean(report), ".6g", report["value"]["unweighted"])
    ]
    for k in (1, 5):
        shares = {side: values[f"top{k}"] for side, values in retrieval.items()}
        rows.append((f"retrieval top-{k}", ".2%", shares))
    for key in ("min", "mean", "max"):
        rows.append((f"log-sum-exp {key}", ".6g", {side: lse[side][key] for side in lse}))
    sides = [side for side in SIDES if any(cells.get(side) is not None for *_, cells in rows)]
    table = numbers_table(["", *sides])
    for name, form, cells in rows:
        if any(cells.get(side) is not None for side in sides):
            shown = (cells.get(side) for side in sides)
            table.add_row(name, *("-" if cell is None else format(cell, form) for cell in shown))
    return table


def _of_temperatures(report: Mapping[str, Any]) -> Table:
    """The loss at each temperature, and its means over rows and over columns."""
    runs = report["by_temperature"]
    sides = [side for side in SIDES if runs[0]["value"]["unweighted"][side] is not None]
    table = numbers_table(["temperature", "loss", *(f"{_mean(report)}, {side}" for side in sides)])
    for run in runs:
        value = run["value"]
        cells = [run["temperature"], value["total"], *(value["unweighted"][side] for side in sides)]
        table.add_row(*(f"{cell:.6g}" for cell in cells))
    return table


def _mean(report: Mapping[str, Any]) -> str:
    """The heading of mean losses."""
    return "mean loss, unweighted" if "weights" in report["options"] else "mean loss"


def numbers_table(headings: Sequence[str]) -> Table:
    """A table of numbers, whose first column has names if its heading is empty."""
    table = Table()
    for heading in headings:
        numeric = bool(heading)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric)
    return table


def facts_table(report: Mapping[str, Any]) -> Table:
    """Inputs, memory, time and options."""
    facts = Table.grid(padding=(0, 2))
    for name, entry in report["inputs"].items():
        shape = " x ".join(map(str, entry["shape"]))
        facts.add_row(name, f"{shape} {entry['dtype']}, {entry['source']}")
    if "by_temperature" in report and report["retrieval"]:  # equal at all temperatures
        for side, shares in report["retrieval"].items():
            facts.add_row(
                f"retrieval, {side}", f"top-1 {shares['top1']:.2%}, top-5 {shares['top5']:.2%}"
            )
    memory = report["memory_bytes"]
    facts.add_row(
        "memory",
        f"peak {human(memory['peak_rss'])}, of it inputs {human(memory['inputs'])}, growth over "
        f"inputs {human(memory['growth_over_inputs'])}",
    )
    facts.add_row("time", f"{report['seconds']:.3g} s")
    if "method" in report:
        facts.add_row("method", f"{report['method']}, precision {report['precision']}")
    options = report["options"]
    by_temperature = options["temperature"] is not None  # then no scale is shown
    changed = {
        name: value for name, value in options.items()
        if value != DEFAULTS.get(name) and not (by_temperature and name == "scale")
    }  # fmt: skip
    facts.add_row("options", ", ".join(_words(name, value) for name, value in changed.items()))
    if report.get("gradients"):
        facts.add_row("gradients", report["gradients"])
    return facts


def figure(figures: Any, report: Mapping[str, Any]) -> Any:
    """The loss against the temperature; `figures` is matplotlib.figure."""
    runs = sorted(report["by_temperature"], key=lambda run: run["temperature"])
    temperatures = [run["temperature"] for run in runs]
    drawing = figures.Figure(figsize=(6, 4), layout="constrained")
    axes = drawing.subplots()
    axes.plot(temperatures, [run["value"]["total"] for run in runs], "o-", label="loss")
    for side in SIDES:
        losses = [run["value"]["unweighted"][side] for run in runs]
        if None not in losses:
            axes.plot(temperatures, losses, ".--", label=f"{_mean(report)}, {side}")
    title = f"{report['loss']} loss of {input_names(report)}"
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.set(xlabel="temperature", ylabel="loss")
    set_log_axes(axes, temperatures)
    axes.legend()
    return drawing


def input_names(report: Mapping[str, Any]) -> str:
    """The sources of the inputs, for a title: bytes of a file's name that are no text escaped."""
    sources = dict.fromkeys(entry["source"] for entry in report["inputs"].values())
    return ", ".join(sources).encode(errors="backslashreplace").decode()


def set_log_axes(axes: Any, temperatures: Sequence[float], log_values: bool = True) -> None:
    """A logarithmic axis of temperatures with a tick at each; with `log_values`, also one of the
    plotted numbers, if all are positive (or not finite) and differ by more than a factor of 3."""
    axes.set_xscale("log")
    axes.set_xticks(temperatures, [f"{t:g}" for t in temperatures])
    axes.set_xticks([], minor=True)
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    values = values[np.isfinite(values)]
    # on a narrower range, a logarithmic axis has one tick or none
    if log_values and len(values) and 0 < 3 * values.min() < values.max():
        axes.set_yscale("log")
        if values.max() < 100 * values.min():
            digits = range(2, 10) if values.max() < 10 * values.min() else (2, 5)
            axes.yaxis.get_minor_locator().set_params(subs=digits)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
