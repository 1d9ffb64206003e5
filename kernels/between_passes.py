"""The step between the passes: from complete sums to losses and the vectors of the gradient pass.

Losses and options differ in their targets (`targets`), in the sums that belong together, and in
linear terms (`linear`). This step is mathematics on vectors of length M or N. Own negatives join
the sums here: blocks know nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .direction_losses import Direction
from .epilogues import SoftmaxGradient, Statistics, Sums
from .grid import slices
from .linear import LinearTerm, add_class_means, find_label_smoothing
from .norms import Norms, normalization_backward, normalized_rows
from .problem import LOG2_E, Array, Gradients, Problem, as_sets
from .targets import finalize_with_targets, targets


@dataclass
class Finalized:
    """The results of complete sums: losses, and the vectors of the gradient pass."""

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
    own: OwnNegatives | None = None  # those in the sums; None: the problem has none

    def softmax_gradient(self, symmetric: bool) -> SoftmaxGradient:
        """The epilogue of the gradient pass. `symmetric`: queries are the keys."""
        columns, column_factor = self.columns, self.column_factor
        if symmetric:  # dL/dx plus its transpose, because columns are rows
            columns, column_factor = self.rows, self.row_factor
        return SoftmaxGradient(
            self.rows.reference, self.row_factor, None if columns is None else columns.reference,
            column_factor, self.positive_gradient, linear=self.linear,
        )  # fmt: skip


def finalize(
    vectors: Any, problem: Problem, stats: Statistics, gradient: bool, backend: Any, scale: Any
) -> Finalized:
    """Losses, and the factors of the gradient, times `scale`.

    After a pass over a triangle, `stats` has the complete sums of all rows. `gradient`: the
    gradient pass follows.
    """
    xp, logits, sums = vectors.xp, stats.positive_logits, stats.rows
    own = None if problem.own is None else OwnNegatives(xp, problem)
    if own is not None:
        own.join(vectors, stats)
    smoothing = key_bias = bias = None
    if problem.key_bias is not None:
        key_bias = backend.take_at_positives(problem, problem.key_bias)
        bias = LOG2_E * key_bias  # biases belong to keys; columns are queries and have none
    if problem.label_smoothing:
        smoothing = find_label_smoothing(xp, problem, backend, logits, key_bias)
    if problem.joint:
        logits, sums = logits[: len(logits) // 2], _join_halves(vectors, sums)
    row_targets = targets(xp, problem, logits, None if smoothing is None else smoothing.rows, bias)
    column_targets = row_targets  # key i is the positive of query i
    if problem.two_sided and (smoothing is not None or bias is not None):
        column_targets = targets(
            xp, problem, logits, None if smoothing is None else smoothing.columns
        )

    rows, columns = finalize_with_targets(vectors, problem, sums, row_targets), None
    if problem.two_sided and stats.columns is not None:
        columns = finalize_with_targets(vectors, problem, stats.columns, column_targets)
    # `upstream` has grad_out and the weights of rows (infonce/checks/validation.py: upstream)
    row_upstream = problem.upstream * (problem.row_direction_weight * scale)
    linear = []
    if problem.classes is not None:
        linear.append(add_class_means(xp, problem, backend, smoothing, sums, rows, row_upstream))
    losses, log_scale_grad = problem.row_direction_weight * rows.loss, rows.log_scale_grad
    if log_scale_grad is not None:
        log_scale_grad = problem.row_direction_weight * log_scale_grad
    row_factor = row_upstream * rows.reference_probability
    column_upstream = column_factor = None
    if columns is not None:
        losses = losses + problem.column_direction_weight * columns.loss
        if log_scale_grad is not None:
            log_scale_grad += problem.column_direction_weight * columns.log_scale_grad
        column_upstream = problem.upstream * (problem.column_direction_weight * scale)
        column_factor = column_upstream * columns.reference_probability
    if smoothing is not None:
        linear += smoothing.terms(
            xp, problem.label_smoothing, row_upstream, column_upstream, problem.joint
        )
    at_positive = _times(row_upstream, row_targets.pull(rows.negative_probability))
    if columns is not None:
        at_positive = at_positive + column_upstream * column_targets.pull(
            columns.negative_probability
        )
    # Sums may stay finite although a feature is not finite. So losses become NaN here: the loss of
    # a query that is not finite, and all losses if a key is not finite
    losses = losses + backend.row_nans(problem)[: len(losses)]
    if own is not None:
        losses = losses + own.row_nans
    if log_scale_grad is not None:  # a feature that is not finite has made it NaN already
        log_scale_grad = problem.upstream * log_scale_grad
    pull = at_positive  # -dL/dx at positives, with linear terms
    if smoothing is not None:
        smoothing_pull = problem.label_smoothing * row_upstream / smoothing.rows.count
        if column_upstream is not None and smoothing.columns is not None:
            column_pull = problem.label_smoothing * column_upstream / smoothing.columns.count
            smoothing_pull = smoothing_pull + column_pull
        pull = at_positive + _times(smoothing_pull, xp.ones_like(at_positive))
        # The linear terms pull at the keys of `smoothing.parts`. Positives outside of `parts` get
        # their pull here. `parts` of a joint loss have positives twice: one pull is taken back
        added = smoothing.added_positives[: len(row_upstream)].reshape(at_positive.shape)
        counted = 2.0 * added - 1.0 if problem.joint else 1.0 * added
        at_positive = at_positive + _times(smoothing_pull, counted)
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
        tuple(linear), own,
    )  # fmt: skip


def _times(factor: Array, values: Array) -> Array:
    """[M] times [M] or [M, P]."""
    return factor[:, None] * values if values.ndim > 1 else factor * values


# --- joint losses: rows i and i + B of 2B have one sum, and their positive is one pair ------------


def _join_halves(vectors: Any, sums: Sums) -> Sums:
    """The sums of rows i and i + B together."""
    half = len(sums.max) // 2
    first, second = sums.part(slice(half)), sums.part(slice(half, None))
    joint_sums = Sums(*(None if part is None else part.copy() for part in first.arrays))
    vectors.merge(joint_sums, second)
    return joint_sums


# --- own negatives: logits of one row, which join the row's sums between the passes ---------------

OWN_BYTES = 8 * 2**20  # of copies of rows with their own keys that are alive at once
OWN_COPIES = 4  # of each
LOWEST = np.finfo(np.float64).min  # a finite number, below all logits


@dataclass
class _OwnRows:
    """Some rows with their own keys, in the dtype of the products."""

    rows: slice
    query: Array  # [m, D] unit rows, if they are normalised
    query_norms: Norms
    keys: Array  # [m, K, D]
    key_norms: Norms
    dots: Array  # [m, K] float64; -inf for keys that are left out


class OwnRows:
    """Reads rows with their own keys, and writes their gradients, in place."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def read(self, parts: Sequence[slice]) -> Iterator[tuple[Array, Array]]:
        """The queries and the own keys of each part of the rows."""
        for rows in parts:
            yield self.problem.query[rows], self.problem.own[rows]

    def add_to_query(self, gradients: Gradients, rows: slice, dq: Array) -> None:
        """Add to the gradient of some queries."""
        gradients.query[rows] += dq  # type: ignore[index]

    def write_own(self, gradients: Gradients, rows: slice, gradient: Array) -> None:
        """Write the gradient of the own keys of some rows."""
        gradients.own[rows] = gradient  # type: ignore[index]


