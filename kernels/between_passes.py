"""The step between the passes: from complete sums to losses and the vectors of the gradient pass.

`solve` calls `finalize` after the log-sum-exp pass. All arrays here are vectors of length M or N.
Losses and options differ in their targets (`targets`), in the rows whose sums are joined (joint
losses), and in linear terms (`linear`). The second half of the file has own negatives: no block
contains them, so they join the sums here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .direction_losses import DirectionLosses
from .epilogues import SoftmaxGradient, Statistics, Sums
from .grid import slices
from .linear import LabelSmoothing, LinearTerm, add_class_means, find_label_smoothing
from .norms import Norms, normalization_backward, normalized_rows
from .options import PairBlock
from .problem import LOG2_E, Array, Gradients, Problem, as_sets
from .targets import Targets, finalize_with_targets, find_targets


@dataclass
class Finalized:
    """The results of complete sums: losses, and the vectors of the gradient pass."""

    losses: Array  # [M], both directions, without weights; [B] of a joint loss
    rows: DirectionLosses
    columns: DirectionLosses | None  # None: columns have no softmax
    row_factor: Array  # [M] a of `SoftmaxGradient`
    column_factor: Array | None  # [N] b of `SoftmaxGradient`; None: columns have no softmax
    positive_gradient: Array  # [M] or [M, P], as in `SoftmaxGradient`
    # [M] upstream times d loss / d log(scale). With moments, it is complete. Without moments,
    # `Gradients.dots` have the part of the pairs in blocks, and this is the rest: the parts of a
    # margin and of own negatives (`OwnNegatives.finish` adds these). None: there is no such part
    log_scale_grad: Array | None = None
    linear: Sequence[LinearTerm] = ()
    # own negatives, which are in the sums; their gradients follow after the gradient pass
    own: OwnNegatives | None = None

    def softmax_gradient(self, symmetric: bool) -> SoftmaxGradient:
        """The epilogue of the gradient pass. `symmetric`: queries are the keys."""
        columns, column_factor = self.columns, self.column_factor
        if symmetric:  # columns are rows, so dQ needs dL/dx plus its transpose
            columns, column_factor = self.rows, self.row_factor
        return SoftmaxGradient(
            self.rows.reference, self.row_factor, None if columns is None else columns.reference,
            column_factor, self.positive_gradient, linear=self.linear,
            bounded_by_positives=not self.linear,
        )  # fmt: skip


def finalize(
    vectors: Any, problem: Problem, stats: Statistics, gradient: bool, backend: Any, scale: Any
) -> Finalized:
    """Losses, and the vectors of the gradient pass, from the complete sums of all rows and columns.

    `vectors` (`solve.Vectors`) has the operations on vectors. `stats` has the sums of the
    log-sum-exp pass, to which own negatives are added here. `gradient`: a gradient pass by blocks
    follows. `scale` multiplies all vectors of the gradient: it is `problem.scale`, or 1 in the
    method naive, which multiplies dL/dx itself. `Vectors.finalize` and the method naive call this.
    """
    xp = vectors.xp
    own = None if problem.own is None else vectors.own_negatives(problem)
    if own is not None:
        own.join(vectors, stats)
    smoothing, row_targets, column_targets = _find_all_targets(
        xp, problem, backend, stats.positive_logits
    )
    row_sums = _join_halves(vectors, stats.rows) if problem.joint else stats.rows

    # Losses of rows and of columns, added up with the weights of the directions. `upstream` has
    # grad_out and the row shares (infonce/checks/validation.py: upstream)
    row_losses, column_losses = finalize_with_targets(vectors, problem, row_sums, row_targets), None
    if problem.two_sided and stats.columns is not None:
        column_losses = finalize_with_targets(vectors, problem, stats.columns, column_targets)
    row_upstream = problem.upstream * (problem.row_direction_weight * scale)
    column_upstream = None
    if column_losses is not None:
        column_upstream = problem.upstream * (problem.column_direction_weight * scale)
    linear = []
    if problem.classes is not None:  # changes losses of rows and columns
        columns = None
        if column_losses is not None and stats.columns is not None:
            columns = stats.columns, column_losses, column_upstream
        rows = row_sums, row_losses, row_upstream
        linear.append(add_class_means(xp, problem, backend, smoothing, rows, columns))
    losses = problem.row_direction_weight * row_losses.loss
    log_scale_grad = row_losses.log_scale_grad
    if log_scale_grad is not None:
        log_scale_grad = problem.row_direction_weight * log_scale_grad
    # dL/dx of a negative is row_factor 2^(x - reference), x base 2. The kernels on a GPU have the
    # log-sum-exp as reference, whose probability is 1
    row_factor = row_upstream * row_losses.reference_probability
    column_factor = None
    if column_losses is not None:
        losses = losses + problem.column_direction_weight * column_losses.loss
        if log_scale_grad is not None:
            log_scale_grad += problem.column_direction_weight * column_losses.log_scale_grad
        column_factor = column_upstream * column_losses.reference_probability
    if smoothing is not None:
        linear += smoothing.terms(
            xp, problem.label_smoothing, row_upstream, column_upstream, problem.joint
        )

    # Sums may stay finite although a feature is not finite: a maximum ignores NaN, and a logit of
    # -inf counts as an excluded pair. So NaN flags are added to losses here. A query that is not
    # finite sets the flag of its row, a key that is not finite sets all flags. A joint loss has B
    # losses and 2B flags: all its rows are keys, so all flags are equal, and the first B suffice
    losses = losses + backend.row_nans(problem)[: len(losses)]
    if own is not None:
        losses = losses + own.row_nans
    if log_scale_grad is not None:
        # gets no NaN flags: see `solve.find_nan`
        log_scale_grad = problem.upstream * log_scale_grad

    # `pull` is -scale dL/dx at the positives, by all terms of the loss. `inserted_pull` is the part
    # that the gradient pass inserts: the linear terms of the label smoothing add the rest
    pull = _times(row_upstream, row_targets.pull(row_losses.negative_probability))
    if column_losses is not None:
        pull = pull + column_upstream * column_targets.pull(column_losses.negative_probability)
    # A rule tells the queries of a key, so a row without a positive inserts 0
    if problem.classes is not None and problem.two_sided:
        pull = xp.where(problem.positives < 0, 0.0, pull)
    inserted_pull = pull
    if smoothing is not None:
        pull, inserted_pull = _add_smoothing(
            xp, problem, smoothing, row_upstream, column_upstream, pull
        )
    # A positive's logit is x = scale (dot - margin). The dot products <dL/dq, q> have scale dot in
    # the place of x, and so lack -scale margin dL/dx = margin pull
    if problem.dots_lack_margin:
        present = problem.positives[: len(pull)] >= 0
        log_scale_grad = problem.margin * as_sets(xp.where(present, pull, 0.0)).sum(axis=1)

    # If queries are the keys, a gradient pass adds dL/dx and its transpose, so a pair of positives
    # gets the pulls of both rows. They are added here only if a gradient pass by blocks follows:
    # over ranks, adding is an exchange, and the method naive adds the transpose itself. In a joint
    # loss, a pull of B already has both rows i and i + B; blocks need it for each of the 2B rows
    if problem.joint:
        row_factor, inserted_pull = xp.tile(row_factor, 2), xp.tile(inserted_pull, 2)
        # an array, also if the probability is the number 1
        probability = row_losses.reference_probability + xp.zeros_like(row_losses.reference)
        row_losses.reference = xp.tile(row_losses.reference, 2)
        row_losses.reference_probability = xp.tile(probability, 2)
    elif problem.symmetric and gradient:
        inserted_pull = inserted_pull + backend.take_at_positives(problem, inserted_pull)
    return Finalized(
        losses, row_losses, column_losses, row_factor, column_factor, -inserted_pull,
        log_scale_grad, tuple(linear), own,
    )  # fmt: skip


def _find_all_targets(
    xp: Any, problem: Problem, backend: Any, positive_logits: Array
) -> tuple[LabelSmoothing | None, Targets, Targets]:
    """Label smoothing (None: the loss has none), and the targets of rows and of columns.

    A joint loss has one target for both rows i and i + B.
    """
    smoothing = positive_bias = positive_bias2 = None  # natural units, base 2
    if problem.key_bias is not None:
        positive_bias = backend.take_at_positives(problem, problem.key_bias)
        positive_bias2 = LOG2_E * positive_bias
    if problem.label_smoothing:
        smoothing = find_label_smoothing(xp, problem, backend, positive_logits, positive_bias)
    row_means = column_means = None
    if smoothing is not None:
        row_means, column_means = smoothing.rows, smoothing.columns
    if problem.joint:
        positive_logits = positive_logits[: len(positive_logits) // 2]
    row_targets = find_targets(xp, problem, positive_logits, row_means, positive_bias2)
    column_targets = row_targets  # key i is the positive of query i
    if problem.two_sided and (smoothing is not None or positive_bias2 is not None):
        # columns compare queries, which have no biases
        column_targets = find_targets(xp, problem, positive_logits, column_means)
    return smoothing, row_targets, column_targets


def _add_smoothing(
    xp: Any, problem: Problem, smoothing: LabelSmoothing, row_upstream: Array,
    column_upstream: Array | None, pull: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """-scale dL/dx at the positives, with label smoothing e: all of it, and the part that the
    gradient pass inserts.

    A target has 1 - e at the positive and e / count at each key. `pull` is of the first part, which
    the gradient pass inserts. The linear terms pull at the keys of `smoothing.parts`, so a positive
    outside of `parts` gets its e / count here. In a joint loss the linear terms of rows i and i + B
    both pull at the pair of positives, which counts once: one e / count is taken back.
    """
    smoothing_pull = problem.label_smoothing * row_upstream / smoothing.rows.count
    if column_upstream is not None and smoothing.columns is not None:
        column_pull = problem.label_smoothing * column_upstream / smoothing.columns.count
        smoothing_pull = smoothing_pull + column_pull
    added = smoothing.added_positives[: len(row_upstream)].reshape(pull.shape)
    inserted_count = 2.0 * added - 1.0 if problem.joint else 1.0 * added  # of e / count
    return (
        pull + _times(smoothing_pull, xp.ones_like(pull)),
        pull + _times(smoothing_pull, inserted_count),
    )


def _times(factor: Array, values: Array) -> Array:
    """A factor [M] of each row times values [M] or [M, P]."""
    return factor[:, None] * values if values.ndim > 1 else factor * values


# --- joint losses: rows i and i + B of 2B have one softmax, and are each other's positives --------


def _join_halves(vectors: Any, sums: Sums) -> Sums:
    """[B] the sums over the negatives of rows i and i + B together."""
    half = len(sums.max) // 2
    first, second = sums.part(slice(half)), sums.part(slice(half, None))
    joint_sums = Sums(*(None if part is None else part.copy() for part in first.arrays))
    vectors.merge(joint_sums, second)
    return joint_sums


# --- own negatives: keys of one row each, which join the row's sums between the passes ------------

OWN_BYTES = 8 * 2**20  # bytes, at most, of all copies of the rows and own keys of one part
OWN_COPIES = 4  # copies of the features of a part that are alive at once
LOWEST = np.finfo(np.float64).min  # replaces a maximum of -inf in differences: finite, below logits


@dataclass
class _OwnPart:
    """Some rows with their own keys, in the compute dtype."""

    rows: slice
    query: Array  # [m, D] unit rows if the loss normalises
    query_norms: Norms
    keys: Array  # [m, K, D] unit rows if the loss normalises
    key_norms: Norms
    dots: Array  # [m, K] float64 dot products; -inf for keys that the mask or a limit leaves out


class OwnRows:
    """Reads the rows and own keys of a problem, and writes their gradients, all in place.

    `infonce.kernels.offload.own` has the same methods for arrays in host memory.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def read(self, parts: Sequence[slice]) -> Iterator[tuple[Array, Array]]:
        """For each of `parts`, in their order: queries [m, D] and own keys [m, K, D]."""
        for rows in parts:
            yield self.problem.query[rows], read_own(self.problem, rows)

    def add_to_query(self, gradients: Gradients, rows: slice, dq: Array) -> None:
        """Add `dq` to the gradient of the queries `rows`, which the gradient pass has written."""
        gradients.query[rows] += dq  # type: ignore[index]

    def write_own(self, gradients: Gradients, rows: slice, gradient: Array) -> None:
        """Write the gradient of the own keys of `rows`, which are in no table."""
        gradients.own[rows] = gradient  # type: ignore[index]

    def write_table(self, gradients: Gradients, factors: Array) -> None:
        """Write the gradient of the table, from `factors` [M, K], the g of `OwnNegatives`."""
        write_table_gradient(self.problem, factors, gradients.own)


