"""The checks of arrays with a value for each row: labels, classes, ids, guides, weights, masks.

They return the arrays that kernels take; `call._add_vectors` puts these into the problem. In this
file, m is the number of queries and n the number of keys; `xp` is numpy or cupy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..arrays import describe_arrays, native
from ..kernels.linear import Classes, partners
from ..kernels.options import MOST_COLUMNS
from ..kernels.problem import Array
from ..spec import Loss
from .norms import require_finite
from .validation import as_array, features, first_position, integers, is_float, numbers, what


def positives(
    xp: Any, labels: Array, m: int, n: int, any_number: bool, weights: Any = None
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Check labels, which are indices of keys, and their weights. Returns four values:

    - positives: [m] int64, the key of each row, or -1 for none. With `any_number` also [m, P]: the
      keys of each row in ascending order, after -1 for each missing key.
    - label_nans: with cupy, `Problem.known_row_nans`; with numpy None.
    - has_positive: [m], whether a row has a positive. None with cupy, if not `any_number`.
    - `Problem.label_weights`, from `weights` [m, P]; None for rows of one label, whose target is 1.

    `any_number`: a row may have any number of positives: none (a negative label), or several
    ([m, P]). Otherwise each row must have one. A label of weight 0 is no positive.

    If features are in host memory (`xp` is numpy), a label of n or more is an error. A negative
    label becomes -1: without `any_number`, the caller refuses it (`distributed.run`). If features
    are on a GPU (`xp` is cupy), no label is read, because to read it would wait for the GPU: the
    row of a label of n or more, or of a negative one without `any_number`, gets the loss NaN.
    Invalid weights of labels that are not negative are an error, or make the loss NaN, likewise.
    """
    labels = integers(xp, "labels", labels, m, "P" if any_number else "")
    if weights is not None:
        weights = _label_weights(xp, weights, labels)
    if xp is not np:
        if is_uint64(labels):  # labels beyond int64 become n, which is out of range too
            labels = xp.minimum(labels, np.uint64(n))
        labels = xp.ascontiguousarray(labels, dtype=np.int64)
        labels, label_nans, has_positive = _label_kernel(xp)(labels, n, any_number)
        if weights is not None:
            label_nans += xp.where(_are_valid(weights), 0.0, np.nan)
            labels, has_positive = xp.where(weights == 0, -1, labels), (weights != 0) * 1.0
        if labels.ndim > 1:  # reduce what the kernel returns for each label to each row
            labels, repeated, weights = _sorted_sets(xp, labels, weights)
            label_nans, has_positive = label_nans.sum(axis=1), has_positive.max(axis=1)
            if repeated is not None:
                label_nans = xp.where(repeated.any(axis=1), np.nan, label_nans)
        return labels, label_nans, has_positive if any_number else None, weights
    require_below("labels", labels, n, labels >= n, any_number)
    labels = np.maximum(np.ascontiguousarray(labels, dtype=np.int64), -1)
    if weights is not None:
        if not _are_valid(weights).all():
            row, column = map(int, np.argwhere(~_are_valid(weights))[0])
            raise ValueError(
                f"label_weights: expected finite numbers that are not negative, got "
                f"{weights[row, column]!s} at position {row, column}"
            )
        labels = np.where(weights == 0, -1, labels)
    labels, repeated, weights = _sorted_sets(np, labels, weights)
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
    has_positive = (labels >= 0) if labels.ndim == 1 else (labels >= 0).any(axis=1)
    return labels, None, has_positive, weights


def _label_weights(xp: Any, value: Any, labels: Array) -> Array:
    """The weights of labels as float64, 0 for negative labels. Their values are not checked."""
    value = as_array("label_weights", value, "numbers")
    if not is_float(value.dtype) and value.dtype.kind not in "iu":
        raise TypeError(f"label_weights: expected numbers, got dtype {value.dtype}")
    if labels.ndim != 2:
        raise ValueError(f"label_weights: expected labels [M, P], got labels of {labels.shape}")
    if value.shape != labels.shape:
        raise ValueError(
            f"label_weights: expected shape {labels.shape} like labels, got {value.shape}"
        )
    return xp.where(labels < 0, 0.0, xp.asarray(value).astype(np.float64))


