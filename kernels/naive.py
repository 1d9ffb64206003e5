"""method="naive": the whole logit matrix, as a textbook would have it.

Nothing here is clever or lean: three matrix products, one M x N matrix, a handful of passes over
it. It shows what the folds compute, and it hands out the logits to whoever wants to look.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import Solution
from .problems import LOG2_E, Array, Gradients, Problem, Statistics, Sums, spelled_out

PASSES = 4  # M x N arrays alive at once, at most


def available_memory() -> int:
    """Bytes that can be had without swapping (0: unknown)."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem` from the full matrix of logits."""
    problem = spelled_out(problem, np)
    m, n, _ = problem.shape
    dtype = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
    needed, room = PASSES * m * n * dtype.itemsize, available_memory()
    if room and needed > room:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            'are free; use method="tiled"'
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
    upstream = problem.upstream
    x[at_positive] = -np.inf
    rows, row_negatives = _log_sum_exp(x, 1)
    gap = row_negatives - positive
    row_losses = np.logaddexp(0.0, gap)
    losses = problem.row_weight * row_losses
    row_lse = np.logaddexp(row_negatives, positive)
    stats = Statistics(rows, None, LOG2_E * positive)
    solution = Solution(losses, row_lse, None, stats, (row_losses, None))
    a = problem.row_weight * upstream
    g = np.exp(x - row_lse[:, None].astype(x.dtype)) * a[:, None].astype(x.dtype)
    g_positive = -a * np.exp(gap - np.logaddexp(0.0, gap))
    if problem.two_sided:
        _, column_negatives = _log_sum_exp(x, 0)
        gap = column_negatives - positive
        column_lse = np.logaddexp(column_negatives, positive)
        column_losses = np.logaddexp(0.0, gap)
        solution.losses = losses + problem.column_weight * column_losses
        solution.directions = row_losses, column_losses
        solution.column_lse = column_lse
        b = problem.column_weight * upstream
        g += np.exp(x - column_lse[None, :].astype(x.dtype)) * b[None, :].astype(x.dtype)
        g_positive -= b * np.exp(gap - np.logaddexp(0.0, gap))
    g[at_positive] = g_positive
    if problem.ranks:
        above = x > positive[:, None].astype(x.dtype)
        stats.row_rank = stats.column_rank = above.sum(axis=1)
        if problem.two_sided:
            stats.column_rank = (x > positive[None, :].astype(x.dtype)).sum(axis=0)
        elif not problem.symmetric:
            stats.column_rank = None
    x[at_positive] = positive
    return solution, g + g.T if problem.symmetric else g


def _log_sum_exp(x: Array, axis: int) -> tuple[Sums, Array]:
    """(max, sum) in base 2, and their logarithm in natural units; -inf where all is excluded."""
    top = x.max(axis=axis)
    safe = np.where(np.isneginf(top), 0, top)
    total = np.exp(x - np.expand_dims(safe, axis)).sum(axis=axis, dtype=np.float64)
    return Sums(LOG2_E * top.astype(np.float64), total), safe + np.log(total)


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
