"""The passes of every loss in their order, for the CPU, ranks and features in host memory.

A tiled call on a GPU runs the same steps in kernels/gpu/tiled/backend.py: `GPU.solve`. The methods
naive and fused have no passes.

A contrastive loss and its gradient need no matrix of size M x N. A pass visits all blocks (Q_a,
K_b) of the logit matrix x_ij = scale * q_i . k_j and combines their results:

1. **Log-sum-exp pass.** A block yields partial (max, sum) pairs for its rows and its columns. Pairs
   merge by ``m = max(m1, m2); sum = sum1 2^(m1 - m) + sum2 2^(m2 - m)`` with identity (-inf, 0), in
   any grouping over tiles, devices and ranks. For the gradient of the scale, each sum may have a
   first moment of the logits, which merges in the same way.
2. **Gradient pass.** With the log-sum-exps known, a block yields dL/dx, and with dL/dx its terms of
   dQ_a and dK_b.

Losses differ only in data (`problem.Problem`): which directions count, which pairs are excluded,
where the positives are. A backend (`Backend`) has the grid of blocks and computes one block. This
module has the order of the work, and the operations on vectors of length M or N (`Vectors`).

**Positives are kept out of the sums.** With n_i the log-sum-exp of the *negatives* of row i and p_i
its positive logit, the loss is ``softplus(n_i - p_i)`` and the gradient at the positive is
``-sigmoid(n_i - p_i)``. Only logits are subtracted from each other, so small losses keep
their relative precision. A loss is never negative. The gradient at the positive, its probability
minus 1, keeps its digits even if the probability rounds to 1.

**Exponents are differences of two logits, never of a logit and a log-sum-exp.** From 2^53 on, the
spacing of float64 numbers is larger than the difference between a log-sum-exp and the largest
logit. So probabilities are 2^(x2 - r) divided by sum_j 2^(x2_ij - r), where the reference exponent
r is the largest logit. Then no probability exceeds 1.

**The gradient of the scale** has two sources (`problem.uses_moments`). One is the first pass: the
derivative of n_i with respect to log(scale) is the mean E_i[x] of the negatives' logits under their
softmax, and the derivative of a row's loss is ``sigmoid(n_i - p_i) (E_i[x] - p_i)``. Nothing
cancels at a high scale: E_i[x] does not contain the positive, so the sigmoid multiplies a
difference of logits of different pairs. The rounding of dL/dx to 16 bits does not affect this
source. The other is ``sum_i <dQ_i, q_i>``, from feature gradients. It lacks the part of a margin m:
the logit p = scale (q . k - m) of a positive adds ``-scale m dL/dp``, which `finalize` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .between_passes import Finalized, OwnNegatives, finalize
from .direction_losses import DirectionLosses, finalize_direction
from .epilogues import Epilogue, OnlineSoftmax, Sigmoid, SoftmaxGradient, Statistics, Sums
from .grid import Grid, gradient_visits
from .options import find_limits, with_found_vectors
from .problem import LN_2, Array, Gradients, NotFinite, Problem, materialize_vectors
from .targets import mirror_positive_logits


class Backend(Protocol):
    """The operations that `solve_by_passes` needs. Linear terms need `linear.Summing`, too."""

    @property
    def vectors(self) -> Vectors:
        """The operations on vectors of length M or N, on the memory of this backend."""
        ...

    def has_online_softmax(self, problem: Problem, gradients: Gradients) -> bool:
        """Whether one pass computes the losses and these gradients: `OnlineSoftmax`."""
        ...

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        """The blocks of a pass. `triangle`: blocks below the diagonal may be left out."""
        ...

    def run_pass(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        """Visit every block of the grid: compute its logits and apply `epilogue` to them.

        The epilogue of a gradient pass makes the gradient block P = scale dL/dx, and the pass adds
        P K_b to dQ_a and P' Q_a to dK_b. Row blocks may run in parallel, but blocks of the same
        columns add to them in the order of their row blocks, so that a call has the same bits each
        time. When all blocks have added to a gradient, the pass differentiates it through the
        normalisation and writes it to its destination in `gradients` (None: no gradients).
        """
        ...

    def key_ranges(self, problem: Problem) -> list[slice]:
        """Ranges of keys whose dK a pass can accumulate at once: one range if all of dK fits."""
        ...

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN for rows with an invalid label, and rows whose loss depends on a feature that is
        not finite; else 0. Called after the log-sum-exp pass."""
        ...

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        """[M] or [M, P]: per_key[positives], from a vector [N] over all keys; any value without a
        positive."""
        ...

    def positive_dots(self, problem: Problem) -> Array:
        """[M] or [M, P] float64: dot products of rows with their positives; any value without a
        positive."""
        ...


