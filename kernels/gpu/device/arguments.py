"""Values of kernel arguments, made from arrays and numbers: addresses, and fields of structures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from ...epilogues import Sums
from ...maxsim.tokens import Tokens
from ...problem import LN_2, SCALES, Array, Problem

DTYPE_CODES = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # DTYPE_* of common.cuh
Fields = dict[str, Any]  # a structure of CUDA: its fields by name, which signatures.py orders
MATRIX_FIELDS = ("data", "row_stride", "column_stride", "dtype")  # of struct Matrix
NO_MATRIX = (0, 0, 0, 0)  # values of struct Matrix without data
# Fields of struct Scalar and struct Scale, whose number is `value` (or *pointer, unless null) times
# `factor` times *feature_divisors (null: 1)
SCALAR_FIELDS = ("value", "pointer", "factor", "feature_divisors")
# struct Scale, by which numbers are multiplied to be logits: for numbers that are natural logits
# already, and for base-2 logits
NATURAL: Fields = dict(zip(SCALAR_FIELDS, (1.0, 0, 1.0, 0), strict=True))
BASE_2: Fields = {**NATURAL, "value": LN_2}


@cache
def dtype_code(dtype: Any) -> int:
    """The number of a dtype in struct Matrix."""
    return DTYPE_CODES[dtype.name]


def address(array: Array | None, first: int = 0) -> int:
    """Address of row (or element) `first` of `array`; 0, the null pointer, for None."""
    return 0 if array is None else array.data.ptr + first * array.strides[0]


def with_strides_in_whole_elements(array: Array) -> Array:
    """The array, or a contiguous copy if its strides are not multiples of an element's bytes."""
    item = array.dtype.itemsize
    misaligned = any(stride % item for stride in array.strides)  # bytes
    return cupy.ascontiguousarray(array) if misaligned else array


def readable_by_kernels(problem: Problem) -> Problem:
    """The problem in the form that kernels read. Calls and blocks on a GPU begin with this step.

    A scale or bias on the device becomes float64. Features whose strides are not multiples of an
    element's bytes are copied.
    """
    changed = {
        name: value.astype(np.float64)
        for name, value in (("scale", problem.scale), ("bias", problem.bias))
        if isinstance(value, cupy.ndarray) and value.dtype != np.float64
    }
    if isinstance(problem.query, Tokens):  # whose kernels read copies of other strides
        return replace(problem, **changed) if changed else problem
    query = with_strides_in_whole_elements(problem.query)
    key = query if problem.symmetric else with_strides_in_whole_elements(problem.key)
    if query is not problem.query or key is not problem.key:
        changed |= {"query": query, "key": key}
    if problem.own is not None:
        changed["own"] = with_strides_in_whole_elements(problem.own)
    if problem.guided:
        for name in ("guide_query", "guide_key"):
            changed[name] = with_strides_in_whole_elements(getattr(problem, name))
    return replace(problem, **changed) if changed else problem


def valid_scale(problem: Problem) -> Any:
    """The scale for operations on arrays. A scale on the device that is out of range becomes NaN.

    The host cannot check a scale on the device. Kernels do the same by struct Scale of common.cuh.
    """
    if not isinstance(problem.scale, cupy.ndarray):
        return problem.scale
    scale = problem.scale.astype(np.float64)
    low, high = SCALES["fp64" if problem.compute_precision == "fp64" else "fp32"]
    return cupy.where((scale >= low) & (scale <= high), scale, np.nan)


def matrix_values(array: Array | None, first: int = 0) -> tuple[int, int, int, int]:
    """Values of `MATRIX_FIELDS` for `array` from row `first` on; None: a matrix without data."""
    if array is None:
        return NO_MATRIX
    dtype = array.dtype
    row_stride, column_stride = array.strides  # bytes; struct Matrix counts elements
    item = dtype.itemsize
    start = array.data.ptr + first * row_stride
    return start, row_stride // item, column_stride // item, dtype_code(dtype)


def matrix(array: Array | None, first: int = 0) -> Fields:
    """struct Matrix for `array` from row `first` on; None: a matrix without data."""
    return dict(zip(MATRIX_FIELDS, matrix_values(array, first), strict=True))


def scalar_values(value: Any) -> tuple[tuple[float, int, float, int], Array]:
    """Values of `SCALAR_FIELDS` for a number or a 0-d device array.

    The second result is the array to which the struct points, or None. The caller keeps the array
    alive.
    """
    if isinstance(value, cupy.ndarray):
        as_float64 = value.astype(np.float64, copy=False)
        return (0.0, as_float64.data.ptr, 1.0, 0), as_float64
    return (value if isinstance(value, float) else float(value), 0, 1.0, 0), None


def scalar(value: Any) -> tuple[Fields, Array]:
    """struct Scalar for a number or a 0-d device array; the array to keep alive, or None."""
    values, array = scalar_values(value)
    return dict(zip(SCALAR_FIELDS, values, strict=True)), array


def sums_fields(sums: Sums | None, first: int = 0) -> Fields:
    """struct Sums for the sums of rows (or columns) from `first` on; None: null pointers."""
    arrays = (None, None, None) if sums is None else sums.arrays
    return {
        name: address(array, first)
        for name, array in zip(("max", "sum", "moment"), arrays, strict=True)
    }
