"""Terms of a loss that are linear in the logits. They need no pass over blocks.

The mean logit of all keys (label smoothing) and that of a class are sums over segments of keys,

    sum of x_ij over the keys j of row i's segment = scale q_i . (sum of these k_j)

and so are their gradients: time and memory are linear in the batch. Segments are all keys, or those
of an id. A symmetric problem leaves out i = j.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from .direction_losses import Direction
from .epilogues import Sums
from .problem import LN_2, Array, Problem, as_sets
from .targets import KeyMeans


@dataclass
class Segments:
    """Segments of rows and keys: keys belong to the rows of the same segment."""

    # [M] int64: the segment of each row, in [0, count), or -1 for none. If `count` is None, the
    # segments are ids of any value. If `rows` is None, all rows are in one segment
    rows: Array
    columns: Array  # [N]: the segment of each key, like `rows`
    count: int | None = None  # number of segments
    order: Array = None  # [N] in a symmetric problem: rows in an order in which segments are runs
    _numbered: Segments | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbered = None

    def numbered(self, xp: Any) -> Segments:
        """The same segments, numbered: one for each id of rows, and one for all other keys."""
        if self.count is not None:
            return self
        if self._numbered is None:
            ids, rows = xp.unique(self.rows, return_inverse=True)
            rows = rows.reshape(-1)
            if self.columns is self.rows:
                self._numbered = Segments(rows, rows, len(ids))
            else:
                at = xp.minimum(xp.searchsorted(ids, self.columns), len(ids) - 1)
                columns = xp.where(ids[at] == self.columns, at, len(ids))
                self._numbered = Segments(rows, columns, len(ids) + 1)
        return self._numbered

    def pairs(self, xp: Any, symmetric: bool) -> Array:
        """[M, N] whether row and key are of the same segment; not i = j if `symmetric`."""
        same = self.rows[:, None] == self.columns
        if symmetric:
            xp.fill_diagonal(same, False)
        return same

    def members(self, xp: Any, index: Array) -> tuple[Array, Array]:
        """For each row, the number of keys in its segment, and the sum of these keys' `index`."""
        numbered = self.numbered(xp)
        assert numbered.count is not None
        number = xp.bincount(numbered.columns, minlength=numbered.count)
        indices = xp.bincount(numbered.columns, index, numbered.count)
        return number[numbered.rows], indices[numbered.rows].astype(index.dtype)


@dataclass
class Classes(Segments):
    """Segments that are classes. On a GPU, the host does not know their number: `count` is None."""

    # classes of more than two rows, whose positives are also in the sums of negatives; with `order`
    in_sums: Segments | None = None
    others: Array = None  # [N] number of other rows in a class of `in_sums`; 0 in other classes


def partners(
    xp: Any, members: tuple[Array, Array], own: Array, decoupled: bool
) -> tuple[Array, Array]:
    """The only other row of each row's class, and whether the class has other rows.

    `own` are the indices of rows, and `members` is `Segments.members` of `own`. Returns two values:

    - [N] the other row of a class of two; -1 for other classes;
    - [N] bool: whether the row's class has another row.

    `decoupled`: sums leave out all positives, so the first value is -1 for all rows.
    """
    number, indices = members
    one = (number == 2) & (not decoupled)
    return xp.where(one, indices - own, -1), number > 1


@dataclass
class SegmentSums:
    """For each row, sums over the keys of its segment; or for each key, sums over rows."""

    products: Array  # sum of q_i . k_j
    number: Array  # number of keys, float64
    biases: Array  # sum of the biases of keys

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.products, self.number, self.biases


@dataclass
class LinearTerm:
    """A term with -dL/dx_ij = row_factor_i + column_factor_j for row i and key j of one segment.

    The factors are multiplied by the scale.
    """

    segments: Segments
    row_factor: Array  # [M]
    column_factor: Array | None = None  # [N]
    # sums of the features of each segment, if they are known already
    query_sums: Array | None = None
    key_sums: Array | None = None


class Rows(Protocol):
    """The rows u_i of queries or of keys, normalised if the loss normalises."""

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        """[count, D]: the sum of factor_i u_i over the rows of each segment.

        With `order` (`Segments.order`), the sums of segments without rows are arbitrary.
        """
        ...

    def products(self, segment: Array, sums: Array, itself: float) -> Array:
        """[n] float64: u_i . (sums[segment_i] - itself u_i)."""
        ...