# --- the order of the passes ----------------------------------------------------------------------


@dataclass
class Solution:
    """The results of a call, except for dQ and dK, which are in `Gradients`. Units are natural."""

    losses: Array | None = None  # [M] losses of rows without row shares; None: only `loss` is known
    row_lse: Array | None = None  # [M] log-sum-exps over the keys
    column_lse: Array | None = None  # [N] log-sum-exps over the queries; None: no such softmax
    statistics: Statistics | None = None  # for metrics: retrieval ranks and largest logits
    # for metrics: losses [M] of rows and [N] of columns, without direction weights, and the means
    # of both over all ranks
    direction_losses: tuple[Array, Array | None] | None = None
    mean_losses: tuple[Array, Array | None] | None = None
    logits: Array | None = None  # [M, N]; only method="naive"
    scale_grad: Array | None = None  # 0-d
    bias_grad: Array | None = None  # 0-d
    loss: Array | None = None  # 0-d, reduced; None: the caller reduces `losses`


def solve_by_passes(problem: Problem, backend: Backend, gradients: Gradients | None) -> Solution:
    """Loss, log-sum-exps and gradients of any loss. `gradients` None: only the loss."""
    vectors = backend.vectors
    gradients = vectors.with_dots(problem, gradients)
    if problem.bias is not None:
        return _solve_sigmoid(problem, backend, vectors, gradients)
    return _solve_softmax(problem, backend, vectors, gradients)


# A function of the backend and the problem of a block, which takes the place of a pass: it asks the
# backend for segment sums or dot products of positives
BlockQuestion = Callable[[Any, Problem], None]


def run_block_pass(
    backend: Backend, problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None = None, to_clear: Sums | None = None,
) -> None:  # fmt: skip
    """Run the pass of `epilogue` over a problem that is one block of a larger problem.

    The larger problem is over ranks or in host memory. `triangle`: visit only a triangle of this
    block, whose queries are its keys. The sums `to_clear`, in the memory of an earlier block, are
    emptied first. The NaN flags of this block are added to `not_finite`, unless it is None.
    """
    if callable(epilogue):
        epilogue(backend, problem)
        return
    if to_clear is not None:
        to_clear.clear()
    if gradients is not None and isinstance(epilogue, SoftmaxGradient | Sigmoid):
        run_gradient_pass(problem, backend, triangle, epilogue, gradients)
    else:
        backend.run_pass(problem, backend.grid(problem, triangle), epilogue, gradients)
    if not_finite is not None:
        not_finite.rows += backend.row_nans(problem)


