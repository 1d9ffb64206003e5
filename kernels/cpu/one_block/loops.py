"""The loops of a call in one block, which Numba compiles: everything between its products."""

from __future__ import annotations

import math

import numpy as np

from ...direction_losses import ROUNDING
from ...problem import LN_2, LOG2_E
from ..factors import EXACT
from ..loops import sigmoid as pair_tiles
from ..loops import tile_ops as tile
from ..loops.elementary import compiled, rounded_product, wide_vectors
from ..loops.softmax_gradient import (
    softmax_gradient,
    softmax_gradient_shared,
    softmax_gradient_two_sided,
)


@compiled
def all_finite(x):  # type: ignore[no-untyped-def]
    """Whether no element is NaN or infinite: 0 times either is NaN."""
    wide_vectors()
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.size):
            total += row[j] * zero
    return total == zero


@compiled
def finalize_direction(high, total, p):  # type: ignore[no-untyped-def]
    """(loss, log-sum-exp, sigmoid(n - p), reference, 2^(reference - log-sum-exp)).

    `high` and `total` are the maximum and the sum over the negatives of a row or column, `p` is
    the logit of its positive: see `finalize_direction` of kernels/direction_losses.py. This
    function computes one power and one logarithm, unless `high` is a bound far above all logits.
    """
    if p >= high:
        rest = total * 2.0 ** (high - p)
        loss = math.log1p(rest)
        return loss, LN_2 * p + loss, rest / (1.0 + rest), p, 1.0 / (1.0 + rest)
    with_positive = total + 2.0 ** (p - high)
    log = math.log(with_positive)
    lse = LN_2 * high + log
    if with_positive >= 1.0 or with_positive != with_positive:
        return LN_2 * (high - p) + log, lse, total / with_positive, high, 1.0 / with_positive
    gap = (high - p) + math.log2(total)
    rest = 2.0 ** (-abs(gap))
    negative_probability = (rest if gap < 0 else 1.0) / (1.0 + rest)
    loss, log2_sum = LN_2 * max(gap, 0.0) + math.log1p(rest), high + math.log2(with_positive)
    return loss, lse, negative_probability, log2_sum, 1.0


@compiled
def rounded_reference(c, reference, factor, one):  # type: ignore[no-untyped-def]
    """(reference in units of dot products, the factor for this reference, the reference in base 2).

    See `rounded_reference` of kernels/direction_losses.py. `one`: 1 in the compute dtype.
    """
    r = reference / c
    smaller = np.nextafter(r, -np.inf)
    r = smaller if rounded_product(c, smaller) >= reference else r
    narrow = one.dtype.type(r)
    again = rounded_product(c, np.float64(narrow))
    return narrow, factor * 2.0 ** min(again - reference, ROUNDING), again


