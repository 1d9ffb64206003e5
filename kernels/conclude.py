"""What follows for a row or column from the (max, sum) of its negatives and its positive's logit.

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


def conclude(xp: Any, sums: Sums, positive: Array) -> Direction:
    """From the (max, sum) of the negatives and the positive's logit, base 2."""
    gap = (sums.max - positive) + xp.log2(sums.sum)
    top = xp.maximum(sums.max, positive)
    total = sums.sum * xp.exp2(sums.max - top) + xp.exp2(positive - top)
    lse2 = top + xp.log2(total)
    # A column's max may be a bound above all its logits: then total < 1, and lse2 is below top
    reference, probability = xp.minimum(top, lse2), 1.0 / xp.maximum(total, 1.0)
    return Direction(softplus2(xp, gap), LN_2 * lse2, sigmoid2(xp, gap), reference, probability)


def softplus2(xp: Any, gap: Array) -> Array:
    """log(1 + 2^gap) in natural units: the loss, `gap` being (n - p) log2 e."""
    return LN_2 * xp.logaddexp2(0.0, gap)


def sigmoid2(xp: Any, gap: Array) -> Array:
    """1 / (1 + 2^-gap): the probability of all negatives."""
    return xp.exp2(gap - xp.logaddexp2(0.0, gap))
