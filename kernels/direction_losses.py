"""The loss of each row, or of each column, from the sum of its negatives and its positive's logit.

`targets.finalize_with_targets` calls this, by `Vectors.direction`, for one direction of a loss
after the log-sum-exp pass. A GPU has the same formulas in kernels/cuda/direction_losses.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .epilogues import Sums
from .problem import LN_2, Array

# The largest increase of a reference exponent by rounding, base 2, that a factor corrects
ROUNDING = 2.0**-10


@dataclass
class DirectionLosses:
    """The losses of one softmax, over the keys of each row or the queries of each column.

    All vectors are float64, with a number for each row, or for each column. n is the log-sum-exp of
    the negatives and p the positive's logit, both in natural units.
    """

    loss: Array  # softplus(n - p)
    lse: Array  # log-sum-exp of negatives and positive (`decoupled`: of negatives), natural units
    negative_probability: Array  # sigmoid(n - p): 1 minus the probability of the positive
    reference: Array  # reference exponents r of the gradient pass (`SoftmaxGradient`), base 2
    # 2^(r - lse in base 2), the probability of a logit of size r; a number if all are equal
    reference_probability: Any
    log_scale_grad: Array = None  # d loss / d log(scale); None: the sums have no moments


def finalize_direction(
    xp: Any, sums: Sums, positive: Array, decoupled: bool = False,
    softmax_mean: Array | None = None,
) -> DirectionLosses:  # fmt: skip
    """Losses of rows, or of columns, from the sums of their negatives and their positives' logits.

    `positive` has p in base 2, -inf without a positive. With E[x] the mean of the negatives' logits
    under their own softmax,

        d loss / d log(scale) = sigmoid(n - p) (E[x] - p).

    Only logits are subtracted from each other, so a small loss keeps its relative precision.
    `decoupled`: the softmax leaves out the positive, so the loss is n - p, and the sigmoid becomes
    1. `softmax_mean`: base-2 numbers that replace p in the derivative, for rows with several
    positives (the mean of their logits under the softmax over them) or with biases; None: p.
    """
    gap = (sums.max - positive) + xp.log2(sums.sum)  # n - p, base 2
    if decoupled:
        top, total = _finite(xp, sums.max), sums.sum
        loss, negative_probability = LN_2 * gap, xp.ones_like(gap)
    else:
        top = _finite(xp, xp.maximum(sums.max, positive))
        total = sums.sum * xp.exp2(sums.max - top) + xp.exp2(positive - top)
        loss, negative_probability = softplus2(xp, gap), sigmoid2(xp, gap)
    # `total` is the sum of all terms relative to `top`, the largest logit, which is finite
    lse2 = top + xp.log2(total)
    # `sums.max` of a column may be above the column's largest logit, if rows and columns share
    # exponentials (`row_and_column_statistics` on the CPU). Then `total` may be below 1. If it is,
    # `lse2` is below `top`: the reference is `lse2`, and the reference's probability is 1
    reference, probability = xp.minimum(top, _finite(xp, lse2)), 1.0 / xp.maximum(total, 1.0)
    log_scale_grad = None
    if sums.moment is not None:
        negative_mean = sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        positive_mean = positive if softmax_mean is None else softmax_mean
        if not decoupled:  # no negatives: the sigmoid is 0, and 0 times an infinity would be NaN
            positive_mean = xp.where(sums.sum == 0, 0.0, positive_mean)
        log_scale_grad = LN_2 * negative_probability * (negative_mean - positive_mean)
    return DirectionLosses(
        loss, LN_2 * lse2, negative_probability, reference, probability, log_scale_grad
    )  # fmt: skip


def _finite(xp: Any, top: Array) -> Array:
    """`top` with 0 in place of -inf, so that a difference from -inf is -inf and not NaN."""
    return xp.where(xp.isneginf(top), 0.0, top)


def rounded_reference(
    xp: Any, c: float, reference: Array, factor: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array]:
    """Reference exponents and factors of `SoftmaxGradient`, rounded to the compute dtype `dtype`.

    `c` turns the numbers of a block into base-2 logits: the scale times log2(e) for dot products,
    log2(e) for natural logits. Called before a gradient pass. Returns three arrays:

    - the references divided by c, in `dtype`;
    - the factors, corrected for the rounding of the references, in `dtype`;
    - the rounded references in base 2, in float64.

    There are two kinds of references:

    - The largest logit is c times a number of a block, rounded. In float32, the division yields
      this number. In float64, it may yield a neighbour; if two numbers times c reach the reference,
      the smaller one is taken, because a reference that is too small does no harm: the epilogue
      sets exponents above 0 to 0.
    - A log-sum-exp is no multiple of c. The factor, times 2^(rounded - reference), corrects its
      rounding. A correction above 2^`ROUNDING` is cut off; corrections below 1 are kept.
    """
    quotient = reference / c
    smaller = xp.nextafter(quotient, -np.inf)
    quotient = xp.where(c * smaller >= reference, smaller, quotient).astype(dtype)
    rounded = c * quotient.astype(np.float64)
    correction = xp.exp2(xp.minimum(rounded - reference, ROUNDING))
    return quotient, (factor * correction).astype(dtype), rounded


def weigh_losses(xp: Any, losses: Array, row_shares: Array | None) -> Array:
    """Losses of rows times their row shares (None: 1); the caller adds the products up.

    Called when a loss is reduced. A share of 0 also makes an infinite loss 0, such as the loss -inf
    of a decoupled row without negatives. NaN stays NaN, so that a feature that is not finite is
    noticed.
    """
    if row_shares is None:
        return losses
    return xp.where((row_shares == 0) & ~xp.isnan(losses), 0.0, losses * row_shares)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap), the loss of a row, from the base-2 gap (n - p) log2(e)."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap), the probability of all negatives together, from the base-2 gap."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
