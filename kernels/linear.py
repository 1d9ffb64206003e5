"""Terms of a loss that are linear in the logits. They need no fold over blocks.

The mean logit of all keys (label smoothing) and that of a class are sums over segments of keys,

    sum of x_ij over the keys j of row i's segment = scale q_i . (sum of these k_j)

and so are their gradients: time and memory are linear in the batch. Segments are all keys, or those
of an id. A symmetric problem leaves out i = j.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from .problem import LN_2, Array, Problem
from .targets import Smoothing


@dataclass
class Segments:
    """Which keys belong to which rows: those of the same segment."""

    rows: Array  # [M] int64, in [0, count)
    columns: Array  # [N]
    count: int


@dataclass
class LinearTerm:
    """-dL/dx_ij = row_factor_i + column_factor_j for row i and key j of the same segment, the scale
    folded in."""

    segments: Segments
    row_factor: Array  # [M]
    column_factor: Array | None = None  # [N]


class Rows(Protocol):
    """The rows u_i of one side, as the folds see them."""

    def sums(self, segment: Array, count: int, factor: Array | None = None) -> Array:
        """[count, D] float64: the sum of factor_i u_i over the rows of each segment."""
        ...

    def products(self, segment: Array, sums: Array, itself: float) -> Array:
        """[n] float64: u_i . (sums[segment_i] - itself u_i)."""
        ...


def segment_products(
    query: Rows, key: Rows, segments: Segments, columns: bool, symmetric: bool
) -> tuple[Array, Array | None]:
    """See `SegmentSums`."""
    of_keys = key.sums(segments.columns, segments.count)
    rows = query.products(segments.rows, of_keys, float(symmetric))
    if not columns:
        return rows, None
    of_queries = query.sums(segments.rows, segments.count)
    return rows, key.products(segments.columns, of_queries, 0.0)


class LinearGradient:
    """The gradient of a term by the rows of one side:

    -dL/du_i = factor_i (sums[segment_i] - itself u_i) + weighted[segment_i]
    """

    def __init__(
        self, query: Rows, key: Rows, term: LinearTerm, of_keys: bool, symmetric: bool
    ) -> None:
        segments, count = term.segments, term.segments.count
        mine, others, rows = segments.rows, segments.columns, key
        factor, their_factor = term.row_factor, term.column_factor
        if of_keys:
            mine, others, rows = others, mine, query
            factor, their_factor = their_factor, factor
        elif symmetric:
            their_factor = factor
        self.segment, self.itself = mine, 2.0 * symmetric
        self.factor = 0.0 * mine if factor is None else factor
        self.sums = rows.sums(others, count)
        self.weighted = 0.0 * self.sums
        if their_factor is not None:
            self.weighted = rows.sums(others, count, their_factor)

    def part(self, rows: slice) -> LinearGradient:
        """That of some rows."""
        part = copy(self)
        part.segment, part.factor = self.segment[rows], self.factor[rows]
        return part


class SegmentSums(Protocol):
    """What linear terms need of a backend."""

    def segment_products(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[Array, Array | None]:
        """[M] the sum of q_i . k_j over the keys of row i's segment; and, of `columns`, [N] the sum
        over the rows of key j's. A symmetric problem leaves out i = j."""
        ...


@dataclass
class Smoothed:
    """Label smoothing: the means, and the segments whose sums they are, each with its sign."""

    rows: Smoothing
    columns: Smoothing | None
    parts: list[tuple[float, Segments]]

    def terms(
        self, xp: Any, e: float, row_factor: Array, column_factor: Array | None, joint: bool
    ) -> list[LinearTerm]:
        """The gradient; the factors are those of the loss of each row and column. `joint`: rows i
        and i + B have the same."""
        of_rows = e * row_factor / self.rows.keys
        if joint:
            of_rows = xp.tile(of_rows, 2)
        of_columns = None
        if self.columns is not None and column_factor is not None:
            of_columns = e * column_factor / self.columns.keys
        return [
            LinearTerm(segments, sign * of_rows, None if of_columns is None else sign * of_columns)
            for sign, segments in self.parts
        ]


def smoothed(xp: Any, problem: Problem, backend: SegmentSums, positive_logits: Array) -> Smoothed:
    """Over all keys less those of equal id, but with the positives."""
    m, n, _ = problem.shape
    whole = Segments(xp.zeros(m, xp.int64), xp.zeros(n, xp.int64), 1)
    parts = [(1.0, whole)]
    if problem.query_ids is not None:
        parts.append((-1.0, equal_ids(xp, problem.query_ids, problem.key_ids)))
    itself = int(problem.symmetric)
    scale, same = problem.scale, same_id(xp, problem)
    row_bias: Any = 0.0
    if problem.key_bias is not None:
        of_positives = problem.key_bias[problem.positives].reshape(m, -1)
        row_bias = xp.where(same, of_positives, 0.0).sum(axis=1)
    here = positive_logits.reshape(m, -1) * LN_2
    at_positives = xp.where(same, here, 0.0).sum(axis=1)
    present = (problem.positives >= 0).reshape(m, -1).sum(axis=1)
    margins = scale * problem.margin * present
    row_sum, row_keys = at_positives - margins, same.sum(axis=1).astype(float)
    column_sum, column_keys = row_sum, row_keys  # key i is the positive of query i
    for sign, segments in parts:
        rows, columns = backend.segment_products(problem, segments, problem.two_sided)
        row_sum = row_sum + sign * scale * rows
        row_bias = row_bias + sign * segment_biases(xp, problem, segments)
        of_rows, of_columns = (
            xp.bincount(of, minlength=segments.count) for of in (segments.rows, segments.columns)
        )
        row_keys = row_keys + sign * (of_columns[segments.rows] - itself)
        if columns is not None:
            column_sum = column_sum + sign * scale * columns
            column_keys = column_keys + sign * of_rows[segments.columns]
    both = problem.two_sided
    row_keys, column_keys = xp.maximum(row_keys, 1.0), xp.maximum(column_keys, 1.0)
    return Smoothed(
        Smoothing(row_sum / row_keys, row_keys, row_bias / row_keys),
        Smoothing(column_sum / column_keys, column_keys) if both else None,
        parts,
    )


def segment_biases(xp: Any, problem: Problem, segments: Segments) -> Any:
    """[M] the sum of the biases of the keys of row i's segment; 0 without biases. A symmetric
    problem leaves out i = j."""
    bias = problem.key_bias
    if bias is None:
        return 0.0
    sums = xp.bincount(segments.columns, bias, segments.count)[segments.rows]
    return sums - bias if problem.symmetric else sums


def same_id(xp: Any, problem: Problem) -> Array:
    """[M, P] whether a positive has its row's id: it takes part for all that."""
    positives = problem.positives.reshape(problem.shape[0], -1)
    if problem.query_ids is None:
        return xp.zeros(positives.shape, bool)
    return (positives >= 0) & (problem.key_ids[positives] == problem.query_ids[:, None])


def equal_ids(xp: Any, query_ids: Array, key_ids: Array) -> Segments:
    """A segment for each id."""
    found, index = xp.unique(xp.concatenate([query_ids, key_ids]), return_inverse=True)
    index = index.reshape(-1)
    return Segments(index[: len(query_ids)], index[len(query_ids) :], len(found))
