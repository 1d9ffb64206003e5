"""What a fold keeps in the workspace, and the largest blocks of the logit matrix that fit it.

A launch covers one block of the logit matrix, rows x columns. Its panel of dL/dx, and whatever else
is temporary, has to fit the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from ...problem import least_block_side, slices, workspace_too_small
from .precision import (
    ACCUMULATOR_BYTES,
    MAX_SUM_TERMS,
    OPERAND_BYTES,
    OPERAND_PARTS,
    padded,
    product_width,
)
from .sweep import STRIP, Sweep
from .tile import BLOCK_M, Tile

# Columns whose exponentials are kept, at least, or all: blocks have all rows then, and with fewer
# columns their products take longer than what is saved
LEAST_KEPT = 8192
# Of adding up a tile of an accumulator, and of one product more, in the time of 512 terms of a tile
ADDING_COST, LAUNCH_COST = 0.012, 2
# Least rows of blocks of all keys. With 900, adding to dK costs as much as computing logits again
ALL_KEYS_ROWS = 1024
PIECE_ROWS = 64  # of linear.cu: rows that are summed before segments are joined


@dataclass(frozen=True)
class Needs:
    """What a fold keeps in the workspace. (Vectors of length M and N are outside it.)"""

    precision: str
    staged_query: bool  # operands are converted or normalised copies
    staged_key: bool
    columns: bool  # columns have sums of their own
    gradient: bool
    query_accumulators: int  # so many dQ of a panel accumulate in the workspace
    key_accumulator: bool  # dK, or in the symmetric case the gradient of all rows
    sweep: Sweep | None = None  # instead of tiles
    rows: bool = True  # rows have sums
    # Bytes of a row of dK's destination where accumulators overlay it, whose rows have at least as
    # many; 0: they have memory of their own
    overlay_row: int = 0
    # Bytes of the copies where all rows are copied before the folds; 0: each fold copies a block's
    staged_once: int = 0
    weighted_query: bool = False  # rows of queries are copied once more, for dK
    moments: bool = False  # sums have first moments

    @property
    def statistics_needs(self) -> Needs:
        """Of the log-sum-exp fold alone."""
        return replace(self, gradient=False, query_accumulators=0, key_accumulator=False, rows=True)

    @property
    def gradient_needs(self) -> Needs:
        """Of the gradient fold alone."""
        return replace(self, columns=False)

    def accumulator_row(self, d: int) -> int:
        return product_width(d, self.precision) * ACCUMULATOR_BYTES[self.precision]

    def block(self, rows: int, columns: int, d: int, block_n: int) -> int:
        """Bytes for a block of rows x columns."""
        partial = (3 if self.moments else 2) * ACCUMULATOR_BYTES[self.precision]
        operand_row = padded(d, self.precision) * OPERAND_BYTES[self.precision]
        tile = self.sweep or Tile(block_n)
        total = partial * tile.row_sums(rows, columns) if self.rows else 0
        if self.columns:
            total += partial * tile.column_sums(rows, columns)
        if not self.staged_once:
            total += (self.staged_query * rows + self.staged_key * columns) * operand_row
        total += self.weighted_query * rows * operand_row
        if self.gradient:
            total += self.panel(rows, columns, d)
        return total + self.query_accumulators * rows * self.accumulator_row(d)

    def panel(self, rows: int, columns: int, d: int) -> int:
        """Bytes for dL/dx of a block. At least one row of a gradient: finished rows that overlay
        their destination pass through this memory."""
        size = rows * panel_stride(columns, self.precision) * OPERAND_BYTES[self.precision]
        return max(size, self.accumulator_row(d))

    def size(self, of: Blocking, d: int, block_n: int) -> int:
        """Bytes for the largest block, and for the accumulators of dK."""
        accumulators = (of.key_rows - of.overlaid) * self.accumulator_row(d)
        return self.block(of.rows, of.columns, d, block_n) + accumulators

    def border(self, n: int, d: int) -> int:
        """How many rows of n of dK's accumulators can overlay their destination: whole tiles."""
        return n * self.overlay_row // self.accumulator_row(d) // BLOCK_M * BLOCK_M

    def kept(self, rows: int, columns: int, d: int) -> int:
        """Bytes for the exponentials of rows x columns logits, in a gradient panel, and for what
        they are relative to."""
        references = -(-rows // STRIP) * -(-columns // BLOCK_M) * 4
        return self.panel(rows, columns, d) + references


def term_bytes(shape: tuple[int, int, int], smoothed: int, classes: int, real: int) -> int:
    """Bytes that linear terms and their gradients take in kernels: sums of segments, and those of
    pieces of rows, from which they are joined; for label smoothing of so many sides, and sums of so
    many classes, of `real` bytes an element."""
    m, n, d = shape
    pieces = 2 * d * 8 * -(-max(m, n) // PIECE_ROWS)
    found = 2 * smoothed * pieces  # plain, and weighted by factors
    return found + (2 * (pieces + classes * d * real) if classes else 0)


def left_to_folds(workspace: int, beside: int) -> int:
    """Bytes of the workspace beside what else lies in it; at least half."""
    return workspace - min(workspace // 2, beside)


def staged_once(size: int, workspace: int) -> int:
    """`size` bytes of operands if all of them are to be staged before the folds, which then have so
    much less of the workspace; 0 if each fold is to stage blocks of them."""
    return size if size <= workspace // 5 else 0


def panel_stride(columns: int, precision: str) -> int:
    """Elements in a row of a gradient panel, or in each of its parts, which lie side by side; tiles
    are written whole."""
    piece = BLOCK_M if precision in OPERAND_PARTS else 8
    return -(-columns // piece) * piece


@lru_cache(1024)
def sums_at_once(
    shape: tuple[int, int, int], precision: str, multiprocessors: int, workspace: int
) -> int:
    """Sums of `MAX_SUM_TERMS` terms that make dQ are computed so many at a time, each into an
    accumulator of its own: where queries are few, one sum alone does not occupy all
    multiprocessors."""
    m, n, d = shape
    sums = -(-n // MAX_SUM_TERMS[precision]) if precision in MAX_SUM_TERMS else 1
    tiles = -(-m // BLOCK_M) * -(-d // BLOCK_M)  # of one sum
    if sums <= 1 or not 0 < tiles < multiprocessors:
        return 1
    room = workspace // 8 // (m * d * ACCUMULATOR_BYTES[precision])

    def cost(at_once: int) -> float:
        """In the time of a tile of a sum."""
        waves = -(-at_once * tiles // multiprocessors)
        return -(-sums // at_once) * (waves + LAUNCH_COST) + ADDING_COST * at_once * tiles

    return min(range(1, max(1, min(sums, room)) + 1), key=cost)


@dataclass(frozen=True)
class Blocking:
    """How a fold cuts the logit matrix into blocks, and where it accumulates dK."""

    rows: int  # of a block
    columns: int
    key_rows: int  # rows of dK that accumulate at once; 0: all of them, in their destination
    overlaid: int = 0  # the first of them, whose accumulators overlay dK's destination
    # Columns, from the first, whose exponentials the panel holds between the folds, of all rows
    kept: int = 0

    def column_blocks(self, n: int) -> list[slice]:
        """Blocks of n columns, none on both sides of what is overlaid, or of what is kept."""
        borders = sorted({0, self.overlaid, self.kept, n})
        return [of for a, b in pairwise(borders) for of in slices(b, self.columns, a)]


def least_workspace(shape: tuple[int, int, int], needs: Needs, block_n: int) -> int:
    """Bytes for the least blocks that are `few_blocks`, of a size that `_largest` finds."""
    m, n, d = shape
    side = least_block_side(m, n)
    side = -(-side // BLOCK_M) * BLOCK_M if side > BLOCK_M // 2 else 1 << (side - 1).bit_length()
    least = needs.block(min(side, m), min(side, n), d, block_n)
    if needs.key_accumulator:
        least = 2 * max(least, min(side, n) * needs.accumulator_row(d))
    return least


@lru_cache(1024)
def blocking(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool
) -> Blocking:
    """The largest blocks that fit, near square: panels cost traffic in proportion to their edges.

    Accumulators of dK take up to half of the workspace. Where they would take more than a quarter,
    the first of them overlay dK's destination, if that makes all of them fit; no block straddles
    the border. Destinations whose rows are nearly as long as an accumulator's hold nearly all.

    `symmetric`: rows and columns get the same ranges.
    """
    m, n, d = shape
    row = needs.accumulator_row(d)
    most = max(1, workspace // 2 // row)
    key_rows, overlaid = min(n, most) if needs.key_accumulator else 0, 0
    if needs.overlay_row and 2 * key_rows > most:
        border = needs.border(n, d)
        if border and n - border <= most:
            key_rows, overlaid = n, border
    room = workspace - needs.staged_once - (key_rows - overlaid) * row
    n = max(overlaid, n - overlaid)  # each block lies on one side of the border
    m = n if symmetric else m

    def has_room(rows: int, columns: int) -> bool:
        return needs.block(rows, columns, d, block_n) <= room

    if needs.sweep is not None and needs.gradient and not symmetric:
        # As many rows as panels run at once, or half, if columns are not too few for the products
        for share in (1, 2):
            rows = _even(m, min(m, needs.sweep.rows_at_once // share))
            if has_room(rows, min(n, rows // 4)):
                columns = _largest(n, partial(has_room, rows))
                return Blocking(rows, _even(n, columns), key_rows, overlaid)
    side = _largest(max(m, n), lambda s: has_room(min(s, m), min(s, n)))
    rows, columns = min(side, m), min(side, n)
    if not symmetric:
        columns = _largest(n, partial(has_room, rows))
        rows = _largest(m, lambda r: has_room(r, columns))
    return Blocking(_even(m, rows), _even(n, columns), key_rows, overlaid)


@lru_cache(1024)
def blockings(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool,
    keep: int = 0, beside: int = 0,
) -> tuple[Blocking, Blocking, int]:  # fmt: skip
    """Blocks of the log-sum-exp fold and, with its panels smaller ones, of the gradient fold; and
    the bytes that serve both. ValueError where blocks that fit would be too many (`few_blocks`).
    `keep`: so many bytes may be taken to keep exponentials between the folds, as many as fit.
    `beside`: see `left_to_folds`."""
    folds = needs.statistics_needs, needs.gradient_needs
    least = max(least_workspace(shape, of, block_n) for of in folds)
    if workspace < least:
        least, workspace = (size + min(size, beside) for size in (least, workspace))
        raise ValueError(workspace_too_small(shape, least, workspace))
    kept = _keeping(shape, needs, keep, block_n) if keep else None
    if kept is not None:
        return kept
    first, second = (blocking(shape, of, workspace, block_n, symmetric) for of in folds)
    sizes = (of.size(c, shape[2], block_n) for of, c in zip(folds, (first, second), strict=True))
    return first, second, max(sizes)


@lru_cache(1024)
def all_keys_blocking(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int
) -> tuple[Blocking, Blocking, int] | None:
    """`blockings` of one fold for log-sum-exps, dQ and dK: blocks have all keys, as rows' sums must
    be complete before dK gains products with their queries. None if too few rows fit."""
    m, n, d = shape
    assert needs.sweep is not None
    # rows of which tiles of dQ occupy all multiprocessors
    wave = needs.sweep.rows_at_once // -(-d // BLOCK_M) // BLOCK_M * BLOCK_M
    needs = replace(needs, rows=True, columns=False, weighted_query=True)
    key_rows = n if needs.key_accumulator else 0
    room = workspace - needs.staged_once

    def size(overlaid: int, rows: int) -> int:
        return needs.size(Blocking(rows, n, key_rows, overlaid), d, block_n)

    def rows_of_block(overlaid: int) -> int:
        rows = _largest(m, lambda rows: size(overlaid, rows) <= room)
        if size(overlaid, rows) > room:
            return 0
        return rows - rows % wave if ALL_KEYS_ROWS <= wave <= rows < m else _even(m, rows)

    border = needs.border(n, d) if key_rows else 0
    overlaid = border if rows_of_block(border) > rows_of_block(0) else 0
    rows = rows_of_block(overlaid)
    if rows < min(m, ALL_KEYS_ROWS):
        return None
    of = Blocking(rows, n, key_rows, overlaid)
    return of, of, size(overlaid, rows)


def _keeping(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int
) -> tuple[Blocking, Blocking, int] | None:
    """`blockings` that keep the exponentials of as many columns as fit; None if these are too few.

    Blocks have all rows. The first is kept; the gradient panels of the others take its memory.
    Accumulators of dK overlay their destination only where more is kept then.
    """
    m, n, d = shape
    key_rows = n if needs.key_accumulator else 0
    beside_panel = replace(needs.gradient_needs, gradient=False)  # the panel is counted as kept

    def size(overlaid: int, columns: int) -> int:
        of = Blocking(m, columns, key_rows, overlaid)
        sizes = (fold.size(of, d, block_n) for fold in (needs.statistics_needs, beside_panel))
        return needs.kept(m, columns, d) + max(sizes) + needs.staged_once

    def has_room(overlaid: int, columns: int) -> bool:
        return size(overlaid, columns) <= workspace

    found: tuple[Blocking, Blocking, int] | None = None
    for overlaid in (0, needs.border(n, d)) if key_rows else (0,):
        columns = _largest(n, partial(has_room, overlaid))
        if columns < n and needs.sweep is not None:
            columns -= columns % needs.sweep.block_n
        least = min(n, LEAST_KEPT) if found is None else found[0].kept + 1
        if columns >= least:
            of = Blocking(m, columns, key_rows, overlaid, kept=columns)
            found = replace(of, overlaid=0), of, size(overlaid, columns) - needs.staged_once
    return found


def _largest(limit: int, has_room: Callable[[int], bool]) -> int:
    """The largest size up to `limit` that has room: `limit`, a multiple of BLOCK_M, or a power of 2
    below BLOCK_M."""
    if has_room(limit):
        return limit
    low, high = 0, -(-limit // BLOCK_M)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle * BLOCK_M) else (low, middle)
    if low:
        return low * BLOCK_M
    size = BLOCK_M // 2
    while size > 1 and (size > limit or not has_room(size)):
        size //= 2
    return size


def _even(n: int, step: int) -> int:
    """The step that covers n in as many steps as `step`, all of about the same size."""
    steps = -(-n // step)
    if step < BLOCK_M or steps == 1:
        return step
    return min(step, -(-n // (steps * BLOCK_M)) * BLOCK_M)
