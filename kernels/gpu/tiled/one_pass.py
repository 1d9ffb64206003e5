"""Runs of a pass that computes losses and gradients at once: a softmax of rows only, and SigLIP.

Losses with two softmaxes have two passes: lse.py, then gradient.py.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ...epilogues import OnlineSoftmax, Sigmoid
from ...problem import Gradients, Problem
from .. import config
from ..device.arguments import Fields, address, sums_fields
from ..schedule import ScheduledPass
from .buffers import Buffers
from .gradient import GradientRun


class OnlineRun(GradientRun):
    """Log-sum-exps of rows, dQ and dK in one pass, for a loss with a softmax of rows only.

    The gradient block has e_ij = 2^(x2_ij - r_i), with base-2 logits x2 and reference exponents r
    that are chosen before the logits are known (kernels/cuda/sm90/online_references.cuh). The sum
    of row i gives its loss and its gradient divisor u_i. Then dQ_i = u_i sum_j e_ij k_j, and
    dK_j = sum_i e_ij (u_i q_i). u_i is known when row i has met all keys. So if dK is wanted, a
    block has all keys, and its products for dK come after its sums.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: OnlineSoftmax,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue = epilogue
        m = problem.shape[0]
        # r: rows that it does not serve get another r, by `check_references`
        self.references = buffers.vectors.begin_one_pass(
            problem, epilogue, self.exponent_scale, buffers.real
        )
        self.add_linear_terms(buffers.vectors.begin_linear_terms(problem, buffers.linear_rows))
        # for each query tile of a block, 1 if the sweep has to compute it again with other r
        self.repeated_tiles = cupy.empty(-(-self.largest_rows // config.BLOCK_M), np.int32)
        self.row_divisors = cupy.empty(m)  # u
        self.positive_gradient = cupy.empty((m, problem.set_size))
        self.partials, self.moments = self.parts["row_partials"], self.parts.get("row_moments")
        if self.dk_accumulator is not None:
            # u q is divided by the divisor of `ranges`, which follows from the largest upstream
            # gradient, so that weights of any size fit 16-bit elements
            self.find_upstream_ranges(problem.upstream)

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        n, d, start = rows.stop - rows.start, self.problem.shape[2], rows.start
        sums, reference = self.epilogue.rows, address(self.references, start)
        row_sum, row_moment = address(sums.sum, start), address(sums.moment, start)
        shape, key_count = self.shape, self.key_operand.rows
        assert isinstance(shape, config.Sweep)

        def sweep(visited_tiles: Any, segments: int) -> int:
            """Launch the sweep for query tiles (None: all); return its partial sums of a row."""
            arguments = {
                "references": reference, "before": row_sum,
                "positive_logits": address(self.epilogue.positive_logits, start),
                "row_partials": self.partials, "row_stride": n, "row_moments": self.moments,
                "visited_tiles": visited_tiles, **self.gradient_arguments(),
            }  # fmt: skip
            self.launch(self.scheduled.kernel, rows, columns, arguments, segments=segments)
            return shape.segment_slots * segments

        # Sums and gradient block. A row whose sum is out of bounds gets another r, and its dQ so
        # far is scaled accordingly
        accumulator, accumulator_stride = 0, 0
        if column_block > 0 and self.dq_accumulator is not None:
            accumulator = self.dq_accumulator.pointer(start)
            accumulator_stride = self.dq_accumulator.stride
        slots = sweep(None, shape.segments(n, key_count))
        self.launch_query_tiles(
            "check_references", n, pairs=self.partials, moments=self.moments, slots=slots, n=n,
            scale=self.exponent_scale, reference=reference, sum=row_sum, moment=row_moment,
            acc=accumulator, acc_stride=accumulator_stride, d=d, repeated_tiles=self.repeated_tiles,
        )  # fmt: skip

        # The query tiles of such rows again: usually none. With `max_segments`, all multiprocessors
        # share the keys of a few query tiles
        slots = sweep(self.repeated_tiles, shape.max_segments(n, key_count))
        self.launch_query_tiles(
            "add_repeated", n, pairs=self.partials, moments=self.moments, slots=slots, n=n,
            sum=row_sum, moment=row_moment, repeated_tiles=self.repeated_tiles,
        )  # fmt: skip
        self.add_to_rows(rows, row_block)

    def launch_query_tiles(self, kernel: str, rows: int, /, **arguments: Any) -> None:
        """Launch a kernel of vectors.cu: a thread block for each query tile, 4 threads a row."""
        tiles = -(-rows // config.BLOCK_M)
        self.launcher.launch("vectors.cu", kernel, tiles, 4 * config.BLOCK_M, arguments)

    def end_rows(self, rows: slice) -> None:
        """Complete the sums, the gradient divisors and dQ of `rows`, and add their terms to dK."""
        start, n, sums = rows.start, rows.stop - rows.start, self.epilogue.rows
        weights: Fields = {}
        if self.problem.label_weights is not None:
            weights = {"label_weights": address(self.problem.label_weights, start)}
        self.launcher.launch_vectors(
            "end_online", n, defines={"LABEL_WEIGHTS": 1} if weights else None, **weights,
            reference=address(self.references, start), rows=sums_fields(sums, start),
            positive_logits=address(self.epilogue.positive_logits, start),
            positives=address(self.problem.positives, start), set_size=self.problem.set_size,
            upstream=address(self.problem.upstream, start),
            factor=address(self.buffers.query.factor, start), n=n,
            row_direction_weight=self.problem.row_direction_weight,
            label_smoothing=self.problem.label_smoothing,
            has_classes=self.problem.classes is not None, scale=self.exponent_scale,
            options=self.buffers.scalars.row_options(self.problem),
            gradient_divisor=address(self.row_divisors, start),
            positive_gradient=address(self.positive_gradient, start),
        )  # fmt: skip
        if self.dk_accumulator is not None:
            buffer = self.parts["weighted_queries"]
            weighted = self.buffers.query.stage(rows, buffer, self.row_divisors, self.ranges)
            self.add_to_columns(weighted, self.grid.columns[0], overwrites=start == 0)
        super().end_rows(rows)


class SigmoidRun(GradientRun):
    """A pass of SigLIP: losses, gradients of the scale and the bias, dQ and dK.

    Each pair has a loss of its own, so no pass of log-sum-exps comes before. One run computes all
    results if one of these holds: queries are the keys, dK is not wanted, or the accumulator of dK
    has room for all keys. Otherwise, a call has several runs (`PassScheduler.gradients`). The first
    run computes all results except dK. Each later run computes dK of a range of keys. Its losses,
    and its gradients of the scale and the bias, go to vectors that nobody reads (`GPU.run`).
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue = epilogue
        m = problem.shape[0]
        self.row_factor = cupy.ascontiguousarray(epilogue.row_factor, dtype=np.float64)
        self.find_upstream_ranges(self.row_factor)
        self.positive_gradient = cupy.empty(m)
        # `row_factor` over the gradient divisor, so that the kernel computes P
        self.divided_row_factor = buffers.divide_factors(self.row_factor, self.ranges)

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        epilogue, n, start = self.epilogue, rows.stop - rows.start, rows.start
        partials, moments = self.parts["row_partials"], self.parts.get("row_moments")
        arguments = {
            "bias": self.buffers.scalars.bias,
            "row_factor": address(self.divided_row_factor, start),
            "positive_logits": address(epilogue.positive_logits, start), "row_sums": partials,
            "row_stride": n, "row_moments": moments,
        }  # fmt: skip
        if isinstance(self.shape, config.Sweep):
            arguments |= self.gradient_arguments()
        else:  # portable kernels need no tensor map
            arguments["gradient_block"] = self.gradient_fields()
        self.launch(self.scheduled.kernel, rows, columns, arguments)
        self.buffers.add_partial_sums(
            partials, moments, self.shape.row_slots(n, self.key_operand.rows), self.ranges,
            self.exponent_scale, rows, epilogue.losses, epilogue.bias_grad, epilogue.log_scale_grad,
        )  # fmt: skip
        self.multiply(rows, columns, row_block, column_block)

    def end_rows(self, rows: slice) -> None:
        """Add the positives of `rows`, which blocks leave out, to losses and sums; complete dQ."""
        start, n, epilogue = rows.start, rows.stop - rows.start, self.epilogue
        self.launcher.launch_vectors(
            "sigmoid_positives", n, logits=address(epilogue.positive_logits, start),
            a=address(self.row_factor, start), n=n,
            positives=address(self.problem.positives, start),
            bias=self.buffers.scalars.bias, scale=self.buffers.scalars.scale,
            out=address(self.positive_gradient, start),
            losses=address(epilogue.losses, start), bias_grad=address(epilogue.bias_grad, start),
            log_scale_grad=address(epilogue.log_scale_grad, start),
        )  # fmt: skip
        super().end_rows(rows)
