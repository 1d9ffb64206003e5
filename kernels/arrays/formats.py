"""Formats of operands on a GPU: rounding to them, and products of rounded operands, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..problem import Array

DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def round_to_format(x: Array, form: str) -> Array:
    """float32 `x` rounded to the nearest number of `form`, as float32.

    tf32 keeps 10 bits after the point, ties away from 0: what `cvt.rna.tf32.f32` does to the bits.
    The 8-bit formats are scaled by a power of two, so that the largest number is at 1/2 of their
    range, as in training with 8 bits. The result is divided by it.
    """
    x = np.asarray(x, np.float32)
    if form == "fp32":
        return x
    if form == "tf32":
        bits = x.view(np.uint32)
        away = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        return np.where(np.isfinite(x), away.view(np.float32), x)
    dtype = DTYPES[form]
    if form in ("fp16", "bf16"):
        return x.astype(dtype).astype(np.float32)
    top = np.abs(x).max(initial=0.0)
    largest = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    room = float(largest) / 2
    power = np.float32(np.exp2(np.floor(np.log2(room / top)))) if top > 0 else np.float32(1)
    return (x * power).astype(dtype).astype(np.float32) / power


def product(a: Array, b: Array, form: str) -> Array:
    """a [M, K] @ b [K, N] as tensor cores compute it: operands in `form`, sums in float32.

    bf16x3 splits each operand into two parts and adds up three of their four products.
    """
    if form == "fp64":
        return a.astype(np.float64) @ b.astype(np.float64)
    if form == "bf16x3":
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        a1, b1 = round_to_format(a, "bf16"), round_to_format(b, "bf16")
        a2, b2 = round_to_format(a - a1, "bf16"), round_to_format(b - b1, "bf16")
        return a1 @ b1 + (a1 @ b2 + a2 @ b1)
    return round_to_format(a, form) @ round_to_format(b, form)
