"""Matrix products by cuBLAS, also on a stream under capture, which CuPy's wrapper refuses."""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

LEAST_WORKSPACE = 16 * 2**10  # bytes; with less, cuBLAS may fail
MAX_STREAMS = 8  # most streams that get a workspace for products in graphs
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

C_TYPES = {"i": ctypes.c_int, "q": ctypes.c_longlong, "p": ctypes.c_void_p}
# Letters of the arguments of cublasGemmEx and of cublasGemmStridedBatchedEx, after the handle
ONE_PRODUCT, BATCH_OF_PRODUCTS = "iiiiippiipiippiiii", "iiiiippiiqpiiqppiiqiii"
# Numbers of cuBLAS's enums, by precision of the operands: cudaDataType of an element, and
# cublasComputeType, the arithmetic of products and sums
ELEMENT_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "fp16x3": 2, "bf16": 14, "bf16x3": 14}
ARITHMETIC = {
    "fp64": 70, "fp32": 69, "tf32": 77, "fp16": 68, "fp16x3": 68, "bf16": 68, "bf16x3": 68,
}  # fmt: skip
OP_N, OP_T = 0, 1  # cublasOperation: a matrix as it is, or its transpose

_workspaces: dict[tuple[int, int], Any] = {}  # by device and `streams.identity`


@cache
def workspace_bytes(device: int) -> int:
    """The bytes of the workspace that cuBLAS allocates by itself on this device.

    Products in graphs get a workspace of the same size. With another size, cuBLAS may choose
    another algorithm, whose results differ in the last bits.
    """
    # ":KiB of a buffer:number of buffers", repeated
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    sizes = [int(kib) for kib, number in re.findall(r":(\d+):(\d+)", setting) if int(number)]
    if sizes:
        return max(max(sizes) * 2**10, LEAST_WORKSPACE)
    # As in the documentation of cublasSetWorkspace: 32 MiB from capability 9.0 on, 4 MiB before
    return (32 if int(cupy.cuda.Device(device).compute_capability) >= 90 else 4) * 2**20


def workspace(stream: int) -> int:
    """The address of cuBLAS's workspace of `workspace_bytes`, for graphs on this stream.

    `stream` is the stream's `streams.identity`. Graphs on one stream share the workspace, because
    they run one after another. The memory stays reserved until the process ends. Returns 0 if
    `MAX_STREAMS` other streams have a workspace, or if no memory is left: then the call's steps on
    this stream never become graphs (`plan.Plan`).
    """
    device = runtime.getDevice()
    key = device, stream
    if key not in _workspaces and len(_workspaces) < MAX_STREAMS:
        try:
            memory = cupy.cuda.Memory(workspace_bytes(device))
            _workspaces.setdefault(key, memory)  # of several threads, the first one's
        except runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
    memory = _workspaces.get(key)
    return 0 if memory is None else int(memory.ptr)


@cache
def _library() -> Any:
    """The library of the cuBLAS that CuPy has loaded, for calls by ctypes."""
    from cupy.cuda import cublas

    handle = cupy.cuda.device.get_cublas_handle()
    major = cublas.getVersion(handle) // 10000
    return ctypes.CDLL(f"libcublas.so.{major}")


def gemm_ex(handle: int, *arguments: int, workspace: int = 0) -> None:
    """cublasGemmEx on CuPy's current stream, with the arguments of CuPy's `cublas.gemmEx`.

    Four more arguments make it cublasGemmStridedBatchedEx: the elements from product to product
    of A, of B and of C, and the number of products. On a stream under capture, cuBLAS uses
    `workspace_bytes` at the address `workspace`. This memory has to exist as long as the graph is
    launched. If `workspace` is 0, as in a capture by the caller, it is allocated here, from the
    pool of the capture. On all other streams, cuBLAS uses a workspace of its own.
    """
    name, letters = "gemmEx", ONE_PRODUCT
    if len(arguments) > len(ONE_PRODUCT):
        name, letters = "gemmStridedBatchedEx", BATCH_OF_PRODUCTS
        *one, step_a, step_b, step_c, count = arguments
        arguments = (*one[:9], step_a, *one[9:12], step_b, *one[12:16], step_c, count, *one[16:])
    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        getattr(cupy.cuda.cublas, name)(handle, *arguments)
        return
    library = _library()
    size = workspace_bytes(runtime.getDevice())
    # other streams may use cuBLAS's own workspace while the graph runs
    new_memory = cupy.empty(0 if workspace else size, np.uint8)
    workspace = workspace or new_memory.data.ptr
    handle_pointer = ctypes.c_void_p(handle)
    _check(library.cublasSetStream_v2(handle_pointer, ctypes.c_void_p(stream.ptr)))
    _check(
        library.cublasSetWorkspace_v2(
            handle_pointer, ctypes.c_void_p(workspace), ctypes.c_size_t(size)
        )
    )
    converted = [C_TYPES[letter](a) for letter, a in zip(letters, arguments, strict=True)]
    _check(getattr(library, f"cublasG{name[1:]}")(handle_pointer, *converted))


@cache  # the arrays are never freed, because plans hold their addresses
def host_number(value: float, real: np.dtype[Any]) -> tuple[Any, int]:
    """A factor of a product as an array in host memory, and the array's address."""
    number = np.array(value, real)
    return number, number.ctypes.data


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLAS failed with status {status} on a stream under capture")
