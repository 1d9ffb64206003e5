"""The state of a call on the CPU that its folds share: operands, threads and kept logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..grid import Grid
from ..problem import Array, Problem
from .operands import Side
from .workers import BUFFER_POOL

Block = tuple[int, int]  # (row panel, column block)


@dataclass(eq=False)
class Context:
    """Operands of a call, its threads, and the logits that a fold keeps for the next fold."""

    dtype: np.dtype[Any]  # dtype of products and accumulators
    query: Side
    key: Side
    threads: int
    gradient: bool  # whether the call computes gradients
    both_folds: bool  # whether both folds run, so that the first may keep logits for the second
    query_in_place: bool  # whether dQ accumulates in its destination
    accumulators: int  # rows of dK that accumulate in the workspace; 0: in their destination
    further_tiles: int = 0  # tiles in a worker's buffers, in addition to the logits of its block
    auxiliary_query: Side | None = None  # features of a guide, or of a teacher
    auxiliary_key: Side | None = None
    has_teacher: bool = False
    # Logits that the log-sum-exp fold keeps for the gradient fold, as far as the workspace has room
    kept_logits: dict[Block, Array] = field(default_factory=dict)
    kept_memory: Array | None = None
    kept_grid: Grid | None = None
    # The buffers of workers of the log-sum-exp fold, by the block whose logits a buffer still has
    worker_memory: dict[Block, Array] = field(default_factory=dict)

    def block_elements(self, m: int, n: int) -> int:
        """Elements of the memory of a block: logits [m, n], and a guide's bits or teacher's logits.

        The bits of a guide take one byte for four rows of a column.
        """
        if self.auxiliary_query is None or self.has_teacher:
            return m * n * (1 + self.has_teacher)
        bits = -(-m // 4) * n
        return m * n + -(-bits // self.dtype.itemsize)

    def split_block(self, memory: Array, m: int, n: int) -> tuple[Array, Array | None]:
        """The parts of a block's memory: logits [m, n]; a guide's bits or a teacher's logits."""
        x, rest = memory[: m * n].reshape(m, n), memory[m * n :]
        if self.auxiliary_query is None:
            return x, None
        if self.has_teacher:
            return x, rest[: m * n].reshape(m, n)
        return x, rest.view(np.uint8)[: -(-m // 4) * n].reshape(-1, n)

    def worker_elements(self, d: int, bm: int, bn: int) -> int:
        """Elements in the buffers of a worker."""
        elements = self.block_elements(bm, bn) + self.further_tiles * bm * bn
        for side, rows in ((self.auxiliary_query, bm), (self.auxiliary_key, bn)):
            if side is not None and not side.readable_in_place:
                elements += rows * side.features.shape[1]
        for side, rows in ((self.query, bm), (self.key, bn)):
            elements += 0 if side.readable_in_place else rows * d
        accumulator = 0 if self.query_in_place else bm * d
        return int(elements + self.gradient * (accumulator + max(bm, bn) * d))

    def worker_bytes(self, d: int, bm: int, bn: int) -> int:
        """Bytes of the buffers of a worker."""
        return self.worker_elements(d, bm, bn) * self.dtype.itemsize

    def keep_logits(self, problem: Problem, grid: Grid) -> None:
        """Allocate memory for the logits of as many blocks as the workspace has room for."""
        m, n, d = problem.shape
        room = problem.workspace - self.threads * self.worker_bytes(d, *grid.largest)
        room -= self.accumulators * d * self.dtype.itemsize
        places = {}
        used = lacking = 0  # elements; bytes
        blocks = [(a, b) for a in range(len(grid.rows)) for b in grid.visits(a)]
        for a, b in sorted(blocks, key=lambda block: block[1]):  # each panel keeps as many
            if not grid.triangle and a < self.threads and b == 0 and problem.method != "fused":
                continue  # the last block of a worker stays in the worker's buffer
            rows, columns = grid.rows[a], grid.columns[b]
            lengths = rows.stop - rows.start, columns.stop - columns.start
            elements = self.block_elements(*lengths)
            size = elements * self.dtype.itemsize
            lacking += max(0, size - room)
            if size <= room:
                room -= size
                places[a, b] = slice(used, used + elements)
                used += elements
        self.kept_grid = grid
        self.kept_memory = memory = BUFFER_POOL.take(used, self.dtype)
        self.kept_logits = {block: memory[place] for block, place in places.items()}
        if problem.method == "fused" and lacking:
            raise ValueError(
                f'method: "fused" keeps the {m} x {n} logits within workspace = '
                f'{problem.workspace} bytes, which lacks {lacking}; expected method="tiled" or '
                "a larger workspace"
            )

    def take_kept_logits(self, grid: Grid) -> dict[Block, Array]:
        """The logits of blocks that the log-sum-exp fold has kept, for the gradient fold.

        The gradient fold overwrites the logits. If keys are divided into ranges, the gradient fold
        has other blocks, and the result is empty.
        """
        kept = self.kept_logits if self.kept_grid == grid else {}
        self.kept_logits = {}
        return kept

    def take_worker_memory(self, grid: Grid, panel: int) -> tuple[Array | None, Block | None]:
        """A buffer of a worker of the log-sum-exp fold, for a worker that begins with `panel`.

        Returns (buffer, block) if the buffer has the logits of the first block of `panel`. Returns
        (buffer, None) if its logits are of a block with which no worker begins. Returns
        (None, None) if there is no such buffer.
        """
        first_block = panel, 0
        if self.kept_grid == grid and first_block in self.worker_memory:
            return self.worker_memory.pop(first_block), first_block
        for block in list(self.worker_memory):
            if self.kept_grid != grid or block[1] or block[0] >= self.threads:
                return self.worker_memory.pop(block, None), None
        return None, None

    def release(self) -> None:
        """Return all memory to the pool, after the gradient fold."""
        if self.kept_memory is not None:
            BUFFER_POOL.give(self.kept_memory)
            self.kept_memory = None
            while self.worker_memory:
                BUFFER_POOL.give(self.worker_memory.popitem()[1])
