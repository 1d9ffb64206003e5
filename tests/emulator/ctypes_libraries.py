"""Replacements for the functions of libcublas and libcuda that the library calls by `ctypes`.

They work on arrays of the emulator, by the stand-in for CuPy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import engine
from cupy.cuda import cublas, stream
from cupy.cuda.memory import POISON
from infonce.kernels.gpu.device import cublas as gpu_cublas
from infonce.kernels.gpu.device import tensor_map

WORKSPACE = 4096  # bytes of cuBLAS's workspace that each product overwrites


def install() -> None:
    """Make the library use the replacements."""
    gpu_cublas._library = CuBLAS
    tensor_map._encode = lambda: encode_tensor_map


class CuBLAS:
    """The functions of libcublas for matrix products on a stream, as the library calls them.

    Each product first overwrites the workspace, so that results which lie in it are noticed.
    """

    stream = workspace = 0

    @classmethod
    def cublasSetStream_v2(cls, handle: Any, address: Any) -> int:
        cls.stream = address.value or 0
        return 0

    @classmethod
    def cublasSetWorkspace_v2(cls, handle: Any, address: Any, size: Any) -> int:
        cls.workspace = address.value
        return 0

    @classmethod
    def cublasGemmEx(cls, *args: Any) -> int:
        return cls._product(cublas.gemmEx, args)

    @classmethod
    def cublasGemmStridedBatchedEx(cls, *args: Any) -> int:
        return cls._product(cublas.gemmStridedBatchedEx, args)

    @classmethod
    def _product(cls, function: Any, args: tuple[Any, ...]) -> int:
        to = cls.workspace
        stream.submit(cls.stream, lambda: ctypes.memset(to, POISON, WORKSPACE))
        assert stream.get_current_stream().ptr == cls.stream  # the stand-in uses the current stream
        function(*(argument.value for argument in args))
        return 0


def encode_tensor_map(
    described: int, dtype: int, rank: int, data: int, sizes: int, strides: int, box: int, *_: int
) -> int:
    """cuTensorMapEncodeTiled: writes the engine's `TensorMap` to the address `described`."""
    columns, rows = (ctypes.c_uint64 * 2).from_address(sizes)
    _, box_rows = (ctypes.c_uint32 * 2).from_address(box)
    stride = ctypes.c_uint64.from_address(strides).value
    encoded = engine.tensor_map(data, rows, columns * tensor_map.ITEM, stride, box_rows)
    ctypes.memmove(described, encoded, tensor_map.SIZE)
    return 0
