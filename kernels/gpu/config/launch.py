"""How a problem is cut for a device: a pure function of shapes, precision, device and workspace.

A launch covers one block of the logit matrix, rows x columns, in tiles of BLOCK_M x block_n. Its
panel of dL/dx, and whatever else is temporary, has to fit the workspace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from ...problem import least_side, too_small

BLOCK_M = 128
SLAB = 128  # bytes of a row in one stage of the pipeline: kernels/cuda/block.cuh
RESERVED_SHARED = 1024  # by the system, for each block
LONG_SUM = 1024  # products from which sums are taken in two levels
# "portable": the kernels that every card has, on those too that have better ones
PORTABLE = os.environ.get("INFONCE_KERNELS", "") == "portable"

# bytes of an operand's element (all its parts), of dL/dx's element, and of accumulators
OPERAND_BYTES = {
    "fp64": 8, "fp32": 4, "fp16x3": 4, "tf32": 4, "bf16x3": 4, "bf16": 2, "fp16": 2,
}  # fmt: skip
ACCUMULATOR_BYTES = {precision: 8 if precision == "fp64" else 4 for precision in OPERAND_BYTES}
PARTS = {"bf16x3": 2, "fp16x3": 2}  # of an operand: its high and low bits
FLOAT16 = ("fp16", "fp16x3")  # elements of operands


@dataclass(frozen=True)
class Device:
    """What a device offers, as its properties say."""

    capability: str  # "90"
    multiprocessors: int
    shared_memory: int  # bytes a block can have
    shared_memory_of_all: int  # bytes that the blocks of one multiprocessor share


@dataclass(frozen=True)
class Tile:
    """Shape of the tiled kernels' blocks: their -D options, and the launch that belongs to them."""

    block_n: int
    stages: int
    levels: int  # 2: sums of sums, for accuracy; in twice the registers
    min_blocks: int  # on a multiprocessor, for which the compiler limits registers

    panel_rows = BLOCK_M

    @property
    def threads(self) -> int:
        return BLOCK_M // 64 * (self.block_n // 32) * 32

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes."""
        return self.stages * (BLOCK_M + self.block_n) * SLAB

    @property
    def static_shared(self) -> int:
        """At most what kernels declare besides: positives, ids, factors, all in float64."""
        return 4 * BLOCK_M + 16 * (BLOCK_M + self.block_n) + 8 * (4 * BLOCK_M + 2 * self.block_n)

    @property
    def square(self) -> bool:
        """Whether tiles of rows are tiles of columns too: one triangle of them can be visited."""
        return self.block_n == BLOCK_M

    def row_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each row: one a tile."""
        return -(-columns // self.block_n)

    def column_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """The same for each column."""
        return -(-rows // BLOCK_M)

    def row_sums(self, rows: int, columns: int) -> int:
        """All that launches of up to rows x columns leave for rows."""
        return rows * self.row_slots(rows, columns)

    def column_sums(self, rows: int, columns: int) -> int:
        """The same for columns."""
        return columns * self.column_slots(rows, columns)


@lru_cache
def tile(precision: str, d: int, device: Device) -> Tile:
    """The tile with the deepest pipeline that the device's shared memory holds.

    Two blocks on a multiprocessor where registers allow: one computes products while the other has
    its epilogue.
    """
    two_levels = precision in ("fp32", "fp16x3", "bf16x3") or (precision != "fp64" and d > LONG_SUM)
    levels = 2 if two_levels else 1
    candidates = [(128, 3, 1), (128, 2, 1), (64, 2, 1)]
    if levels == 1 and precision != "fp64":
        candidates = [(128, 3, 2), (128, 2, 2), *candidates]
    for block_n, stages, blocks in candidates:
        candidate = Tile(block_n, stages, levels, blocks)
        needed = candidate.shared + candidate.static_shared
        together = blocks * (needed + RESERVED_SHARED)
        if needed <= device.shared_memory and together <= device.shared_memory_of_all:
            return candidate
    raise ValueError(
        f"device of compute capability {device.capability}: expected at least {needed} bytes of "
        f"shared memory a block, got {device.shared_memory}"
    )


@dataclass(frozen=True)
class Sweep:
    """Shape of the persistent kernels for Hopper (kernels/cuda/sm90/sweep.cuh), not of tiles."""

    slabs: int  # of a row
    wide: bool  # a cluster of two blocks shares a panel of rows
    streamed: bool  # rows do not stay in shared memory
    workers: int  # blocks, or clusters of two, that run at once
    shared_memory: int  # bytes that a block can have
    extras: bool  # ids, or factors of normalised rows
    narrow: bool = False  # what comes of logits meets the keys at once; panels are of 64 rows

    block_n = BLOCK_M
    square = True  # panels have as many rows as tiles have columns

    def stages(self, panel: bool) -> int:
        """How many slabs are under way; of kernels that write a panel, or of others."""
        left = self.shared_memory - self.reserved(panel) - self.panel_bytes
        if self.narrow:  # whole tiles
            return min(6, left // self.stage_bytes // self.slabs) * self.slabs
        stages = min(8, left // self.stage_bytes)
        return stages // 2 * 2 if self.streamed else stages  # both parts of some features

    @property
    def stage_bytes(self) -> int:
        """A slab of keys, and of rows if they do not stay."""
        return (2 if self.streamed else 1) * BLOCK_M * SLAB

    @property
    def panel_bytes(self) -> int:
        """Rows that stay in shared memory."""
        return 0 if self.streamed else self.slabs * self.query_box * SLAB

    @property
    def panel_rows(self) -> int:
        return BLOCK_M // 2 if self.narrow else BLOCK_M

    @property
    def query_box(self) -> int:
        """Rows that a block fetches at a time, of queries"""
        return BLOCK_M // 2 if self.wide or self.narrow else BLOCK_M

    @property
    def key_box(self) -> int:
        """and of keys."""
        return BLOCK_M // 2 if self.wide else BLOCK_M

    @property
    def warpgroups(self) -> int:
        """Two teams of one or two multiply."""
        return 2 if self.wide or self.streamed or self.narrow else 4

    def reserved(self, panel: bool) -> int:
        """Bytes of shared memory besides slabs: barriers, and what epilogues keep there."""
        of_panel = SWEEP_FACTORS + (not self.narrow) * self.warpgroups * SWEEP_PIECES
        sums = self.warpgroups * SWEEP_SUMS
        return 256 + (of_panel if panel else sums) + self.extras * SWEEP_EXTRAS

    def shared(self, panel: bool) -> int:
        """Dynamic shared memory in bytes."""
        return self.panel_bytes + self.stages(panel) * self.stage_bytes + self.reserved(panel)

    @property
    def threads(self) -> int:
        """One warpgroup more than those that multiply: it copies."""
        return 128 * self.warpgroups + 128

    @property
    def rows_at_once(self) -> int:
        return self.workers * BLOCK_M * (2 if self.wide else 1)

    def segments(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Into how many pieces a panel's tiles are cut, so that all workers are busy to the end."""
        if self.narrow:  # a panel's sum is in one block's registers
            return 1
        return _segments(self, -(-rows // BLOCK_M), -(-columns // BLOCK_M), triangle)

    def most_segments(self, rows: int, columns: int) -> int:
        """The most pieces that `row_sums` has room for: where few panels are swept, of many."""
        return _most_segments(self, -(-rows // BLOCK_M), -(-columns // BLOCK_M))

    def blocks(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Thread blocks of a launch."""
        items = -(-rows // self.panel_rows) * self.segments(rows, columns, triangle)
        return min(self.workers, items) * (2 if self.wide else 1)

    @property
    def segment_slots(self) -> int:
        """Partial sums that a segment leaves for each row: one a team that meets it."""
        return 1 if self.streamed else 2

    def row_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each row."""
        return self.segment_slots * self.segments(rows, columns, triangle)

    def column_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """The same for each column: one a block and half of its panels."""
        return self.blocks(rows, columns, triangle) * (1 if self.wide else 2)

    def row_sums(self, rows: int, columns: int) -> int:
        """All that launches of up to rows x columns leave for rows."""
        tiles = -(-columns // BLOCK_M)
        return 2 * max(rows, min(rows * tiles, MOST_ROUNDS * self.workers * BLOCK_M))

    def column_sums(self, rows: int, columns: int) -> int:
        """The same for columns."""
        items = -(-rows // BLOCK_M) * -(-columns // BLOCK_M)
        return 2 * columns * min(self.workers, items)


@lru_cache(4096)
def _segments(sweep: Sweep, panels: int, tiles: int, triangle: bool) -> int:
    if triangle:
        tiles = tiles // 2 + tiles % 2  # what every panel has at least

    def cost(segments: int) -> float:
        rounds = -(-panels * segments // sweep.workers)
        return rounds * (-(-tiles // segments) + PANEL_COST / sweep.slabs)

    return min(range(1, _most_segments(sweep, panels, tiles) + 1), key=cost)


def _most_segments(sweep: Sweep, panels: int, tiles: int) -> int:
    return min(tiles, max(1, MOST_ROUNDS * sweep.workers // panels))


SWEEP_PRECISIONS = ("fp16x3", "bf16x3", "bf16", "fp16")
MOST_ROUNDS = 8  # pieces a worker gets where panels are cut
# bytes that epilogues keep in shared memory
SWEEP_SUMS = 4 * 1024  # sums of columns, of each warpgroup
SWEEP_PIECES = 8 * 1024  # of the panel, of each warpgroup
SWEEP_FACTORS = 2 * 1024  # of columns
SWEEP_EXTRAS = 3 * 1024  # ids and factors of normalised columns
PANEL_COST = 14.0  # start and end of a panel, in products of a slab


@lru_cache
def sweep(precision: str, width: int, device: Device, extras: bool) -> Sweep | None:
    """The persistent kernels' shape for rows of `width` bytes in each part; None where they do not
    apply.

    `extras`: ids or factors of normalised rows.
    """
    if device.capability != "90" or precision not in SWEEP_PRECISIONS:
        return None
    slabs = -(-width // SLAB) * PARTS.get(precision, 1)
    streamed = precision == "fp16x3"
    if slabs > 16 and not streamed:
        return None
    wide = slabs > 8 and not streamed
    workers = device.multiprocessors // (2 if wide else 1)
    return Sweep(slabs, wide, streamed, workers, device.shared_memory, extras)


def narrow(wide: Sweep | None, precision: str, rows: int) -> Sweep | None:
    """Where P need not leave the registers: rows of up to 256 bytes, and enough panels of them."""
    if wide is None or wide.slabs > 2 or precision not in ("bf16", "fp16"):
        return None
    return replace(wide, narrow=True) if rows >= wide.workers * BLOCK_M // 4 else None


def operands(precision: str, device: Device) -> str:
    """How operands are held. Where tensor cores are this fast, float32 is the sum of two float16
    parts, and a product that of three of theirs, about as accurate as by float32's own arithmetic;
    and float16 has TF32's mantissa, at twice the speed. Features and panels are brought to its
    range."""
    if device.capability != "90" or PORTABLE:
        return precision
    return {"fp32": "fp16x3", "tf32": "fp16"}.get(precision, precision)


def lost(precision: str, width: int) -> float:
    """Relative truncation bias of a sum of products of `width` bytes of each operand.

    Hopper's tensor cores add 32 bytes of each at a time and then cut bits off, where rounding would
    as often add some. Sums whose terms have one sign lose most, those of mixed signs least: the
    figures, in units of 2^-24 a step, lie halfway between the two as they were measured
    (benchmarks/NOTES.md).
    """
    a_step = {"fp16x3": 0.6, "bf16": 0.35, "bf16x3": 0.7, "fp16": 0.8}
    return a_step.get(precision, 0.0) * 2.0**-24 * -(-width // 32)


def cut_off(precision: str, width: int) -> float:
    """The same of a sweep's products of rows of `width` bytes (in each part). With fp16x3 it adds
    sums of half a slab each, which lose little and nearly the same, whatever their signs."""
    return lost(precision, min(width, SLAB // 2) if precision == "fp16x3" else width)


def supported(precision: str, device: Device) -> bool:
    """Tensor cores of the kinds that the kernels use came with compute capability 8.0."""
    return precision in ("fp64", "fp32") or int(device.capability) >= 80


@dataclass(frozen=True)
class Needs:
    """What is temporary in a fold, besides vectors of length M and N."""

    precision: str
    staged_query: bool  # operands are converted or normalised copies
    staged_key: bool
    columns: bool  # columns have sums of their own
    gradient: bool
    query_accumulator: bool  # dQ of a panel is gathered in the workspace
    key_accumulator: bool  # dK, or in the symmetric case the gradient of all rows
    sweep: Sweep | None = None  # instead of tiles
    rows: bool = True  # rows have sums
    lends: int = 0  # so many rows of dK's destination have room for one in the making (0: none)

    @property
    def of_statistics(self) -> Needs:
        """Of the log-sum-exp fold alone."""
        return replace(
            self, gradient=False, query_accumulator=False, key_accumulator=False, rows=True
        )

    @property
    def of_gradient(self) -> Needs:
        """Of the gradient fold alone."""
        return replace(self, columns=False)

    def accumulator_row(self, d: int) -> int:
        return d * ACCUMULATOR_BYTES[self.precision]

    def block(self, rows: int, columns: int, d: int, block_n: int) -> int:
        """Bytes for a block of rows x columns."""
        pair = 2 * ACCUMULATOR_BYTES[self.precision]
        operand_row = padded(d, self.precision) * OPERAND_BYTES[self.precision]
        tile = self.sweep or Tile(block_n, 1, 1, 1)
        total = pair * tile.row_sums(rows, columns) if self.rows else 0
        if self.columns:
            total += pair * tile.column_sums(rows, columns)
        total += (self.staged_query * rows + self.staged_key * columns) * operand_row
        if self.gradient:
            total += self.panel(rows, columns, d)
        if self.query_accumulator:
            total += rows * self.accumulator_row(d)
        return total

    def panel(self, rows: int, columns: int, d: int) -> int:
        """Bytes for dL/dx of a block; a gradient's row at least, as finished ones may pass here."""
        size = rows * panel_stride(columns, self.precision) * OPERAND_BYTES[self.precision]
        return max(size, self.accumulator_row(d))

    def size(self, cut: Cut, d: int, block_n: int) -> int:
        """Bytes for the largest block of a cut, and all that is gathered meanwhile."""
        gathered = (cut.key_rows - cut.lent) * self.accumulator_row(d)
        return self.block(cut.rows, cut.columns, d, block_n) + gathered


def padded(d: int, precision: str) -> int:
    """Elements in a staged row, or in each of its parts: whole pieces of 16 bytes; where there are
    parts, whole slabs, as a slab must not hold some of two."""
    piece = SLAB // 2 if precision in PARTS else 16 // OPERAND_BYTES[precision]
    return -(-d // piece) * piece


def panel_stride(columns: int, precision: str) -> int:
    """Elements in a row of a panel, or in each of its parts: these lie beside each other, and tiles
    are written whole."""
    piece = BLOCK_M if precision in PARTS else 8
    return -(-columns // piece) * piece


@dataclass(frozen=True)
class Cut:
    """Sizes of the blocks, how many rows of dK are gathered at once (0: where they belong), and how
    many of these, the first, in memory that dK's destination lends."""

    rows: int
    columns: int
    key_rows: int
    lent: int = 0


def least_workspace(shape: tuple[int, int, int], needs: Needs, block_n: int) -> int:
    """Bytes for the least blocks that are `few`, of a size that `_largest` finds."""
    m, n, d = shape
    side = least_side(m, n)
    side = -(-side // BLOCK_M) * BLOCK_M if side > BLOCK_M // 2 else 1 << (side - 1).bit_length()
    least = needs.block(min(side, m), min(side, n), d, block_n)
    if needs.key_accumulator:
        least = 2 * max(least, min(side, n) * needs.accumulator_row(d))
    return least


@lru_cache(1024)
def cut(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, square: bool
) -> Cut:
    """The largest blocks that fit, near square: panels cost traffic in proportion to their edges.

    dK is gathered in up to half of the workspace. Where it would take more than a quarter, its
    destination lends what it can, if that makes all of it fit; blocks do not straddle the border.

    `square`: the same ranges for rows and columns (symmetric losses).
    """
    m, n, d = shape
    row = needs.accumulator_row(d)
    most = max(1, workspace // 2 // row)
    key_rows, lent = min(n, most) if needs.key_accumulator else 0, 0
    if needs.lends and 2 * key_rows > most:
        border = n // needs.lends // BLOCK_M * BLOCK_M
        if border and n - border <= most:
            key_rows, lent = n, border
    room = workspace - (key_rows - lent) * row
    n -= lent
    m = n if square else m

    def fits(rows: int, columns: int) -> bool:
        return needs.block(rows, columns, d, block_n) <= room

    if needs.sweep is not None and needs.gradient and not square:
        # As many rows as panels run at once, or half, if columns are not too few for the products
        for share in (1, 2):
            rows = _even(m, min(m, needs.sweep.rows_at_once // share))
            if fits(rows, min(n, rows // 4)):
                columns = _largest(n, partial(fits, rows))
                return Cut(rows, _even(n, columns), key_rows, lent)
    side = _largest(max(m, n), lambda s: fits(min(s, m), min(s, n)))
    rows, columns = min(side, m), min(side, n)
    if not square:
        columns = _largest(n, partial(fits, rows))
        rows = _largest(m, lambda r: fits(r, columns))
    return Cut(_even(m, rows), _even(n, columns), key_rows, lent)


@lru_cache(1024)
def cuts(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, square: bool
) -> tuple[Cut, Cut, int]:
    """How the log-sum-exp fold is cut and, with its panels in smaller blocks, the gradient fold;
    and the bytes that serve both. ValueError if not even blocks fit that are `few`."""
    folds = needs.of_statistics, needs.of_gradient
    least = max(least_workspace(shape, of, block_n) for of in folds)
    if workspace < least:
        raise ValueError(too_small(shape, least, workspace))
    first, second = (cut(shape, of, workspace, block_n, square) for of in folds)
    sizes = (of.size(c, shape[2], block_n) for of, c in zip(folds, (first, second), strict=True))
    return first, second, max(sizes)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest size up to `limit` that fits: a multiple of BLOCK_M, or a power of 2 below, or
    `limit` itself."""
    if fits(limit):
        return limit
    low, high = 0, -(-limit // BLOCK_M)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * BLOCK_M) else (low, middle)
    if low:
        return low * BLOCK_M
    size = BLOCK_M // 2
    while size > 1 and (size > limit or not fits(size)):
        size //= 2
    return size


def _even(n: int, step: int) -> int:
    """As many parts as steps of `step` make, but of about the same size."""
    parts = -(-n // step)
    if step < BLOCK_M or parts == 1:
        return step
    return min(step, -(-n // (parts * BLOCK_M)) * BLOCK_M)
