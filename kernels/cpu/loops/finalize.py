"""From the sums of a block's rows and columns to losses and factors of the gradient, in one loop.

kernels/between_passes.py, direction_losses.py and cpu/factors.py do the same by operations on
vectors, for all options. A small batch takes little more than its products, so its vectors go
through one compiled function.
"""

from __future__ import annotations

import math

import numpy as np

from ...direction_losses import ROUNDING
from ...problem import LN_2
from ..factors import EXACT
from .compilation import compiled
from .elementary import rounded_product


@compiled
def finalize(  # type: ignore[no-untyped-def]
    sums, positive, positives, upstream, scale, c, margin, direction_weights, symmetric, losses,
    lse, factors, positive_gradient, memory,
):  # fmt: skip
    """Losses of rows, and what the gradient needs, from complete `sums` [directions, 3, m].

    `sums` has (max, sum, moment) of the negatives of rows and, if there are two directions, of
    columns, whose key j is the positive of query j. `positive` [m, 1] has the positives' logits c
    x, `direction_weights` the weight of each direction. Written are:

    - `losses` [m], and `lse` [directions, m], the log-sum-exps;
    - `factors` [6, m] in the dtype of products: the references and factors of rows, those of
      columns (unless rows and columns have the same: `symmetric`), and the shared factors of rows
      and of columns (see `cpu.factors.SoftmaxFactors`);
    - `positive_gradient` [m, 1]: dL/dx at the positives, times the scale.

    `memory` [6, m] is float64.

    Returns (sum of losses, d loss / d log(scale), whether one exponential serves both directions).
    d loss / d log(scale) adds up upstream_i weight sigmoid(n - p) (E[x] - p) over the directions,
    where E[x] is the mean of the negatives' logits (`kernels/direction_losses.py`).
    """
    directions, m = len(sums), len(upstream)
    references, weights, rounded, pull = memory[0:2], memory[2:4], memory[4], memory[5]
    highest_row, lowest_row, lowest_column = -np.inf, np.inf, np.inf
    log_scale_grad = 0.0
    for i in range(m):
        losses[i] = pull[i] = 0.0
    for direction in range(directions):
        direction_weight = direction_weights[direction]
        for i in range(m):
            high, total = sums[direction, 0, i], sums[direction, 1, i]
            p = positive[i, 0] - c * margin
            # loss, log-sum-exp, sigmoid(n - p), reference and 2^(reference - log-sum-exp), with n
            # the log-sum-exp of the negatives: see `finalize_direction`
            if p >= high:
                rest = total * 2.0 ** (high - p)
                loss = math.log1p(rest)
                row_lse = LN_2 * p + loss
                negative_part, base, probability = rest / (1.0 + rest), p, 1.0 / (1.0 + rest)
            else:
                with_positive = total + 2.0 ** (p - high)
                log = math.log(with_positive)
                row_lse = LN_2 * high + log
                if with_positive >= 1.0 or with_positive != with_positive:
                    loss, negative_part = LN_2 * (high - p) + log, total / with_positive
                    base, probability = high, 1.0 / with_positive
                else:  # `high` is a bound far above all logits
                    gap = (high - p) + math.log2(total)
                    rest = 2.0 ** (-abs(gap))
                    negative_part = (rest if gap < 0 else 1.0) / (1.0 + rest)
                    loss = LN_2 * (gap if gap > 0.0 else 0.0) + math.log1p(rest)
                    base, probability = high + math.log2(with_positive), 1.0
            losses[i] += direction_weight * loss
            lse[direction, i] = row_lse
            a = upstream[i] * direction_weight
            pull[i] += a * scale * negative_part
            mean = sums[direction, 2, i] / total if total != 0.0 else p
            log_scale_grad += a * negative_part * (mean - p)
            # the reference in units of products, in their dtype, and the factor that makes up for
            # its rounding: see `direction_losses.rounded_reference`
            weight = a * scale * probability
            r = base / c
            below = np.nextafter(r, -np.inf)
            r = below if rounded_product(c, below) >= base else r
            factors[2 * direction, i] = r
            again = rounded_product(c, np.float64(factors[2 * direction, i]))
            excess = again - base
            factors[2 * direction + 1, i] = weight * 2.0 ** (
                ROUNDING if excess > ROUNDING else excess
            )
            references[direction, i], weights[direction, i] = base, weight
            if direction == 0:
                rounded[i] = again
                highest_row = again if again > highest_row else highest_row
                lowest_row = again if again < lowest_row else lowest_row
            if direction == 1 or symmetric:
                lowest_column = base if base < lowest_column else lowest_column
    # In a loop that stores nothing: other sums have another order, and other last bits, if their
    # loop is not vectorised, and whether it is may depend on the addresses of arrays
    total_loss = 0.0
    for i in range(m):
        total_loss += losses[i]
    for i in range(m):
        positive_gradient[i, 0] = -(pull[i] + (pull[positives[i, 0]] if symmetric else 0.0))

    # One exponential for both directions while none underflows: see `SoftmaxFactors`
    columns = 0 if symmetric else 1  # the direction whose sums are those of the columns
    one_exponential = (
        highest_row - lowest_column < 40 and highest_row - lowest_row < 80
        and abs(highest_row) < EXACT and abs(lowest_row) < EXACT
    )  # fmt: skip
    if one_exponential and (symmetric or directions == 2):
        middle = 0.5 * (highest_row + lowest_column)
        for i in range(m):
            factors[4, i] = 2.0 ** (rounded[i] - middle)
            factors[5, i] = weights[columns, i] * 2.0 ** (middle - references[columns, i])
    return total_loss, LN_2 * log_scale_grad, one_exponential
