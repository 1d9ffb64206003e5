"""Options that decide about single pairs, a file each: which pairs count, with which exponents.

`PAIR_OPTIONS` is the list. Keywords, ranges and refusals, masks of operations on arrays, -D options
and vectors of kernels, and the vectors that travel between ranks follow from it. CONTRIBUTING.md
names the other files of a new option.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .base import INTEGERS, LARGEST, Array, GivenOptions, Masks, Option, PairBlock, PairOption
from .groups import GROUPS
from .guide import GUIDE, GUIDE_MARGIN
from .ids import IDS, MOST_COLUMNS
from .key_bias import KEY_BIAS
from .limits import FALSE_NEGATIVE_MARGIN, find_limits
from .positive_ids import POSITIVE_IDS, PositivePairs, count_positives, weigh_positives

if TYPE_CHECKING:
    from ..problem import Problem

__all__ = [
    "FALSE_NEGATIVE_MARGIN", "GROUPS", "GUIDE", "GUIDE_MARGIN", "IDS", "INTEGERS", "KEY_BIAS",
    "LARGEST", "MOST_COLUMNS", "POSITIVE_IDS", "GivenOptions", "Masks", "Option", "PairBlock",
    "PairOption", "PositivePairs", "count_positives", "find_limits", "weigh_positives",
]  # fmt: skip

# In the order of `Problem.pair_options`. Kernels get vectors and -D options in this order
PAIR_OPTIONS: tuple[PairOption, ...] = (
    IDS, GROUPS, POSITIVE_IDS, FALSE_NEGATIVE_MARGIN, GUIDE, KEY_BIAS,
)  # fmt: skip
# Fields of `Problem` that decide which pairs count, and with which bias or weight: [M] vectors with
# a number of each query, and [N] vectors with a number of each key. Ranks and kernels/offload cut
# them into the same parts as the features
QUERY_VECTORS = tuple(pair.query for option in PAIR_OPTIONS for pair in option.vectors)
KEY_VECTORS = tuple(pair.key for option in PAIR_OPTIONS for pair in option.vectors)


class _GivenByFlags(dict[tuple[bool, ...], GivenOptions]):
    """Whether each of `PAIR_OPTIONS` is given -> these options, one object for all problems."""

    def __missing__(self, flags: tuple[bool, ...]) -> GivenOptions:
        pairs = zip(PAIR_OPTIONS, flags, strict=True)
        return self.setdefault(flags, GivenOptions(option for option, given in pairs if given))


GIVEN = _GivenByFlags()
NO_OPTIONS = GivenOptions()


def with_found_vectors(problem: Problem, backend: Any, vectors: Any) -> Problem:
    """The problem with the vectors that are found before the first pass, such as limits.

    Solvers call this, if `Problem.compares_with_limits`. See `PairOption.find_vectors`.
    """
    found: dict[str, Array] = {}
    for option in problem.pair_options:
        found |= option.find_vectors(problem, backend, vectors)
    return replace(problem, **found)


def find_masks(block: PairBlock, pairs: PositivePairs | None) -> tuple[Array | None, Masks]:
    """Two results: [m, n] bool, the pairs that are in no softmax and no sigmoid, except for the
    positive `pairs` (None: no such pairs); and the pairs that only rows, or only columns, leave
    out, by options that `split`."""
    excluded, left_out_of_rows, left_out_of_columns = None, None, None
    for option in block.problem.pair_options:
        by_row, by_column = option.masks(block)
        if option.splits:
            left_out_of_rows = _either(left_out_of_rows, by_row)
            left_out_of_columns = _either(left_out_of_columns, by_column)
        else:
            excluded = _either(excluded, by_row)
    if excluded is not None and pairs is not None:
        excluded &= ~pairs.positive
    return excluded, (left_out_of_rows, left_out_of_columns)


def _either(mask: Array | None, other: Array | None) -> Array | None:
    return other if mask is None else mask if other is None else mask | other
