"""Runs of the log-sum-exp pass, and of the pass that counts retrieval ranks."""

from __future__ import annotations

import cupy
import numpy as np

from ...epilogues import RetrievalRanks, Statistics, Sums
from ...problem import LOG2_E, Array, Gradients, Problem
from .. import config
from ..device.arguments import BASE_2, Fields, address, sums_fields
from ..schedule import ScheduledPass
from .buffers import Buffers
from .operands import NO_GRADIENT_BLOCK, NOTHING_CACHED
from .run import PassRun

MERGE_THREADS = 128  # of a thread block, which has 32 rows or columns: vectors/sums.cuh


class StatisticsRun(PassRun):
    """The log-sum-exp pass: (max, sum) pairs of each tile's rows and columns, merged by block."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, stats: Statistics,
        gradients: Gradients | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, stats.phase)
        self.stats = stats
        # bits of each thread block of a sweep: the key tiles of whose columns it has left sums
        self.written_tiles = None
        if scheduled.column_sums and isinstance(self.shape, config.Sweep):
            thread_blocks = 2 * self.shape.workers  # at most: a worker is one block or two
            assert thread_blocks <= 512  # MAX_SWEEP_BLOCKS of vectors/sums.cuh
            self.written_tiles = cupy.empty((thread_blocks, 32), np.uint32)

    def run(self) -> None:
        """Visit all blocks; then subtract biases that kernels add to all logits of a column or row.

        Over ranks, sums may have terms of earlier passes, which have no bias any more. These terms
        get the bias before the visit, so that all terms of a sum have it. `PairVectors` says why.
        """
        stats, vectors = self.stats, self.pair_vectors
        biased: list[tuple[Sums, Array]] = []
        if vectors is not None and vectors.row_bias is not None:
            biased.append((stats.rows, vectors.row_bias))
        # if queries are the keys, the sums of columns are the sums of rows
        columns = None if self.problem.symmetric else stats.columns
        if vectors is not None and vectors.column_bias is not None and columns is not None:
            biased.append((columns, vectors.column_bias))
        for sums, bias in biased:
            self.buffers.add_bias(sums.max, bias, LOG2_E, sums.max)
        super().run()
        for sums, bias in biased:
            self.buffers.add_bias(sums.max, bias, -LOG2_E, sums.max)

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        stats, scheduled, shape, parts = self.stats, self.scheduled, self.shape, self.parts
        m, n = self.query_operand.rows, self.key_operand.rows
        # a block on the diagonal has the pairs (i, j) and (j, i), so one triangle of it suffices
        is_diagonal = self.problem.symmetric and rows == columns
        triangle = is_diagonal and shape.square and scheduled.column_sums
        cached = self.buffers.cached
        if cached is not None and not cached.has(columns):
            cached = None
        kernel = scheduled.choose_kernel(is_diagonal, cached is not None)
        # slots: partial sums that the kernel leaves for each row and for each column
        row_slots = shape.row_slots(m, n, triangle)
        column_slots = shape.column_slots(m, n, triangle) if kernel.defines["COLUMNS"] else 0
        column_side = "column"  # the side whose slots get the sums of columns
        if triangle and isinstance(shape, config.Tile):
            # queries are the keys, so the sums of column i belong to row i. They fill the slots of
            # row i that the tiles below the diagonal leave empty
            column_side, column_slots = "row", 0
        arguments = {
            "positive_logits": address(stats.positive_logits, rows.start),
            "row_partials": parts["row_partials"], "row_moments": parts.get("row_moments"),
            "row_stride": m, "column_partials": parts.get(f"{column_side}_partials"),
            "column_moments": parts.get(f"{column_side}_moments"), "column_stride": n,
        }  # fmt: skip
        if isinstance(shape, config.Sweep):
            arguments |= {"written_tiles": self.written_tiles, "cached": NOTHING_CACHED}
            arguments |= NO_GRADIENT_BLOCK
            if cached is not None:
                arguments |= {"cached": cached.fields, "gradient_block": cached.block.fields}
                arguments["gradient_map"] = cached.block.tensor_map(self.launcher.queue, m)
        self.launch(kernel, rows, columns, arguments, triangle)
        self.merge(rows, row_slots, columns, column_slots)

    def merge(self, rows: slice, row_slots: int, columns: slice, column_slots: int) -> None:
        """Merge the partial sums of a block, so many slots a row and a column, into the sums."""
        of_rows = self.partial_sums("row", row_slots, self.stats.rows, rows, None)
        if not column_slots:
            self.launch_merge(of_rows, of_rows | {"n": 0})
            return
        of_columns = self.partial_sums(
            "column", column_slots, self.stats.columns, columns, self.written_tiles
        )
        # If queries are the keys, the sums of columns are those of rows. (Addresses do not tell: in
        # a plan, each array of the caller has an address of its own)
        shares_sums = self.problem.symmetric
        if shares_sums and rows == columns:
            self.launch_merge(of_rows, of_columns, same_rows=True)
        elif shares_sums and max(rows.start, columns.start) < min(rows.stop, columns.stop):
            self.launch_merge(of_rows, of_rows | {"n": 0})
            self.launch_merge(of_columns, of_columns | {"n": 0})
        else:
            self.launch_merge(of_rows, of_columns)

    def launch_merge(self, rows: Fields, columns: Fields, same_rows: bool = False) -> None:
        """Launch the kernel for two structs PartialSums, of different sums or of `same_rows`."""
        sides = (rows,) if same_rows else (rows, columns)
        self.launcher.launch(
            "vectors.cu", "merge_partial_sums", sum(-(-side["n"] // 32) for side in sides),
            MERGE_THREADS,
            {
                "rows": rows, "columns": columns, "same_rows": same_rows,
                "exponent_scale": self.exponent_scale,
                "maxima_are_products": isinstance(self.shape, config.Tile),
            },
        )  # fmt: skip

    def partial_sums(
        self, side: str, slots: int, sums: Sums | None, rows: slice, written_tiles: Array | None
    ) -> Fields:
        """struct PartialSums of one side of a block, "row" or "column"."""
        n = rows.stop - rows.start
        return {
            "pairs": self.parts.get(f"{side}_partials"),
            "moments": self.parts.get(f"{side}_moments"), "slots": slots, "stride": n, "n": n,
            "written_tiles": written_tiles, "sums": sums_fields(sums, rows.start),
        }  # fmt: skip


class RetrievalRanksRun(PassRun):
    """Counts, for each row and column, the logits above the logit of its positive.

    The log-sum-exp pass has computed the logits of positives before.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, ranks: RetrievalRanks,
        gradients: Gradients | None = None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, ranks.phase)
        self.ranks = ranks
        # the positives' logits in the unit of products, with which the kernel compares products
        self.row_threshold = buffers.to_products(ranks.positive_logits, BASE_2)
        self.column_threshold = None
        if scheduled.column_sums:
            self.column_threshold = buffers.to_products(ranks.column_positive_logits, BASE_2)

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        ranks = self.ranks
        arguments = {
            "row_threshold": address(self.row_threshold, rows.start),
            "column_threshold": address(self.column_threshold, columns.start),
            "row_rank": address(ranks.row_rank, rows.start),
            "column_rank": address(ranks.column_rank, columns.start),
        }
        self.launch(self.scheduled.kernel, rows, columns, arguments)
