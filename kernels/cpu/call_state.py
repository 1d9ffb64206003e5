"""The state of a call on the CPU that its passes share: operands, and products that are kept."""

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
    """Operands of a call, its schedule, and the products that a pass keeps for the next pass."""

    dtype: np.dtype[Any]  # dtype of products and accumulators
    query: Side
    key: Side
    schedule: CPUSchedule
    auxiliary_query: Side | None = None  # features of a guide, or of a teacher
    auxiliary_key: Side | None = None
    # Dot products of blocks, which the log-sum-exp pass keeps for the gradient pass, as far as the
    # workspace has room
    kept_products: dict[Block, Array] = field(default_factory=dict)
    kept_memory: Array | None = None
    kept_grid: Grid | None = None

    def keep_products(self, problem: Problem, grid: Grid) -> None:
        """Allocate memory for the products of as many blocks as the workspace has room for.

        The log-sum-exp pass of a call with both passes calls this before it begins.
        """
        (m, n, d), schedule = problem.shape, self.schedule
        room = problem.workspace - schedule.memory.bytes(*grid.largest)
        room -= schedule.dk_accumulator_rows * d * self.dtype.itemsize
        places = {}
        used_elements = lacking_bytes = 0
        for a in range(len(grid.rows)):
            for b in grid.visits(a):
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
        self.kept_products = {block: memory[place] for block, place in places.items()}
        if problem.method == "fused" and lacking_bytes:
            raise ValueError(
                f'method: "fused" keeps the {m} x {n} logits within workspace = '
                f"{problem.workspace} bytes, which lacks {lacking_bytes}; expected "
                'method="tiled" or a larger workspace'
            )

    def take_kept_products(self, grid: Grid) -> dict[Block, Array]:
        """The products of blocks that the log-sum-exp pass has kept, for the gradient pass.

        The gradient pass overwrites the products. If keys are divided into ranges, the gradient
        pass has other blocks, and the result is empty.
        """
        kept_products = self.kept_products if self.kept_grid == grid else {}
        self.kept_products = {}
        return kept_products

    def release(self) -> None:
        """Return all memory to the pool. `CPU.run_pass` calls this after the gradient pass."""
        if self.kept_memory is not None:
            BUFFER_POOL.give(self.kept_memory)
            self.kept_memory = None
