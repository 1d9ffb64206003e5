"""`dims=`: the weighted sum of the losses of several prefixes of the features.

Each prefix is a call of its own. A call that can compute all prefixes in one pass does not come
here: `dispatch._in_one_pass` passes it to `infonce.kernels.prefixes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .. import arrays
from ..kernels.problem import Array
from ..result import LossAndGrad
from ..spec import Loss
from . import outputs, validation

# (features of a prefix, options without `dims`) -> the result of the prefix
Evaluate = Callable[[Sequence[Array], Mapping[str, Any]], Any]


def has_prefixes(loss: Loss, options: Mapping[str, Any]) -> bool:
    """Whether the call has `dims`, and the loss takes them. Otherwise a later check refuses."""
    return options.get("dims") is not None and "dims" not in loss.refused


def read_prefixes(
    loss: Loss, features: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """The (width, weight) of each prefix, and the options without `dims` and `dim_weights`."""
    others = dict(options)
    dims, weights = others.pop("dims"), others.pop("dim_weights", None)
    widths = read_widths(dims, min(z.shape[-1] for z in features))
    if weights is None:
        return [(d, 1.0) for d in widths], others
    weights = [validation.number("dim_weights", w) for w in _listed(weights)]
    if len(weights) != len(widths):
        raise ValueError(f"dim_weights: expected {len(widths)} numbers like dims, got {weights}")
    if not all(isinstance(w, float) and math.isfinite(w) for w in weights):
        raise TypeError(f"dim_weights: expected numbers, got {validation.what(weights)}")
    return list(zip(widths, weights, strict=True)), others


def read_widths(dims: Any, width: int) -> list[int]:
    """The checked widths of the prefixes of rows of `width` features."""
    expected = f"dims: expected increasing integers in [1, {width}]"
    try:
        listed = list(dims)
    except TypeError:
        raise TypeError(f"{expected}, got {validation.what(dims)}") from None
    if not all(map(validation.is_integer, listed)):
        raise TypeError(f"{expected}, got {validation.what(dims)}")
    widths = [int(d) for d in listed]
    ends = [0, *widths, width + 1]
    if not widths or any(a >= b for a, b in pairwise(ends)):
        raise ValueError(f"{expected}, got {widths}")
    return widths


def _listed(weights: Any) -> list[Any]:
    try:
        return list(weights)
    except TypeError:
        raise TypeError(f"dim_weights: expected numbers, got {validation.what(weights)}") from None


def loss(
    kind: Loss, caller_arrays: Sequence[Any], options: Mapping[str, Any], evaluate: Evaluate
) -> Any:
    """The loss, without gradients."""
    with arrays.use_caller_stream(caller_arrays[0]):
        features = arrays.natives(caller_arrays, kind.arguments)
        parts, others = check_and_read(kind, features, options)
        losses = [evaluate([z[..., :d] for z in features], others) for d, _ in parts]
        return arrays.converter_to(caller_arrays[0])(_weighted(losses, parts))


def loss_and_grad(
    kind: Loss, caller_arrays: Sequence[Any], options: Mapping[str, Any], evaluate: Evaluate
) -> LossAndGrad:
    """Loss and gradients. Log-sum-exps, metrics and logits belong to the widest prefix."""
    with arrays.use_caller_stream(caller_arrays[0]):
        features = arrays.natives(caller_arrays, kind.arguments)
        parts, others = check_and_read(kind, features, options)
        wrt = validation.wrt(kind, others.get("wrt"))
        grad_dtype = validation.grad_dtype(others.pop("grad_dtype", None))
        named = dict(zip(kind.arguments, features, strict=True))
        new = {
            name: (z.shape, grad_dtype or validation.native_order(z.dtype))
            for name, z in named.items()
            if name in wrt
        }
        xp = arrays.namespace(features[0])
        grads, caller_outs = outputs.gradient_arrays(
            xp, kind, features, others.pop("out", None), new, grad_dtype
        )
        grad_out = others.pop("grad_out", 1.0)
        if not isinstance(grad_out, (int, float)):
            grad_out = xp.asarray(arrays.native(grad_out, "grad_out"))
        wide = [np.float32 for z in grads.values() if z.dtype.itemsize < 4]
        sums = {name: xp.empty(z.shape, wide[0]) if wide else z for name, z in grads.items()}
        losses: list[Array] = []
        scalars: dict[str, Any] = {}
        # The widest prefix comes first. The other prefixes add to its gradients, and reuse its
        # temporary memory
        for d, weight in reversed(parts):
            inner = {**others, "grad_out": grad_out * weight}
            if wide:
                inner["grad_dtype"] = wide[0]
            if not losses and sums:
                inner["out"] = {name: z[..., :d] for name, z in sums.items()}
                for z in sums.values():
                    z[..., d:] = 0
            result = evaluate([z[..., :d] for z in features], inner)
            if not losses:
                widest = result
            losses.append(result.loss)
            for name, gradient in result.grads._asdict().items():
                if name not in sums and gradient is not None:
                    scalars[name] = scalars.get(name, 0.0) + gradient
                elif result is not widest and gradient is not None:
                    sums[name][..., :d] += gradient
        for name, z in grads.items():
            if z is not sums[name]:
                z[...] = sums[name]
        convert = arrays.converter_to(caller_arrays[0])
        by_name = {name: caller_outs.get(name, convert(z)) for name, z in grads.items()}
        by_name |= {name: convert(xp.asarray(number)) for name, number in scalars.items()}
        loss = convert(_weighted(losses[::-1], parts))
        all_grads = widest.grads._replace(**by_name)
        return LossAndGrad(loss, all_grads, widest.lse, widest.metrics, widest.logits)


def check_and_read(
    kind: Loss, features: Sequence[Array], options: Mapping[str, Any]
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Check the features, then `read_prefixes`."""
    kinds = arrays.kinds(features)
    validation.features(kind.arguments, features, kinds, 0)
    return read_prefixes(kind, features, options)


def _weighted(losses: Sequence[Array], parts: Sequence[tuple[int, float]]) -> Array:
    """The sum of losses times weights, in the dtype of the losses."""
    dtype = losses[0].dtype
    total = sum(w * loss.astype(np.float64) for loss, (_, w) in zip(losses, parts, strict=True))
    return arrays.namespace(losses[0]).asarray(total, dtype)
