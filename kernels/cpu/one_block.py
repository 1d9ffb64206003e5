"""A small batch, whose logits fit one block: three products, and a few compiled loops between them.

`tiled_pass.py` does the same for any number of blocks, and for all options. Here there are no
tiles, no running sums, and no second computation of logits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..options import IDS
from ..problem import LOG2_E, Array, Gradients, Problem, materialize_vectors
from ..solve import Solution
from .loops import sigmoid as pair_tiles
from .loops import tile_ops as tile
from .loops.finalize import finalize
from .operands import DTYPES, ReadableRows, readable_rows, row_dots
from .resources import BLAS, BUFFER_POOL, run_loop
from .sums import sum_tile

# NumPy multiplies rows with themselves by another function of BLAS, which has half of the work, and
# then copies the other half of x element by element. From so many rows on, that takes longer than
# the product with a copy of the rows
MANY_ROWS = 256
Product = Callable[..., Array]  # with the arguments of np.matmul
ALL = slice(None)  # rows


def solve_in_one_block(
    problem: Problem, gradients: Gradients | None, product: Product | None = None,
    shards: tuple[slice, slice] = (ALL, ALL),
) -> Solution | None:  # fmt: skip
    """Loss and gradients of a problem that `fits_one_block`.

    Returns None if features or logits are not finite, or if a row lacks a positive: the caller then
    runs passes. `product` computes the products instead of NumPy's BLAS: `infonce.torch` gives
    PyTorch's. `shards` are the queries and the keys whose gradients are computed.
    """
    product = product or BLAS.matmul
    positives = problem.positives
    # Without weights, each row has a positive: a row without a positive has the weight 0
    # (`infonce.checks.rows.row_weights`). With weights, only a search of the labels tells
    if problem.weights is not None and positives is not None and positives.min() < 0:
        return None
    problem = materialize_vectors(problem, np)
    m, n, _ = problem.shape
    dtype = DTYPES[problem.compute_precision]
    query = key = readable_rows(problem.query, dtype, problem.normalize)
    if not problem.symmetric:
        key = readable_rows(problem.key, dtype, problem.normalize)
    memory = BUFFER_POOL.take(m * n, dtype)
    x = memory.reshape(m, n)
    right = key[0]
    if problem.symmetric and n >= MANY_ROWS:
        right = right.copy()
    product(query[0], right.T, out=x)
    losses = _softmax if problem.bias is None else _sigmoid
    solution = losses(problem, x, gradients is not None)
    if solution is not None and gradients is not None:
        if gradients.query is not None and gradients.want_query:
            _store(gradients.query, x[shards[0]], key[0], query, shards[0], product)
        if gradients.key is not None and gradients.want_key and not problem.symmetric:
            _store(gradients.key, x.T[shards[1]], query[0], key, shards[1], product)
    BUFFER_POOL.give(memory)
    return solution


def _exclude_pairs(problem: Problem, x: Array) -> None:
    """Exclude the diagonal and pairs of equal ids from the products x."""
    if problem.symmetric:
        tile.exclude_diagonal(x, 0, 0)
    if problem.query_ids is not None:
        for ids in IDS.columns(problem):
            numbers = map(np.ascontiguousarray, ids)
            tile.exclude_pairs(x, *numbers, True, tile.NO_IDS, tile.NO_IDS)


def _softmax(problem: Problem, x: Array, gradient: bool) -> Solution | None:
    """The losses, from raw products x. For a `gradient`, x becomes dL/dx times the scale."""
    m = len(x)
    scale, two_sided = float(problem.scale), problem.two_sided
    c = scale * LOG2_E
    positives = np.ascontiguousarray(problem.positives).reshape(m, 1)
    positive = np.empty((m, 1))
    if not tile.set_aside_positives(x, positives, 0, c, positive, True):
        return None
    _exclude_pairs(problem, x)
    sums = np.empty((1 + two_sided, 3, m))
    sum_tile(x, x, c, sums[0], sums[1] if two_sided else None)
    losses, lse = np.empty(m), np.empty((1 + two_sided, m))
    factors, positive_gradient = np.empty((6, m), x.dtype), np.empty((m, 1), x.dtype)
    loss, log_scale_grad, one_exponential = finalize(
        sums, positive, positives, problem.upstream, scale, c, float(problem.margin),
        (problem.row_direction_weight, problem.column_direction_weight), problem.symmetric, losses,
        lse, factors, positive_gradient, np.empty((6, m)),
    )  # fmt: skip
    if gradient:
        if not (two_sided or problem.symmetric):
            run_loop(tile.softmax_gradient, x, c, factors[0], factors[1])
        elif one_exponential:
            shared = factors[0], factors[1], factors[4], factors[5]
            run_loop(tile.softmax_gradient_shared, x, c, *shared)
        else:
            of_columns = factors[:2] if problem.symmetric else factors[2:4]
            run_loop(tile.softmax_gradient_two_sided, x, x, c, *factors[:2], *of_columns)
        tile.insert_positives(x, positives, 0, positive_gradient)
    solution = Solution(losses, lse[0], lse[1] if two_sided else None)
    return _with_totals(problem, solution, loss, log_scale_grad)


def _sigmoid(problem: Problem, x: Array, gradient: bool) -> Solution | None:
    """As `_softmax`, of the pairwise sigmoid: dL/dx needs no sums."""
    m = len(x)
    scale, bias = float(problem.scale), float(problem.bias)
    positives, positive = np.ascontiguousarray(problem.positives), np.empty((m, 1))
    if not tile.set_aside_positives(x, positives.reshape(m, 1), 0, scale, positive, True):
        return None
    _exclude_pairs(problem, x)
    losses, bias_grads, moments = np.zeros((3, m))
    factor = problem.upstream * scale
    sums = losses, bias_grads, moments
    pairs = pair_tiles.without_ids(x)
    of_positives = positives, 0, positive.reshape(m), factor
    arguments = scale, bias, factor.astype(x.dtype), *sums, *pairs, *of_positives
    run_loop(pair_tiles.sigmoid, x, *arguments)
    solution = Solution(losses, bias_grad=np.float64(bias_grads.sum() / scale))
    return _with_totals(problem, solution, losses.sum(), moments.sum())


def _with_totals(
    problem: Problem, solution: Solution, loss: float, log_scale_grad: float
) -> Solution:
    """The solution with the gradient of the scale, and with the reduced loss."""
    if problem.scalar_grads:
        solution.scale_grad = np.float64(log_scale_grad / float(problem.scale))
    if problem.common_share is not None and problem.row_shares is None:
        solution.loss = np.float64(loss * problem.common_share)
    return solution


def _store(
    to: Array, left: Array, right: Array, own: ReadableRows, rows: slice, product: Product
) -> None:  # fmt: skip
    """Store the gradient of `rows` of `own`: the product of left and right, through the
    normalisation."""
    direct = to.dtype == left.dtype and to.flags.c_contiguous and to.dtype.isnative
    out = product(left, right, out=to if direct else None)
    z, side = own
    if side is not None:
        dots = np.empty(len(out))
        row_dots(out, z[rows], dots)
        out = side.to_features(out, z[rows], dots, rows, to.dtype)
    if out is not to:
        np.copyto(to, out, casting="same_kind")
