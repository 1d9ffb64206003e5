"""Norms of rows, and normalisation by operations on arrays (NumPy or CuPy).

Squares of float64 features may over- or underflow, so float64 rows are first divided by a power of
two. The CPU's tiles have their own functions in kernels/cpu/operands.py, the GPU's kernels in
kernels/cuda/rows.cu.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import slices
from .problem import SILENT, Array

# (norms [M, 1], exponents [M] or None): |z_i| = norms[i] 2^exponents[i]; None in place of the
# exponents: all are 0; None in place of the tuple: rows are not normalised
Norms = tuple[Array, Array | None] | None


def near_one(xp: Any, z: Array) -> tuple[Array, Array]:
    """Rows divided by powers of two so that each row's largest feature is in [1/2, 1) in size.

    Returns (2^-e_i z_i, e [M] int32). The division is exact, except for subnormal results. Rows of
    zeros, and rows with a NaN or an infinity, have e = 0.
    """
    largest = xp.abs(z).max(axis=1)
    exponent = xp.frexp(xp.where(xp.isfinite(largest), largest, 0.0))[1]
    return xp.ldexp(z, -exponent[:, None]), exponent


def log2_norms(z: Array) -> Array:
    """[M] log2 of the norms of NumPy rows: -inf of a row of zeros, NaN of a row with a feature that
    is NaN or infinite. Checks of the arguments call this."""
    log_norms = np.empty(len(z))
    for rows in slices(len(z), 1024):  # at a time, to limit the memory of float64 copies
        block, exponent = near_one(np, z[rows].astype(np.float64))
        with np.errstate(**SILENT):
            log_norms[rows] = 0.5 * np.log2(np.einsum("ij,ij->i", block, block)) + exponent
    return np.where(log_norms == np.inf, np.nan, log_norms)


def has_moderate_squares(z: Array) -> bool:
    """Whether logits of float64 rows `z` certainly stay finite: the squares of all features add up
    to less than 2^900, which leaves a factor 2^124 for the scale. Quick; False also for a NaN. If
    False, the checks compute `log2_norms`."""
    return bool(np.einsum("ij,ij->", z, z) < 2.0**900)


def normalized_rows(
    xp: Any, z: Array, normalize: bool, dtype: np.dtype[Any]
) -> tuple[Array, Norms]:
    """Rows in the compute dtype `dtype`, divided by their norms if `normalize`; and the norms.

    Without `normalize`, the norms are None.
    """
    if not normalize:
        return z.astype(dtype, copy=False), None
    wide, exponent = z.astype(np.float64), None
    if z.dtype.itemsize == 8:  # squares of narrower dtypes stay within the range of float64
        wide, exponent = near_one(xp, wide)
    norms = xp.linalg.norm(wide, axis=1, keepdims=True)
    # so that a row of zeros stays zero, and gets zero gradient
    norms = xp.where(norms == 0, np.inf, norms)
    return (wide / norms).astype(dtype), (norms, exponent)


def normalization_backward(xp: Any, g: Array, u: Array, norms: Norms) -> Array:
    """dL/dz = (g - u <g, u>) / |z|, where g = dL/du and u = z / |z|.

    `norms` are the second result of `normalized_rows`; None: returns g.
    """
    if norms is None:
        return g
    length, exponent = norms
    g = (g - u * (g * u).sum(axis=1, keepdims=True)) / length
    return g if exponent is None else xp.ldexp(g, -exponent[:, None])
