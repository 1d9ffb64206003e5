"""Operands of the CPU backend: rows of features as BLAS reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Array, slices
from . import tile_ops as tile


@dataclass
class Side:
    """One side's features, read a block at a time: converted, made contiguous, normalised."""

    features: Array
    dtype: np.dtype[Any]
    inverse_norms: Array | None  # [n] float64

    @property
    def direct(self) -> bool:
        """Whether BLAS can read blocks where they lie."""
        z = self.features
        item = z.dtype.itemsize
        return bool(
            z.dtype == self.dtype
            and z.dtype.isnative
            and z.flags.aligned
            and self.inverse_norms is None
            and (
                (z.strides[1] == item and z.strides[0] >= item * z.shape[1])
                or (z.strides[0] == item and z.strides[1] >= item * z.shape[0])
            )
        )

    def take(self, index: Array) -> Array:
        """Rows in any order, as a new array."""
        out = self.features[index].astype(self.dtype)
        if self.inverse_norms is not None:
            tile.normalize_rows(out, self.inverse_norms[index])
        return out

    def block(self, rows: slice, buffer: Array | None) -> Array:
        """Rows `rows` in the compute dtype; in `buffer` unless they can be used in place."""
        if buffer is None:
            return self.features[rows]
        out = buffer[: rows.stop - rows.start]
        np.copyto(out, self.features[rows], casting="same_kind")
        if self.inverse_norms is not None:
            tile.normalize_rows(out, self.inverse_norms[rows])
        return out


def not_finite(features: Array) -> Array:
    """[n] whether a row has a NaN or an infinity."""
    out = np.empty(len(features), bool)
    if features.dtype in tile.REAL and features.dtype.isnative and features.flags.aligned:
        tile.not_finite(features, out)
        return out
    for rows in slices(len(features), 1024):
        out[rows] = ~np.isfinite(features[rows]).all(axis=1)
    return out


def inverse_norms(features: Array) -> Array:
    """1 / |z_i| in float64. A row of zeros has no direction: it stays zero, with zero gradient."""
    squares = np.empty(len(features))
    for rows in slices(len(features), 1024):
        block = features[rows].astype(np.float64)
        squares[rows] = np.einsum("id,id->i", block, block)
    return np.where(squares == 0.0, 0.0, 1.0 / np.sqrt(squares))
