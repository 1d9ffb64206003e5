"""Norms of rows: of float64 rows of any finite norm, whose squares may over- or underflow."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import slices
from .problem import SILENT, Array

Norms = tuple[Array, Array | None] | None  # |z_i| = norms[i] 2^exponent[i]; no exponent: 0


def near_one(xp: Any, z: Array) -> tuple[Array, Array]:
    """(2^-e z, e [M] int32), e being the exponent of a row's largest size: an exact division. Rows
    of zeros, and rows with a NaN or an infinity, have e = 0."""
    largest = xp.abs(z).max(axis=1)
    exponent = xp.frexp(xp.where(xp.isfinite(largest), largest, 0.0))[1]
    return xp.ldexp(z, -exponent[:, None]), exponent


def log2_norms(z: Array) -> Array:
    """[M] log2 of the norms of NumPy rows; NaN if a feature is NaN or infinite."""
    norms = np.empty(len(z))
    for rows in slices(len(z), 1024):
        block, exponent = near_one(np, z[rows].astype(np.float64))
        with np.errstate(**SILENT):
            norms[rows] = 0.5 * np.log2(np.einsum("ij,ij->i", block, block)) + exponent
    return np.where(norms == np.inf, np.nan, norms)


def has_moderate_squares(z: Array) -> bool:
    """Whether all norms of float64 rows are well within the root of the range. Quick; False if
    that is not certain."""
    return bool(np.einsum("ij,ij->", z, z) < 2.0**900)


def normalized_rows(
    xp: Any, z: Array, normalize: bool, dtype: np.dtype[Any]
) -> tuple[Array, Norms]:
    """Features in the compute dtype, normalised if asked for (zero rows stay zero); their norms."""
    if not normalize:
        return z.astype(dtype, copy=False), None
    wide, exponent = z.astype(np.float64), None
    if z.dtype.itemsize == 8:  # whose squares may over- or underflow
        wide, exponent = near_one(xp, wide)
    norms = xp.linalg.norm(wide, axis=1, keepdims=True)
    norms[norms == 0] = np.inf
    return (wide / norms).astype(dtype), (norms, exponent)


def normalization_backward(xp: Any, g: Array, u: Array, norms: Norms) -> Array:
    """dL/dz = (g - u <g, u>) / |z|, where g = dL/du and u = z / |z|."""
    if norms is None:
        return g
    length, exponent = norms
    g = (g - u * (g * u).sum(axis=1, keepdims=True)) / length
    return g if exponent is None else xp.ldexp(g, -exponent[:, None])
