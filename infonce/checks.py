"""Every validation, once, before any work: the caller's arguments become a `Problem`.

Messages name the argument, what was expected and what came.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import gpu_missing, namespace, native, on_gpu
from .kernels.blocks import Array, Gradients, Problem

if TYPE_CHECKING:
    from .losses import Loss

DEFAULTS: dict[str, Any] = {
    "temperature": None,
    "scale": None,
    "ids": None,
    "normalize": False,
    "reduction": "mean",
    "method": "auto",
    "precision": "auto",
    "workspace": 256 * 2**20,
    "offload": False,
    "check_finite": False,
    "progress": None,
    "wrt": None,
    "grad_dtype": None,
    "grad_out": 1.0,
    "out": None,
    "metrics": False,
    "return_logits": False,
}
GRAD_ONLY = {"wrt", "grad_dtype", "grad_out", "out", "metrics", "return_logits"}
ALLOWED = {True: frozenset(DEFAULTS), False: frozenset(DEFAULTS) - GRAD_ONLY}  # with gradients
FLOATS = ("float64", "float32", "float16", "bfloat16")
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
CHOICES = {
    "reduction": ("mean", "sum", "none"),
    "method": ("auto", "naive", "fused", "tiled"),
    "precision": ("auto", "fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16"),
}


@dataclass(frozen=True)
class Shard:
    """The arrays of a call are some rows, or none, of a batch that is spread over ranks."""

    rows: int  # queries of the whole batch
    columns: int  # keys


@dataclass(eq=False)
class Request:
    """A checked call: the problem, and what to hand back."""

    problem: Problem
    gradients: Gradients | None
    feature_grads: dict[str, Array]  # by argument name; those that were asked for
    given_out: dict[str, Array]  # the caller's own arrays among them, as they came
    without_positive: Array | None  # [M] rows whose label is out of range (known on a GPU alone)
    wrt: frozenset[str]
    reduction: str
    dtype: np.dtype[Any]  # of the loss
    metrics: bool
    return_logits: bool
    offload: bool  # host arrays, computed on a GPU


@dataclass(eq=False)
class _Settled:
    """What follows from the kinds of the arrays and from options that are no arrays.

    A training loop makes the same call again and again: what was found right once is right.
    """

    xp: Any  # numpy or cupy
    whole: Shard  # the batch
    scale: float | None  # None where it comes as an array, with every call
    bias: float | None  # the same
    normalize: bool
    method: str
    compute: str
    workspace: int
    check_finite: bool
    wrt: frozenset[str]
    new: dict[str, tuple[Any, Any]]  # shapes and dtypes of feature gradients, where none are given
    grad_dtype: np.dtype[Any] | None
    want_query: bool
    want_key: bool
    reduction: str
    share: float  # of a row in the result
    dtype: np.dtype[Any]  # of the loss
    metrics: bool
    return_logits: bool
    offload: bool


# options of such classes settle a call; of others, that may be arrays or hold some,
PLAIN = frozenset({bool, int, float, str, frozenset, type(None)})
PER_CALL = frozenset({"out", "grad_out", "ids", "progress"})  # these are looked at in every call,
NUMBERS = frozenset({"scale", "temperature"})  # and these, where they are arrays
_settled: dict[tuple[Any, ...], _Settled] = {}


def check(
    loss: Loss,
    arrays: Sequence[Array],
    labels: Array | None,
    bias: Any,
    options: Mapping[str, Any],
    with_grad: bool,
    shard: Shard | None = None,
    made: dict[str, Any] | None = None,
) -> Request:
    """Validate one call of a loss on NumPy or on CuPy arrays. `made` is memory for the gradients
    that an adapter has made, as it has to be: there is nothing to check."""
    labelled = labels is not None
    kind = _kind(loss, arrays, labelled, bias, options, with_grad, shard)
    settled = None if kind is None else _settled.get(kind)
    if settled is None:
        settled = _settle(loss, arrays, labelled, bias, options, with_grad, shard)
        if kind is not None:
            if len(_settled) >= 256:
                _settled.clear()
            _settled[kind] = settled

    get = options.get
    ids, grad_out, out, progress = get("ids"), get("grad_out", 1.0), get("out"), get("progress")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a callable, got {_what(progress)}")
    scale = settled.scale
    if scale is None:  # an array: its value may be another each time
        scale = _scale(loss, get("temperature"), get("scale"))
    an_array = loss.sigmoid and settled.bias is None
    bias = _number("bias", bias) if an_array else settled.bias
    query, key = arrays[0], arrays[-1]
    xp, wrt, reduction = settled.xp, settled.wrt, settled.reduction
    if settled.check_finite:
        for name, z in zip(loss.arguments, arrays, strict=True):
            _finite(xp, name, z)
    row_ids = column_ids = positives = without_positive = None
    if ids is not None:
        row_ids, column_ids = _ids(xp, loss, ids, len(query), len(key))
    if labelled:
        positives, without_positive = _positives(xp, labels, len(query), settled.whole.columns)
    upstream = _upstream(xp, grad_out, reduction, len(query), settled.share)
    # None where some rows' losses are replaced before they are reduced, or where none are
    reduced = reduction != "none" and without_positive is None
    # by position, as small batches notice the time that names take
    problem = Problem(
        query, key, scale, upstream, positives, settled.share if reduced else None,
        loss.row_weight, loss.column_weight, bias, loss.symmetric, False, False,
        row_ids, column_ids, settled.normalize, settled.compute, settled.method,
        settled.workspace, settled.metrics, progress,
    )  # fmt: skip
    outs: dict[str, Array] = {}
    given_out: dict[str, Array] = {}
    if made is not None:
        outs, given_out = {name: native(array) for name, array in made.items()}, made
    elif with_grad:
        outs, given_out = _out(xp, loss, arrays, out, settled)
    gradients = None
    if wrt:
        of_query, of_key = outs.get(loss.arguments[0]), outs.get(loss.arguments[-1])
        want_query, want_key = settled.want_query, settled.want_key
        gradients = Gradients(of_query, of_key if want_key else None, None, want_query, want_key)
    return Request(
        problem, gradients, outs, given_out, without_positive, wrt, reduction,
        settled.dtype, settled.metrics, settled.return_logits, settled.offload,
    )  # fmt: skip


def _kind(
    loss: Loss,
    arrays: Sequence[Array],
    labelled: bool,
    bias: Any,
    options: Mapping[str, Any],
    with_grad: bool,
    shard: Shard | None,
) -> tuple[Any, ...] | None:
    """The key under which a call is settled; None for one with options that may be arrays."""
    plain = options
    classes = tuple(map(type, options.values()))  # True is no 1
    if not PLAIN.issuperset(classes):
        plain = {
            name: value
            for name, value in options.items()
            if name not in PER_CALL and not (name in NUMBERS and type(value) not in PLAIN)
        }
        wrt = plain.get("wrt")
        if isinstance(wrt, (tuple, list)) and all([type(name) is str for name in wrt]):
            plain["wrt"] = frozenset(wrt)
        if not PLAIN.issuperset(map(type, plain.values())):
            return None
    if type(bias) not in PLAIN:
        bias = "array"
    kinds = []
    for z in arrays:
        if isinstance(z, np.ndarray):
            kinds.append((z.shape, z.dtype, None))
        elif on_gpu(z):
            kinds.append((z.shape, z.dtype, z.device.id))
        else:
            return None
    return loss, with_grad, labelled, shard, bias, (*options,), classes, *kinds, *plain.items()


def _settle(
    loss: Loss,
    arrays: Sequence[Array],
    labelled: bool,
    bias: Any,
    options: Mapping[str, Any],
    with_grad: bool,
    shard: Shard | None,
) -> _Settled:
    """All checks that look at no element of an array."""
    o = _options(loss, options, with_grad)
    for name, z in zip(loss.arguments, arrays, strict=True):
        _features(name, z, 1 if shard is None else 0)
    query, key = arrays[0], arrays[-1]
    on_host = isinstance(query, np.ndarray)
    _same_device(loss, query, key)
    whole = shard or Shard(len(query), len(key))
    _shapes(loss, query, key, labelled, whole)
    scale = _scale(loss, o["temperature"], o["scale"])
    if loss.sigmoid:
        plain_bias = bias.__class__ in PLAIN
        bias = _number("bias", loss.bias if bias is None else bias)
    dtypes = {z.dtype.name for z in arrays}
    if o["offload"]:
        _offload(loss, o, query)
    compute = _precision(o["precision"], dtypes, on_host and not o["offload"])
    workspace = o["workspace"]
    if isinstance(workspace, bool) or not isinstance(workspace, (int, np.integer)):
        raise TypeError(f"workspace: expected an integer number of bytes, got {_what(workspace)}")
    if workspace <= 0:
        raise ValueError(f"workspace: expected a positive number of bytes, got {workspace}")
    if o["return_logits"] and o["method"] != "naive":
        raise ValueError(
            f'return_logits: expected method="naive", the one that keeps them, got '
            f'method="{o["method"]}"'
        )
    if loss.sigmoid and o["metrics"]:
        raise ValueError("metrics: expected False for siglip, which ranks nothing, got True")
    wrt = _wrt(loss, o["wrt"]) if with_grad else frozenset()
    want_key = not loss.symmetric and loss.arguments[-1] in wrt
    grad_dtype = _grad_dtype(o["grad_dtype"])
    return _Settled(
        xp=namespace(query),
        whole=whole,
        scale=scale if all(o[name].__class__ in PLAIN for name in NUMBERS) else None,
        bias=bias if loss.sigmoid and plain_bias else None,
        normalize=bool(o["normalize"]),
        method=o["method"],
        compute=compute,
        workspace=int(workspace),
        check_finite=bool(o["check_finite"]),
        wrt=wrt,
        new={
            name: (z.shape, grad_dtype or _native_order(z.dtype))
            for name, z in zip(loss.arguments, arrays, strict=True)
            if name in wrt
        },
        grad_dtype=grad_dtype,
        # scale and bias come with the rows' gradient; a key gradient alone brings them too
        want_query=loss.arguments[0] in wrt or not want_key,
        want_key=want_key,
        reduction=o["reduction"],
        share=1.0 / whole.rows if o["reduction"] == "mean" else 1.0,
        dtype=DOUBLE if "float64" in dtypes else SINGLE,
        metrics=bool(o["metrics"]),
        return_logits=bool(o["return_logits"]),
        offload=bool(o["offload"]),
    )


def _offload(loss: Loss, o: Mapping[str, Any], query: Array) -> None:
    """Host arrays, a method that keeps no logits, and a GPU."""
    if not isinstance(query, np.ndarray):
        raise ValueError(
            f"offload: expected features in host memory, got {loss.arguments[0]} on GPU "
            f"{query.device.id}"
        )
    if o["method"] not in ("auto", "tiled"):
        raise ValueError(
            f'method: expected "auto" or "tiled" with offload, got {o["method"]!r}: the logits are '
            "kept nowhere"
        )
    if missing := gpu_missing():
        raise ValueError(f"offload: expected a GPU to compute on, found none: {missing}")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or on_gpu(value)


def _same_device(loss: Loss, query: Array, key: Array) -> None:
    """Both on the host, or both on one GPU."""
    names = ["the host" if isinstance(z, np.ndarray) else f"GPU {z.device.id}"
             for z in (query, key)]  # fmt: skip
    if names[0] != names[1]:
        raise ValueError(
            f"{loss.arguments[-1]}: expected an array on {names[0]} like {loss.arguments[0]}, "
            f"got one on {names[1]}"
        )


def _what(value: Any) -> str:
    """A value as an error message names it."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r}"[:120]


