"""Runs of the log-sum-exp pass, and of the pass that counts retrieval ranks."""

from __future__ import annotations

import cupy
import numpy as np

from ...epilogues import RetrievalRanks, Statistics, Sums
from ...problem import LOG2_E, Array, Gradients, Problem
from .. import config
from ..device.arguments import BASE_2, address, sums_fields
from ..schedule import ScheduledPass
from .buffers import Buffers
from .gradient_blocks import NO_GRADIENT_BLOCK, NOTHING_CACHED
from .run import PassRun


class StatisticsRun(PassRun):
    """The log-sum-exp pass: (max, sum) pairs of each tile's rows and columns, merged by block."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, stats: Statistics,
        gradients: Gradients | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, stats.phase)
        self.stats = stats
        self.written_tiles = None
        if scheduled.column_sums and isinstance(self.shape, config.Sweep):
            thread_blocks = 2 * self.shape.workers
            assert thread_blocks <= 512  # MAX_SWEEP_BLOCKS of vectors/sums.cuh
            self.written_tiles = cupy.empty((thread_blocks, 32), np.uint32)

    def run(self) -> None:
        stats, pairs = self.stats, self.pair_vectors
        biased: list[tuple[Sums, Array]] = []
        if pairs is not None and pairs.row_bias is not None:
            biased.append((stats.rows, pairs.row_bias))
        columns = None if self.problem.symmetric else stats.columns  # views: rows are columns
        if pairs is not None and pairs.column_bias is not None and columns is not None:
            biased.append((columns, pairs.column_bias))
        # the pass adds logits with biases to the sums, so sums of earlier passes need them, too
        for sums, bias in biased:
            self.buffers.add_bias(sums.max, bias, LOG2_E, sums.max)
        super().run()
        for sums, bias in biased:
            self.buffers.add_bias(sums.max, bias, -LOG2_E, sums.max)

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        stats, scheduled, shape, memory = self.stats, self.scheduled, self.shape, self.memory
        m, n = self.q.rows, self.k.rows
        # a block on the diagonal has pairs (i, j) and (j, i)
        is_diagonal = self.problem.symmetric and rows == columns
        triangle = is_diagonal and shape.square and scheduled.column_sums
        cached = self.buffers.cached
        if cached is not None and not cached.has(columns):
            cached = None
        kernel = scheduled.choose_kernel(is_diagonal, cached is not None)
        row_slots = shape.row_slots(m, n, triangle)
        column_slots = shape.column_slots(m, n, triangle) if kernel.defines["COLUMNS"] else 0
        side = "column"
        if triangle and isinstance(shape, config.Tile):
            # a column is a row of the same views, and its sums lie in the slots of that row
            side, column_slots = "row", 0
        arguments = {
            "positive": address(stats.positive_logits, rows.start),
            "row_pairs": memory["row_partials"], "row_moments": memory.get("row_moments"),
            "row_stride": m, "column_pairs": memory.get(f"{side}_partials"),
            "column_moments": memory.get(f"{side}_moments"), "column_stride": n,
        }  # fmt: skip
        if isinstance(shape, config.Sweep):
            arguments |= {"written_tiles": self.written_tiles, "cached": NOTHING_CACHED}
            arguments |= NO_GRADIENT_BLOCK
            if cached is not None:
                arguments |= {"cached": cached.fields, "gradient_block": cached.block.fields}
                arguments["gradient_map"] = cached.block.map(self.launcher.queue, m)
        self.launch(kernel, rows, columns, arguments, triangle)
        self.merge("row", row_slots, stats.rows, rows)
        if column_slots:
            assert stats.columns is not None
            self.merge("column", column_slots, stats.columns, columns, self.written_tiles)

    def merge(
        self, side: str, slots: int, sums: Sums, part: slice, written_tiles: Array | None = None
    ) -> None:
        """Merge the partial sums of a block into the sums of its rows, or of its columns."""
        n = part.stop - part.start
        # Tiles leave raw products, sweeps base-2 logits
        scale = self.scale if isinstance(self.shape, config.Tile) else BASE_2
        self.launcher.vectors(
            "merge_partial_sums", n, threads=4, partial_sums=self.memory[f"{side}_partials"],
            moments=self.memory.get(f"{side}_moments"), slots=slots, stride=n, n=n, scale=scale,
            logit_scale=self.scale, sums=sums_fields(sums, part.start), written_tiles=written_tiles,
        )  # fmt: skip


class RanksRun(PassRun):
    """Counts, for each row and column, the logits above its positive's logit.

    The log-sum-exp pass has computed the logits of positives.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, ranks: RetrievalRanks,
        gradients: Gradients | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, ranks.phase)
        self.ranks = ranks
        self.row_threshold = buffers.to_products(ranks.positive_logits, BASE_2)
        self.column_threshold = None
        if scheduled.column_sums:
            self.column_threshold = buffers.to_products(ranks.column_positive_logits, BASE_2)

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        ranks = self.ranks
        arguments = {
            "row_threshold": address(self.row_threshold, rows.start),
            "column_threshold": address(self.column_threshold, columns.start),
            "row_rank": address(ranks.row_rank, rows.start),
            "column_rank": address(ranks.column_rank, columns.start),
        }
        self.launch(self.scheduled.kernel, rows, columns, arguments)
