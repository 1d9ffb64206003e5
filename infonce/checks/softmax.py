"""The checks of the options of the softmax: their ranges, and what means something together."""

from __future__ import annotations

import math
from typing import Any

from ..kernels.problem import SCALES, Problem
from ..spec import DEFAULTS, EXCLUSIVE, FLAGS, SOFTMAX, Loss
from .validation import number, what

CHANGE_LOGITS = frozenset({"key_bias", "false_negative_margin"})  # those that metrics are of
ALL = frozenset({"weights", *SOFTMAX})
# Those that there are where not all are, by the place of the computation
ELSEWHERE = {
    "over ranks with offload": ALL - CHANGE_LOGITS - {"hardness", "label_smoothing"},
}
NO_SETS = frozenset({"over ranks with offload"})  # of positives
NO_CLASSES = frozenset({"over ranks with offload"})  # nor joint losses
LARGEST = math.nextafter(math.inf, 0)
RANGES = {
    "margin": (-LARGEST, LARGEST, "a finite number"),
    "label_smoothing": (0.0, math.nextafter(1, 0), "a number in [0, 1)"),
    "hardness": (0.0, SCALES["fp64"][1], f"a number in [0, {SCALES['fp64'][1]!r}]"),
    "false_negative_margin": (-LARGEST, math.inf, "a number or inf"),
}


def options(loss: Loss, o: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The plain options of the softmax that are not left at their default. ValueError for what
    means nothing for this loss, or not together."""
    for name in SOFTMAX:
        o[name] = _checked(name, o[name])

    def given(name: str) -> bool:
        default = DEFAULTS[name]
        return o[name] is not None if default is None else bool(o[name] != default)

    for name in loss.refused:
        if given(name):
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} for {loss.name}, which has none, "
                f"got {what(o[name])}"
            )
    for name, other in EXCLUSIVE:
        if given(name) and given(other):
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} with {other}, got {what(o[name])}"
            )
    return tuple((name, o[name]) for name in SOFTMAX if name != "key_bias" and given(name))


def place(over_ranks: bool, on_host: bool, offload: bool) -> str | None:
    """Where a call is computed, if not in this process on the CPU."""
    if over_ranks:
        return "over ranks" + (" with offload" * offload if on_host else " on GPUs")
    return "with offload" if offload else None if on_host else "on a GPU"


def require_loss(loss: Loss, elsewhere: str | None) -> None:
    """ValueError for a loss that the place of the computation does not have."""
    if (loss.classes or loss.joint) and elsewhere in NO_CLASSES:
        raise ValueError(f"{loss.name}_loss: expected arrays of one device, got them {elsewhere}")


def require_available(
    problem: Problem, elsewhere: str | None, plain: tuple[tuple[str, Any], ...]
) -> None:
    """ValueError for an option that the place of the computation does not have, or metrics of rows
    that have no positive, or several, or of logits that an option changes."""
    positives = problem.positives
    sets = positives is not None and positives.ndim > 1
    on_gpus = elsewhere in ("on a GPU", "over ranks on GPUs")  # there labels are not read
    of_host = positives is not None and not on_gpus
    if problem.retrieval_ranks and of_host and problem.weights is not None:
        sets = sets or bool((positives < 0).any())
    if problem.retrieval_ranks and sets:
        raise ValueError("metrics: expected one positive a row, got labels with none or several")
    given = [name for name, _ in plain]
    given += [name for name in ("weights", "key_bias") if getattr(problem, name) is not None]
    for name in given:
        if problem.retrieval_ranks and name in CHANGE_LOGITS:
            raise ValueError(f"metrics: expected False with {name}, got True")
        if elsewhere in ELSEWHERE and name not in ELSEWHERE[elsewhere]:
            raise ValueError(f"{name}: expected {DEFAULTS[name]!r} {elsewhere}, got a value")
    if sets and elsewhere in NO_SETS:
        raise ValueError(f"labels: expected one dimension {elsewhere}, got {positives.ndim}")


def _checked(name: str, value: Any) -> Any:
    """A plain number of the options of the softmax, within its range; other options unchanged."""
    if name in FLAGS:
        return bool(value)
    if name == "key_bias":
        return value
    value = number(name, value, infinite=name == "false_negative_margin")
    if not isinstance(value, float):
        raise TypeError(f"{name}: expected a number, got {what(value)}")
    low, high, expected = RANGES[name]
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return value
