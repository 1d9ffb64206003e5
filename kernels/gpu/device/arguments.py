"""Arrays and numbers as arguments of kernels: addresses, and fields of common structures."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ...problem import Array

DTYPES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # DTYPE_* of common.cuh
Fields = dict[str, Any]  # of a structure that a kernel takes, by the names that CUDA gives them
NO_MATRIX: Fields = {"data": 0, "row_stride": 0, "column_stride": 0, "dtype": 0}


@cache
def dtype_code(dtype: Any) -> int:
    return DTYPES[dtype.name]


def address(array: Array | None, first: int = 0) -> int:
    """Address of `array` from row `first` on; 0 for None."""
    return 0 if array is None else array.data.ptr + first * array.strides[0]


def whole_strides(array: Array) -> Array:
    """The array, or a copy where its strides are not whole elements."""
    item = array.dtype.itemsize
    rows, columns = array.strides
    return cupy.ascontiguousarray(array) if rows % item or columns % item else array


def matrix(array: Array | None, first: int = 0) -> Fields:
    """struct Matrix: `array` from row `first` on; for None a matrix without data."""
    if array is None:
        return NO_MATRIX
    dtype = array.dtype
    rows, columns = array.strides
    item = dtype.itemsize
    return {
        "data": array.data.ptr + first * rows, "row_stride": rows // item,
        "column_stride": columns // item, "dtype": dtype_code(dtype),
    }  # fmt: skip


def scalar(value: Any) -> tuple[Fields, Array]:
    """struct Scalar for a number or a 0-d device array, and the array that its pointer needs."""
    if isinstance(value, cupy.ndarray):
        wide = value.astype(np.float64, copy=False)
        return {"value": 0.0, "pointer": wide.data.ptr, "factor": 1.0, "shift": 0}, wide
    if not isinstance(value, float):
        value = float(value)
    return {"value": value, "pointer": 0, "factor": 1.0, "shift": 0}, None