def _options(loss: Loss, options: Mapping[str, Any], with_grad: bool) -> dict[str, Any]:
    allowed = ALLOWED[with_grad]
    for name in options:
        if name not in allowed:
            function = f"{loss.name}_loss{'_and_grad' * with_grad}()"
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            if name in GRAD_ONLY:
                hint = f" (it is one of {loss.name}_loss_and_grad())"
            raise TypeError(f"{function}: unexpected keyword argument {name!r}{hint}")
    o = {**DEFAULTS, **options}
    for name, choices in CHOICES.items():
        if o[name] not in choices:
            expected = ", ".join(f'"{c}"' for c in choices)
            raise ValueError(f"{name}: expected one of {expected}, got {o[name]!r}")
    return o


def _features(name: str, z: Array, least: int) -> None:
    if not _is_array(z):
        raise TypeError(f"{name}: expected an array, got {_what(z)}")
    if z.dtype.name not in FLOATS:
        raise TypeError(f"{name}: expected dtype {', '.join(FLOATS)}, got {z.dtype}")
    if z.ndim != 2:
        raise ValueError(f"{name}: expected 2 dimensions [rows, features], got shape {z.shape}")
    if len(z) < least or z.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one row and one feature, got shape {z.shape}")


def _shapes(loss: Loss, query: Array, key: Array, labelled: bool, whole: Shard) -> None:
    first, last = loss.arguments[0], loss.arguments[-1]
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{last}: expected width {query.shape[1]} like {first}, got shape {key.shape}"
        )
    if loss.square and len(query) != len(key):
        raise ValueError(f"{last}: expected {len(query)} rows like {first}, got shape {key.shape}")
    if loss.symmetric and not labelled and len(query) % 2:
        raise ValueError(
            f"{first}: expected an even number of rows, two views of each sample, "
            f"got shape {query.shape}"
        )
    if not (loss.square or loss.symmetric or labelled) and whole.columns < whole.rows:
        came = f"shape {key.shape}" if len(key) == whole.columns else f"{whole.columns} in all"
        raise ValueError(
            f"{last}: expected at least {whole.rows} rows, the positive of query i being key i "
            f"without labels, got {came}"
        )


