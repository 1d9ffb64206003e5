"""The checks of single arguments. A check has the name of its argument, or of the argument's type.

It returns the value that a call works with, or raises an error that names the argument, what was
expected and what came. No check reads an array on a GPU, except `norms.require_finite`
(`check_finite=True`), which waits for the device: kernels check the values of arrays on a GPU.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..arrays import gpu_missing, native, on_gpu
from ..kernels.problem import SCALES, Array
from ..spec import Loss
from .keywords import JOINED_VIEWS

# names of dtypes that features may have
FLOATS = ("float64", "float32", "float16", "bfloat16")
# units of sizes -> bytes
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"B": 1, **BINARY, **DECIMAL}


@lru_cache(64)  # to build a dtype's name takes time that small batches notice
def is_float(dtype: Any) -> bool:
    """Whether features may have the dtype."""
    return dtype.name in FLOATS


def is_array(value: Any) -> bool:
    """Whether the value is an array of NumPy or CuPy."""
    return isinstance(value, np.ndarray) or on_gpu(value)


class Batch(NamedTuple):
    """The size of the whole batch, and the place of this rank's rows in the batch."""

    rows: int  # queries of all ranks
    columns: int  # keys of all ranks
    first: int = 0  # index of this rank's first query


SHORT = reprlib.Repr()  # for values in error messages
SHORT.maxstring = SHORT.maxother = 80


def what(value: Any) -> str:
    """A wrong value in words, for the end of an error message ("got ..."), in one line.

    An array is described by type, shape and dtype, any other value by type and `repr`.
    """
    type_name, shape = type(value).__name__, getattr(value, "shape", None)
    if isinstance(shape, tuple):
        dtype = getattr(value, "dtype", None)  # a data frame has one for each column
        suffix = "" if dtype is None else f" and dtype {dtype}"
        return f"{type_name} of shape {tuple(shape)}{suffix}"
    try:
        shown = " ".join(SHORT.repr(value).split())
    except ValueError:  # an integer of too many digits for Python
        return type_name
    return shown if value is None or isinstance(value, str) else f"{type_name} {shown}"[:120]


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """ValueError unless the value is one of the strings `choices`."""
    if not isinstance(value, str) or value not in choices:
        expected = ", ".join(f'"{c}"' for c in choices)
        raise ValueError(f"{name}: expected one of {expected}, got {what(value)}")


