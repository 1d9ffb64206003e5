"""The blocks of the logit matrix: which there are, which of them groups leave out, how small they
may be, and the message of the error if the workspace has no room for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .problem import Array, as_sets


@dataclass(frozen=True)
class Grid:
    """The blocks of the logit matrix: row panels by column blocks, or one triangle of them."""

    rows: Sequence[slice]
    columns: Sequence[slice]
    triangle: bool = False  # rows == columns, and only blocks b >= a are visited
    # column blocks of each row panel, where others have nothing to compute; None: all
    visited: tuple[Sequence[int], ...] | None = None

    def visits(self, a: int) -> Sequence[int]:
        """Column blocks of row panel `a`, in the order of the fold."""
        if self.visited is not None:
            return self.visited[a]
        return range(a if self.triangle else 0, len(self.columns))

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Rows and columns that any block has at most."""
        rows = max(part.stop - part.start for part in self.rows)
        return rows, max(part.stop - part.start for part in self.columns)

    def __len__(self) -> int:
        return sum(len(self.visits(a)) for a in range(len(self.rows)))


def slices(end: int, step: int, start: int = 0) -> list[slice]:
    """Slices of at most `step` that cover range(start, end)."""
    return [slice(i, min(i + step, end)) for i in range(start, end, step)]


def few_blocks(m: int, n: int, rows: int, columns: int) -> bool:
    """Whether blocks of rows x columns are few enough for m x n logits: 4 sqrt(m n) at most. The
    memory of all blocks beside their logits is then a multiple of vectors of length m and n."""
    blocks = -(-m // rows) * -(-n // columns)
    return blocks * blocks <= 16 * max(1, m * n)


def least_block_side(m: int, n: int) -> int:
    """The least side of square blocks for which `few_blocks` holds."""
    side = max(1, math.isqrt(math.isqrt(m * n)) // 2)
    while not few_blocks(m, n, side, side):
        side += 1
    return side


def workspace_too_small(shape: tuple[int, int, int], least: int, workspace: int) -> str:
    """The message of the ValueError for a workspace that has no room for the least blocks."""
    m, n, d = shape
    return (
        f"workspace: expected at least {least} bytes for {m} x {n} logits and features of width "
        f"{d}, got {workspace}"
    )


def without_other_groups(
    grid: Grid, groups: tuple[Array, Array], positives: Array,
    kept_ids: tuple[Array, Array] | None = None,
) -> Grid:  # fmt: skip
    """The grid without blocks whose queries' range of groups, from the least to the largest, does
    not meet that of the keys. Blocks with a positive stay, and so do blocks whose ranges of
    `kept_ids` meet. `groups`, `kept_ids`: of queries, and of keys."""
    if not grid.rows or not grid.columns:
        return grid
    first, end = grid.columns[0].start, grid.columns[-1].stop
    row_starts, column_starts = (
        [part.start for part in parts] for parts in (grid.rows, grid.columns)
    )

    def ranges_meet(of_rows: Array, of_columns: Array) -> Array:
        sides = (of_rows, row_starts), (of_columns[:end], column_starts)
        (row_low, column_low), (row_high, column_high) = (
            [bound.reduceat(numbers, starts) for numbers, starts in sides]
            for bound in (np.minimum, np.maximum)
        )
        return (row_low[:, None] <= column_high) & (column_low <= row_high[:, None])

    may_match = ranges_meet(*groups)
    if kept_ids is not None:
        may_match |= ranges_meet(*kept_ids)
    positives = as_sets(positives)
    rows, places = np.nonzero((positives >= first) & (positives < end))
    keys = positives[rows, places]
    may_match[block_of(row_starts, rows), block_of(column_starts, keys)] = True
    panels = range(len(grid.rows))
    visited = tuple([b for b in grid.visits(a) if may_match[a, b]] for a in panels)
    return replace(grid, visited=visited)


def block_of(starts: list[int], index: Array) -> Array:
    """The numbers of the blocks, which begin at `starts`, that have these indices."""
    return np.searchsorted(starts, index, side="right") - 1
