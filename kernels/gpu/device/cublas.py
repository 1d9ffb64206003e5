"""Plain matrix products on a stream that is being captured, where CuPy's wrapper refuses."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import cupy
import numpy as np

WORKSPACE = 32 * 2**20  # what cuBLAS asks for on Hopper; less elsewhere


@cache
def _library() -> Any:
    """The cuBLAS that CuPy has loaded."""
    from cupy.cuda import cublas

    handle = cupy.cuda.device.get_cublas_handle()
    major = cublas.getVersion(handle) // 10000
    return ctypes.CDLL(f"libcublas.so.{major}")


def gemm_ex(handle: int, *arguments: int) -> None:
    """cublasGemmEx on CuPy's current stream, with the arguments of CuPy's `cublas.gemmEx`."""
    from cupy.cuda import cublas

    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        cublas.gemmEx(handle, *arguments)
        return
    library = _library()
    workspace = cupy.empty(WORKSPACE, np.uint8)  # cuBLAS's own must not be part of a graph
    where = ctypes.c_void_p(handle)
    _check(library.cublasSetStream_v2(where, ctypes.c_void_p(stream.ptr)))
    _check(
        library.cublasSetWorkspace_v2(
            where, ctypes.c_void_p(workspace.data.ptr), ctypes.c_size_t(WORKSPACE)
        )
    )
    pointers = {5, 6, 9, 12, 13}  # alpha, A, B, beta, C
    converted = [
        ctypes.c_void_p(a) if i in pointers else ctypes.c_int(a) for i, a in enumerate(arguments)
    ]
    _check(library.cublasGemmEx(where, *converted))


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLAS failed with status {status} on a stream under capture")
