"""Shape of the tiled kernels' thread blocks (kernels/cuda/tiled)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .precision import ACCUMULATOR_BYTES, K_SLICE, DeviceProperties

BLOCK_M = 128  # rows of a tile
RESERVED_SHARED = 1024  # bytes that the system takes of each block's shared memory
TWO_LEVEL_FEATURES = 1024  # features from which products are added in two levels


@dataclass(frozen=True)
class Tile:
    """Shape of the tiled kernels' thread blocks: their -D options, and the launch they need."""

    block_n: int
    warp_n: int = 32  # columns of a warp's products
    stages: int = 2
    levels: int = 2  # 2: sums of sums, for accuracy; in twice the registers
    min_blocks: int = 1  # on a multiprocessor, for which the compiler limits registers
    real: int = 4  # bytes of a logit
    limit_and_bias_count: int = 0  # how many of limits and biases pairs have
    groups: bool = False

    query_tile_rows = BLOCK_M

    @property
    def threads(self) -> int:
        return BLOCK_M // 64 * (self.block_n // self.warp_n) * 32

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes."""
        return self.stages * (BLOCK_M + self.block_n) * K_SLICE

    @property
    def static_shared(self) -> int:
        """At most what kernels declare besides: positives, ids, groups, factors, and then sums of
        strips or the numbers of which gradients are made."""
        sides = BLOCK_M + self.block_n
        sums = 3 * (self.block_n // self.warp_n * BLOCK_M + 2 * self.block_n)
        factors = 3 * BLOCK_M + 2 * self.block_n
        vectors = (1 + self.limit_and_bias_count) * sides
        names = BLOCK_M + (1 + self.groups) * sides
        return 8 * names + self.real * (vectors + max(sums, factors))

    def blocks(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Thread blocks of a launch: as many as run at once, each of which takes several tiles."""
        tiles = -(-rows // BLOCK_M) * -(-columns // self.block_n)
        return min(tiles, self.min_blocks * multiprocessors)

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
def tile_for(
    precision: str,
    d: int,
    device: DeviceProperties,
    limit_and_bias_count: int = 0,
    groups: bool = False,
) -> Tile:
    """The tile with the deepest pipeline that the device's shared memory holds.

    `limit_and_bias_count`: how many of limits and biases pairs have. `groups`: whether rows and
    columns have groups.

    Two blocks on a multiprocessor where registers and shared memory allow: one computes products
    while the other has its epilogue.
    """
    two_levels = precision in ("fp32", "fp16x3", "bf16x3") or (
        precision != "fp64" and d > TWO_LEVEL_FEATURES
    )
    levels = 2 if two_levels else 1
    candidates = [(128, 32, 3, 1), (128, 32, 2, 1), (64, 32, 2, 1)]
    if levels == 1 and precision != "fp64":  # there are registers for 64 x 64 products a warp
        candidates = [(128, 64, 3, 2), (128, 64, 2, 2), *candidates]
    for block_n, warp_n, stages, blocks in candidates:
        real = ACCUMULATOR_BYTES[precision]
        candidate = Tile(
            block_n, warp_n, stages, levels, blocks, real, limit_and_bias_count, groups
        )
        needed = candidate.shared + candidate.static_shared
        together = blocks * (needed + RESERVED_SHARED)
        if needed <= device.shared_memory and together <= device.shared_memory_of_all:
            return candidate
    raise ValueError(
        f"device of compute capability {device.capability}: expected at least {needed} bytes of "
        f"shared memory a block, got {device.shared_memory}"
    )
