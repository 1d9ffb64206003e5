"""infonce for JAX: the losses as differentiable functions, inside and outside of `jit`.

>>> import infonce.jax
>>> def loss(params, batch):
...     image, text = encode(params, batch)
...     return infonce.jax.clip_loss(image, text, scale=jnp.exp(params["log_scale"]))
>>> step = jax.jit(jax.value_and_grad(loss))

Each loss is one call out of the compiled program, on the program's own buffers: on a CPU as NumPy
arrays, on a GPU as CuPy arrays and on the program's stream. Nothing is copied and nothing waits for
the device. Under `grad` that one call computes loss and gradients, for what is differentiated and
nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

from . import checks, dispatch, losses, spec, validation
from ._names import missing
from .kernels.problem import SILENT
from .result import Metrics
from .spec import Loss

__all__ = ["clip_loss", "info_nce_loss", "lit_loss", "nt_xent_loss", "siglip_loss"]
if not TYPE_CHECKING:
    __getattr__ = missing(__name__, __all__)

OPTIONS = ("normalize", "reduction", "method", "precision", "workspace")


@dataclass(frozen=True)
class _Call:
    """What of a call is known when it is traced."""

    kind: Loss
    options: tuple[tuple[str, Any], ...]
    metrics: bool
    wrt: tuple[str, ...] = ()


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate(call: _Call, given: dict[str, Any]) -> dict[str, Any]:
    """{"loss": ..., "metrics": {...}, and the gradients in `call.wrt` by name}."""
    run = functools.partial(_run, call)
    out: dict[str, Any]
    out = buffer_callback(run, _outputs(call, given), vmap_method="sequential")(given)
    return out


@_evaluate.defjvp
def _not_again(call: _Call, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{call.kind.name}_loss: gradients of the losses of infonce cannot be differentiated again"
    )


def _outputs(call: _Call, given: dict[str, Any]) -> dict[str, Any]:
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
    return {
        "loss": of(rows, jnp.float64 if double else jnp.float32),
        "metrics": {k: v and of(*v) for k, v in shapes.items()} if call.metrics else {},
        **{name: of(arguments[name].shape, arguments[name].dtype) for name in call.wrt},
    }


def _run(call: _Call, context: Any, out: dict[str, Any], given: dict[str, Any]) -> None:
    """Called by the program: the buffers `given` hold the arguments, `out` wants the results."""
    if given["features"][0].__dlpack_device__()[0] == 1:  # the host, in DLPack's numbers
        _fill(call, jax.tree.map(np.asarray, out), jax.tree.map(np.asarray, given))
        return
    from .arrays import _cupy

    cupy = _cupy()
    given = jax.tree.map(cupy.from_dlpack, given)
    out = jax.tree.map(cupy.from_dlpack, out)
    stream = cupy.cuda.Stream.from_external(_Stream(context.stream))
    with given["features"][0].device, stream:
        _fill(call, out, given)


class _Stream:
    """A stream as other libraries expect one."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _fill(call: _Call, out: dict[str, Any], given: dict[str, Any]) -> None:
    """The same dispatch as for arrays; feature gradients go straight to where they belong."""
    options = {**dict(call.options), "scale": given["scale"], "wrt": frozenset(call.wrt)}
    for name in ("ids", "grad_out"):
        if given[name] is not None:
            options[name] = given[name]
    direct = {name: out[name] for name in call.kind.arguments if name in call.wrt}
    result = dispatch.loss_and_grad(
        call.kind, given["features"], given["labels"], given["bias"],
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
def _loss(call: _Call, given: dict[str, Any]) -> tuple[Any, Any]:
    out = _evaluate(call, given)
    return out["loss"], out["metrics"]


def _forward(call: _Call, given: dict[str, Any]) -> Any:
    """Loss, and gradients for what is differentiated (`perturbed`); a locked tower never is."""
    wanted = tuple(
        name
        for name, value in _named(call.kind, given).items()
        if value is not None and value.perturbed and name not in call.kind.locked
    )
    given = jax.tree.map(lambda leaf: leaf.value, given)
    # Per-row losses have no single upstream gradient: theirs are computed when it is known
    later = dict(call.options).get("reduction") == "none"
    out = _evaluate(_Call(call.kind, call.options, call.metrics, () if later else wanted), given)
    grads = {name: out[name] for name in wanted if not later}
    return (out["loss"], out["metrics"]), (grads, given if later else None, _Names(wanted))


def _backward(call: _Call, residuals: Any, cotangents: Any) -> tuple[Any]:
    grads, given, wanted = residuals
    upstream = cotangents[0]
    if isinstance(upstream, SymbolicZero):
        upstream = jnp.zeros(upstream.shape, upstream.dtype)
    if given is not None:
        again = _Call(call.kind, call.options, False, wanted.names)
        out = _evaluate(again, {**given, "grad_out": upstream})
        grads = {name: out[name] for name in wanted.names}
    else:
        grads = {name: (g * upstream).astype(g.dtype) for name, g in grads.items()}
    return ({
        "features": tuple(grads.get(name) for name in call.kind.arguments),
        "scale": grads.get("scale"),
        "bias": grads.get("bias"),
        "labels": None,
        "ids": None,
        "grad_out": None,
    },)  # fmt: skip


_loss.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Names:
    """Names among the residuals."""

    names: tuple[str, ...]


def _named(kind: Loss, given: dict[str, Any]) -> dict[str, Any]:
    """What can be differentiated, by name."""
    features = dict(zip(kind.arguments, given["features"], strict=True))
    return {**features, "scale": given["scale"], "bias": given["bias"]}


# --- the functions --------------------------------------------------------------------------------


def _apply(
    kind: Loss,
    features: Sequence[Any],
    labels: Any = None,
    bias: Any = None,
    *,
    scale: Any = None,
    temperature: Any = None,
    ids: Any = None,
    metrics: bool = False,
    **options: Any,
) -> Any:
    for name, z in zip(kind.arguments, features, strict=True):
        if not isinstance(z, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: expected a JAX array, got {validation.what(z)}")
    for name in options:
        if name in spec.DEFAULTS and name not in OPTIONS:
            raise TypeError(
                f"infonce.jax.{kind.name}_loss(): unexpected keyword argument {name!r}; beside "
                f"scale, temperature, ids and metrics there are {', '.join(OPTIONS)}"
            )
    numbers = {"scale": scale, "temperature": temperature, "ids": ids, "metrics": metrics}
    _check(kind, features, labels, bias, {**options, **numbers})
    if temperature is not None:
        scale = 1.0 / temperature
    scale = kind.scale if scale is None else scale
    bias = kind.bias if bias is None else bias
    features = tuple(jnp.asarray(z) for z in features)
    dtype = jnp.float64 if any(z.dtype == jnp.float64 for z in features) else jnp.float32
    given = {
        "features": features,
        "scale": _floating(scale, dtype),
        "bias": None if bias is None else _floating(bias, dtype),
        "labels": None if labels is None else jnp.asarray(labels),
        "ids": _each(jnp.asarray, ids),
        "grad_out": None,
    }
    call = _Call(kind, tuple(sorted(options.items())), metrics)
    loss, found = _loss(call, given)
    return (loss, Metrics(**found)) if metrics else loss


def _check(
    kind: Loss, features: Sequence[Any], labels: Any, bias: Any, options: dict[str, Any]
) -> None:
    """All that can be told before the call is part of a program: shapes, dtypes, options, and the
    values that are known already."""
    options = {
        **options,
        "wrt": (),
        "ids": _each(_known, options["ids"]),
        **{name: _known(options[name], 1) for name in ("scale", "temperature")},
    }
    if jax.default_backend() != "cpu" and options.get("precision") in spec.CHOICES["precision"]:
        del options["precision"]  # those of a GPU are not those of a CPU
    stand_ins = [np.broadcast_to(np.zeros((), z.dtype), z.shape) for z in features]
    checks.check(kind, stand_ins, _known(labels), _known(bias), options, True)


def _known(value: Any, otherwise: int = 0) -> Any:
    """An array on the host if its values can be looked at without waiting for a device; else one of
    its shape and dtype, in no memory. What is no array of JAX's, as it came."""
    if not isinstance(value, jax.Array):
        return value
    traced = isinstance(value, jax.core.Tracer)
    if traced or {device.platform for device in value.devices()} != {"cpu"}:
        return np.broadcast_to(np.full((), otherwise, value.dtype), value.shape)
    return np.asarray(value)


def _each(function: Any, ids: Any) -> Any:
    """`function` of ids, which may be one array, a pair of them, or None."""
    if isinstance(ids, (tuple, list)):
        return tuple(map(function, ids))
    return None if ids is None else function(ids)


def _floating(value: Any, dtype: Any) -> Any:
    floating = isinstance(value, (jax.Array, np.ndarray)) and jnp.issubdtype(
        value.dtype, jnp.floating
    )
    return jnp.asarray(value) if floating else jnp.asarray(value, dtype)


DOC = """
    Parameters
    ----------
    {arguments} : arrays [rows, features]
        float64, float32, float16 or bfloat16; the loss is float32 (float64 for float64). Of
        gradients, that of a locked tower is zero.
    scale, temperature : float or 0-d array
        One of them: logits are ``scale * <q, k>``, and scale = 1 / temperature.
    metrics : bool, default False
        Return ``(loss, infonce.Metrics)``. (In `jit` count ``(metrics.row_rank == 0).mean()``.)
    labels, bias, normalize, reduction, method, precision, workspace, ids
        As in `infonce.{loss}`, as far as it has them.

    Returns
    -------
    0-d array, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        While tracing, naming the argument, what came and what was expected. TypeError also for
        forward mode (`jax.jvp`, `jax.jacfwd`) and for a derivative of the gradient: there is none.
    jax.errors.JaxRuntimeError
        For what only the running program knows: values of labels, scale and bias that `jit` has as
        arguments (on a CPU), and whether the workspace suffices. The message is at its end.
"""


@losses.adapted(losses.clip_loss, DOC)
def clip_loss(image: Any, text: Any, **options: Any) -> Any:
    return _apply(spec.CLIP, (image, text), **options)


@losses.adapted(losses.info_nce_loss, DOC)
def info_nce_loss(query: Any, key: Any, labels: Any = None, **options: Any) -> Any:
    return _apply(spec.INFO_NCE, (query, key), labels, **options)


@losses.adapted(losses.nt_xent_loss, DOC)
def nt_xent_loss(features: Any, **options: Any) -> Any:
    return _apply(spec.NT_XENT, (features,), **options)


@losses.adapted(losses.lit_loss, DOC)
def lit_loss(text: Any, image: Any, **options: Any) -> Any:
    return _apply(spec.LIT, (text, image), **options)


@losses.adapted(losses.siglip_loss, DOC)
def siglip_loss(image: Any, text: Any, bias: Any = None, **options: Any) -> Any:
    return _apply(spec.SIGLIP, (image, text), None, bias, **options)
