"""The losses as folds over blocks of the logit matrix: written once, for every backend.

Nothing of size M x N is needed to know a contrastive loss or its gradient. Both are folds over
blocks (Q_a, K_b) of the logit matrix x_ij = scale * q_i . k_j:

1. **LSE fold.** A block yields partial (max, sum) pairs for its rows and its columns. They merge by
   ``m = max(m1, m2); sum = sum1 2^(m1 - m) + sum2 2^(m2 - m)`` with identity (-inf, 0), so tiles,
   devices and ranks fold in any grouping.
2. **Gradient fold.** With the log-sum-exps known, a block yields dL/dx, and through it its share of
   dQ_a and dK_b.

Losses differ by data alone (`Problem`): which directions count, which pairs are excluded, where the
positives are. A backend (`Backend`) supplies the grid of blocks and what happens to one block; the
order of the work, and all mathematics on vectors of length M or N, is here.

**Positives are kept out of the sums.** With n_i the log-sum-exp of the *negatives* of row i and p_i
its positive logit, the loss is ``softplus(n_i - p_i)`` and the gradient at the positive is
``-sigmoid(n_i - p_i)``. Nothing cancels: a loss of 1e-30 has all its digits, it is never negative,
and P - 1 is exact where P rounds to 1.

Exponents are in base 2 throughout (x2 = x log2 e): that is what the hardware computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
Array = Any  # a NumPy or CuPy array
Progress = Callable[[str, int, int], None]  # (phase, blocks done, blocks in all)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(eq=False)  # not frozen: that triples the time to make one, which small batches notice
class Problem:
    """One loss on one pair of checked feature arrays: all that a backend needs to know.

    `losses_i` is the loss of row i; the result is ``sum_i upstream_i * losses_i`` and gradients are
    of that. `upstream` carries the reduction and the caller's `grad_out`.

    `upstream` and `positives` are mostly the same for every call of a loss; `spelled_out` makes the
    vectors that the folds index. (A kernel that knows the rule saves the time to write them.)
    """

    query: Array  # [M, D]
    key: Array  # [N, D]; `query` itself where `symmetric`
    scale: Any  # number, or 0-d array on the device
    upstream: Any  # [M] float64; a number where it is the same for all rows
    positives: Array = None  # [M] int64: the key that is row i's positive; None for the loss's rule
    row_share: float | None = None  # weight of a row in the reduced loss; None: not reduced
    row_weight: float = 1.0  # weight of the softmax over keys
    column_weight: float = 0.0  # weight of the softmax over queries
    bias: Any = None  # not None: pairwise sigmoid (SigLIP), no softmax
    symmetric: bool = False  # one set of rows on both sides: i = j excluded, one triangle suffices
    part: bool = False  # keys are some of all keys: a row whose positive is not among them has -1
    apart: bool = False  # as no row's positive is
    query_ids: Array = None  # [M] int64, with key_ids [N]: equal ids are excluded,
    key_ids: Array = None  # except for the positive
    normalize: bool = False
    compute: str = "fp32"  # precision of products and exponentials
    method: str = "auto"
    workspace: int = 256 * 2**20  # bytes
    ranks: bool = False  # also count the keys that score above the positive
    progress: Progress | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, D)."""
        m, d = self.query.shape
        return m, len(self.key), d

    @property
    def square(self) -> bool:
        """Whether key i belongs to query i, or is one of the same views."""
        m, n, _ = self.shape
        by_rule = self.positives is None and m == n
        return not self.part and (
            self.symmetric or self.two_sided or self.bias is not None or by_rule
        )

    @property
    def two_sided(self) -> bool:
        """Whether columns have statistics of their own."""
        return self.column_weight != 0.0