def read_own(problem: Problem, rows: slice) -> Array:
    """[m, K, D] the own keys of `rows`, from an array of NumPy: a part of it, or rows of a table.

    An index that does not count has row 0 of the table in place of a key.
    """
    if problem.own_indices is None:
        return problem.own[rows]
    return problem.own[problem.own_indices[rows]]


def _copied_at_a_time(problem: Problem, count: int) -> int:
    """How many times `count` rows of features may be copied at a time, within OWN_BYTES."""
    item = 8 if problem.compute_precision == "fp64" else 4
    return max(1, OWN_BYTES // (OWN_COPIES * count * problem.shape[2] * item))


def own_parts(problem: Problem) -> list[slice]:
    """Parts of the rows, each with its own keys, whose copies take up to OWN_BYTES."""
    m, copied = len(problem.query), problem.own_count + 1  # k keys and a query
    return slices(m, _copied_at_a_time(problem, copied))


def write_table_gradient(problem: Problem, factors: Array, out: Array) -> None:
    """Write the gradient of a table, dO_t = sum of g_ik q_i over all uses (i, k) of row t, to `out`
    [T, D]. `factors` [M, K] are g. All arrays are of NumPy, in host memory.

    Uses are sorted by the row of the table, and uses of one row keep their order, so that the sums
    have the same bits each time. Copies of queries take up to OWN_BYTES.
    """
    dtype, indices = factors.dtype, problem.own_indices.reshape(-1)
    order = np.argsort(indices, kind="stable")
    if problem.own_mask is not None:
        order = order[problem.own_mask.reshape(-1)[order]]
    starts = np.searchsorted(indices[order], np.arange(len(out) + 1))  # of the uses of each row
    most, first = _copied_at_a_time(problem, 1), 0
    while first < len(out):
        # Some rows of the table that have up to `most` uses, or one row
        last = int(np.searchsorted(starts, starts[first] + most, side="right")) - 1
        last = min(max(last, first + 1), first + most)
        sums = np.zeros((last - first, problem.shape[2]), dtype)
        for positions in slices(int(starts[last]), most, int(starts[first])):
            uses = order[positions]
            query = problem.query[uses // problem.own_count]
            terms, _ = normalized_rows(np, query, problem.normalize, dtype)
            terms = terms * factors.reshape(-1)[uses, None]
            used, begins = np.unique(indices[uses], return_index=True)
            sums[used - first] += np.add.reduceat(terms, begins, axis=0)
        # Rows without a use may hold anything. Their gradients are 0
        used = np.flatnonzero(starts[first + 1 : last + 1] > starts[first:last])
        unit, norms = normalized_rows(np, problem.own[first + used], problem.normalize, dtype)
        out[first:last] = 0
        out[first + used] = normalization_backward(np, sums[used], unit, norms)
        first = last


class OwnNegatives:
    """The own negatives of all rows of a problem. Row i has K keys of its own, o_ik:

    g_ik = scale dL/dx_ik = a_i 2^(x2_ik - r_i)
    dO_ik = g_ik q_i        dQ_i += sum_k g_ik o_ik

    x2_ik is the logit in base 2, with its bias. r_i and a_i are those of `SoftmaxGradient`: the
    reference exponent of the row, and upstream_i row_direction_weight scale
    2^(r_i - log-sum-exp_i). If own negatives are rows of a table, the gradient of a row of the
    table is the sum of dO_ik over all of its uses (i, k).

    `finalize` calls `join`; the solver calls `finish` after the gradient pass. Both visit a part of
    the rows at a time, by operations on arrays of NumPy. On a GPU, `infonce.kernels.gpu.own` has a
    kernel for each.
    """

    def __init__(self, xp: Any, problem: Problem) -> None:
        self.xp, self.problem = xp, problem
        self.dtype = np.dtype(np.float64 if problem.compute_precision == "fp64" else np.float32)
        self.rows = problem.own_rows or OwnRows(problem)

    @property
    def exponent_scale2(self) -> Any:
        """The factor from dot products to exponents in base 2."""
        return self.problem.exponent_scale * LOG2_E

    def biased_exponents(self, dots: Array, rows: slice) -> Array:
        """[m, K] exponents in base 2 of the own negatives of `rows`, from their dot products."""
        x2, bias = dots * self.exponent_scale2, self.problem.own_bias
        return x2 if bias is None else x2 + LOG2_E * bias[rows]

    def _factors(self, x2: Array, reference: Array, factor: Array) -> Array:
        """[m, K] g, from exponents x2 and the r and a of their rows."""
        # r_i is at least the largest exponent, but for rounding: `minimum` keeps 2^(x2 - r) <= 1
        return factor[:, None] * self.xp.exp2(self.xp.minimum(x2 - reference[:, None], 0.0))

    def _parts(self) -> Iterator[_OwnPart]:
        """Parts of the rows, each with its own keys and their dot products."""
        xp, problem, parts = self.xp, self.problem, own_parts(self.problem)
        d = problem.shape[2]
        for rows, (query, keys) in zip(parts, self.rows.read(parts), strict=True):
            query, query_norms = normalized_rows(xp, query, problem.normalize, self.dtype)
            if keys.dtype.itemsize < 8:  # float64 keys stay: `normalized_rows` needs their range
                keys = keys.astype(self.dtype)
            left_out = None
            if problem.own_mask is not None:  # masked keys become 0, because they may be NaN
                left_out = ~problem.own_mask[rows]
                keys = xp.where(left_out[:, :, None], keys.dtype.type(0), keys)
            unit, key_norms = normalized_rows(
                xp, keys.reshape(-1, d), problem.normalize, self.dtype
            )
            keys = unit.reshape(keys.shape)
            dots = xp.matmul(keys, query[:, :, None])[:, :, 0].astype(np.float64)
            if left_out is not None:
                dots = xp.where(left_out, -np.inf, dots)
            for option in problem.pair_options.by_products:
                left_out, _ = option.masks(PairBlock(problem, rows, rows, dots))
                dots = xp.where(left_out, -np.inf, dots)
            yield _OwnPart(rows, query, query_norms, keys, key_norms, dots)

    def join(self, vectors: Any, stats: Statistics) -> None:
        """Merge the sums over own negatives into `stats.rows`.

        Adds to `stats.row_rank` how many own negatives score higher than the positive. Sets
        `self.row_nans` [M]: NaN for rows with an own key that is not finite and not masked, else 0.
        """
        xp = self.xp
        m = len(self.problem.query)
        sums = Sums(xp.empty(m), xp.empty(m), xp.empty(m) if self.problem.moments else None)
        self.row_nans = xp.empty(m)
        for part in self._parts():
            rows = part.rows
            xp.sum(part.keys * 0, axis=(1, 2), dtype=np.float64, out=self.row_nans[rows])
            x2 = self.biased_exponents(part.dots, rows)
            top = x2.max(axis=1)
            e = xp.exp2(x2 - xp.maximum(top, LOWEST)[:, None])  # 0 if all are left out
            sums.max[rows], sums.sum[rows] = top, e.sum(axis=1)
            if sums.moment is not None:
                logits = xp.where(xp.isneginf(x2), 0.0, part.dots * self.exponent_scale2)
                sums.moment[rows] = (e * logits).sum(axis=1)
            if stats.row_rank is not None:
                logits = part.dots * (self.problem.scale * LOG2_E)
                above = logits > stats.positive_logits[rows, None]
                stats.row_rank[rows] += above.sum(axis=1)
        vectors.merge(stats.rows, sums)

    def add_gradients(self, reference: Array, factor: Array, gradients: Gradients) -> Array:
        """Add to dQ and write the gradient of own negatives, from r (`reference`), a (`factor`).

        Returns [M] sum_k g_ik <q_i, o_ik>, the share of own negatives in dL / d log(scale).
        """
        xp, indices = self.xp, self.problem.own_indices
        products = xp.empty(len(self.problem.query))
        wants_table = indices is not None and gradients.own is not None
        factors = xp.empty(indices.shape, self.dtype) if wants_table else None  # all g
        for part in self._parts():
            rows = part.rows
            x2 = self.biased_exponents(part.dots, rows)
            g = self._factors(x2, reference[rows], factor[rows])
            products[rows] = (g * xp.where(xp.isneginf(x2), 0.0, part.dots)).sum(axis=1)
            g = g.astype(self.dtype)
            if gradients.query is not None and gradients.want_query:
                dq = xp.matmul(g[:, None, :], part.keys)[:, 0]
                dq = normalization_backward(xp, dq, part.query, part.query_norms)
                self.rows.add_to_query(gradients, rows, dq)
            if factors is not None:
                factors[rows] = g
            elif gradients.own is not None:
                dk = (g[:, :, None] * part.query[:, None, :]).reshape(-1, part.query.shape[1])
                unit = part.keys.reshape(dk.shape)
                dk = normalization_backward(xp, dk, unit, part.key_norms)
                self.rows.write_own(gradients, rows, dk.reshape(part.keys.shape))
        if factors is not None:
            self.rows.write_table(gradients, factors)
        return products

    def finish(self, finalized: Finalized, gradients: Gradients) -> None:
        """Add the gradients of own negatives, after the gradient pass.

        If the scale's gradient does not come from moments, `finalized.log_scale_grad` gets their
        share, because `Gradients.dots` have only the pairs of blocks.
        """
        products = self.add_gradients(finalized.rows.reference, finalized.row_factor, gradients)
        if self.problem.scale_grad_from_dots:
            others = finalized.log_scale_grad
            finalized.log_scale_grad = products if others is None else products + others
