"""From the dot products of a tile to dL/dx of a softmax: factors of rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..direction_losses import rounded_reference
from ..epilogues import SoftmaxGradient
from ..problem import Array
from .loops.tile_ops import (
    softmax_gradient,
    softmax_gradient_shared,
    softmax_gradient_two_sided,
)
from .resources import run_loop

# Below this, float64 logits have at least 12 bits after the binary point. Above, the difference of
# two references loses digits, so each direction has its own exponential
EXACT = 2.0**40


class SoftmaxFactors:
    """Reference exponents and factors of a softmax gradient, in the dtype of products.

    With dot products x_ij and c = `exponent_scale`, the exponent of a pair is c x_ij, in base 2.
    dL/dx of a negative, times the scale, is

        row_factor_i 2^(c (x_ij - row_reference_i))
            + column_factor_j 2^(c (x_ij - column_reference_j)),

    or, if `one_exponential` (one exponential then serves both directions),

        2^(c (x_ij - row_reference_i)) (row_factor_i + shared_row_factor_i shared_column_factor_j).

    So `row_reference` and `column_reference` are reference exponents (base 2) divided by c.
    """

    def __init__(
        self, epilogue: SoftmaxGradient, exponent_scale: float, dtype: np.dtype[Any],
        same_logits: bool,
    ) -> None:  # fmt: skip
        """`same_logits`: rows and columns have the same logits (`GivenOptions.same_logits`)."""
        self.exponent_scale, self.one_exponential = exponent_scale, False
        self.row_reference, self.row_factor, row_reference2 = rounded_reference(
            np, exponent_scale, epilogue.row_reference, epilogue.row_factor, dtype
        )
        self.two_sided = epilogue.column_reference is not None
        if epilogue.column_reference is None or epilogue.column_factor is None:
            return
        highest_row, lowest_row = row_reference2.max(), row_reference2.min()
        lowest_column = epilogue.column_reference.min()
        # With the first condition, a term that counts in its column is at least about 2^-40 with
        # the reference of its row, and `shared_row_factor` is below 2^20. With both conditions,
        # `shared_row_factor` does not underflow float32: it is above about 2^-80
        close = highest_row - lowest_column < 40 and highest_row - lowest_row < 80
        exact = max(abs(highest_row), abs(lowest_row)) < EXACT
        self.one_exponential = bool(same_logits and close and exact)
        if self.one_exponential:
            middle = 0.5 * (highest_row + lowest_column)
            self.shared_row_factor = np.exp2(row_reference2 - middle).astype(dtype)
            column_exponentials = np.exp2(middle - epilogue.column_reference)
            self.shared_column_factor = (epilogue.column_factor * column_exponentials).astype(dtype)
        else:
            self.column_reference, self.column_factor, _ = rounded_reference(
                np, exponent_scale, epilogue.column_reference, epilogue.column_factor, dtype
            )

    def write_gradient(
        self, x: Array, rows: slice, columns: slice, columns_x: Array | None = None
    ) -> None:
        """Replace the dot products x of a tile by dL/dx times the scale.

        The formula is that of negatives, for all pairs. The caller then replaces the values at
        positives (`tile_ops.insert_positives`), if there are any.

        `columns_x`: the products with the options of columns, if x has the options of rows.
        """
        scale, reference = self.exponent_scale, self.row_reference[rows]
        row_factor = self.row_factor[rows]
        if not self.two_sided:
            run_loop(softmax_gradient, x, scale, reference, row_factor)
        elif self.one_exponential:
            run_loop(
                softmax_gradient_shared, x, scale, reference, row_factor,
                self.shared_row_factor[rows], self.shared_column_factor[columns],
            )  # fmt: skip
        else:
            run_loop(
                softmax_gradient_two_sided, x, x if columns_x is None else columns_x, scale,
                reference, row_factor, self.column_reference[columns], self.column_factor[columns],
            )  # fmt: skip
