"""The checks of the options of the softmax: their ranges, and which options exclude each other.

`call._check_static` calls `options`; `call.check` calls `require_metrics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.problem import Problem
from ..spec import (
    BOOLEAN_OPTIONS,
    DEFAULTS,
    EXCLUSIVE,
    NOT_WITH_METRICS,
    OPTIONS,
    OWN_OPTIONS,
    SOFTMAX_OPTIONS,
    Loss,
)
from .validation import number, what


def options(
    loss: Loss, values: dict[str, Any], complete: bool = True
) -> tuple[tuple[str, Any], ...]:
    """The numbers and flags of the softmax that differ from their defaults, as (name, value).

    `values` has the value of every option of a call; options of the softmax are replaced by their
    checked values. ValueError for an option that this loss does not have, for options that exclude
    each other, and, if the options are `complete`, for an option without the one that it needs.
    """
    for name in SOFTMAX_OPTIONS:
        values[name] = _checked(name, values[name])

    def is_given(name: str) -> bool:
        if name == "own" and loss.has_own:  # no longer in `values`: it is a feature array
            return True
        default = DEFAULTS[name]
        return values[name] is not None if default is None else bool(values[name] != default)

    for name in loss.refused:
        if is_given(name):
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} for {loss.name}, which has none, "
                f"got {what(values[name])}"
            )
    for name, *others in EXCLUSIVE:
        if is_given(name) and all(map(is_given, others)):
            came = "an array" if name == "own" else what(values[name])
            raise ValueError(
                f"{name}: expected {DEFAULTS[name]!r} with {' and '.join(others)}, got {came}"
            )
    # `prefixes` removes dims, and `keywords.with_own` own, before this check
    without = [("guide_margin", "guide", values["guide"] is None), ("dim_weights", "dims", True)]
    without += [(name, "own", not loss.has_own) for name in OWN_OPTIONS if name != "own"]
    for name, needed, lacks_it in without:
        if complete and lacks_it and is_given(name):
            default, came = DEFAULTS[name], what(values[name])
            raise ValueError(f"{name}: expected {default!r} without {needed}, got {came}")
    plain_options = [name for name in SOFTMAX_OPTIONS if DEFAULTS[name] is not None]
    return tuple((name, values[name]) for name in plain_options if is_given(name))


def require_metrics(problem: Problem) -> None:
    """ValueError if metrics are undefined: a row has several positives or none, or the call has an
    option of `NOT_WITH_METRICS`. Positives on a GPU are not read: a row without one passes there,
    and has a rank without meaning."""
    positives = problem.positives
    not_one_each = positives is not None and positives.ndim > 1
    # on the host, weights are None if each row has a positive (`rows.row_weights`)
    if isinstance(positives, np.ndarray) and problem.weights is not None:
        not_one_each = not_one_each or bool((positives < 0).any())
    if not_one_each:
        raise ValueError("metrics: expected one positive a row, got labels with none or several")
    given = [option.name for option in problem.pair_options]
    given += ["own_bias"] if problem.own_bias is not None else []
    for name in given:
        if name in NOT_WITH_METRICS:
            raise ValueError(f"metrics: expected False with {name}, got True")


def _checked(name: str, value: Any) -> Any:
    """The value of an option: a number within its range, or a bool. Arrays are unchanged."""
    if name in BOOLEAN_OPTIONS:
        return bool(value)
    bounds = OPTIONS[name].range
    if bounds is None:  # an array, which `call._add_vectors` checks in every call
        return value
    low, high, expected = bounds
    value = number(name, value, infinities=(low, high))
    if not isinstance(value, float):
        raise TypeError(f"{name}: expected a number, got {what(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return value
