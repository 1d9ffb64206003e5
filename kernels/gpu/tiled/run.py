"""One pass on a GPU: the visit of every block in the pass's grid, in the order of the schedule."""

from __future__ import annotations

from dataclasses import replace

from ...grid import Grid, default_positive_blocks, without_other_groups
from ...problem import Problem
from ..device.arguments import Fields, address
from ..schedule import ScheduledKernel, ScheduledPass
from .buffers import Buffers
from .operands import Operand, launch_over_block


class PassRun:
    """Visits every block of a pass. A subclass for each purpose computes a block.

    `q` has the queries of the current block, and `k` has its keys.
    """

    q: Operand
    k: Operand

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, phase: str
    ) -> None:
        self.buffers, self.launcher, self.problem = buffers, buffers.launcher, problem
        self.scheduled, self.phase = scheduled, phase
        self.grid, self.shape = scheduled.grid, scheduled.shape
        if problem.host_groups is not None:
            self.grid = _restrict_to_groups(problem, scheduled.grid)
        self.scale, self.pair_vectors = buffers.logit_scale, buffers.pair_vectors
        self.guide = buffers.guide
        self.mark_fields: Fields = {}  # of the current block
        self.rows, self.columns = scheduled.grid.largest
        self.memory = buffers.workspace.begin_pass(scheduled)

    def run(self) -> None:
        done, total = 0, len(self.grid)
        query, key, staged = self.buffers.query, self.buffers.key, self.buffers.workspace.staged
        for row_block, rows in enumerate(self.grid.rows):
            self.q = query.block(rows, "query_rows", self.memory, staged)
            for column_block in self.grid.visits(row_block):
                columns = self.grid.columns[column_block]
                self.k = key.block(columns, "key_rows", self.memory, staged)
                if self.guide is not None:
                    self.mark_fields = self.guide.mark(rows, columns, self.memory, staged)
                self.block(rows, columns, row_block, column_block)
                done += 1
                if self.problem.progress is not None:
                    self.problem.progress(self.phase, done, total)
            self.end_rows(rows)
        self.end()

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        """Compute the block of `rows` and `columns`, which have these numbers in the grid."""
        raise NotImplementedError

    def end_rows(self, rows: slice) -> None:
        """Called after the blocks of `rows` with all their columns."""

    def end(self) -> None:
        """Called when all blocks have been visited."""

    # -- launches over one block of the logit matrix

    def launch(
        self, kernel: ScheduledKernel, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, segments: int = 0,
    ) -> None:  # fmt: skip
        """Launch a kernel of kernels/cuda/tiled or sm90, with persistent thread blocks.

        `segments` is the number of segments into which a sweep divides the keys of each query
        tile; 0 for the fastest number.
        """
        buffers = self.buffers
        fields = {"block": self.block_fields(rows, columns, triangle), **arguments}
        launch_over_block(
            kernel, self.shape, buffers.schedule.device.multiprocessors, (self.q, buffers.query),
            (self.k, buffers.key), fields, triangle, segments,
        )  # fmt: skip

    def block_fields(self, rows: slice, columns: slice, triangle: bool) -> Fields:
        """struct Block."""
        operands, problem, shape = self.buffers.operands, self.problem, self.shape
        fields = {
            "q": self.q.fields(operands.item), "k": self.k.fields(operands.item),
            "width": operands.width, "first_row": rows.start, "first_column": columns.start,
            "row_tiles": -(-self.q.rows // shape.query_tile_rows),
            "column_tiles": -(-self.k.rows // shape.block_n),
            "positives": address(problem.positives, rows.start), "set_size": problem.set_size,
            "query_ids": address(problem.query_ids, rows.start),
            "key_ids": address(problem.key_ids, columns.start),
            "symmetric": problem.symmetric, "triangle": triangle, "scale": self.scale,
        }  # fmt: skip
        if self.pair_vectors is not None:
            fields |= self.pair_vectors.fields(rows, columns)
        return fields | self.mark_fields


def _restrict_to_groups(problem: Problem, grid: Grid) -> Grid:
    """The grid without blocks that have no common group. Each column block is visited at
    least once, because a visit writes the gradient of its keys."""
    assert problem.host_groups is not None
    has_positive = default_positive_blocks(grid, problem.shape[0], problem.symmetric)
    grid = without_other_groups(grid, problem.host_groups, has_positive)
    first, *others = (grid.visits(a) for a in range(len(grid.rows)))
    unvisited = {*range(len(grid.columns))}.difference(first, *others)
    return replace(grid, visited=(sorted({*first, *unvisited}), *others))
