"""The run of a call over ranks by its schedule: the passes, and sums over the ranks.

Before the run, call.py agrees on the schedule. After the run, call.py makes the call's result.
"""

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
from infonce.kernels.maxsim.tokens import Tokens
from infonce.kernels.options import count_positives, weigh_positives
from infonce.kernels.problem import Array, Gradients, Problem, fast_replace
from infonce.kernels.solve import Backend, Solution, Vectors, run_block_pass

from infonce.checks.call import Request
from infonce.checks.rows import row_weights

from .agreement import run_on_all_ranks
from .communicators.base import Communicator, Shifts
from .exchanges.arrays import empty_rows, key_arrays, make_contiguous, row_shape
from .exchanges.base import Keys, Round
from .exchanges.partition import shard_positives
from .passes import PassesOverRanks, RunBlockPass
from .schedule import RankSchedule, make_exchange
from .transports.base import Divisors, Transport, sum_over_ranks, totals
from .whole_batch import solve_whole_batch


def solve(
    request: Request, schedule: RankSchedule, labelled: bool, ddp: bool, ranks: Communicator,
    transport: Transport, rank_rows: list[dict[str, Array]] | None = None,
) -> Solution:  # fmt: skip
    """Loss of the batch, and gradients for this rank's rows.

    `labelled`: the caller has given labels. `ddp`: gradients of features are multiplied by the
    number of ranks, because DDP averages over ranks. `rank_rows`: see `solve_whole_batch`.
    """
    if request.on_gpu:
        arguments, planned = _import_gpu_modules()
        request.problem = arguments.readable_by_kernels(request.problem)
    problem, gradients = request.problem, request.gradients

    # upstream gradients of rows, and the sum of the weights over ranks (1 for each loss by default)
    loss_count = schedule.queries.total // (2 if schedule.joint else 1)  # losses over all ranks
    total_weight, gradient_factor = float(loss_count), float(ranks.size if ddp else 1)
    if schedule.whole_batch:
        whole = solve_whole_batch(request, schedule, gradient_factor, ranks, rank_rows)
        if whole is not None:
            return whole
    if schedule.weighted and problem.classes is None:  # with classes: after `find_classes`
        total_weight = apply_weights(request, problem, loss_count, ranks, transport)
    if ddp:
        problem.upstream = problem.upstream * gradient_factor

    # On GPUs: one plan for the whole call, if the call has one. A plan reads no `weights`, because
    # `upstream` contains them. A loss that does not follow from sums has no plan, and needs them
    unweighted = problem
    if request.on_gpu:
        unweighted = problem.without_weights() if problem.loss_follows_from_sums else problem
        by_plan: Solution | None = planned.solve_by_plan(
            schedule, unweighted, gradients, ranks, transport,
            _sum_divisors(request, total_weight, gradient_factor), request.dtype,
        )  # fmt: skip
        if by_plan is not None:
            return by_plan
    runner = choose_block_runner(request)
    vectors: Any = runner.vectors
    # Kernels need no weights. Operations on arrays need them: they tell which rows have no positive
    if request.on_gpu and vectors.has_plan(unweighted):
        problem = unweighted

    # positives, and classes over all ranks. The only other row of a class may be on any rank
    labelled = labelled or problem.classes is not None
    first_query = schedule.queries.starts[ranks.rank]
    xp = vectors.xp
    make_contiguous(xp, problem)
    if not (labelled or problem.has_positive_ids):
        problem.positives = shard_positives(xp, problem, first_query)
    exchange = make_exchange(schedule, xp, ranks.rank, key_arrays(problem), transport)
    passes = PassesOverRanks(
        problem, gradients, schedule.keys.starts[ranks.rank], schedule.keys, exchange,
        runner.run_block_pass, labelled, vectors, schedule.sum_dtype,
    )  # fmt: skip
    if problem.classes is not None:
        find_classes(passes, problem, first_query)
        total_weight = apply_weights(request, problem, loss_count, ranks, transport)
    elif problem.has_positive_ids:
        weigh_positives(xp, problem, *count_positives_over_ranks(passes, problem))
    elif problem.symmetric and labelled:
        unpaired = find_unpaired_rows(passes, problem, first_query)
        run_on_all_ranks(ranks, lambda: require_pairs(problem, *unpaired))

    # the passes; then sums over the ranks
    result = solver_by_passes(problem)(problem, passes, gradients)
    if result.loss is None and request.reduction != "none":
        result.loss = weigh_losses(xp, result.losses, problem.row_shares).sum()
    divisors = _sum_divisors(request, total_weight, gradient_factor)
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


