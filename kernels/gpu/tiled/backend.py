"""The GPU backend: sweeps or tiled kernels for logits and their epilogues, cuBLAS for the rest.

`kernels/gpu/schedule` decides how a call runs; here its passes run, in their order. A pass visits
blocks of the logit matrix that fit the workspace. The log-sum-exp pass writes nothing but
(max, sum) pairs of each tile's rows and columns; the gradient pass writes dL/dx of a block in the
precision of the operands, and two plain matrix products accumulate dQ and dK from it in float32
(float64). Everything is queued on the caller's current stream; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from ...epilogues import Epilogue, OnlineSoftmax, Sigmoid
from ...linear import Segments, SegmentSums, segment_sums
from ...problem import Array, Gradients, Problem
from ...solve import Solution, make_solution
from ...targets import with_limits
from ..device.launcher import device_properties
from ..device.launches import Queue
from ..linear import Rows
from ..schedule import BlockPass, Call, Purpose, ScheduledPass, tiled_schedule
from .buffers import Buffers
from .gradient import SoftmaxRun
from .lse import RanksRun, StatisticsRun
from .one_pass import OnlineRun, SigmoidRun

RUNS: dict[Purpose, Any] = {
    Purpose.STATISTICS: StatisticsRun, Purpose.RANKS: RanksRun, Purpose.GRADIENT: SoftmaxRun,
    Purpose.ONE_PASS: OnlineRun, Purpose.SIGMOID: SigmoidRun,
}  # fmt: skip


class GPU:
    """One problem on the current device: a whole call, or a `block` of one over ranks.

    `queue` runs launches on the current stream, or records them. Gradients of a block may be those
    of a later pass: both then have workspaces of one size, of which the memory pool holds one.
    """

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None, queue: Queue | None = None,
        block: BlockPass | None = None,
    ) -> None:  # fmt: skip
        properties = device_properties(cupy.cuda.Device().id)
        self.schedule = tiled_schedule(Call.of(problem, gradients, block), properties)
        self.buffers = Buffers(problem, self.schedule, queue or Queue())
        self.vectors = self.buffers.vectors

    def solve(self, problem: Problem, gradients: Gradients | None) -> Solution:
        """Loss, log-sum-exps and gradients of a whole call."""
        vectors, passes = self.vectors, self.schedule.passes
        gradients = vectors.with_dots(problem, gradients)
        dots = None if gradients is None else gradients.dots
        if problem.bias is not None:
            return self._solve_sigmoid(problem, gradients, dots)
        problem, stats = vectors.statistics(problem)
        if self.buffers.guide is not None:
            problem = self.buffers.guide.with_limits(problem, vectors)
        epilogues: dict[Purpose, Epilogue] = {
            Purpose.STATISTICS: stats, Purpose.RANKS: stats.retrieval_ranks,
            Purpose.ONE_PASS: OnlineSoftmax(stats.rows, stats.positive_logits),
        }  # fmt: skip
        if problem.has_limits:
            problem = with_limits(problem, self, vectors)
        sums = [scheduled for scheduled in passes if scheduled.purpose in epilogues]
        for scheduled in sums:
            self.run((scheduled,), problem, epilogues[scheduled.purpose], gradients)
        triangle = sums[0].grid.triangle
        end = vectors.finalize(problem, stats, triangle, gradients is not None, self)
        epilogue = end.softmax_gradient(problem.symmetric)
        self.run(passes[len(sums) :], problem, epilogue, gradients)
        if end.own is not None and gradients is not None:
            end.own.finish(end, gradients)
        loss, scale_grad, _ = vectors.totals(problem, end.losses, end.log_scale_grad, dots, None)
        return make_solution(end, stats, loss, scale_grad)

    def _solve_sigmoid(
        self, problem: Problem, gradients: Gradients | None, dots: Array | None
    ) -> Solution:
        problem, epilogue = self.vectors.sigmoid(problem)
        self.run(self.schedule.passes, problem, epilogue, gradients)
        losses = self.vectors.losses_with_nans(problem, epilogue, self)
        bias_grad = epilogue.bias_grad if problem.scalar_grads else None
        loss, scale_grad, bias_grad = self.vectors.totals(
            problem, losses, epilogue.log_scale_grad, dots, bias_grad
        )
        return Solution(losses, loss=loss, scale_grad=scale_grad, bias_grad=bias_grad)

    def run_block_pass(self, problem: Problem, epilogue: Any, gradients: Gradients | None) -> None:
        """The pass of a block, or the answer to a question about it."""
        if callable(epilogue):
            epilogue(self, problem)
            return
        self.run(self.schedule.passes, problem, epilogue, gradients)

    def run(
        self, passes: Sequence[ScheduledPass], problem: Problem, epilogue: Epilogue,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        """Run the passes of one epilogue, in their order."""
        if not self.buffers.logit_scale:  # these are the first
            self.buffers.prepare(problem)
        for before, scheduled in zip((None, *passes), passes, strict=False):
            dq_alone = before is not None and before.dk_accumulator is None
            if dq_alone and isinstance(epilogue, Sigmoid):
                # losses are complete: those of the passes for dK are not counted
                _, uncounted = self.vectors.sigmoid(problem)
                epilogue = replace(uncounted, row_factor=epilogue.row_factor)
            RUNS[scheduled.purpose](self.buffers, problem, scheduled, epilogue, gradients).run()

    # -- other methods of `solve.Backend` and `linear.Summing`

    @property
    def linear_rows(self) -> tuple[Rows, Rows]:
        return self.buffers.linear_rows

    def row_nans(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        out = self.buffers.launcher.queue.zeroed_array(problem.shape[0], np.float64)
        return self.vectors.find_and_add_nans(problem, out, self.vectors.any_key)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        query, key = self.linear_rows
        return query.positive_products(key, problem.positives)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        return segment_sums(cupy, problem, *self.linear_rows, segments, columns)
