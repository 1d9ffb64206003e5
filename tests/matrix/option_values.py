"""Values of options for all tests, and the draws and bounds of those that compare dot products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


def above_positives(margin: float, dots: Array, positive: Array) -> Array:
    """[M, 1] the largest dot product of a row with its positives, plus `margin`; infinity for a row
    without a positive."""
    top = np.where(positive, dots, -np.inf).max(axis=1, keepdims=True)
    return np.where(np.isneginf(top), np.inf, top + margin)


@dataclass(frozen=True)
class Comparison:
    """An option that leaves out negatives whose dot product is on one side of a bound."""

    draw: Callable[[np.random.Generator], float]
    example: float  # changes the losses of random features
    # (the option's value, dot products [M, N], positives [M, N]) -> bounds [M, 1]
    bound: Callable[[float, Array, Array], Array] = above_positives
    is_beyond: Callable[[Array, Array], Array] = np.greater  # (dot products, bounds)


COMPARISONS = {
    "false_negative_margin": Comparison(lambda rng: rng.uniform(-0.5, 1), -0.1),
}  # fmt: skip


def option_values(rows: int, keys: int, width: int) -> dict[str, Any]:
    """Keyword -> a value that is not its default, for a loss of two arrays of features."""
    number = np.arange(keys)
    pairs = {
        name: number // step if rows == keys else (number[:rows] // step, number // step)
        for name, step in (("ids", 2), ("groups", 4), ("positive_ids", 2))
    }
    return {
        **pairs, **{name: each.example for name, each in COMPARISONS.items()},
        "own": np.random.default_rng(3).standard_normal((rows, 2, width)),
        "own_mask": np.array([[True, False]] * rows), "own_indices": np.zeros((rows, 2), np.int64),
        "own_bias": np.array([[0.0, np.log(2)]] * rows), "in_batch": False, "dims": (2, width),
        "weights": np.linspace(0.5, 2, rows), "margin": 0.2, "decoupled": True,
        "label_smoothing": 0.1, "hardness": 1.0, "key_bias": np.linspace(0, 2, keys),
        "normalize": True, "reduction": "sum", "method": "tiled", "precision": "fp64",
        "workspace": "1MiB", "offload": False, "check_finite": True,
        "progress": lambda phase, done, total: None, "metrics": True, "temperature": 0.3,
        "scale": 3.0, "query_mask": np.ones((rows, 2), bool),
        "key_mask": np.array([[True, False]] * keys), "token_mean": True,
        "label_weights": np.ones((rows, 2)),
    }  # fmt: skip
