"""Limits and biases of pairs, as kernels take them: LIMITS and BIAS of kernels/cuda/block.cuh."""

from __future__ import annotations

import cupy

from ...problem import LOG2_E, Problem
from ...targets import limits
from ..device.arguments import Fields, address
from ..linear import Linear
from .context import Context


class PairVectors:
    """Of one call.

    Kernels add the bias of a column to all of its logits, not to those alone of which it is the
    key. That changes no softmax of the column, and adds the bias to its log-sum-exp (`of_columns`).
    Where rows are keys of their columns, so it is with them (`of_rows`).
    """

    def __init__(self, context: Context, problem: Problem) -> None:
        self.row_limits = self.column_limits = self.row_bias = self.column_bias = None
        self.of_rows = self.of_columns = None
        if problem.leaves_out:
            dots = Linear(context).positive_products(problem.positives)
            of_rows = limits(cupy, problem, dots) * (problem.exponent_scale * LOG2_E)
            self.row_limits = self.column_limits = context.to_products(of_rows)
        if problem.key_bias is not None:
            self.of_columns = problem.key_bias * LOG2_E
            self.column_bias = context.to_products(self.of_columns)
            if problem.symmetric:
                self.of_rows, self.row_bias = self.of_columns, self.column_bias

    def defines(self, columns: int) -> dict[str, int]:
        """-D options; `columns`: whether columns have a softmax, 0 or 1."""
        made = {}
        if self.row_limits is not None:
            made["LIMITS"] = 1 + columns
        if self.column_bias is not None:
            made["BIAS"] = 1 if self.row_bias is None else 2
        return made

    def fields(self, rows: slice, columns: slice) -> Fields:
        """Fields of struct Block that these options add."""
        made: Fields = {}
        if self.row_limits is not None:
            made["row_limits"] = address(self.row_limits, rows.start)
            made["column_limits"] = address(self.column_limits, columns.start)
        if self.column_bias is not None:
            made["row_bias"] = address(self.row_bias, rows.start)
            made["column_bias"] = address(self.column_bias, columns.start)
        return made
