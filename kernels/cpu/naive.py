"""method="naive": the whole logit matrix, as in a textbook.

Three matrix products, one M x N matrix, and a few passes over it. This is not fast and needs much
memory, but it shows what the folds compute, and it can return the logits. Exponents are natural.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..conclude import Direction, conclude
from ..problem import LOG2_E, Array, Gradients, Problem, Statistics, Sums, materialize_vectors
from ..solve import Solution

MATRICES = 4  # the most M x N arrays alive at once


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
    needed, room = MATRICES * m * n * dtype.itemsize, available_memory()
    if room and needed > room:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
    u, norms = _rows(problem.query, problem.normalize, dtype)
    v, key_norms = (u, norms) if problem.symmetric else _rows(problem.key, problem.normalize, dtype)
    index = np.arange(m), problem.positives  # of the positives in x
    x = u @ v.T
    scale = np.asarray(problem.scale, dtype)
    x *= scale
    positive = x[index]
    if problem.symmetric:
        np.fill_diagonal(x, -np.inf)
    if problem.query_ids is not None:
        x[problem.query_ids[:, None] == problem.key_ids[None, :]] = -np.inf
    x[index] = positive

    fold = _sigmoid if problem.bias is not None else _softmax
    solution, g = fold(problem, x, positive.astype(np.float64), index)
    solution.logits = x
    finite = np.isfinite(u).all(axis=1) & np.isfinite(v).all()
    solution.losses = solution.losses + np.where(finite, 0.0, np.nan)
    if gradients is None and not problem.scalar_grads:
        return solution

    halves = 2.0 if problem.symmetric else 1.0  # every pair is twice in <dZ, z>
    logits = np.where(g == 0, 0, x)  # 0 times the -inf of an excluded pair would be NaN
    solution.scale_grad = np.vdot(g, logits).astype(np.float64) / (halves * problem.scale)
    solution.bias_grad = g.sum(dtype=np.float64)
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


def _softmax(
    problem: Problem, x: Array, positive: Array, index: tuple[Array, Array]
) -> tuple[Solution, Array]:
    """Per-row losses, log-sum-exps and dL/dx.

    Positives are kept out of the sums, because softplus(LSE of the negatives - positive) loses no
    digits of a small loss. They are put back at the end.
    """
    x[index] = -np.inf
    top, rows, g = _direction(x, positive, 1)
    a = problem.row_weight * problem.upstream
    g *= a[:, None].astype(x.dtype)
    at_positive = -a * rows.negative_probability
    stats = Statistics(Sums(top, None), None, LOG2_E * positive)
    losses = problem.row_weight * rows.loss
    solution = Solution(losses, rows.lse, None, stats, (rows.loss, None))
    if problem.two_sided:
        _, columns, p = _direction(x, positive, 0)
        solution.losses = losses + problem.column_weight * columns.loss
        solution.column_lse = columns.lse
        solution.direction_losses = rows.loss, columns.loss
        b = problem.column_weight * problem.upstream
        g += p * b[None, :].astype(x.dtype)
        at_positive -= b * columns.negative_probability
    g[index] = at_positive
    if problem.retrieval_ranks:
        above = x > positive[:, None].astype(x.dtype)
        stats.row_rank = stats.column_rank = above.sum(axis=1)
        if problem.two_sided:
            stats.column_rank = (x > positive[None, :].astype(x.dtype)).sum(axis=0)
        elif not problem.symmetric:
            stats.column_rank = None
    x[index] = positive
    return solution, g + g.T if problem.symmetric else g


def _direction(x: Array, positive: Array, axis: int) -> tuple[Array, Direction, Array]:
    """From the negatives' logits along one axis: maxima in base 2, what follows from their sums,
    and probabilities. Exponents are differences of logits: x minus the largest one."""
    top = x.max(axis=axis).astype(np.float64)
    shift = np.where(np.isneginf(top), 0, top).astype(x.dtype)
    p = np.exp(x - np.expand_dims(shift, axis))
    top2 = LOG2_E * top
    end = conclude(np, Sums(top2, p.sum(axis=axis, dtype=np.float64)), LOG2_E * positive)
    factor = np.exp2(top2 - end.reference) * end.reference_probability
    p *= np.expand_dims(factor.astype(x.dtype), axis)
    return top2, end, p


def _sigmoid(
    problem: Problem, x: Array, positive: Array, index: tuple[Array, Array]
) -> tuple[Solution, Array]:
    """-log sigmoid(t z) = softplus(-t z), t = 1 at positives and -1 elsewhere; and dL/dx."""
    z = x + np.asarray(problem.bias, x.dtype)
    z[index] *= -1
    losses = np.logaddexp(0, z).sum(axis=1, dtype=np.float64)
    g = np.exp(z - np.logaddexp(0, z)) * problem.upstream[:, None].astype(x.dtype)
    g[np.isneginf(x)] = 0
    g[index] *= -1
    return Solution(losses), g
