"""The losses as folds over blocks of the logit matrix: written once, for every backend.

Nothing of size M x N is needed to know a contrastive loss or its gradient. Both are folds over
blocks (Q_a, K_b) of the logit matrix x_ij = scale * q_i . k_j:

1. **LSE fold.** A block yields partial (max, sum) pairs for its rows and its columns. They merge by
   ``m = max(m1, m2); sum = sum1 2^(m1 - m) + sum2 2^(m2 - m)`` with identity (-inf, 0), so tiles,
   devices and ranks fold in any grouping.
2. **Gradient fold.** With the log-sum-exps known, a block yields dL/dx, and through it its share of
   dQ_a and dK_b.

Losses differ by data alone (`problem.Problem`): which directions count, which pairs are excluded,
where the positives are. A backend (`Backend`) supplies the grid of blocks and what happens to one
block; the order of the work, and all mathematics on vectors of length M or N, is here.

**Positives are kept out of the sums.** With n_i the log-sum-exp of the *negatives* of row i and p_i
its positive logit, the loss is ``softplus(n_i - p_i)`` and the gradient at the positive is
``-sigmoid(n_i - p_i)``. Nothing cancels: a loss of 1e-30 has all its digits, it is never negative,
and P - 1 is exact where P rounds to 1.

**Exponents are differences of logits, never of a logit and a log-sum-exp.** Beyond 2^53 a logit has
no digits for what a log-sum-exp is above it. So probabilities are 2^(x2 - h) divided by
sum_j 2^(x2_ij - h), h being the largest logit: whatever the logits, none exceeds 1.

Exponents are in base 2 throughout (x2 = x log2 e): that is what the hardware computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from .problem import (
    LN_2,
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Poison,
    Problem,
    Ranks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    cut,
    spelled_out,
)


class Backend(Protocol):
    """What the CPU, a GPU, or a ring of ranks supplies to the folds."""

    online: bool  # whether it folds `OnlineSoftmax`

    @property
    def vectors(self) -> Vectors:
        """The mathematics on vectors of length M or N."""
        ...

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        """The blocks of the whole logit matrix."""
        ...

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        """Visit every block: logits, `epilogue`, and dQ_a += P K_b, dK_b += P' Q_a where wanted.

        Row panels may run in parallel; a column block is visited in the order of the panels.
        Completed gradients go to their destination, through the normalisation.
        """
        ...

    def key_ranges(self, problem: Problem) -> list[slice]:
        """Ranges of keys whose gradients can be gathered at once: all keys, where they fit."""
        ...

    def poison(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        ...

    def of_positives(self, problem: Problem, of_keys: Array) -> Array:
        """[M] what each row's positive has in a vector over keys."""
        ...


# --- solving --------------------------------------------------------------------------------------


@dataclass
class Solution:
    """Everything one evaluation produces, natural units."""

    losses: Array | None = None  # [M] per-row losses; None where only `loss` was wanted
    row_lse: Array | None = None  # [M]
    column_lse: Array | None = None  # [N]
    statistics: Statistics | None = None
    directions: tuple[Array, Array | None] | None = None  # losses [M] of rows and [N] of columns
    means: tuple[Array, Array | None] | None = None  # of `directions`, over all ranks
    logits: Array | None = None  # [M, N], naive only
    scale_grad: Array | None = None  # 0-d
    bias_grad: Array | None = None  # 0-d
    loss: Array | None = None  # 0-d, reduced by `row_share`, from a backend that does so itself


def solve(problem: Problem, backend: Backend, gradients: Gradients | None) -> Solution:
    """Loss, log-sum-exps and gradients of `problem`: the one path every loss and backend takes."""
    vectors = backend.vectors
    if gradients is not None and gradients.dots is None:
        m, n, _ = problem.shape
        gradients = replace(gradients, dots=vectors.dots(m if gradients.want_query else n))
    if problem.bias is not None:
        return _solve_sigmoid(problem, backend, vectors, gradients)
    return _solve_softmax(problem, backend, vectors, gradients)


def fold_block(
    backend: Backend, problem: Problem, triangle: bool, epilogue: Epilogue,
    gradients: Gradients | None, poison: Poison | None = None, fresh: Sums | None = None,
) -> None:  # fmt: skip
    """Fold all of `problem` into `epilogue`, as a block of a larger one; and into `poison`, where
    losses are in the making. `fresh`: those of its sums that hold nothing yet, but any numbers."""
    if fresh is not None:
        fresh.clear()
    backend.fold(problem, backend.grid(problem, triangle), epilogue, gradients)
    if poison is not None:
        poison.rows += backend.poison(problem)