def flag(name: str, value: Any) -> None:
    """TypeError unless the value is True or False, of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {what(value)}")


def is_integer(value: Any) -> bool:
    """Whether the value is an integer of Python or NumPy, but no bool and no time difference."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def parse_bytes(text: str) -> int:
    """A number of bytes as text: "268435456", "256MiB", "1.5GiB", "2TB"."""
    factors = {unit.lower(): factor for unit, factor in UNITS.items()}
    match = re.fullmatch(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([A-Za-z]*)\s*", text)
    factor = factors.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise ValueError(
            f"expected a number of bytes, or one with a unit ({', '.join(UNITS)}), as in 1.5GiB, "
            f"got {what(text)}"
        )
    return int(Fraction(match[1]) * factor)


def human(size: float | None) -> str:
    """Bytes as a table shows them."""
    if size is None:
        return "unknown"
    for unit, factor in reversed(BINARY.items()):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def workspace(value: Any) -> int | None:
    """A number of bytes, from a number or text; None if the caller gave none."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"workspace: {error}") from None
    if not is_integer(value):
        raise TypeError(
            f"workspace: expected an integer number of bytes, or text such as '1GiB', got "
            f"{what(value)}"
        )
    if value <= 0:
        raise ValueError(f"workspace: expected a positive number of bytes, got {what(value)}")
    return int(value)


def wrt(loss: Loss, value: Any) -> frozenset[str]:
    """The names of the arguments whose gradients are wanted; None: all that the loss has."""
    possible = [name for name in loss.arguments if name not in loss.locked] + ["scale"]
    if loss.sigmoid:
        possible.append("bias")
    if value is None:
        return frozenset(possible)
    expected = f"wrt: expected names among {', '.join(possible)}"
    try:
        names = [value] if isinstance(value, str) else list(value)
    except TypeError:
        raise TypeError(f"{expected}, got {what(value)}") from None
    for name in names:
        if not isinstance(name, str) or name not in possible:
            raise ValueError(f"{expected}, got {what(name)}")
    return frozenset(names)


def features(
    names: Sequence[str], arrays: Sequence[Array], descriptions: Sequence[tuple[Any, ...] | None],
    least: int, may_have_tokens: bool = False, has_table: bool = False,
) -> None:  # fmt: skip
    """Require arrays of features with at least `least` rows, all on one device.

    `descriptions` are the results of `arrays.describe_arrays`. `may_have_tokens`: features may have
    the shape [rows, tokens, features]. `own` has the shape [M, K, D]. If the call `has_table`, with
    `own_indices`, it has the shape [T, D] and at least one row.
    """
    first = descriptions[0]
    has_tokens = may_have_tokens and first is not None and len(first[0]) == 3
    dimensions = 3 if has_tokens else 2
    for name, z, description in zip(names, arrays, descriptions, strict=True):
        if description is None:
            refuse_views_apart(name, z)
            hint = ": np.asarray makes one" if isinstance(z, (list, tuple)) else ""
            if hasattr(z, "to_numpy"):
                hint = ": .to_numpy() makes one"
            raise TypeError(f"{name}: expected an array, got {what(z)}{hint}")
        shape, dtype, _ = description
        if not is_float(dtype):
            raise TypeError(f"{name}: expected dtype {', '.join(FLOATS)}, got {dtype}")
        if name == "own":
            if dimensions == 3:
                raise ValueError("own: expected None with features of three dimensions")
            m, d = arrays[0].shape
            of_rows = (m, *shape[1:2], d)  # K is free
            if has_table and (len(shape) != 2 or shape[1] != d or not shape[0]):
                raise ValueError(f"own: expected shape (T, {d}) with own_indices, got {shape}")
            if not has_table and tuple(shape) != of_rows:
                hint = f"; (T, {d}) needs own_indices" if len(shape) == 2 else ""
                raise ValueError(f"own: expected shape ({m}, K, {d}) like query, got {shape}{hint}")
        elif len(shape) != dimensions:
            expected = "2 dimensions [rows, features]"
            if dimensions == 3:
                expected = f"3 dimensions [rows, tokens, features] like {names[0]}"
            if name == "features" and len(shape) == 3:
                expected = JOINED_VIEWS
            raise ValueError(f"{name}: expected {expected}, got shape {shape}")
        if shape[0] < least or 0 in shape[1:]:
            raise ValueError(
                f"{name}: expected at least one row and one feature, got shape {shape}"
            )
    gpus = [description[2] for description in descriptions if description]
    devices = ["the host" if gpu is None else f"GPU {gpu}" for gpu in gpus]
    for name, device in zip(names, devices, strict=True):
        if device != devices[0]:
            raise ValueError(
                f"{name}: expected an array on {devices[0]} like {names[0]}, got one on {device}"
            )


def refuse_views_apart(name: str, z: Any) -> None:
    """TypeError for a list or tuple of arrays as the one array of a loss of views."""
    if name == "features" and isinstance(z, (list, tuple)) and z and hasattr(z[0], "ndim"):
        raise TypeError(f"{name}: expected {JOINED_VIEWS}, got {type(z).__name__} of arrays")


def shapes(
    loss: Loss, query: Array, key: Array, labelled: bool, batch: Batch, square: bool
) -> None:
    """Refuse feature arrays whose widths or numbers of rows do not match.

    `labelled`: the call has labels. `square`: there have to be as many keys as queries.
    """
    first, last = loss.arguments[0], loss.arguments[loss.key_argument]
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{last}: expected width {query.shape[1]} like {first}, got shape {key.shape}"
        )
    if square and len(query) != len(key):
        raise ValueError(f"{last}: expected {len(query)} rows like {first}, got shape {key.shape}")
    if loss.symmetric and not (labelled or loss.joint) and len(query) % 2:
        raise ValueError(
            f"{first}: expected an even number of rows, two views of each sample, "
            f"got shape {query.shape}"
        )
    # without labels, key i is the positive of query i: InfoNCE needs a key for each query
    key_for_each_query = not (loss.square or loss.symmetric or loss.taught or labelled)
    if key_for_each_query and batch.columns < batch.rows:
        came = f"shape {key.shape}" if len(key) == batch.columns else f"{batch.columns} in all"
        raise ValueError(
            f"{last}: expected at least {batch.rows} rows, the positive of query i being key i "
            f"without labels, got {came}"
        )


def offload(loss: Loss, method: str, query: Array) -> None:
    """Require what `offload=True` needs: host arrays, a method that keeps no logits, a GPU."""
    if not isinstance(query, np.ndarray):
        raise ValueError(
            f"offload: expected features in host memory, got {loss.arguments[0]} on GPU "
            f"{query.device.id}"
        )
    if method not in ("auto", "tiled"):
        raise ValueError(
            f'method: expected "auto" or "tiled" with offload, got {method!r}, which '
            "keeps the logits"
        )
    if missing := gpu_missing():
        raise ValueError(f"offload: expected a GPU to compute on, found none: {missing}")


def number(name: str, value: Any, infinities: tuple[float, ...] = ()) -> Any:
    """The value as a finite float, or as one of `infinities`.

    An array of one number on the host becomes the number. An array of one number on a GPU becomes a
    0-d array and is not read, because to read it would wait for the device.
    """
    # plain numbers skip `native`: it reads sys.modules, which torch.compile may fail to trace
    if type(value) not in (int, float):
        value = native(value, name)
        if on_gpu(value) and value.size == 1:
            if not is_float(value.dtype):
                raise TypeError(f"{name}: expected dtype {', '.join(FLOATS)}, got {value.dtype}")
            return value.reshape(())
        is_single = isinstance(value, (np.ndarray, np.generic)) and value.size == 1
        if is_single and value.dtype.kind not in "OMm":  # neither objects nor times
            value = value.item()
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number or an array of one number, got {what(value)}")
    # math.isfinite would break a graph of torch.compile where the number is an input of the graph
    if not abs(value := real(name, value)) < math.inf and value not in infinities:
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return value


def real(name: str, value: Any) -> float:
    """A real number of any type as a float."""
    try:
        return float(value)
    except OverflowError:
        came = what(value)
        raise ValueError(f"{name}: expected a number that fits float64, got {came}") from None


def as_array(name: str, value: Any, expected: str) -> Array:
    """The value as an array: lists and other values become NumPy arrays.

    `expected` names the elements in the error for a value that cannot be an array.
    """
    value = native(value, name)
    if is_array(value):
        return value
    try:
        return np.asarray(value)
    except Exception:  # objects in a list may raise anything
        raise TypeError(f"{name}: expected {expected}, got {what(value)}") from None


def scale(loss: Loss, temperature: Any, scale: Any, compute: str) -> Any:
    """The scale, from one of the two arguments, within the range of the precision `compute`.

    The range, and why it ends there: `SCALES`.
    An array on a GPU becomes a 0-d array and is not read: if it is out of range, the loss is NaN.
    """
    if temperature is not None and scale is not None:
        raise ValueError("temperature, scale: expected one of them, got both")
    if temperature is None and scale is None:
        if loss.scale is None:
            raise ValueError(
                "temperature, scale: expected one of them, got neither; temperature=0.07 is usual"
            )
        return loss.scale
    name, argument = ("scale", scale) if temperature is None else ("temperature", temperature)
    value = number(name, argument)
    if not isinstance(value, float):  # an array on a GPU
        return value if temperature is None else 1.0 / value.astype(np.float64)
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    wide = compute == "fp64"
    low, high = SCALES["fp64" if wide else "fp32"]
    if temperature is not None:
        low, high = 1.0 / high, 1.0 / low
    if not low <= value <= high:
        raise ValueError(
            f"{name}: expected a number in [{low!r}, {high!r}] for products in "
            f"float{64 if wide else 32}, got {argument!r}"
        )
    return value if temperature is None else 1.0 / value


def precision(precision: str, dtypes: set[str], on_cpu: bool, has_tokens: bool = False) -> str:
    """The precision of products: the argument, or for "auto" the one that fits the dtypes.

    "auto" is fp64 if an array has float64. On a GPU, "auto" is bf16 or fp16 if all arrays have that
    dtype. In all other cases "auto" is fp32. `dtypes` are the names of the dtypes of all features.
    `on_cpu`: whether the CPU computes (not for features in host memory with `offload`).
    """
    if precision == "auto":
        if "float64" in dtypes:
            return "fp64"
        # the product of two 16-bit numbers of one format is exact in float32
        exact = {"bfloat16": "bf16", "float16": "fp16"}
        return "fp32" if on_cpu or len(dtypes) > 1 else exact.get(min(dtypes), "fp32")
    if on_cpu and precision not in ("fp64", "fp32"):
        raise ValueError(
            f'precision: expected "auto", "fp64" or "fp32" on the CPU, got {precision!r}; '
            "infonce.compare and infonce loss --compare have the errors of the others"
        )
    if has_tokens and precision == "bf16x3":
        raise ValueError(
            "precision: expected no bf16x3 with features of three dimensions, got 'bf16x3'"
        )
    return precision


def integers(xp: Any, name: str, value: Any, n: int, columns: str = "") -> Array:
    """[n] integers of any dtype; with `columns`, the name of a number such as "P", also [n, P]."""
    came, value = value, as_array(name, value, "integers")
    if value.dtype.kind not in "iu":
        got = f"dtype {value.dtype}" if value.ndim else what(came)
        raise TypeError(f"{name}: expected integers, got {got}")
    if value.shape[:1] != (n,) or value.ndim > (2 if columns else 1) or 0 in value.shape[1:]:
        expected = f"({n},) or ({n}, {columns})" if columns else f"({n},)"
        raise ValueError(f"{name}: expected shape {expected}, got {value.shape}")
    return xp.asarray(value)


def numbers(xp: Any, name: str, value: Any, *shape: int, counts: Array | None = None) -> Array:
    """Finite numbers of this shape as float64, contiguous. Values on a GPU are not read. On the
    host, those that do not count may be anything, and become 0."""
    expected = "numbers"
    value = as_array(name, value, expected)
    if not is_float(value.dtype) and value.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected {expected}, got dtype {value.dtype}")
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {value.shape}")
    value = xp.ascontiguousarray(xp.asarray(value), dtype=np.float64)
    if isinstance(value, np.ndarray) and counts is not None:
        value = np.where(counts, value, 0.0)
    if isinstance(value, np.ndarray) and not np.isfinite(value).all():
        at = first_position(~np.isfinite(value))
        raise ValueError(f"{name}: expected finite numbers, got {value[at]!s} at position {at}")
    return value


def first_position(mask: Array) -> Any:
    """The index of the first True of a NumPy array: an integer, or a tuple of several."""
    index = tuple(map(int, np.argwhere(mask)[0]))
    return index if len(index) > 1 else index[0]


def grad_out(xp: Any, value: Any, reduction: str, m: int) -> Any:
    """The upstream gradient of the loss: a number, or a float64 array () or [m]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return real("grad_out", value)
    expected = "a number or a float array"
    upstream = as_array("grad_out", value, expected)
    if not is_float(upstream.dtype) and upstream.dtype.kind not in "iu":
        raise TypeError(f"grad_out: expected {expected}, got {what(value)}")
    shapes = [(), (m,)] if reduction == "none" else [()]
    if upstream.shape not in shapes:
        raise ValueError(
            f"grad_out: expected shape {' or '.join(map(str, shapes))} with "
            f'reduction="{reduction}", got {upstream.shape}'
        )
    if isinstance(upstream, np.ndarray) and upstream.ndim == 0:
        return float(upstream)
    return xp.asarray(upstream).astype(np.float64)


def upstream(xp: Any, value: Any, reduction: str, m: int, shares: Any) -> Any:
    """The upstream gradient of each row's loss, dL/dloss_i: `shares` times `value`, a `grad_out`.

    `shares`, the factors of rows' losses in the reduced loss, are a number or [m]. The result is a
    number if both factors are numbers, otherwise [m] float64.
    """
    factor = grad_out(xp, value, reduction, m)
    if isinstance(factor, float):
        return shares if factor == 1 else factor * shares
    return xp.ascontiguousarray(xp.broadcast_to(factor * shares, (m,)))


def grad_dtype(value: Any) -> np.dtype[Any] | None:
    """The dtype of feature gradients; None: that of the features."""
    if value is None:
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except Exception:  # np.dtype raises many types, even SyntaxError
        raise TypeError(f"grad_dtype: expected a dtype, got {what(value)}") from None
    if not is_float(dtype):
        raise TypeError(f"grad_dtype: expected {', '.join(FLOATS)}, got {dtype}")
    return dtype


def native_order(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")
