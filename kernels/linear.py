"""Linear terms of a loss: label smoothing, and the positives of a class. No pass computes them.

The mean logit of all keys (label smoothing) and the mean logit of the keys of a class are sums over
segments of keys,

    sum of x_ij over the keys j of row i's segment = scale q_i . (sum of these k_j)

and their gradients are sums over segments, too. So time and memory are linear in the batch.
`between_passes.finalize` takes the mean logits from here, for the losses; the code that completes
dQ and dK subtracts `LinearGradient`. If queries are the keys, pairs i = j do not count.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .direction_losses import DirectionLosses
from .epilogues import Sums
from .problem import LN_2, Array, Problem, as_sets
from .targets import KeyMeans


@dataclass
class Segments:
    """A division of rows and keys into segments: a linear term pairs each row with all keys of the
    row's segment."""

    # [M] int64: the segment of each row, in [0, count), or -1 for none. If `count` is None, the
    # segments are ids of any value. On a GPU, `rows` may be None: all rows are in one segment
    rows: Array
    columns: Array  # [N]: the segment of each key, like `rows`
    count: int | None = None  # number of segments; None: `numbered` finds it
    # [M] and [N]: rows, and keys, sorted by segment; None: not known
    row_order: Array = None
    column_order: Array = None
    _numbered: Segments | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbered = None

    def numbered(self, xp: Any) -> Segments:
        """The same segments with a `count`: one for each id of rows, and one for all keys whose id
        no row has."""
        if self.count is not None:
            return self
        if self._numbered is None:
            ids, rows = xp.unique(self.rows, return_inverse=True)
            rows = rows.reshape(-1)
            if self.columns is self.rows:
                self._numbered = Segments(rows, rows, len(ids))
            elif len(ids) == 0:  # no rows: all keys are in one segment that no row has
                self._numbered = Segments(rows, xp.zeros(len(self.columns), xp.int64), 1)
            else:
                at = xp.minimum(xp.searchsorted(ids, self.columns), len(ids) - 1)
                columns = xp.where(ids[at] == self.columns, at, len(ids))
                self._numbered = Segments(rows, columns, len(ids) + 1)
        return self._numbered

    def pairs(self, xp: Any, symmetric: bool) -> Array:
        """[M, N] bool: whether row and key are in the same segment; False for i = j if
        `symmetric`."""
        same = self.rows[:, None] == self.columns
        if symmetric:
            xp.fill_diagonal(same, False)
        return same

    def members(self, xp: Any, index: Array) -> tuple[Array, Array]:
        """For each row, the number of keys in its segment, and the sum of these keys' `index` [N].

        `partners` finds the other key of a segment of two from this sum.
        """
        if xp is np:  # without a second sort
            numbered = self.numbered(np)
            assert numbered.count is not None
            number = np.bincount(numbered.columns, minlength=numbered.count)
            indices = np.bincount(numbered.columns, index, numbered.count)
            return number[numbered.rows], indices[numbered.rows].astype(index.dtype)
        order, begin, end = find_members(xp, self.rows, self.columns)
        upto = xp.zeros(len(index) + 1, index.dtype)
        upto[1:] = xp.cumsum(index[order])
        return end - begin, upto[end] - upto[begin]


def find_members(xp: Any, own: Array, others: Array) -> tuple[Array, Array, Array]:
    """An order [n] of the other side by `others`, its segments or ids; and [m] where the members of
    the segments `own` begin and end in it.

    `unique` and `bincount` of CuPy would make the host wait for the GPU.
    """
    order = xp.argsort(others)
    begin, end = (xp.searchsorted(others[order], own, side=side) for side in ("left", "right"))
    return order, begin, end


@dataclass
class Classes(Segments):
    """Segments whose rows and keys are positives: the classes of SupCon, or of `positive_ids`. On a
    GPU `count` is None: the host does not know it."""

    # Both are set on a GPU, for its kernels. `in_sums` has orders, and only the classes whose rows
    # have several positives (`decoupled`: one or more), and so a mean in their loss
    in_sums: Segments | None = None
    positive_count: Array = None  # [M] positives of a row in a class of `in_sums`; 0 in others


