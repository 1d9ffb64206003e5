"""Features as BLAS reads them: converted and normalised rows, their norms, sums and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..grid import slices
from ..linear import LinearGradient
from ..norms import near_one
from ..problem import Array
from .loops.compilation import compiled
from .loops.elementary import wide_vectors

# {bytes of an element of the compute dtype: (least, largest) squared norm of a row}. A float64 row
# within these bounds is normalised as it is. Other float64 rows are divided by a power of two
# first: otherwise their squares, or their features in the compute dtype, could over- or underflow
SAFE_SQUARES = {4: (2.0**-100, 2.0**100), 8: (2.0**-900, 2.0**900)}
DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}


@dataclass
class Norms:
    """Norms of rows: |z_i| = 2^exponent_i / inverse_i.

    A row of zeros has inverse 0, so that it stays zero and gets zero gradient.
    """

    inverse: Array  # [n] float64
    exponent: Array | None  # [n] int32; None: all are 0


@dataclass
class Side:
    """Features of queries or keys, and blocks of them as BLAS reads them."""

    features: Array
    dtype: np.dtype[Any]  # of products and accumulators
    norms: Norms | None  # None: rows are not normalised

    @property
    def readable_in_place(self) -> bool:
        """Whether BLAS can read the features in place."""
        return self.norms is None and has_blas_layout(self.features, self.dtype)

    def take(self, index: Array) -> Array:
        """The rows with the numbers `index`, in the compute dtype, as a new array."""
        return self._copied(index, np.empty((len(index), self.features.shape[1]), self.dtype))

    def block(self, rows: slice, buffer: Array | None) -> Array:
        """`rows` in the compute dtype: a copy in `buffer`, or a view of the features. `buffer` is
        None if the features are `readable_in_place`."""
        if buffer is None:
            return self.features[rows]
        return self._copied(rows, buffer[: rows.stop - rows.start])

    def _copied(self, rows: slice | Array, out: Array) -> Array:
        norms = self.norms
        if norms is None or norms.exponent is None:
            np.copyto(out, self.features[rows], casting="same_kind")
        else:
            shift = -norms.exponent[rows, None]
            np.ldexp(self.features[rows], shift, out=out, casting="same_kind")
        if norms is not None:
            normalize_rows(out, norms.inverse[rows])
        return out

    def to_features(
        self, g: Array, u: Array, dots: Array, rows: slice, dtype: np.dtype[Any]
    ) -> Array:
        """dL/dz of the features z of `rows`, from g = dL/du, with the normalised rows u = z / |z|.

        `dots` are <g, u>. Returns g itself if rows are not normalised. Otherwise returns g,
        overwritten, or a new array of `dtype` if `dtype` is wider than the dtype of g.
        """
        norms = self.norms
        if norms is None:
            return g
        if dtype.itemsize > g.itemsize:
            # gradients of very long or short rows may over- or underflow in float32
            g = g.astype(dtype.newbyteorder("="))  # loops take the machine's byte order
        normalization_backward(g, u, dots, norms.inverse[rows])
        if norms.exponent is not None:
            np.ldexp(g, -norms.exponent[rows, None], out=g)
        return g

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """All rows in the compute dtype, 1024 at a time."""
        n, d = self.features.shape
        buffer = None if self.readable_in_place else np.empty((min(n, 1024), d), self.dtype)
        for rows in slices(n, 1024):
            yield rows, self.block(rows, buffer)

    def sums(
        self, segment: Array, count: int, factor: Array | None = None, order: Array | None = None
    ) -> Array:
        """See `infonce.kernels.linear.SegmentedRows`."""
        sums = np.zeros((count, self.features.shape[1]))
        factor = np.ones(len(segment)) if factor is None else factor
        for rows, z in self.blocks():
            by_segment = np.argsort(segment[rows], kind="stable")
            found, starts = np.unique(segment[rows][by_segment], return_index=True)
            terms = factor[rows][by_segment, None] * z[by_segment]
            sums[found] += np.add.reduceat(terms, starts)
        return sums

    def products(self, segment: Array, sums: Array, own_count: float) -> Array:
        """See `infonce.kernels.linear.SegmentedRows`."""
        out = np.empty(len(segment))
        for rows, z in self.blocks():
            own, part = z.astype(np.float64), segment[rows]
            out[rows] = np.einsum("id,id->i", own, sums[part] - own_count * own)
        return out


def has_blas_layout(z: Array, dtype: np.dtype[Any]) -> bool:
    """Whether BLAS can read features as operands of `dtype`, without a copy: elements of a row, or
    of a column, are neighbours, and rows (columns) do not overlap."""
    item = z.dtype.itemsize
    return bool(
        z.dtype == dtype
        and z.dtype.isnative
        and z.flags.aligned
        and (
            (z.strides[1] == item and z.strides[0] >= item * z.shape[1])
            or (z.strides[0] == item and z.strides[1] >= item * z.shape[0])
        )
    )


# (features in the dtype of products, normalised if the loss normalises; their `Side`, which has the
# norms: None without normalisation)
ReadableRows = tuple[Array, Side | None]


def readable_rows(features: Array, dtype: np.dtype[Any], normalize: bool) -> ReadableRows:
    """All rows as BLAS reads them, for a call in one block."""
    if not normalize:
        in_place = has_blas_layout(features, dtype)
        return features if in_place else features.astype(dtype, order="C"), None
    side = Side(features, dtype, None)
    z, inverse = np.empty(features.shape, dtype), np.empty(len(features))
    # squares of features that are narrower than float64 stay within the range of float64
    bounds = SAFE_SQUARES[dtype.itemsize] if features.dtype.itemsize == 8 else (0.0, np.inf)
    if features.dtype not in DTYPES.values() or not features.dtype.isnative:
        # float64 stays float64: its features may be below the range of a float32 `dtype`
        features = features.astype(DTYPES["fp64"] if features.dtype.itemsize == 8 else dtype)
    if not (features.flags.c_contiguous and features.flags.aligned):
        features = features.copy()  # Numba would compile `unit_rows` for each layout
    if unit_rows(features, *bounds, z, inverse):
        side.norms = Norms(inverse, None)
    else:  # a row has to be divided by a power of two first
        side.norms = find_norms(side.features, dtype)
        side.block(slice(0, len(features)), z)
    return z, side


def not_finite(features: Array) -> Array:
    """[n] whether each row has a NaN or an infinity."""
    out = np.empty(len(features), bool)
    for rows in slices(len(features), 1024):
        out[rows] = ~np.isfinite(features[rows]).all(axis=1)
    return out


def find_norms(features: Array, dtype: np.dtype[Any]) -> Norms:
    """The norms of rows, for products in `dtype`.

    Squares are added up in float64. A float64 row with a squared norm outside of `SAFE_SQUARES` is
    divided by a power of two first. Squares of narrower features stay within float64's range.
    """
    squares = np.empty(len(features))
    for rows, z in Side(features, DTYPES["fp64"], None).blocks():
        squares[rows] = np.einsum("id,id->i", z, z)
    exponent = None
    if features.dtype.itemsize == 8:
        least, largest = SAFE_SQUARES[dtype.itemsize]
        low, high = np.minimum.reduce(squares, initial=1.0), np.maximum.reduce(squares, initial=1.0)
        if not least <= low <= high <= largest:
            beyond = np.flatnonzero(~((squares >= least) & (squares <= largest)))
            exponent = np.zeros_like(squares, np.int32)
            for index in np.array_split(beyond, -(-len(beyond) // 1024)):
                z, exponent[index] = near_one(np, features[index].astype(np.float64))
                squares[index] = np.einsum("id,id->i", z, z)
    return Norms(np.where(squares == 0.0, 0.0, 1.0 / np.sqrt(squares)), exponent)


def dots_at(query: Side, key: Side, positives: Array) -> Array:
    """[M] or [M, P] float64: the dot products of rows with their positives."""
    out = np.empty(positives.shape[::-1])
    for rows in slices(len(positives), 256):
        q = query.take(np.arange(rows.start, rows.stop))
        for set_positives, dots in zip(np.atleast_2d(positives.T), np.atleast_2d(out), strict=True):
            row_dots(q, key.take(set_positives[rows]), dots[rows])
    return out.T


def rank_thresholds(query: Side, key: Side, positives: Array) -> Array:
    """[M] float64: dot products above which a key is nearer to a row than the row's positive.

    A threshold is the product x of the row q with its positive k, plus a bound of the rounding of x
    in a tile. So a key that equals the positive is not nearer, although BLAS may round its product
    in another way. Each of D partial sums is rounded by up to eps / 2 of itself. If signs are
    equal, partial sums grow to x, and D roundings have the standard deviation 0.17 eps sqrt(D) |x|.
    If signs are mixed, partial sums are a random walk of up to about 1.6 a / sqrt(D), where a is
    the sum of |q_d k_d|, and D roundings have a standard deviation below 0.33 eps a. The bound is
    six times the sum of both deviations: eps (sqrt(D) |x| + 2 a).
    """
    dots, magnitudes = np.empty((2, len(positives)))
    for rows in slices(len(positives), 256):
        q, k = query.take(np.arange(rows.start, rows.stop)), key.take(positives[rows])
        row_dots(q, k, dots[rows])
        row_dots(np.abs(q), np.abs(k), magnitudes[rows])
    growing = np.sqrt(query.features.shape[1]) * np.abs(dots)
    return dots + np.finfo(query.dtype).eps * (growing + 2.0 * magnitudes)


def subtract(term: LinearGradient, g: Array, z: Array, rows: slice) -> None:
    """Subtract the linear term from g, the gradient of `rows`, whose normalised features are z."""
    segment = term.segment[rows]
    for part in slices(len(g), 256):
        total = np.zeros(g[part].shape)
        if term.sums is not None and term.factor is not None:
            total += term.sums[segment[part]] - term.own_count * z[part].astype(np.float64)
            total *= term.factor[rows][part, None]
        if term.weighted is not None:
            total += term.weighted[segment[part]]
        np.subtract(g[part], total, out=g[part], casting="same_kind")


# --- loops that Numba compiles --------------------------------------------------------------------


@compiled
def unit_rows(z, least, largest, out, inverse):  # type: ignore[no-untyped-def]
    """out_i = z_i / |z_i|, and 0 for a row of zeros. Returns True if each row is a row of zeros, or
    has a squared norm within [least, largest]. Stops at the first other row, and returns False."""
    wide_vectors()
    for i in range(z.shape[0]):
        zi, to = z[i], out[i]
        square = 0.0
        for d in range(zi.size):
            square += np.float64(zi[d]) * np.float64(zi[d])
        if square == 0.0:  # of zeros, or of numbers whose squares underflow
            for d in range(zi.size):
                square += abs(np.float64(zi[d]))
            if square != 0.0:
                return False
        elif not least <= square <= largest:
            return False
        inverse[i] = 0.0 if square == 0.0 else 1.0 / math.sqrt(square)
        for d in range(zi.size):
            to[d] = np.float64(zi[d]) * inverse[i]
    return True


@compiled
def normalize_rows(z, inverse_norms):  # type: ignore[no-untyped-def]
    """z_i <- z_i * inverse_norms_i, in float64: the scale multiplies the rounding error."""
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
