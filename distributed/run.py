"""The run of a call over ranks by its schedule: the passes, and sums over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from infonce.kernels.direction_losses import weigh_losses
from infonce.kernels.distill.solve import solver_by_passes
from infonce.kernels.linear import partners
from infonce.kernels.problem import Array, Gradients, Problem, fast_replace
from infonce.kernels.solve import Backend, Solution, Vectors, run_block_pass
from infonce.kernels.targets import count_positives, weigh_positives

from infonce.checks.call import Request
from infonce.checks.rows import row_weights

from .agreement import run_on_all_ranks
from .communicators.base import Communicator, Shifts
from .exchanges.arrays import key_array_names, key_arrays
from .exchanges.base import Keys, Round
from .passes import PassesOverRanks, RunBlockPass
from .schedule import RankSchedule, make_exchange
from .transports.base import Divisors, Transport, sum_over_ranks, totals


def solve(
    request: Request, schedule: RankSchedule, labelled: bool, ddp: bool, ranks: Communicator,
    transport: Transport,
) -> Solution:  # fmt: skip
    """Loss of the batch, and gradients for this rank's rows.

    `ddp`: gradients are multiplied by the number of ranks, because DDP averages over ranks.
    """
    if request.on_gpu:
        request.problem = _on_gpu()[0].readable_by_kernels(request.problem)
    problem, gradients = request.problem, request.gradients
    rows = schedule.queries.total // (2 if schedule.joint else 1)
    loss_divisor, gradient_factor = float(rows), float(ranks.size if ddp else 1)
    if schedule.weighted and problem.classes is None:  # of classes, weights follow from all labels
        loss_divisor = weigh(request, problem, rows, ranks, transport)
    if ddp:
        problem.upstream = problem.upstream * gradient_factor
    if request.on_gpu:
        unweighted = problem.without_weights() if problem.loss_follows_from_sums else problem
        planned = _on_gpu()[1]
        by_plan: Solution | None = planned.solve_by_plan(
            schedule, unweighted, gradients, ranks, transport,
            _divisors(request, loss_divisor, gradient_factor), request.dtype,
        )  # fmt: skip
        if by_plan is not None:
            return by_plan
        # Operations on arrays need the weights: the weights tell which rows have no positive.
        # Kernels, which compute plain problems, need none.
        if unweighted.plain:
            problem = unweighted
    runner, first = choose_block_runner(request), schedule.queries.starts[ranks.rank]
    vectors, xp = runner.vectors, runner.vectors.xp
    for name in key_array_names(problem):
        setattr(problem, name, xp.ascontiguousarray(getattr(problem, name)))
    if not (labelled or problem.has_positive_ids):
        problem.positives = shard_positives(xp, problem, first)
    exchange = make_exchange(schedule, xp, ranks.rank, key_arrays(problem), transport)
    passes = PassesOverRanks(
        problem, gradients, schedule.keys.starts[ranks.rank], schedule.keys, exchange,
        runner.run_block_pass, labelled, vectors, schedule.sum_dtype,
    )  # fmt: skip
    if problem.has_positive_ids:
        weigh_positives(xp, problem, *count_positives_over_ranks(passes, problem))
    elif problem.classes is not None:
        find_classes(passes, problem, first)
        loss_divisor = weigh(request, problem, rows, ranks, transport)
    elif problem.symmetric and labelled:
        unpaired = find_unpaired_rows(passes, problem, first)
        run_on_all_ranks(ranks, lambda: require_pairs(problem, *unpaired))
    result = solver_by_passes(problem)(problem, passes, gradients)
    if result.loss is None and request.reduction != "none":
        result.loss = weigh_losses(xp, result.losses, problem.row_shares).sum()
    divisors = _divisors(request, loss_divisor, gradient_factor)
    sums = totals(transport, vectors, result.loss, result, divisors, request.dtype)
    if request.metrics and result.direction_losses is not None:
        rows_loss, columns_loss = result.direction_losses
        losses = rows_loss.sum(), None if columns_loss is None else columns_loss.sum()
        numbers = {
            side: (loss, float(schedule.queries.total))
            for side, loss in zip(("rows", "columns"), losses, strict=True)
        }
        means = sum_over_ranks(transport, vectors, numbers, rows_loss.dtype)
        result.mean_losses = means["rows"], means.get("columns")
    for name, value in sums.items():
        setattr(result, name, value)
    return result


def weigh(
    request: Request, problem: Problem, rows: int, ranks: Communicator, transport: Transport
) -> float:
    """Give rows their weights. Return the sum of weights over ranks, by which a mean is divided."""
    own_weight = float(len(problem.query) // (2 if problem.joint else 1))
    if problem.weights is not None:
        own_weight = transport.read(problem.weights.sum())
        problem.row_shares = problem.weights
        problem.upstream = problem.upstream * problem.weights
    # the sum is 0 if no row has a positive; the loss is then 0, whatever its divisor
    total = _sum(ranks.allgather(own_weight)) or 1.0
    if request.reduction == "mean":
        problem.upstream = problem.upstream * (rows / total)
    return total


def _divisors(request: Request, total_weight: float, gradient_factor: float) -> Divisors:
    """The divisors of sums over ranks.

    Every rank gets the whole gradient of scale and bias, so their factor for DDP is divided out.
    """
    return total_weight if request.reduction == "mean" else 1.0, gradient_factor


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN or infinity if a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


@cache
def _on_gpu() -> tuple[Any, Any]:
    """The modules for arrays on GPUs: an import statement takes time that small batches notice."""
    from infonce.kernels.gpu.device import arguments

    from . import planned

    return arguments, planned


# -- positives


def shard_positives(xp: Any, problem: Problem, first: int) -> Array:
    """The positives of the rows of a shard without labels. `first`: its first row in the batch."""
    m, own = len(problem.query), xp.arange(len(problem.query))
    return first + ((own + m // 2) % max(m, 1) if problem.symmetric else own)


def find_classes(passes: PassesOverRanks, problem: Problem, first: int) -> None:
    """Set the positive of each row, a row of any rank, and the weight 0 of rows without one."""
    own = passes.xp.arange(len(problem.query)) + first
    members = passes.members(problem.classes)
    problem.positives, has_positive = partners(passes.xp, members, own, problem.decoupled)
    problem.weights = row_weights(passes.xp, problem.weights, has_positive)


def count_positives_over_ranks(passes: PassesOverRanks, problem: Problem) -> tuple[Array, Array]:
    """The numbers of positives of this rank's queries among the keys of all ranks, and of this
    rank's keys among the queries of all ranks."""
    xp = passes.xp
    query_counts, key_counts = (xp.zeros(n, xp.int64) for n in problem.shape[:2])

    def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
        block = fast_replace(problem, key_positive_ids=arrays[0])
        block_counts, sums[0][:] = count_positives(xp, block)
        query_counts[:] += block_counts

    def add(sums: list[Array], *others: list[Array]) -> None:
        for other in others:
            sums[0] += other[0]

    def keep(own_rows: slice, sums: list[Array], *others: list[Array]) -> None:
        add(sums, *others)
        key_counts[own_rows] = sums[0]

    passes.round([query_counts], [problem.key_positive_ids], visit, [((), np.int64)], add, keep)
    return query_counts, key_counts


