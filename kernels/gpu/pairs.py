"""Limits and biases of pairs, as kernels take them: LIMITS and BIAS of kernels/cuda/block.cuh."""

from __future__ import annotations

from ..problem import LOG2_E, Array, Problem
from .device.arguments import Fields, address
from .tiled.context import Context


class PairVectors:
    """Of one call.

    Kernels add the bias of a column to all of its logits, not to those alone of which it is the
    key. That changes no softmax of the column, and adds the bias to its log-sum-exp (`of_columns`).
    Where rows are keys of their columns, so it is with them (`of_rows`).
    """

    def __init__(self, context: Context, problem: Problem) -> None:
        def products(logits: Array | None) -> Array | None:
            return None if logits is None else context.to_products(logits)

        scale = problem.exponent_scale * LOG2_E
        self.row_limits, self.column_limits = (
            products(None if dots is None else dots * scale)
            for dots in (problem.limits, problem.key_limits)
        )
        self.of_rows, self.of_columns = (
            None if bias is None else bias * LOG2_E
            for bias in (problem.query_bias, problem.key_bias)
        )
        self.row_bias, self.column_bias = products(self.of_rows), products(self.of_columns)

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
