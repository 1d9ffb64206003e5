"""How long a step of the ring takes: `python -m infonce.distributed.model`.

With b rows of each side on each of n GPUs, a call takes n forward steps of one block, 2 b b D
operations, and n backward steps, 6 b b D. While a block is computed the next one is sent:

    step = start + max(operations / rate, latency + bytes / bandwidth)

Forward, keys are sent with their ids and column statistics; backward, with their factors and dK.
The last transfer, of dK to the owner of its keys, overlaps with nothing.

Over hosts a ring of all GPUs is as fast as its slowest link. A ring of two levels goes round inside
the host first, and each GPU sends its block to its peer in the next host once a round: the network
has a whole round for what NVLink sends in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from infonce.kernels.problem import WORKSPACE
from rich.table import Table

from infonce.cli import common


@dataclass(frozen=True)
class Link:
    """The connection of one GPU to the next."""

    latency: float  # seconds
    bandwidth: float  # bytes a second, one way


@dataclass(frozen=True)
class Machine:
    """The parameters of the model. Defaults: benchmarks/results/ring.json, bfloat16, D = 512."""

    rate: float = 610e12  # operations a second, of large blocks
    start: float = 0.28e-3  # seconds a block: launches, and idle multiprocessors at its end
    inside: Link = Link(20e-6, 168e9)  # NVLink, as measured in shifts of 34 to 67 MB
    across: Link = Link(30e-6, 45e9)  # 400 Gb/s a GPU
    gpus: int = 8  # of a host


@dataclass(frozen=True)
class Step:
    """A predicted call, in seconds."""

    seconds: float
    computing: float
    exposed: float  # communication that does not overlap with computation

    @property
    def efficiency(self) -> float:
        return self.computing / self.seconds


NVLINK = Link(20e-6, 300e9)  # large messages
ITEM, DK = 2, 4  # bytes of a feature, and of dK's elements
VECTORS = 300  # bytes a row in vectors: sums, log-sum-exps, factors, positives


def transfer_bytes(rows: float, dim: int) -> tuple[float, float]:
    """Bytes of a forward and of a backward step."""
    keys = rows * dim * ITEM
    return keys + 16 * rows, keys + 24 * rows + rows * dim * DK


def predict(
    rows: float, dim: int, ranks: int, machine: Machine | None = None, two_level: bool = False
) -> Step:
    """One call of clip's loss and gradients with `rows` rows of each side on each of `ranks`."""
    machine = machine or Machine()
    if rows <= 0 or dim < 1 or ranks < 1:
        raise ValueError(f"rows, dim, ranks: expected positive numbers, got {rows}, {dim}, {ranks}")
    hosts = -(-ranks // machine.gpus)
    round_of = ranks / hosts
    slowest = machine.inside if hosts == 1 or two_level else machine.across
    computing, seconds, starts = 0.0, 0.0, 2 * ranks * machine.start
    for share, size in zip((2, 6), transfer_bytes(rows, dim), strict=True):
        block = share * rows * rows * dim / machine.rate
        moving = slowest.latency + size / slowest.bandwidth if ranks > 1 else 0.0
        step = machine.start + max(block, moving)
        if two_level and hosts > 1:
            network = machine.across.latency + size / machine.across.bandwidth
            seconds += hosts * max(round_of * step, network)
        else:
            seconds += ranks * step
        computing += ranks * block
    if ranks > 1:
        home = machine.inside if hosts == 1 else machine.across
        seconds += home.latency + rows * dim * DK / home.bandwidth
    return Step(seconds, computing, seconds - computing - starts)


def memory(
    rows: int, dim: int, workspace: int = WORKSPACE, offload: bool = False
) -> float:  # fmt: skip
    """Bytes on each of three or more GPUs above features and gradients: what a call of clip's loss
    and gradients with `rows` rows of each side takes at most, in 16 bits.

    With `offload` there are no features nor gradients on a GPU.
    """
    if rows <= 0 or dim < 1 or workspace < 1:
        raise ValueError(
            f"rows, dim, workspace: expected positive numbers, got {rows}, {dim}, {workspace}"
        )
    vectors = VECTORS * rows
    if offload:
        panels = rows * dim * (2 * ITEM + 5 * DK) + rows * (rows * ITEM + dim * DK)
        return min(workspace, panels) + vectors
    row = dim * (2 * ITEM + 3 * DK)  # of buffers
    pieces = -(-rows // max(1, workspace // 2 // row))
    piece = -(-rows // pieces)
    block = rows * (piece * ITEM + dim * DK)  # dL/dx of one block, and its share of dQ
    return min(workspace, block) + piece * row + rows * dim * DK + vectors


def hidden_from(dim: int, link: Link, machine: Machine | None = None) -> float:
    """Rows on each GPU from which transfers over `link` hide behind the products."""
    machine = machine or Machine()
    rows = 0.0
    for share, size in zip((2, 6), transfer_bytes(1.0, dim), strict=True):
        # share b b D / rate = latency + size b / bandwidth
        a, b = share * dim / machine.rate, size / link.bandwidth
        rows = max(rows, (b + np.sqrt(b * b + 4 * a * link.latency)) / (2 * a))
    return float(rows)


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
