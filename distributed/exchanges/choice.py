"""Which exchange a call takes: the ring or the gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Gradients, Problem

from infonce import arrays

from .. import cost
from ..communicators.base import Communicator
from ..partition import Partition
from ..transports.base import Exchanger
from .arrays import vectors_of
from .base import Exchange
from .gather import Gather
from .ring import Ring

CHOICES = ("auto", "ring", "gather")


def real_of(problem: Problem) -> np.dtype[Any]:
    """The dtype of sums that travel."""
    return np.dtype(np.float64 if problem.compute == "fp64" else np.float32)


def room(problem: Problem) -> int:
    """Bytes that buffers of an exchange may take on this rank: half of the workspace."""
    half = int(problem.workspace // 2)
    if problem.workspace_given or not arrays.on_gpu(problem.query):
        return half
    from infonce.kernels.gpu.device.launcher import device_properties

    share: int = device_properties(problem.query.device.id).share
    return max(half, share)


def choose(
    asked: str, problem: Problem, gradients: Gradients | None, keys: Partition,
    ranks: Communicator, rooms: Sequence[int],
) -> str:  # fmt: skip
    """The exchange of a call that all ranks make; `rooms` are their `room`s. ValueError where
    gathered keys do not fit."""
    if asked == "ring":
        return asked
    d, item = problem.shape[2], problem.key.dtype.itemsize
    vectors = 8 * vectors_of(problem)
    with_sums = gradients is not None and (gradients.want_key or problem.symmetric)
    sums = d * real_of(problem).itemsize if with_sums else 0
    least = cost.gather_bytes(keys.rows, d * item + vectors, max(sums, 24))
    fits = least <= min(rooms)
    if asked == "gather" and not fits:
        raise ValueError(
            f"workspace: expected at least {2 * least} bytes to gather {keys.total} keys of width "
            f'{d} over {len(keys.rows)} ranks, got {problem.workspace}; exchange="ring" takes less'
        )
    if asked == "auto" and fits and arrays.on_gpu(problem.query):
        return cost.faster(keys.largest, d, ranks.size, cost.Machine(gpus=_gpus_of_host(ranks)))
    return "gather" if fits else "ring"


def _gpus_of_host(ranks: Communicator) -> int:
    """Ranks on one host at most."""
    peers = ranks.peers
    return peers.largest_host if peers and peers.processes else ranks.size


def make(
    name: str, xp: Any, problem: Problem, own: list[Array], keys: Partition, ranks: Communicator,
    transport: Exchanger,
) -> Exchange:  # fmt: skip
    """The exchange of that name, for this rank's arrays of keys."""
    alike = problem.leaves_out  # the same pairs in both folds
    if name == "gather":
        return Gather(xp, ranks, transport, keys, own, alike)
    row = problem.shape[2] * (2 * problem.key.dtype.itemsize + 3 * real_of(problem).itemsize)
    pieces = max(1, -(-keys.largest // max(1, problem.workspace // 2 // row)))
    return Ring(xp, ranks, transport, keys, pieces, problem.symmetric, alike)
