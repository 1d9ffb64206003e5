"""Where the time of a step over ranks goes, between the call and its gradients, on this host.

python benchmarks/ranks/timeline.py [--gpu] [--ranks 2] [--batch 128] [--dim 128] [--exchange auto]
mpiexec -n 2 python benchmarks/ranks/timeline.py ...

A step is `infonce.torch.clip_loss` over a process group of PyTorch, and `backward()`; started by
mpiexec, one call of `infonce.distributed` over MPI. For each part of a step, rank 0 prints how
often it runs, and the least and the median of its time without the parts inside it. On GPUs this is
the time of the host, which queues work and at last waits for it ("wait").
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from infonce.distributed import call, passes, run
from infonce.distributed.communicators.base import Communicator
from infonce.distributed.communicators.mpi import connect, load_mpi
from infonce.kernels.cpu import one_block
from rich.console import Console
from rich.table import Table

import infonce.torch
from infonce import dispatch, distributed
from infonce.arrays import native

REST = "rest: autograd, conversions, errors"


class Timeline:
    """The time of the parts of each step."""

    def __init__(self) -> None:
        # of each finished step: part -> seconds, and part -> number of its runs
        self.steps: list[tuple[dict[str, float], dict[str, int]]] = []
        self.running: list[str] = []
        self.since = 0.0

    def _pass_time(self) -> None:
        """Give the time since the last event to the part that runs."""
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as that of the part."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if not self.running and name != REST:  # before the first step
                return function(*args, **options)
            self._pass_time()
            self.running.append(name)
            try:
                return function(*args, **options)
            finally:
                self._pass_time()
                self.counts[self.running.pop()] += 1

        return timed

    def run(self, step: Callable[[], None]) -> None:
        """One step."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.part(REST, step)()
        self.steps.append((self.seconds, self.counts))

    def table(self, title: str) -> Table:
        """The parts in the order in which they first end."""
        table = Table("part", "runs", "least us", "median us", title=title, title_justify="left")
        totals = [sum(seconds.values()) for seconds, _ in self.steps]
        for name in dict.fromkeys(name for _, counts in self.steps for name in counts):
            times = [1e6 * seconds[name] for seconds, _ in self.steps]
            runs = statistics.median(counts[name] for _, counts in self.steps)
            table.add_row(name, f"{runs:g}", f"{min(times):.0f}", f"{statistics.median(times):.0f}")
        whole = 1e6 * min(totals), 1e6 * statistics.median(totals)
        table.add_row("step", "1", *(f"{value:.0f}" for value in whole))
        return table


def patch(timeline: Timeline, ranks: Communicator) -> None:
    """Time the parts of calls over `ranks`."""
    parts: list[tuple[str, Any, str]] = [
        ("check and compare the calls", call, "agree_on_schedule"),
        ("gather values", type(ranks), "allgather"),
        ("start an exchange", type(ranks), "exchange"),
        ("wait", Communicator, "until"),
        ("passes and exchanges", run, "solve"),
        ("compute a block", passes.PassesOverRanks, "_block"),
        ("gather and compute the whole batch", run, "solve_whole_batch"),
        ("compute one block", one_block, "solve_in_one_block"),
        ("make the result", dispatch, "make_result"),
    ]
    for name, owner, attribute in parts:
        setattr(owner, attribute, timeline.part(name, getattr(owner, attribute)))


def work(rank: int, arguments: argparse.Namespace, size: int, folder: str, over_mpi: bool) -> None:
    """One rank: times the steps; rank 0 prints."""
    device = f"cuda:{rank}" if arguments.gpu else "cpu"
    if arguments.gpu:
        torch.cuda.set_device(rank)
    shape = len(range(rank, arguments.batch, size)), arguments.dim
    dtype = torch.bfloat16 if arguments.gpu else torch.float32
    generator = torch.Generator().manual_seed(rank)
    image, text = (
        torch.nn.functional.normalize(torch.randn(shape, generator=generator))
        .to(device, dtype)
        .requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(14.0, device=device, requires_grad=True)
    options: dict[str, Any] = {"exchange": arguments.exchange}
    if over_mpi:
        arrays = [native(z.detach()) for z in (image, text)]
        ranks = connect()

        def step() -> None:
            distributed.clip_loss_and_grad(*arrays, scale=14.0, **options)
    else:
        from infonce.torch.core.process_group import connect as connect_group

        dist.init_process_group(
            "nccl" if arguments.gpu else "gloo", f"file://{folder}/store", rank=rank,
            world_size=size,
        )  # fmt: skip
        group, ranks = dist.group.WORLD, connect_group()

        def step() -> None:
            infonce.torch.clip_loss(image, text, scale=scale, group=group, **options).backward()
            image.grad = text.grad = scale.grad = None

    step()  # connects and compiles
    timeline = Timeline()
    patch(timeline, ranks)
    for number in range(arguments.warm + arguments.steps):
        if number == arguments.warm:
            timeline.steps.clear()
        ranks.allgather(None)  # begin together
        if arguments.gpu:
            torch.cuda.synchronize()
        timeline.run(step)
    if rank == 0:
        title = f"{arguments.batch} x {arguments.dim} over {size} ranks of " + (
            "MPI" if over_mpi else "a process group"
        )
        Console().print(timeline.table(title))
    ranks.allgather(None)
    if not over_mpi:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--ranks", type=int, default=2, help="unless mpiexec starts them")
    parser.add_argument("--batch", type=int, default=128, help="rows over all ranks")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--warm", type=int, default=50, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    try:
        ranks = load_mpi().COMM_WORLD
    except ImportError:
        ranks = None
    if ranks is not None and ranks.size > 1:
        work(ranks.rank, arguments, ranks.size, "", True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(
                work, (arguments, arguments.ranks, folder, False), arguments.ranks
            )


if __name__ == "__main__":
    main()