def _finite(xp: Any, name: str, z: Array) -> None:
    for start in range(0, len(z), 4096):
        bad = ~xp.isfinite(z[start : start + 4096].astype(np.float64)).all(axis=1)
        if bad.any():
            row = start + int(bad.argmax())
            raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")


def _number(name: str, value: Any) -> Any:
    """A float; or a 0-d array on a GPU, which is not looked at: that would wait for the device."""
    value = native(value)
    if on_gpu(value) and value.ndim == 0:
        if value.dtype.name not in FLOATS:
            raise TypeError(f"{name}: expected dtype {', '.join(FLOATS)}, got {value.dtype}")
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number or 0-d array, got {_what(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _scale(loss: Loss, temperature: Any, scale: Any) -> Any:
    if temperature is not None and scale is not None:
        raise ValueError("temperature, scale: expected one of them, got both")
    if temperature is None and scale is None:
        if loss.scale is None:
            raise ValueError("temperature, scale: expected one of them, got neither")
        return loss.scale
    name, given = ("scale", scale) if temperature is None else ("temperature", temperature)
    value = _number(name, given)
    if not isinstance(value, float):
        return value if temperature is None else 1.0 / value.astype(np.float64)
    if value <= 0:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    value = value if temperature is None else 1.0 / value
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a number with a finite reciprocal, got {given!r}")
    return value


def _precision(precision: str, dtypes: set[str], on_host: bool) -> str:
    if precision == "auto":
        if "float64" in dtypes:
            return "fp64"
        exact = {"bfloat16": "bf16", "float16": "fp16"}  # products of these are exact in float32
        return "fp32" if on_host or len(dtypes) > 1 else exact.get(min(dtypes), "fp32")
    if on_host and precision not in ("fp64", "fp32"):
        raise ValueError(
            f'precision: expected "auto", "fp64" or "fp32" on the CPU, got {precision!r}'
        )
    return precision


def _integers(xp: Any, name: str, value: Any, n: int) -> Array:
    value = native(value)
    value = value if _is_array(value) else np.asarray(value)
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {value.dtype}")
    if value.shape != (n,):
        raise ValueError(f"{name}: expected shape ({n},), got {value.shape}")
    return xp.ascontiguousarray(xp.asarray(value), dtype=np.int64)


def _positives(xp: Any, labels: Array | None, m: int, n: int) -> tuple[Array, Array | None]:
    """[M] the positive key of each row; on a GPU also which labels are out of range."""
    if labels is None:
        return None, None
    labels = _integers(xp, "labels", labels, m)
    outside = (labels < 0) | (labels >= n)
    if xp is not np:  # to look would be to wait for the device: such rows get a NaN loss instead
        return xp.where(outside, 0, labels), outside
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(f"labels: expected values in [0, {n}), got {labels[i]} at position {i}")
    return labels, None


def _ids(xp: Any, loss: Loss, ids: Any, m: int, n: int) -> tuple[Array, Array]:
    if ids is None:
        return None, None
    if isinstance(ids, (tuple, list)) and len(ids) == 2 and all(np.ndim(i) == 1 for i in ids):
        if loss.symmetric:
            raise ValueError(f"ids: expected one array for {loss.name}, got a pair")
        return _integers(xp, "ids[0]", ids[0], m), _integers(xp, "ids[1]", ids[1], n)
    if m != n:
        raise ValueError(
            f"ids: expected a pair (ids of {m} queries, ids of {n} keys), got {_what(ids)}"
        )
    shared = _integers(xp, "ids", ids, m)
    return shared, shared


def _wrt(loss: Loss, wrt: Any) -> frozenset[str]:
    possible = [name for name in loss.arguments if name not in loss.locked] + ["scale"]
    if loss.sigmoid:
        possible.append("bias")
    if wrt is None:
        return frozenset(possible)
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    for name in names:
        if name not in possible:
            raise ValueError(f"wrt: expected names among {', '.join(possible)}, got {name!r}")
    return frozenset(names)


def _upstream(xp: Any, grad_out: Any, reduction: str, m: int, share: float) -> Any:
    """d result / d loss_i: a number for all rows, or [M]; `share` of `grad_out`."""
    if isinstance(grad_out, (int, float)) and not isinstance(grad_out, bool):
        return grad_out * share
    value = native(grad_out)
    value = value if _is_array(value) else np.asarray(value)
    if value.dtype.name not in FLOATS and value.dtype.kind not in "iu":
        raise TypeError(f"grad_out: expected a number or a float array, got {_what(grad_out)}")
    expected = [(), (m,)] if reduction == "none" else [()]
    if value.shape not in expected:
        raise ValueError(
            f"grad_out: expected shape {' or '.join(map(str, expected))} with "
            f'reduction="{reduction}", got {value.shape}'
        )
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return float(value) * share
    value = xp.asarray(value).astype(np.float64) * share
    return xp.ascontiguousarray(xp.broadcast_to(value, (m,)))


def _out(
    xp: Any, loss: Loss, arrays: Sequence[Array], out: Any, settled: _Settled
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Where the feature gradients go: the caller's arrays, or new ones; and the caller's alone."""
    new = settled.new
    if out is None:
        return {name: xp.ndarray(*like) for name, like in new.items()}, {}
    given: dict[str, Any]
    if isinstance(out, Mapping):
        given = dict(out)
    elif isinstance(out, (tuple, list)):
        names = [name for name in loss.arguments if name not in loss.locked]
        if len(out) != len(names):
            raise ValueError(f"out: expected {len(names)} arrays ({', '.join(names)}), "
                             f"got {len(out)}")  # fmt: skip
        given = dict(zip(names, out, strict=True))
    else:
        raise TypeError(f"out: expected a mapping or a sequence of arrays, got {_what(out)}")
    given = {name: array for name, array in given.items() if array is not None}
    features = dict(zip(loss.arguments, arrays, strict=True))
    buffers = {}
    for name, array in given.items():
        if name not in new:
            raise ValueError(f"out: expected names among {', '.join(new)}, got {name!r}")
        buffers[name] = native(array)
        _output(f"out[{name!r}]", buffers[name], features[name], settled.grad_dtype)
    made = {
        name: buffers[name] if name in buffers else xp.ndarray(*like) for name, like in new.items()
    }
    apart = list(arrays)
    for array in buffers.values():
        if any(xp.may_share_memory(array, other) for other in apart):
            raise ValueError("out: expected arrays apart from the features and from each other")
        apart.append(array)
    return made, given


def _native_order(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _grad_dtype(given: Any) -> np.dtype[Any] | None:
    if given is None:
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError:
        raise TypeError(f"grad_dtype: expected a dtype, got {_what(given)}") from None
    if dtype.name not in FLOATS:
        raise TypeError(f"grad_dtype: expected {', '.join(FLOATS)}, got {dtype}")
    return dtype


def _output(name: str, array: Any, features: Array, grad_dtype: Any) -> None:
    shape, on_host = features.shape, isinstance(features, np.ndarray)
    if not _is_array(array) or isinstance(array, np.ndarray) != on_host:
        raise TypeError(
            f"{name}: expected an array{'' if on_host else ' on the GPU'}, got {_what(array)}"
        )
    if array.dtype.name not in FLOATS or (grad_dtype is not None and array.dtype != grad_dtype):
        raise TypeError(f"{name}: expected dtype {grad_dtype or ', '.join(FLOATS)}, "
                        f"got {array.dtype}")  # fmt: skip
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: expected a writeable array, got a read-only one")