class LinearGradient:
    """The gradient of a linear term with respect to the rows u_i of queries or of keys:

    -dL/du_i = factor_i (sums[segment_i] - itself u_i) + weighted[segment_i]

    `sums` add up the rows of the other side, and `weighted` add them up times their factors.
    `factor` and `sums` are None if this side has no factors. `weighted` is None if the other side
    has no factors.
    """

    def __init__(
        self, xp: Any, query: Rows, key: Rows, term: LinearTerm, is_key_side: bool, symmetric: bool
    ) -> None:
        segments = term.segments.numbered(xp)
        assert segments.count is not None
        own, others, other_side, sums = segments.rows, segments.columns, key, term.key_sums
        factor, their_factor = term.row_factor, term.column_factor
        if is_key_side:
            own, others, other_side, sums = others, own, query, term.query_sums
            factor, their_factor = their_factor, factor
        elif symmetric:
            their_factor = factor
        # If queries are the keys, `sums` and `weighted` both contain row i itself. The pair i = i
        # does not count, so it is subtracted twice
        self.segment, self.itself, self.factor = own, 2.0 if symmetric else 0.0, factor
        grouping = others, segments.count
        self.sums = self.weighted = None
        if factor is not None:
            if sums is None:
                sums = other_side.sums(*grouping, order=segments.order)
            self.sums = sums
        if their_factor is not None:
            self.weighted = other_side.sums(*grouping, their_factor, segments.order)

    def part(self, rows: slice) -> LinearGradient:
        """The gradient with respect to `rows`."""
        part = copy(self)
        part.segment, part.factor = (
            None if vector is None else vector[rows] for vector in (self.segment, self.factor)
        )
        return part


class Summing(Protocol):
    """The methods of a backend that linear terms need."""

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """The sums of rows [M], and the sums of columns [N] if `columns`.

        If queries are the keys, pairs i = j do not count.
        """
        ...

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        """See `solve.Backend`."""
        ...


def segment_sums(
    xp: Any, problem: Problem, query: Rows, key: Rows, segments: Segments, columns: bool
) -> tuple[SegmentSums, SegmentSums | None]:
    """See `Summing`."""
    segments = segments.numbered(xp)
    assert segments.count is not None
    key_sums = key.sums(segments.columns, segments.count)
    rows, column_products = query.products(segments.rows, key_sums, float(problem.symmetric)), None
    if columns:
        query_sums = query.sums(segments.rows, segments.count)
        column_products = key.products(segments.columns, query_sums, 0.0)
    return segment_sums_from_products(xp, problem, segments, rows, column_products)


def segment_sums_from_products(
    xp: Any, problem: Problem, segments: Segments, rows: Array, columns: Array | None
) -> tuple[SegmentSums, SegmentSums | None]:
    """`Summing.segment_sums` of numbered segments, from the sums of products."""

    def sums_over(others: Array, own: Array, products: Array, bias: Array | None) -> SegmentSums:
        number = xp.bincount(others, minlength=segments.count)[own] - float(problem.symmetric)
        biases = xp.zeros(len(own))
        if bias is not None:
            biases += xp.bincount(others, bias, segments.count)[own]
            if problem.symmetric:
                biases -= bias
        return SegmentSums(products, number, biases)

    row_sums = sums_over(segments.columns, segments.rows, rows, problem.key_bias)
    if columns is None:
        return row_sums, None
    return row_sums, sums_over(segments.rows, segments.columns, columns, problem.query_bias)


@dataclass
class LabelSmoothing:
    """Label smoothing: mean logits, and the segments over which they are means.

    The keys that take part are the keys of `parts`, each with its sign, and `added_positives`.
    """

    rows: KeyMeans
    columns: KeyMeans | None
    parts: list[tuple[float, Segments]]
    added_positives: Array  # [M, P] whether a positive takes part that `parts` exclude

    def terms(
        self, xp: Any, e: float, row_factor: Array, column_factor: Array | None, joint: bool
    ) -> list[LinearTerm]:
        """The linear terms of the gradient.

        `row_factor` and `column_factor` are the factors of the losses of rows and of columns. If
        the loss is `joint`, rows i and i + B have the same factor.
        """
        row_factors = e * row_factor / self.rows.count
        if joint:
            row_factors = xp.tile(row_factors, 2)
        column_factors = None
        if self.columns is not None and column_factor is not None:
            column_factors = e * column_factor / self.columns.count
        return [
            LinearTerm(
                segments,
                sign * row_factors,
                None if column_factors is None else sign * column_factors,
            )
            for sign, segments in self.parts
        ]


