"""method="naive" on the CPU, and how much memory it may take."""

from __future__ import annotations

import numpy as np

from .. import naive
from ..problem import Gradients, Problem
from ..solve import Solution, Vectors

VECTORS = Vectors(np)


def available_memory() -> int:
    """Bytes that can be allocated without swapping (0: unknown)."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem` from the full matrix of logits."""
    require_memory(problem, naive.matrix_bytes(problem))
    return naive.solve(problem, gradients, VECTORS)


def require_memory(problem: Problem, needed: int) -> None:
    """MemoryError where so many bytes are not free."""
    room = available_memory()
    if room and needed > room:
        m, n, _ = problem.shape
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
