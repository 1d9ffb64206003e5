"""Losses of the rows of all devices of an axis: callbacks, and XLA's collectives between them.

    all_gather of the keys [N, D]; then for each round of `rounds`
        callback   blocks of this device's rows [M, D] with the keys of all devices
        collective all_to_all of the sums of columns, all_gather of vectors of keys
    psum_scatter of the gradients of all keys [N, D], which are sums over devices

A call returns this device's part of the loss. The sum of the parts is outside of what has a
derivative of its own: JAX differentiates it as the mode demands, `check_vma` or not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..spec import Loss
from . import rounds
from .callback import Axis, Call, call_out, outputs


def axis_of(axis_name: Any, kind: Loss, features: Sequence[Any]) -> Axis:
    """The axis of a call. ValueError where there is none of that name, or where features are known
    to be the same on all of its devices."""
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
    own = _varying(index)
    for name, z in zip(kind.arguments, features, strict=True):
        if not own <= _varying(z):
            raise ValueError(
                f"{name}: expected rows of each device of axis {axis_name!r}, got the same array "
                "on all devices"
            )
    return Axis(names, size, own, jax.default_backend() == "cpu")


def spread(axis: Axis, given: dict[str, Any]) -> tuple[Axis, dict[str, Any]]:
    """The arguments as arrays that may be different on each device, and the axis with all axes
    over which they vary."""
    axis = replace(axis, varying=axis.varying.union(*map(_varying, jax.tree.leaves(given))))
    return axis, _vary(given, axis.varying)


def _varying(x: Any) -> frozenset[Any]:
    """Axes over which x varies; none where JAX does not check."""
    of = jax.typeof(x)
    found = of.mat.varying if hasattr(of, "mat") else getattr(of, "vma", frozenset())
    return frozenset(found)


def _vary(tree: Any, names: frozenset[Any]) -> Any:
    def one(x: Any) -> Any:
        missing = tuple(sorted(names - _varying(x), key=str))
        if missing and hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing) if missing else x

    return jax.tree.map(one, tree)


def evaluate(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """See `callback.outputs`: this device's part of the loss, and its rows of the gradients. The
    output "weight" is this device's part of the sum of the weights of rows, which a weighted mean
    is to be divided by."""
    axis, kind, of = call.axis, call.kind, jax.ShapeDtypeStruct
    assert axis is not None
    features = given["features"]
    own = jnp.concatenate(features) if kind.joint else features[-1]
    keys = jax.lax.all_gather(own, axis.names, tiled=True)
    known = {**given, "keys": keys}
    plan = rounds.plan(call, known)
    known["rank"] = jax.lax.axis_index(axis.names)
    run = functools.partial(rounds.run, call, plan)

    def callback(shapes: dict[str, Any]) -> dict[str, Any]:
        out = call_out(run, shapes, {**known, "past": past})
        varying: dict[str, Any] = _vary(out, axis.varying)  # JAX takes them for the same on all
        return varying

    past: list[dict[str, Any]] = []
    for travel in plan.travels:
        numbers = (axis.size,) * travel.home + (travel.vectors, len(own), 2)
        out = callback({
            "left": of((1 + travel.left, 2), jnp.uint32), "travelling": of(numbers, jnp.uint32),
        })  # fmt: skip
        if travel.home:
            arrived = jax.lax.all_to_all(out["travelling"], axis.names, 0, 0)
        else:
            arrived = jax.lax.all_gather(out["travelling"], axis.names)
        past.append({"left": out["left"], "arrived": arrived})

    shapes = outputs(call, given)
    feature_shapes = {name: shapes.pop(name) for name in kind.arguments if name in call.wrt}
    wide = jax.dtypes.canonicalize_dtype(np.float64)
    shapes["weight"] = of((), wide) if _weighted(call, given) else None
    rows = len(own) if kind.symmetric else len(features[0])
    if kind.arguments[0] in feature_shapes or (kind.symmetric and feature_shapes):
        shapes["dq"] = of((rows, own.shape[1]), plan.real)
    if plan.key_sums:
        shapes["key_sums"] = of(keys.shape, plan.real)
    out = callback(shapes)
    dq, dk = out.pop("dq", None), out.pop("key_sums", None)
    if dk is not None:
        dk = jax.lax.psum_scatter(dk, axis.names, scatter_dimension=0, tiled=True)
    if kind.symmetric:
        dq = dq if dk is None else dq + dk
        parts = jnp.split(dq, 2) if kind.joint and dq is not None else [dq]
    else:
        parts = [dq, dk]
    for name, part in zip(kind.arguments, parts, strict=False):
        if name in feature_shapes:
            out[name] = part.astype(feature_shapes[name].dtype)
    return out


def _weighted(call: Call, given: dict[str, Any]) -> bool:
    """Whether the mean is one over rows of different weights, or that may have none."""
    labelled = given["labels"] is not None and (call.kind.classes or not call.kind.symmetric)
    return call.reduction == "mean" and (labelled or given["weights"] is not None)


def total(call: Call, rows: int, out: tuple[Any, dict[str, Any], Any]) -> tuple[Any, Any]:
    """The loss of all devices and their metrics, from the parts of devices with so many rows."""
    axis, (loss, metrics, weight) = call.axis, out
    assert axis is not None
    if call.reduction != "none":
        loss = jax.lax.psum(loss, axis.names)
    if weight is not None:
        weight = jax.lax.psum(weight, axis.names)
        share = rows * axis.size / jnp.where(weight == 0, 1, weight)  # of no row: the loss is 0
        loss = loss * share.astype(loss.dtype)
    metrics = jax.lax.stop_gradient(metrics)
    sums = {name: metrics[name] for name in ("row_loss", "column_loss") if name in metrics}
    return loss, {**metrics, **jax.lax.psum(sums, axis.names)}