def find_label_smoothing(
    xp: Any, problem: Problem, backend: Summing, positive_logits: Array, bias: Array | None
) -> LabelSmoothing:
    """The mean logit of each row, or of both rows of a joint loss, over the keys that take part.

    These are all keys (of the row's group), without keys of the row's id, and with the positives.
    `bias` has the biases of the positives. A problem has ids or groups, never both.
    """
    m, n, _ = problem.shape
    sets = as_sets(problem.positives)
    added_positives = xp.zeros(sets.shape, bool)
    if problem.query_groups is None:
        parts = [(1.0, Segments(xp.zeros(m, xp.int64), xp.zeros(n, xp.int64), 1))]
    else:
        parts = [(1.0, Segments(problem.query_groups, problem.key_groups))]
        positive_groups = as_sets(backend.take_at_positives(problem, problem.key_groups))
        added_positives = (sets >= 0) & (positive_groups != problem.query_groups[:, None])
    if problem.query_ids is not None:
        parts.append((-1.0, Segments(problem.query_ids, problem.key_ids)))
        positive_ids = as_sets(backend.take_at_positives(problem, problem.key_ids))
        added_positives = (sets >= 0) & (positive_ids == problem.query_ids[:, None])

    def at_positives(values: Array) -> Array:
        return xp.where(added_positives, as_sets(values), 0.0).sum(axis=1)

    present = (sets >= 0).sum(axis=1)
    row_sum = at_positives(positive_logits * LN_2) - problem.scale * problem.margin * present
    row_keys = added_positives.sum(axis=1).astype(float)
    row_bias: Any = 0.0 if bias is None else at_positives(bias)
    column_sum, column_keys = row_sum, row_keys  # key i is the positive of query i
    for sign, segments in parts:
        row_sums, column_sums = backend.segment_sums(problem, segments, problem.two_sided)
        row_sum = row_sum + sign * problem.scale * row_sums.products
        row_keys = row_keys + sign * row_sums.number
        row_bias = row_bias + sign * row_sums.biases
        if column_sums is not None:
            column_sum = column_sum + sign * problem.scale * column_sums.products
            column_keys = column_keys + sign * column_sums.number
    row_keys, column_keys = xp.maximum(row_keys, 1.0), xp.maximum(column_keys, 1.0)
    rows = KeyMeans(row_sum / row_keys, row_keys, row_bias / row_keys)
    columns = KeyMeans(column_sum / column_keys, column_keys) if problem.two_sided else None
    if problem.joint:  # rows i and i + B have one sum, in which their positive is one pair
        half = m // 2
        positive = LN_2 * positive_logits[:half] - problem.scale * problem.margin
        keys, total = rows.count, rows.logit * rows.count
        joined_keys = keys[:half] + keys[half:] - 1.0
        rows = KeyMeans((total[:half] + total[half:] - positive) / joined_keys, joined_keys)
        columns = None
    return LabelSmoothing(rows, columns, parts, added_positives)


# --- classes: the positives of a row are all others of its class ----------------------------------


def add_class_means(
    xp: Any, problem: Problem, backend: Any, smoothing: LabelSmoothing | None, sums: Sums,
    rows: Direction, row_upstream: Array,
) -> LinearTerm:  # fmt: skip
    """The linear term of classes of more than two rows (of two rows or more if `decoupled`).

    The positives of such a row are also in the sums of negatives. The function changes `rows.loss`
    and `rows.log_scale_grad` of these rows. In a class of two rows, the other row is the row's
    positive, as in other losses.

    The loss of such a row is the log-sum-exp minus the mean of its positives' logits. The loss is
    at least the logarithm of the number of positives, so the subtraction loses little precision.
    """
    e = problem.label_smoothing
    others, _ = backend.segment_sums(problem, problem.classes, False)
    count = xp.maximum(others.number, 1.0)
    class_mean, class_bias = problem.scale * others.products / count, others.biases / count
    scale_term, bias_term = -class_mean, -class_bias
    if smoothing is not None:
        scale_term = scale_term + e * (class_mean - smoothing.rows.logit)
        bias_term = bias_term + e * (class_bias - smoothing.rows.bias)
    in_sums = (problem.positives < 0) & (others.number > 0)
    rows.loss = xp.where(in_sums, rows.lse + scale_term + bias_term, rows.loss)
    if sums.moment is not None:
        all_keys = LN_2 * sums.moment / xp.where(sums.sum == 0, 1.0, sums.sum)
        rows.log_scale_grad = xp.where(in_sums, all_keys + scale_term, rows.log_scale_grad)
    return LinearTerm(problem.classes, xp.where(in_sums, (1.0 - e) * row_upstream / count, 0.0))
