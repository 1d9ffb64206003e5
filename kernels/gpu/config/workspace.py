"""What a fold needs in the workspace, and the largest blocks of the logit matrix that fit it.

A launch covers one block of the logit matrix, rows x columns. dL/dx of the block, and whatever else
is temporary, has to fit the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from ...grid import least_block_side, slices, workspace_too_small
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

# Columns whose exponentials are cached: all, or at least so many. Blocks have all rows then, and
# products with fewer columns take longer than the cache saves
MIN_CACHED_COLUMNS = 8192
# The time to add one tile of an accumulator to another, and to launch one more product. The unit
# is the time in which a multiprocessor multiplies 512 terms of a tile
ADDING_COST, LAUNCH_COST = 0.012, 2
# Least rows of blocks of all keys. With 900, adding to dK costs as much as computing logits again
ALL_KEYS_ROWS = 1024
GROUP_BLOCK = 4096  # most rows and columns of blocks that groups leave out
PIECE_ROWS = 64  # of linear.cu: rows that are summed before segments are joined


@dataclass(frozen=True)
class Needs:
    """What a fold needs in the workspace. (Vectors of length M and N are outside it.)"""

    precision: str
    staged_query: bool  # operands are converted or normalised copies
    staged_key: bool
    columns: bool  # columns have sums of their own
    gradient: bool  # dL/dx of a block is written
    dq_accumulators: int  # of a block's rows, side by side; 0: dQ accumulates in its destination
    dk_in_workspace: bool  # accumulators of dK, or of the gradient of all rows if queries are keys
    sweep: Sweep | None = None  # instead of tiles
    rows: bool = True  # rows have sums
    # Bytes of a row of dK's destination, if accumulators of dK's first rows may lie there: a row of
    # an accumulator is as long or longer. 0: all accumulators lie in the workspace
    overlay_row_bytes: int = 0
    # Bytes of the copies of all rows, made before the folds; 0: each fold copies a block's rows
    staged_once: int = 0
    weighted_query: bool = False  # a block's queries are copied once more, for dK
    moments: bool = False  # sums have first moments

    @property
    def statistics_needs(self) -> Needs:
        """Of the log-sum-exp fold."""
        return replace(self, gradient=False, dq_accumulators=0, dk_in_workspace=False, rows=True)

    @property
    def gradient_needs(self) -> Needs:
        """Of the gradient fold."""
        return replace(self, columns=False)

    def accumulator_row_bytes(self, d: int) -> int:
        return product_width(d, self.precision) * ACCUMULATOR_BYTES[self.precision]

    def parts(
        self, rows: int, columns: int, d: int, block_n: int, dq_rows: int = 0, dk_rows: int = 0
    ) -> dict[str, int]:
        """Bytes of each part for blocks of up to rows x columns, and for so many rows of dQ's and
        of dK's accumulators in the workspace."""
        real, tile = ACCUMULATOR_BYTES[self.precision], self.sweep or Tile(block_n)
        operand_row = padded(d, self.precision) * OPERAND_BYTES[self.precision]
        accumulator_row = self.accumulator_row_bytes(d)
        row_sums = tile.row_sums(rows, columns) if self.rows else 0
        column_sums = tile.column_sums(rows, columns) if self.columns else 0
        by_block = not self.staged_once
        sizes = {
            "query_rows": self.staged_query * by_block * rows * operand_row,
            "key_rows": self.staged_key * by_block * columns * operand_row,
            "gradient_block": self.gradient and self.gradient_block_bytes(rows, columns, d),
            "dq_accumulator": dq_rows * accumulator_row,
            "dk_accumulator": dk_rows * accumulator_row,
            "row_partials": 2 * row_sums * real,
            "row_moments": self.moments * row_sums * real,
            "column_partials": 2 * column_sums * real,
            "column_moments": self.moments * column_sums * real,
            "weighted_queries": self.weighted_query * rows * operand_row,
        }
        return {name: size for name, size in sizes.items() if size}

    def gradient_block_bytes(self, rows: int, columns: int, d: int) -> int:
        """Bytes for dL/dx of a block. At least one row of a gradient: finished rows that overlay
        their destination pass through this memory."""
        size = rows * gradient_stride(columns, self.precision) * OPERAND_BYTES[self.precision]
        return max(size, self.accumulator_row_bytes(d))

    def block_bytes(self, rows: int, columns: int, d: int, block_n: int, dk_rows: int = 0) -> int:
        """Bytes of all parts."""
        dq_rows = self.dq_accumulators * rows
        return sum(self.parts(rows, columns, d, block_n, dq_rows, dk_rows).values())

    def blocking_bytes(self, of: Blocking, d: int, block_n: int) -> int:
        """Bytes for the largest block, and for the accumulators of dK."""
        return self.block_bytes(of.rows, of.columns, d, block_n, of.dk_rows - of.overlaid)

    def overlay_border(self, n: int, d: int) -> int:
        """How many of dK's n rows of accumulators can overlay their destination: whole tiles."""
        return n * self.overlay_row_bytes // self.accumulator_row_bytes(d) // BLOCK_M * BLOCK_M

    def cached_parts(self, rows: int, columns: int, d: int) -> dict[str, int]:
        """Bytes for the exponentials of rows x columns logits, in the form of a gradient block, and
        for their reference exponents."""
        references = -(-rows // STRIP) * -(-columns // BLOCK_M) * 4
        return {
            "exponentials": self.gradient_block_bytes(rows, columns, d), "references": references,
        }  # fmt: skip


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


def gradient_stride(columns: int, precision: str) -> int:
    """Elements in a row of a gradient block, or in each of its parts, which lie side by side; tiles
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
    # Rows of dK that accumulate at a time; 0: dK accumulates in its destination, all rows at a time
    dk_rows: int
    overlaid: int = 0  # of them, from the first: their accumulators lie in dK's destination
    cached_columns: int = 0  # from the first: exponentials of all rows are cached between the folds

    def column_blocks(self, n: int) -> list[slice]:
        """Blocks of n columns. No block is on both sides of a border: that of the overlaid rows of
        dK, or that of the cached columns."""
        borders = sorted({0, self.overlaid, self.cached_columns, n})
        return [of for a, b in pairwise(borders) for of in slices(b, self.columns, a)]


def least_workspace(shape: tuple[int, int, int], needs: Needs, block_n: int) -> int:
    """Bytes for the least blocks that are `has_few_blocks`, of a size that `_largest` finds."""
    m, n, d = shape
    side = least_block_side(m, n)
    side = -(-side // BLOCK_M) * BLOCK_M if side > BLOCK_M // 2 else 1 << (side - 1).bit_length()
    least = needs.block_bytes(min(side, m), min(side, n), d, block_n)
    if needs.dk_in_workspace:
        least = 2 * max(least, min(side, n) * needs.accumulator_row_bytes(d))
    return least


@lru_cache(1024)
def blocking(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool
) -> Blocking:
    """The largest blocks that fit. They are nearly square: what a block's copies and products read
    is proportional to its sides.

    Accumulators of dK take up to half of the workspace. If they would take more than a quarter, and
    all of them fit in this way, the first of them overlay dK's destination; no block has columns on
    both sides of that border.

    `symmetric`: rows and columns get the same ranges.
    """
    m, n, d = shape
    row = needs.accumulator_row_bytes(d)
    most = max(1, workspace // 2 // row)
    dk_rows, overlaid = min(n, most) if needs.dk_in_workspace else 0, 0
    if needs.overlay_row_bytes and 2 * dk_rows > most:
        border = needs.overlay_border(n, d)
        if border and n - border <= most:
            dk_rows, overlaid = n, border
    room = workspace - needs.staged_once - (dk_rows - overlaid) * row
    n = max(overlaid, n - overlaid)  # each block lies on one side of the border
    m = n if symmetric else m

    def has_room(rows: int, columns: int) -> bool:
        return needs.block_bytes(rows, columns, d, block_n) <= room

    if needs.sweep is not None and needs.gradient and not symmetric:
        # Rows of as many query tiles as run at once, or of half as many, unless that leaves too few
        # columns for the products
        for share in (1, 2):
            rows = _even(m, min(m, needs.sweep.rows_at_once // share))
            if has_room(rows, min(n, rows // 4)):
                columns = _largest(n, partial(has_room, rows))
                return Blocking(rows, _even(n, columns), dk_rows, overlaid)
    side = _largest(max(m, n), lambda s: has_room(min(s, m), min(s, n)))
    rows, columns = min(side, m), min(side, n)
    if not symmetric:
        columns = _largest(n, partial(has_room, rows))
        rows = _largest(m, lambda r: has_room(r, columns))
    return Blocking(_even(m, rows), _even(n, columns), dk_rows, overlaid)


@lru_cache(1024)
def blockings(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool,
    cache_bytes: int = 0, beside: int = 0,
) -> tuple[Blocking, Blocking, int]:  # fmt: skip
    """Blocks of the log-sum-exp fold; those of the gradient fold, which are smaller, as dL/dx takes
    memory; and the bytes that serve both folds. ValueError if blocks that fit would be too many
    (`has_few_blocks`). `cache_bytes`: what the folds may take if they cache exponentials in it, as
    many
    as fit; 0: they cache none. `beside`: see `left_to_folds`."""
    folds = needs.statistics_needs, needs.gradient_needs
    least = max(least_workspace(shape, of, block_n) for of in folds)  # bytes
    if workspace < least:
        # The caller's workspace is larger by what lies beside the folds: undo `left_to_folds`
        least, workspace = (size + min(size, beside) for size in (least, workspace))
        raise ValueError(workspace_too_small(shape, least, workspace))
    caching = _caching_blockings(shape, needs, cache_bytes, block_n) if cache_bytes else None
    if caching is not None:
        return caching
    first, second = (blocking(shape, of, workspace, block_n, symmetric) for of in folds)
    sizes = (
        of.blocking_bytes(c, shape[2], block_n)
        for of, c in zip(folds, (first, second), strict=True)
    )
    return first, second, max(sizes)


def small_blockings(
    shape: tuple[int, int, int], needs: Needs, block_n: int, blockings: tuple[Blocking, Blocking]
) -> tuple[Blocking, Blocking, int]:
    """The result of `blockings`, in blocks of at most GROUP_BLOCK rows and columns."""
    m, n, d = shape
    first, second = (
        replace(
            of, rows=_even(m, min(of.rows, GROUP_BLOCK)),
            columns=_even(n, min(of.columns, GROUP_BLOCK)),
        )
        for of in blockings
    )  # fmt: skip
    sizes = (
        needs.statistics_needs.blocking_bytes(first, d, block_n),
        needs.gradient_needs.blocking_bytes(second, d, block_n),
    )
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
    dk_rows = n if needs.dk_in_workspace else 0
    room = workspace - needs.staged_once

    def size(overlaid: int, rows: int) -> int:
        return needs.blocking_bytes(Blocking(rows, n, dk_rows, overlaid), d, block_n)

    def rows_of_block(overlaid: int) -> int:
        rows = _largest(m, lambda rows: size(overlaid, rows) <= room)
        if size(overlaid, rows) > room:
            return 0
        return rows - rows % wave if ALL_KEYS_ROWS <= wave <= rows < m else _even(m, rows)

    border = needs.overlay_border(n, d) if dk_rows else 0
    overlaid = border if rows_of_block(border) > rows_of_block(0) else 0
    rows = rows_of_block(overlaid)
    if rows < min(m, ALL_KEYS_ROWS):
        return None
    of = Blocking(rows, n, dk_rows, overlaid)
    return of, of, size(overlaid, rows)


def _caching_blockings(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int
) -> tuple[Blocking, Blocking, int] | None:
    """`blockings` that cache the exponentials of as many columns as fit; None if these are too few.

    Blocks have all rows. The first block is cached; gradient blocks of the others take its memory.
    Accumulators of dK overlay their destination only if more columns are cached then.
    """
    m, n, d = shape
    dk_rows = n if needs.dk_in_workspace else 0
    beside_cache = replace(needs.gradient_needs, gradient=False)  # the cache is the gradient block

    def size(overlaid: int, columns: int) -> int:
        of = Blocking(m, columns, dk_rows, overlaid)
        sizes = (
            fold.blocking_bytes(of, d, block_n) for fold in (needs.statistics_needs, beside_cache)
        )
        return sum(needs.cached_parts(m, columns, d).values()) + max(sizes) + needs.staged_once

    def has_room(overlaid: int, columns: int) -> bool:
        return size(overlaid, columns) <= workspace

    found: tuple[Blocking, Blocking, int] | None = None
    for overlaid in (0, needs.overlay_border(n, d)) if dk_rows else (0,):
        columns = _largest(n, partial(has_room, overlaid))
        if columns < n and needs.sweep is not None:
            columns -= columns % needs.sweep.block_n
        least = min(n, MIN_CACHED_COLUMNS) if found is None else found[0].cached_columns + 1
        if columns >= least:
            of = Blocking(m, columns, dk_rows, overlaid, cached_columns=columns)
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
