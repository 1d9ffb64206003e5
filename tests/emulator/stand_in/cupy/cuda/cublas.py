"""Matrix products, by NumPy in float64, rounded once."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from . import stream as streams

TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}  # cudaDataType
DOUBLE = 70  # CUBLAS_COMPUTE_64F


def getVersion(handle: int) -> int:
    return 130000


def gemmEx(
    handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int,
    lda: int, b: int, type_b: int, ldb: int, beta: int, c: int, type_c: int, ldc: int,
    compute: int, algorithm: int,
) -> None:  # fmt: skip
    gemmStridedBatchedEx(
        handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c,
        ldc, 0, 1, compute, algorithm,
    )  # fmt: skip


def gemmStridedBatchedEx(
    handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int,
    lda: int, step_a: int, b: int, type_b: int, ldb: int, step_b: int, beta: int, c: int,
    type_c: int, ldc: int, step_c: int, count: int, compute: int, algorithm: int,
) -> None:  # fmt: skip
    """C = alpha op(A) op(B) + beta C for `count` matrices. alpha and beta are on the host: they are
    read at once."""
    number = ctypes.c_double if compute == DOUBLE else ctypes.c_float
    factor, factor_before = number.from_address(alpha).value, number.from_address(beta).value

    def product() -> None:
        for i in range(count):
            left = _matrix(a, type_a, *((k, m) if op_a else (m, k)), lda, i * step_a)
            right = _matrix(b, type_b, *((n, k) if op_b else (k, n)), ldb, i * step_b)
            out = _matrix(c, type_c, m, n, ldc, i * step_c)
            wide = (z.astype(np.float64) for z in (left.T if op_a else left,
                                                   right.T if op_b else right))  # fmt: skip
            with np.errstate(all="ignore"):
                total = np.matmul(*wide) * factor
                if factor_before:
                    total += factor_before * out.astype(np.float64)
                out[...] = total

    streams.get_current_stream().submit(product)


def _matrix(address: int, dtype: int, rows: int, columns: int, ld: int, first: int) -> Any:
    """Column by column, `ld` elements apart, from element `first` on."""
    kind = np.dtype(TYPES[dtype])
    size = ((columns - 1) * ld + rows) * kind.itemsize
    memory = (ctypes.c_uint8 * size).from_address(address + first * kind.itemsize)
    elements = np.frombuffer(memory, np.uint8).view(kind)
    return np.lib.stride_tricks.as_strided(
        elements, (rows, columns), (kind.itemsize, ld * kind.itemsize)
    )
