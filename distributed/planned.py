"""A gather on GPUs as one plan: all launches and exchanges of a call over ranks.

run.py calls `solve_by_plan` first. If the call has no plan, run.py runs the same passes itself.
"""

from __future__ import annotations

from functools import partial
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
    and exchanges, as for a call on one GPU. `dtype` is the dtype of the loss.

    None for a call that has no plan: then run.py runs the same passes, whose blocks may have plans
    of their own (`shard.run_block_pass`). Ranks with a plan and ranks without one send the same
    exchanges, so each rank decides by itself.
    """
    if (
        schedule.exchange != "gather"
        or ranks.size == 1
        or transport.queued(Queue()) is None  # the host takes part in exchanges: all but NCCL
        or 0 in (len(problem.query), *schedule.keys.rows)  # an empty shard
        or problem.progress is not None  # the host reports progress between launches
        # Rows have several positives, or an option other than `ids` changes logits or targets. A
        # call with `weights` may have a plan: if its loss follows from sums, run.py has removed
        # `weights` from `problem`, because `upstream` contains them
        or not problem.plain
        or problem.positives is not None  # the caller gave labels
        or problem.symmetric  # nt_xent, sup_con, gte
        or problem.retrieval_ranks  # metrics
        or not problem.key.flags.c_contiguous  # exchanges need contiguous arrays: run.py copies
    ):
        return None
    first_query = schedule.queries.starts[ranks.rank]
    # Exchanges that are measured stay out of CUDA graphs, so measured calls have plans of their own
    key_rows = tuple(schedule.keys.rows)
    settings = ranks, transport, first_query, key_rows, divisors, dtype, transport.measured
    outputs = plan.run_by_plan(
        _build, problem, gradients, settings, graphs=True, plans=transport.plans
    )  # fmt: skip
    return recorded.solution_from_outputs(outputs)


# (ranks, transport, index of this rank's first query, keys of each rank, divisors of sums over
# ranks, dtype of the loss, whether exchanges are measured)
Settings = tuple[Communicator, Transport, int, tuple[int, ...], Divisors, Any, bool]


def _build(
    problem: Problem, gradients: Gradients | None, settings: Settings, queue: Queue
) -> dict[str, Array | None]:
    """Put all launches and exchanges of a call into `queue`; return its results by name."""
    ranks, transport, first_query, key_rows, divisors, dtype, _ = settings
    exchanger = transport.queued(queue)
    assert exchanger is not None
    vectors = QueuedVectors(problem, queue)
    positives = vectors.shard_positives(first_query, len(problem.query))
    problem = fast_replace(problem, positives=positives)

    # `ahead=None`: later passes do not change the workspace
    run_block_pass = partial(recorded.block, ahead=None, queue=queue)
    keys = Partition(list(key_rows))
    gather = Gather(vectors.xp, ranks.rank, exchanger, keys, key_arrays(problem))
    passes = PassesOverRanks(
        problem, gradients, keys.starts[ranks.rank], keys, gather, run_block_pass,
        labelled=False, vectors=vectors, sum_dtype=choose_sum_dtype(problem),
    )  # fmt: skip
    result = solve_by_passes(problem, passes, gradients)
    return {
        # None if the loss is reduced: the caller gets no losses of rows
        "losses": result.losses if problem.common_share is None else None,
        "row_lse": result.row_lse, "column_lse": result.column_lse,
        **totals(exchanger, vectors, result.loss, result, divisors, dtype),
    }  # fmt: skip
