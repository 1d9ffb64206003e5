"""`mpirun -n 2 python -m infonce.distributed.demo`: one batch over ranks.

Trains the digits demo with the batch spread over the ranks, and compares loss and gradients with
one process that has all rows. With `--batch`, times the loss of random features instead.
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
from infonce.distributed.communicators.base import TIMEOUT, Communicator
from infonce.distributed.communicators.mpi import connect
from infonce.distributed.schedule import EXCHANGES
from rich.table import Table
from threadpoolctl import threadpool_limits

import infonce
from infonce.cli import common
from infonce.cli.demo import HELD_OUT, LEARNING_RATE, WEIGHT_DECAY, Adam, Encoder

Array = Any
DTYPES = ("bfloat16", "float16", "float32", "float64")


@click.command()
@click.option("--gpu", is_flag=True, help="CuPy arrays, a GPU a rank.")
@click.option("--offload", is_flag=True, help="With --gpu: features stay in host memory.")
@click.option("--batch", type=click.IntRange(1), help="Time random features: rows over all ranks.")
@click.option("--dim", type=click.IntRange(1), default=None, help="Width of the features.")
@click.option("--dtype", type=click.Choice(DTYPES), default=None, help="Of random features.")
@click.option("--steps", type=click.IntRange(1), default=None, help="Steps, or timed repeats.")
@click.option("--transport", default="auto", show_default=True)
@click.option("--exchange", type=click.Choice(EXCHANGES), default="auto", show_default=True)
@click.option("--workspace", type=common.Bytes(), default=None)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=TIMEOUT,
              show_default=True, help="Seconds to wait for other ranks.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), help="Also write what was timed: JSON.")
def main(
    gpu: bool, offload: bool, batch: int | None, dim: int | None, dtype: str | None,
    steps: int | None, transport: str, exchange: str, workspace: int | None, timeout: float,
    output: Path | None,
) -> None:  # fmt: skip
    """One batch over ranks: train on digits, or with --batch time random features."""
    try:
        ranks = connect()
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    ranks.timeout = timeout
    if gpu:
        cupy = common.optional("cupy", "cuda13")
        cupy.cuda.Device(ranks.rank % cupy.cuda.runtime.getDeviceCount()).use()
    elif offload:
        raise click.UsageError("--offload: expected --gpu with it")
    options = {"transport": transport, "exchange": exchange, "timeout": timeout,
               "workspace": workspace, "offload": offload}  # fmt: skip
    with common.one_line_errors():
        if batch is None:
            digits(ranks, gpu and not offload, dim or 64, steps or 60, options)
            return
        if output is not None and ranks.rank == 0:
            common.check_destination(output)
        record = timing(
            ranks, gpu, batch, dim or 512, dtype or ("bfloat16" if gpu else "float32"), steps or 5,
            options,
        )  # fmt: skip
        if record is not None and output is not None:
            output.write_text(common.to_json(record) + "\n")


# --- digits ---------------------------------------------------------------------------------------


def digits(ranks: Communicator, gpu: bool, dim: int, steps: int, options: dict[str, Any]) -> None:
    """Two encoders, the same on every rank; each rank sees its share of every batch."""
    images = common.optional("sklearn.datasets", "demo").load_digits().images / 16
    rng = np.random.default_rng(0)
    images = images[rng.permutation(len(images))].astype(np.float32)
    images -= images[HELD_OUT:].mean(0)
    halves = [images[:, :, half].reshape(len(images), -1) for half in (slice(4), slice(4, 8))]
    encoders = [Encoder(rng, halves[0].shape[1], dim) for _ in halves]
    adam = Adam([p for e in encoders for p in e.parameters], decay=WEIGHT_DECAY)
    loss = {"temperature": 0.1, "normalize": True}
    train, batch = len(images) - HELD_OUT, 479
    top1 = [retrieval(encoders, halves)]
    worst, losses = [0.0, 0.0, 0.0], []
    bar = common.progress_bar() if ranks.rank == 0 else nullcontext(None)
    with threadpool_limits(1, user_api="blas"), bar as progress:
        for step in range(steps):
            chosen = HELD_OUT + rng.permutation(train)[:batch]
            share = np.array_split(chosen, ranks.size)[ranks.rank]
            # float64: so that the comparison says something
            features = [
                e.forward(h[share]).astype(float) for e, h in zip(encoders, halves, strict=True)
            ]
            out = distributed.clip_loss_and_grad(
                *(on_device(z, gpu) for z in features), **loss, **options
            )
            grads = [to_host(out.grads.image), to_host(out.grads.text)]
            if step % 10 == 0:
                differences = compare(ranks, features, grads, out, loss)
                worst = [max(a, b) for a, b in zip(worst, differences, strict=True)]
            losses.append(float(out.loss))
            mine = [
                g.astype(float) for e, dz in zip(encoders, grads, strict=True)
                for g in e.backward(dz.astype(np.float32))
            ]  # fmt: skip
            # this rank's share of the parameters' gradients: their sum is the whole batch's
            adam.update([g.astype(np.float32) for g in summed(ranks, mine)], LEARNING_RATE)
            if progress is not None:
                progress("training", step + 1, steps)
    top1.append(retrieval(encoders, halves))
    if ranks.rank:
        return
    click.echo(
        f"{ranks.size} ranks, {batch} pairs a step, {steps} steps: loss {losses[0]:.4f} -> "
        f"{losses[-1]:.4f}, right half found (top-1 of {HELD_OUT} held-out pairs) "
        f"{top1[0]:.1%} -> {top1[1]:.1%}"
    )
    click.echo(
        "against one process that has all rows, largest relative difference: "
        f"loss {worst[0]:.1e}, feature gradients {worst[1]:.1e}, d scale {worst[2]:.1e}"
    )
    if not max(worst) < 1e-9:
        raise click.ClickException("that is more than rounding")


def compare(
    ranks: Communicator, features: list[Array], grads: list[Array], out: Any, loss: dict[str, Any]
) -> list[float]:
    """Relative differences from one process: loss, feature gradients, d scale."""
    whole = [np.concatenate(shards) for shards in zip(*gathered(ranks, features), strict=True)]
    spread = [np.concatenate(shards) for shards in zip(*gathered(ranks, grads), strict=True)]
    one = infonce.clip_loss_and_grad(*whole, **loss)
    return [
        abs(float(out.loss) / float(one.loss) - 1),
        max(
            float(np.linalg.norm(g - w) / np.linalg.norm(w))
            for g, w in zip(spread, one.grads[:2], strict=True)
        ),
        abs(float(out.grads.scale) / float(one.grads.scale) - 1),
    ]


def gathered(ranks: Communicator, values: list[Array]) -> list[list[Array]]:
    everyone: list[list[Array]] = ranks.allgather(values)
    return everyone


def summed(ranks: Communicator, values: list[Array]) -> list[Array]:
    """The sum over ranks, in their order: the same everywhere."""
    return [sum(of) for of in zip(*ranks.allgather(values), strict=True)]


def retrieval(encoders: list[Encoder], halves: list[Array]) -> float:
    """Share of held-out left halves whose right half comes first."""
    u, v = (e.forward(h[:HELD_OUT]) for e, h in zip(encoders, halves, strict=True))
    out = infonce.clip_loss_and_grad(u, v, scale=10.0, normalize=True, wrt=(), metrics=True)
    assert out.metrics is not None
    return out.metrics.top(1)[0]


def on_device(array: Array, gpu: bool) -> Array:
    if not gpu:
        return array
    import cupy

    return cupy.asarray(array)


def to_host(array: Array) -> Array:
    return array if isinstance(array, np.ndarray) else array.get()


# --- timing ---------------------------------------------------------------------------------------


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
        given, into = [z[rows] for z in features], [z[rows] for z in out]
        distributed.clip_loss_and_grad(*given, temperature=0.07, out=into, **options)
        return time.perf_counter() - began

    call(slice(64))  # compiles
    if on_gpu and repeats > 1:  # a single step may take minutes: once is enough
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
    useful = 8.0 * batch * batch * dim / ranks.size / step
    table = Table(title=f"clip, {batch} x {dim} {dtype} over {ranks.size} ranks"
                        f"{', features in host memory' * options['offload']}",
                  title_justify="left", show_header=False)  # fmt: skip
    table.add_row("step, median of " + str(repeats), f"{1e3 * step:.2f} ms")
    table.add_row("useful rate of a rank", f"{useful / 1e12:.3g} TFLOP/s")
    peak = max(p for _, p, _, _ in everyone)
    table.add_row("memory of a rank above shards and gradients", common.human(peak))
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
    main(prog_name="python -m infonce.distributed.demo")
