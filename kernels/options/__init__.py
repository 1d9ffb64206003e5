"""Options that decide about single pairs, a file each: which pairs count, with which exponents.

`PAIR_OPTIONS` is the list, `Keywords` have the types of its keywords, and `PairFields` what a
`Problem` has of them. Keywords, ranges and refusals, masks of operations on arrays, -D options and
vectors of kernels, and the vectors that travel between ranks follow from these. CONTRIBUTING.md
names the other files of a new option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

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
    "FALSE_NEGATIVE_MARGIN", "GUIDE", "IDS", "INTEGERS", "KEY_BIAS", "LARGEST", "MOST_COLUMNS",
    "POSITIVE_IDS", "GivenOptions", "Keywords", "Masks", "Option", "PairBlock", "PairFields",
    "PairOption", "PositivePairs", "SampleKeywords", "count_positives", "find_limits",
    "weigh_positives",
]  # fmt: skip

# In the order of `PairFields.pair_options`. Kernels get vectors and -D options in this order
PAIR_OPTIONS: tuple[PairOption, ...] = (
    IDS, GROUPS, POSITIVE_IDS, FALSE_NEGATIVE_MARGIN, GUIDE, KEY_BIAS,
)  # fmt: skip
# Fields of `Problem` that decide which pairs count, and with which bias or weight: [M] vectors with
# a number of each query, and [N] vectors with a number of each key. Ranks and kernels/offload cut
# them into the same parts as the features
QUERY_VECTORS = tuple(pair.query for option in PAIR_OPTIONS for pair in option.vectors)
KEY_VECTORS = tuple(pair.key for option in PAIR_OPTIONS for pair in option.vectors)


class SampleKeywords(TypedDict, total=False):
    """Types of the keywords that are integers of samples."""

    ids: Any
    groups: Any
    positive_ids: Any


class Keywords(TypedDict, total=False):
    """Types of the other keywords."""

    key_bias: Any
    false_negative_margin: float
    guide: Any
    guide_margin: float


_BY_NAME: dict[str, Option] = {option.name: option for option in PAIR_OPTIONS}
_BY_NAME["guide_margin"] = GUIDE_MARGIN
# In the order of signatures
OPTIONS = {
    name: _BY_NAME[name] for name in (*SampleKeywords.__annotations__, *Keywords.__annotations__)
}


class _GivenByFlags(dict[tuple[bool, ...], GivenOptions]):
    """Whether each of `PAIR_OPTIONS` is given -> these options, one object for all problems."""

    def __missing__(self, flags: tuple[bool, ...]) -> GivenOptions:
        pairs = zip(PAIR_OPTIONS, flags, strict=True)
        return self.setdefault(flags, GivenOptions(option for option, given in pairs if given))


GIVEN = _GivenByFlags()
NO_OPTIONS = GivenOptions()


@dataclass(eq=False, kw_only=True)
class PairFields:
    """The fields of `Problem` for options of pairs. None, or infinity: the option is not given."""

    # [M] or [M, C] int64: pairs of ids that are equal in any column are excluded, except for
    # positives
    query_ids: Array = None
    key_ids: Array = None  # [N] or [N, C] int64 ids of keys, likewise
    query_groups: Array = None  # [M] int64: pairs of different groups are excluded, if not positive
    key_groups: Array = None  # [N] int64 groups of keys, likewise
    # [M] and [N] int64: pairs of equal ids are positives, which ids and groups do not leave out. In
    # SigLIP all `positives` are -1. A softmax without ids and groups has None, and only `classes`
    query_positive_ids: Array = None
    key_positive_ids: Array = None
    # SigLIP: the weight of a positive pair (i, j) is query_pair_weights[i] + key_pair_weights[j],
    # float64; the formula is in options/positive_ids.py
    query_pair_weights: Array = None  # [M]
    key_pair_weights: Array = None  # [N]
    key_bias: Array = None  # [N] float64, added to the logits of each key, in natural units
    # [M] `key_bias` itself if queries are the keys: rows are the keys of columns. None: no bias
    query_bias: Array = None
    false_negative_margin: float = math.inf
    # [M] float64: dot products above which a row leaves out a negative (`find_limits`). These and
    # the other limits are None until `with_found_vectors` sets them
    query_limits: Array = None
    key_limits: Array = None  # [N] the same for each column; None: columns have no sums
    guide_query: Array = None  # [M, E] features of the guide
    guide_key: Array = None  # [N, E]; `guide_query` itself if `symmetric`
    guide_margin: float = 0.0
    guide_query_limits: Array = None  # [M] the same as `query_limits`, for the guide's dot products
    guide_key_limits: Array = None  # [N] the same as `key_limits`, for the guide's dot products

    @property
    def pair_options(self) -> GivenOptions:
        """The options of pairs that the call has. The flags have the order of `PAIR_OPTIONS`."""
        return GIVEN[
            self.query_ids is not None, self.query_groups is not None,
            self.query_positive_ids is not None, self.false_negative_margin < math.inf,
            self.guide_query is not None, self.key_bias is not None,
        ]  # fmt: skip

    @property
    def id_columns(self) -> int:
        """The number of columns of ids; 0: the call has no ids."""
        ids = self.query_ids
        return 0 if ids is None else 1 if ids.ndim == 1 else int(ids.shape[1])

    @property
    def compares_with_limits(self) -> bool:
        """Whether negatives above a limit are left out, by their or the guide's dot product."""
        return self.pair_options.compare

    @property
    def guided(self) -> bool:
        """Whether a guide leaves out negatives by `guide_query_limits`."""
        return self.guide_query is not None

    @property
    def has_positive_ids(self) -> bool:
        """Whether passes compare positive ids, to find the positives."""
        return self.query_positive_ids is not None


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
