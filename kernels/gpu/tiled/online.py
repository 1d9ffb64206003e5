"""One pass for one softmax: log-sum-exps and gradients, against given reference exponents."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ...problem import Gradients, Grid, OnlineSoftmax, Problem
from .. import config
from ..device.arguments import address, sums_fields
from .context import Context
from .gradient import GradientFold


class OnlineFold(GradientFold):
    """Sums of 2^(x2 - r), and the same times keys. The reference exponent r of a row follows its
    logits: kernels/cuda/sm90/reference_exponents.cuh.

    Where dK is wanted, a block has all keys. Then the sums of its rows are complete, and the panel
    is multiplied once more, by queries that are weighted with their rows' units."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: OnlineSoftmax,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        assert context.sweep is not None
        self.epilogue, self.sweep = epilogue, context.sweep
        m = problem.shape[0]
        # 0 serves unit rows while their largest logit lies within +-40 or so
        self.references = self.launcher.queue.zeros(m, context.real)
        # which query panels are to be swept once more
        self.wanted = cupy.empty(-(-self.rows // config.BLOCK_M), np.int32)
        self.row_unit = cupy.empty(m)
        self.positive_gradient = cupy.empty(m)
        sums = context.sweep.row_sums(self.rows, self.columns)
        self.pairs, self.moments = self.partial_sums(sums)
        if self.of_columns is not None:
            self.weighted = context.scratch.take((self.rows * context.query.row_bytes,))
            # dK's unit is the largest upstream gradient, so weights of any size fit 16-bit elements
            self.find_ranges(m, problem.shape[1], row_factor=problem.upstream)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        n, d, start = rows.stop - rows.start, self.problem.shape[2], rows.start
        sums, reference = self.epilogue.rows, address(self.references, start)
        sum_of_rows, moment_of_rows = address(sums.sum, start), address(sums.moment, start)

        def sweep(wanted: Any, segments: int) -> int:
            """Returns how many pairs a row has then."""
            arguments = {
                "references": reference, "before": sum_of_rows,
                "positive": address(self.epilogue.positive_logits, start), "row_pairs": self.pairs,
                "row_stride": n, "row_moments": self.moments, "wanted": wanted,
                **self.panel_arguments(),
            }  # fmt: skip
            self.launch_sweep(
                "sweep_online", rows, columns, arguments, segments=segments, **self.of_sums
            )
            return self.sweep.segment_slots * segments

        acc, acc_stride = 0, 0
        if b > 0 and self.of_rows is not None:
            acc, acc_stride = self.of_rows.pointer(start), self.of_rows.stride
        slots = sweep(None, self.sweep.segments(n, self.k.rows))
        self.launch_panels(
            "check_heights", n, pairs=self.pairs, moments=self.moments, slots=slots, n=n,
            scale=self.scale, reference=reference, sum=sum_of_rows, moment=moment_of_rows,
            acc=acc, acc_stride=acc_stride, d=d, wanted=self.wanted,
        )  # fmt: skip
        # Mostly none, or a few panels that all multiprocessors share
        slots = sweep(self.wanted, self.sweep.max_segments(n, self.k.rows))
        self.launch_panels(
            "add_wanted", n, pairs=self.pairs, moments=self.moments, slots=slots, n=n,
            sum=sum_of_rows, moment=moment_of_rows, wanted=self.wanted,
        )  # fmt: skip
        self.add_to_rows(rows, a, b)

    def launch_panels(self, kernel: str, rows: int, /, **arguments: Any) -> None:
        """A thread block for each query panel, four threads a row."""
        panels = -(-rows // config.BLOCK_M)
        self.launcher.launch("vectors.cu", kernel, panels, 4 * config.BLOCK_M, arguments)

    def end_rows(self, rows: slice) -> None:
        start, n, sums = rows.start, rows.stop - rows.start, self.epilogue.rows
        self.launcher.vectors(
            "end_online", n, reference=address(self.references, start),
            rows=sums_fields(sums, start), positive=address(self.epilogue.positive_logits, start),
            positives=address(self.problem.positives, start),
            upstream=address(self.problem.upstream, start),
            factor=address(self.context.query.factor, start), n=n,
            row_weight=self.problem.row_weight, scale=self.scale,
            options=self.context.row_options(self.problem),
            unit=address(self.row_unit, start),
            positive_gradient=address(self.positive_gradient, start),
        )  # fmt: skip
        if self.of_columns is not None:
            weighted = self.context.query.stage(rows, self.weighted, {}, self.row_unit, self.unit)
            self.add_to_columns(weighted, self.grid.columns[0], start == 0)
        super().end_rows(rows)