@compiled
def softmax(  # type: ignore[no-untyped-def]
    x, positives, row_ids, column_ids, scale, margin, upstream, row_direction_weight,
    column_direction_weight, symmetric, gradient, moments, losses, lse,
):  # fmt: skip
    """Raw products x become dL/dx times the scale, for a gradient. `losses` [M] and `lse` [2, .]
    are written; `moments` [2, .] is memory for the sums' moments.

    Returns (whether x is finite, the sum of the losses, d loss / d log(scale)). If x is not finite,
    nothing is computed, and the caller leaves the call to passes.

    d loss / d log(scale) adds up upstream_i weight sigmoid(n - p) (E[x] - p) over the softmaxes of
    rows and columns, where `weight` is that of the direction and E[x] the mean of the negatives'
    logits (`kernels/direction_losses.py`). It is in base 2 until the end.
    """
    if not all_finite(x):
        return False, 0.0, 0.0
    m, n = x.shape
    c = scale * LOG2_E
    two_sided = column_direction_weight != 0.0
    at = positives.reshape(m, 1)
    positive = np.empty((m, 1))
    tile.set_aside_positives(x, at, 0, c, positive)
    if symmetric:
        tile.exclude_diagonal(x)
    if row_ids.size > 0:
        tile.exclude_pairs(x, row_ids, column_ids)
    high, total = np.empty((2, max(m, n))), np.empty((2, max(m, n)))
    row_moment, column_moment = moments[0, :m], moments[1, :n]
    if two_sided:
        part = np.empty((2, n), x.dtype)
        tile.row_and_column_statistics(
            x, c, high[0, :m], total[0, :m], row_moment, high[1, :n], total[1, :n], column_moment,
            part[0], part[1],
        )  # fmt: skip
    else:
        tile.row_statistics(x, c, high[0, :m], total[0, :m], row_moment)

    # From sums to losses, and to references and factors of the gradient. After column j's sums are
    # read, their memory gets the float64 factor and reference of the column
    column_factor64, column_reference64 = total[1], high[1]
    one = np.ones(1, x.dtype)
    reference, factor = np.empty((2, max(m, n)), x.dtype), np.empty((2, max(m, n)), x.dtype)
    row_reference2, pull = np.empty(m), np.zeros((m, 1))
    highest_row, lowest_row, lowest_column = -np.inf, np.inf, np.inf
    loss, log_scale_grad = 0.0, 0.0
    for i in range(m):
        p = positive[i, 0] - c * margin
        row_loss, lse[0, i], negative_part, base, weight = finalize_direction(
            high[0, i], total[0, i], p
        )
        losses[i] = row_direction_weight * row_loss
        a = upstream[i] * row_direction_weight * scale
        pull[i, 0] = a * negative_part
        if total[0, i] != 0.0:
            mean = moments[0, i] / total[0, i]
            log_scale_grad += upstream[i] * row_direction_weight * negative_part * (mean - p)
        reference[0, i], factor[0, i], base2 = rounded_reference(c, base, a * weight, one)
        row_reference2[i] = base2
        highest_row, lowest_row = max(highest_row, base2), min(lowest_row, base2)
        if symmetric:
            reference[1, i], factor[1, i] = reference[0, i], factor[0, i]
            column_factor64[i], column_reference64[i] = a * weight, base
            lowest_column = min(lowest_column, base)
    if two_sided:  # key i is the positive of query i
        for j in range(n):
            p = positive[j, 0] - c * margin
            column_loss, lse[1, j], negative_part, base, weight = finalize_direction(
                high[1, j], total[1, j], p
            )
            losses[j] += column_direction_weight * column_loss
            b = upstream[j] * column_direction_weight * scale
            pull[j, 0] += b * negative_part
            if total[1, j] != 0.0:
                mean = moments[1, j] / total[1, j]
                log_scale_grad += upstream[j] * column_direction_weight * negative_part * (mean - p)
            reference[1, j], factor[1, j], _ = rounded_reference(c, base, b * weight, one)
            column_factor64[j], column_reference64[j] = b * weight, base
            lowest_column = min(lowest_column, base)
    for i in range(m):
        loss += losses[i]
    log_scale_grad *= LN_2
    if not gradient:
        return True, loss, log_scale_grad

    # dL/dx. One exponential for both directions while none underflows: see `SoftmaxFactors`
    if not (two_sided or symmetric):
        softmax_gradient(x, c, reference[0, :m], factor[0, :m])
    elif (
        highest_row - lowest_column < 40 and highest_row - lowest_row < 80
        and max(abs(highest_row), abs(lowest_row)) < EXACT
    ):  # fmt: skip
        middle = 0.5 * (highest_row + lowest_column)
        u, v = np.empty(m, x.dtype), np.empty(n, x.dtype)
        for i in range(m):
            u[i] = 2.0 ** (row_reference2[i] - middle)
        for j in range(n):
            v[j] = column_factor64[j] * 2.0 ** (middle - column_reference64[j])
        softmax_gradient_shared(x, c, reference[0, :m], factor[0, :m], u, v)
    else:
        softmax_gradient_two_sided(
            x, c, reference[0, :m], factor[0, :m], reference[1, :n], factor[1, :n]
        )
    at_positive = np.empty((m, 1), x.dtype)
    for i in range(m):
        at_positive[i, 0] = -(pull[i, 0] + (pull[positives[i], 0] if symmetric else 0.0))
    tile.insert_positives(x, at, 0, at_positive)
    return True, loss, log_scale_grad


@compiled
def sigmoid(  # type: ignore[no-untyped-def]
    x, positives, row_ids, column_ids, scale, bias, upstream, moments, losses
):
    """As `softmax`, of the pairwise sigmoid. Raw products x become dL/dx times the scale. Losses
    are added to `losses`.

    Returns (whether x is finite, sum of losses, d loss / d log(scale), scale times sum of dL/dx).
    """
    if not all_finite(x):
        return False, 0.0, 0.0, 0.0
    m = len(x)
    positive = np.empty((m, 1))
    tile.set_aside_positives(x, positives.reshape(m, 1), 0, scale, positive)
    if row_ids.size > 0:
        tile.exclude_pairs(x, row_ids, column_ids)
    factor, sums = upstream * scale, np.zeros(m)
    narrow = factor.astype(x.dtype)
    row_moment = moments[0, :m]
    row_moment[:] = 0
    pair_tiles.sigmoid(x, scale, bias, narrow, losses, sums, row_moment)
    pair_tiles.sigmoid_positives(
        x, positives, 0, positive[:, 0], scale, bias, factor, losses, sums, row_moment
    )
    return True, losses.sum(), row_moment.sum(), sums.sum()
