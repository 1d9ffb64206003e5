"""What follows for a row or column from the sums of its negatives and its positive's logit.

kernels/cuda/conclude.cuh is the counterpart on a GPU, formula by formula.
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
    """What follows for rows, or for columns, from their sums and the positives' logits."""

    loss: Array  # softplus(n - p): n the log-sum-exp of the negatives, p the positive's logit
    lse: Array  # log-sum-exp, the positive included
    negative_probability: Array  # sigmoid(n - p): 1 minus the probability of the positive
    reference: Array  # of `SoftmaxGradient`
    reference_probability: Any  # 2^(reference - log-sum-exp): of a logit as large as `reference`
    log_scale_grad: Array = None  # d loss / d log(scale); None: the sums have no moments


def conclude(
    xp: Any, sums: Sums, positive: Array, decoupled: bool = False, mean: Array | None = None
) -> Direction:
    """From the sums of the negatives and the positive's logit, base 2.

    With E[x] the mean of the negatives' logits under their own softmax,

        d loss / d log(scale) = sigmoid(n - p) (E[x] - p).

    Nothing cancels but the logits themselves. `decoupled`: the positive is no part of the softmax;
    the loss is n - p, and 1 is in place of the sigmoid. `mean`: the share-weighted mean of the
    positives' logits, if there are several; None: p.
    """
    gap = (sums.max - positive) + xp.log2(sums.sum)
    if decoupled:
        top, total = _finite(xp, sums.max), sums.sum
        loss, share = LN_2 * gap, xp.ones_like(gap)
    else:
        top = _finite(xp, xp.maximum(sums.max, positive))
        total = sums.sum * xp.exp2(sums.max - top) + xp.exp2(positive - top)
        loss, share = softplus2(xp, gap), sigmoid2(xp, gap)
    lse2 = top + xp.log2(total)
    # A column's max may be a bound above all its logits: then total < 1, and lse2 is below top
    reference, probability = xp.minimum(top, _finite(xp, lse2)), 1.0 / xp.maximum(total, 1.0)
    log_scale_grad = None
    if sums.moment is not None:
        negative_mean = sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        positive_mean = positive if mean is None else mean
        if not decoupled:
            positive_mean = xp.where(sums.sum == 0, 0.0, positive_mean)
        log_scale_grad = LN_2 * share * (negative_mean - positive_mean)
    return Direction(loss, LN_2 * lse2, share, reference, probability, log_scale_grad)


def _finite(xp: Any, top: Array) -> Array:
    """Of nothing, any number in place of -inf: no difference of infinities is taken."""
    return xp.where(xp.isneginf(top), 0.0, top)


def rounded_reference(
    xp: Any, c: float, reference: Array, factor: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array]:
    """(references in units of raw products, factors), in `dtype`; and these references in base 2
    again. Base-2 logits are c times raw products.

    The largest logit is c times a product, rounded. In float32 the division finds that product
    again. In float64 it may find its neighbour; then it takes the smaller, because the epilogue
    sets exponents above 0 to 0. A log-sum-exp is no such multiple of c: the factor corrects a
    difference by rounding, and no larger one.
    """
    r = reference / c
    smaller = xp.nextafter(r, -np.inf)
    r = xp.where(c * smaller >= reference, smaller, r).astype(dtype)
    rounded = c * r.astype(np.float64)
    correction = xp.exp2(xp.minimum(rounded - reference, ROUNDING))
    return r, (factor * correction).astype(dtype), rounded


def weighted(xp: Any, losses: Array, weights: Array | None) -> Array:
    """Losses times their weights (None: 1). A weight of 0 leaves out an infinite loss, as that of
    a decoupled row without negatives is; a NaN stays."""
    if weights is None:
        return losses
    return xp.where((weights == 0) & ~xp.isnan(losses), 0.0, losses * weights)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap) in natural units: the loss, `gap` being (n - p) log2 e."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap): the probability of all negatives."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
