"""A loss computed with products in the formats of a GPU, and data for the notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.arrays.formats import product

Array = Any


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
