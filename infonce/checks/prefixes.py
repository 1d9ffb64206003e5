"""The option `dims`: the weighted sum of the losses of several prefixes of the features.

`check_and_read` checks the options. In `loss` and `loss_and_grad`, each prefix is a call of its
own. `dispatch` tries `dispatch._in_one_pass` first, and calls these two functions if
`_in_one_pass` cannot compute the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from .. import arrays
from ..kernels.problem import Array
from ..result import LossAndGrad
from ..spec import Loss
from . import outputs, validation

# A call of the loss: (features of a prefix, options without `dims`) -> the result of the prefix
Evaluate = Callable[[Sequence[Array], Mapping[str, Any]], Any]


def listed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with a list in place of each iterator: several calls read them."""
    return {
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in options.items()
    }


def has_prefixes(loss: Loss, options: Mapping[str, Any]) -> bool:
    """Whether the call has `dims`, and the loss takes them.

    If the loss does not take them, the call goes on as one without prefixes, and `softmax.options`
    raises the error.
    """
    return options.get("dims") is not None and "dims" not in loss.refused


def read_prefixes(
    loss: Loss, features: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """(width, weight) of each prefix in ascending order, and `options` without these two options.

    Weights are finite numbers of any sign; they are 1 if the caller gives none.
    """
    others = dict(options)
    dims, weights = others.pop("dims"), others.pop("dim_weights", None)
    widths = read_widths(dims, min(z.shape[-1] for z in features))
    if weights is None:
        return [(d, 1.0) for d in widths], others
    weights = [validation.number("dim_weights", w) for w in _as_list(weights)]
    if len(weights) != len(widths):
        raise ValueError(f"dim_weights: expected {len(widths)} numbers like dims, got {weights}")
    # `validation.number` does not read arrays on a GPU: they are refused here
    if not all(isinstance(w, float) for w in weights):
        raise TypeError(f"dim_weights: expected numbers, got {validation.what(weights)}")
    return list(zip(widths, weights, strict=True)), others


def read_widths(dims: Any, width: int) -> list[int]:
    """The checked widths `dims` of the prefixes of rows with `width` features."""
    expected = f"dims: expected increasing integers in [1, {width}]"
    try:
        listed = list(dims)
    except TypeError:
        raise TypeError(f"{expected}, got {validation.what(dims)}") from None
    if not all(map(validation.is_integer, listed)):
        raise TypeError(f"{expected}, got {validation.what(dims)}")
    widths = [int(d) for d in listed]
    with_bounds = [0, *widths, width + 1]  # increases if the widths increase, from 1 to `width`
    if not widths or any(a >= b for a, b in pairwise(with_bounds)):
        raise ValueError(f"{expected}, got {widths}")
    return widths


def _as_list(weights: Any) -> list[Any]:
    try:
        return list(weights)
    except TypeError:
        raise TypeError(f"dim_weights: expected numbers, got {validation.what(weights)}") from None


def loss(
    kind: Loss, caller_arrays: Sequence[Any], options: Mapping[str, Any], evaluate: Evaluate
) -> Any:
    """The sum of the losses of all prefixes, without gradients: one call of `evaluate` each."""
    with _prefixes(kind, caller_arrays, options) as (features, widths_and_weights, others):
        # The widest prefix comes first: it needs the largest workspace, which its error names
        losses = [
            evaluate([z[..., :d] for z in features], others)
            for d, _ in reversed(widths_and_weights)
        ]
        loss = _weighted_sum(losses[::-1], widths_and_weights)
        return arrays.converter_to(caller_arrays[0])(loss)


def loss_and_grad(
    kind: Loss, caller_arrays: Sequence[Any], options: Mapping[str, Any], evaluate: Evaluate
) -> LossAndGrad:
    """The sum of the losses of all prefixes, with its gradients.

    Log-sum-exps, metrics and logits in the result are those of the widest prefix.
    """
    with _prefixes(kind, caller_arrays, options) as (features, widths_and_weights, others):
        # the arrays for the gradients, with the full width
        wrt = validation.wrt(kind, others.get("wrt"))
        grad_dtype = validation.grad_dtype(others.pop("grad_dtype", None))
        gradient_types = {
            name: (z.shape, grad_dtype or validation.native_order(z.dtype))
            for name, z in zip(kind.arguments, features, strict=True)
            if name in wrt
        }
        xp = arrays.namespace(features[0])
        grads, given_out = outputs.gradient_arrays(
            xp, kind, features, others.pop("out", None), gradient_types, grad_dtype
        )
        grad_out = validation.grad_out(
            xp, others.pop("grad_out", 1.0), others.get("reduction", "mean"), len(features[0])
        )
        # The gradients of all prefixes are added up in the dtypes of their arrays, or in float32 if
        # an array has 16 bits: then the sum is rounded to 16 bits once
        sums = {
            name: xp.empty(z.shape, np.float32) if z.dtype.itemsize < 4 else z
            for name, z in grads.items()
        }
        losses: list[Array] = []
        scalars: dict[str, Any] = {}
        # The widest prefix comes first: its gradients are written to the sums. Other prefixes add
        # to them, and reuse its temporary memory
        for d, weight in reversed(widths_and_weights):
            is_widest = not losses
            written = {
                name: z[..., :d] if is_widest else xp.empty((*z.shape[:-1], d), z.dtype)
                for name, z in sums.items()
            }
            prefix_options = {**others, "grad_out": grad_out * weight, "out": written}
            result = evaluate([z[..., :d] for z in features], prefix_options)
            if is_widest:
                widest = result
                for z in sums.values():
                    z[..., d:] = 0  # features beyond the widest prefix have no gradient
            else:
                for name, gradient in written.items():
                    sums[name][..., :d] += gradient
            losses.append(result.loss)
            for name, number in result.grads._asdict().items():
                if name not in sums and number is not None:
                    scalars[name] = scalars.get(name, 0.0) + number
        for name, z in grads.items():
            if z is not sums[name]:
                z[...] = sums[name]
        convert = arrays.converter_to(caller_arrays[0])
        by_name = {name: given_out.get(name, convert(z)) for name, z in grads.items()}
        by_name |= {name: convert(xp.asarray(number)) for name, number in scalars.items()}
        loss = convert(_weighted_sum(losses[::-1], widths_and_weights))
        all_grads = widest.grads._replace(**by_name)
        return LossAndGrad(loss, all_grads, widest.lse, widest.metrics, widest.logits)


@contextmanager
def _prefixes(
    kind: Loss, caller_arrays: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[tuple[list[Array], list[tuple[int, float]], dict[str, Any]]]:
    """Context for calls of all prefixes, and for sums of their results: on the caller's stream and
    on the features' device, without NumPy's warnings. Yields the features, and the results of
    `check_and_read`."""
    with arrays.use_caller_stream(caller_arrays[0]):
        features = arrays.natives(caller_arrays, kind.arguments)
        with arrays.compute_context(features[0]):
            yield features, *check_and_read(kind, features, options)
            arrays.keep_until_read(features[0], caller_arrays)


def check_and_read(
    kind: Loss, features: Sequence[Array], options: Mapping[str, Any]
) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """Check the features, then `read_prefixes`."""
    has_table = options.get("own_indices") is not None
    descriptions = arrays.describe_arrays(features)
    validation.features(kind.arguments, features, descriptions, 0, kind.takes_tokens, has_table)
    return read_prefixes(kind, features, options)


def _weighted_sum(
    losses: Sequence[Array], widths_and_weights: Sequence[tuple[int, float]]
) -> Array:
    """The sum of losses times weights, in the dtype of the losses, in the order of the prefixes."""
    dtype = losses[0].dtype
    terms = zip(losses, widths_and_weights, strict=True)
    total = sum(weight * loss.astype(np.float64) for loss, (_, weight) in terms)
    return arrays.namespace(losses[0]).asarray(total, dtype)
