"""Time one batch of random features over ranks: `mpirun -n 2 python benchmarks/ranks/step.py`.

With `--gpu`, each rank has a GPU, if there are enough. With `--offload` too, features stay in host
memory.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
from infonce.distributed import losses as distributed
from infonce.distributed.communicators.base import Communicator
from infonce.distributed.demo import exchange_options, make_ranks
from rich.table import Table

from infonce.checks import validation
from infonce.cli import common

Array = Any
DTYPES = ("bfloat16", "float16", "float32", "float64")


@click.command()
@exchange_options
@click.option("--batch", type=click.IntRange(1), default=16384, show_default=True,
              help="Rows over all ranks.")  # fmt: skip
@click.option("--dim", type=click.IntRange(1), default=512, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default=None,
              help="bfloat16 with --gpu, else float32.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Repeats.")
@click.option("--output", type=click.Path(path_type=Path), help="Also write what was timed: JSON.")
def main(
    gpu: bool, batch: int, dim: int, dtype: str | None, steps: int, output: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Time CLIP's loss and gradients of random unit rows over ranks."""
    ranks = make_ranks(gpu, options)
    with common.one_line_errors():
        if output is not None and ranks.rank == 0:
            common.check_destination(output)
        record = timing(
            ranks, gpu, batch, dim, dtype or ("bfloat16" if gpu else "float32"), steps, options
        )
        if record is not None and output is not None:
            output.write_text(common.to_json(record) + "\n")


def timing(
    ranks: Communicator, gpu: bool, batch: int, dim: int, dtype: str, repeats: int,
    options: dict[str, Any],
) -> dict[str, Any] | None:  # fmt: skip
    """CLIP loss and gradients of random unit rows: time, memory, rate, communication. Rank 0 prints
    and returns them."""
    import ml_dtypes

    cupy: Any = common.optional("cupy", "cuda13") if gpu else None
    on_gpu = gpu and not options["offload"]
    xp: Any = cupy if on_gpu else np
    rows = len(range(ranks.rank, batch, ranks.size))
    rng = xp.random.default_rng(ranks.rank)

    def unit() -> Array:
        z = rng.standard_normal((rows, dim), dtype=xp.float32)
        z /= xp.linalg.norm(z, axis=1, keepdims=True)
        return z.astype(getattr(ml_dtypes, dtype, dtype))

    features = unit(), unit()
    out = [xp.empty_like(z) for z in features]
    pool = cupy.get_default_memory_pool() if gpu else None

    def call(rows: slice = slice(None)) -> float:
        ranks.allgather(None)  # start together
        began = time.perf_counter()
        call_features, into = [z[rows] for z in features], [z[rows] for z in out]
        distributed.clip_loss_and_grad(*call_features, temperature=0.07, out=into, **options)
        return time.perf_counter() - began

    call(slice(64))  # compiles
    if on_gpu and repeats > 1:  # a second, whole warm-up; a single step may take minutes
        call()
    if pool is not None:
        pool.free_all_blocks()
        before = pool.used_bytes()
    else:
        common.return_freed_memory()
        before = common.resident() or 0
        common.reset_peak()
        call()
    moving, waited = ranks.moving, ranks.waited
    seconds = []
    transfers: Any = nullcontext(lambda: (ranks.moving - moving, ranks.waited - waited))
    if on_gpu:
        from infonce.distributed.transports.gpu import measuring

        transfers = measuring(ranks)
    progress_bar: Any = common.progress_bar() if ranks.rank == 0 else nullcontext(None)
    with progress_bar as progress, transfers as so_far:
        for i in range(repeats):
            seconds.append(call())
            if progress is not None:
                progress("timing", i + 1, repeats)
        moving, waited = so_far()
    peak = (pool.total_bytes() if pool is not None else common.peak_resident() or 0) - before
    everyone = ranks.allgather((sorted(seconds)[repeats // 2], peak, moving, waited))
    if ranks.rank:
        return None
    step = max(s for s, _, _, _ in everyone)
    moving, waited = (max(e[i] for e in everyone) / repeats for i in (2, 3))
    useful = 8.0 * batch * batch * dim / ranks.size / step  # four products of 2 B B D operations
    table = Table(title=f"clip, {batch} x {dim} {dtype} over {ranks.size} ranks"
                        f"{', features in host memory' * options['offload']}",
                  title_justify="left", show_header=False)  # fmt: skip
    table.add_row("step, median of " + str(repeats), f"{1e3 * step:.2f} ms")
    table.add_row("useful rate of a rank", f"{useful / 1e12:.3g} TFLOP/s")
    peak = max(p for _, p, _, _ in everyone)
    table.add_row("memory of a rank above shards and gradients", validation.human(peak))
    exposed = waited / step if step else math.nan
    table.add_row("transfers under way", f"{1e3 * moving:.2f} ms a step")
    table.add_row("of that not hidden", f"{1e3 * waited:.2f} ms, {exposed:.1%} of a step")
    common.stdout().print(table)
    return {
        "batch": batch, "dim": dim, "dtype": dtype, "ranks": ranks.size,
        "offload": options["offload"], "exchange": options["exchange"], "step_s": step,
        "flops_a_rank": useful, "memory_bytes": peak, "transfers_s": moving, "not_hidden_s": waited,
    }  # fmt: skip


if __name__ == "__main__":
    main()