def apply_weights(
    request: Request, problem: Problem, loss_count: int, ranks: Communicator, transport: Transport
) -> float:
    """Apply the weights w_i of rows to `problem`; return W, the sum of the weights over all ranks.

    Afterwards `upstream` of row i is the caller's upstream gradient times w_i / W in a mean, and
    times w_i otherwise. Before the call, `upstream` of a mean is divided by `loss_count`, the
    number of losses over all ranks. So this function multiplies `upstream` by w_i and, in a mean,
    by `loss_count` / W. On a rank whose rows have no weights, each loss has the weight 1.
    """
    own_weight = float(len(problem.query) // (2 if problem.joint else 1))
    if problem.weights is not None:
        own_weight = transport.read(problem.weights.sum())
        problem.row_shares = problem.weights  # without W: for a mean, `totals` divides the sum by W
        problem.upstream = problem.upstream * problem.weights
    # the sum is 0 if no row has a positive; the loss is then 0, whatever its divisor
    total_weight = _exact_sum(ranks.allgather(own_weight)) or 1.0
    if request.reduction == "mean":
        problem.upstream = problem.upstream * (loss_count / total_weight)
    return total_weight


def _sum_divisors(request: Request, total_weight: float, gradient_factor: float) -> Divisors:
    """The divisors of two kinds of sums over ranks: of losses, and of gradients of scale and bias.

    `gradient_factor` is in `upstream`, because DDP averages gradients over ranks. The sums over
    ranks are the whole gradients of scale and bias, which the average of DDP does not change. So
    the second divisor takes `gradient_factor` out of these sums.
    """
    return total_weight if request.reduction == "mean" else 1.0, gradient_factor


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once. If a value is NaN or infinite, so is the sum."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


@cache
def _import_gpu_modules() -> tuple[Any, Any]:
    """(kernels/gpu/device/arguments.py, planned.py), which need CuPy.

    They are imported once: an import statement takes time that small batches notice.
    """
    from infonce.kernels.gpu.device import arguments

    from . import planned

    return arguments, planned


# -- positives


def find_classes(passes: PassesOverRanks, problem: Problem, first_query: int) -> None:
    """Set the positives of rows, which are keys of any rank, and the weight 0 of rows without one.

    A row whose class has one key gets this key; if queries are the keys, one key other than the
    row. Other rows get -1, because their positives are a linear term. If the loss is `decoupled`,
    all rows get -1.
    """
    own_indices = None
    if problem.symmetric:
        own_indices = passes.xp.arange(len(problem.query)) + first_query
    problem.positives, has_positive = partners(
        passes.xp, problem.classes, passes.members(problem.classes), own_indices, problem.decoupled
    )
    problem.weights = row_weights(passes.xp, problem.weights, has_positive)


def count_positives_over_ranks(passes: PassesOverRanks, problem: Problem) -> tuple[Array, Array]:
    """The number of positives of each row [M] among the keys of all ranks, and of each of this
    rank's keys [N] among the queries of all ranks. Positives have equal `positive_ids`."""
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
    passes: PassesOverRanks, problem: Problem, first_query: int
) -> tuple[Array, Array]:  # fmt: skip
    """Find views of `nt_xent` that are not a pair: two rows must be each other's label.

    Returns two arrays [M]: whether a row is unpaired, and the label of its partner. The partner of
    a row is the row that the label of the row names.
    """
    xp, own_indices = passes.xp, passes.xp.arange(len(problem.positives)) + first_query
    labels_of_partners = passes.take_at_positives(problem, problem.positives)
    unpaired = labels_of_partners != own_indices
    unpaired |= (problem.positives == own_indices) | (problem.positives < 0)
    if problem.known_row_nans is not None:  # NaN: the row's label is invalid
        unpaired |= xp.isnan(problem.known_row_nans)
    return unpaired, labels_of_partners


def require_pairs(
    problem: Problem, unpaired: Array, labels_of_partners: Array
) -> tuple[None, None]:
    """ValueError if a row is unpaired. The arguments are the results of `find_unpaired_rows`.

    Returns (None, None): no result and no message for `agreement.run_on_all_ranks`.
    """
    if bool(unpaired.any()):
        i = int(unpaired.argmax())
        raise ValueError(
            f"labels: expected two rows that are each other's label, got "
            f"{int(problem.positives[i])} at position {i}, whose own is "
            f"{int(labels_of_partners[i])}"
        )
    return None, None


# -- the blocks that a rank computes


@dataclass(frozen=True)
class BlockRunner:
    """How blocks are computed on the device of a call."""

    run_block_pass: RunBlockPass
    vectors: Vectors  # the mathematics on vectors of this rank's rows or keys
    # (block, gradients): an error if memory has no room for the block (`run.require_room`)
    require_room: Callable[[Problem, Gradients | None], Any]


