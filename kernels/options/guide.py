"""`guide`: negatives that another model finds more similar than the positive are left out.

The features of this model have limits as those of `false_negative_margin`, with `guide_margin`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .base import LARGEST, Array, Option, VectorPair
from .limits import Limits

if TYPE_CHECKING:
    from ..problem import Problem


def guide_problem(problem: Problem) -> Problem:
    """The problem of the guide: its features and its margin in place of those of the loss.

    `find_limits` of this problem are the guide's limits.
    """
    return replace(
        problem, query=problem.guide_query, key=problem.guide_key, guide_query=None,
        guide_key=None, false_negative_margin=problem.guide_margin, query_limits=None,
        key_limits=None,
    )  # fmt: skip


class Guide(Limits):
    """The option, whose limits are those of `guide_problem`."""

    def find_vectors(self, problem: Problem, backend: Any, vectors: Any) -> dict[str, Array]:
        if problem.guide_query_limits is not None:  # a GPU has found them already
            return {}
        return super().find_vectors(guide_problem(problem), backend, vectors)


GUIDE = Guide(
    None,
    "pair of float arrays ([M, E] of rows, [N, E] of columns), optional",
    """Features of the same samples by another model, the guide, whose dot products tell likely
        positives: a negative is left out if its product by the guide exceeds that of the row's
        positive (of several, the largest) by more than `guide_margin`. In CLIP each direction
        compares with its own positive. nt_xent takes one array [2B, E]. Guides get no gradient;
        ``normalize=True`` normalises them too; they are multiplied in the precision of the
        features. With `offload`, they are in host memory too. Not with ``metrics=True``.""",
    name="guide",
    vectors=(VectorPair("guide_query_limits", "guide_key_limits"),),
    define="GUIDE",
    splits=True,
    compares="guide",
)
GUIDE_MARGIN = Option(
    0.0,
    "float, default 0",
    """By how much a negative's product by the `guide` may exceed the product of the positive.
        With inf, the guide leaves out no negative.""",
    cli_help="How far above the positive's a negative's product by the guide may be.",
    compiled=True,
    range=(-LARGEST, math.inf, "a number or inf"),
)
