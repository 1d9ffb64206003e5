"""method="naive": the whole logit matrix, as a textbook would have it.

Nothing here is clever or lean: three matrix products, one M x N matrix, a handful of passes over
it. It shows what the folds compute, and it hands out the logits to whoever wants to look.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import LOG2_E, Array, Gradients, Problem, Statistics, Sums, materialize_vectors
from ..solve import Solution

PASSES = 4  # M x N arrays alive at once, at most


def available_memory() -> int:
    """Bytes that can be had without swapping (0: unknown)."""
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
    needed, room = PASSES * m * n * dtype.itemsize, available_memory()
    if room and needed > room:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
    u, norms = _rows(problem.query, problem.normalize, dtype)
    v, key_norms = (u, norms) if problem.symmetric else _rows(problem.key, problem.normalize, dtype)
    at_positive = np.arange(m), problem.positives
    x = u @ v.T
    scale = np.asarray(problem.scale, dtype)
    x *= scale
    positive = x[at_positive]
    if problem.symmetric:
        np.fill_diagonal(x, -np.inf)
    if problem.query_ids is not None:
        x[problem.query_ids[:, None] == problem.key_ids[None, :]] = -np.inf
    x[at_positive] = positive

    fold = _sigmoid if problem.bias is not None else _softmax
    solution, g = fold(problem, x, positive.astype(np.float64), at_positive)
    solution.logits = x
    finite = np.isfinite(u).all(axis=1) & np.isfinite(v).all()
    solution.losses = solution.losses + np.where(finite, 0.0, np.nan)
    if gradients is None:
        return solution

    halves = 2.0 if problem.symmetric else 1.0  # every pair stands twice in <dZ, z>
    counted = np.where(g == 0, 0, x)  # an excluded pair's -inf is no number to multiply with
    solution.scale_grad = np.vdot(g, counted).astype(np.float64) / (halves * problem.scale)
    solution.bias_grad = g.sum(dtype=np.float64)
    g *= scale
    if gradients.query is not None:
        gradients.query[...] = _through_normalization(g @ v, u, norms)
    if gradients.key is not None:
        gradients.key[...] = _through_normalization(g.T @ u, v, key_norms)
    return solution


def _rows(z: Array, normalize: bool, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Features in the compute dtype, of unit norm where asked for (zero rows stay zero)."""
    if not normalize:
        return z.astype(dtype, copy=False), None
    wide = z.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    norms[norms == 0] = np.inf
    return (wide / norms).astype(dtype), norms


def _through_normalization(g: Array, u: Array, norms: Array | None) -> Array:
    """dz = (g - u <g, u>) / |z|."""
    if norms is None:
        return g
    return ((g - u * np.sum(g * u, axis=1, keepdims=True)) / norms).astype(g.dtype)


def _softmax(
    problem: Problem, x: Array, positive: Array, at_positive: tuple[Array, Array]
) -> tuple[Solution, Array]:
    """Per-row losses, log-sum-exps and dL/dx. Positives are kept out of the sums, and put back:
    softplus(LSE of the negatives - positive) loses no digits of a small loss."""
    x[at_positive] = -np.inf
    top, row_losses, row_lse, g, at_row = _direction(x, positive, 1)
    a = problem.row_weight * problem.upstream
    g *= a[:, None].astype(x.dtype)
    at_row *= -a
    stats = Statistics(Sums(LOG2_E * top, None), None, LOG2_E * positive)
    losses = problem.row_weight * row_losses
    solution = Solution(losses, row_lse, None, stats, (row_losses, None))
    if problem.two_sided:
        _, column_losses, solution.column_lse, p, at_column = _direction(x, positive, 0)
        solution.losses = losses + problem.column_weight * column_losses
        solution.direction_losses = row_losses, column_losses
        b = problem.column_weight * problem.upstream
        g += p * b[None, :].astype(x.dtype)
        at_row -= b * at_column
    g[at_positive] = at_row
    if problem.retrieval_ranks:
        above = x > positive[:, None].astype(x.dtype)
        stats.row_rank = stats.column_rank = above.sum(axis=1)
        if problem.two_sided:
            stats.column_rank = (x > positive[None, :].astype(x.dtype)).sum(axis=0)
        elif not problem.symmetric:
            stats.column_rank = None
    x[at_positive] = positive
    return solution, g + g.T if problem.symmetric else g


def _direction(x: Array, positive: Array, axis: int) -> tuple[Array, Array, Array, Array, Array]:
    """Along one axis of the negatives' logits: maxima, losses, log-sum-exps, probabilities, and
    their sums. Exponents are differences of logits, the largest from others."""
    top = x.max(axis=axis).astype(np.float64)
    shift = np.where(np.isneginf(top), 0, top).astype(x.dtype)
    p = np.exp(x - np.expand_dims(shift, axis))
    total = p.sum(axis=axis, dtype=np.float64)
    gap = (top - positive) + np.log(total)
    losses = np.logaddexp(0.0, gap)
    highest = np.maximum(top, positive)
    of_top = np.exp(top - highest)
    total = total * of_top + np.exp(positive - highest)  # of all, as multiples of the highest
    p *= np.expand_dims((of_top / total).astype(x.dtype), axis)
    return top, losses, highest + np.log(total), p, np.exp(gap - losses)


def _sigmoid(
    problem: Problem, x: Array, positive: Array, at_positive: tuple[Array, Array]
) -> tuple[Solution, Array]:
    """-log sigmoid(t z) = softplus(-t z), t = 1 at positives and -1 elsewhere; and dL/dx."""
    z = x + np.asarray(problem.bias, x.dtype)
    z[at_positive] *= -1
    losses = np.logaddexp(0, z).sum(axis=1, dtype=np.float64)
    g = np.exp(z - np.logaddexp(0, z)) * problem.upstream[:, None].astype(x.dtype)
    g[np.isneginf(x)] = 0
    g[at_positive] *= -1
    return Solution(losses), g
