"""The sigmoid fold: SigLIP's loss and gradient in one pass."""

from __future__ import annotations

import cupy
import numpy as np

from ...problem import Gradients, Grid, Problem, Sigmoid
from .. import config
from ..device.arguments import address
from .context import Context
from .gradient import GradientFold
from .operands import NO_PANEL


class SigmoidFold(GradientFold):
    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        self.epilogue = epilogue
        m, n, _ = problem.shape
        self.factor = cupy.ascontiguousarray(epilogue.row_factor, dtype=np.float64)
        self.find_ranges(m, n, row_factor=self.factor)
        self.positive_gradient = cupy.empty(m)
        self.row_factor = cupy.empty(m, context.real)
        self.launcher.vectors(
            "per_unit", m, x=self.factor, n=m, ranges=self.unit, out=self.row_factor
        )
        self.sums, self.moments = self.partial_sums(self.tile.row_sums(self.rows, self.columns))

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        epilogue, n, start = self.epilogue, rows.stop - rows.start, rows.start
        arguments = {
            "bias": self.context.bias, "row_factor": address(self.row_factor, start),
            "positive": address(epilogue.positive_logits, start), "row_sums": self.sums,
            "row_stride": n, "row_moments": self.moments,
        }  # fmt: skip
        defines = {"PANEL": int(self.gradients is not None), **self.of_sums}
        if isinstance(self.tile, config.Tile):
            arguments["panel"] = self.panel.fields if defines["PANEL"] else NO_PANEL["panel"]
            self.launch_tiles("sigmoid", rows, columns, arguments, **defines)
        else:
            arguments |= self.panel_arguments()
            self.launch_sweep("sweep_sigmoid", rows, columns, arguments, **defines)
        self.launcher.vectors(
            "add_pairs", n, pairs=self.sums, z=self.moments,
            slots=self.tile.row_slots(n, self.k.rows), stride=n, n=n, unit=self.unit,
            scale=self.scale, a=address(epilogue.losses, start),
            b=address(epilogue.bias_grad, start), c=address(epilogue.log_scale_grad, start),
        )  # fmt: skip
        if self.gradients is not None:
            self.multiply(rows, columns, a, b)

    def end_rows(self, rows: slice) -> None:
        start, n, epilogue = rows.start, rows.stop - rows.start, self.epilogue
        self.launcher.vectors(
            "sigmoid_positives", n, logits=address(epilogue.positive_logits, start),
            a=address(self.factor, start), positives=address(self.problem.positives, start), n=n,
            bias=self.context.bias, scale=self.context.scale,
            out=address(self.positive_gradient, start),
            losses=address(epilogue.losses, start), bias_grad=address(epilogue.bias_grad, start),
            log_scale_grad=address(epilogue.log_scale_grad, start),
        )  # fmt: skip
        super().end_rows(rows)
