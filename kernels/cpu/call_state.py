"""The state of a call on the CPU that its passes share: operands, and logits that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..grid import Grid
from ..problem import Array, Problem
from .operands import Side
from .resources import BUFFER_POOL
from .schedule import CPUSchedule

Block = tuple[int, int]  # (row block, column block)


@dataclass(eq=False)
class CallState:
    """Operands of a call, its schedule, and the logits that a pass keeps for the next pass."""

    dtype: np.dtype[Any]  # dtype of products and accumulators
    query: Side
    key: Side
    schedule: CPUSchedule
    auxiliary_query: Side | None = None  # features of a guide, or of a teacher
    auxiliary_key: Side | None = None
    # Dot products of blocks, which the log-sum-exp pass keeps for the gradient pass, as far as the
    # workspace has room
    kept_logits: dict[Block, Array] = field(default_factory=dict)
    kept_memory: Array | None = None
    kept_grid: Grid | None = None
    # Buffers that workers of a log-sum-exp pass in reverse order have left to the gradient pass, by
    # the block whose logits a buffer still has
    left_buffers: dict[Block, Array] = field(default_factory=dict)

    def keep_logits(self, problem: Problem, grid: Grid) -> None:
        """Allocate memory for the logits of as many blocks as the workspace has room for.

        The log-sum-exp pass of a call with both passes calls this before it begins. A pass in
        reverse order (`CPU.run_pass` decides) ends in column block 0. So the last block of each
        worker is in column block 0, and its logits stay in the worker's buffer.
        """
        (m, n, d), schedule = problem.shape, self.schedule
        room = problem.workspace - schedule.threads * schedule.memory.worker_bytes(*grid.largest)
        room -= schedule.dk_accumulator_rows * d * self.dtype.itemsize
        # A forward pass leaves no buffers, and the method `fused` keeps all blocks
        forwards = grid.triangle or problem.retrieval_ranks
        leaves_buffers = not forwards and problem.method != "fused"
        places = {}
        used_elements = lacking_bytes = 0
        blocks = [(a, b) for a in range(len(grid.rows)) for b in grid.visits(a)]
        # In the order of column blocks, so that all row blocks keep equally many. A row block with
        # more would be done early in the gradient pass, and its thread would wait for the others
        for a, b in sorted(blocks, key=lambda block: block[1]):
            # Skip the last block of each worker, whose logits stay in the worker's buffer
            if leaves_buffers and a < schedule.threads and b == 0:
                continue
            rows, columns = grid.rows[a], grid.columns[b]
            lengths = rows.stop - rows.start, columns.stop - columns.start
            elements = schedule.memory.block_elements(*lengths)
            size = elements * self.dtype.itemsize
            lacking_bytes += max(0, size - room)
            if size <= room:
                room -= size
                places[a, b] = slice(used_elements, used_elements + elements)
                used_elements += elements
        self.kept_grid = grid
        self.kept_memory = memory = BUFFER_POOL.take(used_elements, self.dtype)
        self.kept_logits = {block: memory[place] for block, place in places.items()}
        if problem.method == "fused" and lacking_bytes:
            raise ValueError(
                f'method: "fused" keeps the {m} x {n} logits within workspace = '
                f"{problem.workspace} bytes, which lacks {lacking_bytes}; expected "
                'method="tiled" or a larger workspace'
            )

    def take_kept_logits(self, grid: Grid) -> dict[Block, Array]:
        """The logits of blocks that the log-sum-exp pass has kept, for the gradient pass.

        The gradient pass overwrites the logits. If keys are divided into ranges, the gradient pass
        has other blocks, and the result is empty.
        """
        kept_logits = self.kept_logits if self.kept_grid == grid else {}
        self.kept_logits = {}
        return kept_logits

    def take_left_buffer(self, grid: Grid, row_block: int) -> tuple[Array | None, Block | None]:
        """One of `left_buffers`, for a worker of the gradient pass that begins with `row_block`.

        Returns the first of these that exists:

        - (buffer, block): the buffer has the logits of `block`, the first of `row_block`;
        - (buffer, None): the buffer has logits of a block with which no worker will begin, so the
          worker uses only its memory;
        - (None, None).
        """
        first_block = row_block, 0
        same_grid, threads = self.kept_grid == grid, self.schedule.threads
        memory = self.left_buffers.pop(first_block, None) if same_grid else None
        if memory is not None:
            return memory, first_block
        # A worker that begins with row block `threads` or later is late: another worker has taken a
        # second row block already. A buffer may have logits of that second row block. No worker
        # will begin with them, so the late worker takes the buffer: with new memory, the call would
        # exceed its workspace.
        any_buffer = not same_grid or row_block >= threads
        for block in list(self.left_buffers):
            if any_buffer or block[1] or block[0] >= threads:
                memory = self.left_buffers.pop(block, None)
                if memory is not None:  # another thread may have taken it
                    return memory, None
        return None, None

    def release(self) -> None:
        """Return all memory to the pool. `CPU.run_pass` calls this after the gradient pass."""
        if self.kept_memory is not None:
            BUFFER_POOL.give(self.kept_memory)
            self.kept_memory = None
            while self.left_buffers:
                BUFFER_POOL.give(self.left_buffers.popitem()[1])