def require_below(name: str, indices: Array, n: int, outside: Array, or_none: bool) -> None:
    """ValueError, naming the first, if any of `indices` is `outside` of [0, n). `or_none`: negative
    indices are allowed."""
    if outside.any():
        at, more = first_position(outside), ", or negative ones for none" if or_none else ""
        raise ValueError(
            f"{name}: expected values in [0, {n}){more}, got {indices[at]} at position {at}"
        )


def _are_valid(label_weights: Array) -> Array:
    """Whether each weight is finite and not negative."""
    return (label_weights >= 0) & (label_weights < np.inf)


def _sorted_sets(
    xp: Any, labels: Array, weights: Array | None
) -> tuple[Array, Array | None, Array | None]:
    """Sort each row's set of positives, [m] or [m, P], with their weights. Returns three values:

    - the sets in ascending order; sets of one key as [m].
    - [m, P - 1], whether a key is the same as the next one; None for sets of one key.
    - the weights over the largest weight of their row, so that equal weights become 1.
    """
    if labels.size == len(labels):
        return labels.reshape(-1), None, None
    if weights is None:
        labels.sort(axis=1)
    else:
        order = labels.argsort(axis=1)
        labels, weights = (xp.take_along_axis(z, order, axis=1) for z in (labels, weights))
        largest = weights.max(axis=1, keepdims=True)
        weights = weights / xp.where(largest == 0, 1.0, largest)
    return labels, (labels[:, 1:] == labels[:, :-1]) & (labels[:, 1:] >= 0), weights


def classes(
    xp: Any, labels: Any, n: int, decoupled: bool, first: int, whole_batch: bool
) -> tuple[Classes, Array, Array | None]:
    """Check labels that are classes, one for each of n rows. Returns three values:

    - the classes; a row with a negative label is a class by itself.
    - positives [n] and has_positive [n], by `linear.partners`; both are None over ranks, because
      the rows are not the `whole_batch`. `first` is the index of the first row in the batch.
    """
    labels = integers(xp, "labels", labels, n)
    unsigned, labels = is_uint64(labels), comparable(xp, labels)
    if whole_batch and xp is not np:
        classes, positives, has_positive = _gpu_labels().classes(labels, decoupled, unsigned)
        return classes, positives, has_positive
    row_numbers = xp.arange(first, first + n)
    # -1 - row: a negative number that no other row has
    ids = labels if unsigned else xp.where(labels < 0, -1 - row_numbers, labels)
    return _with_partners(xp, Classes(ids, ids), row_numbers, decoupled, whole_batch)


def pair_classes(
    xp: Any, loss: Loss, positive_ids: Any, m: int, n: int, decoupled: bool, whole_batch: bool
) -> tuple[Classes, Array, Array | None]:
    """Check the positive ids of a softmax, which are classes of queries and of keys. Returns the
    three values of `classes`."""
    if loss.column_direction_weight and is_pair(positive_ids):
        raise ValueError(f"positive_ids: expected one array for {loss.name}, got a pair")
    ids = sample_integers(xp, loss, "positive_ids", positive_ids, m, n)
    if whole_batch and xp is not np:
        pair: tuple[Classes, Array, Array | None] = _gpu_labels().pair_classes(*ids, decoupled)
        return pair
    return _with_partners(xp, Classes(*ids), None, decoupled, whole_batch)


def _with_partners(
    xp: Any, classes: Classes, own_index: Array | None, decoupled: bool, whole_batch: bool
) -> tuple[Classes, Array, Array | None]:
    """The three values of `classes`. `own_index`: see `linear.partners`."""
    if not whole_batch:
        return classes, None, None
    members = classes.members(xp, xp.arange(len(classes.columns)))
    return classes, *partners(xp, classes, members, own_index, decoupled)


@cache
def _gpu_labels() -> Any:
    """The module of the kernels for classes and row shares on a GPU, imported when needed."""
    from ..kernels.gpu import labels

    return labels


