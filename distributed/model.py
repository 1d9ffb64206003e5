"""How long a call over ranks takes: `python -m infonce.distributed.model`. See cost.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from infonce.cli import common

from .cost import (
    NVLINK,
    Machine,
    hidden_from,
    memory,
    predict,
)


@click.command()
@click.option("--dim", type=click.IntRange(1), default=512, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=32768, show_default=True, help="A GPU.")
@click.option("--rate", type=float, default=Machine.rate / 1e12, show_default=True,
              help="TFLOP/s of blocks.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Draw a picture.")
def main(dim: int, rows: int, rate: float, output: Path | None) -> None:
    """Predict time and efficiency of the ring on 1 to 1024 GPUs, 8 a host."""
    if rate <= 0:
        raise click.UsageError("--rate: expected a positive number")
    machine = Machine(rate=rate * 1e12)
    counts = [2**i for i in range(11)]
    table = Table(title=f"clip, {rows} rows a GPU, width {dim}, bfloat16, {rate:g} TFLOP/s",
                  title_justify="left")  # fmt: skip
    for heading in ("GPUs", "batch", "one ring (ms)", "efficiency", "two levels (ms)",
                    "efficiency", "memory a GPU"):  # fmt: skip
        table.add_column(heading, justify="right")
    for n in counts:
        one, two = (predict(rows, dim, n, machine, level) for level in (False, True))
        table.add_row(str(n), str(n * rows), f"{1e3 * one.seconds:.2f}", f"{one.efficiency:.1%}",
                      f"{1e3 * two.seconds:.2f}", f"{two.efficiency:.1%}",
                      common.human(memory(rows, dim)) if n > 2 else "")  # fmt: skip
    console = common.stdout()
    console.print(table)
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
