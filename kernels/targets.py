"""Loss and gradients of a softmax with any targets: sets of positives, margins, label smoothing;
limits of negatives; and the positives of a pairwise sigmoid that are pairs of equal ids.

If the target of a row is one positive with probability 1, the loss is softplus(n - p), and the
gradient at the positive is -sigmoid(n - p): see `finalize_direction`. This file has the additions
of other targets. All positives of a row count as one positive, whose logit m is their log-sum-exp:

    loss = softplus(n - m) + (m - mean of their logits) + e (mean of their logits - mean of all)
    -dloss/dx at a positive = f sigmoid(n - m) + ((1 - e) / |P| - f) + e / K

Here e is the label smoothing, K the number of keys that take part, and f the positive's fraction of
the positives' sum of exponentials. Nothing cancels: for a single positive both brackets are 0. The
gradient of the mean of all is linear: see `linear`. The derivatives by log(scale) are

    dx / dlog(scale) = x
    dm / dlog(scale) = sum over the positives of f x

with logits x without the biases of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .direction_losses import Direction
from .epilogues import Sums
from .problem import LN_2, LOG2_E, Array, Problem, as_sets


@dataclass
class KeyMeans:
    """For each row, or for each column: the mean logit over K keys that take part, and K."""

    logit: Array  # natural units, margins taken off, without biases
    count: Array  # K
    bias: Any = 0.0  # mean of their biases


@dataclass
class Targets:
    """The targets of all rows, or of all columns."""

    logit: Array  # [M] m, base 2; -inf of a row without positives
    # [M] mean of the positives' logits under the softmax over them: sum of f x, base 2, without
    # biases; None: `logit`
    softmax_mean: Array | None = None
    excess: Array | None = None  # [M] loss above softplus(n - m); None: 0
    excess_scale_grad: Array | None = None  # [M] its derivative by log(scale)
    fraction: Any = 1.0  # [M, P] f
    offset: Any = None  # [M, P] or number, of the gradient at positives; None: 0

    def pull(self, negative_probability: Array) -> Array:
        """[M] or [M, P] -dloss/dx at the positives, without the e / K of label smoothing."""
        if self.offset is None:
            return negative_probability
        if getattr(self.fraction, "ndim", 0) == 2:
            negative_probability = negative_probability[:, None]
        return self.fraction * negative_probability + self.offset


def limits(xp: Any, problem: Problem, dots: Array) -> Array:
    """[M] the limit of each row: the dot product above which its negatives are left out.

    The limit is the largest of the row's `dots` with its positives, [M] or [M, P], plus
    `false_negative_margin`. It is infinite without a positive.
    """
    top = as_sets(xp.where(problem.positives < 0, -xp.inf, dots)).max(axis=1)
    return xp.where(xp.isneginf(top), xp.inf, top) + problem.false_negative_margin


def guide_problem(problem: Problem) -> Problem:
    """The problem with the guide's features as features, for the limits of the guide."""
    return replace(
        problem, query=problem.guide_query, key=problem.guide_key, guide_query=None,
        guide_key=None, false_negative_margin=problem.guide_margin, limits=None, key_limits=None,
    )  # fmt: skip


def with_limits(problem: Problem, backend: Any, vectors: Any) -> Problem:
    """The problem with limits of rows, and of columns if columns have a softmax.

    Limits follow from the features if the loss has `false_negative_margin`, and from the features
    of the guide if it has a guide. The limit of a column is the limit of the row whose positive it
    is.
    """
    both = problem.symmetric or problem.two_sided
    limit_vectors: dict[str, Any] = {}
    if problem.has_limits:
        rows = vectors.limits(problem, backend.positive_dots(problem))
        limit_vectors |= {"limits": rows, "key_limits": rows if both else None}
    if problem.guided and problem.guide_limits is None:
        guide = guide_problem(problem)
        rows = vectors.limits(guide, backend.positive_dots(guide))
        limit_vectors |= {"guide_limits": rows, "guide_key_limits": rows if both else None}
    return replace(problem, **limit_vectors)


def mirror_positive_logits(xp: Any, logits: Array, positives: Array) -> Array:
    """Positives' logits of all rows, after a pass over one triangle of pairs (i, j).

    The pass writes the logit of a pair at its smaller index. It is copied to the larger index.
    """
    visited = (positives > xp.arange(len(positives))) | (positives < 0)
    return xp.where(visited, logits, logits[positives])


