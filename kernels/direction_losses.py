"""The loss of each row or column, from the sum of its negatives and the logit of its positive.

kernels/cuda/direction_losses.cuh has the same formulas for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .epilogues import Sums
from .problem import LN_2, Array

ROUNDING = 2.0**-10  # largest difference of exponents, base 2, that a factor corrects


@dataclass
class Direction:
    """Losses of rows, or of columns, and the vectors of their gradient."""

    loss: Array  # softplus(n - p): n the log-sum-exp of the negatives, p the positive's logit
    lse: Array  # log-sum-exp, the positive included
    negative_probability: Array  # sigmoid(n - p): 1 minus the probability of the positive
    reference: Array  # reference exponents of the gradient pass, as in `SoftmaxGradient`
    reference_probability: Any  # 2^(reference - lse): the probability of a logit of that size
    log_scale_grad: Array = None  # d loss / d log(scale); None: the sums have no moments


def finalize_direction(
    xp: Any,
    sums: Sums,
    positive: Array,
    decoupled: bool = False,
    softmax_mean: Array | None = None,
) -> Direction:
    """The direction of negatives with these `sums` and positives with these logits, base 2.

    With E[x] the mean of the negatives' logits under their own softmax,

        d loss / d log(scale) = sigmoid(n - p) (E[x] - p).

    Only logits are subtracted from each other. `decoupled`: the softmax leaves out the positive, so
    the loss is n - p, and the sigmoid is replaced by 1. `softmax_mean`: if a row
    has several positives, their logits' mean under the softmax over them; None: p.
    """
    gap = (sums.max - positive) + xp.log2(sums.sum)
    if decoupled:
        top, total = _finite(xp, sums.max), sums.sum
        loss, negative_probability = LN_2 * gap, xp.ones_like(gap)
    else:
        top = _finite(xp, xp.maximum(sums.max, positive))
        total = sums.sum * xp.exp2(sums.max - top) + xp.exp2(positive - top)
        loss, negative_probability = softplus2(xp, gap), sigmoid2(xp, gap)
    lse2 = top + xp.log2(total)
    # a column's max may be an upper bound of its logits; then total < 1, and lse2 is below top
    reference, probability = xp.minimum(top, _finite(xp, lse2)), 1.0 / xp.maximum(total, 1.0)
    log_scale_grad = None
    if sums.moment is not None:
        negative_mean = sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        positive_mean = positive if softmax_mean is None else softmax_mean
        if not decoupled:
            positive_mean = xp.where(sums.sum == 0, 0.0, positive_mean)
        log_scale_grad = LN_2 * negative_probability * (negative_mean - positive_mean)
    return Direction(
        loss, LN_2 * lse2, negative_probability, reference, probability, log_scale_grad
    )  # fmt: skip


def _finite(xp: Any, top: Array) -> Array:
    """`top` with 0 in place of -inf, because -inf - -inf would be NaN."""
    return xp.where(xp.isneginf(top), 0.0, top)


def rounded_reference(
    xp: Any, c: float, reference: Array, factor: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array]:
    """Reference exponents and factors of a gradient, rounded to `dtype`. Base-2 logits are c times
    dot products. Returns three arrays:

    - the references divided by c, in `dtype`;
    - the factors, corrected for the rounding of the references, in `dtype`;
    - the rounded references in base 2, in float64.

    A reference that is the largest logit is c times a dot product, rounded. In float32, the
    division yields this dot product. In float64, it may yield a neighbouring number; then the
    smaller one is taken, because the epilogue sets exponents above 0 to 0. A reference that is a
    log-sum-exp is no multiple of c: the factor corrects a difference up to `ROUNDING`.
    """
    quotient = reference / c
    smaller = xp.nextafter(quotient, -np.inf)
    quotient = xp.where(c * smaller >= reference, smaller, quotient).astype(dtype)
    rounded = c * quotient.astype(np.float64)
    correction = xp.exp2(xp.minimum(rounded - reference, ROUNDING))
    return quotient, (factor * correction).astype(dtype), rounded


def weigh_losses(xp: Any, losses: Array, weights: Array | None) -> Array:
    """Losses times their weights (None: 1).

    A weight of 0 makes an infinite loss 0, such as the loss of a decoupled row without negatives.
    NaN stays NaN.
    """
    if weights is None:
        return losses
    return xp.where((weights == 0) & ~xp.isnan(losses), 0.0, losses * weights)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap), the loss of a row whose gap is (n - p) log2 e."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap), the probability of all negatives."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