def one_pass(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether `OnlineSoftmax` is all it takes: dQ alone is wanted, and columns have no sums."""
    sums = problem.bias is None and not (problem.two_sided or problem.symmetric or problem.ranks)
    return sums and gradients is not None and not gradients.want_key


def _solve_softmax(
    problem: Problem, backend: Backend, vectors: Vectors, gradients: Gradients | None
) -> Solution:
    problem, stats = vectors.statistics(problem)
    grid = backend.grid(problem, problem.symmetric and not problem.ranks)
    online = backend.online and one_pass(problem, gradients)
    if online:
        backend.fold(problem, grid, OnlineSoftmax(stats.rows, stats.positive), gradients)
    else:
        backend.fold(problem, grid, stats, None)

    end = vectors.conclude(problem, stats, grid.triangle, gradients is not None, backend)
    rows, columns = end.rows, end.columns
    if gradients is not None and not online:
        height, b = (None, None) if columns is None else (columns.height, end.column_factor)
        if problem.symmetric:  # G + G': the columns are the rows
            height, b = rows.height, end.row_factor
        epilogue = SoftmaxGradient(rows.height, end.row_factor, height, b, end.at_positive)
        _gradient_fold(problem, backend, vectors, epilogue, gradients)
    loss, scale_grad, _ = vectors.totals(problem, end.losses, gradients)
    return Solution(
        end.losses, rows.lse, None if columns is None else columns.lse, stats,
        (rows.loss, None if columns is None else columns.loss), scale_grad=scale_grad, loss=loss,
    )  # fmt: skip


@dataclass
class Direction:
    """What follows for one side from its sums and the positives' logits."""

    loss: Array  # softplus(n - p): log-sum-exp of the negatives against the positive
    lse: Array  # log-sum-exp, the positive included
    share: Array  # sigmoid(n - p): what the negatives hold of the softmax
    height: Array  # of `SoftmaxGradient`
    at_height: Any  # 2^(height - log-sum-exp): what a logit of that height holds of the softmax


@dataclass
class Conclusion:
    """What follows from complete statistics."""

    losses: Array  # [M]
    rows: Direction
    columns: Direction | None  # of a two-sided loss
    row_factor: Array  # a of SoftmaxGradient
    column_factor: Array | None  # b, of a two-sided loss
    at_positive: Array  # [M]


class Vectors:
    """The mathematics on vectors of length M and N, on NumPy's arrays or CuPy's."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    # -- what folds over blocks, ranks and panels share

    def identity(self, n: int) -> Sums:
        """Sums in which nothing is folded yet."""
        return Sums(self.xp.full(n, -self.xp.inf), self.xp.zeros(n))

    def merge(self, sums: Sums, other: Sums) -> None:
        """Fold `other` into `sums`."""
        xp = self.xp
        top = xp.maximum(sums.max, other.max)
        finite = xp.where(xp.isneginf(top), 0.0, top)  # two empty sums: no difference of infinities
        sums.sum[:] = sums.sum * xp.exp2(sums.max - finite)
        sums.sum += other.sum * xp.exp2(other.max - finite)
        sums.max[:] = top

    def within(self, positives: Array, keys: slice) -> Array:
        """Positives counted from the first of these keys; -1 for those that are not among them."""
        inside = (positives >= keys.start) & (positives < keys.stop)
        return self.xp.where(inside, positives - keys.start, -1)

    def direction(self, sums: Sums, positive: Array) -> Direction:
        """What follows for one side from its sums and the positives' logits."""
        return conclude(self.xp, sums, positive)

    # -- the steps of a call

    def dots(self, n: int) -> Array:
        """Memory for `Gradients.dots`."""
        return self.xp.zeros(n)

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        """The problem spelled out, and the LSE fold's identity."""
        problem, xp = spelled_out(problem, self.xp), self.xp
        m, n, _ = problem.shape
        rows = self.identity(m)
        # columns tell of rows their sums alone: metrics want true maxima, and meet all pairs
        columns = rows if problem.symmetric and not problem.ranks else None
        if problem.two_sided:
            columns = self.identity(n)
        stats = Statistics(rows, columns, xp.full(m, xp.nan))
        if problem.ranks:
            stats.row_rank = xp.zeros(m, xp.int64)
            if problem.two_sided:
                stats.column_rank = xp.zeros(n, xp.int64)
        return problem, stats

    def conclude(
        self,
        problem: Problem,
        stats: Statistics,
        triangle: bool,
        gradient: bool,
        backend: Backend,
    ) -> Conclusion:
        """Losses and, for a `gradient`, its factors; in a `triangle` each pair was met once."""
        xp = self.xp
        if triangle:
            stats.positive = mirrored(xp, stats.positive, problem.positives)
        rows = self.direction(stats.rows, stats.positive)
        losses = problem.row_weight * rows.loss + backend.poison(problem)
        a = problem.upstream * (problem.row_weight * problem.scale)
        at_positive = a * rows.share
        row_factor = a * rows.at_height
        columns = b = None
        if problem.symmetric:
            if gradient:  # over ranks, others have to be asked
                at_positive = at_positive + backend.of_positives(problem, at_positive)
        elif problem.two_sided and stats.columns is not None:  # square: key i belongs to query i
            columns = self.direction(stats.columns, stats.positive)
            losses = losses + problem.column_weight * columns.loss
            b = problem.upstream * (problem.column_weight * problem.scale)
            at_positive = at_positive + b * columns.share
            b = b * columns.at_height
        return Conclusion(losses, rows, columns, row_factor, b, -at_positive)

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        """The problem spelled out, and the sigmoid fold's beginning."""
        xp, m = self.xp, problem.shape[0]
        problem = spelled_out(problem, xp)
        row_factor = problem.upstream * problem.scale
        return problem, Sigmoid(row_factor, xp.zeros(m), xp.zeros(m), xp.full(m, xp.nan))

    def poisoned(self, problem: Problem, losses: Array, backend: Backend) -> Array:
        """Losses, and NaN for rows whose loss depends on a feature that is not finite."""
        return losses + backend.poison(problem)

    def totals(
        self, problem: Problem, losses: Array, gradients: Gradients | None,
        of_bias: Array | None = None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """The reduced loss, or None where that is left to others; gradients of scale and bias."""
        if gradients is None:
            return None, None, None
        halves = 2.0 if problem.symmetric else 1.0  # every pair stands twice in <dZ, z>
        bias_grad = None if of_bias is None else of_bias.sum() / problem.scale
        return None, gradients.dots.sum() / (halves * problem.scale), bias_grad


def ranks_of(stats: Statistics, problem: Problem) -> Ranks:
    """The counts that `stats`, complete but for them, want."""
    ranks = Ranks(stats.positive, stats.row_rank)
    if problem.two_sided:  # square: key i belongs to query i
        ranks.column_positive, ranks.column_rank = stats.positive, stats.column_rank
    return ranks


def conclude(xp: Any, sums: Sums, positive: Array) -> Direction:
    """From the (max, sum) of the negatives and the positive's logit, base 2."""
    gap = (sums.max - positive) + xp.log2(sums.sum)
    top = xp.maximum(sums.max, positive)
    total = sums.sum * xp.exp2(sums.max - top) + xp.exp2(positive - top)
    lse2 = top + xp.log2(total)
    # columns may have the maximum of more than their own logits: a total below 1
    height, at_height = xp.minimum(top, lse2), 1.0 / xp.maximum(total, 1.0)
    return Direction(softplus2(xp, gap), LN_2 * lse2, sigmoid2(xp, gap), height, at_height)


def mirrored(xp: Any, positive: Array, positives: Array) -> Array:
    """Positives' logits of all rows, where a triangle met each pair once: from its lower row."""
    met = (positives > xp.arange(len(positives))) | (positives < 0)
    return xp.where(met, positive, positive[positives])


def _gradient_fold(
    problem: Problem, backend: Backend, vectors: Vectors, epilogue: SoftmaxGradient | Sigmoid,
    gradients: Gradients,
) -> None:  # fmt: skip
    """One sweep for dQ and dK where all of dK can be gathered at once. Where it cannot: dQ first,
    then dK by ranges of keys, the logits computed once more; memory stays within bounds."""
    ranges = backend.key_ranges(problem)
    if problem.symmetric:  # all rows gather at once, or the whole square is visited
        triangle = len(ranges) == 1
        backend.fold(problem, backend.grid(problem, triangle), epilogue, gradients)
        return
    grid = backend.grid(problem, False)
    if not gradients.want_key or len(ranges) == 1:
        backend.fold(problem, grid, epilogue, gradients)
        return
    if gradients.want_query:
        backend.fold(problem, grid, epilogue, replace(gradients, want_key=False))
        if isinstance(epilogue, Sigmoid):  # losses are complete: do not count them twice
            _, epilogue = vectors.sigmoid(problem)
    width = grid.columns[0].stop - grid.columns[0].start
    for keys in ranges:
        columns = cut(keys.stop, width, keys.start)
        only_key = replace(gradients, want_query=False)
        if gradients.want_query:
            only_key.dots = None
        backend.fold(problem, Grid(grid.rows, columns), epilogue, only_key)


def _solve_sigmoid(
    problem: Problem, backend: Backend, vectors: Vectors, gradients: Gradients | None
) -> Solution:
    problem, epilogue = vectors.sigmoid(problem)
    if gradients is None:
        backend.fold(problem, backend.grid(problem, False), epilogue, None)
    else:
        _gradient_fold(problem, backend, vectors, epilogue, gradients)
    losses = vectors.poisoned(problem, epilogue.losses, backend)
    loss, scale_grad, bias_grad = vectors.totals(problem, losses, gradients, epilogue.bias_grad)
    return Solution(losses, loss=loss, scale_grad=scale_grad, bias_grad=bias_grad)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap), natural units: the loss of a row whose negatives lead by `gap`."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap): the share of the softmax that the negatives hold."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
