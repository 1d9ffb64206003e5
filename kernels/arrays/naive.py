"""method="naive": the whole logit matrix, as in a textbook, on NumPy's arrays or CuPy's.

Three matrix products, one M x N matrix, and a few passes over it. This is not fast and needs much
memory, but it shows what the passes compute, and it can return the logits. Exponents are natural.
Nothing reads an element of an array on the host: so masks are arguments of `copyto`, because CuPy
counts the elements of a mask that is an index.

M x N matrices (`PairMatrix`) have one further element after the last, at the index of a positive
that a row lacks: code that sets positives aside needs no branch. x are logits in natural units, and
`index` [M] or [M, P] has the positions of the positives in `x.flat`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..between_passes import Finalized, finalize
from ..direction_losses import DirectionLosses
from ..epilogues import Statistics, Sums
from ..linear import Segments, SegmentSums, segment_sums_from_products
from ..norms import normalization_backward, normalized_rows
from ..options import Masks, PairBlock, PositivePairs, find_masks, with_found_vectors
from ..problem import LOG2_E, Array, Gradients, Problem, materialize_vectors
from ..solve import Solution, Vectors, find_nan

# The largest number of M x N arrays that exist at one time, without and with options of the softmax
MATRICES, MATRICES_WITH_OPTIONS = 4, 10


def matrix_bytes(problem: Problem) -> int:
    """Bytes of all M x N matrices that exist at one time: the CPU asks whether they are free."""
    m, n, _ = problem.shape
    matrices = MATRICES if problem.plain else MATRICES_WITH_OPTIONS + problem.guided
    return matrices * m * n * (8 if problem.compute_precision == "fp64" else 4)


def solve_whole_matrix(problem: Problem, gradients: Gradients | None, vectors: Vectors) -> Solution:
    """Loss and gradients of `problem` from the full matrix of logits."""
    xp, (m, n, _) = vectors.xp, problem.shape
    dtype = np.dtype(np.float64 if problem.compute_precision == "fp64" else np.float32)
    query, norms = normalized_rows(xp, problem.query, problem.normalize, dtype)
    key, key_norms = query, norms
    if not problem.symmetric:
        key, key_norms = normalized_rows(xp, problem.key, problem.normalize, dtype)
    if problem.guided:
        guide_query, guide_key = (
            normalized_rows(xp, z, problem.normalize, dtype)[0]
            for z in (problem.guide_query, problem.guide_key)
        )
    problem = materialize_vectors(problem, xp)
    # the scale's gradient from moments: all logits are there, and feature gradients may be unwanted
    problem.moments = problem.scalar_grads
    x = PairMatrix(xp, m, n, dtype)
    xp.matmul(query, key.T, out=x.all)
    present = problem.positives >= 0
    index = xp.arange(m)[:, None] * n + problem.positives.reshape(m, -1)
    index = xp.where(present, index.reshape(present.shape), m * n)  # of the positives in x
    products = None
    if problem.guided:
        products = PairMatrix(xp, m, n, dtype)
        xp.matmul(guide_query, guide_key.T, out=products.all)
        xp.copyto(products.flat, np.nan, where=~xp.isfinite(products.flat))

    def positive_dots(of: Problem) -> Array:
        """The dot products at positives: of the features, or of the guide's (`guide_problem`)."""
        dots = x if products is None or of.guided else products
        return xp.where(present, dots.flat[index].astype(np.float64), np.nan)

    if problem.compares_with_limits:
        backend = SimpleNamespace(positive_dots=positive_dots)
        problem = with_found_vectors(problem, backend, vectors)
    guide_dots = None if products is None else products.all
    block = PairBlock(problem, slice(m), slice(n), x.all, guide_dots)
    pairs = PositivePairs.find(xp, problem, slice(m), slice(n), dtype)
    excluded, left_out = find_masks(block, pairs)
    if problem.guided:
        xp.copyto(x.all, np.nan, where=xp.isnan(guide_dots))
        del products, guide_dots, block
    scale = xp.asarray(problem.scale, dtype)
    x.flat *= scale
    positive = x.flat[index]
    if problem.symmetric:
        xp.fill_diagonal(x.all, -np.inf)
    if excluded is not None:
        xp.copyto(x.all, -np.inf, where=excluded)
    x.flat[index] = positive

    finite = xp.isfinite(query).all(axis=1) & xp.isfinite(key).all()
    if problem.guided:  # also of pairs that are excluded: products do not show it
        finite_rows = xp.isfinite(guide_query).all(axis=1)
        if problem.symmetric or problem.two_sided:  # the softmax of a column has all queries
            finite_rows = finite_rows.all()
        finite &= finite_rows & xp.isfinite(guide_key).all()
    row_nans = xp.where(finite, 0.0, np.nan)
    if problem.known_row_nans is not None:
        row_nans += problem.known_row_nans
    own = None
    if problem.bias is not None:
        solution, g = _sigmoid(xp, problem, x, index, row_nans, pairs)
    else:
        logits = xp.where(present, LOG2_E * positive.astype(np.float64), np.nan)
        dense = _Dense(xp, query, key, row_nans)
        solution, g, finalized = _softmax(vectors, problem, x, logits, index, left_out, dense)
        own = finalized.own
    if solution.scale_grad is not None:
        nan = find_nan(xp, solution.losses)
        solution.scale_grad = solution.scale_grad + nan
        if solution.bias_grad is not None:
            solution.bias_grad = solution.bias_grad + nan
    solution.logits = x.all
    if gradients is None:
        return solution
    g *= scale
    if gradients.query is not None:
        gradients.query[...] = normalization_backward(xp, g @ key, query, norms)
    if gradients.key is not None:
        gradients.key[...] = normalization_backward(xp, g.T @ query, key, key_norms)
    if own is not None:
        own.add_gradients(finalized.rows.reference, finalized.row_factor * problem.scale, gradients)
    return solution


