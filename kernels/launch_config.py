"""How a problem is cut for a device: a pure function of shapes, precision, device and workspace.

A launch covers one block of the logit matrix, rows x columns, in tiles of BLOCK_M x block_n. Its
panel of dL/dx, and whatever else is temporary, has to fit the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLOCK_M = 128
SLAB = 128  # bytes of a row in one stage of the pipeline: kernels/cuda/product.cuh
RESERVED_SHARED = 1024  # by the system, for each block
LONG_SUM = 1024  # products from which sums are taken in two levels

# bytes of an operand's element (bf16x3: two halves), of dL/dx's element, and of accumulators
OPERAND_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16x3": 4, "bf16": 2, "fp16": 2}
ACCUMULATOR_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16x3": 4, "bf16": 4, "fp16": 4}


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


def tile(precision: str, d: int, device: Device) -> Tile:
    """The tile with the deepest pipeline that the device's shared memory holds.

    Two blocks on a multiprocessor where registers allow: one computes products while the other has
    its epilogue.
    """
    two_levels = precision in ("fp32", "bf16x3") or (precision != "fp64" and d > LONG_SUM)
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

    def accumulator_row(self, d: int) -> int:
        return d * ACCUMULATOR_BYTES[self.precision]

    def block(self, rows: int, columns: int, d: int, block_n: int) -> int:
        """Bytes for a block of rows x columns."""
        pair = 2 * ACCUMULATOR_BYTES[self.precision]
        operand_row = padded(d, self.precision) * OPERAND_BYTES[self.precision]
        total = pair * rows * -(-columns // block_n)
        if self.columns:
            total += pair * columns * -(-rows // BLOCK_M)
        total += (self.staged_query * rows + self.staged_key * columns) * operand_row
        if self.gradient:
            total += rows * panel_stride(columns) * OPERAND_BYTES[self.precision]
        if self.query_accumulator:
            total += rows * self.accumulator_row(d)
        return total


def padded(d: int, precision: str) -> int:
    """Elements in a staged row: whole pieces of 16 bytes (of each half)."""
    piece = 8 if precision in ("bf16x3", "bf16", "fp16") else 16 // OPERAND_BYTES[precision]
    return -(-d // piece) * piece


def panel_stride(columns: int) -> int:
    """Elements from row to row of a panel."""
    return -(-columns // 8) * 8


@dataclass(frozen=True)
class Cut:
    """Sizes of the blocks, and how many rows of dK are gathered at once (0: where they belong)."""

    rows: int
    columns: int
    key_rows: int


def cut(
    shape: tuple[int, int, int], needs: Needs, workspace: int, block_n: int, square: bool
) -> Cut:
    """The largest blocks that fit, near square: panels cost traffic in proportion to their edges.

    `square`: the same ranges for rows and columns (symmetric losses). ValueError if not even a
    single logit fits.
    """
    m, n, d = shape
    row = needs.accumulator_row(d)
    key_rows = min(n, max(1, workspace // 2 // row)) if needs.key_accumulator else 0
    room = workspace - key_rows * row

    def fits(rows: int, columns: int) -> bool:
        return needs.block(rows, columns, d, block_n) <= room

    if not fits(1, 1):
        least = needs.block(1, 1, d, block_n) + row * needs.key_accumulator
        raise ValueError(
            f"workspace: expected at least {2 * least} bytes for features of width {d}, "
            f"got {workspace}"
        )
    side = _largest(max(m, n), lambda s: fits(min(s, m), min(s, n)))
    rows, columns = min(side, m), min(side, n)
    if not square:
        columns = _largest(n, lambda c: fits(rows, c))
        rows = _largest(m, lambda r: fits(r, columns))
    return Cut(_even(m, rows), _even(n, columns), key_rows)


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
