"""The backend of the method tiled on a GPU: it runs the passes of a call, in their order.

`kernels/gpu/schedule` has decided the passes, and run.py visits the blocks of a pass. Sweeps or
portable kernels compute logits and their epilogues. The log-sum-exp pass writes only (max, sum)
pairs of each tile's rows and columns. The gradient pass writes dL/dx of a block in the precision of
the operands, and two matrix products of cuBLAS add it to dQ and dK, in float32 (float64 for
float64 features). All work is queued on the caller's current stream. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ...epilogues import Epilogue, OnlineSoftmax, Sigmoid
from ...linear import Segments, SegmentSums, segment_sums
from ...options import with_found_vectors
from ...problem import Array, Gradients, Problem
from ...solve import Solution, make_solution, sigmoid_solution
from ..device.launcher import device_properties
from ..device.launches import Queue
from ..gradient_factors import LARGEST_ELEMENT
from ..linear import GPURows
from ..schedule import BlockPass, Call, Purpose, ScheduledPass, tiled_schedule
from ..vectors import Conclusion
from .buffers import Buffers
from .gradient import SoftmaxRun
from .lse import RetrievalRanksRun, StatisticsRun
from .one_pass import OnlineRun, SigmoidRun

# The run of a pass, by its purpose
RUNS: dict[Purpose, Any] = {
    Purpose.STATISTICS: StatisticsRun, Purpose.RETRIEVAL_RANKS: RetrievalRanksRun,
    Purpose.GRADIENT: SoftmaxRun, Purpose.ONE_PASS: OnlineRun,
    Purpose.SIGMOID: SigmoidRun,
}  # fmt: skip


class GPU:
    """One problem on the current device: a whole call, or a `block` of a call over ranks.

    `queue` runs launches on the current stream, or records them. For a block, `gradients` may be
    the gradients of a later pass over such blocks. Then both passes have workspaces of the same
    size, so that CuPy's memory pool keeps one workspace for both.
    """

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None, queue: Queue | None = None,
        block: BlockPass | None = None,
    ) -> None:  # fmt: skip
        properties = device_properties(cupy.cuda.Device().id)
        self.schedule = tiled_schedule(Call.from_problem(problem, gradients, block), properties)
        self.buffers = Buffers(problem, self.schedule, queue or Queue())
        self.vectors = self.buffers.vectors

    def solve(self, problem: Problem, gradients: Gradients | None) -> Solution:
        """Loss, log-sum-exps and gradients of a whole call."""
        vectors, passes = self.vectors, self.schedule.passes
        gradients = vectors.with_dots(problem, gradients)
        if problem.bias is not None:
            problem, sigmoid = vectors.sigmoid(problem)
            self.run(passes, problem, sigmoid, gradients)
            return sigmoid_solution(problem, sigmoid, self, gradients)

        # The passes before the log-sum-exps are known: sums, retrieval ranks
        problem, stats = vectors.statistics(problem)
        if self.buffers.guide is not None:
            problem = self.buffers.guide.with_limits(problem, vectors)
        epilogues: dict[Purpose, Epilogue] = {
            Purpose.STATISTICS: stats, Purpose.RETRIEVAL_RANKS: stats.retrieval_ranks,
            Purpose.ONE_PASS: OnlineSoftmax(stats.rows, stats.positive_logits),
        }  # fmt: skip
        if problem.compares_with_limits:
            problem = with_found_vectors(problem, self, vectors)
        first_passes = [scheduled for scheduled in passes if scheduled.purpose in epilogues]
        for scheduled in first_passes:
            self.run((scheduled,), problem, epilogues[scheduled.purpose], gradients)

        # Losses, the factors of the gradient pass, and the gradient pass
        triangle, gradient_passes = first_passes[0].grid.triangle, passes[len(first_passes) :]
        finalized = vectors.finalize(
            problem, stats, triangle, gradients is not None, self,
            conclusion=self._conclusion(problem, gradients) if gradient_passes else None,
        )  # fmt: skip
        epilogue = finalized.softmax_gradient(problem.symmetric)
        self.run(gradient_passes, problem, epilogue, gradients)
        if finalized.own is not None and gradients is not None:
            finalized.own.finish(finalized, gradients)
        # the gradient of the scale follows from `dots`, or from moments of the sums
        dots = None if gradients is None else gradients.dots
        loss, scale_grad, _ = vectors.totals(
            problem, finalized.losses, finalized.log_scale_grad, dots, bias_grad=None
        )
        return make_solution(finalized, stats, loss, scale_grad)

    def _conclusion(self, problem: Problem, gradients: Gradients | None) -> Conclusion | None:
        """What `finalize` concludes for a gradient pass. None: other steps change its vectors."""
        pair_vectors = self.buffers.pair_vectors
        has_biases = pair_vectors is not None and (
            pair_vectors.row_bias is not None or pair_vectors.column_bias is not None
        )
        if gradients is None or problem.linear_terms or has_biases:
            return None
        largest_element = LARGEST_ELEMENT.get(self.buffers.precision, 1.0)
        return Conclusion(largest_element, has_totals=not problem.scale_grad_from_dots)

    def run_block_pass(self, problem: Problem, epilogue: Any, gradients: Gradients | None) -> None:
        """Run the pass of a block over ranks; or, for a `BlockQuestion`, answer the question."""
        if callable(epilogue):
            epilogue(self, problem)
            return
        self.run(self.schedule.passes, problem, epilogue, gradients)

    def run(
        self, passes: Sequence[ScheduledPass], problem: Problem, epilogue: Epilogue,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        """Run `passes`, which have the same epilogue, in their order."""
        if not self.buffers.exponent_scale:  # before the first pass of the call
            self.buffers.prepare(problem)
        for before, scheduled in zip((None, *passes), passes, strict=False):
            follows_first = before is not None and before.dk_accumulator is None
            if follows_first and isinstance(epilogue, Sigmoid):
                epilogue = self.vectors.unread_sigmoid(problem, epilogue)
            RUNS[scheduled.purpose](self.buffers, problem, scheduled, epilogue, gradients).run()

    # -- other methods of `solve.Backend` and `linear.Summing`

    @property
    def linear_rows(self) -> tuple[GPURows, GPURows]:
        """Queries and keys, for linear terms."""
        return self.buffers.linear_rows

    def row_nans(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        out = self.buffers.launcher.queue.zeroed_array(problem.shape[0], np.float64)
        return self.vectors.find_and_add_nans(problem, out, self.vectors.any_key)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        """The numbers of each query's positives; `per_key` [N] has a number of each key."""
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        """The dot products of queries with their positives, of normalised rows if `normalize`."""
        query, key = self.linear_rows
        return query.positive_products(key, problem.positives)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """See `linear.Summing.segment_sums`: the rows of one process need no exchange."""
        return segment_sums(cupy, problem, *self.linear_rows, segments, columns)