class PairMatrix:
    """An M x N matrix `all`, in a vector `flat` with one element more, for missing positives."""

    def __init__(self, xp: Any, m: int, n: int, dtype: Any) -> None:
        self.flat = xp.zeros(m * n + 1, dtype)
        self.all = self.flat[:-1].reshape(m, n)

    def like(self, xp: Any) -> PairMatrix:
        """A matrix of zeros of the same shape and dtype."""
        m, n = self.all.shape
        return PairMatrix(xp, m, n, self.flat.dtype)


class _Dense:
    """The operations that `finalize` needs, computed from all features at once."""

    def __init__(self, xp: Any, query: Array, key: Array, row_nans: Array) -> None:
        self.xp, self.query, self.key, self.nans = xp, query, key, row_nans

    def row_nans(self, problem: Problem) -> Array:
        return self.nans

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        xp = self.xp
        dots = self.query.astype(np.float64) @ self.key.astype(np.float64).T
        dots *= segments.pairs(xp, problem.symmetric)
        column_sums = dots.sum(axis=0) if columns else None
        return segment_sums_from_products(xp, problem, segments, dots.sum(axis=1), column_sums)


def _softmax(
    vectors: Vectors, problem: Problem, x: PairMatrix, positive_logits: Array, index: Array,
    left_out: Masks, dense: _Dense,
) -> tuple[Solution, Array, Finalized]:  # fmt: skip
    """Losses, log-sum-exps and dL/dx (without the scale), and the vectors that `finalize` returns.

    Positives are kept out of the sums, because in softplus(LSE of the negatives - positive) nothing
    cancels but logits. They are put back at the end.
    """
    xp, dtype = vectors.xp, x.flat.dtype
    positive = x.flat[index]
    x.flat[index] = -np.inf
    exponents = x.all
    if problem.hardness:
        exponents = x.all * xp.asarray(problem.exponent_scale / problem.scale, dtype)
    gradient = x.like(xp)  # exponentials, then dL/dx
    g = gradient.all
    sums = matrix_sums(xp, exponents, 1, problem.moments, problem.key_bias, left_out[0], g)
    column_sums = None
    if problem.two_sided:
        p = xp.empty_like(g)
        column_sums = matrix_sums(xp, exponents, 0, problem.moments, None, left_out[1], p)
    stats = Statistics(sums, column_sums, positive_logits)
    if problem.retrieval_ranks:
        above = x.all > positive[:, None]
        stats.row_rank = stats.column_rank = above.sum(axis=1)
        if problem.two_sided:
            stats.column_rank = (x.all > positive[None, :]).sum(axis=0)
        elif not problem.symmetric:
            stats.column_rank = None
    if problem.own is not None:  # `finalize` adds their sums; `sums` keep those of the matrix
        stats.rows = Sums(*(None if vector is None else vector.copy() for vector in sums.arrays))
    # no gradient pass by blocks: the transpose and the scale come below
    finalized = finalize(vectors, problem, stats, gradient=False, backend=dense, scale=1.0)
    rows, columns = finalized.rows, finalized.columns
    upstream = problem.upstream
    if problem.joint:
        upstream = xp.tile(upstream, 2)
    g *= _sum_factors(xp, sums, rows)[:, None].astype(dtype)
    g *= (problem.row_direction_weight * upstream)[:, None].astype(dtype)
    if columns is not None and column_sums is not None:
        p *= _sum_factors(xp, column_sums, columns)[None, :].astype(dtype)
        g += p * (problem.column_direction_weight * upstream)[None, :].astype(dtype)
    # rows i and i + B of a joint loss both have its whole pull, and g + g.T would count it twice
    rows_of_positive = 2 if problem.joint else 1
    gradient.flat[index] = finalized.positive_gradient / rows_of_positive
    solution = Solution(
        finalized.losses, rows.lse, None if columns is None else columns.lse, stats,
        (rows.loss, None if columns is None else columns.loss),
    )  # fmt: skip
    if finalized.log_scale_grad is not None:
        solution.scale_grad = finalized.log_scale_grad.sum() / problem.scale
    x.flat[index] = positive
    for term in finalized.linear:
        column_factor = 0.0 if term.column_factor is None else term.column_factor
        factor = term.row_factor[:, None] + column_factor
        g -= (term.segments.pairs(xp, problem.symmetric) * factor).astype(dtype)
    return solution, g + g.T if problem.symmetric else g, finalized