def choose_block_runner(request: Request) -> BlockRunner:
    """The block runner of a call: for offloaded features, for a GPU, or for the CPU."""
    # The gradients that the gradient pass will compute. A log-sum-exp pass that knows them takes
    # their sizes into account: then both passes have a workspace, or blocks, of the same sizes
    ahead = None
    if request.gradients is not None:
        ahead = Gradients(want_key=False, add_query=True)
    if request.offload:
        from infonce.kernels.offload import copies, layout

        # Products of a guide's features have other bits in a block of another shape. So both passes
        # of a problem with a guide have the same blocks, and leave out the same pairs. Without a
        # guide, the log-sum-exp pass may have larger chunks.
        # Vectors are on the host, but a GPU's passes make them
        run_pass = partial(copies.run_block_pass, ahead=ahead if request.problem.guided else None)
        return BlockRunner(run_pass, Vectors(np, passes_on_gpu=True), layout.layout)
    if request.on_gpu:
        from infonce.kernels.gpu import shard

        run_pass = partial(shard.run_block_pass, ahead=ahead)
        return BlockRunner(
            run_pass, shard.VectorsOverRanks(), partial(shard.require_room, ahead=ahead)
        )
    from infonce.kernels.cpu.backend import CPU
    from infonce.kernels.maxsim.cpu import make_blocks

    # If logits are compared with limits, both passes have tiles of the same sizes, and so leave out
    # the same pairs. In other calls the log-sum-exp pass does not know the gradients, so that the
    # loss has the same bits with gradients and without
    tiles_ahead = ahead if request.problem.compares_with_limits else None

    def make_backend(problem: Problem, gradients: Gradients | None) -> Backend:
        if isinstance(problem.query, Tokens):  # features of a guide beside tokens are rows
            return make_blocks(problem, gradients)
        return CPU(problem, gradients, tiles_ahead)

    return BlockRunner(_run_block_pass_on(make_backend), Vectors(np), make_backend)


def _run_block_pass_on(
    make_backend: Callable[[Problem, Gradients | None], Backend],
) -> RunBlockPass:
    """`solve.run_block_pass` on a new backend for each block."""
    return lambda problem, triangle, epilogue, gradients, *sums: run_block_pass(
        make_backend(problem, gradients), problem, triangle, epilogue, gradients, *sums
    )


def require_room(request: Request, schedule: RankSchedule, rank: int) -> tuple[None, None]:
    """ValueError if the workspace has no room for the smallest parts of a block of this rank.

    A backend divides a block into parts that fit the workspace. With method "naive", a block is not
    divided: MemoryError if the machine's memory has no room for all logits of the block.
    Returns (None, None): no result and no message for `agreement.run_on_all_ranks`.
    """
    problem, gradients, runner = request.problem, request.gradients, choose_block_runner(request)
    m, xp = len(problem.query), runner.vectors.xp
    for key_count, is_local in _find_blocks(request, schedule, rank):
        if not m or not key_count:
            continue
        symmetric = problem.symmetric and is_local
        key = problem.key if is_local else empty_rows(xp, problem.key, key_count)
        block = fast_replace(problem, key=key, symmetric=symmetric, key_shard=not is_local)
        runner.require_room(block, None)
        if gradients is not None:
            runner.require_room(block, fast_replace(
                gradients, query=xp.empty((m, *row_shape(problem.query)), schedule.sum_dtype),
                add_query=True, key=xp.empty((key_count, *row_shape(key)), schedule.sum_dtype),
                # dK of another rank's keys is a part of that rank's dQ if queries are keys
                want_key=gradients.want_key or (problem.symmetric and not is_local),
            ))  # fmt: skip
    return None, None


def _find_blocks(request: Request, schedule: RankSchedule, rank: int) -> list[tuple[int, bool]]:
    """The different blocks of a round on this rank, the largest first.

    Each block is (number of its keys, whether it is the local block). The function finds the blocks
    by the visits of an exchange that sends nothing. The round of this exchange has no sums for
    keys. Blocks of a round with sums are these blocks or parts of them, because a gather divides
    shards with large sums (dK) into several visits. So the blocks found are the largest of a call.
    """
    blocks = set()

    def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
        blocks.add((len(keys), keys.are_own and keys.are_whole_shards))

    same_pairs = request.problem.compares_with_limits
    round = Round([], visit, visits_half=schedule.symmetric, same_pairs=same_pairs)
    make_exchange(schedule, None, rank, [], _NoTransfers()).run(round)
    return sorted(blocks, reverse=True)


class _NoTransfers:
    """An `Exchanger` that sends nothing, and its `Pending`."""

    def exchange(self, shifts: Shifts) -> _NoTransfers:
        return self

    def wait(self) -> None:
        """No transfer is under way."""
