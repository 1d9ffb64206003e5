"""Precisions: how operands are held on a device, and what its tensor cores lose when they add."""

from __future__ import annotations

import os
from dataclasses import dataclass

K_SLICE = 128  # bytes of a row in one stage of a pipeline: kernels/cuda/block/block.cuh
# "portable": the kernels that run on every card, also where faster ones exist
PORTABLE = os.environ.get("INFONCE_KERNELS", "") == "portable"

# bytes of an element of operands and of dL/dx (all its parts), and of accumulators
OPERAND_BYTES = {
    "fp64": 8, "fp32": 4, "fp16x3": 4, "tf32": 4, "bf16x3": 4, "bf16": 2, "fp16": 2,
}  # fmt: skip
ACCUMULATOR_BYTES = {precision: 8 if precision == "fp64" else 4 for precision in OPERAND_BYTES}
OPERAND_PARTS = {"bf16x3": 2, "fp16x3": 2}  # an operand is a sum of so many 16-bit numbers
FLOAT16 = ("fp16", "fp16x3")  # elements of operands
# dtypes of features that kernels read as they are
READ_IN_PLACE = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16",
                 "fp16": "float16"}  # fmt: skip
# Tensor cores truncate when they add. Where float32's accuracy is asked for, sums of the products
# that make gradients have this many terms at most
MAX_SUM_TERMS = {"fp16x3": 512}


@dataclass(frozen=True, eq=False)  # by identity: hashed in every call
class DeviceProperties:
    """What a device offers, as its properties say."""

    capability: str  # "90"
    multiprocessors: int
    shared_memory: int  # bytes that a block can have
    shared_memory_of_all: int  # bytes that the blocks of one multiprocessor share
    memory: int  # bytes of all of its memory

    @property
    def unasked_bytes(self) -> int:
        """Bytes that a call may take for what saves time but is not needed, if its caller gives no
        workspace: cached exponentials, and buffers of exchanges over ranks."""
        return self.memory // 32


def operands(precision: str, device: DeviceProperties) -> str:
    """How operands are held for products of `precision`.

    Hopper multiplies 16-bit numbers fastest. There a float32 operand is the sum of two float16
    parts, and a product is the sum of three products of parts: about as accurate as float32's own
    arithmetic. TF32 has the mantissa of float16, which is twice as fast. Features and gradient
    blocks are scaled by powers of two so that float16 neither overflows nor underflows.
    """
    if device.capability != "90" or PORTABLE:
        return precision
    return {"fp32": "fp16x3", "tf32": "fp16"}.get(precision, precision)


def truncation_bias(precision: str, width: int) -> float:
    """Relative truncation bias of a sum of products of `width` bytes of each operand.

    Hopper's tensor cores add 32 bytes of each at a time and then cut bits off, where rounding would
    as often add some. Sums whose terms have one sign lose most, those of mixed signs least: the
    figures, in units of 2^-24 a step, lie halfway between the two as they were measured
    (benchmarks/NOTES.md).
    """
    a_step = {"fp16x3": 0.6, "bf16": 0.35, "bf16x3": 0.7, "fp16": 0.8}
    return a_step.get(precision, 0.0) * 2.0**-24 * -(-width // 32)


def sweep_truncation_bias(precision: str, width: int) -> float:
    """The truncation bias of a sweep's products of rows of `width` bytes (in each part). With
    fp16x3 a sweep adds up sums of half a K-slice: these lose little, and nearly the same whatever
    the signs of their terms."""
    return truncation_bias(precision, min(width, K_SLICE // 2) if precision == "fp16x3" else width)


def supported(precision: str, device: DeviceProperties) -> bool:
    """Tensor cores of the kinds that the kernels use came with compute capability 8.0."""
    return precision in ("fp64", "fp32") or int(device.capability) >= 80


def padded(d: int, precision: str) -> int:
    """Elements in a staged row, or in each of its parts: whole K-slices, so that none holds
    elements of two parts, and rows begin where lines of the cache do. A row of one part that is
    shorter than a K-slice has a multiple of 16 bytes."""
    item = element_bytes(precision)
    piece = 16 if d * item < K_SLICE and precision not in OPERAND_PARTS else K_SLICE
    return -(-d * item // piece) * piece // item


def product_width(d: int, precision: str) -> int:
    """Features of a row in the products that make gradients: d, or those of a staged row with its
    zeros where d of them are no multiple of 16 bytes. cuBLAS has fast kernels for such multiples
    alone."""
    return padded(d, precision) if d * element_bytes(precision) % 16 else d


def element_bytes(precision: str) -> int:
    """Bytes of an element of operands, of one part."""
    return OPERAND_BYTES[precision] // OPERAND_PARTS.get(precision, 1)
