"""The state of one call on the CPU, which its folds share: operands, threads and kept logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..problem import Array, Grid, Problem
from .operands import Side
from .workers import SPARES

Block = tuple[int, int]  # (row panel, column block)


@dataclass(eq=False)
class Context:
    """Operands of one call, how it is cut among threads, and what one fold leaves for the next."""

    dtype: np.dtype[Any]  # of products and accumulators
    query: Side
    key: Side
    threads: int
    gradient: bool  # whether the call differentiates
    query_in_place: bool  # dQ is gathered where it is handed out
    accumulators: int  # rows of dK that are gathered apart from where it is handed out
    # Tiles of logits that the workspace has room for: the gradient fold need not recompute them
    kept: dict[Block, Array] = field(default_factory=dict)
    kept_arena: Array | None = None
    kept_grid: Grid | None = None
    # ... and the workers' own buffers, with the last tile of each in them
    left: dict[Block, Array] = field(default_factory=dict)

    def worker_elements(self, d: int, bm: int, bn: int) -> int:
        """Size of one worker's buffers, in numbers."""
        elements = bm * bn
        elements += (not self.query.direct) * bm * d + (not self.key.direct) * bn * d
        gathered = 0 if self.query_in_place else bm * d
        return int(elements + self.gradient * (gathered + max(bm, bn) * d))

    def worker_bytes(self, d: int, bm: int, bn: int) -> int:
        """Size of all workers' buffers."""
        return int(self.threads * self.worker_elements(d, bm, bn) * self.dtype.itemsize)

    def keep_logits(self, problem: Problem, grid: Grid) -> None:
        """Reserve room for the logits of as many blocks as the workspace has room for."""
        m, n, d = problem.shape
        largest = grid.rows[0].stop, grid.columns[0].stop
        room = problem.workspace - self.worker_bytes(d, *largest)
        room -= self.accumulators * d * self.dtype.itemsize
        shapes = {}
        elements = lacking = 0
        blocks = [(a, b) for a in range(len(grid.rows)) for b in grid.visits(a)]
        for a, b in sorted(blocks, key=lambda block: block[1]):  # as much in each panel
            if not grid.triangle and a < self.threads and b == 0 and problem.method != "fused":
                continue  # a worker's last: it stays in the worker's own buffer
            rows, columns = grid.rows[a], grid.columns[b]
            shape = rows.stop - rows.start, columns.stop - columns.start
            size = shape[0] * shape[1] * self.dtype.itemsize
            lacking += max(0, size - room)
            if size <= room:
                room -= size
                shapes[a, b] = slice(elements, elements + shape[0] * shape[1]), shape
                elements += shape[0] * shape[1]
        self.kept_grid = grid
        self.kept_arena = arena = SPARES.take(elements, self.dtype)
        self.kept = {block: arena[part].reshape(shape) for block, (part, shape) in shapes.items()}
        if problem.method == "fused" and lacking:
            raise ValueError(
                f'method: "fused" keeps the {m} x {n} logits within workspace = '
                f'{problem.workspace} bytes, which lacks {lacking}; expected method="tiled" or '
                "a larger workspace"
            )

    def take_kept(self, grid: Grid) -> dict[Block, Array]:
        """Logits that the log-sum-exp fold kept of the same blocks: the gradient uses them up."""
        kept = self.kept if self.kept_grid == grid else {}  # not where keys come in ranges
        self.kept = {}
        return kept

    def take_left(self, grid: Grid, panel: int) -> tuple[Array | None, Block | None]:
        """A worker's memory of the log-sum-exp fold: with the logits of the panel's first tile, and
        which that is; or without use but for its pages, if nobody else will want what is in it."""
        wanted = panel, 0
        if self.kept_grid == grid and wanted in self.left:
            return self.left.pop(wanted), wanted
        for held in list(self.left):
            if self.kept_grid != grid or held[1] or held[0] >= self.threads:
                return self.left.pop(held, None), None
        return None, None

    def give_back(self) -> None:
        """The gradient is complete: kept logits are used up."""
        if self.kept_arena is not None:
            SPARES.give(self.kept_arena)
            self.kept_arena = None
            while self.left:
                SPARES.give(self.left.popitem()[1])
