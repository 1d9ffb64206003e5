"""Predict the time of calls over ranks by the model of `infonce.distributed.cost`.

python benchmarks/ranks/model.py [--dim 512] [--rows 32768] [--rate 610] [--output picture.png]
"""

from __future__ import annotations

from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import click
import numpy as np
from infonce.distributed.cost import (
    DK_BYTES,
    FEATURE_BYTES,
    NVLINK,
    Machine,
    fastest,
    gather_bytes,
    hidden_from,
    hierarchical_bytes,
    predict_gather,
    predict_hierarchical,
    predict_memory,
    predict_ring,
)
from rich.table import Table

from infonce.checks import validation
from infonce.cli import common


@click.command()
@click.option("--dim", type=click.IntRange(1), default=512, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=32768, show_default=True, help="A GPU.")
@click.option("--rate", type=float, default=Machine.rate / 1e12, show_default=True,
              help="TFLOP/s of blocks.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Draw a picture.")
def main(dim: int, rows: int, rate: float, output: Path | None) -> None:
    """Predict time and efficiency of the exchanges on 1 to 1024 GPUs, 8 a node."""
    if rate <= 0:
        raise click.UsageError("--rate: expected a positive number")
    machine = Machine(rate=rate * 1e12)
    counts = [2**i for i in range(11)]
    table = Table(title=f"clip, {rows} rows a GPU, width {dim}, bfloat16, {rate:g} TFLOP/s",
                  title_justify="left")  # fmt: skip
    for heading in ("GPUs", "batch", "gather (ms)", "efficiency", "ring (ms)", "efficiency",
                    "hierarchical (ms)", "efficiency", "memory of a ring"):  # fmt: skip
        table.add_column(heading, justify="right")
    for n in counts:
        exchanges = [predict_gather, predict_ring]
        exchanges += [predict_hierarchical] * (n > machine.node_gpus)
        steps = [predict(rows, dim, n, machine) for predict in exchanges]
        times = [text for s in steps for text in (f"{1e3 * s.seconds:.2f}", f"{s.efficiency:.1%}")]
        times += [""] * (6 - len(times))
        table.add_row(str(n), str(n * rows), *times,
                      validation.human(predict_memory(rows, dim)) if n > 2 else "")  # fmt: skip
    console = common.stdout()
    console.print(table)
    console.print(_exchanges(dim, machine, counts[1:]))
    for name, link in (("NVLink as measured", machine.inside), ("NVLink, 300 GB/s", NVLINK),
                       ("network, 400 Gb/s a GPU", machine.across)):  # fmt: skip
        console.print(f"hidden from {hidden_from(dim, link, machine):.0f} rows a GPU: {name}")
    rows_of_node = hidden_from(dim, machine.across, machine)
    console.print(
        "hierarchical, over the network: from "
        f"{rows_of_node / machine.node_gpus:.0f} rows a GPU (latency aside)"
    )
    if output is not None:
        common.check_destination(output)
        with common.one_line_errors(), common.written_whole(output) as temporary:
            _figure(dim, machine, counts).savefig(temporary, format="png", dpi=120)
        console.print(f"wrote {output}")


def _exchanges(dim: int, machine: Machine, counts: list[int]) -> Table:
    """The rows a GPU up to which an exchange is the fastest; how many have room."""
    table = Table(title=f"fastest up to so many rows a GPU, width {dim}; beyond: the ring",
                  title_justify="left")  # fmt: skip
    nodes = f"{machine.node_gpus} a node, 400 Gb/s"
    for heading in ("GPUs", "gather: NVLink", f"gather: {nodes}", "hierarchical: the same",
                    "gather in 4 GiB", "hierarchical in 4 GiB"):  # fmt: skip
        table.add_column(heading, justify="right")
    for n in counts:
        one_host = replace(machine, node_gpus=n)
        rows = [fastest_up_to("gather", dim, n, cluster) for cluster in (one_host, machine)]
        rows.append(fastest_up_to("hierarchical", dim, n, machine))
        words = [{np.inf: "any", 0.0: "never"}.get(b, f"{b:.0f}") for b in rows]
        fits = [rows_in(2**32, dim, n), rows_in(2**32, dim, n, min(n, machine.node_gpus))]
        table.add_row(str(n), *words, *(f"{b:.0f}" for b in fits))
    return table


def _figure(dim: int, machine: Machine, counts: list[int]) -> Any:
    """Efficiency over rows a GPU, for some numbers of GPUs, of the ring and over nodes."""
    figure = common.optional("matplotlib.figure", "plot").Figure((9, 4), layout="constrained")
    rows = 2.0 ** np.arange(8, 18.01, 0.25)
    exchanges = {"ring": predict_ring, "hierarchical": predict_hierarchical}
    for axes, (name, predict) in zip(
        figure.subplots(1, 2, sharey=True), exchanges.items(), strict=True
    ):
        for n in (8, 64, 1024):
            efficiency = [predict(b, dim, n, machine).efficiency for b in rows]
            axes.semilogx(rows, efficiency, base=2, label=f"{n} GPUs")
        axes.set(xlabel="rows a GPU", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel(f"share of the step that computes (D = {dim}, bfloat16)")
    return figure


def fastest_up_to(name: str, dim: int, ranks: int, machine: Machine | None = None) -> float:
    """Rows on each GPU up to which this is the fastest exchange, from the fewest for which it is;
    0: for none; infinity: up to 2^20 rows, the most that are tried."""
    rows = 2.0 ** np.arange(6, 20.01, 0.125)
    others = dropwhile(lambda b: fastest(b, dim, ranks, machine) != name, rows)
    batches = list(takewhile(lambda b: fastest(b, dim, ranks, machine) == name, others))
    return np.inf if batches and batches[-1] == rows[-1] else float(max(batches, default=0.0))


def rows_in(room: float, dim: int, ranks: int, gpus: int | None = None) -> float:
    """Rows on each GPU whose gathered keys and sums fit `room` bytes: of all ranks, or with `gpus`
    on a node by the hierarchical exchange."""
    # 24: reference, factor and bound of a key (`cost.FACTOR_BYTES`)
    row, shards = (dim * FEATURE_BYTES + 24, dim * DK_BYTES), [1] * ranks
    if gpus is None:
        return room / gather_bytes(shards, *row)
    return room / hierarchical_bytes(shards, gpus, *row)


if __name__ == "__main__":
    main()
