"""Emulation of the formats of GPU products, and a loss computed with such products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = Any

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


@dataclass
class Result:
    """A loss, and its gradient for the image features [N, D]."""

    loss: float
    image: Array


def clip(
    image: Array, text: Array, scale: float, products: str, panel: str | None = None,
    subtract: str = "before",
) -> Result:  # fmt: skip
    """CLIP's loss and dL/dimage; `products` is the precision of the logits, `panel` that of P.

    ``dL/dimage = scale (P - I) text / N`` with P the mean of both softmaxes. The one-hot I is
    subtracted "before" P is rounded to `panel`, or "after" the product with the text features.
    """
    n = len(image)
    wide = np.float64 if products == "fp64" else np.float32
    x = product(image, text.T, products) * wide(scale)
    positive = x.diagonal().copy()
    np.fill_diagonal(x, -np.inf)
    p = np.zeros_like(x)
    negative_probability = np.zeros(n)
    loss = 0.0
    for axis in (0, 1):
        top = x.max(axis=axis, keepdims=True)
        negatives = np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top
        gap = negatives.ravel().astype(np.float64) - positive
        loss += float(np.logaddexp(0, gap).mean()) / 2
        negative_probability += np.exp(gap - np.logaddexp(0, gap)) / 2
        positives = np.expand_dims(positive, axis).astype(wide)
        p += np.exp(x - np.logaddexp(negatives, positives)) / 2
    panel = panel or products
    if subtract == "before":
        np.fill_diagonal(p, -negative_probability)
        return Result(loss, scale * product(p, text, panel) / n)
    np.fill_diagonal(p, 1 - negative_probability)
    return Result(loss, scale * (product(p, text, panel) - text) / n)


def unit(z: Array) -> Array:
    """Rows of norm 1, float32."""
    return (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32)


COSINES = {"random": 0.0, "partly aligned": 0.5, "aligned": 0.98}


def pairs(n: int, d: int, kind: str, seed: int = 0) -> tuple[Array, Array]:
    """Image and text features [n, d] of unit norm, whose pairs have cosines of about COSINES[kind].

    Texts of "opposed" pairs are opposite to all images: every cosine is near -0.9.
    """
    rng = np.random.default_rng(seed)
    image, other = (unit(rng.standard_normal((n, d))) for _ in range(2))
    if kind == "opposed":
        centre = unit(rng.standard_normal((1, d)))
        return unit(centre + 0.3 * image), unit(0.3 * other - centre)
    cosine = COSINES[kind]
    return image, unit(cosine * image + np.sqrt(1 - cosine**2) * other)


def relative_error(got: Array, want: Array) -> float:
    """||got - want|| / ||want||, in float64; NaN if `got` has one."""
    difference = np.asarray(got, np.float64) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))
