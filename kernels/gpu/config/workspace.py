"""The memory that a pass needs in the workspace, and the largest blocks that fit it.

A launch computes one block. The workspace has room for its dL/dx and all other temporary arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from ...grid import least_block_side, make_workspace_error, slices
from .precision import (
    ACCUMULATOR_BYTES,
    MAX_SUM_TERMS,
    OPERAND_BYTES,
    OPERAND_PARTS,
    padded,
    product_width,
)
from .sweep import STRIP, Sweep
from .tile import BLOCK_M, MARK_BYTES, MARKED_COLUMNS, Tile

# The least number of columns whose exponentials are cached, unless all are. Cached blocks have all
# rows, and products with fewer columns take longer than the cache saves
MIN_CACHED_COLUMNS = 8192
# The time to add one tile of an accumulator to another, and the time to launch one more product,
# relative to the time in which a multiprocessor multiplies 512 terms of a tile
ADDING_COST, LAUNCH_COST = 0.012, 2
# The least rows of blocks that have all keys. With 900 rows, adding to dK takes as long as
# computing the logits again
ALL_KEYS_ROWS = 1024
Parts = dict[str, int]  # bytes of each part of a memory, by name, in the order of the parts
ALIGNMENT = 256  # bytes; each part of the workspace begins at a multiple of it
OWN_BATCH = 4  # own negatives of a row that a group of lanes reads at once (BATCH of own.cuh)
# Neighbouring uses of one row of a table that are added up apart, in pieces (own_table.cu)
PIECE_USES, LONG_PIECE_USES = 32, 1024
PLACE_ROWS = 64  # rows of a place of linear.cu, which adds up the rows of a segment in each place


def align(size: int) -> int:
    """`size` bytes, and the gap until the next part of the workspace begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Needs:
    """The arrays that a pass needs in the workspace. Vectors of length M and N lie outside."""

    precision: str
    staged_query: bool  # queries are read from converted or normalised copies
    staged_key: bool  # keys are read from such copies
    sums_columns: bool  # columns have sums
    has_gradient_block: bool  # dL/dx of a block is written to memory
    dq_copies: int  # accumulators of each row of dQ; 0: dQ accumulates in its destination
    dk_in_workspace: bool  # dK (if queries are keys, dQ of all rows) accumulates in the workspace
    sweep: Sweep | None = None  # computes the blocks; None: portable kernels do
    sums_rows: bool = True  # rows have sums
    # bytes of a row of dK's destination, if accumulators of dK's first rows may overlay it; 0: all
    # accumulators are in the workspace
    overlay_row_bytes: int = 0
    # bytes of staged copies of all rows, made before the passes; 0: each pass copies a block's rows
    staged_copy_bytes: int = 0
    weighted_query: bool = False  # a block has another copy of its queries, for dK
    moments: bool = False  # sums have first moments
    # of a guide, for each block: 1 for rows, 2 for rows and columns; 0: no guide, or kept marks
    marks_per_pair: int = 0
    # bytes of a staged row of the guide's queries, and of its keys; 0: rows are read in place
    guide_rows: tuple[int, int] = (0, 0)
    # bytes of a staged row of the teacher's queries, and of its keys; 0: rows are read in place
    teacher_rows: tuple[int, int] | None = None  # None: there is no teacher

    @property
    def statistics_needs(self) -> Needs:
        """The needs of the log-sum-exp pass."""
        needs = replace(self, has_gradient_block=False, dq_copies=0, dk_in_workspace=False)
        return replace(needs, sums_rows=True)

    @property
    def gradient_needs(self) -> Needs:
        """The needs of the gradient pass. Only with a teacher does it add up columns."""
        return self if self.teacher_rows is not None else replace(self, sums_columns=False)

    def accumulator_row_bytes(self, d: int) -> int:
        """Bytes of a row of an accumulator."""
        return product_width(d, self.precision) * ACCUMULATOR_BYTES[self.precision]

    def parts(
        self, rows: int, columns: int, d: int, block_n: int, dq_rows: int = 0, dk_rows: int = 0
    ) -> Parts:
        """The parts of the workspace, for blocks of up to rows x columns.

        `dq_rows` and `dk_rows` are the rows of accumulators of dQ and of dK in the workspace.
        """
        real, tile = ACCUMULATOR_BYTES[self.precision], self.sweep or Tile(block_n)
        operand_row = padded(d, self.precision) * OPERAND_BYTES[self.precision]
        accumulator_row = self.accumulator_row_bytes(d)
        block_bytes = self.has_gradient_block and self.gradient_block_bytes(rows, columns, d)
        row_partials = tile.max_row_partials(rows, columns) if self.sums_rows else 0
        column_partials = tile.max_column_partials(rows, columns) if self.sums_columns else 0
        by_block = not self.staged_copy_bytes
        teacher_query_row, teacher_key_row = self.teacher_rows or (0, 0)
        guide_query_row, guide_key_row = self.guide_rows
        sizes = {
            "query_rows": self.staged_query * by_block * rows * operand_row,
            "key_rows": self.staged_key * by_block * columns * operand_row,
            # staged rows come first: a later pass may find them in the same place
            "guide_query_rows": rows * guide_query_row,
            "guide_key_rows": columns * guide_key_row,
            **mark_parts(rows, columns, self.marks_per_pair),
            "teacher_query_rows": rows * teacher_query_row,
            "teacher_key_rows": columns * teacher_key_row,
            "gradient_block": block_bytes,
            "dq_accumulator": dq_rows * accumulator_row,
            "dk_accumulator": dk_rows * accumulator_row,
            "row_partials": 2 * row_partials * real,
            "row_moments": self.moments * row_partials * real,
            "column_partials": 2 * column_partials * real,
            "column_moments": self.moments * column_partials * real,
            "weighted_queries": self.weighted_query * rows * operand_row,
        }
        return {name: size for name, size in sizes.items() if size}

    def gradient_block_bytes(self, rows: int, columns: int, d: int) -> int:
        """Bytes for dL/dx of a block, and at least for one row of an accumulator.

        After the last block, rows of dK are converted to their dtype in this memory.
        """
        size = rows * gradient_stride(columns, self.precision) * OPERAND_BYTES[self.precision]
        return max(size, self.accumulator_row_bytes(d))

    def block_bytes(self, rows: int, columns: int, d: int, block_n: int, dk_rows: int = 0) -> int:
        """Bytes of all parts of the workspace for a block, and for `dk_rows` accumulators of dK."""
        dq_rows = self.dq_copies * rows
        return sum(map(align, self.parts(rows, columns, d, block_n, dq_rows, dk_rows).values()))

    def pass_bytes(self, block_sizes: BlockSizes, d: int, block_n: int) -> int:
        """Bytes of all parts of the workspace in a pass with these sizes."""
        dk_rows = block_sizes.dk_rows - block_sizes.overlaid
        return self.block_bytes(block_sizes.rows, block_sizes.columns, d, block_n, dk_rows)

    def overlay_border(self, n: int, d: int) -> int:
        """The number of dK's n rows that can overlay their destination, a multiple of BLOCK_M."""
        return n * self.overlay_row_bytes // self.accumulator_row_bytes(d) // BLOCK_M * BLOCK_M

    def cached_parts(self, rows: int, columns: int, d: int) -> Parts:
        """Memory of cached exponentials of rows x columns logits, and of their references."""
        if not columns:
            return {}
        references = -(-rows // STRIP) * -(-columns // BLOCK_M) * 4
        block_bytes = self.gradient_block_bytes(rows, columns, d)
        return {"exponentials": block_bytes, "references": references}


def mark_parts(rows: int, columns: int, marks_per_pair: int) -> Parts:
    """Memory of a guide's marks of rows x columns pairs: for rows (1), or for both sides (2)."""
    size = rows * -(-columns // MARKED_COLUMNS) * MARK_BYTES
    return dict.fromkeys(("row_marks", "column_marks")[:marks_per_pair], size)


def term_bytes(
    shape: tuple[int, int, int], smoothed: int, classes: int, sides: int, real: int
) -> int:
    """Bytes that linear terms need: sums of segments, and two pieces for each PLACE_ROWS rows.

    `smoothed`: sides with label smoothing. `classes`: their number. `sides`: sides with a softmax.
    `real`: bytes of one number.
    """
    m, n, d = shape
    pieces = 2 * d * 8 * -(-max(m, n) // PLACE_ROWS)
    smoothing = 2 * smoothed * pieces  # sums of rows, and sums weighted by factors
    return smoothing + (2 * sides * (pieces + classes * d * real) if classes else 0)


def own_parts(m: int, k: int, real: int, normalize: bool, table: tuple[int, int]) -> Parts:
    """Bytes of the products of own negatives, and of their norms and those of queries, which are
    kept between the passes; and of what the gradient of a table needs. `k`: own negatives of a row.
    `real`: bytes of one number. `table`: its rows and features; (0, 0): there is none."""
    norm_bytes = normalize * (m * k + m) * (real + 4) if k else 0
    sizes = {"products": m * k * real, "norms": norm_bytes}
    rows, d = table
    if rows:  # uses and their rows, sorted (`labels.sort_integers`); sums of pieces
        sizes["sorted uses"] = 8 * (4 * m * k + -(-rows // own_group_rows(rows)) + 1)
        pieces = m * k // PIECE_USES + m * k // LONG_PIECE_USES
        sizes["pieces"] = pieces * (d * real + 16)
    return {name: size for name, size in sizes.items() if size}


def own_group_rows(table_rows: int) -> int:
    """Rows of a table of own negatives whose gradients a group of lanes writes: eight, or fewer if
    groups would not occupy all multiprocessors."""
    return min(8, -(-table_rows // 2**12))


def workspace_of_passes(workspace: int, reserved: int) -> int:
    """Bytes of `workspace` for the passes: all but `reserved`, but half of them at least."""
    return workspace - min(workspace // 2, reserved)


def may_stage_all_rows(copy_bytes: int, workspace: int) -> bool:
    """Whether a fifth of the passes' workspace has room for staged copies of all rows.

    Then rows are staged once. Otherwise each pass stages the rows of a block before it computes it.
    """
    return copy_bytes <= workspace // 5


def gradient_stride(columns: int, precision: str) -> int:
    """Elements of a row of a gradient block, or of each part of a row, which has whole tiles."""
    multiple = BLOCK_M if precision in OPERAND_PARTS else 8
    return -(-columns // multiple) * multiple


@lru_cache(1024)
def choose_dq_copies(
    shape: tuple[int, int, int], precision: str, multiprocessors: int, workspace: int
) -> int:
    """The number of accumulators of each row of dQ: so many of its partial sums run at once.

    A partial sum has `MAX_SUM_TERMS` keys. If queries are few, the tiles of one partial sum do not
    occupy all multiprocessors, but the tiles of several do. Their accumulators must be added up,
    and take at most 1/8 of the workspace. Only fp16x3 (float32 on Hopper) has partial sums: else 1.
    """
    m, n, d = shape
    sums = -(-n // MAX_SUM_TERMS[precision]) if precision in MAX_SUM_TERMS else 1
    tiles = -(-m // BLOCK_M) * -(-d // BLOCK_M)  # of one partial sum
    if sums <= 1 or not 0 < tiles < multiprocessors:
        return 1
    max_copies = min(sums, workspace // 8 // (m * d * ACCUMULATOR_BYTES[precision]))

    def cost(dq_copies: int) -> float:
        """The time of all sums, relative to the time of one tile of a partial sum."""
        waves = -(-dq_copies * tiles // multiprocessors)
        return -(-sums // dq_copies) * (waves + LAUNCH_COST) + ADDING_COST * dq_copies * tiles

    return min(range(1, max(1, max_copies) + 1), key=cost)


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a pass's blocks, and the memory of its accumulator of dK."""

    rows: int  # of a block
    columns: int
    dk_rows: int  # rows of dK that accumulate in one pass; 0: all of them, in their destination
    overlaid: int = 0  # the first of `dk_rows`, whose accumulators overlay the destination
    cached_columns: int = 0  # the first columns, whose exponentials are cached between the passes

    def column_blocks(self, n: int) -> list[slice]:
        """The column blocks of n columns. Overlaid rows, and cached columns, end with a block."""
        borders = sorted({0, self.overlaid, self.cached_columns, n})
        return [block for a, b in pairwise(borders) for block in slices(b, self.columns, a)]


def least_workspace(shape: tuple[int, int, int], needs: Needs, block_n: int) -> int:
    """Bytes for the smallest blocks that a call may have: `has_few_blocks` limits their number."""
    m, n, d = shape
    side = least_block_side(m, n)
    # the sizes that `_largest` tries: multiples of BLOCK_M, or powers of 2
    side = -(-side // BLOCK_M) * BLOCK_M if side > BLOCK_M // 2 else 1 << (side - 1).bit_length()
    least = needs.block_bytes(min(side, m), min(side, n), d, block_n)
    if needs.dk_in_workspace:  # dK's accumulators get half of the workspace, blocks the rest
        least = 2 * max(least, align(min(side, n) * needs.accumulator_row_bytes(d)))
    return least


@lru_cache(1024)
def largest_blocks(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool,
    most_side: int | None = None,
) -> BlockSizes:  # fmt: skip
    """The largest blocks that fit, nearly square with one exception.

    The rows that a block reads for its copies and products are proportional to its sides, so square
    blocks read least. The exception is the gradient pass of a sweep, unless queries are the keys
    (`symmetric`): its blocks have a query tile for each worker, and as many columns as fit.

    Accumulators of dK take up to half of the workspace. If they would take more than a quarter, the
    first of them overlay dK's destination, provided that the others then fit.
    """
    m, n, d = shape
    row_bytes = needs.accumulator_row_bytes(d)
    max_dk_rows = max(1, workspace // 2 // ALIGNMENT * ALIGNMENT // row_bytes)
    overlaid, dk_rows = 0, min(n, max_dk_rows) if needs.dk_in_workspace else 0
    # `max_dk_rows` take half of the workspace, so more than half of them take more than a quarter
    if needs.overlay_row_bytes and 2 * dk_rows > max_dk_rows:
        border = needs.overlay_border(n, d)
        if border and n - border <= max_dk_rows:
            dk_rows, overlaid = n, border
    room = workspace - needs.staged_copy_bytes - align((dk_rows - overlaid) * row_bytes)
    # from here on, m and n are the most rows and columns of a block
    n = max(overlaid, n - overlaid)  # no block contains the border
    m = n if symmetric else m
    if most_side is not None:
        m, n = min(m, most_side), min(n, most_side)

    def has_room(rows: int, columns: int) -> bool:
        return needs.block_bytes(rows, columns, d, block_n) <= room

    if needs.sweep is not None and needs.has_gradient_block and not symmetric:
        # A query tile for each worker. If these rows leave no room for rows / 4 columns, a query
        # tile for two workers, which take a segment each. If these leave none: square blocks
        for divisor in (1, 2):
            rows = _even_step(m, min(m, needs.sweep.rows_at_once // divisor))
            if has_room(rows, min(n, rows // 4)):
                columns = _largest(n, partial(has_room, rows))
                return BlockSizes(rows, _even_step(n, columns), dk_rows, overlaid)
    side = _largest(max(m, n), lambda s: has_room(min(s, m), min(s, n)))
    rows, columns = min(side, m), min(side, n)
    if not symmetric:
        columns = _largest(n, partial(has_room, rows))
        rows = _largest(m, lambda r: has_room(r, columns))
    return BlockSizes(_even_step(m, rows), _even_step(n, columns), dk_rows, overlaid)


@lru_cache(1024)
def choose_block_sizes(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, symmetric: bool,
    cache_bytes: int = 0, reserved: int = 0, most_side: int | None = None,
) -> tuple[BlockSizes, BlockSizes, int]:  # fmt: skip
    """Blocks of the log-sum-exp pass, blocks of the gradient pass, and bytes for both passes.

    The gradient pass has smaller blocks, because dL/dx takes memory.

    - `workspace`: bytes of the passes, which `workspace_of_passes` has computed with `reserved`.
    - `cache_bytes`: if not 0, the passes may take that many bytes instead, and cache as many
      exponentials as fit.
    - `most_side`: blocks have at most that many rows and columns, unless exponentials are cached.

    ValueError if there would be too many blocks (`has_few_blocks`).
    """
    passes = needs.statistics_needs, needs.gradient_needs
    least = max(least_workspace(shape, each, block_n) for each in passes)  # bytes
    if workspace < least:
        # the caller's bytes, for the message: the inverse of `workspace_of_passes`
        least, workspace = (size + min(size, reserved) for size in (least, workspace))
        raise make_workspace_error(shape, least, workspace)
    caching = _block_sizes_with_cache(shape, needs, cache_bytes, block_n) if cache_bytes else None
    if caching is not None:
        return caching
    first, second = (
        largest_blocks(shape, each, workspace, block_n, symmetric, most_side) for each in passes
    )
    sizes = (
        each.pass_bytes(block_sizes, shape[2], block_n)
        for each, block_sizes in zip(passes, (first, second), strict=True)
    )
    return first, second, max(sizes)


@lru_cache(1024)
def block_sizes_for_all_keys(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int
) -> tuple[BlockSizes, BlockSizes, int] | None:
    """`choose_block_sizes` for one pass with dQ and dK; None (two passes) if too few rows fit.

    A block has all keys, because the sums of its rows must be complete before dK gains products
    with their queries.
    """
    m, n, d = shape
    assert needs.sweep is not None
    # The rows of a block whose tiles of dQ (BLOCK_M rows x BLOCK_M features) occupy all
    # multiprocessors once. Large blocks have a multiple of it, so that no multiprocessor is idle
    wave = needs.sweep.rows_at_once // -(-d // BLOCK_M) // BLOCK_M * BLOCK_M
    needs = replace(needs, sums_rows=True, sums_columns=False, weighted_query=True)
    dk_rows = n if needs.dk_in_workspace else 0
    room = workspace - needs.staged_copy_bytes

    def size(overlaid: int, rows: int) -> int:
        return needs.pass_bytes(BlockSizes(rows, n, dk_rows, overlaid), d, block_n)

    def count_block_rows(overlaid: int) -> int:
        rows = _largest(m, lambda rows: size(overlaid, rows) <= room)
        if size(overlaid, rows) > room:
            return 0
        return rows - rows % wave if ALL_KEYS_ROWS <= wave <= rows < m else _even_step(m, rows)

    border = needs.overlay_border(n, d) if dk_rows else 0
    overlaid = border if count_block_rows(border) > count_block_rows(0) else 0
    rows = count_block_rows(overlaid)
    if rows < min(m, ALL_KEYS_ROWS):
        return None
    block_sizes = BlockSizes(rows, n, dk_rows, overlaid)
    return block_sizes, block_sizes, size(overlaid, rows)


def _block_sizes_with_cache(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int
) -> tuple[BlockSizes, BlockSizes, int] | None:
    """`choose_block_sizes` with a cache for as many columns as fit; None (no cache) if too few fit.

    Blocks have all rows. The first block has the cached columns. After it, the memory of the cache
    holds the gradient blocks of all other blocks. Accumulators of dK overlay their destination only
    if that leaves room for more cached columns.
    """
    m, n, d = shape
    dk_rows = n if needs.dk_in_workspace else 0
    # the memory of the cache is also the gradient block
    gradient_needs = replace(needs.gradient_needs, has_gradient_block=False)

    def size(overlaid: int, columns: int) -> int:
        block_sizes = BlockSizes(m, columns, dk_rows, overlaid)
        passes = needs.statistics_needs, gradient_needs
        other_bytes = needs.staged_copy_bytes + max(
            scheduled.pass_bytes(block_sizes, d, block_n) for scheduled in passes
        )
        return sum(map(align, needs.cached_parts(m, columns, d).values())) + other_bytes

    def has_room(overlaid: int, columns: int) -> bool:
        return size(overlaid, columns) <= workspace

    best: tuple[BlockSizes, BlockSizes, int] | None = None
    for overlaid in (0, needs.overlay_border(n, d)) if dk_rows else (0,):
        columns = _largest(n, partial(has_room, overlaid))
        if columns < n and needs.sweep is not None:
            columns -= columns % needs.sweep.block_n
        least = min(n, MIN_CACHED_COLUMNS) if best is None else best[0].cached_columns + 1
        if columns >= least:
            gradient = BlockSizes(m, columns, dk_rows, overlaid, cached_columns=columns)
            statistics = replace(gradient, overlaid=0)
            best = statistics, gradient, size(overlaid, columns) - needs.staged_copy_bytes
    return best


def _largest(most: int, has_room: Callable[[int], bool]) -> int:
    """The largest size that has room: `most`, a multiple of BLOCK_M, or a smaller power of 2."""
    if has_room(most):
        return most
    low, high = 0, -(-most // BLOCK_M)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle * BLOCK_M) else (low, middle)
    if low:
        return low * BLOCK_M
    size = BLOCK_M // 2
    while size > 1 and (size > most or not has_room(size)):
        size //= 2
    return size


def _even_step(n: int, step: int) -> int:
    """`step`, or a smaller step that covers n in as many steps, which are nearly equal then."""
    steps = -(-n // step)
    if step < BLOCK_M or steps == 1:
        return step
    return min(step, -(-n // (steps * BLOCK_M)) * BLOCK_M)
