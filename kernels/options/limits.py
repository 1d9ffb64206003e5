"""`false_negative_margin`: negatives whose dot product is above a limit are left out.

The limit of a row is the largest dot product with its positives, plus the margin. The softmax of a
row leaves out the negatives above the limit of the row. The softmax of a column leaves out those
above the limit of the column.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .base import LARGEST, Array, Masks, PairBlock, PairOption, VectorPair

if TYPE_CHECKING:
    from ..problem import Problem


def find_limits(xp: Any, problem: Problem, dots: Array) -> Array:
    """[M] the limit of each row: the dot product above which its negatives are left out.

    `dots` are the dot products of the row with its positives, [M] or [M, P]. The limit is the
    largest of them plus `false_negative_margin`; infinity for a row without a positive.
    """
    top = xp.where(problem.positives < 0, -xp.inf, dots)
    top = top.max(axis=1) if top.ndim > 1 else top
    return xp.where(xp.isneginf(top), xp.inf, top) + problem.false_negative_margin


class Limits(PairOption):
    """An option with limits of dot products: of the features, or of a guide's features."""

    def masks(self, block: PairBlock) -> Masks:
        dots = block.dots if self.compares == "features" else block.guide_dots
        rows, columns = self.vectors[0].find(block.problem)
        by_row = dots > rows[block.rows].astype(dots.dtype)[:, None]
        if columns is None:
            return by_row, None
        return by_row, dots > columns[block.columns].astype(dots.dtype)

    def find_vectors(self, problem: Problem, backend: Any, vectors: Any) -> dict[str, Array]:
        limits = vectors.find_limits(problem, backend.positive_dots(problem))
        # Column j has the limit of row j: key j is the positive of query j, or, if queries are the
        # keys, columns are rows
        columns_have_limits = problem.symmetric or problem.two_sided
        pair = self.vectors[0]
        return {pair.query: limits, pair.key: limits if columns_have_limits else None}


FALSE_NEGATIVE_MARGIN = Limits(
    math.inf,
    "float, default inf",
    """Leaves out likely positives: negatives whose dot product exceeds that of the row's
        positive (of several, the largest) by more than this. In CLIP each direction compares with
        its own positive. Gradients of another dtype than the products accumulate as a whole in the
        workspace: ValueError if they do not fit. Not with ``metrics=True``.""",
    cli_help="Leave out negatives this much more similar than the positive.",
    compiled=True,
    range=(-LARGEST, math.inf, "a number or inf"),
    name="false_negative_margin",
    vectors=(VectorPair("query_limits", "key_limits", "dots", "row_limits", "column_limits"),),
    define="LIMITS",
    splits=True,
    compares="features",
)
