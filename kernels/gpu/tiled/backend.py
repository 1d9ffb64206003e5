"""The GPU backend: sweeps or tiled kernels for logits and their epilogues, cuBLAS for the rest.

A fold visits blocks of the logit matrix that fit the workspace. The log-sum-exp fold writes nothing
but (max, sum) pairs of each tile's rows and columns; the gradient fold writes a panel of dL/dx in
the precision of the operands, and two plain matrix products accumulate dQ and dK from it in float32
(float64). Where only rows have a softmax, Hopper does both in one fold. Everything is queued on the
caller's current stream; nothing waits for the device.
"""

from __future__ import annotations

import cupy
import numpy as np

from ... import problem as problems
from ... import solve as blocks
from ...linear import Segments, SegmentSums, segment_sums
from ...problem import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
)
from ..device.launches import Queue
from ..vectors import TiledVectors
from .context import Context
from .gradient import NarrowFold, SoftmaxFold
from .lse import RanksFold, StatisticsFold
from .online import OnlineFold
from .sigmoid import SigmoidFold


class GPU:
    """Blocks of one problem on the current device: see `infonce.kernels.solve.Backend`."""

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None,
        ahead: Gradients | None = None, queue: Queue | None = None, both_folds: bool = False,
    ) -> None:  # fmt: skip
        """`ahead`, `queue` and `both_folds`: see `Context`."""
        self.context = Context(problem, gradients, ahead, queue, both_folds)
        self.vectors = TiledVectors(self.context, problem.query)

    def online(self, problem: Problem, gradients: Gradients) -> bool:
        return self.context.online

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        of = self.context.blocking
        columns = of.column_blocks(n)
        rows = columns if problem.symmetric else problems.slices(m, of.rows)
        return Grid(rows, columns, triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return problems.slices(n, self.context.blocking.key_rows or n)

    def not_finite_marks(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        m = problem.shape[0]
        out = self.context.launcher.queue.zeros(m + 1, np.float64)
        return self.vectors.add_marks(problem, out[:m], out[m:])

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        query, key = self.context.linear_rows
        return query.positive_products(key, problem.positives)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        return segment_sums(cupy, problem, *self.context.linear_rows, segments, columns)

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        context = self.context
        if isinstance(epilogue, Statistics):
            (m, n, _), of = problem.shape, context.statistics_blocking
            rows, columns = problems.slices(m, of.rows), of.column_blocks(n)
            grid = problems.fast_replace(grid, rows=rows, columns=columns)
            StatisticsFold(context, problem, grid, epilogue).run()
            if epilogue.row_rank is not None:
                RanksFold(
                    context, problem, grid, blocks.retrieval_ranks_of(epilogue, problem)
                ).run()
        elif isinstance(epilogue, RetrievalRanks):
            RanksFold(context, problem, grid, epilogue).run()
        elif isinstance(epilogue, OnlineSoftmax):
            if gradients is not None and gradients.want_key:
                grid = problems.fast_replace(grid, columns=[slice(0, problem.shape[1])])
            OnlineFold(context, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, SoftmaxGradient):
            if context.in_registers is not None:
                whole = problems.fast_replace(grid, triangle=False)
                NarrowFold(context, problem, whole, epilogue, gradients).run()
            else:
                SoftmaxFold(context, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, Sigmoid):
            SigmoidFold(context, problem, grid, epilogue, gradients).run()