def targets(
    xp: Any, problem: Problem, logits: Array, key_means: KeyMeans | None,
    bias: Array | None = None,
) -> Targets:  # fmt: skip
    """The targets of rows, from the logits and biases of their positives: [M] or [M, P], base 2."""
    if problem.weights is not None or logits.ndim > 1 or problem.classes is not None:
        logits = xp.where(problem.positives[: len(logits)] < 0, -xp.inf, logits)
    if problem.margin:
        logits = logits - problem.scale * problem.margin * LOG2_E
    e = problem.label_smoothing
    if logits.ndim == 1:
        biased, softmax_mean = (logits, None) if bias is None else (logits + bias, logits)
        if key_means is None:
            return Targets(biased, softmax_mean)
        excess = scale_term = e * (LN_2 * logits - key_means.logit)
        if bias is not None:
            excess = scale_term + e * (LN_2 * bias - key_means.bias)
        return Targets(biased, softmax_mean, excess, scale_term, offset=-e)
    if bias is None:
        bias = xp.zeros_like(logits)
    logits = logits + bias
    present = problem.positives >= 0
    count = xp.maximum(present.sum(axis=1), 1)
    top = logits.max(axis=1)
    below = xp.where(present, logits - xp.where(xp.isneginf(top), 0.0, top)[:, None], -xp.inf)
    powers = xp.exp2(below)
    total = powers.sum(axis=1)
    fraction = powers / xp.where(total == 0, 1.0, total)[:, None]
    unbiased = xp.where(present, below - bias, 0.0)
    mean_bias = xp.where(present, bias, 0.0).sum(axis=1) / count
    mean_below, weighted_below = unbiased.sum(axis=1) / count, (fraction * unbiased).sum(axis=1)
    # m minus the mean of the logits, top + mean_below + mean_bias; m = top + log2(total)
    excess = LN_2 * (xp.log2(total) - (mean_below + mean_bias))
    scale_term = LN_2 * (weighted_below - mean_below)
    if key_means is not None:
        smoothing_term = e * (LN_2 * (top + mean_below) - key_means.logit)
        scale_term = scale_term + smoothing_term
        excess = excess + smoothing_term + e * (LN_2 * mean_bias - key_means.bias)
    offset = (1.0 - e) / count[:, None] - fraction
    return Targets(
        top + xp.log2(total), top + weighted_below, excess, scale_term, fraction, offset
    )  # fmt: skip


def finalize_with_targets(vectors: Any, problem: Problem, sums: Sums, target: Targets) -> Direction:
    """The direction of rows, or of columns, with their targets."""
    xp = vectors.xp
    if problem.hardness and sums.moment is not None:
        # the moment is of exponents, which have another scale
        sums = replace(sums, moment=sums.moment * (problem.scale / problem.exponent_scale))
    direction: Direction = vectors.direction(
        sums, target.logit, problem.decoupled, target.softmax_mean
    )
    moments = direction.log_scale_grad is not None
    if target.excess is not None:
        direction.loss = direction.loss + target.excess
        if moments:
            direction.log_scale_grad = direction.log_scale_grad + target.excess_scale_grad
    if problem.weights is not None:  # a row without a positive has weight 0, and its loss is 0
        lacks_positive = xp.isneginf(target.logit)
        direction.loss = xp.where(lacks_positive, 0.0, direction.loss)
        if moments:
            direction.log_scale_grad = xp.where(lacks_positive, 0.0, direction.log_scale_grad)
    return direction


# --- positive ids of a pairwise sigmoid -----------------------------------------------------------
#
# Pairs of equal positive ids are positives. If row i has k_i positives and column j has k'_j, the
# term of a positive pair (i, j) has the weight
#
#     v_ij = (1 / k_i + 1 / k'_j) / 2.
#
# The sum of the weights of all positive pairs is (rows with a positive + columns with a positive)
# / 2. Numbers of positives are counted before the pass, over all rows and all columns. The weight
# of a pair is then the sum of a number of its row and a number of its column.


@dataclass
class PositivePairs:
    """The positive pairs of a block, and the weights of all its pairs."""

    positive: Array  # [m, n] bool
    weight: Array  # [m, n]: v_ij at positives, else 1

    @staticmethod
    def find(
        xp: Any, problem: Problem, rows: slice, columns: slice, dtype: np.dtype[Any]
    ) -> PositivePairs | None:
        """The positive pairs of some rows and columns; None for a problem without positive ids."""
        if not problem.has_positive_ids:
            return None
        positive = problem.query_positive_ids[rows, None] == problem.key_positive_ids[columns]
        weight = problem.query_pair_weights[rows, None] + problem.key_pair_weights[columns]
        return PositivePairs(positive, xp.where(positive, weight, 1.0).astype(dtype))


def count_positives(xp: Any, problem: Problem) -> tuple[Array, Array]:
    """[M] int64 the number of keys with each query's positive id, and [N] int64 the number of
    queries with each key's positive id. The host reads no number of a GPU."""
    sides = problem.query_positive_ids, problem.key_positive_ids
    queries, keys = (
        xp.searchsorted(ordered, own, side="right") - xp.searchsorted(ordered, own, side="left")
        for own, ordered in zip(sides, map(xp.sort, sides[::-1]), strict=True)
    )
    return queries, keys


def weigh_positives(xp: Any, problem: Problem, queries: Array, keys: Array) -> None:
    """Set the weights of pairs in `problem`. `queries`, `keys`: results of `count_positives`."""
    problem.query_pair_weights, problem.key_pair_weights = (
        0.5 / xp.maximum(count, 1) for count in (queries, keys)
    )
