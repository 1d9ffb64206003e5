"""The losses as differentiable functions of JAX: the callback, its derivative, the vjp."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(
        f"jax {jax.__version__} has no jax.experimental.buffer_callback: pip install 'infonce[jax]'"
    ) from error

from .. import dispatch
from ..kernels.problem import SILENT
from ..spec import VECTORS, WAITING, Loss


@functools.partial(jax.tree_util.register_dataclass, data_fields=["halves"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Wide:
    """Integers of 64 bits as two of 32, for programs whose arrays have no more (without x64)."""

    halves: Any  # int32 [..., 2]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, value: np.ndarray) -> Wide:
        value = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return cls(jnp.asarray(value.view(np.int32).reshape(*value.shape, 2)), value.dtype)

    @property
    def value(self) -> Any:
        """The integers, where `halves` are an array of NumPy's or CuPy's."""
        return self.halves.view(self.dtype)[..., 0]


def _integers(given: Any) -> Any:
    return given.value if isinstance(given, Wide) else given


@dataclass(frozen=True)
class Call:
    """The static part of a call, known when it is traced."""

    kind: Loss
    options: tuple[tuple[str, Any], ...]
    metrics: bool
    wrt: tuple[str, ...] = ()


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """{"loss": ..., "metrics": {...}, and the gradients in `call.wrt` by name}."""
    run = functools.partial(_run, call)
    out: dict[str, Any]
    out = buffer_callback(run, _outputs(call, given), vmap_method="sequential")(given)
    return out


@_evaluate.defjvp
def _not_again(call: Call, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{call.kind.name}_loss: gradients of the losses of infonce cannot be differentiated again"
    )


def _outputs(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """Shapes and dtypes of what `_evaluate` returns."""
    features = given["features"]
    m, n = len(features[0]), len(features[-1])
    double = any(z.dtype == jnp.float64 for z in features)
    rows = (m,) if dict(call.options).get("reduction") == "none" else ()
    wide, whole = (jax.dtypes.canonicalize_dtype(t) for t in (np.float64, np.int64))
    both = call.kind.column_weight != 0
    shapes = {
        "row_loss": ((), wide),
        "column_loss": ((), wide) if both else None,
        "row_rank": ((m,), whole),
        "column_rank": ((n,), whole) if both else None,
        "positive": ((m,), wide),
        "hardest_negative": ((m,), wide),
    }
    arguments = dict(zip(call.kind.arguments, features, strict=True))
    arguments |= {"scale": given["scale"], "bias": given["bias"]}
    of = jax.ShapeDtypeStruct
    later = given["grad_out"] is None  # gradients wait for it

    def gradient(array: Any) -> Any:
        dtype = WAITING.get(array.dtype.name, array.dtype) if later else array.dtype
        return of(array.shape, dtype)

    return {
        "loss": of(rows, jnp.float64 if double else jnp.float32),
        "metrics": {k: v and of(*v) for k, v in shapes.items()} if call.metrics else {},
        **{name: gradient(arguments[name]) for name in call.wrt},
    }


def _run(call: Call, context: Any, out: dict[str, Any], given: dict[str, Any]) -> None:
    """The callback: buffers `given` hold the arguments, results are written to buffers `out`."""
    if given["features"][0].__dlpack_device__()[0] == 1:  # the host, in DLPack's numbers
        _fill(call, jax.tree.map(np.asarray, out), jax.tree.map(np.asarray, given))
        return
    from ..arrays import _cupy

    cupy = _cupy()
    given = jax.tree.map(cupy.from_dlpack, given)
    out = jax.tree.map(cupy.from_dlpack, out)
    stream = cupy.cuda.Stream.from_external(_Stream(context.stream))
    with given["features"][0].device, stream:
        _fill(call, out, given)


class _Stream:
    """A CUDA stream by the protocol `__cuda_stream__`."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _fill(call: Call, out: dict[str, Any], given: dict[str, Any]) -> None:
    """The same dispatch as for arrays; feature gradients are written to `out` directly."""
    options = {**dict(call.options), "scale": given["scale"], "wrt": frozenset(call.wrt)}
    ids = given["ids"]
    given["ids"] = tuple(map(_integers, ids)) if isinstance(ids, tuple) else _integers(ids)
    for name in ("ids", "grad_out", *VECTORS):
        if given[name] is not None:
            options[name] = given[name]
    direct = {name: out[name] for name in call.kind.arguments if name in call.wrt}
    result = dispatch.loss_and_grad(
        call.kind, given["features"], _integers(given["labels"]), given["bias"],
        {**options, "metrics": call.metrics}, direct,
    )  # fmt: skip
    out["loss"][...] = result.loss
    with np.errstate(**SILENT):
        for name in call.wrt:
            if name not in direct:
                out[name][...] = getattr(result.grads, name)
    for name, array in out["metrics"].items():
        if array is not None:
            array[...] = getattr(result.metrics, name)


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_and_metrics(call: Call, given: dict[str, Any]) -> tuple[Any, Any]:
    out = _evaluate(call, given)
    return out["loss"], out["metrics"]


def _forward(call: Call, given: dict[str, Any]) -> Any:
    """Loss, and gradients of what is differentiated (`perturbed`), locked towers excepted."""
    dtypes = {
        name: value.value.dtype
        for name, value in _named(call.kind, given).items()
        if value is not None and value.perturbed and name not in call.kind.locked
    }
    wanted = tuple(dtypes)
    for name in VECTORS:
        if given[name] is not None and given[name].perturbed:
            raise ValueError(
                f"{name}: expected an array that is not differentiated, as it gets no gradient, "
                "got one that is: jax.lax.stop_gradient makes one"
            )
    given = jax.tree.map(lambda leaf: leaf.value, given)
    # Per-row losses have no single upstream gradient: theirs are computed when it is known
    later = dict(call.options).get("reduction") == "none"
    out = _evaluate(Call(call.kind, call.options, call.metrics, () if later else wanted), given)
    grads = {name: out[name] for name in wanted if not later}
    residuals = grads, given if later else None, _Dtypes(tuple(dtypes.items()))
    return (out["loss"], out["metrics"]), residuals


def _backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Any]:
    grads, given, dtypes = residuals
    wanted = dict(dtypes.by_name)
    upstream = cotangents[0]
    if isinstance(upstream, SymbolicZero):
        upstream = jnp.zeros(upstream.shape, upstream.dtype)
    if given is not None:
        again = Call(call.kind, call.options, False, tuple(wanted))
        out = _evaluate(again, {**given, "grad_out": upstream})
        grads = {name: out[name] for name in wanted}
    else:
        grads = {name: (grads[name] * upstream).astype(dtype) for name, dtype in wanted.items()}
    return ({
        "features": tuple(grads.get(name) for name in call.kind.arguments),
        "scale": grads.get("scale"),
        "bias": grads.get("bias"),
        "labels": None,
        "ids": None,
        "grad_out": None,
        **dict.fromkeys(VECTORS),
    },)  # fmt: skip


loss_and_metrics.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    """Dtypes of the arguments that are differentiated, static among the residuals."""

    by_name: tuple[tuple[str, Any], ...]


def _named(kind: Loss, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can be differentiated, by name."""
    features = dict(zip(kind.arguments, given["features"], strict=True))
    return {**features, "scale": given["scale"], "bias": given["bias"]}
