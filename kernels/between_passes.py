"""The step between the folds: from complete sums to losses and the vectors of the gradient fold.

Losses and options differ in their targets (`targets`), in the sums that belong together, and in
linear terms (`linear`). This step is mathematics on vectors of length M or N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .direction_losses import Direction
from .epilogues import Statistics, Sums
from .linear import LinearTerm, Smoothed, smoothed
from .problem import LN_2, LOG2_E, Array, Problem, as_sets
from .targets import Smoothing, Targets, targets


@dataclass
class Finalized:
    """The results of complete sums: losses, and the vectors of the gradient fold."""

    losses: Array  # [M]; [B] of a joint loss
    rows: Direction
    columns: Direction | None  # of a two-sided loss
    row_factor: Array  # as in `SoftmaxGradient`
    column_factor: Array | None  # of a two-sided loss
    positive_gradient: Array  # [M] or [M, P], as in `SoftmaxGradient`
    # [M] weighted dL / d log(scale), from moments. If the loss has a margin and no moments: only
    # the margin's part, because `Gradients.dots` have the rest. None: not wanted
    log_scale_grad: Array | None = None
    linear: Sequence[LinearTerm] = ()


def finalize(
    vectors: Any, problem: Problem, stats: Statistics, gradient: bool, backend: Any, scale: Any
) -> Finalized:
    """Losses, and the factors of the gradient, times `scale`.

    After a fold over a triangle, `stats` has the complete sums of all rows. `gradient`: the
    gradient fold follows.
    """
    xp, logits, sums = vectors.xp, stats.positive_logits, stats.rows
    smooth = key_bias = bias = None
    if problem.key_bias is not None:
        key_bias = backend.take_at_positives(problem, problem.key_bias)
        bias = LOG2_E * key_bias  # biases belong to keys; columns are queries and have none
    if problem.label_smoothing:
        smooth = smoothed(xp, problem, backend, logits, key_bias)
    if problem.joint:
        logits, sums = logits[: len(logits) // 2], _joined_sums(vectors, sums)
        smooth = None if smooth is None else _joined_smoothing(problem, smooth, logits)
    row_targets = targets(xp, problem, logits, None if smooth is None else smooth.rows, bias)
    rows = _direction(vectors, problem, sums, row_targets)
    row_upstream = problem.upstream * (problem.row_direction_weight * scale)
    linear = []
    if problem.classes is not None:
        linear.append(_class_means(xp, problem, backend, smooth, sums, rows, row_upstream))
    losses, log_scale_grad = problem.row_direction_weight * rows.loss, rows.log_scale_grad
    if log_scale_grad is not None:
        log_scale_grad = problem.row_direction_weight * log_scale_grad
    at_positive = _times(row_upstream, row_targets.pull(rows.negative_probability))
    row_factor = row_upstream * rows.reference_probability
    columns = column_upstream = column_factor = None
    if problem.two_sided and stats.columns is not None:  # key i is the positive of query i
        column_targets = row_targets
        if smooth is not None or bias is not None:
            column_targets = targets(
                xp, problem, logits, None if smooth is None else smooth.columns
            )
        columns = _direction(vectors, problem, stats.columns, column_targets)
        losses = losses + problem.column_direction_weight * columns.loss
        if log_scale_grad is not None:
            log_scale_grad += problem.column_direction_weight * columns.log_scale_grad
        column_upstream = problem.upstream * (problem.column_direction_weight * scale)
        at_positive = at_positive + column_upstream * column_targets.pull(
            columns.negative_probability
        )
        column_factor = column_upstream * columns.reference_probability
    # sums may stay finite although a feature is not finite: rows with such a feature get NaN here
    losses = losses + backend.row_nans(problem)[: len(losses)]
    if log_scale_grad is not None:  # a feature that is not finite has made it NaN already
        log_scale_grad = problem.upstream * log_scale_grad
    pull = at_positive  # -dL/dx at positives, with linear terms
    if smooth is not None:
        smoothing_pull = problem.label_smoothing * row_upstream / smooth.rows.keys
        if column_upstream is not None and smooth.columns is not None:
            column_pull = problem.label_smoothing * column_upstream / smooth.columns.keys
            smoothing_pull = smoothing_pull + column_pull
        pull = at_positive + _times(smoothing_pull, xp.ones_like(at_positive))
        # The linear terms pull at the keys of `smooth.parts`. Positives outside of `parts` get
        # their pull here. `parts` of a joint loss have positives twice: one pull is taken back
        added = smooth.added_positives[: len(row_upstream)].reshape(at_positive.shape)
        counted = 2.0 * added - 1.0 if problem.joint else 1.0 * added
        at_positive = at_positive + _times(smoothing_pull, counted)
        linear += smooth.terms(
            xp, problem.label_smoothing, row_upstream, column_upstream, problem.joint
        )
    if problem.dots_lack_margin:
        present = problem.positives[: len(pull)] >= 0
        log_scale_grad = problem.margin * as_sets(xp.where(present, pull, 0.0)).sum(axis=1)
    if problem.joint:
        row_factor, at_positive = xp.tile(row_factor, 2), xp.tile(at_positive, 2)
        # an array, also if the probability is the number 1
        probability = rows.reference_probability + xp.zeros_like(rows.reference)
        rows.reference = xp.tile(rows.reference, 2)
        rows.reference_probability = xp.tile(probability, 2)
    elif problem.symmetric and gradient:  # ranks exchange vectors here
        at_positive = at_positive + backend.take_at_positives(problem, at_positive)
    return Finalized(
        losses, rows, columns, row_factor, column_factor, -at_positive, log_scale_grad,
        tuple(linear),
    )  # fmt: skip


def _direction(vectors: Any, problem: Problem, sums: Sums, target: Targets) -> Direction:
    """The direction of rows, or of columns, with their targets."""
    xp = vectors.xp
    if problem.hardness and sums.moment is not None:
        # the moment is of exponents, which have another scale
        sums = replace(sums, moment=sums.moment * (problem.scale / problem.exponent_scale))
    direction: Direction = vectors.direction(sums, target.logit, problem.decoupled, target.mean)
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


def _times(factor: Array, values: Array) -> Array:
    """[M] times [M] or [M, P]."""
    return factor[:, None] * values if values.ndim > 1 else factor * values


# --- joint losses: rows i and i + B of 2B have one sum, and their positive is one pair ------------


def _joined_sums(vectors: Any, sums: Sums) -> Sums:
    """The sums of rows i and i + B together."""
    half = len(sums.max) // 2
    first, second = sums.part(slice(half)), sums.part(slice(half, None))
    joined = Sums(*(None if part is None else part.copy() for part in first.arrays))
    vectors.merge(joined, second)
    return joined


def _joined_smoothing(problem: Problem, smooth: Smoothed, logits: Array) -> Smoothed:
    """The label smoothing of rows i and i + B together."""
    half = len(logits)
    keys, total = smooth.rows.keys, smooth.rows.mean * smooth.rows.keys
    positive = LN_2 * logits - problem.scale * problem.margin
    joined = keys[:half] + keys[half:] - 1.0
    mean = (total[:half] + total[half:] - positive) / joined
    return replace(smooth, rows=Smoothing(mean, joined), columns=None)


# --- classes: the positives of a row are all others of its class ----------------------------------


def _class_means(
    xp: Any, problem: Problem, backend: Any, smooth: Smoothed | None, sums: Sums, rows: Direction,
    row_upstream: Array,
) -> LinearTerm:  # fmt: skip
    """The linear term of classes.

    The function changes `rows.loss` and `rows.log_scale_grad` of rows whose positives are in the
    sums.

    The loss of such a row is the log-sum-exp minus the mean of its positives' logits. The loss is
    at least the logarithm of the number of positives, so the subtraction loses little precision.
    """
    e = problem.label_smoothing
    others, _ = backend.segment_sums(problem, problem.classes, False)
    count = xp.maximum(others.number, 1.0)
    mean, mean_bias = problem.scale * others.products / count, others.biases / count
    scale_term, bias_term = -mean, -mean_bias
    if smooth is not None:
        scale_term = scale_term + e * (mean - smooth.rows.mean)
        bias_term = bias_term + e * (mean_bias - smooth.rows.bias)
    in_sums = (problem.positives < 0) & (others.number > 0)
    rows.loss = xp.where(in_sums, rows.lse + scale_term + bias_term, rows.loss)
    if sums.moment is not None:
        all_keys = LN_2 * sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        rows.log_scale_grad = xp.where(in_sums, all_keys + scale_term, rows.log_scale_grad)
    return LinearTerm(problem.classes, xp.where(in_sums, (1.0 - e) * row_upstream / count, 0.0))
