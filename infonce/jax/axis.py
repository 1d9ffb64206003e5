"""Losses of the rows of all devices of an axis: callbacks, and XLA's collectives between them.

    all_gather    keys [N, D] or [N, L, D], masks of their tokens, and their features [N, E] from a
                  guide or a teacher
    for each vector that has to travel (`rounds.CallbackPlan.travels`):
        callback      blocks of this device's rows [M, D] with the keys of all devices
        collective    all_to_all of sums of columns, or all_gather of a vector [N] of the keys
    last callback loss, metrics, dQ of this device's rows, a part of dK for all keys
    psum_scatter  parts of dK [N, D]: their sum over devices, for each device's own keys

M is the number of rows of a device, N that of the keys of all devices. rounds.py has the callbacks.
`evaluate` returns this device's part of the loss. `sum_over_devices` adds up the parts outside of
the custom derivative: JAX differentiates the sum itself, with `check_vma` or without.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import rounds
from .callback import Axis, TracedCall, add_callback, output_shapes, varying_axes


def find_axis(axis_name: Any, features: Mapping[str, Any]) -> Axis:
    """The axis of a call.

    ValueError if no axis has the name, or if JAX knows that one of `features` is the same on all
    devices of the axis.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        if not names or len(set(names)) < len(names):
            raise NameError("expected different names")
        size, index = jax.lax.axis_size(names), jax.lax.axis_index(names)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            "axis_name: expected the name of an axis of the jax.shard_map or jax.pmap around the "
            f"call, or a tuple of names, got {axis_name!r}. (Of global arrays, "
            "infonce.jax.sharded makes the loss.)"
        ) from error
    # The index differs on all devices, so it varies over all axes of the call. If JAX does not
    # check variation (`check_vma=False`, `pmap`), `axes` is empty, and nothing is refused: equal
    # arrays count as different rows of each device
    axes = varying_axes(index)
    for name, z in features.items():
        if not axes <= varying_axes(z):
            raise ValueError(
                f"{name}: expected rows of each device of axis {axis_name!r}, got the same array "
                "on all devices"
            )
    return Axis(names, size, jax.default_backend() == "cpu")


