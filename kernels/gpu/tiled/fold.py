"""The folds of the GPU backend: what is launched for each block; log-sum-exps and ranks."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ... import problem as problems
from ...problem import LN_2, Array, Grid, Problem, Ranks, Statistics
from ..config import launch as config
from ..device.abi import SCALAR, address, struct
from .context import Context
from .operands import Operand, Side

# --- structures that kernels take, as kernels/cuda declares them ----------------------------------

_OPERAND = np.dtype(
    [("data", "u8"), ("stride", "i8"), ("part", "i8"), ("rows", "i8"), ("factor", "u8")]
)
_BLOCK = np.dtype(
    [("q", _OPERAND), ("k", _OPERAND), ("width", "i8"), ("first_row", "i8"),
     ("first_column", "i8"), ("row_tiles", "i8"), ("column_tiles", "i8"), ("positives", "u8"),
     ("query_ids", "u8"), ("key_ids", "u8"), ("symmetric", "i8"), ("triangle", "i8"),
     ("scale", SCALAR)]
)  # fmt: skip


class Fold:
    """One visit of every block of a grid. What happens to a block is the subclasses'."""

    def __init__(self, context: Context, problem: Problem, grid: Grid, phase: str) -> None:
        self.context, self.launcher = context, context.launcher
        self.problem, self.grid, self.phase = problem, grid, phase
        self.rows = max(r.stop - r.start for r in grid.rows)
        self.columns = max(c.stop - c.start for c in grid.columns)
        self.tile: config.Tile | config.Sweep = context.sweep or context.tile
        self.scale = context.logit_scale  # from here on features can be staged
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

    def panel_map(self, rows: int) -> Any:
        raise NotImplementedError

    def end_rows(self, rows: slice) -> None:
        """A row panel has met all its columns."""

    def end(self) -> None:
        """All blocks have been visited."""

    def launch(
        self, name: str, rows: slice, columns: slice, arguments: tuple[Any, ...],
        triangle: bool = False, segments: int = 0, **defines: int,
    ) -> None:  # fmt: skip
        """Run a kernel over one block: a tile each, or a sweep in `segments` or as many as suit."""
        context, problem, q, k = self.context, self.problem, self.q, self.k
        item = context.item
        row_tiles = -(-q.rows // self.tile.panel_rows)
        column_tiles = -(-k.rows // self.tile.block_n)
        block = struct(
            _BLOCK,
            q.data, q.stride * item, q.part * item, q.rows, q.factor,
            k.data, k.stride * item, k.part * item, k.rows, k.factor,
            context.width, rows.start, columns.start, row_tiles, column_tiles,
            address(problem.positives, rows.start),
            address(problem.query_ids, rows.start), address(problem.key_ids, columns.start),
            problem.symmetric, triangle, *self.scale,
        )  # fmt: skip
        if isinstance(self.tile, config.Tile):
            grid = row_tiles * column_tiles
            kernel, shared = context.tiled_kernel(name, **defines), self.tile.shared
            arguments = (block, *arguments)
        else:
            grid = self.tile.blocks(q.rows, k.rows, triangle)
            segments = segments or self.tile.segments(q.rows, k.rows, triangle)
            panel = name != "lse"
            shared = self.tile.shared(panel)
            kernel = context.sweep_kernel(
                self.tile, name, panel, IDS=int(problem.query_ids is not None),
                FACTORS=int(problem.normalize), **defines,
            )  # fmt: skip

            def described(z: Operand, side: Side, box: int) -> Any:
                width = context.parts * side.padded * item
                return self.launcher.queue.tensor_map(
                    z.data, z.rows, width, z.stride * item, box, context.precision
                )

            arguments = (
                described(q, context.query, self.tile.query_box),
                described(k, context.key, self.tile.key_box), block, segments, *arguments,
            )  # fmt: skip
            if panel and not self.tile.narrow:
                arguments = (*arguments, self.panel_map(q.rows))
        kernel((grid,), (self.tile.threads,), arguments, shared_mem=shared)


# --- log-sum-exp fold -----------------------------------------------------------------------------


class StatisticsFold(Fold):
    def __init__(self, context: Context, problem: Problem, grid: Grid, stats: Statistics) -> None:
        super().__init__(context, problem, grid, stats.phase)
        self.stats = stats

        def pairs(n: int) -> Array:
            return context.scratch.take((n, 2), context.real)

        self.row_pairs = pairs(self.tile.row_sums(self.rows, self.columns))
        self.column_pairs = self.marks = None
        if stats.columns is not None:
            self.column_pairs = pairs(self.tile.column_sums(self.rows, self.columns))
            if isinstance(self.tile, config.Sweep):
                blocks_of_threads = 2 * self.tile.workers
                assert blocks_of_threads <= 512  # MAX_SWEEP_BLOCKS of vectors.cu
                self.marks = cupy.empty((blocks_of_threads, 32), np.uint32)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        stats, problem, tile = self.stats, self.problem, self.tile
        m, n = self.q.rows, self.k.rows
        whole = problem.symmetric and rows == columns  # both (i, j) and (j, i)
        triangle = whole and tile.square and stats.columns is not None
        both = stats.columns is not None and (not whole or triangle)
        row_slots = tile.row_slots(m, n, triangle)
        column_slots = tile.column_slots(m, n, triangle) if both else 0
        column_pairs = self.column_pairs
        if triangle and isinstance(tile, config.Tile):  # one slot a tile, on either side
            column_pairs, column_slots = self.row_pairs, 0
        arguments: tuple[Any, ...] = (
            address(stats.positive, rows.start),
            self.row_pairs, m, address(column_pairs), n,
        )  # fmt: skip
        defines = {"COLUMNS": int(both)}
        if isinstance(tile, config.Sweep):
            defines["MAXIMA"] = int(problem.ranks)
            arguments = (*arguments, address(self.marks))
        self.launch("lse", rows, columns, arguments, triangle, **defines)
        self.merge(self.row_pairs, row_slots, stats.rows, rows)
        if column_slots:
            assert stats.columns is not None
            self.merge(column_pairs, column_slots, stats.columns, columns, self.marks)

    def merge(
        self, pairs: Array, slots: int, sums: problems.Sums, of: slice, marks: Array | None = None
    ) -> None:
        n = of.stop - of.start
        wide = isinstance(self.tile, config.Sweep) and self.tile.wide
        # Tiles leave raw products, sweeps base-2 logits
        scale = self.scale if isinstance(self.tile, config.Tile) else (LN_2, 0, 1.0, 0)
        self.launcher.vector_kernel(
            "merge_pairs", n, pairs, slots, n, n,
            struct(SCALAR, *scale), address(sums.max, of.start), address(sums.sum, of.start),
            address(marks), 0 if wide else 1, threads=4,
        )  # fmt: skip


class RanksFold(Fold):
    """Counts against the positives' logits, which the statistics have found."""

    def __init__(self, context: Context, problem: Problem, grid: Grid, ranks: Ranks) -> None:
        super().__init__(context, problem, grid, ranks.phase)
        self.ranks, self.tile = ranks, context.tile
        self.by_row = self.products(ranks.positive)
        self.by_column = None
        if ranks.column_rank is not None:
            self.by_column = self.products(ranks.column_positive)

    def products(self, positive: Array) -> Array:
        """Logits as the raw products that the kernel compares them with."""
        context, n = self.context, len(positive)
        out = cupy.empty(n, context.real)
        self.launcher.vector_kernel("to_products", n, positive, n, context.logit_scale_struct, out)
        return out

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        ranks, of_columns = self.ranks, self.by_column is not None
        arguments = (
            address(self.by_row, rows.start),
            address(self.by_column, columns.start) if of_columns else 0,
            address(ranks.row_rank, rows.start),
            address(ranks.column_rank, columns.start) if of_columns else 0,
        )
        self.launch("ranks", rows, columns, arguments, COLUMNS=int(of_columns))
