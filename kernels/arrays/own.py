"""Negatives of one row alone (`own=`): their part of the row's softmax, and their gradients.

Row i has K keys of its own, o_ik. Their logits join the sums of row i between the folds, and so
blocks know nothing of them:

    g_ik = dL/dx_ik = a_i 2^(x2_ik - r_i)        a and r of `SoftmaxGradient`
    dO_ik = g_ik q_i        dQ_i += sum_k g_ik o_ik

These are operations on NumPy's arrays or CuPy's, over a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..between_passes import Finalized
from ..epilogues import Statistics, Sums
from ..grid import slices
from ..norms import Norms, normalization_backward, normalized_rows
from ..problem import LOG2_E, Array, Gradients, Problem

BYTES = 8 * 2**20  # of copies of rows with their own keys that are alive at once
COPIES = 4  # of each


@dataclass
class _Rows:
    """Some rows with their own keys, in the dtype of the products."""

    rows: slice
    query: Array  # [m, D] unit rows, if they are normalised
    query_norms: Norms
    keys: Array  # [m, K, D]
    key_norms: Norms
    dots: Array  # [m, K] float64; -inf for keys that are left out


class OwnNegatives:
    """The own negatives of all rows of a problem."""

    def __init__(self, xp: Any, problem: Problem) -> None:
        self.xp, self.problem = xp, problem
        self.dtype = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
        self.scale = problem.exponent_scale * LOG2_E

    def _parts(self) -> Iterator[_Rows]:
        xp, problem = self.xp, self.problem
        m, k, d = problem.own.shape
        row_bytes = COPIES * (k + 1) * d * self.dtype.itemsize
        for rows in slices(m, max(1, BYTES // row_bytes)):
            query, query_norms = self._unit(problem.query[rows])
            keys, left_out = problem.own[rows].astype(self.dtype), None
            if problem.own_mask is not None:
                left_out = ~problem.own_mask[rows]
                keys = xp.where(left_out[:, :, None], keys.dtype.type(0), keys)
            unit, key_norms = self._unit(keys.reshape(-1, d))
            keys = unit.reshape(keys.shape)
            dots = xp.matmul(keys, query[:, :, None])[:, :, 0].astype(np.float64)
            if left_out is not None:
                dots = xp.where(left_out, -np.inf, dots)
            if problem.limits is not None:
                dots = xp.where(dots > problem.limits[rows, None], -np.inf, dots)
            yield _Rows(rows, query, query_norms, keys, key_norms, dots)

    def _unit(self, z: Array) -> tuple[Array, Norms]:
        return normalized_rows(self.xp, z, self.problem.normalize, self.dtype)

    def sums(self) -> Sums:
        """Sums over the own negatives of each row, to be merged with those of other negatives."""
        xp = self.xp
        m = len(self.problem.query)
        sums = Sums(xp.empty(m), xp.empty(m), xp.empty(m) if self.problem.moments else None)
        for part in self._parts():
            x = part.dots * self.scale
            top = x.max(axis=1)
            e = xp.exp2(x - xp.where(xp.isneginf(top), 0.0, top)[:, None])
            sums.max[part.rows], sums.sum[part.rows] = top, e.sum(axis=1)
            if sums.moment is not None:
                sums.moment[part.rows] = (e * xp.where(xp.isneginf(x), 0.0, x)).sum(axis=1)
        return sums

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
                gradients.query[rows] += normalization_backward(
                    xp, dq, part.query, part.query_norms
                )
            if gradients.own is not None:
                dk = (g[:, :, None] * part.query[:, None, :]).reshape(-1, part.query.shape[1])
                unit = part.keys.reshape(dk.shape)
                dk = normalization_backward(xp, dk, unit, part.key_norms)
                gradients.own[rows] = dk.reshape(part.keys.shape)
        return products

    def finish(self, finalized: Finalized, gradients: Gradients | None) -> None:
        """Add NaN to losses of rows whose own keys are not finite, and add the gradients.

        The gradient of the scale gets its share here if it does not come from moments.
        """
        finalized.losses = finalized.losses + self.not_finite()
        if gradients is None:
            return
        products = self.add_gradients(finalized.rows.reference, finalized.row_factor, gradients)
        if self.problem.scale_grad_from_dots:
            others = finalized.log_scale_grad
            finalized.log_scale_grad = products if others is None else products + others

    def not_finite(self) -> Array:
        """[M] NaN for rows with an own key that is not finite and not masked; else 0."""
        xp, problem = self.xp, self.problem
        row_nans = xp.empty(len(problem.query))
        for rows in slices(len(row_nans), 1024):
            finite = xp.isfinite(problem.own[rows].astype(np.float64)).all(axis=2)
            if problem.own_mask is not None:
                finite = finite | ~problem.own_mask[rows]
            row_nans[rows] = xp.where(finite.all(axis=1), 0.0, np.nan)
        return row_nans


def joined(vectors: Any, problem: Problem, stats: Statistics) -> OwnNegatives | None:
    """Merge the own negatives into the sums of rows. Returns them; None if the problem has none."""
    if problem.own is None:
        return None
    own = OwnNegatives(vectors.xp, problem)
    vectors.merge(stats.rows, own.sums())
    return own
