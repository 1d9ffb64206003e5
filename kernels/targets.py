"""The targets of rows: sets of positives, margins, label smoothing.

`between_passes.finalize` calls this file for a softmax. `finalize_with_targets` calls
`Vectors.direction`, and so `direction_losses`, for one direction of a loss. If the target of a row
is one positive with probability 1, `direction_losses` has all formulas: n is the log-sum-exp of the
negatives, p the logit of the positive, the loss is softplus(n - p), and the gradient at the
positive is -sigmoid(n - p). This file adds the terms of other targets. The target of a row with P
labels >= 0 has probability (1 - e) t at each of these positives, plus e / K at each key. Here t is
1 / P or, with weights w of labels (`Problem.label_weights`), w / sum(w). All positives of a row
count as one positive, whose logit m is their log-sum-exp:

    loss = softplus(n - m) + (m - mean_P) + e (mean_P - mean_K)
    -dloss/dx at a positive = f sigmoid(n - m) + ((1 - e) t - f) + e / K

Here e is the label smoothing, K the number of keys that take part in it, mean_P the mean of the
logits of the P positives, weighted by t, mean_K the mean of the logits of the K keys, and f the
positive's fraction of the positives' sum of exponentials. Nothing cancels: for a single positive
and e = 0, all brackets are 0. The gradient of mean_K is a linear term, which `linear` computes. The
derivatives by log(scale) are

    dx / dlog(scale) = x
    dm / dlog(scale) = sum over the positives of f x

with logits x without the biases of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .direction_losses import DirectionLosses
from .epilogues import Sums
from .problem import LN_2, LOG2_E, Array, Problem


@dataclass
class KeyMeans:
    """For each row, or each column: the mean logit over the K keys (queries) of label smoothing."""

    logit: Array  # [M] natural units, with the margins of positives, without biases
    count: Array  # [M] K
    bias: Any = 0.0  # [M] mean of the biases of these keys; 0.0: no biases


@dataclass
class Targets:
    """The targets of all rows, or of all columns: m, f and the terms that they add to a loss."""

    logit: Array  # [M] m, base 2; -inf of a row without positives
    # [M] sum of f x, base 2, without biases: it replaces `logit` in the derivative by log(scale),
    # because the scale does not multiply biases. None: `logit`
    softmax_mean: Array | None = None
    excess: Array | None = None  # [M] loss minus softplus(n - m); None: 0
    excess_scale_grad: Array | None = None  # [M] derivative of `excess` by log(scale)
    fraction: Any = 1.0  # [M, P] f; 1.0: one positive
    offset: Any = None  # [M, P] or a number: (1 - e) t - f; None: 0

    def pull(self, negative_probability: Array) -> Array:
        """[M] or [M, P] -dloss/dx at the positives, without the e / K of label smoothing.

        `negative_probability` [M] is sigmoid(n - m), or 1 if the loss is decoupled.
        """
        if self.offset is None:
            return negative_probability
        if getattr(self.fraction, "ndim", 0) == 2:
            negative_probability = negative_probability[:, None]
        return self.fraction * negative_probability + self.offset


def mirror_positive_logits(xp: Any, logits: Array, positives: Array) -> Array:
    """[M] positives' logits of all rows, after a pass over one triangle of pairs (i, j).

    Such a pass visits pairs with i < j, and writes the logit of a pair of positives only at row i.
    The result has it at row j, too: the positive of row j is row i.
    """
    is_written = (positives > xp.arange(len(positives))) | (positives < 0)
    return xp.where(is_written, logits, logits[positives])


def find_targets(
    xp: Any, problem: Problem, logits: Array, key_means: KeyMeans | None,
    bias: Array | None = None,
) -> Targets:  # fmt: skip
    """The targets of rows, or of columns, from the logits of their positives.

    `logits` and `bias` (None: no biases) are [M] or [M, P], in base 2; `logits` lack biases and
    margins. `key_means` are of label smoothing; None: the loss has no label smoothing.
    """
    # with weights or classes a row may lack a positive, and a set may have fewer than P of them; in
    # other problems each row has its positive
    if problem.weights is not None or logits.ndim > 1 or problem.classes is not None:
        logits = xp.where(problem.positives[: len(logits)] < 0, -xp.inf, logits)
    if problem.margin:
        logits = logits - problem.scale * problem.margin * LOG2_E
    e = problem.label_smoothing

    if logits.ndim == 1:  # one positive: m = p, t = 1, f = 1, so the offset (1 - e) t - f is -e
        biased, softmax_mean = (logits, None) if bias is None else (logits + bias, logits)
        if key_means is None:
            return Targets(biased, softmax_mean)
        excess_scale_grad = e * (LN_2 * logits - key_means.logit)
        bias_excess = 0.0 if bias is None else e * (LN_2 * bias - key_means.bias)
        excess = excess_scale_grad + bias_excess
        return Targets(biased, softmax_mean, excess, excess_scale_grad, offset=-e)

    # sets of positives; `below` are logits minus the row's largest one, `top`
    if bias is None:
        bias = xp.zeros_like(logits)
    logits = logits + bias
    present, weights = problem.positives >= 0, problem.label_weights
    total_weight = xp.maximum((present if weights is None else weights).sum(axis=1), 1)

    def mean(values: Array) -> Array:
        """[M] the mean of values [M, P] of the positives, 0 for none, by their weights."""
        return (values if weights is None else weights * values).sum(axis=1) / total_weight

    top = logits.max(axis=1)
    below = xp.where(present, logits - xp.where(xp.isneginf(top), 0.0, top)[:, None], -xp.inf)
    exponentials = xp.exp2(below)
    total = exponentials.sum(axis=1)
    fraction = exponentials / xp.where(total == 0, 1.0, total)[:, None]
    unbiased = xp.where(present, below - bias, 0.0)
    mean_bias = mean(xp.where(present, bias, 0.0))
    mean_below, weighted_below = mean(unbiased), (fraction * unbiased).sum(axis=1)
    # m - mean of the logits; m is top + log2(total), and the mean is top + mean_below + mean_bias
    excess = LN_2 * (xp.log2(total) - (mean_below + mean_bias))
    excess_scale_grad = LN_2 * (weighted_below - mean_below)
    if key_means is not None:
        smoothing_term = e * (LN_2 * (top + mean_below) - key_means.logit)
        excess_scale_grad = excess_scale_grad + smoothing_term
        excess = excess + smoothing_term + e * (LN_2 * mean_bias - key_means.bias)
    share = (1.0 - e) / total_weight[:, None]
    offset = (share if weights is None else weights * share) - fraction
    return Targets(
        top + xp.log2(total), top + weighted_below, excess, excess_scale_grad, fraction, offset
    )  # fmt: skip


def finalize_with_targets(
    vectors: Any, problem: Problem, sums: Sums, target: Targets
) -> DirectionLosses:
    """Losses of rows, or of columns, from complete sums of negatives and from targets."""
    xp = vectors.xp
    if problem.hardness and sums.moment is not None:
        # moments are sums of exponents, whose scale is `exponent_scale`: back to that of logits
        sums = replace(sums, moment=sums.moment * (problem.scale / problem.exponent_scale))
    direction: DirectionLosses = vectors.direction(
        sums, target.logit, problem.decoupled, target.softmax_mean
    )
    has_scale_grad = direction.log_scale_grad is not None
    if target.excess is not None:
        direction.loss = direction.loss + target.excess
        if has_scale_grad:
            direction.log_scale_grad = direction.log_scale_grad + target.excess_scale_grad
    if problem.weights is not None:  # a row without a positive has weight 0, and its loss is 0
        lacks_positive = xp.isneginf(target.logit)
        direction.loss = xp.where(lacks_positive, 0.0, direction.loss)
        if has_scale_grad:
            direction.log_scale_grad = xp.where(lacks_positive, 0.0, direction.log_scale_grad)
    return direction