def find_unpaired_rows(
    passes: PassesOverRanks, problem: Problem, first: int
) -> tuple[Array, Array]:  # fmt: skip
    """Find views that are not a pair: the row that a label names must have this row as its label.

    Returns two arrays [M]: whether a row is unpaired, and the label of the row that its label
    names.
    """
    xp, own = passes.xp, passes.xp.arange(len(problem.positives)) + first
    back = passes.take_at_positives(problem, problem.positives)
    wrong = (back != own) | (problem.positives == own) | (problem.positives < 0)
    if problem.label_nans is not None:
        wrong |= xp.isnan(problem.label_nans)
    return wrong, back


def require_pairs(problem: Problem, wrong: Array, back: Array) -> tuple[None, None]:
    """ValueError if a row is in `wrong`: see `find_unpaired_rows`.

    Returns (None, None): no result and no message for `agreement.run_on_all_ranks`.
    """
    if bool(wrong.any()):
        i = int(wrong.argmax())
        raise ValueError(
            f"labels: expected two rows that are each other's label, got "
            f"{int(problem.positives[i])} at position {i}, whose own is {int(back[i])}"
        )
    return None, None


# -- the blocks that a rank computes


@dataclass(frozen=True)
class BlockRunner:
    """How blocks are computed: the function, the mathematics on vectors, and a check.

    `require_room` raises ValueError if the workspace has no room for a block with its gradients.
    """

    run_block_pass: RunBlockPass
    vectors: Vectors
    require_room: Callable[[Problem, Gradients | None], Any]


