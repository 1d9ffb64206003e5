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
    # Logits that the log-sum-exp pass keeps for the gradient pass, as far as the workspace has room
    kept_logits: dict[Block, Array] = field(default_factory=dict)
    kept_memory: Array | None = None
    kept_grid: Grid | None = None
    # The buffers of workers of the log-sum-exp pass, by the block whose logits a buffer still has
    worker_memory: dict[Block, Array] = field(default_factory=dict)

    def keep_logits(self, problem: Problem, grid: Grid) -> None:
        """Allocate memory for the logits of as many blocks as the workspace has room for.

        The log-sum-exp pass of a call with both passes calls this. The pass runs backwards, so the
        last block of each worker is in column block 0.
        """
        (m, n, d), schedule = problem.shape, self.schedule
        room = problem.workspace - schedule.threads * schedule.memory.worker_bytes(*grid.largest)
        room -= schedule.dk_accumulator_rows * d * self.dtype.itemsize
        places = {}
        used_elements = lacking_bytes = 0
        blocks = [(a, b) for a in range(len(grid.rows)) for b in grid.visits(a)]
        # By column blocks, so that each row block keeps as many. A row block with more would be
        # done early in the gradient pass, and its thread would wait for the others
        for a, b in sorted(blocks, key=lambda block: block[1]):
            if not grid.triangle and a < schedule.threads and b == 0 and problem.method != "fused":
                continue  # the last block of a worker stays in its buffer; `fused` keeps them all
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

    def take_worker_memory(self, grid: Grid, row_block: int) -> tuple[Array | None, Block | None]:
        """A buffer of a worker of the log-sum-exp pass, for a worker that begins with `row_block`.

        Returns (buffer, block) if the buffer has the logits of the first block of `row_block`.
        Returns (buffer, None) if its logits are of no use: the worker does not begin with them,
        and no other worker will. Returns (None, None) if there is no such buffer.
        """
        first_block = row_block, 0
        same_grid, threads = self.kept_grid == grid, self.schedule.threads
        memory = self.worker_memory.pop(first_block, None) if same_grid else None
        if memory is not None:
            return memory, first_block
        # If a worker begins with row block `threads` or later, another worker has computed two row
        # blocks already. Its second row block may be one whose logits a buffer has: no worker will
        # begin with that row block, and without this buffer the call would exceed its workspace.
        any_buffer = not same_grid or row_block >= threads
        for block in list(self.worker_memory):
            if any_buffer or block[1] or block[0] >= threads:
                memory = self.worker_memory.pop(block, None)
                if memory is not None:  # another thread may have taken it
                    return memory, None
        return None, None

    def release(self) -> None:
        """Return all memory to the pool. `CPU.run_pass` calls this after the gradient pass."""
        if self.kept_memory is not None:
            BUFFER_POOL.give(self.kept_memory)
            self.kept_memory = None
            while self.worker_memory:
                BUFFER_POOL.give(self.worker_memory.popitem()[1])
