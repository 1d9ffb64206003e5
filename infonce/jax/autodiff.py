"""The losses as differentiable functions of JAX: the callback, its derivative, the vjp."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import dispatch
from ..spec import ARRAYS, NAMES, VECTORS, Loss
from . import axis
from .callback import (
    TEACHER,
    TracedCall,
    add_callback,
    collect_options,
    deliver,
    integers,
    make_teacher,
    outputs,
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate(call: TracedCall, inputs: dict[str, Any]) -> dict[str, Any]:
    """The results of a call, as `callback.outputs` describes them."""
    if call.axis is not None:
        return axis.evaluate(call, inputs)
    fill = functools.partial(_fill, call)
    out: dict[str, Any] = add_callback(fill, outputs(call, inputs), inputs)
    return out


@_evaluate.defjvp
def _refuse_second_derivative(call: TracedCall, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{call.kind.name}_loss: gradients of the losses of infonce cannot be differentiated again"
    )


def _fill(call: TracedCall, out: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Compute the call by `infonce.dispatch`, and write its results to the arrays of `out`.

    Feature gradients are computed in the memory of `out`, without a copy.
    """
    direct = {name: out[name] for name in call.kind.arguments if name in call.wrt}
    result = dispatch.loss_and_grad(
        call.kind, inputs["features"], integers(inputs["labels"]), inputs["bias"],
        collect_options(call, inputs), direct, make_teacher(call, inputs),
    )  # fmt: skip
    deliver(call, result, out, direct)


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_loss(call: TracedCall, inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The loss, the metrics and the sum of weights: functions of `inputs` with a vjp.

    Over an axis, they are this device's summands of the loss and of the sum of weights. The sum of
    weights is None unless the caller divides a mean by it.
    """
    out = _evaluate(call, inputs)
    return out["loss"], out["metrics"], out.get("weight")


def _forward(call: TracedCall, inputs: dict[str, Any]) -> Any:
    """The loss, and the gradients of the arguments that JAX differentiates (`perturbed`).

    Locked towers get no gradient.
    """
    dtypes = {
        name: value.value.dtype
        for name, value in _named(call.kind, inputs).items()
        if value is not None and value.perturbed and name not in call.kind.locked
    }
    wanted = tuple(dtypes)
    for name in (*VECTORS, "guide", *TEACHER):
        if any(leaf.perturbed for leaf in jax.tree.leaves(inputs[name])):
            raise ValueError(
                f"{name}: expected an array that is not differentiated, as it gets no gradient, "
                "got one that is: jax.lax.stop_gradient makes one"
            )
    inputs = jax.tree.map(lambda leaf: leaf.value, inputs)
    # With reduction="none" each row has an upstream gradient: the backward pass computes gradients
    in_backward = call.reduction == "none"
    out = _evaluate(replace(call, wrt=() if in_backward else wanted), inputs)
    grads = {name: out[name] for name in wanted if not in_backward}
    residuals = grads, inputs if in_backward else None, _Dtypes(tuple(dtypes.items()))
    return (out["loss"], out["metrics"], out.get("weight")), residuals


def _backward(call: TracedCall, residuals: Any, cotangents: Any) -> tuple[Any]:
    """The gradients of the inputs: those of `_forward` times the upstream gradient, or new ones."""
    grads, inputs, dtypes = residuals
    wanted = dict(dtypes.by_name)
    upstream = cotangents[0]
    if isinstance(upstream, SymbolicZero):
        upstream = jnp.zeros(upstream.shape, upstream.dtype)
    if inputs is not None:
        gradient_call = replace(call, metrics=False, wrt=tuple(wanted))
        out = _evaluate(gradient_call, {**inputs, "grad_out": upstream})
        grads = {name: out[name] for name in wanted}
    else:
        grads = {name: (grads[name] * upstream).astype(dtype) for name, dtype in wanted.items()}
    return ({
        "features": tuple(grads.get(name) for name in call.kind.arguments),
        "scale": grads.get("scale"),
        "bias": grads.get("bias"),
        "labels": None,
        **dict.fromkeys(("grad_out", "guide", *TEACHER, *NAMES, *ARRAYS)),
    },)  # fmt: skip


differentiable_loss.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    """Dtypes of the arguments that are differentiated: a static part of the residuals."""

    by_name: tuple[tuple[str, Any], ...]


def _named(kind: Loss, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can be differentiated, by name."""
    features = dict(zip(kind.arguments, inputs["features"], strict=True))
    return {**features, "scale": inputs["scale"], "bias": inputs["bias"]}
