"""Arguments of kernels for arrays and numbers: addresses, and fields of common structures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from ...epilogues import Sums
from ...problem import LN_2, SCALES, Array, Problem

DTYPES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # DTYPE_* of common.cuh
Fields = dict[str, Any]  # the fields of a structure in CUDA, by their names
MATRIX = ("data", "row_stride", "column_stride", "dtype")
NO_MATRIX = (0, 0, 0, 0)
SCALAR = ("value", "pointer", "factor", "feature_divisors")
# struct Scale for numbers that are logits already: in natural units, and in base 2
NATURAL: Fields = dict(zip(SCALAR, (1.0, 0, 1.0, 0), strict=True))
BASE_2: Fields = {**NATURAL, "value": LN_2}


@cache
def dtype_code(dtype: Any) -> int:
    return DTYPES[dtype.name]


def address(array: Array | None, first: int = 0) -> int:
    """Address of `array` from row `first` on; 0 for None."""
    return 0 if array is None else array.data.ptr + first * array.strides[0]


def with_strides_in_whole_elements(array: Array) -> Array:
    """The array, or a contiguous copy if its strides are not multiples of an element."""
    item = array.dtype.itemsize
    rows, columns = array.strides
    return cupy.ascontiguousarray(array) if rows % item or columns % item else array


def readable_by_kernels(problem: Problem) -> Problem:
    """The problem in the form that kernels read.

    Numbers on the device are float64, and strides are multiples of an element.
    """
    changed = {
        name: value.astype(np.float64)
        for name, value in (("scale", problem.scale), ("bias", problem.bias))
        if isinstance(value, cupy.ndarray) and value.dtype != np.float64
    }
    query = with_strides_in_whole_elements(problem.query)
    key = query if problem.symmetric else with_strides_in_whole_elements(problem.key)
    if query is not problem.query or key is not problem.key:
        changed |= {"query": query, "key": key}
    if problem.guided:
        for name in ("guide_query", "guide_key"):
            changed[name] = with_strides_in_whole_elements(getattr(problem, name))
    return replace(problem, **changed) if changed else problem


def valid_scale(problem: Problem) -> Any:
    """The scale; one on the device that is out of range becomes NaN, as kernels have it."""
    if not isinstance(problem.scale, cupy.ndarray):
        return problem.scale
    scale = problem.scale.astype(np.float64)
    low, high = SCALES["fp64" if problem.compute == "fp64" else "fp32"]
    return cupy.where((scale >= low) & (scale <= high), scale, np.nan)


def matrix_values(array: Array | None, first: int = 0) -> tuple[int, int, int, int]:
    """Values of struct Matrix for `array` from row `first` on; for None, a matrix without data."""
    if array is None:
        return NO_MATRIX
    dtype = array.dtype
    rows, columns = array.strides
    item = dtype.itemsize
    return array.data.ptr + first * rows, rows // item, columns // item, dtype_code(dtype)


def matrix(array: Array | None, first: int = 0) -> Fields:
    """struct Matrix for `array` from row `first` on; for None, a matrix without data."""
    return dict(zip(MATRIX, matrix_values(array, first), strict=True))


def scalar_values(value: Any) -> tuple[tuple[float, int, float, int], Array]:
    """Values of struct Scalar for a number or a 0-d device array.

    The second result is the array to which the struct points, or None. The caller keeps it alive.
    """
    if isinstance(value, cupy.ndarray):
        wide = value.astype(np.float64, copy=False)
        return (0.0, wide.data.ptr, 1.0, 0), wide
    return (value if isinstance(value, float) else float(value), 0, 1.0, 0), None


def scalar(value: Any) -> tuple[Fields, Array]:
    """struct Scalar for a number or a 0-d device array, and the array that must stay alive."""
    values, array = scalar_values(value)
    return dict(zip(SCALAR, values, strict=True)), array


def sums_fields(sums: Sums | None, first: int = 0) -> Fields:
    """struct Sums for sums from row `first` on; for None, null pointers."""
    arrays = (None, None, None) if sums is None else sums.arrays
    return {
        name: address(array, first)
        for name, array in zip(("max", "sum", "moment"), arrays, strict=True)
    }
