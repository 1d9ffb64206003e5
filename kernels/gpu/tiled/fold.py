"""One fold on a GPU: the visit of every block of a grid, and launches over one block."""

from __future__ import annotations

from typing import Any

from ...problem import Grid, Problem
from .. import config
from ..device.arguments import Fields, address
from .context import Context
from .operands import Operand, Side


class Fold:
    """Visits every block of a grid; a subclass for each epilogue says what happens to a block."""

    def __init__(self, context: Context, problem: Problem, grid: Grid, phase: str) -> None:
        self.context, self.launcher = context, context.launcher
        self.problem, self.grid, self.phase = problem, grid, phase
        self.rows = max(r.stop - r.start for r in grid.rows)
        self.columns = max(c.stop - c.start for c in grid.columns)
        self.tile: config.Tile | config.Sweep = context.sweep or context.tile
        self.scale = context.logit_scale  # staging features needs it
        context.scratch.reset()
        self.query_buffer = context.query.buffer(self.rows, context.scratch)
        self.key_buffer = context.key.buffer(self.columns, context.scratch)
        self.staged: slice | None = None  # keys that are in the buffer

    def run(self) -> None:
        done, total = 0, len(self.grid)
        for a, rows in enumerate(self.grid.rows):
            self.q = self.context.query.block(rows, self.query_buffer)
            for b in self.grid.visits(a):
                columns = self.grid.columns[b]
                if self.staged != columns:
                    self.k = self.context.key.block(columns, self.key_buffer)
                    self.staged = columns
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

    # -- launches over the block of self.q and self.k

    def launch_tiles(
        self, kernel: str, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, **defines: int,
    ) -> None:  # fmt: skip
        """A kernel of kernels/cuda/tiled: a thread block for each tile."""
        tile = self.tile
        assert isinstance(tile, config.Tile)
        row_tiles, column_tiles = self.tiles()
        self.launcher.launch(
            f"tiled/{kernel}.cu", kernel, row_tiles * column_tiles, tile.threads,
            {"block": self.block_fields(rows, columns, triangle), **arguments}, tile.shared,
            BLOCK_N=tile.block_n, STAGES=tile.stages, LEVELS=tile.levels,
            MIN_BLOCKS=tile.min_blocks, **defines,
        )  # fmt: skip

    def launch_sweep(
        self, kernel: str, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, panel: bool = True, segments: int = 0, **defines: int,
    ) -> None:  # fmt: skip
        """A kernel of kernels/cuda/sm90: persistent thread blocks. `panel`: it writes a gradient
        panel; `segments`: into how many each query panel's tiles are cut, 0 for the best number."""
        context, sweep, q, k = self.context, self.tile, self.q, self.k
        assert isinstance(sweep, config.Sweep)
        self.launcher.launch(
            f"sm90/{kernel}.cu", kernel, sweep.blocks(q.rows, k.rows, triangle), sweep.threads,
            {
                "q": self.operand_map(q, context.query, sweep.query_box),
                "k": self.operand_map(k, context.key, sweep.key_box),
                "block": self.block_fields(rows, columns, triangle),
                "segments": segments or sweep.segments(q.rows, k.rows, triangle), **arguments,
            },
            sweep.shared(panel),
            SLABS=sweep.k_slices, STAGES=sweep.stages(panel), WIDE=int(sweep.clustered),
            NARROW=int(sweep.in_registers), SHARED=sweep.shared(panel),
            IDS=int(self.problem.query_ids is not None), FACTORS=int(self.problem.normalize),
            **defines,
        )  # fmt: skip

    def operand_map(self, z: Operand, side: Side, box_rows: int) -> Any:
        """Tensor map of an operand, all of its parts."""
        context = self.context
        width = context.parts * side.padded * context.item
        return self.launcher.queue.tensor_map(
            z.data, z.rows, width, z.stride * context.item, box_rows, context.precision
        )

    def block_fields(self, rows: slice, columns: slice, triangle: bool) -> Fields:
        """struct Block."""
        context, problem = self.context, self.problem
        row_tiles, column_tiles = self.tiles()
        return {
            "q": self.q.fields(context.item), "k": self.k.fields(context.item),
            "width": context.width, "first_row": rows.start, "first_column": columns.start,
            "row_tiles": row_tiles, "column_tiles": column_tiles,
            "positives": address(problem.positives, rows.start),
            "query_ids": address(problem.query_ids, rows.start),
            "key_ids": address(problem.key_ids, columns.start),
            "symmetric": problem.symmetric, "triangle": triangle, "scale": self.scale,
        }  # fmt: skip

    def tiles(self) -> tuple[int, int]:
        """Tiles of the block's rows, and of its columns."""
        return -(-self.q.rows // self.tile.panel_rows), -(-self.k.rows // self.tile.block_n)
