"""What follows for a row or column from the sums of its negatives and its positive's logit.

kernels/cuda/conclude.cuh is the counterpart on a GPU, formula by formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .problem import LN_2, Array, Sums


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
    the loss is n - p, and 1 is in place of the sigmoid. `mean`: of the logits that p stands for.
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
