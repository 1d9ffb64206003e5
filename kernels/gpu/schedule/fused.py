"""How a small batch runs in one launch, the method fused: its kernel, grid and memory. See
kernels/cuda/fused; method.py decides which calls take it."""

from __future__ import annotations

from dataclasses import dataclass

from .passes import Part, ScheduledKernel

THREADS = 256
TILE = 64  # rows and columns of a tile
CHUNK_BYTES = 128  # of a row, in one step of a product
MOST_PARTS = 16


@dataclass(frozen=True)
class OneLaunch:
    """The launch for a batch: the grid's barrier needs all of its blocks to run at once."""

    kernel: ScheduledKernel
    blocks: int
    parts: int  # of the features in the products, to have work for the device
    memory: tuple[Part, ...]  # one after another

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.memory)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part of the memory begins."""
        starts, start = {}, 0
        for part in self.memory:
            starts[part.name] = start
            start += part.bytes
        return starts


def one_launch(
    shape: tuple[int, int, int], dtype: str, double: bool, symmetric: bool, two_sided: bool,
    sigmoid: bool, normalize: bool, ids: bool, gradient_tiles: int, workspace: int,
    multiprocessors: int,
) -> OneLaunch:  # fmt: skip
    """The launch for features of one dtype. `gradient_tiles`: how many tiles of rows have one."""
    (m, n, d), item = shape, 8 if double else 4
    down, across = -(-m // TILE), -(-n // TILE)
    logit_tiles = across * (across + 1) // 2 if symmetric else down * across
    room = min(MOST_PARTS, workspace // (m * n * item))  # for so many M x N matrices
    chunks = -(-d * item // CHUNK_BYTES)
    parts = max(1, min(MOST_PARTS, chunks, multiprocessors // logit_tiles, room))
    work = max(logit_tiles * parts, gradient_tiles * -(-d // TILE), m, n)
    memory = [("logits", max(parts, 2) * m * n * item), ("row_inverse", 8 * m), ("row_nans", 8 * m)]
    if not symmetric:
        memory += [("column_inverse", 8 * n), ("column_nans", 8 * n)]
    memory += [("row_gap", 8 * m), ("row_dot", 8 * m), ("row_sum", 8 * m)]
    memory += [("column_gap", 8 * n), ("column_dot", 8 * n)]
    memory += [("row_reference", m * item), ("row_factor", m * item)]
    if two_sided and not symmetric:
        memory += [("column_reference", n * item), ("column_factor", n * item)]
    options = {
        "PRECISION": "FP64" if double else "FP32", "DTYPE": f"DTYPE_{dtype.upper()}",
        "SYMMETRIC": int(symmetric), "TWO_SIDED": int(two_sided), "SIGMOID": int(sigmoid),
        "NORMALIZE": int(normalize), "IDS": int(ids),
    }  # fmt: skip
    kernel = ScheduledKernel("fused/fused.cu", "fused", THREADS, tuple(options.items()))
    memory_parts = tuple(Part(name, -(-size // 8) * 8) for name, size in memory)
    return OneLaunch(kernel, min(multiprocessors, work), parts, memory_parts)
