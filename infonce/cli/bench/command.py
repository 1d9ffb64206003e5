"""`infonce bench`: methods and sizes side by side, on this machine, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from click.core import ParameterSource
from rich import box
from rich.table import Table

from ...checks.validation import human
from ...spec import LOSSES
from .. import machine
from ..common import (
    UNITS_HELP,
    Bytes,
    File,
    List,
    LossByOption,
    check_destination,
    one_line_errors,
    optional,
    progress_bar,
    stdout,
    to_json,
    written_whole,
)
from . import contenders_cpu, contenders_gpu, measure
from .cpu import Host
from .gpu import Device
from .measure import DTYPES, TEMPERATURE, Bench, Case

SIZES, FULL_SIZES = "1024,2048,4096", "1024,4096,8192"
REPEAT, FULL_REPEAT = 3, 5


def _size(text: str) -> int:
    """A number of rows: even, for the two views of nt_xent and the classes of sup_con."""
    size = int(text) if text.isdecimal() else 0
    if size < 2 or size % 2:
        raise ValueError(
            f"expected even numbers of rows from 2, as in {SIZES}, got {text!r} among them"
        )
    return size


@click.command(cls=LossByOption)
@click.option("--gpu", is_flag=True, help="Measure on the current GPU instead of the CPU.")
@click.option(
    "--sizes", type=List(_size), default=SIZES, help="Numbers of rows, separated by commas."
)
@click.option("--dim", type=click.IntRange(1), default=256, help="Width of the features.")
@click.option(
    "--loss", "kind", type=click.Choice(list(LOSSES)), default="clip", help="Loss to measure."
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), default="float32", help="Dtype of the features."
)
@click.option(
    "--workspace",
    type=Bytes(),
    default="256MiB",
    help=f"Upper limit of temporary memory of fused and tiled; {UNITS_HELP}.",
)
@click.option("--repeat", type=click.IntRange(1), default=REPEAT, help="Number of timed rounds.")
@click.option(
    "--full",
    is_flag=True,
    help=f"--sizes {FULL_SIZES} --repeat {FULL_REPEAT}: minutes instead of half a minute on a CPU.",
)
@click.option(
    "--methods",
    type=List(str),
    help="Names separated by commas; by default all that are available.",
)
@click.option(
    "--output",
    type=File(),
    help="Write the measurements to this JSON file, or overwrite it.",
)
@click.option(
    "--plot",
    type=File(),
    help="Write a plot to this PNG file, or overwrite it.",
)
def bench(
    gpu: bool,
    sizes: list[int],
    dim: int,
    kind: str,
    dtype: str,
    workspace: int,
    repeat: int,
    full: bool,
    methods: list[str] | None,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Time and memory of loss and gradient, methods side by side.

    products: only the matrix products of loss and gradient, as a yardstick. numpy and torch:
    textbook code with the full matrix of logits. torch.compile: the same code compiled. panels: a
    loop over some rows of the matrix at a time. naive, fused and tiled: the methods of infonce.
    captured: a call of infonce as a CUDA graph.

    All methods run once in each round, after a warm-up, so that a slow minute hits all of them. A
    size is printed as soon as it is measured.

    GFLOP/s counts the operations of the matrix products, 8 N N D for clip, even if more or fewer
    are executed. "of gemm" compares it with a large matrix product of the same rounds. Errors are
    relative to float64.
    """
    known = contenders_gpu.METHODS if gpu else contenders_cpu.METHODS
    for method in methods or ():
        if method not in known:
            raise click.BadParameter(
                f"expected some of {', '.join(known)}{' with --gpu' * gpu}, got {method!r}",
                param_hint="--methods",
            )
    figures = optional("matplotlib.figure", "plot") if plot else None
    for path in (output, plot):
        if path is not None:
            check_destination(path)
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        raise click.UsageError(f"--output, --plot: expected two files, got {output} twice")
    with one_line_errors():
        place: Bench = Device(dtype) if gpu else Host(dtype)
    if full:
        source = click.get_current_context().get_parameter_source
        if source("sizes") is ParameterSource.DEFAULT:
            sizes = [int(size) for size in FULL_SIZES.split(",")]
        if source("repeat") is ParameterSource.DEFAULT:
            repeat = FULL_REPEAT
    settings = {
        "loss": kind, "dim": dim, "dtype": dtype, "temperature": TEMPERATURE,
        "workspace_bytes": workspace, "repeat": repeat,
    }  # fmt: skip
    results = []
    unread: OSError | None = None  # nobody reads the tables: the files are written nevertheless
    for size in sizes:
        case = Case(LOSSES[kind], size, dim, dtype, workspace=workspace)
        with progress_bar() as progress:
            rows = measure.compare(
                place, case, methods or place.methods, repeat, progress or (lambda *_: None)
            )
        results += rows
        try:
            _print_size(settings, rows)
        except OSError as error:
            unread = error
    report = measure.report(place, settings, results)
    is_measured = not all("skipped" in row for row in results)
    if output is not None and is_measured:
        with written_whole(output) as temporary:
            temporary.write_text(to_json(report) + "\n")
    if plot is not None and is_measured:
        with written_whole(plot) as temporary:
            _figure(figures, report).savefig(temporary, format="png", dpi=120)
    if unread is not None:
        raise unread
    _print_facts(report)
    if not is_measured:
        raise click.ClickException("nothing was measured: every contender was skipped")


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # key of a row -> heading, format
    "method": ("method", str),
    "median_s": ("median ms", lambda s: f"{1e3 * s:.4g}"),
    "min_s": ("min ms", lambda s: f"{1e3 * s:.4g}"),
    "spread": ("spread", lambda share: f"{share:.0%}"),
    "wall_s": ("wall ms", lambda s: f"{1e3 * s:.4g}"),
    "numpy_peak_bytes": ("NumPy MiB", lambda size: f"{size / 2**20:.1f}"),
    "rss_growth_bytes": ("RSS MiB", lambda size: f"{size / 2**20:.1f}"),
    "peak_bytes": ("peak MiB", lambda size: f"{size / 2**20:.1f}"),
    "gflops": ("GFLOP/s", lambda rate: f"{rate:.0f}"),
    "gemm_share": ("of gemm", lambda share: f"{share:.0%}"),
    "loss_error": ("loss err", lambda error: f"{error:.0e}"),
    "gradient_error": ("grad err", lambda error: f"{error:.0e}"),
}