def evaluate(call: TracedCall, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add the callbacks and collectives of a call to the program, and return its results.

    The results have the names of `callback.output_shapes`. "loss" is this device's part, and
    gradients are for this device's rows. "weight" is the sum of the weights of this device's rows;
    `sum_over_devices` divides the loss by the sum over all devices.
    """
    axis, kind, make_shape = call.axis, call.kind, jax.ShapeDtypeStruct
    assert axis is not None

    # The keys of all devices
    features = inputs["features"]
    own_keys = jnp.concatenate(features) if kind.joint else features[kind.key_argument]
    gathered = jax.tree.map(
        lambda own: jax.lax.all_gather(own, axis.names, tiled=True),
        {
            "keys": own_keys,
            "key_masks": inputs["key_mask"],
            "auxiliary_keys": _auxiliary_keys(call, inputs),
        },
    )
    device_arguments, keys = {**inputs, **gathered}, gathered["keys"]

    # Callbacks, with a collective after each but the last
    plan = rounds.plan_callbacks(call, device_arguments)
    device_arguments["rank"] = jax.lax.axis_index(axis.names)
    run_callback = functools.partial(rounds.run_callback, call, plan)
    # For each earlier callback: its error flag and results, and the data that arrived after it
    earlier_callbacks: list[dict[str, Any]] = []

    def add_next_callback(shapes: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = add_callback(
            run_callback, shapes, {**device_arguments, "earlier_callbacks": earlier_callbacks}
        )
        return out

    for travel in plan.travels:
        # Numbers have 64 bits and travel as two uint32, because JAX may lack 64-bit types
        shape: tuple[int, ...] = (travel.vector_count, len(own_keys), 2)
        if travel.to_owners:
            shape = (axis.size, *shape)
        out = add_next_callback({
            "error_and_results": make_shape((1 + travel.result_count, 2), jnp.uint32),
            "travelling": make_shape(shape, jnp.uint32),
        })  # fmt: skip
        if travel.to_owners:
            arrived = jax.lax.all_to_all(out["travelling"], axis.names, 0, 0)
        else:
            arrived = jax.lax.all_gather(out["travelling"], axis.names)
        earlier_callbacks.append(
            {"error_and_results": out["error_and_results"], "arrived": arrived}
        )

    shapes = output_shapes(call, inputs)

    # The last callback writes feature gradients as dQ and a part of dK, in the dtype of sums.
    # Gradients of own negatives are final.
    summed = [name for name in kind.arguments if name in call.wrt and name != "own"]
    feature_shapes = {name: shapes.pop(name) for name in summed}
    weight_dtype = jax.dtypes.canonicalize_dtype(np.float64)
    shapes["weight"] = make_shape((), weight_dtype) if _may_weigh_rows(call, inputs) else None
    rows = len(own_keys) if kind.symmetric else len(features[0])
    if kind.arguments[0] in feature_shapes or (kind.symmetric and feature_shapes):
        shapes["dq"] = make_shape((rows, *features[0].shape[1:]), plan.sum_dtype)
    if plan.has_partial_dk:
        shapes["partial_dk"] = make_shape(keys.shape, plan.sum_dtype)
    out = add_next_callback(shapes)

    # Gradients of this device's rows, in the dtypes of features
    dq, dk = out.pop("dq", None), out.pop("partial_dk", None)
    if dk is not None:
        dk = jax.lax.psum_scatter(dk, axis.names, scatter_dimension=0, tiled=True)
    if kind.symmetric:  # queries are the keys, so a row's gradient has both parts
        dq = dq if dk is None else dq + dk
        grads = jnp.split(dq, 2) if kind.joint and dq is not None else [dq]
    else:
        grads = [dq, dk]
    for name, grad in zip(kind.arguments, grads, strict=False):
        if name in feature_shapes:
            out[name] = grad.astype(feature_shapes[name].dtype)
    return out


def _auxiliary_keys(call: TracedCall, inputs: dict[str, Any]) -> Any:
    """Auxiliary features of this device's keys, from a guide or a teacher; None without both."""
    guide = inputs["guide"]
    if isinstance(guide, tuple):
        guide = jnp.concatenate(guide) if call.kind.joint else guide[1]
    return inputs["teacher_key"] if call.kind.taught else guide


def _may_weigh_rows(call: TracedCall, inputs: dict[str, Any]) -> bool:
    """Whether rows may have different shares in the mean: with weights, or rows without positive.

    Classes, labels of queries, and positive ids of a softmax may leave a row without a positive,
    and so without a share. The labels of nt_xent pair all rows. Values are not known while JAX
    traces, so only the presence of arguments decides.
    """
    kind = call.kind
    labelled = inputs["labels"] is not None and (kind.classes or not kind.symmetric)
    labelled = labelled or (inputs["positive_ids"] is not None and not kind.sigmoid)
    return call.reduction == "mean" and (labelled or inputs["weights"] is not None)


def sum_over_devices(
    call: TracedCall, rows: int, out: tuple[Any, dict[str, Any], Any]
) -> tuple[Any, Any]:
    """The (loss, metrics) of all devices, from `out` of `differentiable_loss` on each device.

    `rows` is the number of rows of a device.
    """
    axis, (loss, metrics, weight) = call.axis, out
    assert axis is not None
    if call.reduction != "none":
        loss = jax.lax.psum(loss, axis.names)
    if weight is not None:
        weight = jax.lax.psum(weight, axis.names)
        # `loss` is the weighted sum divided by the rows of all devices. `factor` replaces this
        # divisor by the sum of the weights. If all weights are 0, the loss stays 0.
        factor = rows * axis.size / jnp.where(weight == 0, 1, weight)
        loss = loss * factor.astype(loss.dtype)
    metrics = jax.lax.stop_gradient(metrics)
    sums = {name: metrics[name] for name in ("row_loss", "column_loss") if name in metrics}
    return loss, {**metrics, **jax.lax.psum(sums, axis.names)}
