"""A small batch on CPUs: each rank gathers the rows of all ranks, and computes the whole loss.

Messages take longer than the products of a small batch. The passes over ranks need several messages
in turn; this way needs the message of the rows, and on several machines one of the loss. A rank
computes the loss as one process does that has the rows of all ranks, and only the gradients of its
own rows.
`schedule.decide` chooses calls for this way (`RankSchedule.whole_batch`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Problem, fast_replace
from infonce.kernels.solve import Solution

from infonce.checks.call import Request

from .communicators.base import Communicator
from .exchanges.partition import shard_positives
from .schedule import RankSchedule

# fields of `Problem` that ranks gather. `positives` are None, the default, unless queries are keys;
# `upstream` is a number unless each row has its own
ROW_ARRAYS = "query", "query_ids", "key", "key_ids", "positives", "upstream"


def row_arrays(problem: Problem, first_query: int) -> dict[str, Array]:
    """This rank's arrays of rows that all ranks gather, by their names in `Problem`.

    `first_query` is the index of the rank's first query in the batch.
    """
    if problem.symmetric:
        positives = shard_positives(np, problem, first_query)
        problem = fast_replace(problem, key=None, positives=positives)
    arrays = {name: getattr(problem, name) for name in ROW_ARRAYS}
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def solve_whole_batch(
    request: Request, schedule: RankSchedule, gradient_factor: float, ranks: Communicator,
    rank_rows: list[dict[str, Array]] | None,
) -> Solution | None:  # fmt: skip
    """Loss of the batch, and gradients for this rank's rows.

    `gradient_factor`: see `run._sum_divisors`. `rank_rows` are the `row_arrays` of all ranks, if
    the ranks have sent them already. None on all ranks if the batch on some rank is no case of
    `solve_in_one_block`: then run.py runs the passes.
    """
    # here, because Numba takes long to import
    from infonce.kernels.cpu.one_block import solve_in_one_block
    from infonce.kernels.cpu.schedule import fits_one_block

    own_queries, own_keys = (
        side.piece(0, 1)[ranks.rank] for side in (schedule.queries, schedule.keys)
    )
    if rank_rows is None:
        rank_rows = ranks.allgather(row_arrays(request.problem, own_queries.start))
    problem = _join(request.problem, rank_rows, gradient_factor)
    solution = None
    if fits_one_block(problem):
        shards = own_queries, own_keys
        solution = solve_in_one_block(problem, request.gradients, shards=shards)
    numbers: Any = None
    if solution is not None:
        scalar_grads = [
            None if gradient is None else gradient / gradient_factor
            for gradient in (solution.scale_grad, solution.bias_grad)
        ]
        numbers = [solution.loss, *scalar_grads]
    # On one machine, all ranks have computed the same bits: a product and a loop of so few logits
    # have one thread. Other machines may round differently, so all take the numbers of rank 0
    on_one_machine = ranks.peers is not None and len(ranks.peers.nodes) == 1
    all_numbers = [numbers] if on_one_machine else ranks.allgather(numbers)
    if solution is None or any(each is None for each in all_numbers):
        return None
    solution.loss, solution.scale_grad, solution.bias_grad = all_numbers[0]
    for name, rows in (
        ("losses", own_queries), ("row_lse", own_queries), ("column_lse", own_keys)
    ):  # fmt: skip
        if (values := getattr(solution, name)) is not None:
            setattr(solution, name, values[rows])
    if request.problem.progress is not None:
        request.problem.progress("loss and gradient", 1, 1)
    return solution


def _join(
    problem: Problem, rank_rows: list[dict[str, Array]], gradient_factor: float
) -> Problem:  # fmt: skip
    """The problem of the whole batch, whose gradients are multiplied by `gradient_factor`."""
    arrays: dict[str, Any] = {
        name: np.concatenate([rows[name] for rows in rank_rows]) for name in rank_rows[0]
    }
    if problem.symmetric:
        arrays["key"] = arrays["query"]
    upstream = arrays.pop("upstream", problem.upstream) * gradient_factor
    # Ranks whose methods are "auto" and "tiled" agree. Only one rank may have a `progress`
    return fast_replace(problem, **arrays, upstream=upstream, method="auto", progress=None)
