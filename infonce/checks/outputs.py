"""The arrays for feature gradients: arrays of the argument `out`, checked, and new arrays.

`call._request` and `prefixes.loss_and_grad` call these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import native
from ..kernels.problem import Array
from ..spec import Loss
from .validation import FLOATS, is_array, is_float, what

# Bytes: the alignment of the memory that libraries allocate on a GPU. The second half of a joined
# array is returned as an array of its own only if it has this alignment too (`joined`)
ALIGNMENT = 256

GradientTypes = Mapping[str, tuple[tuple[int, ...], Any]]  # argument -> shape, dtype


def joined(
    xp: Any, loss: Loss, wanted: GradientTypes, outs: dict[str, Array], shape: tuple[int, int],
    dtype: Any,
) -> tuple[Array, Array | None, dict[str, Array]]:  # fmt: skip
    """Memory for the gradients of a joint loss, whose two arguments are computed as one array.

    `shape` is [2B, D] and `dtype` the dtype of that array. On a GPU, if all gradients have one
    dtype, the array has that dtype instead. Returns three values:

    - `rows`: an array for the gradients of all queries, followed by the gradients of all keys;
    - `rows` if its halves must be copied to the gradients; None if its halves are the gradients;
    - the gradients: `outs`, if there are any; otherwise the halves, if they have the wanted dtypes
      and the alignment of other libraries' arrays; otherwise new arrays.
    """
    if outs:
        wanted = {name: (z.shape, z.dtype) for name, z in outs.items()}
    wanted_dtypes = {wanted_dtype for _, wanted_dtype in wanted.values()}
    # a GPU sums in a workspace; the CPU sums in `rows` itself, which needs the precision of `dtype`
    if xp is not np and len(wanted_dtypes) == 1:
        dtype = wanted_dtypes.pop()
    rows = xp.empty(shape, dtype)
    half = shape[0] // 2
    first, second = rows[:half], rows[half:]
    has_wanted_dtypes = all(wanted_dtype == dtype for _, wanted_dtype in wanted.values())
    if not outs and has_wanted_dtypes and first.nbytes % ALIGNMENT == 0:
        halves = dict(zip(loss.arguments, (first, second), strict=True))
        return rows, None, {name: halves[name] for name in wanted}
    return rows, rows, outs or {name: xp.ndarray(*type_) for name, type_ in wanted.items()}


def gradient_arrays(
    xp: Any, loss: Loss, arrays: Sequence[Array], out: Any, wanted: GradientTypes, grad_dtype: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays for the `wanted` feature gradients. Returns two dictionaries by name:

    - the arrays of all wanted gradients: arrays of `out`, and new arrays for the others;
    - the arrays of `out`, as the caller passed them.

    `arrays` are the features of the call. Arrays of `out` have their shapes and the dtype
    `grad_dtype` (None: any), lie on the host or on a GPU as the features do, and share no memory
    with the features or with each other. Over ranks, each rank checks its own arrays.
    """
    if out is None:
        return {name: xp.ndarray(*type_) for name, type_ in wanted.items()}, {}
    out_by_name: dict[str, Any]
    if isinstance(out, Mapping):
        out_by_name = dict(out)
    elif isinstance(out, (tuple, list)):
        names = [name for name in loss.arguments if name not in loss.locked]
        if len(out) != len(names):
            raise ValueError(f"out: expected {len(names)} arrays ({', '.join(names)}), "
                             f"got {len(out)}")  # fmt: skip
        out_by_name = dict(zip(names, out, strict=True))
    else:
        raise TypeError(f"out: expected a mapping or a sequence of arrays, got {what(out)}")
    out_by_name = {name: array for name, array in out_by_name.items() if array is not None}
    inputs = dict(zip(loss.arguments, arrays, strict=True))
    buffers = {}
    for name, array in out_by_name.items():
        if name not in wanted:
            raise ValueError(f"out: expected names among {', '.join(wanted)}, got {name!r}")
        shown = f"out[{name!r}]"
        buffers[name] = native(array, shown)
        _check(shown, buffers[name], inputs[name], grad_dtype)
    gradients = {
        name: buffers[name] if name in buffers else xp.ndarray(*type_)
        for name, type_ in wanted.items()
    }
    others = list(arrays)
    for array in buffers.values():
        if any(_share_memory(xp, array, other) for other in others):
            raise ValueError(
                "out: expected arrays that share no memory with the features or each other"
            )
        others.append(array)
    return gradients, out_by_name


def _check(name: str, array: Any, features: Array, grad_dtype: Any) -> None:
    """Require an array that can hold the gradient of `features`; `name` is its name in errors."""
    shape, on_host = features.shape, isinstance(features, np.ndarray)
    if not is_array(array) or isinstance(array, np.ndarray) != on_host:
        raise TypeError(
            f"{name}: expected an array{'' if on_host else ' on the GPU'}, got {what(array)}"
        )
    if not is_float(array.dtype) or (grad_dtype is not None and array.dtype != grad_dtype):
        raise TypeError(f"{name}: expected dtype {grad_dtype or ', '.join(FLOATS)}, "
                        f"got {array.dtype}")  # fmt: skip
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: expected a writeable array, got a read-only one")
    if not array.flags.c_contiguous and _overlaps(array):
        raise ValueError(
            f"{name}: expected elements that do not overlap, got strides {array.strides}"
        )


def _share_memory(xp: Any, a: Array, b: Array) -> bool:
    """Whether an element of `a` may share memory with one of `b`.

    NumPy counts two halves of the columns of one array as apart. CuPy compares only the ranges of
    memory, so there they count as shared.
    """
    if xp is not np:
        return bool(xp.may_share_memory(a, b))
    try:
        return np.shares_memory(a, b, max_work=1000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _overlaps(array: Array) -> bool:
    """Whether two elements may share memory.

    They cannot if each stride, from the smallest to the largest, is at least the extent of the
    axes before it. Other layouts count as overlapping, even those few that do not overlap.
    """
    extent = array.itemsize  # bytes from the first to the end of the last element, axes so far
    for stride, n in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if n > 1 and stride < extent:
            return True
        extent += stride * (n - 1)
    return False
