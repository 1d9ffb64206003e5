"""Between the folds: from complete sums to losses, and to the vectors of the gradient fold.

Losses and options differ in what the targets are (`targets`), in which sums belong together, and in
linear terms (`linear`). All of it is mathematics on vectors of length M or N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .conclude import Direction
from .epilogues import Statistics, Sums
from .linear import LinearTerm, Smoothed, smoothed
from .problem import LN_2, LOG2_E, Array, Problem, as_sets
from .targets import Smoothing, Targets, targets


@dataclass
class Conclusion:
    """What follows from complete statistics: losses, and the vectors of the gradient fold."""

    losses: Array  # [M]; [B] of a joint loss
    rows: Direction
    columns: Direction | None  # of a two-sided loss
    row_factor: Array  # a of SoftmaxGradient
    column_factor: Array | None  # b, of a two-sided loss
    positive_gradient: Array  # [M] or [M, P], of SoftmaxGradient
    # [M], weighted. With moments: dL / d log(scale). Without them, and with a margin: the margin's
    # part of it, because the rest comes from `Gradients.dots`. None: not wanted
    log_scale_grad: Array | None = None
    linear: Sequence[LinearTerm] = ()


def conclusion(
    vectors: Any, problem: Problem, stats: Statistics, gradient: bool, backend: Any, scale: Any
) -> Conclusion:
    """Losses and, for a `gradient`, its factors, with `scale` folded in. Of a triangle, both sides
    are in `stats`."""
    xp, logits, sums = vectors.xp, stats.positive_logits, stats.rows
    smooth = key_bias = bias = None
    if problem.key_bias is not None:
        key_bias = backend.take_at_positives(problem, problem.key_bias)
        bias = LOG2_E * key_bias  # of keys: columns have none
    if problem.label_smoothing:
        smooth = smoothed(xp, problem, backend, logits, key_bias)
    if problem.joint:
        logits, sums = logits[: len(logits) // 2], _joined_sums(vectors, sums)
        smooth = None if smooth is None else _joined_smoothing(problem, smooth, logits)
    row_targets = targets(xp, problem, logits, None if smooth is None else smooth.rows, bias)
    rows = _direction(vectors, problem, sums, row_targets)
    a = problem.upstream * (problem.row_weight * scale)
    linear = []
    if problem.classes is not None:
        linear.append(_class_means(xp, problem, backend, smooth, sums, rows, a))
    losses, log_scale_grad = problem.row_weight * rows.loss, rows.log_scale_grad
    if log_scale_grad is not None:
        log_scale_grad = problem.row_weight * log_scale_grad
    at_positive = _times(a, row_targets.pull(rows.negative_probability))
    row_factor = a * rows.reference_probability
    columns = b = column_factor = None
    if problem.two_sided and stats.columns is not None:  # key i is the positive of query i
        column_targets = row_targets
        if smooth is not None or bias is not None:
            column_targets = targets(
                xp, problem, logits, None if smooth is None else smooth.columns
            )
        columns = _direction(vectors, problem, stats.columns, column_targets)
        losses = losses + problem.column_weight * columns.loss
        if log_scale_grad is not None:
            log_scale_grad += problem.column_weight * columns.log_scale_grad
        b = problem.upstream * (problem.column_weight * scale)
        at_positive = at_positive + b * column_targets.pull(columns.negative_probability)
        column_factor = b * columns.reference_probability
    # NaN where a feature is not finite: the sums alone do not tell
    losses = losses + backend.row_nans(problem)[: len(losses)]
    if log_scale_grad is not None:  # NaN by itself where a feature is not finite
        log_scale_grad = problem.upstream * log_scale_grad
    pull = at_positive  # -dL/dx at the positive, linear terms included
    if smooth is not None:
        key_share = problem.label_smoothing * a / smooth.rows.keys
        if b is not None and smooth.columns is not None:
            key_share = key_share + problem.label_smoothing * b / smooth.columns.keys
        pull = at_positive + _times(key_share, xp.ones_like(at_positive))
        # Linear terms leave out a positive that is not `same`, and a joint loss counts it twice
        same = smooth.same[: len(a)].reshape(at_positive.shape)
        counted = 2.0 * same - 1.0 if problem.joint else 1.0 * same
        at_positive = at_positive + _times(key_share, counted)
        linear += smooth.terms(xp, problem.label_smoothing, a, b, problem.joint)
    if problem.dots_lack_margin:
        present = problem.positives[: len(pull)] >= 0
        log_scale_grad = problem.margin * as_sets(xp.where(present, pull, 0.0)).sum(axis=1)
    if problem.joint:
        row_factor, at_positive = xp.tile(row_factor, 2), xp.tile(at_positive, 2)
        probability = rows.reference_probability + xp.zeros_like(rows.reference)  # it may be 1
        rows.reference = xp.tile(rows.reference, 2)
        rows.reference_probability = xp.tile(probability, 2)
    elif problem.symmetric and gradient:  # over ranks this communicates
        at_positive = at_positive + backend.take_at_positives(problem, at_positive)
    return Conclusion(
        losses, rows, columns, row_factor, column_factor, -at_positive, log_scale_grad,
        tuple(linear),
    )  # fmt: skip


def _direction(vectors: Any, problem: Problem, sums: Sums, target: Targets) -> Direction:
    """Rows, or columns, with their targets."""
    xp = vectors.xp
    if problem.hardness and sums.moment is not None:  # of exponents that have another scale
        sums = replace(sums, moment=sums.moment * (problem.scale / problem.exponent_scale))
    end: Direction = vectors.direction(sums, target.logit, problem.decoupled, target.mean)
    moments = end.log_scale_grad is not None
    if target.excess is not None:
        end.loss = end.loss + target.excess
        if moments:
            end.log_scale_grad = end.log_scale_grad + target.excess_scale_grad
    if problem.weights is not None:  # rows without a positive have no loss
        none = xp.isneginf(target.logit)
        end.loss = xp.where(none, 0.0, end.loss)
        if moments:
            end.log_scale_grad = xp.where(none, 0.0, end.log_scale_grad)
    return end


def _times(factor: Array, values: Array) -> Array:
    """[M] times [M] or [M, P]."""
    return factor[:, None] * values if values.ndim > 1 else factor * values


# --- joint losses: rows i and i + B of 2B have one sum, and their positive is one pair ------------


def _joined_sums(vectors: Any, sums: Sums) -> Sums:
    half = len(sums.max) // 2
    first, second = sums.part(slice(half)), sums.part(slice(half, None))
    joined = Sums(*(None if part is None else part.copy() for part in first.arrays))
    vectors.merge(joined, second)
    return joined


def _joined_smoothing(problem: Problem, smooth: Smoothed, logits: Array) -> Smoothed:
    half = len(logits)
    keys, total = smooth.rows.keys, smooth.rows.mean * smooth.rows.keys
    positive = LN_2 * logits - problem.scale * problem.margin
    joined = keys[:half] + keys[half:] - 1.0
    mean = (total[:half] + total[half:] - positive) / joined
    return replace(smooth, rows=Smoothing(mean, joined), columns=None)


# --- classes: the positives of a row are all others of its class ----------------------------------


def _class_means(
    xp: Any, problem: Problem, backend: Any, smooth: Smoothed | None, sums: Sums, rows: Direction,
    a: Array,
) -> LinearTerm:  # fmt: skip
    """The linear term of classes. Changes `rows.loss` and `rows.log_scale_grad` of rows whose
    positives are in the sums. Such a loss is the log-sum-exp less the mean of the positives'
    logits. It is at least the logarithm of the number of positives: nothing cancels."""
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
    return LinearTerm(problem.classes, xp.where(in_sums, (1.0 - e) * a / count, 0.0))
