"""A gather on GPUs as one plan: all that a call asks of the device, the exchanges among it."""

from __future__ import annotations

from typing import Any

from infonce.kernels.gpu import plan, recorded
from infonce.kernels.gpu.device.launcher import device_properties
from infonce.kernels.gpu.device.launches import Queue
from infonce.kernels.gpu.shard import QueuedVectors
from infonce.kernels.problem import Array, Gradients, Problem, fast_replace
from infonce.kernels.solve import Solution, solve

from .communicators.base import Communicator
from .folds import folds_over_ranks
from .partition import Partition
from .transports.base import Divisors, Transport, totals


def solution(
    exchange: str, problem: Problem, gradients: Gradients | None, queries: Partition,
    keys: Partition, ranks: Communicator, transport: Transport, divisors: Divisors, dtype: Any,
) -> Solution | None:  # fmt: skip
    """The solution by a plan, its numbers summed over ranks; None for a call that has none. Some
    ranks may have one and others not: their exchanges are the same."""
    if (
        exchange != "gather"
        or ranks.size == 1
        or transport.queued(Queue()) is None
        or 0 in (len(problem.query), *keys.rows)
        or problem.progress is not None
        or not problem.plain
        or problem.positives is not None
        or problem.symmetric
        or problem.retrieval_ranks
        or not problem.key.flags.c_contiguous
    ):
        return None
    properties = device_properties(problem.query.device.id)
    start = queries.starts[ranks.rank]
    # of exchanges that are measured, nothing is in graphs
    place = ranks, transport, start, tuple(keys.rows), divisors, dtype, transport.measured
    made = plan.call(
        _build, properties, problem, gradients, place, graphs=True, plans=transport.plans
    )  # fmt: skip
    return recorded.solution_of(made)


def _build(
    problem: Problem, gradients: Gradients | None,
    place: tuple[Communicator, Transport, int, tuple[int, ...], Divisors, Any, bool], queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    ranks, transport, start, rows, divisors, dtype, _ = place
    through = transport.queued(queue)
    assert through is not None
    vectors = QueuedVectors(problem, queue)
    own = vectors.own_positives(start, len(problem.query))
    problem = fast_replace(problem, positives=own)

    def fold_block(*block: Any) -> None:
        recorded.block(*block, *[None] * (7 - len(block)), queue)

    folds = folds_over_ranks(
        "gather", problem, gradients, Partition(list(rows)), ranks, through, fold_block, False,
        vectors,
    )  # fmt: skip
    found = solve(problem, folds, gradients)
    return {
        "losses": found.losses if problem.reduction_weight is None else None,
        "row_lse": found.row_lse, "column_lse": found.column_lse,
        **totals(through, vectors, found.loss, found, divisors, dtype),
    }  # fmt: skip
