"""The checks of labels, ids, guides and weights, which return the arrays that kernels take."""

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
    """Check labels that are indices of keys. Returns three values:

    - positives: [M] int64, the key of each row, or -1 for none. With `none_or_sets` also [M, P]:
      the keys of each row in ascending order, after -1 for each missing key.
    - label_nans: on a GPU, `Problem.label_nans`; on the host None.
    - has_positive: [M], whether a row has a positive. None on a GPU without `none_or_sets`.
    """
    labels = integers(xp, "labels", labels, m, none_or_sets)
    # On a GPU, a row whose label is out of range gets a NaN loss: to read it would wait for the GPU
    if xp is not np:
        if is_uint64(labels):
            labels = xp.minimum(labels, np.uint64(n))  # labels beyond int64 are out of range
        labels = xp.ascontiguousarray(labels, dtype=np.int64)
        labels, label_nans, has_positive = _label_kernel(xp)(labels, n, none_or_sets)
        if labels.ndim > 1:
            labels, repeated = _sorted_sets(labels)
            label_nans, has_positive = label_nans.sum(axis=1), has_positive.max(axis=1)
            if repeated is not None:
                label_nans = xp.where(repeated.any(axis=1), np.nan, label_nans)
        return labels, label_nans, has_positive if none_or_sets else None
    outside = labels >= n
    if outside.any():
        first = np.argwhere(outside)[0]
        at = int(first[0]) if labels.ndim == 1 else tuple(map(int, first))
        raise ValueError(
            f"labels: expected values in [0, {n}), or negative ones for none, got "
            f"{labels[tuple(first)]} at position {at}"
        )
    labels = np.ascontiguousarray(labels, dtype=np.int64)
    labels, repeated = _sorted_sets(np.maximum(labels, -1))
    if repeated is not None and repeated.any():
        row, column = map(int, np.argwhere(repeated)[0])
        one_hot = ((labels == 0) | (labels == 1)).all()
        hint = "labels.argmax(axis=1) makes labels of one-hot rows" if one_hot else (
            "-1 fills up smaller sets"
        )  # fmt: skip
        raise ValueError(
            f"labels: expected each key once in a row, got key {labels[row, column]} more than "
            f"once in row {row}: {hint}"
        )
    return labels, None, (labels >= 0) if labels.ndim == 1 else (labels >= 0).any(axis=1)


def _sorted_sets(labels: Array) -> tuple[Array, Array | None]:
    """Sort sets of positives, [M] or [M, P]. Returns two values:

    - the sets in ascending order; sets of one key as [M].
    - [M, P - 1], whether a key is the same as the next one; None for sets of one key.
    """
    if labels.size == len(labels):
        return labels.reshape(-1), None
    labels.sort(axis=1)
    return labels, (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] >= 0)


def classes(
    xp: Any, labels: Any, n: int, decoupled: bool, first: int, whole_batch: bool
) -> tuple[Classes, Array, Array]:
    """Check labels that are classes. Returns three values:

    - the classes; a row with a negative label is a class by itself.
    - positives, and whether rows have one, by `linear.partners`; None over ranks, because the rows
      are not the `whole_batch`.
    """
    labels = integers(xp, "labels", labels, n)
    unsigned, labels = is_uint64(labels), comparable(xp, labels)
    if whole_batch and xp is not np:
        classes, positives, has_positive = _gpu_labels().classes(labels, decoupled, unsigned)
        return classes, positives, has_positive
    own = xp.arange(first, first + n)
    ids = labels if unsigned else xp.where(labels < 0, -1 - own, labels)
    classes = Classes(ids, ids)
    if not whole_batch:
        return classes, None, None
    return classes, *partners(xp, classes.members(xp, own), own, decoupled)


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
    """`Problem.weights`: the weights of the caller, and 0 for rows without a positive."""
    if has_positive is None or (xp is np and has_positive.all()):
        return weights
    ones_and_zeros = has_positive.astype(np.float64, copy=False)
    return ones_and_zeros if weights is None else ones_and_zeros * weights


def row_shares(xp: Any, weights: Array, reduction: str) -> Array:
    """The factor of each row's loss in the reduced loss. A mean divides weights by their sum."""
    if reduction != "mean":
        return weights
    if xp is not np:
        return _gpu_labels().row_shares(weights)
    return weights / xp.maximum(weights.sum(), math.ulp(0.0))


def weights(xp: Any, value: Any, m: int, whole_batch: bool) -> Array:
    """Check weights: [M] float64, at least 0 and, if the rows are the `whole_batch`, not all 0.

    Values on a GPU are not read.
    """
    value = numbers(xp, "weights", value, m)
    if isinstance(value, np.ndarray):
        if (value < 0).any():
            i = int((value < 0).argmax())
            raise ValueError(
                f"weights: expected numbers that are not negative, got {value[i]!s} at position {i}"
            )
        if whole_batch and not value.any():
            raise ValueError("weights: expected a positive sum, got only zeros")
    return value


