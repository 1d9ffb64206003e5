"""Tensor maps: descriptions of matrices for the copies of Hopper's tensor memory accelerator."""

from __future__ import annotations

import ctypes
import sys
from functools import cache, lru_cache
from typing import Any

import numpy as np

SIZE = 128  # bytes of a tensor map, and its alignment
# Numbers of the driver's enums: CUtensorMapDataType by precision, CUtensorMapSwizzle,
# CUtensorMapL2promotion
DATA_TYPE = {"fp16": 6, "fp16x3": 6, "bf16": 9, "bf16x3": 9}
SWIZZLE_128B, PROMOTE_L2_256B = 3, 3
ITEM = 2  # bytes of an element


@cache
def _encode() -> Any:
    """cuTensorMapEncodeTiled of the driver, which writes a tensor map."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    encode = driver.cuTensorMapEncodeTiled
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    encode.argtypes = [pointer, u32, u32, pointer, pointer, pointer, pointer, pointer,
                       u32, u32, u32, u32]  # fmt: skip
    return encode


@lru_cache(1024)
def tensor_map(data: int, rows: int, width: int, stride: int, box_rows: int, precision: str) -> Any:
    """The tensor map of `rows` rows of `width` bytes, `stride` bytes apart, from address `data` on.

    A copy moves a box of `box_rows` rows and 128 bytes. Address, width and stride are multiples of
    16 bytes. Returns an array with one element, the 128 bytes of the map.
    """
    memory = np.zeros(2 * SIZE, np.uint8)
    start = -memory.ctypes.data % SIZE
    encoded = memory[start : start + SIZE]  # at an aligned address
    sizes = np.array([width // ITEM, rows], np.uint64)
    strides = np.array([stride], np.uint64)
    box = np.array([128 // ITEM, box_rows], np.uint32)
    element_strides = np.ones(2, np.uint32)
    error = _encode()(
        encoded.ctypes.data, DATA_TYPE[precision], 2, data, sizes.ctypes.data,
        strides.ctypes.data, box.ctypes.data, element_strides.ctypes.data, 0, SWIZZLE_128B,
        PROMOTE_L2_256B, 0,
    )  # fmt: skip
    if error:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed with error {error} for {rows} rows of {width} bytes, "
            f"{stride} bytes apart"
        )
    return encoded.view(f"V{SIZE}")
