"""How small blocks may be, the message of the error if the workspace has no room for them, and the
blocks that groups leave out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .problem import Array, Grid, as_sets


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


def without_other_groups(grid: Grid, groups: tuple[Array, Array], positives: Array) -> Grid:
    """The grid without blocks whose queries' range of groups, from the least to the largest, does
    not meet that of the keys. Blocks with a positive stay. `groups`: of queries, and of keys."""
    if not grid.rows or not grid.columns:
        return grid
    first, end = grid.columns[0].start, grid.columns[-1].stop
    row_starts, column_starts = (
        [part.start for part in parts] for parts in (grid.rows, grid.columns)
    )
    sides = (groups[0], row_starts), (groups[1][:end], column_starts)
    (row_low, column_low), (row_high, column_high) = (
        [bound.reduceat(groups, starts) for groups, starts in sides]
        for bound in (np.minimum, np.maximum)
    )
    may_match = (row_low[:, None] <= column_high) & (column_low <= row_high[:, None])
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
