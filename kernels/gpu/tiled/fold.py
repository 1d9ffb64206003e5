"""One fold on a GPU: the visit of every block of a grid."""

from __future__ import annotations

from ...problem import Array, Grid, Problem
from .block import BlockLauncher
from .context import Context


class Fold(BlockLauncher):
    """Visits every block of a grid; a subclass for each epilogue says what happens to a block."""

    def __init__(self, context: Context, problem: Problem, grid: Grid, phase: str) -> None:
        super().__init__(context, problem)
        self.grid, self.phase = grid, phase
        self.rows = max(r.stop - r.start for r in grid.rows)
        self.columns = max(c.stop - c.start for c in grid.columns)
        context.scratch.reset()
        self.query_buffer = context.query.buffer(self.rows, context.scratch)
        self.key_buffer = context.key.buffer(self.columns, context.scratch)
        # what the last fold has left in these buffers, if they lie where they lay then
        layout = self.rows, self.columns
        self.staged = context.staged.setdefault(layout, {})
        context.staged = {layout: self.staged}

    def partial_sums(self, n: int) -> tuple[Array, Array | None]:
        """Memory for n partial sums: pairs of numbers, and moments where they are wanted."""
        scratch, real, moments = self.context.scratch, self.context.real, None
        pairs = scratch.take((n, 2), real)
        if self.problem.moments:
            moments = scratch.take((n,), real)
        return pairs, moments

    def run(self) -> None:
        done, total = 0, len(self.grid)
        for a, rows in enumerate(self.grid.rows):
            self.q = self.context.query.block(rows, self.query_buffer, self.staged)
            for b in self.grid.visits(a):
                columns = self.grid.columns[b]
                self.k = self.context.key.block(columns, self.key_buffer, self.staged)
                self.block(rows, columns, a, b)
                done += 1
                if self.problem.progress is not None:
                    self.problem.progress(self.phase, done, total)
            self.end_rows(rows)
        self.end()

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        raise NotImplementedError

    def end_rows(self, rows: slice) -> None:
        """Called when these rows have met all their columns."""

    def end(self) -> None:
        """Called when all blocks have been visited."""