def choose_block_runner(request: Request) -> BlockRunner:
    """How blocks are computed on the device that computes the call."""
    ahead = None  # gradients of the later pass of the same block, of which the first pass knows
    if request.gradients is not None:
        ahead = Gradients(want_key=False, add_query=True)
    if request.offload:
        from infonce.kernels.offload import copies, layout

        # both passes of a problem with a guide have the same blocks: they leave out the same pairs
        run_pass = partial(copies.run_block_pass, ahead=ahead if request.problem.guided else None)
        return BlockRunner(run_pass, Vectors(np, exponent_scaled=True), layout.layout)
    if request.on_gpu:
        from infonce.kernels.gpu import shard

        run_pass = partial(shard.run_block_pass, ahead=ahead)
        return BlockRunner(
            run_pass, shard.VectorsOverRanks(), partial(shard.require_room, ahead=ahead)
        )
    from infonce.kernels.cpu.backend import CPU

    # Both passes leave out the same pairs if their tiles are the same. (Other losses have the same
    # bits with gradients and without.)
    same_tiles = ahead if request.problem.compares_with_limits else None

    def backend(problem: Problem, gradients: Gradients | None) -> Backend:
        return CPU(problem, gradients, same_tiles)

    return BlockRunner(_on(backend), Vectors(np), backend)


def _on(backend: Callable[[Problem, Gradients | None], Backend]) -> RunBlockPass:
    """`solve.run_block_pass` on the backend that `backend` makes for each block."""
    return lambda problem, triangle, epilogue, gradients, *sums: run_block_pass(
        backend(problem, gradients), problem, triangle, epilogue, gradients, *sums
    )


def require_room(request: Request, schedule: RankSchedule, rank: int) -> tuple[None, None]:
    """ValueError if the workspace has no room for the least parts of a block of this rank.

    Returns (None, None): no result and no message for `agreement.run_on_all_ranks`.
    """
    problem, gradients, runner = request.problem, request.gradients, choose_block_runner(request)
    m, _, d = problem.shape
    empty = runner.vectors.xp.empty
    for count, own in _find_blocks(request, schedule, rank):
        if not m or not count:
            continue
        symmetric = problem.symmetric and own
        key = problem.key if own else empty((count, d), problem.key.dtype)
        block = fast_replace(problem, key=key, symmetric=symmetric, key_shard=not own)
        runner.require_room(block, None)
        if gradients is not None:
            runner.require_room(block, fast_replace(
                gradients, query=empty((m, d), schedule.sum_dtype), add_query=True,
                key=empty((count, d), schedule.sum_dtype),
                want_key=gradients.want_key or (problem.symmetric and not own),
            ))  # fmt: skip
    return None, None


def _find_blocks(request: Request, schedule: RankSchedule, rank: int) -> list[tuple[int, bool]]:
    """The blocks of a round on this rank, the largest first.

    Each block is (number of its keys, whether the keys are the rank's own shard).
    """
    blocks = set()

    def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
        blocks.add((len(keys), keys.are_own and keys.are_whole_shards))

    make_exchange(schedule, None, rank, [], _Nothing()).run(
        Round([], visit, half=schedule.symmetric, same_pairs=request.problem.compares_with_limits)
    )
    return sorted(blocks, reverse=True)


class _Nothing:
    """An `Exchanger` that sends nothing, and its `Pending`."""

    def exchange(self, shifts: Shifts) -> _Nothing:
        return self

    def wait(self) -> None:
        """Nothing is under way."""
