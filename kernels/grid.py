"""The grid of blocks into which a pass divides the logit matrix, and bounds of their sizes.

Each backend chooses the sizes of its blocks; a pass then visits the blocks of a `Grid`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .problem import Array, as_sets


@dataclass(frozen=True)
class Grid:
    """The blocks of the logit matrix: each row block with each column block, or one triangle.

    Block (a, b) has the rows `rows[a]` and the columns `columns[b]`.
    """

    rows: Sequence[slice]
    columns: Sequence[slice]
    triangle: bool = False  # True: `rows` equals `columns`, and only blocks with b >= a are visited
    # for each a, the numbers b of the blocks to visit; None: all blocks, or all of the triangle
    visited: tuple[Sequence[int], ...] | None = None

    def visits(self, row_block: int) -> Sequence[int]:
        """The numbers b of the blocks that a pass visits with row block a, in ascending order."""
        if self.visited is not None:
            return self.visited[row_block]
        return range(row_block if self.triangle else 0, len(self.columns))

    @cached_property
    def largest(self) -> tuple[int, int]:
        """(rows, columns): the largest number of rows of a block, and of columns of a block."""
        rows = max((part.stop - part.start for part in self.rows), default=0)
        return rows, max((part.stop - part.start for part in self.columns), default=0)

    def __len__(self) -> int:
        """The number of blocks that a pass visits."""
        return sum(len(self.visits(a)) for a in range(len(self.rows)))


def gradient_visits(
    grid: Grid, ranges: Sequence[slice], symmetric: bool, want_query: bool, want_key: bool,
    has_losses: bool = False,
) -> list[tuple[Grid, bool, bool]]:  # fmt: skip
    """The gradient passes, each as (its grid, whether it computes dQ, whether it computes dK).

    One pass computes both if all of dK accumulates at once (one range), and if queries are the keys
    (`symmetric`): dQ then has all terms. Otherwise logits are computed twice, in a pass for dQ and
    in a pass for each range of keys. If the first pass `has_losses` to complete, it runs in any
    case, because a range has only some of the pairs.
    """
    if symmetric or not want_key or len(ranges) == 1:
        return [(grid, want_query, want_key)]
    first = [(grid, want_query, False)] * (want_query or has_losses)
    width = grid.largest[1]
    parts = (Grid(grid.rows, slices(keys.stop, width, keys.start)) for keys in ranges)
    return [*first, *((part, False, True) for part in parts)]


def slices(end: int, step: int, start: int = 0) -> list[slice]:
    """Slices that cover range(start, end): all of length `step`, except for a shorter last one."""
    return [slice(i, min(i + step, end)) for i in range(start, end, step)]


def slice_runs(numbers: Array, step: int, least_run: int, mixed_step: int) -> list[slice]:
    """Slices that cover a vector of groups, in which long runs of one group have their own slices.

    A run of more than `least_run` equal numbers is long. Each long run is divided into slices of
    nearly equal length, at most `step`. The numbers between two long runs are divided into slices
    of at most `mixed_step`, which may have several groups. If the rows and the columns of a block
    are slices of long runs, the block has one group of queries and one group of keys, and
    `without_other_groups` leaves it out if the two groups differ and no positive is in it.
    """
    bounds = np.r_[0, np.flatnonzero(np.diff(numbers)) + 1, len(numbers)]  # of runs
    parts_so_far, end = [], 0
    for run in np.flatnonzero(np.diff(bounds) > least_run):
        start, stop = bounds[run : run + 2].tolist()
        parts = -(-(stop - start) // step)
        length = -(-(stop - start) // parts)
        parts_so_far += slices(start, mixed_step, end) + slices(stop, length, start)
        end = stop
    return parts_so_far + slices(len(numbers), mixed_step, end)


def has_few_blocks(m: int, n: int, rows: int, columns: int) -> bool:
    """Whether m x n logits have at most 4 sqrt(m n) blocks of `rows` x `columns` logits.

    4 sqrt(m n) is at most 2 (m + n). So this bound keeps the memory and the work that each block
    takes in addition to its logits linear in the number of rows and columns.
    """
    blocks = -(-m // rows) * -(-n // columns)
    return blocks * blocks <= 16 * max(1, m * n)


def least_block_side(m: int, n: int) -> int:
    """The side, in logits, of the smallest square blocks for which `has_few_blocks` is true.

    m n / side^2 <= 4 sqrt(m n) makes it at least (m n)^(1/4) / 2. Blocks at the edge may be smaller
    than others, so a larger side may be needed.
    """
    side = max(1, math.isqrt(math.isqrt(m * n)) // 2)
    while not has_few_blocks(m, n, side, side):
        side += 1
    return side


def make_workspace_error(shape: tuple[int, int, int], least: int, workspace: int) -> ValueError:
    """The error for a workspace of fewer bytes than `least`, for a loss of `shape` (M, N, D)."""
    m, n, d = shape
    return ValueError(
        f"workspace: expected at least {least} bytes for {m} x {n} logits and features of width "
        f"{d}, got {workspace}"
    )


def without_other_groups(
    grid: Grid, groups: tuple[Array, Array], has_positive: Array,
    positive_ids: tuple[Array, Array] | None = None,
) -> Grid:  # fmt: skip
    """The grid without blocks that have no common group, no positive and no common positive id.

    All pairs of such a block are excluded, so a pass need not visit it. `groups` and `positive_ids`
    are pairs of vectors, [M] of queries and [N] of keys. Only ranges are compared: a block is left
    out if the range of its queries' groups, from the smallest to the largest, is disjoint from the
    range of its keys' groups, and likewise for positive ids. `has_positive` [row blocks, column
    blocks] is the result of `positive_blocks` or `default_positive_blocks`.
    Unsorted groups have wide ranges, so that few blocks are left out.
    """
    if not grid.rows or not grid.columns:
        return grid
    end = grid.columns[-1].stop  # the grid may have only a range of the columns
    row_starts, column_starts = (
        [part.start for part in parts] for parts in (grid.rows, grid.columns)
    )

    def ranges_meet(row_numbers: Array, column_numbers: Array) -> Array:
        """[row blocks, column blocks] bool: whether their ranges of numbers overlap."""
        sides = (row_numbers, row_starts), (column_numbers[:end], column_starts)
        (row_low, column_low), (row_high, column_high) = (
            [bound.reduceat(numbers, starts) for numbers, starts in sides]
            for bound in (np.minimum, np.maximum)
        )
        return (row_low[:, None] <= column_high) & (column_low <= row_high[:, None])

    has_pairs = has_positive | ranges_meet(*groups)
    if positive_ids is not None:
        has_pairs |= ranges_meet(*positive_ids)
    visited = tuple([b for b in grid.visits(a) if has_pairs[a, b]] for a in range(len(grid.rows)))
    return replace(grid, visited=visited)


def positive_blocks(grid: Grid, positives: Array) -> Array:
    """[row blocks, column blocks] bool: whether a block has one of the `positives` [M] or [M, P].

    A positive outside of the grid's columns, or -1, is in no block.
    """
    shape = len(grid.rows), len(grid.columns)
    if 0 in shape:
        return np.zeros(shape, bool)
    first, end = grid.columns[0].start, grid.columns[-1].stop
    row_blocks, column_blocks = (  # the number of the block of each row, and of each column
        np.repeat(np.arange(len(parts)), [part.stop - part.start for part in parts])
        for parts in (grid.rows, grid.columns)
    )
    pairs = np.zeros(shape[0] * shape[1], np.int64)
    for keys in as_sets(positives).T:  # [M] one positive of each row
        inside = (keys >= first) & (keys < end)
        blocks = row_blocks[inside] * shape[1] + column_blocks[keys[inside] - first]
        pairs += np.bincount(blocks, minlength=len(pairs))
    return pairs.reshape(shape) > 0


def default_positive_blocks(grid: Grid, m: int, symmetric: bool) -> Array:
    """`positive_blocks` of `problem.default_positives`, only from the bounds of the blocks.

    The positives of a row block are a range of keys. If queries are the keys, the range is shifted
    by m / 2, and its part from m on continues at key 0.
    """
    shift = m // 2 if symmetric else 0
    start, stop = np.array([(rows.start, rows.stop) for rows in grid.rows]).T[:, :, None] + shift
    first, end = np.array([(keys.start, keys.stop) for keys in grid.columns]).T
    return (start < end) & (first < stop) | (start - m < end) & (first < stop - m)
