"""The tile of logits that a thread block of kernels/cuda/tiled computes, and its shared memory.

These portable kernels run where sweep.py has no sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .precision import ACCUMULATOR_BYTES, K_SLICE, DeviceProperties

BLOCK_M = 128  # rows of a tile
# Bytes of the marks of one row and MARKED_COLUMNS columns, a bit each (cuda/block/options.cuh)
MARKED_COLUMNS, MARK_BYTES = 128, 16
RESERVED_SHARED = 1024  # bytes of each block's shared memory that the system takes
# Products of rows of more than TWO_LEVEL_FEATURES features are added in two levels. In one sum over
# all features, tensor cores, which truncate when they add, would lose digits that a scale of 200
# makes visible (cuda/tiled/product.cuh)
TWO_LEVEL_FEATURES = 1024


@dataclass(frozen=True)
class Tile:
    """The shape of a tile: the -D options of its kernels, and the thread blocks of a launch."""

    block_n: int  # columns of a tile
    warp_n: int = 32  # columns of a warp's part of the tile
    stages: int = 2  # of the pipeline
    levels: int = 2  # 2: products are sums of sums, for accuracy, in twice the registers
    min_blocks: int = 1  # thread blocks on a multiprocessor; the compiler limits registers for it
    real: int = 4  # bytes of a logit
    real_count: int = 0  # vectors of real numbers for options of pairs (`Call.real_count`)
    integer_count: int = 0  # vectors of integers for options of pairs (`Call.integer_count`)
    guided: bool = False  # pairs have marks of a guide
    taught: bool = False  # a tile has a second product, of a teacher's features

    query_tile_rows = BLOCK_M

    @property
    def threads(self) -> int:
        """Threads of a thread block: a warp for each part of 64 rows and `warp_n` columns."""
        return BLOCK_M // 64 * (self.block_n // self.warp_n) * 32

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * (BLOCK_M + self.block_n) * K_SLICE

    @property
    def static_shared(self) -> int:
        """An upper bound of the bytes of static shared memory.

        Kernels declare positives, ids, groups, positive ids and factors of rows and columns, and
        either the sums of warps or the factors of gradient blocks. With a teacher, they declare
        both of these, and most arrays twice.
        """
        sides = BLOCK_M + self.block_n
        sums = 3 * (self.block_n // self.warp_n * BLOCK_M + 2 * self.block_n)
        factors = 3 * BLOCK_M + 2 * self.block_n
        vectors = (1 + self.real_count) * sides
        integers = BLOCK_M + (1 + self.integer_count) * sides
        marks = self.guided * 2 * BLOCK_M * MARK_BYTES
        if self.taught:
            strips = self.block_n // self.warp_n * BLOCK_M + 2 * self.block_n
            return 2 * 8 * integers + self.real * (2 * (vectors + factors) + sides + 2 * strips)
        return 8 * integers + self.real * (vectors + max(sums, factors)) + marks

    def blocks(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Thread blocks of a launch: as many as run at once. Each computes one or more tiles."""
        tiles = -(-rows // BLOCK_M) * -(-columns // self.block_n)
        return min(tiles, self.min_blocks * multiprocessors)

    @property
    def square(self) -> bool:
        """Whether tiles are square, so that a launch can visit one triangle of them."""
        return self.block_n == BLOCK_M

    def row_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each row: one for each tile."""
        return -(-columns // self.block_n)

    def column_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each column."""
        return -(-rows // BLOCK_M)

    def max_row_partials(self, rows: int, columns: int) -> int:
        """All partial sums of rows, for launches of up to rows x columns."""
        return rows * self.row_slots(rows, columns)

    def max_column_partials(self, rows: int, columns: int) -> int:
        """All partial sums of columns, for launches of up to rows x columns."""
        return columns * self.column_slots(rows, columns)


@lru_cache
def tile_for(
    precision: str,
    d: int,
    device: DeviceProperties,
    real_count: int = 0,
    integer_count: int = 0,
    guided: bool = False,
    taught: bool = False,
) -> Tile:
    """The first of the candidates, best first, that fits the device's shared memory.

    Two thread blocks share a multiprocessor if registers and shared memory allow it. Then one
    thread block computes products while the other runs its epilogue. Sums in two levels take twice
    the registers, so a multiprocessor has one thread block, and a warp has 64 x 32 products in
    place of 64 x 64. Two levels are for accuracy: of fp32, of operands in two parts, and of rows of
    more than `TWO_LEVEL_FEATURES` features.

    ValueError if no candidate fits.

    `real_count`, `integer_count`: vectors for options of pairs, as in `Call`. `taught`: a warp has
    registers for two products, of the features and of the teacher's.
    """
    two_levels = precision in ("fp32", "fp16x3", "bf16x3") or (
        precision != "fp64" and d > TWO_LEVEL_FEATURES
    )
    levels = 2 if two_levels else 1
    # (block_n, warp_n, stages, min_blocks), best first
    candidates = [(128, 32, 3, 1), (128, 32, 2, 1), (64, 32, 2, 1)]
    if taught and precision == "fp64":
        candidates = [(64, 16, 2, 1), (32, 16, 2, 1)]
    elif levels == 1 and precision != "fp64" and not taught:  # registers for 64 x 64 products
        candidates = [(128, 64, 3, 2), (128, 64, 2, 2), *candidates]
    for block_n, warp_n, stages, blocks in candidates:
        real = ACCUMULATOR_BYTES[precision]
        candidate = Tile(
            block_n, warp_n, stages, levels, blocks, real, real_count, integer_count, guided, taught
        )
        needed = candidate.shared + candidate.static_shared
        together = blocks * (needed + RESERVED_SHARED)
        if needed <= device.shared_memory and together <= device.multiprocessor_shared_memory:
            return candidate
    raise ValueError(
        f"device of compute capability {device.capability}: expected at least {needed} bytes of "
        f"shared memory a block, got {device.shared_memory}"
    )
