"""Precisions of products on a GPU: formats of operands, and the bias of tensor cores' sums."""

from __future__ import annotations

import os
from dataclasses import dataclass

K_SLICE = 128  # bytes of a row in one stage of a pipeline, as in kernels/cuda/block/block.cuh
# INFONCE_KERNELS=portable: the kernels that run on every card, even if the card has faster ones
PORTABLE = os.environ.get("INFONCE_KERNELS", "") == "portable"

# precision -> bytes of an element of operands and gradient blocks (all its parts); of accumulators
OPERAND_BYTES = {
    "fp64": 8, "fp32": 4, "fp16x3": 4, "tf32": 4, "bf16x3": 4, "bf16": 2, "fp16": 2,
}  # fmt: skip
ACCUMULATOR_BYTES = {precision: 8 if precision == "fp64" else 4 for precision in OPERAND_BYTES}
# precision -> number of 16-bit parts whose sum is one element; 1 for all other precisions. The 3 of
# "x3" counts products of parts: all but small x small
OPERAND_PARTS = {"bf16x3": 2, "fp16x3": 2}
FLOAT16 = ("fp16", "fp16x3")  # precisions whose operands have float16 elements
# precision -> dtype of features that kernels read without a copy in another format
READ_IN_PLACE = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16",
                 "fp16": "float16"}  # fmt: skip
# Tensor cores truncate when they add. For float32's accuracy (on Hopper, fp32 becomes fp16x3), the
# sums that compute dQ and dK have at most this many terms; sums of other precisions have no limit
MAX_SUM_TERMS = {"fp16x3": 512}


@dataclass(frozen=True, eq=False)  # by identity: hashed in every call
class DeviceProperties:
    """Properties of a GPU that decide how calls run on it."""

    capability: str  # compute capability, "90" for Hopper
    multiprocessors: int
    shared_memory: int  # most bytes of shared memory of one thread block
    multiprocessor_shared_memory: int  # bytes of shared memory of one multiprocessor
    memory: int  # bytes of the GPU's memory
    portable: bool = False  # only portable kernels run

    @property
    def has_sweeps(self) -> bool:
        """Whether sweeps run on the device: Hopper, if kernels are not limited to portable ones."""
        return self.capability == "90" and not self.portable

    @property
    def default_memory_limit(self) -> int:
        """Most bytes that a call may take in place of the default workspace.

        The limit holds for calls whose caller gives no workspace, and for all memory of their
        passes together. A call takes more than the default workspace only if that saves time: for
        larger blocks, cached exponentials and kept marks (`schedule/decisions.py`). The buffers of
        an exchange over ranks have the same limit.
        """
        return self.memory // 32


def fastest_operand_precision(precision: str, device: DeviceProperties) -> str:
    """The precision of operands that computes products of `precision` fastest on a device.

    Hopper multiplies 16-bit numbers fastest. There, two replacements are as accurate. All other
    precisions stay, and all precisions stay on other devices and with INFONCE_KERNELS=portable.

    - "fp32" becomes "fp16x3". A float32 operand has 24 bits. It becomes the sum of two float16
      parts of 11 bits and a sign each, without its last two bits. A product is the sum of three
      products of parts: the fourth, of both small parts, is below float32's rounding. Sums are
      short, against truncation (`MAX_SUM_TERMS`).
    - "tf32" becomes "fp16", which has the same mantissa and is twice as fast.

    Features and gradient blocks are divided by feature and gradient divisors, so that float16
    neither overflows nor underflows.
    """
    if not device.has_sweeps:
        return precision
    return {"fp32": "fp16x3", "tf32": "fp16"}.get(precision, precision)


def truncation_bias(precision: str, width: int) -> float:
    """Mean relative loss of a sum of products of `width` bytes of each operand, by truncation.

    Hopper's tensor cores add 32 bytes of each operand in one step, and then truncate the sum. A
    truncated sum is too small in absolute value. Sums whose terms have one sign lose most, and sums
    of mixed signs lose least. `loss_per_step` is halfway between the two measured losses, in
    units of 2^-24 for each step (benchmarks/NOTES.md); it is 0 for all other precisions. Callers
    multiply sums by 1 + the result.
    """
    loss_per_step = {"fp16x3": 0.6, "bf16": 0.35, "bf16x3": 0.7, "fp16": 0.8}
    return loss_per_step.get(precision, 0.0) * 2.0**-24 * -(-width // 32)


def sweep_truncation_bias(precision: str, width: int) -> float:
    """The truncation bias of logits of a sweep, for rows of `width` bytes (of each part).

    With fp16x3, a sweep adds up sums of half a K-slice. These short sums lose little, and nearly
    the same for all signs of their terms.
    """
    return truncation_bias(precision, min(width, K_SLICE // 2) if precision == "fp16x3" else width)


def supported(precision: str, device: DeviceProperties) -> bool:
    """Whether a device has the arithmetic of a precision: tensor cores from capability 8.0 on."""
    return precision in ("fp64", "fp32") or int(device.capability) >= 80


def padded(d: int, precision: str) -> int:
    """Elements of a staged row of d features, or of each of its parts, with zeros at its end.

    A row has whole K-slices, so that no slice holds elements of two parts and each row begins at a
    cache line. A row of one part that is shorter than a K-slice has a multiple of 16 bytes.
    """
    item = element_bytes(precision)
    multiple = 16 if d * item < K_SLICE and precision not in OPERAND_PARTS else K_SLICE
    return -(-d * item // multiple) * multiple // item


def product_width(d: int, precision: str) -> int:
    """Features of a row in the products that compute gradients.

    cuBLAS has fast kernels only for rows of a multiple of 16 bytes. All other rows are multiplied
    with the zeros at the end of staged rows (`padded`).
    """
    return padded(d, precision) if d * element_bytes(precision) % 16 else d


def element_bytes(precision: str) -> int:
    """Bytes of an element of operands, or of one of its parts."""
    return OPERAND_BYTES[precision] // OPERAND_PARTS.get(precision, 1)