@cache
def _label_kernel(cupy: Any) -> Any:
    """A kernel with three outputs for each label:

    - positive: the label; 0 if it is out of range; -1 if it is negative and rows may have `none`.
    - label_nan: 0; NaN if the label is out of range.
    - present: 1; 0 if `positive` is -1.
    """
    return cupy.ElementwiseKernel(
        "int64 label, int64 n, bool none", "int64 positive, float64 label_nan, float64 present",
        """
        const bool no_label = none && label < 0, inside = label >= 0 && label < n;
        positive = no_label ? -1 : inside ? label : 0;
        label_nan = no_label || inside ? 0 : __longlong_as_double(0x7ff8000000000000LL);
        present = no_label ? 0 : 1;
        """,
        "infonce_labels",
    )  # fmt: skip


def is_pair(value: Any) -> bool:
    """Whether the value is a pair: integers of rows, integers of columns."""
    two_items = isinstance(value, (tuple, list)) and len(value) == 2
    return two_items and all(isinstance(i, Sequence) or getattr(i, "ndim", 0) == 1 for i in value)


def sample_integers(
    xp: Any, loss: Loss, name: str, value: Any, m: int, n: int
) -> tuple[Array, Array]:
    """Check integers of samples (`spec.NAMES`): one array, or a pair (of queries, of keys).

    Returns [M] int64 numbers of queries and [N] int64 numbers of keys. Two numbers are equal if and
    only if the caller's integers are equal. A joint loss gets the integers of its samples twice.
    """
    if not is_pair(value):
        if m != n:
            raise ValueError(
                f"{name}: expected a pair ({name} of {m} queries, {name} of {n} keys), got "
                f"{what(value)}"
            )
        shared = comparable(xp, integers(xp, name, value, m))
        shared = xp.tile(shared, 2) if loss.joint else shared
        return shared, shared
    if loss.symmetric:
        raise ValueError(f"{name}: expected one array for {loss.name}, got a pair")
    pair = integers(xp, f"{name}[0]", value[0], m), integers(xp, f"{name}[1]", value[1], n)
    rows, columns = (comparable(xp, side) for side in pair)
    # negative int64 and uint64 of 2^63 or more would look equal: no integer is both
    if is_uint64(pair[0]) != is_uint64(pair[1]):
        rows, columns = xp.where(rows < 0, -1, rows), xp.where(columns < 0, -2, columns)
    return rows, columns


def on_host(name: str, value: Any) -> bool:
    """Whether all integers of samples are in host memory."""
    sides = value if is_pair(value) else [value]
    return all(isinstance(listed(name, side, "integers"), np.ndarray) for side in sides)


def guide(
    xp: Any, loss: Loss, value: Any, arrays: Sequence[Array], check_finite: bool
) -> tuple[Array, Array]:
    """Check the guide: features with as many rows as `arrays`, the features of the loss.

    Returns the guide's features of queries and of keys. A joint loss has both arguments in one
    array.
    """
    sides, names = [value], ["guide"]
    if len(arrays) > 1:
        names = ["guide[0]", "guide[1]"]
        if not (isinstance(value, (tuple, list)) and len(value) == 2):
            first, last = loss.arguments[:2]
            raise TypeError(f"guide: expected a pair (of {first}, of {last}), got {what(value)}")
        sides = list(value)
    guides = [native(side, name) for side, name in zip(sides, names, strict=True)]
    on_one_device = [arrays[0], *guides]
    features([loss.arguments[0], *names], on_one_device, kinds(on_one_device), 0)
    for name, z, rows in zip(names, guides, arrays, strict=True):
        if z.shape != (len(rows), guides[0].shape[1]):
            expected = f"({len(rows)}, {guides[0].shape[1]})"
            raise ValueError(f"{name}: expected shape {expected}, got {z.shape}")
    if check_finite:
        require_finite(xp, names, guides)
    if loss.joint:
        guides = [xp.concatenate(guides)]
    return guides[0], guides[-1]


def is_uint64(values: Array) -> bool:
    """Whether the dtype is uint64, in either byte order."""
    return bool(values.dtype.kind == "u" and values.dtype.itemsize == 8)


def comparable(xp: Any, values: Array) -> Array:
    """[n] int64 numbers that are equal if and only if the integers are. uint64 keeps its bits."""
    if is_uint64(values):
        return xp.ascontiguousarray(values, dtype=np.uint64).view(np.int64)
    return xp.ascontiguousarray(values, dtype=np.int64)


def compared_as(value: Any) -> str:
    """The type by which ranks compare labels or `spec.NAMES`. It must be the same on all ranks."""
    if value is None:
        return "not given"
    dtypes = {
        "uint64" if is_uint64(listed("ids", side, "integers")) else "int64": None
        for side in (value if is_pair(value) else [value])
    }
    return f"given as {', '.join(dtypes)}"
