"""Ranks of PyTorch in trouble, for tests/frameworks/test_torch_ranks.py.

`python torch_trouble.py FOLDER FIRST LAST [DEVICE]` makes the troubles (trouble.py) with the seeds
FIRST to LAST, LAST excluded, and then calls that differ between ranks. What the ranks say of each
is in FOLDER/SEED.txt, or FOLDER/differ.txt. The ranks are forks of this process, which start in no
time. With DEVICE "cuda", each rank has a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trouble import Trouble

import infonce.torch as it

TIMEOUT = 3.0  # seconds, of a call over ranks of which one is in trouble
LIMIT = 100.0  # seconds until the ranks of a trouble are killed
PATIENCE = 10.0  # seconds until the last of them is
RANKS = {"cpu": 0, "cuda": 2}  # 0: as many as the trouble wants
Say = Callable[..., None]


def fork_ranks(
    size: int, output: Path, device: str, work: Callable[[int, Say], None], culprit: int = -1
) -> None:
    """Run `work` on so many ranks, which write what they say to `output`, and wait for them, but
    not for the `culprit` alone."""
    store = output.with_suffix(".store")
    with output.open("a") as file:

        def run(rank: int) -> None:
            def say(*words: Any) -> None:
                os.write(file.fileno(), (" ".join(map(str, words)) + "\n").encode())

            try:
                if device == "cuda":
                    torch.cuda.set_device(rank)
                dist.init_process_group(
                    "nccl" if device == "cuda" else "gloo", f"file://{store}", rank=rank,
                    world_size=size,
                )  # fmt: skip
                work(rank, say)
            finally:
                os._exit(0)

        processes = []
        for rank in range(size):
            process = os.fork()
            if not process:
                run(rank)
            processes.append(process)
        # ranks that hang are killed when they alone are left
        left, end = set(processes), time.monotonic() + LIMIT
        while left and time.monotonic() < end:
            ended = {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
            left -= ended
            if ended and len(left) == 1:
                of_culprit = left == {processes[culprit]} if culprit >= 0 else False
                end = min(end, time.monotonic() + (0 if of_culprit else PATIENCE))
            time.sleep(0.05)
        for process in left:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def features(rank: int, loss: str, device: str) -> list[Any]:
    """Unit rows of this rank, that want gradients."""
    generator = torch.Generator().manual_seed(rank)
    sides = 1 if loss == "nt_xent" else 2
    rows = [torch.randn(120, 16, generator=generator) for _ in range(sides)]
    return [torch.nn.functional.normalize(z).to(device).requires_grad_() for z in rows]


def make_trouble(trouble: Trouble, device: str) -> Callable[[int, Say], None]:
    """The work of each rank."""

    def work(rank: int, say: Say) -> None:
        rows = features(rank, trouble.loss, device)
        function = getattr(it, f"{trouble.loss}_loss")
        if trouble.exchange == "hierarchical":
            os.environ["INFONCE_LOCAL_SIZE"] = str(trouble.ranks // 2)

        def call(timeout: float) -> None:
            loss = function(
                *rows, scale=1.0, exchange=trouble.exchange, group=dist.group.WORLD,
                timeout=timeout,
            )  # fmt: skip
            loss.backward()

        trouble.happen(rank, call, TIMEOUT, say)

    return work


# The calls of rank 1 that differ from those of the others, and words of the error on all ranks
DIFFERENCES: dict[str, dict[str, Any]] = {
    "normalize: expected the same": {"normalize": True},
    "scale: expected the same": {"scale": 2.0},
    "image: dtype: expected the same": {"dtype": torch.float64},
    "image: width: expected the same": {"width": 8},
    "function: expected the same": {"loss": "lit"},
    "ids: expected the same": {"ids": range(120)},
}
DIFFERENT_EXCHANGES = "auto", "gather"  # of a whole batch on each rank, and by passes


def differ(rank: int, say: Say) -> None:
    """Calls that differ, each after the same call on all ranks, which works."""

    def call(loss: str = "clip", dtype: Any = None, width: int = 16, **options: Any) -> None:
        rows = [
            torch.nn.functional.normalize(z.detach()[:, :width].to(dtype)).requires_grad_()
            for z in features(rank, loss, DEVICE)
        ]
        if "ids" in options:
            options["ids"] = torch.arange(120, device=DEVICE)
        function = getattr(it, f"{loss}_loss")
        function(*rows, **{"scale": 1.0, **options}, group=dist.group.WORLD, timeout=60).backward()

    for exchange in DIFFERENT_EXCHANGES:
        for words, changes in DIFFERENCES.items():
            call(exchange=exchange)
            try:
                call(exchange=exchange, **(changes if rank == 1 else {}))
                say(f"rank {rank}: nothing in place of {words}")
            except ValueError as error:
                say(f"rank {rank} {exchange}: {error}")
    call()
    say(f"rank {rank} is in step")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    DEVICE = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    if DEVICE == "cpu":  # compiles once for all ranks
        for name in ("clip", "nt_xent", "siglip"):
            getattr(it, f"{name}_loss")(*features(0, name, DEVICE), scale=1.0).backward()
    for seed in range(first, last):
        trouble = Trouble(seed, RANKS[DEVICE])
        work = make_trouble(trouble, DEVICE)
        fork_ranks(trouble.ranks, folder / f"{seed}.txt", DEVICE, work, trouble.culprit)
    fork_ranks(RANKS[DEVICE] or 3, folder / "differ.txt", DEVICE, differ)
