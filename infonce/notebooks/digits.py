"""Handwritten digits (1797 of 8 x 8 pixels), and an encoder for them, for the notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from infonce.cli.demo import Encoder

Array = Any
HELD_OUT, DIM = 360, 32  # number of first images, which no training sees; width of embeddings
_digits = load_digits()
_order = np.random.default_rng(0).permutation(len(_digits.images))
images, classes = _digits.images[_order] / 16, _digits.target[_order]
images = images - images[HELD_OUT:].mean(0)


def make_encoder(rng: np.random.Generator, width: int, dtype: Any = np.float32) -> Encoder:
    """An untrained encoder of `width` pixels."""
    untrained = Encoder(rng, width, DIM)
    untrained.parameters = [p.astype(dtype) for p in untrained.parameters]
    untrained.w1, untrained.b1, untrained.w2, untrained.b2 = untrained.parameters
    return untrained


def make_views(batch: Array, rng: np.random.Generator) -> list[Array]:
    """Two views of each image: shifted by up to a pixel, brighter or darker, with noise."""
    moved_batches = []
    for _ in range(2):
        gain = rng.uniform(0.7, 1.3, (len(batch), 1, 1))
        image = np.arange(len(batch))[:, None, None]
        row, column = (np.arange(8) + rng.integers(-1, 2, (2, len(batch), 1))) % 8
        moved = batch[image, row[:, :, None], column[:, None, :]]
        moved_batches.append(
            (gain * moved + 0.1 * rng.standard_normal(batch.shape)).reshape(len(batch), -1)
        )
    return moved_batches


def embed(encoder: Encoder) -> Array:
    """Unit embeddings of all images."""
    z = encoder.forward(images.reshape(len(images), -1).astype(encoder.w1.dtype))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def measure_recognition(encoder: Encoder) -> float:
    """Share of held-out digits whose nearest neighbour in the training set is the same digit."""
    z = embed(encoder)
    nearest = HELD_OUT + (z[:HELD_OUT] @ z[HELD_OUT:].T).argmax(1)
    return float((classes[nearest] == classes[:HELD_OUT]).mean())
