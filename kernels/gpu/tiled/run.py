"""The run of one pass on a GPU: a visit of every block of its grid, in the schedule's order.

backend.py runs the passes of a call. lse.py, gradient.py and one_pass.py compute the blocks.
"""

from __future__ import annotations

from dataclasses import replace

from ...grid import Grid, default_positive_blocks, without_other_groups
from ...problem import Problem
from ..device.arguments import Fields, address
from ..schedule import Purpose, ScheduledKernel, ScheduledPass
from .buffers import Buffers
from .operands import Operand, launch_over_block


class PassRun:
    """Visits every block of a pass. A subclass for each `Purpose` computes a block."""

    query_operand: Operand  # the queries of the current block
    key_operand: Operand  # the keys of the current block

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, phase: str
    ) -> None:
        self.buffers, self.launcher, self.problem = buffers, buffers.launcher, problem
        self.scheduled, self.phase = scheduled, phase  # phase: the pass's name for `progress`
        self.grid, self.shape = scheduled.grid, scheduled.shape
        if problem.host_groups is not None:
            self.grid = _restrict_to_groups(problem, scheduled.grid)
        self.exponent_scale, self.pair_vectors = buffers.exponent_scale, buffers.pair_vectors
        self.guide = buffers.guide
        self.mark_fields: Fields = {}  # fields of struct Block: the guide's marks of a block
        self.largest_rows, self.largest_columns = scheduled.grid.largest  # sizes of a block
        # the parts of the workspace by name, as `PassScheduler.parts` has chosen them
        self.parts = buffers.workspace.begin_pass(scheduled)

    def run(self) -> None:
        """Visit all blocks: the row blocks in their order, and for each its column blocks."""
        done, total = 0, len(self.grid)
        query, key, staged = self.buffers.query, self.buffers.key, self.buffers.workspace.staged
        for row_block, rows in enumerate(self.grid.rows):
            self.query_operand = query.prepare_rows(rows, "query_rows", self.parts, staged)
            for column_block in self.grid.visits(row_block):
                columns = self.grid.columns[column_block]
                self.key_operand = key.prepare_rows(columns, "key_rows", self.parts, staged)
                if self.guide is not None:
                    is_first = self.scheduled.purpose is Purpose.STATISTICS
                    self.mark_fields = self.guide.mark(rows, columns, self.parts, staged, is_first)
                self.compute_block(rows, columns, row_block, column_block)
                done += 1
                if self.problem.progress is not None:
                    self.problem.progress(self.phase, done, total)
            self.end_rows(rows)
        self.end()

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        """Compute the block of `rows` and `columns`, which have these numbers in the grid."""
        raise NotImplementedError

    def end_rows(self, rows: slice) -> None:
        """Complete `rows`: called after their blocks with all columns have been computed."""

    def end(self) -> None:
        """Complete the pass: called after all blocks have been computed."""

    # -- launches over one block of the logit matrix

    def launch(
        self, kernel: ScheduledKernel, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, segments: int = 0,
    ) -> None:  # fmt: skip
        """Launch a kernel of kernels/cuda/tiled or sm90 over the current block.

        `arguments` lack struct Block and the operands. `triangle`: compute half of a block on the
        diagonal: portable kernels its tiles on and above the diagonal, a sweep half of the key
        tiles of each query tile (`get_work` of sm90/sweep/layout.cuh). `segments`: the number of
        segments into which a sweep divides the keys of each query tile; 0: the fastest number.
        """
        buffers = self.buffers
        arguments = {"block": self.block_fields(rows, columns, triangle), **arguments}
        launch_over_block(
            kernel, self.shape, buffers.schedule.device.multiprocessors,
            (self.query_operand, buffers.query), (self.key_operand, buffers.key), arguments,
            triangle, segments,
        )  # fmt: skip

    def block_fields(self, rows: slice, columns: slice, triangle: bool) -> Fields:
        """The fields of struct Block for the current block, with the vectors of options."""
        operands, problem, shape = self.buffers.operands, self.problem, self.shape
        fields = {
            "q": self.query_operand.fields(operands.item),
            "k": self.key_operand.fields(operands.item),
            "width": operands.part_bytes, "first_row": rows.start, "first_column": columns.start,
            "row_tiles": -(-self.query_operand.rows // shape.query_tile_rows),
            "column_tiles": -(-self.key_operand.rows // shape.block_n),
            "positives": address(problem.positives, rows.start), "set_size": problem.set_size,
            "query_ids": address(problem.query_ids, rows.start),
            "key_ids": address(problem.key_ids, columns.start),
            "symmetric": problem.symmetric, "triangle": triangle, "scale": self.exponent_scale,
        }  # fmt: skip
        if self.pair_vectors is not None:
            fields |= self.pair_vectors.fields(rows, columns)
        return fields | self.mark_fields


def _restrict_to_groups(problem: Problem, grid: Grid) -> Grid:
    """The grid without blocks whose queries and keys have no group in common.

    A visit writes the gradient of the keys of its column block, so each column block needs a visit.
    A column block that shares no group with any row block is visited with the first row block.
    """
    assert problem.host_groups is not None
    has_positive = default_positive_blocks(grid, problem.shape[0], problem.symmetric)
    grid = without_other_groups(grid, problem.host_groups, has_positive)
    first_visits, *other_visits = (grid.visits(row_block) for row_block in range(len(grid.rows)))
    unvisited = {*range(len(grid.columns))}.difference(first_visits, *other_visits)
    return replace(grid, visited=(sorted({*first_visits, *unvisited}), *other_visits))