class OwnNegatives:
    """The own negatives of all rows of a problem. Row i has K keys of its own, o_ik:

    g_ik = dL/dx_ik = a_i 2^(x2_ik - r_i)        a and r of `SoftmaxGradient`
    dO_ik = g_ik q_i        dQ_i += sum_k g_ik o_ik

    These are operations on NumPy's arrays or CuPy's, over a few rows at a time.
    """

    def __init__(self, xp: Any, problem: Problem) -> None:
        self.xp, self.problem = xp, problem
        self.dtype = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
        self.scale = problem.exponent_scale * LOG2_E
        self.rows = problem.own_rows or OwnRows(problem)

    def _parts(self) -> Iterator[_OwnRows]:
        xp, problem = self.xp, self.problem
        m, k, d = problem.own.shape
        row_bytes = OWN_COPIES * (k + 1) * d * self.dtype.itemsize
        parts = slices(m, max(1, OWN_BYTES // row_bytes))
        for rows, (query, keys) in zip(parts, self.rows.read(parts), strict=True):
            query, query_norms = normalized_rows(xp, query, problem.normalize, self.dtype)
            keys, left_out = keys.astype(self.dtype), None
            if problem.own_mask is not None:
                left_out = ~problem.own_mask[rows]
                keys = xp.where(left_out[:, :, None], keys.dtype.type(0), keys)
            unit, key_norms = normalized_rows(
                xp, keys.reshape(-1, d), problem.normalize, self.dtype
            )
            keys = unit.reshape(keys.shape)
            dots = xp.matmul(keys, query[:, :, None])[:, :, 0].astype(np.float64)
            if left_out is not None:
                dots = xp.where(left_out, -np.inf, dots)
            if problem.limits is not None:
                dots = xp.where(dots > problem.limits[rows, None], -np.inf, dots)
            yield _OwnRows(rows, query, query_norms, keys, key_norms, dots)

    def join(self, vectors: Any, stats: Statistics) -> None:
        """Merge the sums over own negatives into the sums of rows, and add to the ranks of rows:
        how many own negatives score higher than the positive.

        `row_nans` [M] becomes NaN for rows with an own key that is not finite and not masked.
        """
        xp = self.xp
        m = len(self.problem.query)
        sums = Sums(xp.empty(m), xp.empty(m), xp.empty(m) if self.problem.moments else None)
        self.row_nans = xp.empty(m)
        for part in self._parts():
            rows = part.rows
            xp.sum(part.keys * 0, axis=(1, 2), dtype=np.float64, out=self.row_nans[rows])
            x = part.dots * self.scale
            top = x.max(axis=1)
            e = xp.exp2(x - xp.maximum(top, LOWEST)[:, None])  # 0 if all are left out
            sums.max[rows], sums.sum[rows] = top, e.sum(axis=1)
            if sums.moment is not None:
                sums.moment[rows] = (e * xp.where(xp.isneginf(x), 0.0, x)).sum(axis=1)
            if stats.row_rank is not None:
                logits = part.dots * (self.problem.scale * LOG2_E)
                above = logits > stats.positive_logits[rows, None]
                stats.row_rank[rows] += above.sum(axis=1)
        vectors.merge(stats.rows, sums)

    def add_gradients(self, reference: Array, factor: Array, gradients: Gradients) -> Array:
        """Add to dQ, and write gradients of own negatives. Returns [M] sum_k g_ik <q_i, o_ik>."""
        xp = self.xp
        products = xp.empty(len(self.problem.query))
        for part in self._parts():
            rows = part.rows
            x = part.dots * self.scale
            g = factor[rows, None] * xp.exp2(xp.minimum(x - reference[rows, None], 0.0))
            products[rows] = (g * xp.where(xp.isneginf(x), 0.0, part.dots)).sum(axis=1)
            g = g.astype(self.dtype)
            if gradients.query is not None and gradients.want_query:
                dq = xp.matmul(g[:, None, :], part.keys)[:, 0]
                dq = normalization_backward(xp, dq, part.query, part.query_norms)
                self.rows.add_to_query(gradients, rows, dq)
            if gradients.own is not None:
                dk = (g[:, :, None] * part.query[:, None, :]).reshape(-1, part.query.shape[1])
                unit = part.keys.reshape(dk.shape)
                dk = normalization_backward(xp, dk, unit, part.key_norms)
                self.rows.write_own(gradients, rows, dk.reshape(part.keys.shape))
        return products

    def finish(self, finalized: Finalized, gradients: Gradients) -> None:
        """Add the gradients, after the gradient pass. The gradient of the scale gets its share here
        if it does not come from moments."""
        products = self.add_gradients(finalized.rows.reference, finalized.row_factor, gradients)
        if self.problem.scale_grad_from_dots:
            others = finalized.log_scale_grad
            finalized.log_scale_grad = products if others is None else products + others
