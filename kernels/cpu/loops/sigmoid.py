"""A pairwise sigmoid on one tile of logits on the CPU, in loops that Numba compiles.

As in `tile_ops`, a tile x [m, n] has raw products, -inf for excluded pairs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .compilation import compiled
from .elementary import exp2, log1p, next_number, wide_vectors
from .tile_ops import CHUNK


@compiled
def sigmoid(  # type: ignore[no-untyped-def]
    x, scale, bias, a, losses, bias_grad, moments,
    row_positive_ids, column_positive_ids, row_weights, column_weights,
    positives, first_column, logits, factor, counter,
):  # fmt: skip
    """Negatives: x <- a_i sigmoid(z) and losses_i += softplus(z), with z = scale x + bias.

    a_i is the upstream gradient of row i times the scale (`Sigmoid.row_factor`). The sum of the new
    x of a row is added to bias_grad, and the sum of the new x times the old x to `moments`.

    Pairs of equal positive ids are positives: x <- -v a_i sigmoid(-z) and
    losses_i += v softplus(-z), with v = row_weights_i + column_weights_j. (`without_ids` makes ids
    that no pair shares.)

    The positive of row i is in column positives_i, if the tile has it and there are no ids. Its
    logit, `logits_i`, is the product times the scale: x <- -factor_i sigmoid(-z) and losses_i +=
    softplus(-z), with z = logits_i + bias, in float64.
    """
    wide_vectors()
    one = x.dtype.type(1)
    zero, low = x.dtype.type(0), x.dtype.type(-np.inf)
    s, b = x.dtype.type(scale), x.dtype.type(bias)
    log2_e = x.dtype.type(1.4426950408889634)
    chunk = next_number(counter)
    while chunk * CHUNK < x.shape[0]:
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < x.shape[0] else x.shape[0]):
            row, ai = x[i], a[i]
            row_id, row_weight = row_positive_ids[i], row_weights[i]
            loss, total, moment = zero, zero, zero
            for j in range(row.size):
                z = s * row[j] + b
                positive = row_id == column_positive_ids[j]
                z = -z if positive else z
                e = exp2(-abs(z) * log2_e)
                sigmoid_of_abs = one / (one + e)
                p = sigmoid_of_abs if z >= zero else e * sigmoid_of_abs
                weight = row_weight + column_weights[j] if positive else one
                loss += weight * ((z if z > zero else zero) + log1p(e))
                p *= -weight if positive else one
                # exactly 0 at an excluded pair, because products of subnormal numbers take long
                p = z if z != z else (ai * p if row[j] != low else zero)
                total += p
                moment += p * (row[j] if row[j] != low else zero)
                row[j] = p
            losses[i] += loss
            bias_grad[i] += total
            moments[i] += moment
            positive_column = positives[i] - first_column
            if 0 <= positive_column < row.size:
                logit = logits[i] + bias
                exponential = math.exp(-abs(logit))
                g = -factor[i] * (exponential if logit >= 0 else 1.0) / (1.0 + exponential)
                losses[i] += (-logit if logit < 0.0 else 0.0) + math.log1p(exponential)
                bias_grad[i] += g
                moments[i] += g * (logits[i] / scale)
                row[positive_column] = g
        chunk = next_number(counter)


def without_ids(x: Any) -> Any:
    """The ids and weights of `sigmoid` for a tile x without positive ids."""
    m, n = x.shape
    return (np.zeros(m, np.int64), np.ones(n, np.int64), *(np.zeros(k, x.dtype) for k in (m, n)))
