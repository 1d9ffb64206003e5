"""swap.cu between two ranks: a process each, with memory that both map.

`swap_arrays` starts `python tests/emulator/two_ranks.py MAILBOXES RANK SEED SOURCES` for each rank.
"""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import emulation
import engine
import numpy as np
from infonce.kernels.gpu.device import compiler, signatures

BLOCKS = 4  # of a launch of swap.cu
ROOM, LINE = 2**14, 256  # bytes of a buffer, and of counters
MAILBOX = 2 * ROOM + 2 * LINE  # two buffers, numbers of the other rank's pieces, own counters
# Bytes of the arrays (up to four) that rank 0 sends in a step. Rank 1 sends those of the next step.
SIZES = [(4096, 80), (7,), (16, 3, 24, 1000), (12000,), (8,), (48, 48), (1, 1, 1, 1), (9000, 16)]
SECONDS = 300


def swap_arrays(seed: int) -> bytes:
    """Swap arrays between two processes in all steps. Returns the bytes that both have received."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(2 * MAILBOX))
        file.flush()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, file.name, str(rank), str(seed), str(compiler.SOURCES)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise engine.KernelError(errors.decode().strip())
    return b"".join(received for received, _ in outputs)


def contents(rank: int, step: int) -> list[Any]:
    """The arrays that a rank sends in a step."""
    rng = np.random.default_rng(100 * step + rank)
    sizes = SIZES[(step + rank) % len(SIZES)]
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def arrays_fields(arrays: list[Any]) -> dict[str, int]:
    """The fields of swap.cu's struct Arrays: addresses and bytes of up to four arrays."""
    names = "first", "second", "third", "fourth"
    fields = dict.fromkeys(names, 0) | {f"{name}_bytes": 0 for name in names}
    for name, array in zip(names, arrays, strict=False):
        fields |= {name: array.data.ptr, f"{name}_bytes": array.nbytes}
    return fields


def swap_as_rank(path: str, rank: int, seed: int) -> None:
    """Run all steps as one of the two ranks, and write the received bytes to stdout.

    `path` is a file of two mailboxes, which both processes map.
    """
    import cupy
    from infonce.kernels.gpu import shard

    with open(path, "r+b") as file:
        mailboxes = mmap.mmap(file.fileno(), 2 * MAILBOX)
    start = np.frombuffer(mailboxes, np.uint8).ctypes.data
    mine, other = (start + r * MAILBOX for r in (rank, 1 - rank))
    delays = random.Random(10 * seed + rank)
    for step in range(2 * len(SIZES)):
        sent = [cupy.asarray(x) for x in contents(rank, step)]
        received = [cupy.empty(x.size, np.uint8) for x in contents(1 - rank, step)]
        time.sleep(delays.choice([0, 0, 0.02]))
        with engine.schedule(seed and seed + step):  # seed 0: threads in order in each step
            shard.swap_arrays(BLOCKS, {
                "sent": arrays_fields(sent), "received": arrays_fields(received), "room": ROOM,
                "counters": mine + 2 * ROOM + LINE,
                "other": {"buffers": other, "arrived": other + 2 * ROOM},
                "own": {"buffers": mine, "arrived": mine + 2 * ROOM},
            })  # fmt: skip
        for array in received:
            sys.stdout.buffer.write(array.get().tobytes())


if __name__ == "__main__":
    path, rank, seed, folder = sys.argv[1:]
    emulation.begin()
    compiler.SOURCES = signatures.SOURCES = Path(folder)
    try:
        swap_as_rank(path, int(rank), int(seed))
    except engine.KernelError as error:
        sys.exit(f"rank {rank}: {error}")
