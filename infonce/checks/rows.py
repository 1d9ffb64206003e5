"""Labels, ids and weights of rows: checked, and as kernels take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..arrays import kinds, native
from ..kernels.linear import Classes, partners
from ..kernels.problem import Array
from ..spec import Loss
from .norms import require_finite
from .validation import features, integers, listed, numbers, what


def positives(
    xp: Any, labels: Array, m: int, n: int, none_or_sets: bool
) -> tuple[Array, Array | None, Array | None]:
    """[M] the positive key of each row; or, where a row may have none or several, also [M, P] the
    set of them, -1 for none. On a GPU also `Problem.marks`. And [M] whether a row has any, unless
    each has to have one."""
    labels = integers(xp, "labels", labels, m, none_or_sets)
    if xp is not np:  # to read them would wait for the device: such rows get a NaN loss instead
        if is_uint64(labels):
            labels = xp.minimum(labels, np.uint64(n))  # what int64 does not hold is out of range
        labels = xp.ascontiguousarray(labels, dtype=np.int64)
        labels, marks, present = _within(xp)(labels, n, none_or_sets)
        if labels.ndim > 1:
            labels, twice = _sets(labels)
            marks, present = marks.sum(axis=1), present.max(axis=1)
            if twice is not None:
                marks = xp.where(twice.any(axis=1), np.nan, marks)
        return labels, marks, present if none_or_sets else None
    outside = labels >= n
    if outside.any():
        first = np.argwhere(outside)[0]
        at = int(first[0]) if labels.ndim == 1 else tuple(map(int, first))
        raise ValueError(
            f"labels: expected values in [0, {n}), or negative ones for none, got "
            f"{labels[tuple(first)]} at position {at}"
        )
    labels = np.ascontiguousarray(labels, dtype=np.int64)
    labels, twice = _sets(np.maximum(labels, -1))
    if twice is not None and twice.any():
        row, place = map(int, np.argwhere(twice)[0])
        one_hot = ((labels == 0) | (labels == 1)).all()
        hint = "labels.argmax(axis=1) makes labels of one-hot rows" if one_hot else (
            "-1 fills up smaller sets"
        )  # fmt: skip
        raise ValueError(
            f"labels: expected each key once in a row, got key {labels[row, place]} more than once "
            f"in row {row}: {hint}"
        )
    return labels, None, (labels >= 0) if labels.ndim == 1 else (labels >= 0).any(axis=1)


def _sets(labels: Array) -> tuple[Array, Array | None]:
    """Sets of positives in ascending order; and where a key is the same as the next one. Sets of
    one are [M], and have none."""
    if labels.size == len(labels):
        return labels.reshape(-1), None
    labels.sort(axis=1)
    return labels, (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] >= 0)


def classes(
    xp: Any, labels: Any, n: int, decoupled: bool, first: int, whole: bool
) -> tuple[Classes, Array, Array]:
    """The classes of rows; and, of a `whole` batch, `linear.partners` of them. A row of a negative
    label is alone."""
    labels = integers(xp, "labels", labels, n)
    unsigned, labels = is_uint64(labels), comparable(xp, labels)
    if whole and xp is not np:
        found, positives, has_positive = _gpu_labels().classes(labels, decoupled, unsigned)
        return found, positives, has_positive
    own = xp.arange(first, first + n)
    ids = labels if unsigned else xp.where(labels < 0, -1 - own, labels)
    found = Classes(ids, ids)
    return found, *(partners(xp, found.members(xp, own), own, decoupled) if whole else (None, None))


@cache
def _gpu_labels() -> Any:
    """The module that takes labels and weights on a GPU."""
    from ..kernels.gpu import labels

    return labels


def own_mask(xp: Any, mask: Any, own: Array) -> Array | None:
    """[M, K] bool, contiguous: which own negatives count; None: all."""
    if mask is None:
        return None
    mask = listed("own_mask", mask, "bool")
    if mask.dtype != bool:
        raise TypeError(f"own_mask: expected dtype bool, got {mask.dtype}")
    if mask.shape != own.shape[:2]:
        raise ValueError(f"own_mask: expected shape {own.shape[:2]} like own, got {mask.shape}")
    return xp.asarray(mask)


def row_weights(xp: Any, weights: Array | None, has_positive: Array | None) -> Array | None:
    """`Problem.weights`: those given, and 0 for rows without a positive."""
    if has_positive is None or (xp is np and has_positive.all()):
        return weights
    here = has_positive.astype(np.float64, copy=False)
    return here if weights is None else here * weights


def shares(xp: Any, weights: Array, reduction: str) -> Array:
    """Weight of each row's loss in the reduced loss."""
    if reduction != "mean":
        return weights
    if xp is not np:
        return _gpu_labels().shares(weights)
    return weights / xp.maximum(weights.sum(), math.ulp(0.0))