def partners(
    xp: Any, classes: Classes, members: tuple[Array, Array], own_index: Array | None,
    decoupled: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The positives of rows that have one positive, and whether rows have any.

    `members` is `classes.members` of the indices of all keys. `own_index` [M]: queries are the
    keys, and row i is no positive of itself; None: queries are no keys. Returns:

    - [M] the only positive of a row; -1 for a row with several or none;
    - [M] bool: whether the row has a positive. None: each row has one, because row i and key i have
      one class.

    `decoupled`: sums leave out all positives, so the first value is -1 for all rows.
    """
    number, index_sums = members
    if own_index is not None:
        number, index_sums = number - 1, index_sums - own_index
    is_single = (number == 1) & (not decoupled)
    all_have_one = own_index is None and classes.rows is classes.columns
    return xp.where(is_single, index_sums, -1), None if all_have_one else number > 0


@dataclass
class SegmentSums:
    """For each row, sums over the keys of its segment; or for each key, sums over its rows."""

    products: Array  # [M] or [N] float64: sum of q_i . k_j, without the scale
    number: Array  # number of keys (or rows) of the segment, float64
    biases: Array  # sum of the biases of these keys, natural units; 0 without biases

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """(products, number, biases), which ranks add up."""
        return self.products, self.number, self.biases


@dataclass
class LinearTerm:
    """A term of the gradient: -scale dL/dx_ij = row_factor_i + column_factor_j, if row i and key j
    are in one segment, else 0."""

    segments: Segments
    row_factor: Array  # [M]
    column_factor: Array | None = None  # [N]; None: 0
    # [count, D] sums of the queries, and of the keys, of each segment; None: not computed yet
    query_sums: Array | None = None
    key_sums: Array | None = None


class SegmentedRows(Protocol):
    """The rows u_i of queries or of keys, normalised if the loss normalises. Each backend has its
    own class with these two methods."""

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        """[count, D]: the sum of factor_i u_i (None: u_i) over the rows of each segment.

        `segment` [n] is the segment of each row, `factor` [n]. A GPU reads rows in the given
        `order` (`Segments.row_order`); the sums of segments without rows are then arbitrary.
        """
        ...

    def products(self, segment: Array, sums: Array, own_count: float) -> Array:
        """[n] float64: u_i . (sums[segment_i] - own_count u_i).

        `own_count`: how often `sums` contain row i itself, which does not count.
        """
        ...


class LinearGradient:
    """Minus the gradient of a linear term with respect to the rows u_i of one side:

    -dL/du_i = factor_i (sums[segment_i] - own_count u_i) + weighted[segment_i]

    - `segment` [n]: the segment of row i; `factor` [n]: its factor, None if this side has none.
    - `sums` [count, D]: sums of the rows of the other side; None if `factor` is None.
    - `weighted` [count, D]: sums of the rows of the other side times the factors of these rows;
      None if the other side has no factors.
    - `own_count`: 2 if queries are the keys, else 0.
    """

    def __init__(
        self,
        xp: Any,
        query: SegmentedRows,
        key: SegmentedRows,
        term: LinearTerm,
        is_key_side: bool,
        symmetric: bool,
    ) -> None:
        segments = term.segments.numbered(xp)
        assert segments.count is not None
        own_segment, other_segment = segments.rows, segments.columns
        own_factor, other_factor = term.row_factor, term.column_factor
        other_side, other_sums, order = key, term.key_sums, segments.column_order
        if is_key_side:
            own_segment, other_segment = other_segment, own_segment
            own_factor, other_factor = other_factor, own_factor
            other_side, other_sums, order = query, term.query_sums, segments.row_order
        elif symmetric:  # row i is also key i, and has the factor of row i there
            other_factor = own_factor
        # If queries are the keys, `sums` and `weighted` both contain row i. A row makes no pair
        # with itself, so factor_i u_i is subtracted twice
        self.own_count = 2.0 if symmetric else 0.0
        self.segment, self.factor = own_segment, own_factor
        grouping = other_segment, segments.count
        self.sums = self.weighted = None
        if own_factor is not None:
            if other_sums is None:
                other_sums = other_side.sums(*grouping, order=order)
            self.sums = other_sums
        if other_factor is not None:
            self.weighted = other_side.sums(*grouping, other_factor, order)

    def part(self, rows: slice) -> LinearGradient:
        """The gradient with respect to some rows of this side."""
        part = copy(self)
        part.segment, part.factor = (
            None if vector is None else vector[rows] for vector in (self.segment, self.factor)
        )
        return part


class Summing(Protocol):
    """The methods of a backend that linear terms need, in addition to those of `solve.Backend`."""

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """For each row [M], sums over the keys of its segment; if `columns`, also for each key [N],
        sums over the rows of its segment (else None). Over ranks, keys are the keys of all ranks.
        """
        ...

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        """[M] or [M, P]: per_key[positives], as in `solve.Backend`."""
        ...


def segment_sums(
    xp: Any,
    problem: Problem,
    query: SegmentedRows,
    key: SegmentedRows,
    segments: Segments,
    columns: bool,
) -> tuple[SegmentSums, SegmentSums | None]:
    """`Summing.segment_sums` of a backend that has all rows of `query` and `key`."""
    segments = segments.numbered(xp)
    assert segments.count is not None
    key_sums = key.sums(segments.columns, segments.count)
    row_products = query.products(segments.rows, key_sums, float(problem.symmetric))
    column_products = None
    if columns:
        query_sums = query.sums(segments.rows, segments.count)
        column_products = key.products(segments.columns, query_sums, 0.0)
    return segment_sums_from_products(xp, problem, segments, row_products, column_products)


def sum_members(xp: Any, segment: Array, values: Array, begin: Array, end: Array) -> Array:
    """[m] the sums of `values` [n] from `begin` [m] to `end` [m], each of one segment, added in the
    same order in every call. `segment` [n] and `values` are in the order of `find_members`.

    `bincount` of CuPy adds by atomics, in any order. So step k adds to each value the sum of the
    2^k values of its segment before it.
    """
    n, step = len(values), 1
    sums = xp.zeros(n + 1)  # the last number is the sum of no values
    sums[:n] = values
    while step < n:
        is_same = segment[step:] == segment[:-step]
        sums[step:n] = xp.where(is_same, sums[step:n] + sums[: n - step], sums[step:n])
        step *= 2
    return sums[xp.where(begin == end, n, end - 1)]


def segment_sums_from_products(
    xp: Any, problem: Problem, segments: Segments, row_products: Array,
    column_products: Array | None,
) -> tuple[SegmentSums, SegmentSums | None]:  # fmt: skip
    """`Summing.segment_sums` from `SegmentSums.products` of rows [M] and of columns [N] (None: not
    wanted)."""
    if xp is np:
        segments = segments.numbered(np)

    def complete(
        own: Array, others: Array, products: Array, other_bias: Array | None
    ) -> SegmentSums:
        """The sums of one side, whose segments are `own`, over the rows of the other side."""
        biases = xp.zeros(len(own))
        if xp is np:
            assert segments.count is not None
            number = np.bincount(others, minlength=segments.count)[own]
            if other_bias is not None:
                biases += np.bincount(others, other_bias, segments.count)[own]
        else:
            order, begin, end = find_members(xp, own, others)
            number = end - begin
            if other_bias is not None:
                biases = sum_members(xp, others[order], other_bias[order], begin, end)
        if problem.symmetric and other_bias is not None:
            biases -= other_bias
        return SegmentSums(products, number - float(problem.symmetric), biases)

    row_sums = complete(segments.rows, segments.columns, row_products, problem.key_bias)
    if column_products is None:
        return row_sums, None
    return row_sums, complete(segments.columns, segments.rows, column_products, problem.query_bias)


@dataclass
class LabelSmoothing:
    """Label smoothing: the mean logits, and the keys over which they are means.

    The keys that take part for a row are found in three steps: add the keys of its segment in the
    parts of sign 1, take away those in the parts of sign -1, and add the row's positives that are
    missing then (`added_positives`).
    """

    rows: KeyMeans  # [M]; [B] of a joint loss
    columns: KeyMeans | None  # [N]; None: columns have no softmax
    parts: list[tuple[float, Segments]]  # (sign 1 or -1, segments)
    added_positives: Array  # [M, P] bool: the positives of each row that are not in the parts' sum

    def terms(
        self, xp: Any, e: float, row_upstream: Array, column_upstream: Array | None, joint: bool
    ) -> list[LinearTerm]:
        """The linear terms of the gradient, one for each part. `e` is the label smoothing.

        `row_upstream` [M] and `column_upstream` [N] multiply the losses of rows and of columns:
        upstream, direction weight and scale. If the loss is `joint`, they are [B], and rows i and
        i + B have the same factor.
        """
        row_factors = e * row_upstream / self.rows.count
        if joint:
            row_factors = xp.tile(row_factors, 2)
        column_factors = None
        if self.columns is not None and column_upstream is not None:
            column_factors = e * column_upstream / self.columns.count
        return [
            LinearTerm(
                segments,
                sign * row_factors,
                None if column_factors is None else sign * column_factors,
            )
            for sign, segments in self.parts
        ]


def find_label_smoothing(
    xp: Any, problem: Problem, backend: Summing, positive_logits: Array, positive_bias: Array | None
) -> LabelSmoothing:
    """The mean logit of each row, or of both rows of a joint loss, over the keys that take part.

    Without groups all keys take part, with groups all keys of the row's group. With ids, keys with
    the row's id do not. The positives of the row take part in any case.
    `positive_logits` (base 2, without margin) and `positive_bias` (natural units; None: no biases)
    are [M] or [M, P]. Ids with groups are refused: they need sums of all id-group pairs.
    """
    # The keys that take part, as `LabelSmoothing` describes them
    m, n, _ = problem.shape
    sets = as_sets(problem.positives)
    added_positives = xp.zeros(sets.shape, bool)
    if problem.query_groups is None:
        parts = [(1.0, Segments(xp.zeros(m, xp.int64), xp.zeros(n, xp.int64), 1))]
    else:
        parts = [(1.0, Segments(problem.query_groups, problem.key_groups))]
        groups_at_positives = as_sets(backend.take_at_positives(problem, problem.key_groups))
        added_positives = (sets >= 0) & (groups_at_positives != problem.query_groups[:, None])
    if problem.query_ids is not None:
        parts.append((-1.0, Segments(problem.query_ids, problem.key_ids)))
        ids_at_positives = as_sets(backend.take_at_positives(problem, problem.key_ids))
        added_positives = (sets >= 0) & (ids_at_positives == problem.query_ids[:, None])

    def sum_over_added(values: Array) -> Array:
        """[M] the sum of values at positives over the `added_positives`."""
        return xp.where(added_positives, as_sets(values), 0.0).sum(axis=1)

    # Sums of the logits of the keys that take part, in natural units. All positives take part, and
    # their logits have the margin
    positives_of_row = (sets >= 0).sum(axis=1)
    margins = problem.scale * problem.margin * positives_of_row
    row_sum = sum_over_added(positive_logits * LN_2) - margins
    row_count = added_positives.sum(axis=1).astype(float)
    row_bias: Any = 0.0 if positive_bias is None else sum_over_added(positive_bias)
    # query i and key i are positives of each other, so column i begins with the sums of row i
    column_sum, column_count = row_sum, row_count
    for sign, segments in parts:
        row_sums, column_sums = backend.segment_sums(problem, segments, problem.two_sided)
        row_sum = row_sum + sign * problem.scale * row_sums.products
        row_count = row_count + sign * row_sums.number
        row_bias = row_bias + sign * row_sums.biases
        if column_sums is not None:
            column_sum = column_sum + sign * problem.scale * column_sums.products
            column_count = column_count + sign * column_sums.number

    # Means over these keys. If no key takes part for a row (column), its count is 1 and its mean 0
    row_count, column_count = xp.maximum(row_count, 1.0), xp.maximum(column_count, 1.0)
    rows = KeyMeans(row_sum / row_count, row_count, row_bias / row_count)
    columns = KeyMeans(column_sum / column_count, column_count) if problem.two_sided else None
    if problem.joint:  # rows i and i + B have one mean, in which their positive is one pair
        half = m // 2
        positive = LN_2 * positive_logits[:half] - problem.scale * problem.margin
        count, total = rows.count, rows.logit * rows.count
        joined_count = count[:half] + count[half:] - 1.0
        rows = KeyMeans((total[:half] + total[half:] - positive) / joined_count, joined_count)
        columns = None
    return LabelSmoothing(rows, columns, parts, added_positives)


# --- classes: the positives of a row are all keys of its class, except the row itself -------------


# complete sums of rows or of columns, their losses, and the upstream gradients of these losses
Direction = tuple[Sums, DirectionLosses, Array]


def add_class_means(
    xp: Any, problem: Problem, backend: Summing, smoothing: LabelSmoothing | None, rows: Direction,
    columns: Direction | None,
) -> LinearTerm:  # fmt: skip
    """Replace the losses of rows, and of columns, with several positives (`decoupled`: with any).

    Such a loss is the log-sum-exp minus the mean of the positives' logits. Unless the loss is
    `decoupled`, the positives are also in the sums of negatives. Such a loss is at least the
    logarithm of their number, so the subtraction loses little precision. A single positive is in
    `Problem.positives`, as in other losses (`partners`).

    Returns the linear term of the gradient: the pull at the positives, without the label
    smoothing's. `columns` None: columns have no softmax.
    """
    row_sums, column_sums = backend.segment_sums(problem, problem.classes, columns is not None)
    row_means = column_means = column_factor = None
    if smoothing is not None:
        row_means, column_means = smoothing.rows, smoothing.columns
    row_factor = _use_class_means(xp, problem, row_sums, row_means, *rows)
    if columns is not None and column_sums is not None:
        column_factor = _use_class_means(xp, problem, column_sums, column_means, *columns)
    return LinearTerm(problem.classes, row_factor, column_factor)


def _use_class_means(
    xp: Any, problem: Problem, positives: SegmentSums, key_means: KeyMeans | None, sums: Sums,
    losses: DirectionLosses, upstream: Array,
) -> Array:  # fmt: skip
    """`add_class_means` of one direction, whose `positives` are summed. Changes `losses.loss` and
    `losses.log_scale_grad`, and returns the factor of each row in the linear term."""
    e, count = problem.label_smoothing, xp.maximum(positives.number, 1.0)
    class_mean, class_bias = problem.scale * positives.products / count, positives.biases / count
    logit_term, bias_term = -class_mean, -class_bias  # loss = lse + logit_term + bias_term
    if key_means is not None:
        logit_term = logit_term + e * (class_mean - key_means.logit)
        bias_term = bias_term + e * (class_bias - key_means.bias)
    takes_class_mean = (problem.positives < 0) & (positives.number > 0)
    losses.loss = xp.where(takes_class_mean, losses.lse + logit_term + bias_term, losses.loss)
    if sums.moment is not None:
        softmax_mean = LN_2 * sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        scale_grad = softmax_mean + logit_term
        losses.log_scale_grad = xp.where(takes_class_mean, scale_grad, losses.log_scale_grad)
    factor: Array = xp.where(takes_class_mean, (1.0 - e) * upstream / count, 0.0)
    return factor
