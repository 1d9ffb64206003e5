"""Runs of a pass that computes losses and gradients at once: one softmax, of rows; or sigmoids."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ...epilogues import OnlineSoftmax, Sigmoid
from ...problem import Gradients, Problem
from .. import config
from ..device.arguments import address, sums_fields
from ..schedule import ScheduledPass
from .buffers import Buffers
from .gradient import GradientRun


class OnlineRun(GradientRun):
    """Sums of 2^(x2 - r) for base-2 logits x2, and dQ as the sum of 2^(x2 - r) times keys.

    The reference exponent r of a row follows from its logits, as described in
    kernels/cuda/sm90/reference_exponents.cuh. If dK is wanted, a block has all keys, so that the
    sums of its rows are complete after the block. Then the gradient block is multiplied once more,
    by queries times the gradient divisors of their rows.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: OnlineSoftmax,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue = epilogue
        m = problem.shape[0]
        # reference exponent 0 suffices for rows whose largest base-2 logit is about -40 to 40
        self.references = self.launcher.queue.zeroed_array(m, buffers.real)
        # for each query tile, whether the sweep must compute it again
        self.repeated_tiles = cupy.empty(-(-self.rows // config.BLOCK_M), np.int32)
        self.row_divisors = cupy.empty(m)
        self.positive_gradient = cupy.empty(m)
        self.pairs, self.moments = self.memory["row_partials"], self.memory.get("row_moments")
        if self.dk_accumulator is not None:
            # dK's gradient divisor follows from the largest upstream gradient, so that weights of
            # any size fit 16-bit elements
            self.find_ranges(m, problem.shape[1], row_factor=problem.upstream)

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        n, d, start = rows.stop - rows.start, self.problem.shape[2], rows.start
        sums, reference = self.epilogue.rows, address(self.references, start)
        row_sum, row_moment = address(sums.sum, start), address(sums.moment, start)
        shape = self.shape
        assert isinstance(shape, config.Sweep)

        def sweep(visited_tiles: Any, segments: int) -> int:
            """Launch the sweep for query tiles (None: all); return the number of pairs of a row."""
            arguments = {
                "references": reference, "before": row_sum,
                "positive": address(self.epilogue.positive_logits, start), "row_pairs": self.pairs,
                "row_stride": n, "row_moments": self.moments, "visited_tiles": visited_tiles,
                **self.gradient_arguments(),
            }  # fmt: skip
            self.launch(self.scheduled.kernel, rows, columns, arguments, segments=segments)
            return shape.segment_slots * segments

        acc, acc_stride = 0, 0
        if column_block > 0 and self.dq_accumulator is not None:
            acc, acc_stride = self.dq_accumulator.pointer(start), self.dq_accumulator.stride
        slots = sweep(None, shape.segments(n, self.k.rows))
        self.launch_query_tiles(
            "check_references", n, pairs=self.pairs, moments=self.moments, slots=slots, n=n,
            scale=self.scale, reference=reference, sum=row_sum, moment=row_moment,
            acc=acc, acc_stride=acc_stride, d=d, repeated_tiles=self.repeated_tiles,
        )  # fmt: skip
        # usually no query tile is repeated; the keys of a few are divided among all multiprocessors
        slots = sweep(self.repeated_tiles, shape.max_segments(n, self.k.rows))
        self.launch_query_tiles(
            "add_repeated", n, pairs=self.pairs, moments=self.moments, slots=slots, n=n,
            sum=row_sum, moment=row_moment, repeated_tiles=self.repeated_tiles,
        )  # fmt: skip
        self.add_to_rows(rows, row_block)

    def launch_query_tiles(self, kernel: str, rows: int, /, **arguments: Any) -> None:
        """Launch one thread block for each query tile, with four threads for each row."""
        tiles = -(-rows // config.BLOCK_M)
        self.launcher.launch("vectors.cu", kernel, tiles, 4 * config.BLOCK_M, arguments)

    def end_rows(self, rows: slice) -> None:
        start, n, sums = rows.start, rows.stop - rows.start, self.epilogue.rows
        self.launcher.vectors(
            "end_online", n, reference=address(self.references, start),
            rows=sums_fields(sums, start), positive=address(self.epilogue.positive_logits, start),
            positives=address(self.problem.positives, start),
            upstream=address(self.problem.upstream, start),
            factor=address(self.buffers.query.factor, start), n=n,
            row_direction_weight=self.problem.row_direction_weight, scale=self.scale,
            options=self.buffers.scalars.row_options(self.problem),
            gradient_divisor=address(self.row_divisors, start),
            positive_gradient=address(self.positive_gradient, start),
        )  # fmt: skip
        if self.dk_accumulator is not None:
            buffer = self.memory["weighted_queries"]
            weighted = self.buffers.query.stage(rows, buffer, self.row_divisors, self.ranges)
            self.add_to_columns(weighted, self.grid.columns[0], start == 0)
        super().end_rows(rows)


class SigmoidRun(GradientRun):
    """Losses of pairs, their gradients by logit, scale and bias, and dQ and dK."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue = epilogue
        m, n, _ = problem.shape
        self.factor = cupy.ascontiguousarray(epilogue.row_factor, dtype=np.float64)
        self.find_ranges(m, n, row_factor=self.factor)
        self.positive_gradient = cupy.empty(m)
        self.row_factor = buffers.divide_factors(self.factor, self.ranges)

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        epilogue, n, start = self.epilogue, rows.stop - rows.start, rows.start
        sums, moments = self.memory["row_partials"], self.memory.get("row_moments")
        arguments = {
            "bias": self.buffers.scalars.bias, "row_factor": address(self.row_factor, start),
            "positive": address(epilogue.positive_logits, start), "row_sums": sums,
            "row_stride": n, "row_moments": moments,
        }  # fmt: skip
        if isinstance(self.shape, config.Sweep):
            arguments |= self.gradient_arguments()
        else:  # tiles need no tensor map
            arguments["gradient_block"] = self.gradient_fields()
        self.launch(self.scheduled.kernel, rows, columns, arguments)
        self.buffers.add_partial_sums(
            sums, moments, self.shape.row_slots(n, self.k.rows), self.ranges, self.scale, rows,
            epilogue.losses, epilogue.bias_grad, epilogue.log_scale_grad,
        )  # fmt: skip
        self.multiply(rows, columns, row_block, column_block)

    def end_rows(self, rows: slice) -> None:
        start, n, epilogue = rows.start, rows.stop - rows.start, self.epilogue
        self.launcher.vectors(
            "sigmoid_positives", n, logits=address(epilogue.positive_logits, start),
            a=address(self.factor, start), positives=address(self.problem.positives, start), n=n,
            bias=self.buffers.scalars.bias, scale=self.buffers.scalars.scale,
            out=address(self.positive_gradient, start),
            losses=address(epilogue.losses, start), bias_grad=address(epilogue.bias_grad, start),
            log_scale_grad=address(epilogue.log_scale_grad, start),
        )  # fmt: skip
        super().end_rows(rows)