def matrix_sums(
    xp: Any, x: Array, axis: int, moments: bool, bias: Array | None, left_out: Array | None,
    p: Array, moment_logits: Array | None = None,
) -> Sums:  # fmt: skip
    """Sums over the negatives' logits x along `axis` (1: of rows, 0: of columns).

    Writes the exponentials, exp(x + bias - the largest exponent), into `p`. Moments are of
    `moment_logits`; None: of x without `bias`.
    """
    if moment_logits is None:
        moment_logits = x
    if bias is not None:
        x = x + bias.astype(x.dtype)
    if left_out is not None:
        x = xp.where(left_out, x.dtype.type(-np.inf), x)
    top = x.max(axis=axis).astype(np.float64)
    shift = xp.where(xp.isneginf(top), 0, top).astype(x.dtype)
    xp.exp(x - xp.expand_dims(shift, axis), out=p)
    sums = Sums(LOG2_E * top, p.sum(axis=axis, dtype=np.float64))
    if moments:
        # 0 times the -inf of an excluded pair would be NaN
        terms = xp.where(p == 0, 0, moment_logits)
        terms *= p
        sums.moment = LOG2_E * terms.sum(axis=axis, dtype=np.float64)
    return sums


def _sum_factors(xp: Any, sums: Sums, direction: DirectionLosses) -> Array:
    """[n] factors of exponentials relative to `sums.max`, which make them probabilities."""
    return xp.exp2(sums.max - direction.reference) * direction.reference_probability


def sigmoid_terms(
    xp: Any, x: PairMatrix, index: Array, bias: Array, pairs: PositivePairs | None
) -> tuple[Array, Array]:
    """The terms softplus(-t z) of a pairwise sigmoid, with z = x + bias, t = 1 at positives and -1
    at negatives. Returns their sums over rows, [m] float64, and their derivatives by x, [m, n], 0
    at excluded pairs."""
    sign = x.like(xp)
    sign.flat[:] = 1
    sign.flat[index] = -1
    if pairs is not None:
        xp.copyto(sign.all, -1.0, where=pairs.positive)
    z = (x.all + bias) * sign.all
    terms = xp.logaddexp(z.dtype.type(0), z)
    small = xp.exp(-xp.abs(z))
    g = xp.where(z > 0, z.dtype.type(1), small)  # sigmoid(z), to the last bits at either end
    small += 1
    g /= small
    g *= sign.all
    if pairs is not None:
        terms *= pairs.weight
        g *= pairs.weight
    xp.copyto(g, 0.0, where=xp.isneginf(x.all))
    return terms.sum(axis=1, dtype=np.float64), g


def _sigmoid(
    xp: Any, problem: Problem, x: PairMatrix, index: Array, row_nans: Array,
    pairs: PositivePairs | None,
) -> tuple[Solution, Array]:  # fmt: skip
    """The solution of a pairwise sigmoid, and dL/dx [M, N] without the scale."""
    losses, g = sigmoid_terms(xp, x, index, xp.asarray(problem.bias, x.flat.dtype), pairs)
    g *= problem.upstream[:, None].astype(g.dtype)
    solution = Solution(losses + row_nans)
    if problem.scalar_grads:
        logits = xp.where(g == 0, 0, x.all)  # 0 times the -inf of an excluded pair would be NaN
        logits *= g
        solution.scale_grad = logits.sum(dtype=np.float64) / problem.scale
        solution.bias_grad = g.sum(dtype=np.float64)
    return solution, g
