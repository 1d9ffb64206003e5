"""Retrieval ranks: counts of the keys, and queries, that score above the positive."""

from __future__ import annotations

import cupy

from ...problem import Array, Grid, Problem, RetrievalRanks
from ..device.arguments import address
from .context import Context
from .fold import Fold


class RanksFold(Fold):
    """Counts against the positives' logits, which the log-sum-exp fold has found."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, ranks: RetrievalRanks
    ) -> None:
        super().__init__(context, problem, grid, ranks.phase)
        self.ranks, self.tile = ranks, context.tile
        self.row_threshold = self.products(ranks.positive_logits)
        self.column_threshold = None
        if ranks.column_rank is not None:
            self.column_threshold = self.products(ranks.column_positive_logits)

    def products(self, positive: Array) -> Array:
        """Logits as the raw products that the kernel compares with them."""
        context, n = self.context, len(positive)
        out = cupy.empty(n, context.real)
        self.launcher.vectors(
            "to_products", n, logits=positive, n=n, scale=context.logit_scale, out=out
        )
        return out

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
