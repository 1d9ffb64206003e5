"""Rows of features as BLAS reads them, their sums, and the rows of gradients that they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..linear import LinearGradient
from ..problem import Array, slices
from .elementary import compiled, wide_vectors

REAL = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass
class Side:
    """Features of queries or keys, read block by block: converted, contiguous, normalised."""

    features: Array
    dtype: np.dtype[Any]
    inverse_norms: Array | None  # [n] float64

    @property
    def direct(self) -> bool:
        """Whether BLAS can read the features in place."""
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
        """Rows `index` in the compute dtype, as a new array."""
        out = self.features[index].astype(self.dtype)
        if self.inverse_norms is not None:
            normalize_rows(out, self.inverse_norms[index])
        return out

    def block(self, rows: slice, buffer: Array | None) -> Array:
        """`rows` in the compute dtype, in `buffer`; without a buffer, a view of the features."""
        if buffer is None:
            return self.features[rows]
        out = buffer[: rows.stop - rows.start]
        np.copyto(out, self.features[rows], casting="same_kind")
        if self.inverse_norms is not None:
            normalize_rows(out, self.inverse_norms[rows])
        return out

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Rows in the compute dtype, some at a time."""
        n, d = self.features.shape
        buffer = None if self.direct else np.empty((min(n, 1024), d), self.dtype)
        for rows in slices(n, 1024):
            yield rows, self.block(rows, buffer)

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        """See `infonce.kernels.linear.Rows`."""
        sums = np.zeros((count, self.features.shape[1]))
        factor = np.ones(len(segment)) if factor is None else factor
        for rows, z in self.blocks():
            _add_to_segments(z, segment[rows], factor[rows], sums)
        return sums

    def products(self, segment: Array, sums: Array, itself: float) -> Array:
        """See `infonce.kernels.linear.Rows`."""
        out = np.empty(len(segment))
        for rows, z in self.blocks():
            _products(z, segment[rows], sums, itself, out[rows])
        return out


def not_finite(features: Array) -> Array:
    """[n] whether a row has a NaN or an infinity."""
    out = np.empty(len(features), bool)
    if features.dtype in REAL and features.dtype.isnative and features.flags.aligned:
        _not_finite(features, out)
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


def dots_at(query: Side, key: Side, positives: Array) -> Array:
    """[M] or [M, P] float64: the dot products of rows with their positives."""
    out = np.empty(positives.shape[::-1])
    for rows in slices(len(positives), 256):
        q = query.take(np.arange(rows.start, rows.stop))
        for of_set, dots in zip(np.atleast_2d(positives.T), np.atleast_2d(out), strict=True):
            row_dots(q, key.take(of_set[rows]), dots[rows])
    return out.T


def subtract(term: LinearGradient, g: Array, z: Array, rows: slice) -> None:
    """Add the term's share of the gradient to g, that of the rows z."""
    factor = np.zeros(len(g)) if term.factor is None else term.factor[rows]
    sums = term.weighted if term.sums is None else term.sums  # one of them is there
    weighted = sums if term.weighted is None else term.weighted
    share = 0.0 if term.weighted is None else 1.0
    _subtract(g, z, term.segment[rows], factor, sums, share, weighted, term.itself)


# --- loops that Numba compiles --------------------------------------------------------------------


@compiled
def _not_finite(z, out):  # type: ignore[no-untyped-def]
    """out[i] = whether row i has a NaN or an infinity: 0 times either is NaN."""
    wide_vectors()
    for i in range(z.shape[0]):
        row = z[i]
        total = z.dtype.type(0)
        for d in range(row.size):
            total += row[d] * z.dtype.type(0)
        out[i] = total != z.dtype.type(0)


@compiled
def normalize_rows(z, inverse_norms):  # type: ignore[no-untyped-def]
    """z_i <- z_i / |z_i|, in float64: the scale multiplies this rounding error."""
    wide_vectors()
    for i in range(z.shape[0]):
        row, inverse = z[i], inverse_norms[i]
        for d in range(row.size):
            row[d] = np.float64(row[d]) * inverse


@compiled
def row_dots(g, z, out):  # type: ignore[no-untyped-def]
    """out[i] = <g_i, z_i> in float64."""
    wide_vectors()
    for i in range(g.shape[0]):
        gi, zi = g[i], z[i]
        total = 0.0
        for d in range(gi.size):
            total += np.float64(gi[d]) * np.float64(zi[d])
        out[i] = total


@compiled
def normalization_backward(g, u, dots, inverse_norms):  # type: ignore[no-untyped-def]
    """g_i <- (g_i - u_i <g_i, u_i>) / |z_i|: from dL/du_i to dL/dz_i, where u_i = z_i / |z_i|."""
    wide_vectors()
    for i in range(g.shape[0]):
        gi, ui, dot, inverse = g[i], u[i], dots[i], inverse_norms[i]
        for d in range(gi.size):
            gi[d] = (np.float64(gi[d]) - np.float64(ui[d]) * dot) * inverse


@compiled
def _add_to_segments(z, segment, factor, sums):  # type: ignore[no-untyped-def]
    """sums[segment_i] += factor_i z_i."""
    wide_vectors()
    for i in range(z.shape[0]):
        zi, out, f = z[i], sums[segment[i]], factor[i]
        for d in range(zi.size):
            out[d] += f * np.float64(zi[d])


@compiled
def _products(z, segment, sums, itself, out):  # type: ignore[no-untyped-def]
    """out_i = z_i . (sums[segment_i] - itself z_i)."""
    wide_vectors()
    for i in range(z.shape[0]):
        zi, of_segment = z[i], sums[segment[i]]
        total = 0.0
        for d in range(zi.size):
            total += np.float64(zi[d]) * (of_segment[d] - itself * np.float64(zi[d]))
        out[i] = total


@compiled
def _subtract(g, z, segment, factor, sums, share, weighted, itself):  # type: ignore[no-untyped-def]
    """g_i -= factor_i sums[segment_i] + share weighted[segment_i] - itself factor_i z_i."""
    wide_vectors()
    for i in range(g.shape[0]):
        gi, zi, f = g[i], z[i], factor[i]
        of_segment, of_weighted = sums[segment[i]], weighted[segment[i]]
        for d in range(gi.size):
            term = f * (of_segment[d] - itself * np.float64(zi[d])) + share * of_weighted[d]
            gi[d] = np.float64(gi[d]) - term
