"""Positives of a pairwise sigmoid that are pairs of equal ids, and their weights.

If row i has k_i positives and column j has k'_j, the term of a positive pair (i, j) has the weight

    v_ij = (1 / k_i + 1 / k'_j) / 2.

The weights of all positive pairs have the sum (rows with a positive + columns with a positive) / 2.
Numbers of positives are counted before the fold, over all rows and all columns. A pair's weight is
then the sum of a number of its row and a number of its column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Array, Problem


@dataclass
class PositivePairs:
    """The positive pairs of a block, and the weights of all its pairs."""

    positive: Array  # [m, n] bool
    weight: Array  # [m, n]: v_ij at positives, else 1

    @staticmethod
    def of(
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
