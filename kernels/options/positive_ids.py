"""`positive_ids`: pairs of equal positive ids are positives.

In a softmax, the loss of a row is its log-sum-exp minus the mean logit of its positives. The mean
is a sum over a class (`linear.Classes`), and no pass knows the positives, unless ids or groups
would leave them out. The rest of this file is about a pairwise sigmoid.

If row i has k_i positives and column j has k'_j, the term of a positive pair (i, j) has the weight

    v_ij = (1 / k_i + 1 / k'_j) / 2.

So a sample with many positives weighs as much as one with few: the weights of all positive pairs
add up to (rows with a positive + columns with a positive) / 2. Positives are counted before the
pass, over all rows and all columns of all ranks. v_ij is then the sum of a number of row i,
`Problem.query_pair_weights`, and a number of column j, `Problem.key_pair_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import INTEGERS, Array, PairOption, VectorPair

if TYPE_CHECKING:
    from ..problem import Problem

POSITIVE_IDS = PairOption(
    None,
    INTEGERS,
    """What the samples show, such as the class of an image, or the image of several captions:
        pairs of equal numbers are positives, in place of row i and column i. In a softmax, the loss
        of a row is its log-sum-exp minus the mean logit of its positives. A row without a positive
        does not count in the mean. In siglip, if row i has k_i positives and column j has k'_j, the
        term of their pair counts ``(1 / k_i + 1 / k'_j) / 2`` times. Any integer dtype. M and N may
        differ, but not in clip, which takes one array [N]. Not with `labels`, `margin`, `hardness`,
        `false_negative_margin`, `guide` or ``metrics=True``; `ids` not with `decoupled`; `ids` and
        `groups` not with `label_smoothing`.""",
    cli_help="Pairs of equal numbers are positives, .npy; one file or two, as --ids.",
    name="positive_ids",
    vectors=(
        VectorPair("query_positive_ids", "key_positive_ids", "integers"),
        VectorPair("query_pair_weights", "key_pair_weights", "factors"),
    ),
    define="POSITIVE_IDS",
    changes_logits=False,
)


@dataclass
class PositivePairs:
    """The positive pairs of a block as arrays, and the weights of all pairs of the block."""

    positive: Array  # [m, n] bool
    weight: Array  # [m, n]: v_ij at positives, 1 at negatives; None: a softmax has no weights

    @staticmethod
    def find(
        xp: Any, problem: Problem, rows: slice, columns: slice, dtype: np.dtype[Any]
    ) -> PositivePairs | None:
        """The positive pairs of a block; None for a problem without positive ids.

        `dtype` is the dtype of the weights.
        """
        if not problem.has_positive_ids:
            return None
        positive = problem.query_positive_ids[rows, None] == problem.key_positive_ids[columns]
        if problem.query_pair_weights is None:
            return PositivePairs(positive, None)
        weight = problem.query_pair_weights[rows, None] + problem.key_pair_weights[columns]
        return PositivePairs(positive, xp.where(positive, weight, 1.0).astype(dtype))


def count_positives(xp: Any, problem: Problem) -> tuple[Array, Array]:
    """Count the positives: [M] int64 k_i, keys with the positive id of query i, and [N] int64 k'_j,
    queries with the positive id of key j. Reads no number of a GPU on the host."""
    sides = problem.query_positive_ids, problem.key_positive_ids
    query_counts, key_counts = (  # how often each id occurs among the sorted ids of the other side
        xp.searchsorted(others, own, side="right") - xp.searchsorted(others, own, side="left")
        for own, others in zip(sides, map(xp.sort, sides[::-1]), strict=True)
    )
    return query_counts, key_counts


def weigh_positives(xp: Any, problem: Problem, query_counts: Array, key_counts: Array) -> None:
    """Set `query_pair_weights` and `key_pair_weights` of `problem` from `count_positives`.

    These are the two terms of v_ij (at the top of this file), 1 / (2 k_i) and 1 / (2 k'_j). A
    count of 0 becomes 1: such a row or column is in no positive pair, so its weight is not used.
    """
    problem.query_pair_weights, problem.key_pair_weights = (
        0.5 / xp.maximum(count, 1) for count in (query_counts, key_counts)
    )
