"""How arrays and numbers become arguments of kernels: structures as kernels/cuda/common.cuh has
them. (To CuPy a Python int has 64 bits, and a number of NumPy's takes longer to make.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import cupy
import numpy as np

from ...problem import Array

DTYPES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}
SCALAR = np.dtype([("value", "f8"), ("pointer", "u8"), ("factor", "f8"), ("shift", "u8")])
MATRIX = np.dtype([("data", "u8"), ("row_stride", "i8"), ("column_stride", "i8"), ("dtype", "i8")])
NO_MATRIX = (0, 0, 0, 0)


def pointers(names: str) -> np.dtype[Any]:
    """A structure of pointers."""
    return np.dtype([(name, "u8") for name in names.split()])


SUMS = pointers("max sum")


@cache
def dtype_code(dtype: Any) -> int:
    return DTYPES[dtype.name]


def _format(dtype: np.dtype[Any]) -> str:
    """Of all fields, those of inner structures too, in Python's letters."""
    if dtype.fields is None:
        return {"u8": "Q", "i8": "q", "f8": "d"}[dtype.str[1:]]
    return "".join(_format(field[0]) for field in dtype.fields.values())


@cache
def _packing(dtype: np.dtype[Any]) -> tuple[Callable[..., bytes], np.dtype[Any]]:
    layout = Struct("=" + _format(dtype))
    return layout.pack, np.dtype(f"V{layout.size}")


def struct(dtype: np.dtype[Any], *values: Any) -> Any:
    """A structure to pass by value, from the values of its fields, inner structures' one by one.
    (As bytes: CuPy takes long over the names of fields.)"""
    pack, by_value = _packing(dtype)
    return np.frombuffer(pack(*values), by_value)


def address(array: Array | None, first: int = 0) -> int:
    """Address of `array` from row `first` on; 0 for None."""
    return 0 if array is None else array.data.ptr + first * array.strides[0]


def whole_strides(array: Array) -> Array:
    """The array, or a copy where its strides are not whole elements."""
    item = array.dtype.itemsize
    rows, columns = array.strides
    return cupy.ascontiguousarray(array) if rows % item or columns % item else array


def matrix_fields(array: Array | None, first: int = 0) -> tuple[int, int, int, int]:
    """Fields of MATRIX for `array` from row `first` on; a null matrix for None."""
    if array is None:
        return NO_MATRIX
    dtype = array.dtype
    rows, columns = array.strides
    item = dtype.itemsize
    return array.data.ptr + first * rows, rows // item, columns // item, dtype_code(dtype)


def matrix(array: Array | None, first: int = 0) -> Any:
    return struct(MATRIX, *matrix_fields(array, first))


def scalar_fields(value: Any) -> tuple[tuple[float, int, float, int], Array]:
    """Fields of SCALAR for a number or a 0-d device array, and what keeps its pointer valid."""
    if isinstance(value, cupy.ndarray):
        wide = value.astype(np.float64, copy=False)
        return (0.0, wide.data.ptr, 1.0, 0), wide
    return (float(value), 0, 1.0, 0), None
