"""The parts of a call in a compiled program, for one device and for an axis of devices.

`TracedCall` is known while JAX traces the program. The arrays (`inputs`) are known when the program
runs, and a callback (`add_callback`) computes results from the arrays. autodiff.py and rounds.py
make the callbacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(
        f"jax {jax.__version__} has no jax.experimental.buffer_callback: "
        "pip install 'infonce-kernels[jax]'"
    ) from error

from ..checks.teacher import Teacher
from ..kernels.problem import SILENT
from ..result import LossAndGrad
from ..spec import ARRAY_OPTIONS, DTYPES_UNTIL_UPSTREAM, INTEGER_OPTIONS, Loss

# Names of the teacher's arrays in `inputs`, which are None if the loss has no teacher
TEACHER_INPUTS = ("teacher_query", "teacher_key", "teacher_scale")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["halves"], meta_fields=["dtype"])
@dataclass(frozen=True)
class SplitIntegers:
    """64-bit integers as pairs of 32-bit integers, for programs without `jax_enable_x64`: these
    programs have no 64-bit arrays."""

    halves: Any  # int32 [..., 2]
    dtype: np.dtype[Any]  # of the 64-bit integers

    @classmethod
    def split(cls, value: np.ndarray) -> SplitIntegers:
        """Split an array of 64-bit integers."""
        value = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return cls(jnp.asarray(value.view(np.int32).reshape(*value.shape, 2)), value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.halves.shape[:-1])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def value(self) -> Any:
        """The 64-bit integers. Only a callback reads them: there `halves` is of NumPy or CuPy."""
        return self.halves.view(self.dtype)[..., 0]


def join_integers(value: Any) -> Any:
    """The 64-bit integers of a `SplitIntegers`; other values as they are."""
    return value.value if isinstance(value, SplitIntegers) else value


def stand_in(value: Any, number: int = 0) -> np.ndarray:
    """An array of the shape and dtype of `value`, all of whose elements are `number`.

    The checks of a call read the stand-in for a traced array, because traced arrays have no values.
    The stand-in for [M, P] integers has 0 in the first column and -1 in the others: sets of one
    key, which pass the check of sets.
    """
    shape, dtype = value.shape, value.dtype
    if len(shape) == 2 and jnp.issubdtype(dtype, jnp.integer):
        return np.broadcast_to(-(np.arange(shape[1]) > 0).astype(np.int64), shape)
    return np.broadcast_to(np.full((), number, dtype), shape)


@dataclass(frozen=True)
class Axis:
    """The devices over which the rows of a batch are spread: one axis of a mesh, or several."""

    names: tuple[Any, ...]  # names of axes of `jax.shard_map` or `jax.pmap`
    size: int  # number of devices over all these axes
    on_cpu: bool  # whether JAX's default backend is the CPU


@dataclass(frozen=True)
class TracedCall:
    """The part of a call that is known when JAX traces it."""

    kind: Loss
    options: tuple[tuple[str, Any], ...]  # (name, value), sorted; JAX needs a hashable value
    metrics: bool
    wrt: tuple[str, ...] = ()  # names of the arguments whose gradients are computed
    axis: Axis | None = None  # None: one device has all rows

    @property
    def reduction(self) -> str:
        return str(dict(self.options).get("reduction", "mean"))


def collect_options(call: TracedCall, inputs: dict[str, Any]) -> dict[str, Any]:
    """The options for `checks.call.check`: the options of the call, and the arrays in `inputs`."""
    options = {**dict(call.options), "scale": inputs["scale"], "wrt": frozenset(call.wrt)}
    arrays = {name: join_integers(inputs[name]) for name in ("grad_out", *ARRAY_OPTIONS)}
    for name in INTEGER_OPTIONS:
        value = inputs[name]
        is_pair = isinstance(value, tuple)
        arrays[name] = tuple(map(join_integers, value)) if is_pair else join_integers(value)
    arrays["guide"] = inputs["guide"]
    options |= {name: array for name, array in arrays.items() if array is not None}
    return {**options, "metrics": call.metrics}


def make_teacher(call: TracedCall, inputs: dict[str, Any]) -> Teacher | None:
    """The teacher, from the arrays in `inputs`; None if the loss has no teacher."""
    query, key, scale = (inputs[name] for name in TEACHER_INPUTS)
    return Teacher(query, key, scale=scale) if call.kind.taught else None


def output_shapes(call: TracedCall, inputs: dict[str, Any]) -> dict[str, Any]:
    """The shapes and dtypes of the results of a call: {"loss": ..., "metrics": {...}, **gradients}.

    `gradients` are the gradients of the arguments in `call.wrt`, by name.
    """
    features = inputs["features"]
    m, n = len(features[0]), len(features[call.kind.key_argument])
    double = any(z.dtype == jnp.float64 for z in features)
    rows = (m,) if call.reduction == "none" else ()
    # float32 and int32 in programs without `jax_enable_x64`
    real, integer = (jax.dtypes.canonicalize_dtype(t) for t in (np.float64, np.int64))
    both_directions = call.kind.column_direction_weight != 0
    shapes = {
        "row_loss": ((), real),
        "column_loss": ((), real) if both_directions else None,
        "row_rank": ((m,), integer),
        "column_rank": ((n,), integer) if both_directions else None,
        "positive": ((m,), real),
        "hardest_negative": ((m,), real),
    }
    arguments = dict(zip(call.kind.arguments, features, strict=True))
    arguments |= {"scale": inputs["scale"], "bias": inputs["bias"]}
    struct = jax.ShapeDtypeStruct
    # Without `grad_out`, gradients are multiplied by the upstream gradient after the call. Until
    # then gradients of float16 features are float32.
    await_upstream = inputs["grad_out"] is None

    def gradient(array: Any) -> Any:
        dtype = array.dtype
        if await_upstream:
            dtype = DTYPES_UNTIL_UPSTREAM.get(dtype.name, dtype)
        return struct(array.shape, dtype)

    return {
        "loss": struct(rows, jnp.float64 if double else jnp.float32),
        "metrics": {k: v and struct(*v) for k, v in shapes.items()} if call.metrics else {},
        **{name: gradient(arguments[name]) for name in call.wrt},
    }


def write_out(
    call: TracedCall, result: LossAndGrad, out: dict[str, Any], written: Collection[str]
) -> None:
    """Write a result to the buffers `out`. Gradients named in `written` are in `out` already."""
    out["loss"][...] = result.loss
    with np.errstate(**SILENT):
        for name in call.wrt:
            if name not in written:
                out[name][...] = getattr(result.grads, name)
    for name, array in out["metrics"].items():
        if array is not None:
            array[...] = getattr(result.metrics, name)


def add_callback(fill: Callable[[Any, Any], None], shapes: Any, inputs: Any) -> Any:
    """Add a callback to the traced program: when the program runs, it calls `fill(out, inputs)`.

    `fill` writes the arrays `out`, whose shapes and dtypes are `shapes`. `out` and `inputs` are in
    the program's memory, as arrays of NumPy on the host and of CuPy on a GPU. Under `vmap`, `fill`
    runs once for each element, one after another. Returns the traced arrays of `out`.
    """
    fill_buffers = functools.partial(_fill_buffers, fill)
    out = buffer_callback(fill_buffers, shapes, vmap_method="sequential")(inputs)
    # Without a declaration, JAX would assume that the results are equal on all devices
    return _vary(out, _all_varying_axes(inputs))


def vary_equally(inputs: Any) -> Any:
    """The arrays of a tree, all declared to vary over the union of their axes.

    Otherwise JAX refuses to combine arrays that vary over different axes. The gradient of an array
    that did not vary over an axis becomes the sum over the axis.
    """
    return _vary(inputs, _all_varying_axes(inputs))


def reshard(x: Any, sharding: Any) -> Any:
    """The array x with another sharding over a mesh whose axes are `Explicit`."""
    return (jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard)(x, sharding)


def varying_axes(x: Any) -> frozenset[Any]:
    """The axes over which x varies; an empty set if JAX does not check over which axes x varies."""
    array_type = jax.typeof(x)
    if hasattr(array_type, "mat"):  # in newer versions of JAX; before, `vma`
        return frozenset(array_type.mat.varying)
    return frozenset(getattr(array_type, "vma", frozenset()))


def _all_varying_axes(tree: Any) -> frozenset[Any]:
    return frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(tree)))


def _vary(tree: Any, names: frozenset[Any]) -> Any:
    """The arrays of a tree, declared to vary over the axes `names`. Their values stay the same."""

    def vary_array(x: Any) -> Any:
        missing = tuple(sorted(names - varying_axes(x), key=str))
        if missing and hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing) if missing else x

    return jax.tree.map(vary_array, tree)


def _fill_buffers(fill: Callable[[Any, Any], None], context: Any, out: Any, inputs: Any) -> None:
    """Call `fill` with the buffers that JAX passes, as arrays of NumPy or CuPy.

    `context.stream` is the program's CUDA stream. It is CuPy's current stream while `fill` runs.
    """
    if jax.tree.leaves(inputs)[0].__dlpack_device__()[0] == 1:  # DLPack's number for the host
        fill(jax.tree.map(np.asarray, out), jax.tree.map(np.asarray, inputs))
        return
    from ..arrays import _cupy

    cupy = _cupy()
    inputs = jax.tree.map(cupy.from_dlpack, inputs)
    out = jax.tree.map(cupy.from_dlpack, out)
    stream = cupy.cuda.Stream.from_external(_Stream(context.stream))
    with jax.tree.leaves(inputs)[0].device, stream:
        fill(out, inputs)


class _Stream:
    """A CUDA stream with the protocol `__cuda_stream__`, which CuPy reads."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer
