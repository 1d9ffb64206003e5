"""method="naive": the whole logit matrix, as in a textbook.

Three matrix products, one M x N matrix, and a few passes over it. This is not fast and needs much
memory, but it shows what the folds compute, and it can return the logits. Exponents are natural.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..conclude import Direction
from ..conclusion import conclusion
from ..linear import Segments, SegmentSums, sums_of
from ..problem import (
    LOG2_E,
    Array,
    Gradients,
    Problem,
    Statistics,
    Sums,
    as_sets,
    materialize_vectors,
)
from ..solve import Solution, Vectors
from ..targets import limits

VECTORS = Vectors(np)
MATRICES, WITH_OPTIONS = 4, 10  # the most M x N arrays alive at once


def available_memory() -> int:
    """Bytes that can be allocated without swapping (0: unknown)."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem` from the full matrix of logits."""
    problem = materialize_vectors(problem, np)
    m, n, _ = problem.shape
    dtype = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
    matrices = MATRICES if problem.plain else WITH_OPTIONS
    needed, room = matrices * m * n * dtype.itemsize, available_memory()
    if room and needed > room:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
    u, norms = _rows(problem.query, problem.normalize, dtype)
    v, key_norms = (u, norms) if problem.symmetric else _rows(problem.key, problem.normalize, dtype)
    positives = as_sets(problem.positives)
    present = positives >= 0
    index = np.nonzero(present)[0], positives[present]  # of the positives in x
    x = u @ v.T
    by_row = by_column = None  # whether a direction leaves out a pair
    if problem.leaves_out:
        dots = np.full(positives.shape, np.nan)
        dots[present] = x[index]
        limit = limits(np, problem, dots.reshape(problem.positives.shape)).astype(dtype)
        by_row, by_column = x > limit[:, None], x > limit if problem.two_sided else None
    scale = np.asarray(problem.scale, dtype)
    x *= scale
    positive = x[index]
    if problem.symmetric:
        np.fill_diagonal(x, -np.inf)
    if problem.query_ids is not None:
        x[problem.query_ids[:, None] == problem.key_ids[None, :]] = -np.inf
    x[index] = positive

    finite = np.isfinite(u).all(axis=1) & np.isfinite(v).all()
    marks = np.where(finite, 0.0, np.nan)
    if problem.bias is not None:
        solution, g = _sigmoid(problem, x, index, marks)
    else:
        logits = np.full(positives.shape, np.nan)
        logits[present] = LOG2_E * positive.astype(np.float64)
        logits = logits.reshape(problem.positives.shape)
        solution, g = _softmax(problem, x, logits, index, (by_row, by_column), _Dense(u, v, marks))
    solution.logits = x
    if gradients is None:
        return solution
    g *= scale
    if gradients.query is not None:
        gradients.query[...] = _normalization_backward(g @ v, u, norms)
    if gradients.key is not None:
        gradients.key[...] = _normalization_backward(g.T @ u, v, key_norms)
    return solution


def _rows(z: Array, normalize: bool, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Features in the compute dtype, normalised if asked for (zero rows stay zero); their norms."""
    if not normalize:
        return z.astype(dtype, copy=False), None
    wide = z.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    norms[norms == 0] = np.inf
    return (wide / norms).astype(dtype), norms


def _normalization_backward(g: Array, u: Array, norms: Array | None) -> Array:
    """dL/dz = (g - u <g, u>) / |z|, where g = dL/du and u = z / |z|."""
    if norms is None:
        return g
    return ((g - u * np.sum(g * u, axis=1, keepdims=True)) / norms).astype(g.dtype)


class _Dense:
    """What `conclusion` asks of a backend, from all features at once."""

    def __init__(self, query: Array, key: Array, marks: Array) -> None:
        self.query, self.key, self.marks = query, key, marks

    def not_finite_marks(self, problem: Problem) -> Array:
        return self.marks

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        dots = self.query.astype(np.float64) @ self.key.astype(np.float64).T
        dots *= _same(problem, segments)
        of_columns = dots.sum(axis=0) if columns else None
        return sums_of(np, problem, segments.numbered(np), dots.sum(axis=1), of_columns)


def _same(problem: Problem, segments: Segments) -> Array:
    """[M, N] whether row and key are of the same segment."""
    same = segments.rows[:, None] == segments.columns
    if problem.symmetric:
        np.fill_diagonal(same, False)
    return same


def _softmax(
    problem: Problem, x: Array, positive_logits: Array, index: tuple[Array, Array],
    left_out: tuple[Array | None, Array | None], dense: _Dense,
) -> tuple[Solution, Array]:  # fmt: skip
    """Per-row losses, log-sum-exps and dL/dx.

    Positives are kept out of the sums, because softplus(LSE of the negatives - positive) loses no
    digits of a small loss. They are put back at the end.
    """
    positive = x[index]
    x[index] = -np.inf
    exponents = x
    if problem.hardness:
        exponents = x * np.asarray(problem.exponent_scale / problem.scale, x.dtype)
    moments = problem.scalar_grads
    sums, g = _sums(exponents, 1, moments, problem.key_bias, left_out[0])
    column_sums = p = None
    if problem.two_sided:
        column_sums, p = _sums(exponents, 0, moments, None, left_out[1])
    stats = Statistics(sums, column_sums, positive_logits)
    end = conclusion(VECTORS, problem, stats, False, dense, 1.0)  # the transpose is added below
    rows, columns = end.rows, end.columns
    upstream = problem.upstream
    if problem.joint:
        upstream = np.tile(upstream, 2)
    g *= _of_sums(sums, rows)[:, None].astype(x.dtype)
    g *= (problem.row_weight * upstream)[:, None].astype(x.dtype)
    if columns is not None and column_sums is not None:
        p *= _of_sums(column_sums, columns)[None, :].astype(x.dtype)
        g += p * (problem.column_weight * upstream)[None, :].astype(x.dtype)
    g[index] = as_sets(end.positive_gradient)[as_sets(problem.positives) >= 0]
    if problem.joint:  # half of it in each of two rows
        g[index] /= 2
    solution = Solution(
        end.losses, rows.lse, None if columns is None else columns.lse, stats,
        (rows.loss, None if columns is None else columns.loss),
    )  # fmt: skip
    if end.log_scale_grad is not None:
        solution.scale_grad = end.log_scale_grad.sum() / problem.scale
    if problem.retrieval_ranks:
        above = x > positive[:, None]
        stats.row_rank = stats.column_rank = above.sum(axis=1)
        if problem.two_sided:
            stats.column_rank = (x > positive[None, :]).sum(axis=0)
        elif not problem.symmetric:
            stats.column_rank = None
    x[index] = positive
    for term in end.linear:
        of_columns = 0.0 if term.column_factor is None else term.column_factor
        factor = term.row_factor[:, None] + of_columns
        g -= (_same(problem, term.segments) * factor).astype(x.dtype)
    return solution, g + g.T if problem.symmetric else g


def _sums(
    x: Array, axis: int, moments: bool, bias: Array | None, left_out: Array | None
) -> tuple[Sums, Array]:
    """From the negatives' logits along one axis: their sums, and exponentials. Exponents are
    differences of logits: x, with its bias, minus the largest one. Moments are of x alone."""
    unbiased = x
    if bias is not None:
        x = x + bias.astype(x.dtype)
    if left_out is not None:
        x = np.where(left_out, x.dtype.type(-np.inf), x)
    top = x.max(axis=axis).astype(np.float64)
    shift = np.where(np.isneginf(top), 0, top).astype(x.dtype)
    p = np.exp(x - np.expand_dims(shift, axis))
    sums = Sums(LOG2_E * top, p.sum(axis=axis, dtype=np.float64))
    if moments:
        terms = np.where(p == 0, 0, unbiased)  # 0 times the -inf of an excluded pair would be NaN
        terms *= p
        sums.moment = LOG2_E * terms.sum(axis=axis, dtype=np.float64)
    return sums, p


def _of_sums(sums: Sums, end: Direction) -> Array:
    """What makes probabilities of exponentials."""
    return np.exp2(sums.max - end.reference) * end.reference_probability


def _sigmoid(
    problem: Problem, x: Array, index: tuple[Array, Array], marks: Array
) -> tuple[Solution, Array]:
    """-log sigmoid(t z) = softplus(-t z), t = 1 at positives and -1 elsewhere; and dL/dx."""
    z = x + np.asarray(problem.bias, x.dtype)
    z[index] *= -1
    losses = np.logaddexp(0, z).sum(axis=1, dtype=np.float64)
    g = np.exp(z - np.logaddexp(0, z)) * problem.upstream[:, None].astype(x.dtype)
    g[np.isneginf(x)] = 0
    g[index] *= -1
    solution = Solution(losses + marks)
    if problem.scalar_grads:
        logits = np.where(g == 0, 0, x)  # 0 times the -inf of an excluded pair would be NaN
        solution.scale_grad = np.vdot(g, logits).astype(np.float64) / problem.scale
        solution.bias_grad = g.sum(dtype=np.float64)
    return solution, g
