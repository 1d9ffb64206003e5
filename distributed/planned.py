"""A gather on GPUs as one plan: all launches and exchanges of a call over ranks."""

from __future__ import annotations

from typing import Any

from infonce.kernels.gpu import plan, recorded
from infonce.kernels.gpu.device.launches import Queue
from infonce.kernels.gpu.shard import QueuedVectors
from infonce.kernels.problem import Array, Gradients, Problem, fast_replace
from infonce.kernels.solve import Solution, solve_by_passes

from .communicators.base import Communicator
from .exchanges.arrays import key_arrays
from .exchanges.gather import Gather
from .exchanges.partition import Partition
from .passes import PassesOverRanks
from .schedule import RankSchedule, choose_sum_dtype
from .transports.base import Divisors, Transport, totals


def solve_by_plan(
    schedule: RankSchedule, problem: Problem, gradients: Gradients | None, ranks: Communicator,
    transport: Transport, divisors: Divisors, dtype: Any,
) -> Solution | None:  # fmt: skip
    """The solution by a plan, with loss and scalar gradients summed over ranks.

    `_build` runs the usual passes over ranks. `plan.run_by_plan` records and replays their launches
    and exchanges, as for a call on one GPU.

    None for a call that has no plan. Ranks with a plan and ranks without one send the same
    exchanges, so each rank decides by itself.
    """
    if (
        schedule.exchange != "gather"
        or ranks.size == 1
        or transport.queued(Queue()) is None  # it cannot put exchanges into a queue of launches
        or 0 in (len(problem.query), *schedule.keys.rows)
        or problem.progress is not None
        or not problem.plain
        or problem.positives is not None
        or problem.symmetric
        or problem.retrieval_ranks
        or not problem.key.flags.c_contiguous
    ):
        return None
    start = schedule.queries.starts[ranks.rank]
    # Exchanges that are measured stay out of CUDA graphs, so measured calls have plans of their own
    key_rows = tuple(schedule.keys.rows)
    settings = ranks, transport, start, key_rows, divisors, dtype, transport.measured
    outputs = plan.run_by_plan(
        _build, problem, gradients, settings, graphs=True, plans=transport.plans
    )  # fmt: skip
    return recorded.solution_from_outputs(outputs)


def _build(
    problem: Problem, gradients: Gradients | None,
    settings: tuple[Communicator, Transport, int, tuple[int, ...], Divisors, Any, bool],
    queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    ranks, transport, start, rows, divisors, dtype, _ = settings
    through = transport.queued(queue)
    assert through is not None
    vectors = QueuedVectors(problem, queue)
    own = vectors.shard_positives(start, len(problem.query))
    problem = fast_replace(problem, positives=own)

    def run_block_pass(*block: Any) -> None:
        recorded.block(*block, *[None] * (7 - len(block)), queue)

    keys = Partition(list(rows))
    gather = Gather(vectors.xp, ranks.rank, through, keys, key_arrays(problem))
    passes = PassesOverRanks(
        problem, gradients, keys.starts[ranks.rank], keys, gather, run_block_pass, False,
        vectors, choose_sum_dtype(problem),
    )  # fmt: skip
    result = solve_by_passes(problem, passes, gradients)
    return {
        "losses": result.losses if problem.common_share is None else None,
        "row_lse": result.row_lse, "column_lse": result.column_lse,
        **totals(through, vectors, result.loss, result, divisors, dtype),
    }  # fmt: skip
