"""`infonce bench`: methods and sizes side by side, on this machine, in one run."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
from rich.table import Table

from ..kernels.cpu import SPARES
from . import machine
from .common import (
    Bytes,
    check_destination,
    human,
    one_line_errors,
    optional,
    peak_resident,
    progress_bar,
    reset_peak,
    resident,
    return_freed_memory,
    stdout,
    to_json,
    written_whole,
)
from .contenders import METHODS, Outcome, contender
from .loss import LOSSES

Array = Any
TEMPERATURE = 0.07
GEMM = 4096  # side of the matrix product that everything is compared with
PAUSE = 0.15  # seconds, in which idle threads of the last contender's BLAS stop spinning
REFERENCE_ROWS = 2048  # errors are measured up to here: the reference keeps float64 matrices
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip


class _List(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """Values separated by commas."""

    name = "list"

    def __init__(self, item: Callable[[str], Any], choices: Sequence[str] = ()) -> None:
        self.item, self.choices = item, choices

    def convert(self, value: Any, param: Any, ctx: Any) -> list[Any]:
        try:
            items = [self.item(part.strip()) for part in value.split(",")]
        except ValueError as error:
            self.fail(str(error))
        for item in items:
            if self.choices and item not in self.choices:
                self.fail(f"expected some of {', '.join(self.choices)}, got {item!r}")
        return items


def _size(text: str) -> int:
    size = int(text)
    if size < 2 or size % 2:
        raise ValueError(f"expected even numbers of rows, from 2, got {size}")
    return size


@click.command()
@click.option("--sizes", type=_List(_size), default="1024,4096,8192", help="Rows, a list.")
@click.option("--dim", type=click.IntRange(1), default=256)
@click.option("--loss", "kind", type=click.Choice(list(LOSSES)), default="clip")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32")
@click.option("--workspace", type=Bytes(), default="256MiB", help="For fused and tiled.")
@click.option("--repeat", type=click.IntRange(1), default=5, help="Rounds that are timed.")
@click.option("--methods", type=_List(str, METHODS), default=",".join(METHODS), help="A list.")
@click.option("--output", type=click.Path(path_type=Path), help="Write JSON; overwrites.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a PNG; overwrites.")
def bench(
    sizes: list[int],
    dim: int,
    kind: str,
    dtype: str,
    workspace: int,
    repeat: int,
    methods: list[str],
    output: Path | None,
    plot: Path | None,
) -> None:
    """Time and memory of loss and gradient by different methods, side by side.

    products are the four matrix products of the loss alone, a yardstick.
    numpy and torch keep the full matrix of logits, as people write it; naive, fused and tiled are
    this library's. Contenders take turns, after one warm-up each, so that a slow minute hits all
    of them. GFLOP/s counts the useful work of loss and gradient, 8 N N D, whatever is executed,
    and is compared with NumPy's matrix product in the same rounds. Errors are against float64.
    """
    figures = optional("matplotlib.figure", "plot") if plot else None
    for path in (output, plot):
        if path is not None:
            check_destination(path)
    with progress_bar() as progress:
        results, rates = _measure(
            sizes, dim, kind, dtype, workspace, repeat, methods, progress or (lambda *_: None)
        )
    cpu = machine.cpu()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "device": machine.describe_cpu(cpu),
        "versions": machine.versions("infonce", "numpy", "numba", "torch"),
        "cpu": cpu,
        "blas": machine.blas(),
        "environment": machine.environment(),
        "settings": {
            "loss": kind, "dim": dim, "dtype": dtype, "temperature": TEMPERATURE,
            "workspace_bytes": workspace, "repeat": repeat,
        },
        "gemm": {"size": GEMM, "gflops": rates},
        "results": results,
    }  # fmt: skip
    _print(report)
    if output is not None:
        with one_line_errors(), written_whole(output) as temporary:
            temporary.write_text(to_json(report) + "\n")
    if plot is not None:
        with one_line_errors(), written_whole(plot) as temporary:
            _figure(figures, report).savefig(temporary, format="png", dpi=120)


def _measure(
    sizes: Sequence[int],
    dim: int,
    kind: str,
    dtype: str,
    workspace: int,
    repeat: int,
    methods: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> tuple[list[dict[str, Any]], list[float]]:
    """Results by size and method, and the rates of the matrix product in GFLOP/s."""
    rng = np.random.default_rng(0)
    square = rng.standard_normal((GEMM, GEMM)).astype(
        np.float64 if dtype == "float64" else np.float32
    )
    product = np.empty_like(square)

    def gemm() -> None:
        np.matmul(square, square, out=product)

    gemm()
    results, gemm_seconds = [], []
    for size in sizes:
        features = [_unit_rows(rng, size, dim, dtype) for _ in LOSSES[kind].arguments]
        reference = _reference(kind, features) if size <= REFERENCE_ROWS else None
        running, rows = {}, {}
        for method in methods:
            row: dict[str, Any] = {"size": size, "method": method}
            results.append(row)
            try:
                run = contender(method, LOSSES[kind], features, 1 / TEMPERATURE, workspace)
                outcome = run()
                row.update(_errors(outcome, reference), **_memory(run))
                if method == "torch":
                    row["numpy_peak_bytes"] = None  # it allocates behind NumPy's back
            except (ImportError, MemoryError, ValueError) as error:
                row["skipped"] = str(error) or type(error).__name__
                continue
            running[method], rows[method] = run, row
        seconds: dict[str, list[float]] = {method: [] for method in running}
        for done in range(repeat):
            gemm_seconds.append(_seconds(gemm))
            for method, run in running.items():
                seconds[method].append(_seconds(run))
            progress(f"{size} rows", done + 1, repeat)
        for method, row in rows.items():
            times = seconds[method]
            median = statistics.median(times)
            row.update(
                median_s=median, min_s=min(times), max_s=max(times), seconds=times,
                gflops=8 * size * size * dim / median / 1e9,
            )  # fmt: skip
    rates = [2 * GEMM**3 / s / 1e9 for s in gemm_seconds]
    for row in results:
        if "gflops" in row:
            row["gemm_share"] = row["gflops"] / statistics.median(rates)
    return results, rates


def _unit_rows(rng: np.random.Generator, rows: int, dim: int, dtype: str) -> Array:
    z = rng.standard_normal((rows, dim))
    return (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(DTYPES[dtype])


def _seconds(run: Callable[[], Any]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _memory(run: Callable[[], Any]) -> dict[str, int | None]:
    """Bytes beyond the inputs in one call: what NumPy allocates, and what the process grows by."""
    SPARES.clear()  # what a first call needs
    tracemalloc.start()
    run()
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    SPARES.clear()
    return_freed_memory()
    measured, before = reset_peak(), resident()
    run()
    peak = peak_resident()
    known = measured and peak is not None and before is not None
    return {
        "numpy_peak_bytes": allocated,
        "rss_growth_bytes": max(0, (peak or 0) - (before or 0)) if known else None,
    }


def _reference(kind: str, features: Sequence[Array]) -> Outcome:
    from .. import reference

    solved = getattr(reference, kind)(*features, scale=1 / TEMPERATURE)
    gradients = (solved.grads[name] for name in LOSSES[kind].arguments)
    return solved.loss, [g for g in gradients if g is not None]


def _errors(outcome: Outcome, reference: Outcome | None) -> dict[str, float]:
    """Relative errors: of the loss, and the largest ||g - g_ref|| / ||g_ref|| of a gradient."""
    if reference is None or not outcome[1]:
        return {}
    gradients = zip(outcome[1], reference[1], strict=True)
    return {
        "loss_error": abs(outcome[0] - reference[0]) / abs(reference[0]),
        "gradient_error": max(
            float(np.linalg.norm(g.astype(np.float64) - r) / np.linalg.norm(r))
            for g, r in gradients
        ),
    }


def _print(report: dict[str, Any]) -> None:
    settings, rates = report["settings"], report["gemm"]["gflops"]
    table = Table(
        title=f"{settings['loss']} loss and gradient, {settings['dtype']}, width {settings['dim']}",
        title_justify="left",
    )
    for heading in (
        "rows", "method", "median ms", "min ms", "spread", "NumPy MiB", "RSS MiB", "GFLOP/s",
        "of gemm", "loss err", "grad err",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "method" else "right")
    skipped = []
    for row in report["results"]:
        if "skipped" in row:
            skipped.append(f"{row['size']} {row['method']}: {row['skipped']}")
            continue
        table.add_row(
            f"{row['size']}",
            row["method"],
            f"{1e3 * row['median_s']:.1f}",
            f"{1e3 * row['min_s']:.1f}",
            f"{(row['max_s'] - row['min_s']) / row['median_s']:.0%}",
            *(
                "-" if row[key] is None else f"{row[key] / 2**20:.1f}"
                for key in ("numpy_peak_bytes", "rss_growth_bytes")
            ),
            f"{row['gflops']:.0f}",
            f"{row['gemm_share']:.0%}",
            *(f"{row[key]:.0e}" if key in row else "-" for key in ("loss_error", "gradient_error")),
        )
    console = stdout()
    console.print(table)
    for line in skipped:
        console.print(f"skipped {line}")
    console.print(f"matrix product of {GEMM} rows: median {statistics.median(rates):.0f} GFLOP/s")
    console.print(f"{report['device']}; {machine.describe_blas(report['blas'])}")
    console.print(f"workspace {human(settings['workspace_bytes'])}, {settings['repeat']} rounds")
    for name, value in report["environment"].items():
        console.print(f"{name}={value}")


def _figure(figures: Any, report: dict[str, Any]) -> Any:
    """Time and memory against the batch, logarithmic."""
    figure = figures.Figure(figsize=(11, 5), layout="constrained")
    settings = report["settings"]
    figure.suptitle(
        f"{settings['loss']} loss and gradient, {settings['dtype']}, width {settings['dim']}\n"
        f"{report['device']}; {machine.describe_blas(report['blas'])}",
        fontsize=9,
    )
    times, memory = figure.subplots(1, 2)
    measured = [row for row in report["results"] if "skipped" not in row]
    for method in dict.fromkeys(row["method"] for row in measured):
        rows = sorted(
            (row for row in measured if row["method"] == method), key=lambda row: row["size"]
        )
        size = [row["size"] for row in rows]
        times.plot(size, [row["median_s"] for row in rows], "o-", label=method)
        peaks = [row["numpy_peak_bytes"] or row["rss_growth_bytes"] or np.nan for row in rows]
        memory.plot(size, [peak / 2**20 for peak in peaks], "o-", label=method)
    for axes, label in ((times, "time (s)"), (memory, "peak memory beyond inputs (MiB)")):
        axes.set(xlabel="rows in the batch", ylabel=label, xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        if measured:
            axes.legend()
    return figure
