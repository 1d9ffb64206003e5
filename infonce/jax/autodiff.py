"""The losses as differentiable functions of JAX: `functions._apply` calls `differentiable_loss`.

The forward pass of that function computes loss and gradients, in one callback, or in several
callbacks over an axis of devices (axis.py). The backward pass multiplies the gradients by the
upstream gradient. With reduction="none", the backward pass computes the gradients, in callbacks of
its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import dispatch
from ..spec import ARRAY_OPTIONS, INTEGER_OPTIONS, VECTOR_OPTIONS, Loss
from . import axis
from .callback import (
    TEACHER_INPUTS,
    TracedCall,
    add_callback,
    collect_options,
    join_integers,
    make_teacher,
    output_shapes,
    reshard,
    write_out,
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate(call: TracedCall, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add the call to the program: its results, in the layout of `callback.output_shapes`.

    It is a `custom_jvp` only to raise an error for second derivatives.
    """
    if call.axis is not None:
        return axis.evaluate(call, inputs)
    fill = functools.partial(_compute_call, call)
    out: dict[str, Any] = add_callback(fill, output_shapes(call, inputs), inputs)
    return out


@_evaluate.defjvp
def _refuse_second_derivative(call: TracedCall, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{call.kind.name}_loss: gradients of the losses of infonce cannot be differentiated again"
    )


def _compute_call(call: TracedCall, out: dict[str, Any], inputs: dict[str, Any]) -> None:
    """The callback: compute the call by `infonce.dispatch` when the program runs.

    The results are written to the arrays of `out`, feature gradients without a copy. JAX turns an
    error into a JaxRuntimeError of the program.
    """
    grad_buffers = {name: out[name] for name in call.kind.arguments if name in call.wrt}
    result = dispatch.loss_and_grad(
        call.kind, inputs["features"], join_integers(inputs["labels"]), inputs["bias"],
        collect_options(call, inputs), grad_buffers, make_teacher(call, inputs),
    )  # fmt: skip
    write_out(call, result, out, grad_buffers)


# --- differentiation ------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_loss(call: TracedCall, inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(loss, metrics, sum of weights), which JAX differentiates by `_forward` and `_backward`.

    With `call.axis`, loss and sum of weights are this device's summands, which
    `axis.sum_over_devices` adds up. The sum of weights is None unless a mean is divided by it.
    """
    out = _evaluate(call, inputs)
    return out["loss"], out["metrics"], out.get("weight")


def _forward(call: TracedCall, inputs: dict[str, Any]) -> Any:
    """The outputs of `differentiable_loss`, and the residuals for `_backward`: the gradients.

    JAX calls it instead of `differentiable_loss` if the call is differentiated. The leaves of
    `inputs` are JAX's pairs (value, perturbed). Arguments that are `perturbed` get a gradient,
    except locked towers.
    """
    types = {
        name: jax.typeof(value.value)
        for name, value in _named(call.kind, inputs).items()
        if value is not None and value.perturbed and name not in call.kind.locked
    }
    wanted = tuple(types)
    for name in (*VECTOR_OPTIONS, "guide", *TEACHER_INPUTS):
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
    residuals = grads, inputs if in_backward else None, _Types(tuple(types.items()))
    return (out["loss"], out["metrics"], out.get("weight")), residuals


def _backward(call: TracedCall, residuals: Any, cotangents: Any) -> tuple[Any]:
    """The gradients of `inputs`: those of `_forward` times the upstream gradient.

    With reduction="none" they are computed here, from the upstream gradient of each row. The
    cotangents of metrics and of the sum of weights are not read: metrics get no gradient, and no
    differentiated argument changes the weights.
    """
    grads, inputs, types = residuals
    wanted = dict(types.by_name)
    upstream = cotangents[0]
    if isinstance(upstream, SymbolicZero):  # nothing that is differentiated depends on the loss
        upstream = jnp.zeros(upstream.shape, upstream.dtype)
    if inputs is not None:
        gradient_call = replace(call, metrics=False, wrt=tuple(wanted))
        out = _evaluate(gradient_call, {**inputs, "grad_out": upstream})
        grads = {name: out[name] for name in wanted}
    else:
        grads = {name: (grads[name] * upstream).astype(t.dtype) for name, t in wanted.items()}
    for name, argument in wanted.items():
        if any(argument.sharding.spec):  # of a mesh whose axes are `Explicit`; otherwise all None
            grads[name] = reshard(grads[name], argument.sharding)
    return ({
        "features": tuple(grads.get(name) for name in call.kind.arguments),
        "scale": grads.get("scale"),
        "bias": grads.get("bias"),
        "labels": None,
        **dict.fromkeys(("grad_out", "guide", *TEACHER_INPUTS, *INTEGER_OPTIONS, *ARRAY_OPTIONS)),
    },)  # fmt: skip


differentiable_loss.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Types:
    """The types of the differentiated arguments, as a part of the residuals that is no array."""

    by_name: tuple[tuple[str, Any], ...]  # (argument, its dtype and sharding)


def _named(kind: Loss, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can be differentiated, by name."""
    features = dict(zip(kind.arguments, inputs["features"], strict=True))
    return {**features, "scale": inputs["scale"], "bias": inputs["bias"]}
