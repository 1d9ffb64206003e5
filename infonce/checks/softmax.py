"""The checks of the options of the softmax: their ranges, and what means something together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..kernels.problem import SCALES, Problem
from ..spec import DEFAULTS, EXCLUSIVE, FLAGS, SOFTMAX, Loss
from .validation import number, what

LARGEST = math.nextafter(math.inf, 0)
RANGES = {
    "margin": (-LARGEST, LARGEST, "a finite number"),
    "label_smoothing": (0.0, math.nextafter(1, 0), "a number in [0, 1)"),
    "hardness": (0.0, SCALES["fp64"][1], f"a number in [0, {SCALES['fp64'][1]!r}]"),
    "false_negative_margin": (-LARGEST, math.inf, "a number or inf"),
    "guide_margin": (-LARGEST, math.inf, "a number or inf"),
}
ARRAYS = ("key_bias", "guide")  # options whose values are checked in every call


def options(loss: Loss, o: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The plain options of the softmax that differ from their defaults, as (name, value).

    ValueError for an option that this loss does not have, and for options that exclude each other.
    """
    for name in SOFTMAX:
        o[name] = _checked(name, o[name])

    def is_given(name: str) -> bool:
        if name == "own" and loss.has_own:
            return True
        default = DEFAULTS[name]
        return o[name] is not None if default is None else bool(o[name] != default)

    for name in loss.refused:
        if is_given(name):
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} for {loss.name}, which has none, "
                f"got {what(o[name])}"
            )
    for name, *others in EXCLUSIVE:
        if is_given(name) and all(map(is_given, others)):
            came = "an array" if name == "own" else what(o[name])  # `own` is among the features
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} with {' and '.join(others)}, got {came}"
            )
    if is_given("guide_margin") and o["guide"] is None:
        raise ValueError(f"guide_margin: expected 0.0 without guide, got {what(o['guide_margin'])}")
    if is_given("dim_weights"):
        raise ValueError(f"dim_weights: expected None without dims, got {what(o['dim_weights'])}")
    for name in ("own_mask", "in_batch"):
        default = DEFAULTS[name]
        if is_given(name) and not loss.has_own:
            raise ValueError(f"{name}: expected {default!r} without own, got {what(o[name])}")
    return tuple((name, o[name]) for name in SOFTMAX if name not in ARRAYS and is_given(name))


def require_metrics(problem: Problem) -> None:
    """ValueError if metrics are undefined: a row has no positive or several, or an option changes
    the logits."""
    positives = problem.positives
    sets = positives is not None and positives.ndim > 1
    if isinstance(positives, np.ndarray) and problem.weights is not None:  # on a GPU nothing waits
        sets = sets or bool((positives < 0).any())
    if sets:
        raise ValueError("metrics: expected one positive a row, got labels with none or several")
    changes = {
        "key_bias": problem.key_bias is not None, "guide": problem.guided,
        "false_negative_margin": problem.has_limits,
    }  # fmt: skip
    for name, changes_logits in changes.items():
        if changes_logits:
            raise ValueError(f"metrics: expected False with {name}, got True")


def _checked(name: str, value: Any) -> Any:
    """The value of an option: a number within its range, or a flag. Arrays are unchanged."""
    if name in FLAGS:
        return bool(value)
    if name in ARRAYS:
        return value
    value = number(name, value, infinite=RANGES[name][1] == math.inf)
    if not isinstance(value, float):
        raise TypeError(f"{name}: expected a number, got {what(value)}")
    low, high, expected = RANGES[name]
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return value
