"""How long a call over ranks takes: `python -m infonce.distributed.model`. See cost.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from infonce.kernels.problem import WORKSPACE
from rich.table import Table

from infonce.cli import common

from .cost import (
    DK,
    ITEM,
    NVLINK,
    VECTORS,
    Link,
    Machine,
    Step,
    gathers_up_to,
    hidden_from,
    memory,
    predict,
    predict_gather,
    ring_from,
    transfer_bytes,
)

__all__ = [
    "DK",
    "ITEM",
    "NVLINK",
    "VECTORS",
    "WORKSPACE",
    "Link",
    "Machine",
    "Step",
    "gathers_up_to",
    "hidden_from",
    "memory",
    "predict",
    "predict_gather",
    "ring_from",
    "transfer_bytes",
]


@click.command()
@click.option("--dim", type=click.IntRange(1), default=512, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=32768, show_default=True, help="A GPU.")
@click.option("--rate", type=float, default=Machine.rate / 1e12, show_default=True,
              help="TFLOP/s of blocks.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Draw a picture.")
def main(dim: int, rows: int, rate: float, output: Path | None) -> None:
    """Predict time and efficiency of both exchanges on 1 to 1024 GPUs, 8 a host."""
    if rate <= 0:
        raise click.UsageError("--rate: expected a positive number")
    machine = Machine(rate=rate * 1e12)
    counts = [2**i for i in range(11)]
    table = Table(title=f"clip, {rows} rows a GPU, width {dim}, bfloat16, {rate:g} TFLOP/s",
                  title_justify="left")  # fmt: skip
    for heading in ("GPUs", "batch", "gather (ms)", "efficiency", "one ring (ms)", "efficiency",
                    "two levels (ms)", "efficiency", "memory of a ring"):  # fmt: skip
        table.add_column(heading, justify="right")
    for n in counts:
        one, two = (predict(rows, dim, n, machine, level) for level in (False, True))
        steps = predict_gather(rows, dim, n, machine), one, two
        times = [text for s in steps for text in (f"{1e3 * s.seconds:.2f}", f"{s.efficiency:.1%}")]
        table.add_row(str(n), str(n * rows), *times,
                      common.human(memory(rows, dim)) if n > 2 else "")  # fmt: skip
    console = common.stdout()
    console.print(table)
    console.print(_exchanges(dim, machine, counts[1:]))
    for name, link in (("NVLink as measured", machine.inside), ("NVLink, 300 GB/s", NVLINK),
                       ("network, 400 Gb/s a GPU", machine.across)):  # fmt: skip
        console.print(f"hidden from {hidden_from(dim, link, machine):.0f} rows a GPU: {name}")
    console.print(
        "in two levels over the network: from "
        f"{hidden_from(dim, machine.across, machine) / machine.gpus:.0f} rows a GPU (latency aside)"
    )
    if output is not None:
        common.check_destination(output)
        with common.one_line_errors(), common.written_whole(output) as temporary:
            _figure(dim, machine, counts).savefig(temporary, format="png", dpi=120)
        console.print(f"wrote {output}")


def _exchanges(dim: int, machine: Machine, counts: list[int]) -> Table:
    """The rows a GPU from which the ring is faster; how many a gather has room for."""
    table = Table(title=f"rows a GPU from which the ring is faster, width {dim}",
                  title_justify="left")  # fmt: skip
    for heading in ("GPUs", "NVLink", "8 a host, 400 Gb/s", "gathered in 4 GiB"):
        table.add_column(heading, justify="right")
    for n in counts:
        one_host = replace(machine, gpus=n)
        rows = [ring_from(dim, n, of) for of in (one_host, machine)]
        words = ["never" if b == np.inf else f"{b:.0f}" for b in rows]
        table.add_row(str(n), *words, f"{gathers_up_to(dim, n, 2**32):.0f}")
    return table


def _figure(dim: int, machine: Machine, counts: list[int]) -> Any:
    """Efficiency over rows a GPU, for some numbers of GPUs, one ring and two levels."""
    figure = common.optional("matplotlib.figure", "plot").Figure((9, 4), layout="constrained")
    rows = 2.0 ** np.arange(8, 18.01, 0.25)
    for axes, two_level in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for n in (8, 64, 1024):
            efficiency = [predict(b, dim, n, machine, two_level).efficiency for b in rows]
            axes.semilogx(rows, efficiency, base=2, label=f"{n} GPUs")
        axes.set(xlabel="rows a GPU", title="two levels" if two_level else "one ring")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel(f"share of the step that computes (D = {dim}, bfloat16)")
    return figure


if __name__ == "__main__":
    main(prog_name="python -m infonce.distributed.model")
