"""Sums of the exponentials of a tile: (max, sum, moment) of its rows and columns."""

from __future__ import annotations

import numpy as np

from ..problem import Array
from .loops import tile_ops as tile
from .resources import run_loop


def sum_tile(
    x: Array, moment_logits: Array, scale: float, row_sums: Array, column_sums: Array | None
) -> None:
    """Write (max, sum, moment) of the rows of a tile [3, m], and of its columns [3, n] unless None.

    Rows and columns have the same logits, and share one exponential a logit.
    """
    arguments = moment_logits, scale, row_sums
    if column_sums is None:
        run_loop(tile.row_statistics, x, *arguments)
        return
    m, n = x.shape
    chunks = -(-m // tile.CHUNK)
    tops, parts = np.empty(chunks), np.empty((chunks, 2, n), x.dtype)
    run_loop(tile.row_and_column_statistics, x, *arguments, tops, parts)
    if tile.merge_columns(tops, parts, scale, column_sums) < tile.LEAST_SHARED_SUM:
        sum_columns(x, moment_logits, scale, column_sums)


def sum_columns(x: Array, moment_logits: Array, scale: float, column_sums: Array) -> None:
    """Write (max, sum, moment) of the columns of a tile [3, n], with exponentials of their own."""
    memory = np.empty((3, x.shape[1]), x.dtype)
    tile.column_statistics(x, moment_logits, scale, column_sums, memory)
