"""What an option is: `Option`, and `PairOption`, an option that decides about single pairs.

Arrays are of NumPy or CuPy. [m, n] is a block of the logit matrix, with its rows and columns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..problem import Problem

Array = Any  # a NumPy or CuPy array
# [m, n] bool: the pairs that the softmax of a row leaves out, and the softmax of a column; None: no
# pairs, or columns have no softmax
Masks = tuple[Array | None, Array | None]
LARGEST = sys.float_info.max
INTEGERS = "integer array [N], or pair of them ([M] for rows, [N] for columns), optional"


@dataclass(frozen=True, eq=False)
class Option:
    """A keyword of the losses: its default, its help, and which programs take it."""

    default: Any
    type: str  # type and shape as words, for the docstrings of the functions
    doc: str  # description, for the docstrings of the functions
    # help of the command-line option. "": `_spec_options` of infonce/cli/loss.py adds no option,
    # because that file has one of its own (--scale), or because the command does not take it
    cli_help: str = ""
    # whether a program of jax.jit or torch.compile takes the keyword as a constant. Arrays and
    # numbers such as the scale are inputs of a program
    compiled: bool = False
    # the least and the largest value, and their description in an error; None: other checks
    range: tuple[float, float, str] | None = None


@dataclass(frozen=True)
class VectorPair:
    """Two vectors of an option: a number of each query [M], and a number of each key [N]; ids may
    have several numbers of each, [M, C] and [N, C]."""

    query: str  # field of `Problem`
    key: str
    # of the numbers in struct Block (cuda/block/options.cuh): int64; or floats, which are dot
    # products, natural logits or factors in `Problem`. "": vectors that all kernels have (ids), or
    # that no kernel of the loss reads (limits of a guide)
    unit: Literal["", "integers", "dots", "logits", "factors"] = ""
    row: str = ""  # field of struct Block; "": the name of `query`
    column: str = ""

    @property
    def fields(self) -> tuple[str, str]:
        """The fields of struct Block."""
        return self.row or self.query, self.column or self.key

    def find(self, problem: Problem) -> tuple[Array, Array]:
        """The vectors of a problem; None: the problem lacks one."""
        return getattr(problem, self.query), getattr(problem, self.key)


@dataclass
class PairBlock:
    """The pairs of some rows and columns, of which an option makes masks."""

    problem: Problem
    rows: slice
    columns: slice
    dots: Array  # [m, n] dot products of the features
    guide_dots: Array = None  # [m, n] the same of the guide's features; None: no guide


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PairOption(Option):
    """An option that leaves out pairs, changes their exponents, or makes pairs positives.

    `splits`, `shifts`: the same words as in cuda/block/options.cuh.
    """

    name: str  # keyword of the losses
    vectors: tuple[VectorPair, ...]
    define: str = ""  # -D option of kernels; "": all kernels have one (IDS)
    equal: bool | None = None  # pairs of equal (True) or different (False) `vectors` are left out
    changes_logits: bool = True  # False: fast paths have the option, too (`Problem.plain_logits`)
    splits: bool = False  # a pair may be in the softmax of its row, and not in that of its column
    shifts: bool = False  # exponents differ from logits
    # whose dot products decide which pairs count. Then all passes compute them in the same blocks,
    # to leave out the same pairs
    compares: Literal["", "features", "guide"] = ""

    def __repr__(self) -> str:
        return self.name

    def masks(self, block: PairBlock) -> Masks:
        """The pairs that rows and columns leave out: the same pairs, unless the option `splits`."""
        if self.equal is None:
            return None, None
        mask = None
        for query, key in self.columns(block.problem):
            of_column = (query[block.rows, None] == key[block.columns]) == self.equal
            mask = of_column if mask is None else mask | of_column
        return mask, mask

    def columns(self, problem: Problem) -> Iterator[tuple[Array, Array]]:
        """Pairs of vectors [M], [N] that `masks` compares: one, or one for each column of ids."""
        query, key = self.vectors[0].find(problem)
        if query.ndim == 1:
            yield query, key
        else:
            yield from zip(query.T, key.T, strict=True)

    def find_vectors(self, problem: Problem, backend: Any, vectors: Any) -> dict[str, Array]:
        """Fields of `Problem` that are found before the first pass, by a `solve.Backend`, such as
        limits. `vectors` is a `solve.Vectors`, or has kernels for its methods."""
        return {}


class GivenOptions(tuple[PairOption, ...]):
    """The options of pairs that a problem has, and what follows for all of them."""

    def __init__(self, options: Any = ()) -> None:
        self.change_logits = any(option.changes_logits for option in self)
        self.compare = any(option.compares for option in self)
        # the options that leave out pairs by dot products of the features
        self.by_products = [option for option in self if option.compares == "features"]
        # the options that leave out pairs by equal or different numbers
        self.by_numbers = [option for option in self if option.equal is not None]
        # the options whose `masks` tiles on the CPU call
        self.by_masks = [
            option for option in self
            if type(option).masks is not PairOption.masks and not option.splits
        ]  # fmt: skip
        # whether rows and columns have the same logits, so that one exponential can serve both
        self.same_logits = not any(option.splits or option.shifts for option in self)
        self.vectors = [vector for option in self for vector in option.vectors]
