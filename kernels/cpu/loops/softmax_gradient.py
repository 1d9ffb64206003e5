"""From a tile of dot products to dL/dx of a softmax, in loops that Numba compiles.

Tiles, units and options are those of tile_ops.py. The caller inserts positives afterwards.
"""

from __future__ import annotations

import numpy as np

from .elementary import compiled, probability, wide_vectors
from .tile_ops import BY_COLUMN, BY_ROW, apply_options


@compiled
def softmax_gradient(  # type: ignore[no-untyped-def]
    x, c, row_reference, row_factor, key_bias=None, limits=None, guide_bits=None
):
    """x <- row_factor_i 2^(c (y - row_reference_i)), where y is x with the options of its row."""
    wide_vectors()
    scale, neg_inf = x.dtype.type(c), x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, reference, factor = x[i], row_reference[i], row_factor[i]
        for j in range(row.size):
            y = apply_options(row[j], key_bias, j, limits, i, neg_inf, guide_bits, i, j, BY_ROW)
            row[j] = factor * probability(scale * (y - reference))


@compiled
def softmax_gradient_shared(  # type: ignore[no-untyped-def]
    x, c, row_reference, row_factor, shared_row_factor, shared_column_factor
):
    """Both directions from one exponential a logit, with reference exponents of rows.

    x <- 2^(c (x - row_reference_i)) (row_factor_i + shared_row_factor_i shared_column_factor_j).
    """
    wide_vectors()
    scale = x.dtype.type(c)
    for i in range(x.shape[0]):
        row, reference = x[i], row_reference[i]
        factor, shared_factor = row_factor[i], shared_row_factor[i]
        for j in range(row.size):
            e = probability(scale * (row[j] - reference))
            row[j] = e * (factor + shared_factor * shared_column_factor[j])


@compiled
def softmax_gradient_two_sided(  # type: ignore[no-untyped-def]
    x, c, row_reference, row_factor, column_reference, column_factor,
    key_bias=None, row_limits=None, row_bias=None, column_limits=None, guide_bits=None,
):  # fmt: skip
    """Both directions, with an exponential for each: references may be far apart.

    x <- row_factor_i 2^(c (y - row_reference_i)) + column_factor_j 2^(c (z - column_reference_j)),
    where y is x with the options of its row, and z is x with the options of its column.
    """
    wide_vectors()
    scale, neg_inf = x.dtype.type(c), x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, reference, factor = x[i], row_reference[i], row_factor[i]
        for j in range(row.size):
            y = apply_options(row[j], key_bias, j, row_limits, i, neg_inf, guide_bits, i, j, BY_ROW)
            z = apply_options(
                row[j], row_bias, i, column_limits, j, neg_inf, guide_bits, i, j, BY_COLUMN
            )
            row[j] = factor * probability(scale * (y - reference)) + column_factor[j] * probability(
                scale * (z - column_reference[j])
            )
