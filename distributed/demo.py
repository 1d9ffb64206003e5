"""`mpirun -n 2 python -m infonce.distributed.demo`: one batch over ranks.

Trains the digits demo with the batch spread over the ranks. In every tenth step, compares loss and
gradients with one process that has all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
import numpy as np
from infonce.distributed import losses as distributed
from infonce.distributed.communicators.base import TIMEOUT, Communicator
from infonce.distributed.communicators.mpi import connect
from infonce.distributed.schedule import EXCHANGES
from threadpoolctl import threadpool_limits

import infonce
from infonce.cli import common
from infonce.cli.demo import HELD_OUT, LEARNING_RATE, Halves

Array = Any
BATCH = 479  # pairs; a prime number, so the shards of ranks differ in size


def exchange_options(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator: the command's options that say where arrays are, and how they travel.

    benchmarks/ranks/step.py has the same options.
    """
    for option in (
        click.option("--timeout", type=click.FloatRange(0, min_open=True), default=TIMEOUT,
                     show_default=True, help="Seconds to wait for other ranks."),
        click.option("--workspace", type=common.Bytes(), default=None,
                     help="Most bytes of temporary memory, such as 256MiB."),
        click.option("--exchange", type=click.Choice(EXCHANGES), default="auto", show_default=True),
        click.option("--transport", default="auto", show_default=True),
        click.option("--offload", is_flag=True, help="With --gpu: features stay in host memory."),
        click.option("--gpu", is_flag=True, help="CuPy arrays, with one GPU for each rank."),
    ):  # fmt: skip
        command = option(command)
    return command


def make_ranks(gpu: bool, options: dict[str, Any]) -> Communicator:
    """The communicator of all ranks. With `gpu`, makes this rank's GPU the current one."""
    try:
        ranks = connect()
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    ranks.timeout = options["timeout"]
    if gpu:
        cupy = common.optional("cupy", "cuda13")
        cupy.cuda.Device(ranks.rank % cupy.cuda.runtime.getDeviceCount()).use()
    elif options["offload"]:
        raise click.UsageError("--offload: expected --gpu with it")
    return ranks


@click.command()
@exchange_options
@click.option("--dim", type=click.IntRange(1), default=64, show_default=True,
              help="Width of the embeddings.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True)
def main(gpu: bool, dim: int, steps: int, **options: Any) -> None:
    """Train on digits, with one batch over ranks."""
    ranks = make_ranks(gpu, options)
    with common.one_line_errors():
        train_on_digits(ranks, gpu and not options["offload"], dim, steps, options)


def train_on_digits(
    ranks: Communicator, on_gpu: bool, dim: int, steps: int, options: dict[str, Any]
) -> None:
    """Train two encoders, the same on every rank, and print the result on rank 0.

    Each rank encodes its share of every batch, and computes the loss of the whole batch.
    """
    rng = np.random.default_rng(0)
    halves = Halves(common.optional("sklearn.datasets", "demo").load_digits(), rng, dim)
    loss = {"temperature": 0.1, "normalize": True}
    before, worst, losses = halves.evaluate(10.0), [0.0, 0.0, 0.0], []
    bar = common.progress_bar() if ranks.rank == 0 else nullcontext(None)
    with threadpool_limits(1, user_api="blas"), bar as progress:
        for step in range(steps):
            chosen = rng.permutation(len(halves.left))[:BATCH]
            share = np.array_split(chosen, ranks.size)[ranks.rank]
            # float64: differences from one process above 1e-9 are then no rounding errors
            features = [z.astype(float) for z in halves.forward(share)]
            arrays = features
            if on_gpu:
                import cupy

                arrays = list(map(cupy.asarray, features))
            out = distributed.clip_loss_and_grad(*arrays, **loss, **options)
            grads = [g.get() if on_gpu else g for g in (out.grads.image, out.grads.text)]
            if step % 10 == 0:
                differences = compare_with_one_process(ranks, features, grads, out, loss)
                worst = [max(a, b) for a, b in zip(worst, differences, strict=True)]
            losses.append(float(out.loss))
            # Gradients of the parameters: the sum over ranks is the gradient of the whole batch.
            # Ranks are added in their order, so all ranks get the same bits
            own_parts = halves.backward([dz.astype(np.float32) for dz in grads])
            parts_by_rank = ranks.allgather([g.astype(float) for g in own_parts])
            gradients = [
                sum(parts).astype(np.float32) for parts in zip(*parts_by_rank, strict=True)
            ]
            halves.adam.update(gradients, LEARNING_RATE)
            if progress is not None:
                progress("training", step + 1, steps)
    after = halves.evaluate(10.0)
    if ranks.rank:
        return
    click.echo(
        f"{ranks.size} ranks, {BATCH} pairs a step, {steps} steps: loss {losses[0]:.4f} -> "
        f"{losses[-1]:.4f}, right half found (top-1 of {HELD_OUT} held-out pairs) "
        f"{before.top1[0]:.1%} -> {after.top1[0]:.1%}"
    )
    click.echo(
        "against one process that has all rows, largest relative difference: "
        f"loss {worst[0]:.1e}, feature gradients {worst[1]:.1e}, d scale {worst[2]:.1e}"
    )
    if not max(worst) < 1e-9:
        raise click.ClickException("that is more than rounding")


def compare_with_one_process(
    ranks: Communicator, features: list[Array], grads: list[Array], out: Any, loss: dict[str, Any]
) -> list[float]:
    """The relative differences from one process with all rows: loss, feature gradients, d scale."""
    all_features, all_grads = (
        [np.concatenate(shards) for shards in zip(*ranks.allgather(values), strict=True)]
        for values in (features, grads)
    )
    one_process = infonce.clip_loss_and_grad(*all_features, **loss)
    return [
        abs(float(out.loss) / float(one_process.loss) - 1),
        max(
            float(np.linalg.norm(g - w) / np.linalg.norm(w))
            for g, w in zip(all_grads, one_process.grads[:2], strict=True)
        ),
        abs(float(out.grads.scale) / float(one_process.grads.scale) - 1),
    ]


if __name__ == "__main__":
    main(prog_name="python -m infonce.distributed.demo")
