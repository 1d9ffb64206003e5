"""The log-sum-exp fold: (max, sum) pairs of each tile's rows and columns, merged by block; and
counts of what scores above the positives (retrieval ranks)."""

from __future__ import annotations

import cupy
import numpy as np

from ... import problem as problems
from ...problem import LOG2_E, Array, Grid, Problem, RetrievalRanks, Statistics
from .. import config
from ..device.arguments import BASE_2, address, sums_fields
from .context import Context
from .fold import Fold
from .operands import NO_PANEL, NOTHING_KEPT


class StatisticsFold(Fold):
    def __init__(self, context: Context, problem: Problem, grid: Grid, stats: Statistics) -> None:
        super().__init__(context, problem, grid, stats.phase)
        self.stats = stats
        self.of_rows = self.partial_sums(self.tile.row_sums(self.rows, self.columns))
        self.of_columns: tuple[Array | None, Array | None] = None, None
        self.marks = None
        if stats.columns is not None:
            self.of_columns = self.partial_sums(self.tile.column_sums(self.rows, self.columns))
            if isinstance(self.tile, config.Sweep):
                blocks_of_threads = 2 * self.tile.workers
                assert blocks_of_threads <= 512  # MAX_SWEEP_BLOCKS of vectors/sums.cuh
                self.marks = cupy.empty((blocks_of_threads, 32), np.uint32)

    def run(self) -> None:
        stats, pairs = self.stats, self.pair_vectors
        own: list[tuple[problems.Sums, Array]] = []
        if pairs is not None and pairs.of_rows is not None:
            own.append((stats.rows, pairs.of_rows))
        columns = None if self.problem.symmetric else stats.columns  # they are the rows
        if pairs is not None and pairs.of_columns is not None and columns is not None:
            own.append((columns, pairs.of_columns))
        for sums, bias in own:  # what this fold merges into them has these biases
            self.context.add_bias(sums.max, bias, LOG2_E, sums.max)
        super().run()
        for sums, bias in own:
            self.context.add_bias(sums.max, bias, -LOG2_E, sums.max)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        stats, problem, tile = self.stats, self.problem, self.tile
        m, n = self.q.rows, self.k.rows
        whole = problem.symmetric and rows == columns  # both (i, j) and (j, i)
        triangle = whole and tile.square and stats.columns is not None
        both = stats.columns is not None and (not whole or triangle)
        row_slots = tile.row_slots(m, n, triangle)
        column_slots = tile.column_slots(m, n, triangle) if both else 0
        of_columns = self.of_columns
        if triangle and isinstance(tile, config.Tile):  # one slot a tile, on either side
            of_columns, column_slots = self.of_rows, 0
        arguments = {
            "positive": address(stats.positive_logits, rows.start),
            "row_pairs": self.of_rows[0], "row_moments": self.of_rows[1], "row_stride": m,
            "column_pairs": of_columns[0], "column_moments": of_columns[1], "column_stride": n,
        }  # fmt: skip
        defines = {"COLUMNS": int(both), **self.of_sums}
        if isinstance(tile, config.Tile):
            self.launch_tiles("lse", rows, columns, arguments, triangle, **defines)
        else:
            kept = self.context.kept
            arguments |= {"marks": self.marks, "kept": NOTHING_KEPT} | NO_PANEL
            if kept is not None and not kept.has(columns):
                kept = None
            if kept is not None:
                tensor_map = kept.panel.map(self.launcher.queue, m)
                arguments |= {"kept": kept.fields, "panel": kept.panel.fields}
                arguments["panel_map"] = tensor_map
            self.launch_sweep(
                "sweep_lse", rows, columns, arguments, triangle, panel=kept is not None, sums=True,
                MAXIMA=int(problem.retrieval_ranks), KEEP=int(kept is not None), **defines,
            )  # fmt: skip
        self.merge(self.of_rows, row_slots, stats.rows, rows)
        if column_slots:
            assert stats.columns is not None
            self.merge(of_columns, column_slots, stats.columns, columns, self.marks)

    def merge(
        self, partial: tuple[Array, Array], slots: int, sums: problems.Sums, of: slice,
        marks: Array | None = None,
    ) -> None:  # fmt: skip
        n = of.stop - of.start
        # Tiles leave raw products, sweeps base-2 logits
        scale = self.scale if isinstance(self.tile, config.Tile) else BASE_2
        self.launcher.vectors(
            "merge_pairs", n, threads=4, pairs=partial[0], moments=partial[1], slots=slots,
            stride=n, n=n, scale=scale, logit_scale=self.scale, sums=sums_fields(sums, of.start),
            marks=marks,
        )  # fmt: skip


class RanksFold(Fold):
    """Counts against the positives' logits, which the log-sum-exp fold has found."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, ranks: RetrievalRanks
    ) -> None:
        super().__init__(context, problem, grid, ranks.phase)
        self.ranks, self.tile = ranks, context.tile
        self.row_threshold = context.to_products(ranks.positive_logits, BASE_2)
        self.column_threshold = None
        if ranks.column_rank is not None:
            self.column_threshold = context.to_products(ranks.column_positive_logits, BASE_2)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        ranks = self.ranks
        arguments = {
            "row_threshold": address(self.row_threshold, rows.start),
            "column_threshold": address(self.column_threshold, columns.start),
            "row_rank": address(ranks.row_rank, rows.start),
            "column_rank": address(ranks.column_rank, columns.start),
        }
        of_columns = int(self.column_threshold is not None)
        self.launch_tiles("ranks", rows, columns, arguments, COLUMNS=of_columns)
