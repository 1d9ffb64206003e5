"""Which exchange a call takes: the ring, the gather or the hierarchical one."""

from __future__ import annotations

import os
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
from .hierarchical import Hierarchical
from .ring import Ring

CHOICES = ("auto", "ring", "gather", "hierarchical")


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


def hosts_of(ranks: Communicator) -> list[list[int]]:
    """The ranks of each host: as INFONCE_LOCAL_SIZE says, so many each, or by their processes."""
    given = os.environ.get("INFONCE_LOCAL_SIZE", "")
    if given:
        size = int(given) if given.isdecimal() else 0
        if not size or ranks.size % size:
            raise ValueError(
                f"INFONCE_LOCAL_SIZE: expected a divisor of the {ranks.size} ranks, got {given!r}"
            )
        return [list(range(r, r + size)) for r in range(0, ranks.size, size)]
    hosts = ranks.peers.hosts if ranks.peers else []
    return hosts or [list(range(ranks.size))]


def local_size(hosts: list[list[int]]) -> int | None:
    """Ranks of a host; None unless each has as many, one after another."""
    size = len(hosts[0])
    alike = [list(range(size * h, size * (h + 1))) for h in range(len(hosts))]
    return size if hosts == alike else None


def choose(
    asked: str, problem: Problem, gradients: Gradients | None, keys: Partition,
    ranks: Communicator, rooms: Sequence[int],
) -> str:  # fmt: skip
    """The exchange of a call that all ranks make; `rooms` are their `room`s. ValueError where
    gathered keys do not fit, or hosts are not alike."""
    hosts = hosts_of(ranks)
    if asked == "ring":
        return asked
    d, item = problem.shape[2], problem.key.dtype.itemsize
    with_sums = gradients is not None and (gradients.want_key or problem.symmetric)
    sums = d * real_of(problem).itemsize if with_sums else 0
    row = d * item + 8 * vectors_of(problem), max(sums, 24)
    least = {"ring": 0, "gather": cost.gather_bytes(keys.rows, *row)}
    size = local_size(hosts)
    if size is not None:
        least["hierarchical"] = cost.hierarchical_bytes(keys.rows, size, *row)
    elif asked == "hierarchical":
        raise ValueError(
            'exchange: expected as many ranks on each host, one after another, for "hierarchical", '
            f'got hosts with ranks {", ".join(map(str, hosts))}; exchange="ring" takes any'
        )
    if asked != "auto":
        if least[asked] > min(rooms):
            raise ValueError(
                f"workspace: expected at least {2 * least[asked]} bytes to gather keys of width "
                f'{d} by exchange="{asked}", {keys.total} over {ranks.size} ranks, got '
                f'{problem.workspace}; "ring" takes less'
            )
        return asked
    fitting = [name for name, needed in least.items() if needed <= min(rooms)]
    if not arrays.on_gpu(problem.query):
        return "gather" if "gather" in fitting else "ring"
    machine = cost.Machine(gpus=size or max(map(len, hosts)))
    return cost.fastest(keys.largest, d, ranks.size, machine, tuple(fitting))


def make(
    name: str, xp: Any, problem: Problem, own: list[Array], keys: Partition, ranks: Communicator,
    transport: Exchanger,
) -> Exchange:  # fmt: skip
    """The exchange of that name, for this rank's arrays of keys."""
    alike = problem.leaves_out  # the same pairs in both folds
    if name == "hierarchical":
        size = local_size(hosts_of(ranks))
        assert size is not None
        return Hierarchical(xp, ranks.rank, transport, keys, size, own, alike)
    if name == "gather":
        return Gather(xp, ranks.rank, transport, keys, own, alike)
    row = problem.shape[2] * (2 * problem.key.dtype.itemsize + 3 * real_of(problem).itemsize)
    pieces = max(1, -(-keys.largest // max(1, problem.workspace // 2 // row)))
    return Ring(xp, ranks.rank, transport, keys, pieces, problem.symmetric, alike)