def _print_size(settings: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The contenders at one size."""
    table = Table(
        title=f"{settings['loss']} loss and gradient, {settings['dtype']} "
        f"{results[0]['size']} x {settings['dim']}",
        title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False,  # in 80 columns
    )  # fmt: skip
    measured = [dict(row) for row in results if "skipped" not in row]
    for row in measured:
        row["spread"] = (row["max_s"] - row["min_s"]) / row["median_s"]
    columns = [key for key in COLUMNS if any(key in row for row in measured)]
    for key in columns:
        heading = COLUMNS[key][0].replace(" ", "\n")
        justify: Literal["left", "right"] = "left" if key == "method" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in measured:
        table.add_row(
            *("-" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in columns)
        )
    console = stdout(table)
    if measured:
        console.print(table)
    for row in results:
        if "skipped" in row:
            console.print(f"skipped {row['size']} {row['method']}: {row['skipped']}")
    console.print()


def _print_facts(report: dict[str, Any]) -> None:
    """The rate of the large matrix product, the machine, and the settings."""
    settings, rates = report["settings"], report["gemm"]["gflops"]
    console = stdout()
    console.print(
        f"matrix product of {report['gemm']['size']} rows: median "
        f"{statistics.median(rates):.0f} GFLOP/s"
    )
    console.print(_place(report))
    console.print(f"workspace {human(settings['workspace_bytes'])}, {settings['repeat']} rounds")
    for name, value in report["environment"].items():
        console.print(f"{name}={value}")


def _place(report: dict[str, Any]) -> str:
    """The device, and what its products are computed by."""
    if "blas" in report:
        return f"{report['device']}; {machine.describe_blas(report['blas'])}"
    return f"{report['device']}; driver {report['gpu']['driver']}, CUDA {report['gpu']['cuda']}"


def _figure(figures: Any, report: dict[str, Any]) -> Any:
    """Time and memory against the batch, logarithmic."""
    figure = figures.Figure(figsize=(11, 5), layout="constrained")
    settings = report["settings"]
    figure.suptitle(
        f"{settings['loss']} loss and gradient, {settings['dtype']}, width {settings['dim']}\n"
        f"{_place(report)}",
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
        keys = ("peak_bytes", "numpy_peak_bytes", "rss_growth_bytes")
        peaks = [next((row[key] for key in keys if row.get(key)), np.nan) for row in rows]
        memory.plot(size, [peak / 2**20 for peak in peaks], "o-", label=method)
    for axes, label in ((times, "time (s)"), (memory, "peak memory beyond inputs (MiB)")):
        axes.set(xlabel="rows in the batch", ylabel=label, xscale="log", yscale="log")
        sizes = sorted({row["size"] for row in measured})
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45 * (len(sizes) > 4))
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
        if measured:
            axes.legend()
    return figure