def weights(xp: Any, value: Any, m: int, whole: bool) -> Array:
    """[M] float64, at least 0 and, of a `whole` batch, not all 0; on a GPU they are not read."""
    value = numbers(xp, "weights", value, m)
    if isinstance(value, np.ndarray):
        if (value < 0).any():
            i = int((value < 0).argmax())
            raise ValueError(
                f"weights: expected numbers that are not negative, got {value[i]!s} at position {i}"
            )
        if whole and not value.any():
            raise ValueError("weights: expected a positive sum, got zeros alone")
    return value


@cache
def _within(cupy: Any) -> Any:
    """Labels that are in range, the first key for others; NaN for these, else 0; and 1, or 0 for
    negative labels, which stand for `none` and become -1."""
    return cupy.ElementwiseKernel(
        "int64 label, int64 n, bool none", "int64 positive, float64 mark, float64 present",
        """
        const bool no_label = none && label < 0, inside = label >= 0 && label < n;
        positive = no_label ? -1 : inside ? label : 0;
        mark = no_label || inside ? 0 : __longlong_as_double(0x7ff8000000000000LL);
        present = no_label ? 0 : 1;
        """,
        "infonce_labels",
    )  # fmt: skip


def is_pair(given: Any) -> bool:
    """Whether these are integers of rows and integers of columns."""
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    return pair and all(isinstance(i, Sequence) or getattr(i, "ndim", 0) == 1 for i in given)


def names(
    xp: Any, loss: Loss, name: str, given: Any, m: int, n: int
) -> tuple[Array | None, Array | None]:
    """Integers of rows and of columns (`spec.NAMES`), which are equal where those given are. A
    joint loss has those of its samples twice."""
    if given is None:
        return None, None
    if not is_pair(given):
        if m != n:
            raise ValueError(
                f"{name}: expected a pair ({name} of {m} queries, {name} of {n} keys), got "
                f"{what(given)}"
            )
        shared = comparable(xp, integers(xp, name, given, m))
        shared = xp.tile(shared, 2) if loss.joint else shared
        return shared, shared
    if loss.symmetric:
        raise ValueError(f"{name}: expected one array for {loss.name}, got a pair")
    pair = integers(xp, f"{name}[0]", given[0], m), integers(xp, f"{name}[1]", given[1], n)
    rows, columns = (comparable(xp, side) for side in pair)
    if is_uint64(pair[0]) != is_uint64(pair[1]):  # below 0 are ids that the other side cannot have
        rows, columns = xp.where(rows < 0, -1, rows), xp.where(columns < 0, -2, columns)
    return rows, columns


def guide(
    xp: Any, loss: Loss, given: Any, arrays: Sequence[Array], check_finite: bool
) -> tuple[Array, Array]:
    """Features of the guide of queries and of keys, with as many rows as these arrays of features;
    those of both arguments of a joint loss in one array."""
    sides, names = [given], ["guide"]
    if len(arrays) > 1:
        names = ["guide[0]", "guide[1]"]
        if not (isinstance(given, (tuple, list)) and len(given) == 2):
            first, last = loss.arguments
            raise TypeError(f"guide: expected a pair (of {first}, of {last}), got {what(given)}")
        sides = list(given)
    made = [native(side, name) for side, name in zip(sides, names, strict=True)]
    both = [arrays[0], *made]
    features([loss.arguments[0], *names], both, kinds(both), 0)
    for name, z, rows in zip(names, made, arrays, strict=True):
        if z.shape != (len(rows), made[0].shape[1]):
            expected = f"({len(rows)}, {made[0].shape[1]})"
            raise ValueError(f"{name}: expected shape {expected}, got {z.shape}")
    if check_finite:
        require_finite(xp, names, made)
    if loss.joint:
        made = [xp.concatenate(made)]
    return made[0], made[-1]


def is_uint64(values: Array) -> bool:
    """Whether their dtype has integers that int64 has not."""
    return bool(values.dtype.kind == "u" and values.dtype.itemsize == 8)


def comparable(xp: Any, values: Array) -> Array:
    """Integers of one dtype as int64, equal where they are: uint64 by its bits."""
    if is_uint64(values):
        return xp.ascontiguousarray(values, dtype=np.uint64).view(np.int64)
    return xp.ascontiguousarray(values, dtype=np.int64)


def compared_as(value: Any) -> str:
    """How labels or `spec.NAMES` are compared, which has to be the same on all ranks."""
    if value is None:
        return "not given"
    dtypes = {
        "uint64" if is_uint64(listed("ids", side, "integers")) else "int64": None
        for side in (value if is_pair(value) else [value])
    }
    return f"given as {', '.join(dtypes)}"