def own_mask(xp: Any, mask: Any, shape: tuple[int, ...], like: str) -> Array | None:
    """Check the mask of own negatives: [m, K] bool, which of them count; None: all. `shape` is that
    of the argument `like`."""
    if mask is None:
        return None
    mask = as_array("own_mask", mask, "bool")
    if mask.dtype != bool:
        raise TypeError(f"own_mask: expected dtype bool, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(f"own_mask: expected shape {shape} like {like}, got {mask.shape}")
    return xp.asarray(mask)


def own_indices(xp: Any, indices: Any, m: int) -> Array:
    """Check the dtype and shape of indices of own negatives: [m, K] integers of any dtype."""
    shape = as_array("own_indices", indices, "integers").shape
    if len(shape) != 2 or shape[0] != m or not shape[1]:
        raise ValueError(f"own_indices: expected shape ({m}, K), got {shape}")
    return integers(xp, "own_indices", indices, m, "K")


def rows_of_table(
    xp: Any, indices: Array, rows: int, mask: Array | None
) -> tuple[Array, Array | None]:
    """`Problem.own_indices` and `own_mask`, from indices of a table with `rows` rows, and a mask.

    On the host, an index that is out of range is an error, unless the mask leaves it out. The mask
    of the result also leaves out negative indices, and indices that it leaves out are 0. On a GPU,
    no index is read: kernels find these.
    """
    if xp is not np:
        if is_uint64(indices):  # indices beyond int64 become `rows`, which is out of range too
            indices = xp.minimum(indices, np.uint64(rows))
        return xp.ascontiguousarray(indices, dtype=np.int64), mask
    counts = indices >= 0 if mask is None else mask & (indices >= 0)
    require_below("own_indices", indices, rows, counts & (indices >= rows), or_none=True)
    indices = np.where(counts, indices, 0).astype(np.int64)
    return indices, mask if mask is None and counts.all() else counts


def row_weights(xp: Any, weights: Array | None, has_positive: Array | None) -> Array | None:
    """`Problem.weights`: the weights of the caller (None: 1), and 0 for rows without a positive.

    None if all weights are 1 and the host knows that each row has a positive. `has_positive` on a
    GPU is not read, so with it the result is an array.
    """
    if has_positive is None or (xp is np and has_positive.all()):
        return weights
    ones_and_zeros = has_positive.astype(np.float64, copy=False)
    return ones_and_zeros if weights is None else ones_and_zeros * weights


def row_shares(xp: Any, weights: Array, reduction: str) -> Array:
    """[m] factor of each row's loss in the reduced loss. A mean divides weights by their sum.

    If the sum is 0, all shares are 0. The sum is 0 if no row has a positive, or if all weights on a
    GPU, which are not checked, are 0.
    """
    if reduction != "mean":
        return weights
    if xp is not np:
        return _gpu_labels().row_shares(weights)
    return weights / (weights.sum() or 1.0)


def weights(xp: Any, value: Any, m: int, whole_batch: bool) -> Array:
    """Check weights: [m] float64, at least 0 and, if the rows are the `whole_batch`, not all 0.

    Weights on a GPU are not read, so neither condition is checked for them.
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
    """A kernel with three outputs for each label. `none`: a negative label stands for no positive.

    - positive: the label; 0 if it is out of range, -1 if it stands for no positive.
    - label_nan: NaN if the label is out of range, otherwise 0.
    - present: 0 if the label stands for no positive, otherwise 1.
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
    """Whether the value is a pair (integers of queries, integers of keys), and not one list."""
    two_items = isinstance(value, (tuple, list)) and len(value) == 2
    return two_items and all(isinstance(i, Sequence) or getattr(i, "ndim", 0) > 0 for i in value)


def sample_integers(
    xp: Any, loss: Loss, name: str, value: Any, m: int, n: int
) -> tuple[Array, Array]:
    """Check integers of samples (`spec.INTEGER_OPTIONS`): an array, or a pair (queries, keys).

    Returns [m] int64 numbers of queries and [n] int64 numbers of keys; [m, C] and [n, C] for ids of
    several columns. Two numbers are equal if and only if the caller's integers are equal. For a
    joint loss, whose rows are all queries and then all keys, both results are the integers of the
    samples twice.
    """
    if not is_pair(value):
        if m != n:
            raise ValueError(
                f"{name}: expected a pair ({name} of {m} queries, {name} of {n} keys), got "
                f"{what(value)}"
            )
        shared = comparable(xp, _integers_of_side(xp, name, name, value, m))
        shared = xp.concatenate([shared, shared]) if loss.joint else shared
        return shared, shared
    if loss.symmetric:
        raise ValueError(f"{name}: expected one array for {loss.name}, got a pair")
    pair = [
        _integers_of_side(xp, name, f"{name}[{place}]", value[place], rows)
        for place, rows in enumerate((m, n))
    ]
    if pair[0].shape[1:] != pair[1].shape[1:]:
        raise ValueError(
            f"{name}: expected as many columns of queries as of keys, got shapes "
            f"{pair[0].shape} and {pair[1].shape}"
        )
    rows, columns = (comparable(xp, side) for side in pair)
    # If one array is int64 and the other uint64, a negative integer of the first may have the bits
    # of an integer of 2^63 or more of the second. Neither equals any integer of the other array. So
    # -1 replaces all of them among queries, and -2 among keys
    if is_uint64(pair[0]) != is_uint64(pair[1]):
        rows, columns = xp.where(rows < 0, -1, rows), xp.where(columns < 0, -2, columns)
    return rows, columns


def _integers_of_side(xp: Any, option: str, name: str, value: Any, n: int) -> Array:
    """Check the integers of queries or of keys, `name` in errors: [n]; or, for the option `ids`, of
    several columns, [n, C]. One column becomes [n]."""
    if option != "ids":
        return integers(xp, name, value, n)
    values = integers(xp, name, value, n, "C")
    if values.ndim > 1 and values.shape[1] > MOST_COLUMNS:
        raise ValueError(f"{name}: expected at most {MOST_COLUMNS} columns, got {values.shape[1]}")
    return values.reshape(-1) if values.shape[1:] == (1,) else values


def on_host(name: str, value: Any) -> bool:
    """Whether all integers of samples, one array or a pair, are in host memory."""
    parts = value if is_pair(value) else [value]
    return all(isinstance(as_array(name, part, "integers"), np.ndarray) for part in parts)


def guide(
    xp: Any, loss: Loss, value: Any, arrays: Sequence[Array], check_finite: bool
) -> tuple[Array, Array]:
    """Check the guide: features with as many rows as `arrays`, the features of the loss.

    Rows have any width, which is the same on both sides. The guide is on the loss's device.
    Returns the guide's features of queries and of keys: the same array, if the queries are the
    keys. For a joint loss, this array has the features of all queries, and then of all keys.
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
    features([loss.arguments[0], *names], on_one_device, describe_arrays(on_one_device), 0)
    for name, z, rows in zip(names, guides, arrays, strict=True):
        if z.shape != (len(rows), guides[0].shape[1]):
            expected = f"({len(rows)}, {guides[0].shape[1]})"
            raise ValueError(f"{name}: expected shape {expected}, got {z.shape}")
    if check_finite:
        require_finite(xp, dict(zip(names, guides, strict=True)))
    if loss.joint:
        guides = [xp.concatenate(guides)]
    return guides[0], guides[-1]


def is_uint64(values: Array) -> bool:
    """Whether the dtype is uint64, in either byte order."""
    return bool(values.dtype.kind == "u" and values.dtype.itemsize == 8)


def comparable(xp: Any, values: Array) -> Array:
    """Integers as int64 numbers. Within a dtype, two are equal if and only if the integers are.

    uint64 keeps its bits, so integers of 2^63 or more become negative. They may equal negative
    integers of an int64 array: `sample_integers` keeps these apart.
    """
    if is_uint64(values):
        return xp.ascontiguousarray(values, dtype=np.uint64).view(np.int64)
    return xp.ascontiguousarray(values, dtype=np.int64)


def compared_as(value: Any) -> str:
    """The integer type (`comparable`) of labels or integers of samples, and how many columns they
    have, as text.

    The type must be the same on all ranks, because an int64 and a uint64 integer may have the same
    bits: `distributed.agreement` compares the texts, and raises an error if they differ.
    """
    if value is None:
        return "not given"
    sides = [as_array("ids", z, "integers") for z in (value if is_pair(value) else [value])]
    dtypes = {"uint64" if is_uint64(side) else "int64": None for side in sides}
    columns = sides[0].shape[1] if sides[0].ndim > 1 else 1
    of_columns = f" of {columns} columns" if columns > 1 else ""
    return f"given as {', '.join(dtypes)}{of_columns}"