def allows_online_softmax(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether one pass may compute the losses of a softmax, and dQ (`OnlineSoftmax`).

    All of these hold: gradients are wanted, but not dK, whose terms need complete sums of rows;
    no retrieval ranks; one softmax, over keys (no SigLIP); queries are not the keys; one positive a
    row; no linear terms; `plain_targets` or `plain_logits` is true. On the CPU,
    `CPU.has_online_softmax` also asks for `plain`. On a GPU, `may_compute_in_one_pass` decides.
    """
    if gradients is None or gradients.want_key or problem.retrieval_ranks:
        return False
    if problem.bias is not None or problem.two_sided or problem.symmetric:
        return False
    return problem.plain_targets or (problem.loss_follows_from_sums and problem.set_size == 1)


def _solve_softmax(
    problem: Problem, backend: Backend, vectors: Vectors, gradients: Gradients | None
) -> Solution:
    """The two passes of a softmax loss, or its online softmax, and the steps after each pass."""
    problem, stats = vectors.statistics(problem)
    if problem.compares_with_limits:
        problem = with_found_vectors(problem, backend, vectors)
    # metrics (`retrieval_ranks`) need whole rows: see `Vectors.statistics`
    grid = backend.grid(problem, problem.symmetric and not problem.retrieval_ranks)
    online = gradients is not None and backend.has_online_softmax(problem, gradients)
    if online:  # both passes in one
        backend.run_pass(problem, grid, OnlineSoftmax(stats.rows, stats.positive_logits), gradients)
    else:  # the log-sum-exp pass
        backend.run_pass(problem, grid, stats, None)

    finalized = vectors.finalize(problem, stats, grid.triangle, gradients is not None, backend)
    dots = None if gradients is None else gradients.dots
    if gradients is not None and not online and (gradients.want_query or gradients.want_key):
        epilogue = finalized.softmax_gradient(problem.symmetric)  # the gradient pass
        run_gradient_pass(problem, backend, problem.symmetric, epilogue, gradients)
    if finalized.own is not None and gradients is not None:
        finalized.own.finish(finalized, gradients)
    loss, scale_grad, _ = vectors.totals(
        problem, finalized.losses, finalized.log_scale_grad, dots, None
    )
    return make_solution(finalized, stats, loss, scale_grad)


def make_solution(finalized: Finalized, stats: Statistics, loss: Any, scale_grad: Any) -> Solution:
    """The solution of a softmax loss, from its vectors (`finalized`) and totals."""
    rows, columns = finalized.rows, finalized.columns
    return Solution(
        finalized.losses, rows.lse, None if columns is None else columns.lse, stats,
        (rows.loss, None if columns is None else columns.loss), scale_grad=scale_grad, loss=loss,
    )  # fmt: skip


def find_nan(xp: Any, losses: Array) -> Any:
    """NaN if a loss is NaN, else 0: the gradients of scale and bias add it to sums over pairs.

    The sums leave out excluded pairs and logits of -inf, so they may be finite although a loss is
    NaN.
    """
    return xp.where(xp.isnan(losses), xp.nan, 0.0).sum()


class Vectors:
    """The operations on vectors of length M and N, as arrays of NumPy or CuPy (`xp`).

    GPU backends override most methods by kernels. `passes_on_gpu`: a GPU computes the blocks. Its
    passes multiply the dot products of positives by `Problem.exponent_scale`, and not by
    `Problem.scale`; and instead of the maximum, their sums may have a reference exponent far below
    the largest logit.
    """

    def __init__(self, xp: Any, passes_on_gpu: bool = False) -> None:
        self.xp, self.passes_on_gpu = xp, passes_on_gpu

    # -- operations on vectors, or on their parts that belong to a block or a rank

    def identity(self, n: int, moments: bool) -> Sums:
        """Sums of n rows (or columns) over no logits."""
        xp = self.xp
        return Sums(xp.full(n, -xp.inf), xp.zeros(n), xp.zeros(n) if moments else None)

    def merge(self, sums: Sums, other: Sums) -> None:
        """Merge `other`, sums of the same rows over other logits, into `sums`."""
        xp = self.xp
        top = xp.maximum(sums.max, other.max)
        finite = xp.where(xp.isneginf(top), 0.0, top)  # -inf - -inf would be NaN
        own_factor, other_factor = xp.exp2(sums.max - finite), xp.exp2(other.max - finite)
        sums.sum[:] = sums.sum * own_factor + other.sum * other_factor
        if sums.moment is not None:
            sums.moment[:] = sums.moment * own_factor + other.moment * other_factor
        sums.max[:] = top

    def zero_vector(self, n: int) -> Array:
        """[n] float64 zeros."""
        return self.xp.zeros(n)

    def add(self, sums: Array, other: Array) -> None:
        """sums += other, element-wise."""
        sums += other

    def assign(self, to: Array, sums: Array | float, *others: Array) -> None:
        """Add `others` to `sums`, then write `sums` into `to`, converted to its dtype."""
        for other in others:
            self.add(sums, other)
        to[...] = sums

    def positives_in_block(self, positives: Array, keys: slice, total: int = 0) -> Array:
        """The positives as indices within the range `keys`; -1 for a positive outside, and for -1.
        A range over ranks may go on from the last of `total` keys to key 0: then `keys.stop` is
        above `total`."""
        index = positives - keys.start
        index = self.xp.where(index < 0, index + total, index)
        is_inside = (positives >= 0) & (index >= 0) & (index < keys.stop - keys.start)
        return self.xp.where(is_inside, index, -1)

    def direction(
        self, sums: Sums, positive: Array, decoupled: bool = False,
        softmax_mean: Array | None = None,
    ) -> DirectionLosses:  # fmt: skip
        """`finalize_direction`: losses of rows, or of columns, from complete sums."""
        losses = finalize_direction(self.xp, sums, positive, decoupled, softmax_mean)
        if self.passes_on_gpu:  # of the gradient pass, references are at least the largest logit
            lse2 = losses.lse / LN_2
            losses.reference = self.xp.where(self.xp.isneginf(lse2), 0.0, lse2)
            losses.reference_probability = 1.0
        return losses

    # -- the steps of a call

    def with_dots(self, problem: Problem, gradients: Gradients | None) -> Gradients | None:
        """The destinations, with memory for `Gradients.dots` if the scale's gradient needs them."""
        if gradients is None or not problem.scale_grad_from_dots or gradients.dots is not None:
            return gradients
        dots = self.dots(len(problem.query if gradients.want_query else problem.key))
        return replace(gradients, dots=dots)

    def dots(self, n: int) -> Array:
        """[n] memory for `Gradients.dots`."""
        return self.xp.zeros(n)

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        """The problem with its vectors as arrays, and the log-sum-exp pass's empty epilogue."""
        problem, xp = materialize_vectors(problem, self.xp), self.xp
        (m, n, _), moments = problem.shape, problem.moments
        rows = self.identity(m, moments)
        # The columns of a triangle are rows of the other half, so columns share the sums of rows.
        # The `max` of shared sums may be above the largest logit. Metrics report the largest logit,
        # so a call with metrics visits the whole square
        columns = rows if problem.symmetric and not problem.retrieval_ranks else None
        if problem.two_sided:
            columns = self.identity(n, moments)
        stats = Statistics(rows, columns, xp.full(problem.positives.shape, xp.nan))
        if problem.retrieval_ranks:
            stats.row_rank = xp.zeros(m, xp.int64)
            if problem.two_sided:
                stats.column_rank = xp.zeros(n, xp.int64)
        return problem, stats

    def find_limits(self, problem: Problem, dots: Array) -> Array:
        """[M] limits of rows, from the dot products of their positives: `options.find_limits`."""
        return find_limits(self.xp, problem, dots)

    def own_negatives(self, problem: Problem) -> OwnNegatives:
        """The own negatives of the problem, whose sums are not in those of the passes."""
        return OwnNegatives(self.xp, problem)

    def finalize(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool,
        backend: Backend,
    ) -> Finalized:  # fmt: skip
        """The step between the passes: `between_passes.finalize`. `triangle`: the pass visited each
        pair of rows once. `gradient`: a gradient pass follows."""
        if triangle:
            stats.positive_logits = mirror_positive_logits(
                self.xp, stats.positive_logits, problem.positives
            )
        if problem.hardness and self.passes_on_gpu:
            ratio = problem.scale / problem.exponent_scale
            stats.positive_logits = stats.positive_logits * ratio
        return finalize(self, problem, stats, gradient, backend, problem.scale)

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        """The problem with its vectors as arrays, and the epilogue of a pairwise sigmoid's pass."""
        xp, m = self.xp, problem.shape[0]
        problem = materialize_vectors(problem, xp)
        row_factor = problem.upstream * problem.scale
        log_scale_grad = xp.zeros(m) if problem.moments else None
        positive = xp.full(m, xp.nan)
        return problem, Sigmoid(row_factor, xp.zeros(m), xp.zeros(m), log_scale_grad, positive)

    def unread_sigmoid(self, problem: Problem, sigmoid: Sigmoid) -> Sigmoid:
        """`sigmoid` for passes after the first, which has completed the losses: they add to vectors
        that nobody reads."""
        _, unread = self.sigmoid(problem)
        return replace(unread, row_factor=sigmoid.row_factor)

    def losses_with_nans(self, problem: Problem, sigmoid: Sigmoid, backend: Backend) -> Array:
        """The losses of a sigmoid, NaN where they depend on a feature that is not finite."""
        return sigmoid.losses + backend.row_nans(problem)

    def totals(
        self, problem: Problem, losses: Array, log_scale_grad: Array | None,
        dots: Array | None, bias_grad: Array | None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """(reduced loss, gradient of the scale, gradient of the bias), 0-d each.

        The loss is None: the caller reduces `losses`, except on a GPU. A gradient is None if it is
        not wanted. The gradient of the scale is the float64 sum of `log_scale_grad` (`Finalized`)
        and `dots` (`Gradients`). `bias_grad` [M]: the bias's gradient by row, times the scale.
        """
        parts = (log_scale_grad, 1.0), (dots, problem.pair_repeats)
        scale_parts = [part.sum() / divisor for part, divisor in parts if part is not None]
        scale_grad = total_bias_grad = None
        if scale_parts or bias_grad is not None:
            nan = find_nan(self.xp, losses)
            if scale_parts:
                scale_grad = sum(scale_parts) / problem.scale + nan
            if bias_grad is not None:
                total_bias_grad = bias_grad.sum() / problem.scale + nan
        return None, scale_grad, total_bias_grad

    def sum_over_ranks(self, numbers: Array, divisors: Sequence[float], dtype: Any) -> Array:
        """[K]: `numbers` [ranks, K] added up in the order of ranks, divided by `divisors` [K]."""
        total: Array = sum(numbers)
        return (total / divisors).astype(dtype)


def run_gradient_pass(
    problem: Problem, backend: Backend, triangle: bool, epilogue: SoftmaxGradient | Sigmoid,
    gradients: Gradients,
) -> None:  # fmt: skip
    """Compute dQ and dK in one pass, or in several (`gradient_visits`)."""
    ranges, wanted = backend.key_ranges(problem), (gradients.want_query, gradients.want_key)
    grid = backend.grid(problem, triangle and len(ranges) == 1)
    visits = gradient_visits(grid, ranges, problem.symmetric, *wanted)
    for i, (part, want_query, want_key) in enumerate(visits):
        if i == 1 and gradients.want_query:  # the pass for dQ has written dots and losses
            gradients = replace(gradients, dots=None)
            if isinstance(epilogue, Sigmoid):
                epilogue = backend.vectors.unread_sigmoid(problem, epilogue)
        some = replace(gradients, want_query=want_query, want_key=want_key)
        backend.run_pass(problem, part, epilogue, some)


def _solve_sigmoid(
    problem: Problem, backend: Backend, vectors: Vectors, gradients: Gradients | None
) -> Solution:
    """The only pass of a pairwise sigmoid, which computes losses and gradients."""
    problem, epilogue = vectors.sigmoid(problem)
    if gradients is None:
        backend.run_pass(problem, backend.grid(problem, False), epilogue, None)
    else:
        run_gradient_pass(problem, backend, False, epilogue, gradients)
    return sigmoid_solution(problem, epilogue, backend, gradients)


def sigmoid_solution(
    problem: Problem, sigmoid: Sigmoid, backend: Any, gradients: Gradients | None
) -> Solution:
    """The solution of a pairwise sigmoid, from the vectors that its pass has completed. `backend`:
    a `Backend`, or the `GPU` of a whole call."""
    losses = backend.vectors.losses_with_nans(problem, sigmoid, backend)
    bias_grad = sigmoid.bias_grad if problem.scalar_grads else None
    dots = None if gradients is None else gradients.dots
    loss, scale_grad, bias_grad = backend.vectors.totals(
        problem, losses, sigmoid.log_scale_grad, dots, bias_grad
    )
    return Solution(losses, loss=loss, scale_grad=scale_grad, bias_grad=bias_grad)
