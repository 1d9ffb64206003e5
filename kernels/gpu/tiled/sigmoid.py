"""The run of the sigmoid fold, which computes SigLIP's loss and gradients."""

from __future__ import annotations

import cupy
import numpy as np

from ...epilogues import Sigmoid
from ...problem import Gradients, Problem
from .. import config
from ..device.arguments import address
from ..schedule import Fold
from .buffers import Buffers
from .gradient import GradientRun


class SigmoidRun(GradientRun):
    """Losses of pairs, their gradients by logit, scale and bias, and dQ and dK."""

    def __init__(
        self, buffers: Buffers, problem: Problem, fold: Fold, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, fold, epilogue.phase, gradients)
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
        self.launch(self.fold.kernel, rows, columns, arguments)
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
