"""How a small batch runs in one launch, the method fused: its kernel, grid and memory.

method.py decides which calls take it, kernels/gpu/fused.py launches it, and the kernel is in
kernels/cuda/fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..config import Parts
from .passes import ScheduledKernel

THREADS = 256  # of a thread block
TILE = 64  # rows and columns of a tile
STEP_BYTES = 128  # bytes of a row in one step of a product
MAX_FEATURE_PARTS = 16  # see `OneLaunch.parts`


@dataclass(frozen=True)
class OneLaunch:
    """The launch for a batch.

    All thread blocks must run at once, because they wait for each other at barriers.
    """

    kernel: ScheduledKernel
    blocks: int  # thread blocks
    # Ranges of features. Each has a matrix of partial logits, so that the products of few logit
    # tiles occupy the device
    parts: int
    memory: Parts  # of its temporary memory, one after another

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def offsets(self) -> dict[str, int]:
        """The byte at which each part of the memory begins."""
        starts = accumulate(self.memory.values(), initial=0)
        return dict(zip(self.memory, starts, strict=False))


def one_launch(
    shape: tuple[int, int, int], dtype: str, double: bool, symmetric: bool, two_sided: bool,
    sigmoid: bool, normalize: bool, ids: int, gradient_tiles: int, workspace: int,
    multiprocessors: int,
) -> OneLaunch:  # fmt: skip
    """The launch for queries and keys of one dtype. `ids`: columns of ids, or 0.

    `double`: sums and logits are float64. `gradient_tiles`: the tiles of TILE queries, and of TILE
    keys, whose gradients are wanted.
    """
    (m, n, d), item = shape, 8 if double else 4
    query_tiles, key_tiles = -(-m // TILE), -(-n // TILE)
    logit_tiles = key_tiles * (key_tiles + 1) // 2 if symmetric else query_tiles * key_tiles
    max_matrices = workspace // (m * n * item)  # M x N matrices for which there is room
    steps = -(-d * item // STEP_BYTES)
    parts = max(1, min(MAX_FEATURE_PARTS, steps, multiprocessors // logit_tiles, max_matrices))
    # the most units of work of a phase: products of tiles, or rows
    work = max(logit_tiles * parts, gradient_tiles * -(-d // TILE), m, n)
    # at least two matrices, for logits and dL/dx; vectors of row_... have M numbers, column_... N
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
        "NORMALIZE": int(normalize), "IDS": ids,
    }  # fmt: skip
    kernel = ScheduledKernel("fused/fused.cu", "fused", THREADS, tuple(options.items()))
    aligned = {name: -(-size // 8) * 8 for name, size in memory}
    return OneLaunch(kernel, min(multiprocessors, work), parts, aligned)