def spelled_out(problem: Problem, xp: Any) -> Problem:
    """The same problem with its vectors as arrays: key i is positive for query i; of 2B views,
    i + B for i."""
    m = problem.shape[0]
    positives, upstream = problem.positives, problem.upstream
    if positives is None:
        positives = (xp.arange(m) + m // 2) % m if problem.symmetric else xp.arange(m)
    if isinstance(upstream, float):
        upstream = xp.full(m, upstream)
    return replace(problem, positives=positives, upstream=upstream)


@dataclass(frozen=True)
class Grid:
    """How a fold cuts the logit matrix: row panels by column blocks, or one triangle of them."""

    rows: Sequence[slice]
    columns: Sequence[slice]
    triangle: bool = False  # rows == columns, and only blocks with b >= a are visited

    def visits(self, a: int) -> range:
        """Column blocks of panel `a`, in the order in which they are folded."""
        return range(a if self.triangle else 0, len(self.columns))

    def __len__(self) -> int:
        return sum(len(self.visits(a)) for a in range(len(self.rows)))


def cut(end: int, step: int, start: int = 0) -> list[slice]:
    """Slices of at most `step` that cover range(start, end)."""
    return [slice(i, min(i + step, end)) for i in range(start, end, step)]


def changed(part: T, /, **values: Any) -> T:
    """`dataclasses.replace` in a tenth of the time: for what every block makes anew."""
    new = object.__new__(part.__class__)
    new.__dict__.update(part.__dict__, **values)
    return new


def within(xp: Any, positives: Array, keys: slice) -> Array:
    """Positives counted from the first of these keys; -1 for those that are not among them."""
    if hasattr(xp, "within"):  # a GPU has one kernel for all
        return xp.within(positives, keys.start, keys.stop)
    inside = (positives >= keys.start) & (positives < keys.stop)
    return xp.where(inside, positives - keys.start, -1)


@dataclass
class Sums:
    """Running (max, sum) of 2^x2 for every row or column of one side: the LSE fold's state."""

    max: Array  # [n] float64, identity -inf
    sum: Array  # [n] float64, identity 0: sum_j 2^(x2_j - max)

    @classmethod
    def identity(cls, xp: Any, n: int) -> Sums:
        if hasattr(xp, "empty_sums"):  # a GPU has one kernel for both
            return cls(*xp.empty_sums(n))
        return cls(xp.full(n, -xp.inf), xp.zeros(n))

    def clear(self) -> None:
        """Nothing is folded in yet."""
        self.max[:], self.sum[:] = -np.inf, 0.0

    def log2(self, xp: Any) -> Array:
        """log2 of the sum of 2^x2; -inf where nothing was folded in."""
        with np.errstate(divide="ignore"):
            return self.max + xp.log2(self.sum)

    def merge(self, other: Sums, xp: Any) -> None:
        """Fold `other` in."""
        if hasattr(xp, "merge_sums"):  # as above
            xp.merge_sums(other.max, other.sum, self.max, self.sum)
            return
        top = xp.maximum(self.max, other.max)
        finite = xp.where(xp.isneginf(top), 0.0, top)  # two empty sums: no difference of infinities
        self.sum[:] = self.sum * xp.exp2(self.max - finite)
        self.sum += other.sum * xp.exp2(other.max - finite)
        self.max[:] = top


# --- epilogues: what becomes of a block's logits --------------------------------------------------


@dataclass
class Statistics:
    """LSE fold. Row and column (max, sum) over the negatives, and the positives' logits."""

    rows: Sums
    columns: Sums | None  # `rows` itself in the symmetric case; None where columns do not count
    positive: Array  # [M] float64, base-2 logit of the positive
    row_rank: Array = None  # [M] int64: keys scoring above the positive (where asked for)
    column_rank: Array = None  # [N] int64

    phase = "log-sum-exp"


@dataclass
class Ranks:
    """Counts of what scores above the positives, whose logits are known."""

    positive: Array  # [M] float64, base 2
    row_rank: Array  # [M] int64, added to
    column_positive: Array = None  # [N]; None where only rows count
    column_rank: Array = None  # [N]

    phase = "ranks"


@dataclass
class SoftmaxGradient:
    """Gradient fold: dL/dx_ij = a_i 2^(x2_ij - R_i) + b_j 2^(x2_ij - C_j) off the positives."""

    row_lse: Array  # R [M], base 2, positives included
    row_factor: Array  # a [M], with `scale` folded in
    column_lse: Array | None  # C [N]
    column_factor: Array | None  # b [N]
    positive: Array  # [M]: dL/dx at (i, positive of i), with `scale` folded in
    column_positive: Array | None = None  # [N]: the same by column, where it is no row of these

    phase = "gradient"


@dataclass
class OnlineSoftmax:
    """LSE fold and sum_j 2^(x2_ij - max_i) k_j together: one pass where only dQ is wanted. (Any
    number near the maximum will do in its place.)"""

    rows: Sums
    positive: Array  # as in Statistics

    phase = "log-sum-exp and gradient"


@dataclass
class Sigmoid:
    """SigLIP's loss and dL/dx in one pass; there is no log-sum-exp to wait for."""

    row_factor: Array  # [M] upstream, with `scale` folded in
    losses: Array  # [M] out
    bias_grad: Array  # [M] out: sum_j dL/dx_ij, `scale` folded in
    positive: Array  # [M] out: scale q_i . k_j at the positive, natural units

    phase = "sigmoid loss"


Epilogue = Statistics | Ranks | SoftmaxGradient | OnlineSoftmax | Sigmoid


@dataclass
class Gradients:
    """Accumulators of dQ and dK, and where they go when they are complete."""

    query: Array | None = None  # [M, D] destination, any float dtype and strides
    key: Array | None = None  # [N, D] destination
    dots: Array = None  # float64 out: <dQ_i, q_i> [M] (or <dK_j, k_j> [N] if dQ is not wanted)
    want_query: bool = True
    want_key: bool = True
    add_query: bool = False  # to what is in `query` already


@dataclass
class Poison:
    """NaN where losses depend on a feature that is not finite, else 0: from blocks that share
    their queries."""

    rows: Array  # [M]
    all: Array  # [1]: added to every row
    known: bool = False  # as far as it comes from queries


class Backend(Protocol):
    """What the CPU, a GPU, or a ring of ranks supplies to the folds."""

    xp: Any  # numpy or cupy: mathematics on vectors of length M or N
    online: bool  # whether it folds `OnlineSoftmax`

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
    vectors: Vectors = getattr(backend, "vectors", None) or Vectors(backend)
    if gradients is not None and gradients.dots is None:
        m, n, _ = problem.shape
        gradients = replace(gradients, dots=vectors.dots(m if gradients.want_query else n))
    with np.errstate(invalid="ignore"):  # NaN in, NaN out
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

    end = vectors.conclude(problem, stats, grid.triangle, gradients is not None)
    rows, columns = end.rows, end.columns
    if gradients is not None and not online:
        column_lse2, b = (None, None) if columns is None else (columns.lse2, end.column_factor)
        if problem.symmetric:  # G + G': the columns are the rows
            column_lse2, b = rows.lse2, end.row_factor
        epilogue = SoftmaxGradient(rows.lse2, end.row_factor, column_lse2, b, end.at_positive)
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
    lse2: Array  # the same in base 2
    share: Array  # sigmoid(n - p): what the negatives hold of the softmax


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
    """The mathematics on vectors of length M and N. (A GPU has one kernel for each step.)"""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def dots(self, n: int) -> Array:
        """Memory for `Gradients.dots`."""
        return self.backend.xp.zeros(n)

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        """The problem spelled out, and the LSE fold's identity."""
        problem = spelled_out(problem, self.backend.xp)
        return problem, _statistics(problem, self.backend)

    def conclude(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool
    ) -> Conclusion:
        """Losses and, for a `gradient`, its factors; in a `triangle` each pair was met once."""
        backend = self.backend
        xp = backend.xp
        if triangle:
            stats.positive = mirrored(xp, stats.positive, problem.positives)
        rows = conclude(xp, stats.rows, stats.positive)
        losses = problem.row_weight * rows.loss + backend.poison(problem)
        a = problem.upstream * (problem.row_weight * problem.scale)
        at_positive = a * rows.share
        columns = b = None
        if problem.symmetric:
            if gradient:  # over ranks, others have to be asked
                at_positive = at_positive + backend.of_positives(problem, at_positive)
        elif problem.two_sided and stats.columns is not None:  # square: key i belongs to query i
            columns = conclude(xp, stats.columns, stats.positive)
            losses = losses + problem.column_weight * columns.loss
            b = problem.upstream * (problem.column_weight * problem.scale)
            at_positive = at_positive + b * columns.share
        return Conclusion(losses, rows, columns, a, b, -at_positive)

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        """The problem spelled out, and the sigmoid fold's beginning."""
        xp, m = self.backend.xp, problem.shape[0]
        problem = spelled_out(problem, xp)
        row_factor = problem.upstream * problem.scale
        return problem, Sigmoid(row_factor, xp.zeros(m), xp.zeros(m), xp.full(m, xp.nan))

    def poisoned(self, problem: Problem, losses: Array) -> Array:
        """Losses, and NaN for rows whose loss depends on a feature that is not finite."""
        return losses + self.backend.poison(problem)

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
    if hasattr(xp, "conclude"):  # a GPU has one kernel for all
        return Direction(*xp.conclude(sums.max, sums.sum, positive))
    negatives = sums.log2(xp)
    gap = negatives - positive
    lse2 = xp.logaddexp2(negatives, positive)
    return Direction(softplus2(xp, gap), LN_2 * lse2, lse2, sigmoid2(xp, gap))


def mirrored(xp: Any, positive: Array, positives: Array) -> Array:
    """Positives' logits of all rows, where a triangle met each pair once: from its lower row."""
    met = (positives > xp.arange(len(positives))) | (positives < 0)
    return xp.where(met, positive, positive[positives])


def _statistics(problem: Problem, backend: Backend) -> Statistics:
    """The LSE fold's identity for this problem."""
    xp = backend.xp
    m, n, _ = problem.shape
    rows = Sums.identity(xp, m)
    # what columns tell of rows is their sums alone: metrics want true maxima, and meet all pairs
    columns = rows if problem.symmetric and not problem.ranks else None
    if problem.two_sided:
        columns = Sums.identity(xp, n)
    stats = Statistics(rows, columns, xp.full(m, xp.nan))
    if problem.ranks:
        stats.row_rank = xp.zeros(m, xp.int64)
        if problem.two_sided:
            stats.column_rank = xp.zeros(n, xp.int64)
    return stats


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
    losses = vectors.poisoned(problem, epilogue.losses)
    loss, scale_grad, bias_grad = vectors.totals(problem, losses, gradients, epilogue.bias_grad)
    return Solution(losses, loss=loss, scale_grad=scale_grad, bias_grad=bias_grad)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap), natural units: the loss of a row whose negatives lead by `gap`."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap): the share of the softmax that the negatives hold."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
