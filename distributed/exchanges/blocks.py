"""The blocks that a rank folds: by which backend, and whether the workspace has room for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Gradients, Problem, fast_replace
from infonce.kernels.room import least_block_side
from infonce.kernels.solve import Backend, Vectors, fold_block

from infonce import arrays
from infonce.checks.call import Request

from ..communicators.base import Communicator, Shifts
from ..folds import FoldBlock
from ..partition import Partition
from .base import Keys
from .choice import make, real_of


@dataclass(frozen=True)
class Folding:
    """How blocks are folded: the function, the mathematics on vectors, and what raises ValueError
    where the workspace has no room for a block with these gradients."""

    fold_block: FoldBlock
    vectors: Vectors
    require_room: Callable[[Problem, Gradients | None], Any]


def folding(request: Request) -> Folding:
    """That for the arrays of a call."""
    ahead = None
    if request.gradients is not None:
        ahead = Gradients(want_key=False, add_query=True)
    if request.offload:
        from infonce.kernels.offload import copies, layout

        return Folding(copies.fold_block, Vectors(np, exponent_scaled=True), layout.layout)
    if arrays.on_gpu(request.problem.query):
        from infonce.kernels.gpu import shard

        fold = partial(shard.fold_block, ahead=ahead)
        return Folding(fold, shard.VectorsOverRanks(), partial(shard.require_room, ahead=ahead))
    from infonce.kernels.cpu.backend import CPU

    # Both folds leave out the same pairs if their tiles are the same. (Other losses have the same
    # bits with gradients and without.)
    same_tiles = ahead if request.problem.leaves_out else None

    def backend(problem: Problem, gradients: Gradients | None) -> Backend:
        return CPU(problem, gradients, same_tiles)

    return Folding(_on(backend), Vectors(np), backend)


def _on(backend: Callable[[Problem, Gradients | None], Backend]) -> FoldBlock:
    """`solve.fold_block` on such backends."""
    return lambda problem, triangle, epilogue, gradients, *sums: fold_block(
        backend(problem, gradients), problem, triangle, epilogue, gradients, *sums
    )


def tight(problem: Problem, queries: Partition, keys: Partition) -> bool:
    """Whether the workspace may be too small for a block of some rank: all ranks say the same."""
    if problem.method == "naive":
        return True  # it is not the workspace that bounds the logits
    half = problem.linear_terms or problem.joint  # which take up to the other half
    enough = _enough(queries.largest, keys.total, problem.shape[2])
    return bool(problem.workspace // (1 + half) < enough)


@cache
def _enough(m: int, n: int, d: int) -> int:
    """More bytes than the least parts of any block take."""
    side: int = max(128, 2 * least_block_side(m, n))
    return side * (64 * (side + d) + 2**18)


def require_room(
    how: Folding, exchange: str, request: Request, keys: Partition, ranks: Communicator
) -> None:
    """ValueError where the workspace has no room for the least parts of a block of this rank."""
    problem, gradients = request.problem, request.gradients
    m, _, d = problem.shape
    real = real_of(problem)
    empty = how.vectors.xp.empty
    for count, own in _visits(exchange, problem, keys, ranks):
        if not m or not count:
            continue
        symmetric = problem.symmetric and own
        key = problem.key if own else empty((count, d), problem.key.dtype)
        block = fast_replace(problem, key=key, symmetric=symmetric, key_shard=not own)
        how.require_room(block, None)
        if gradients is not None:
            how.require_room(block, fast_replace(
                gradients, query=empty((m, d), real), add_query=True,
                key=empty((count, d), real),
                want_key=gradients.want_key or (problem.symmetric and not own),
            ))  # fmt: skip


def _visits(
    name: str, problem: Problem, keys: Partition, ranks: Communicator
) -> list[tuple[int, bool]]:  # fmt: skip
    """The blocks of a round on this rank, the largest first: numbers of keys, and whether they are
    its own shard."""
    found = set()

    def visit(of: Keys, arrays: list[Array], sums: list[Array]) -> None:
        found.add((len(of), of.mine and of.whole))

    exchange = make(name, None, problem, [], keys, ranks, _Nothing())
    exchange.run([], visit, half=problem.symmetric)
    return sorted(found, reverse=True)


class _Nothing:
    """Sends no arrays: an `Exchanger` that has none to send, and its `Pending`."""

    def exchange(self, shifts: Shifts) -> _Nothing:
        return self

    def wait(self) -> None:
        """Nothing is under way."""
