"""The losses in graphs of `torch.compile`: one opaque operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import validation
from ...spec import COMPILED, DEFAULTS, LOSSES, NAMES, VECTORS, Loss
from .autograd import TENSOR_DTYPES_UNTIL_UPSTREAM, evaluate, transformed, wanted_of

WIDEST = "fp64"  # has the widest range of scales; the operator checks the range of its precision
# Schema types of Python types. Only `workspace` defaults to None, and it is int?.
TYPES = {bool: "bool", str: "str", int: "int", float: "float", type(None): "int?"}
PLAIN = (bool, str, int, float, type(None))
SETTINGS = ", ".join(f"{TYPES[type(DEFAULTS[name])]} {name}" for name in COMPILED)
SCHEMA = (
    "(str kind, Tensor query, Tensor? key, Tensor? labels, Tensor scale, Tensor? bias, "
    f"{', '.join(f'Tensor? {name}' for name in VECTORS)}, "
    f"bool[] needs, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("infonce::loss_and_grad", mutates_args=(), schema=SCHEMA)
def operator(
    kind: str,
    query: Tensor,
    key: Tensor | None,
    labels: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    key_bias: Tensor | None,
    needs: list[bool],
    *settings: bool | str | float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradients of scale, bias, query and key), before the upstream gradient.

    A gradient that is not needed is empty. Gradients of scalars have the dtype of the loss, and
    gradients of features that of `evaluate`.
    """
    loss = LOSSES[kind]
    features = [query] if key is None else [query, key]
    options = dict(zip(COMPILED, settings, strict=True), weights=weights, key_bias=key_bias)
    wanted = wanted_of(loss, tuple(needs[: 2 + len(features)]))
    result = evaluate(loss, features, labels, scale, bias, options, wanted)
    grads = {name: getattr(result.grads, name) for name in wanted}
    for name, value in (("scale", scale), ("bias", bias)):
        if name in grads and value is not None:
            grads[name] = grads[name].reshape(value.shape).clone()
    names = ["scale", "bias", *loss.arguments, *["key"] * (2 - len(features))]
    empties = (query.new_empty(0) for _ in names)
    scale_gradient, bias_gradient, query_gradient, key_gradient = (
        grads.get(name, empty) for name, empty in zip(names, empties, strict=True)
    )
    return result.loss, scale_gradient, bias_gradient, query_gradient, key_gradient


@operator.register_fake
def _shapes(
    kind: str, query: Tensor, key: Any, labels: Any, scale: Tensor, bias: Any, weights: Any,
    key_bias: Any, needs: list[bool], *settings: bool | str | float,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = wanted_of(LOSSES[kind], tuple(needs[: 3 if key is None else 4]))
    double = torch.float64 in {query.dtype, query.dtype if key is None else key.dtype}
    dtype = torch.float64 if double else torch.float32  # of the loss
    arguments = LOSSES[kind].arguments
    values = dict(zip(arguments, (query, key), strict=False))
    waiting = {
        n: (z, TENSOR_DTYPES_UNTIL_UPSTREAM.get(z.dtype, z.dtype)) for n, z in values.items()
    }
    waiting |= {"scale": (scale, dtype), "bias": (bias, dtype)}
    names = ["scale", "bias", *arguments, *["key"] * (2 - len(arguments))]
    grads = [
        query.new_empty(waiting[n][0].shape, dtype=waiting[n][1])
        if n in wanted
        else query.new_empty(0)
        for n in names
    ]
    return query.new_empty((), dtype=dtype), *grads


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    _kind, query, key, _labels, scale, bias, *_rest = inputs
    ctx.dtypes = [None if x is None else x.dtype for x in (scale, bias, query, key)]
    ctx.save_for_backward(*output[1:])


def _scaled(ctx: Any, upstream: Tensor, *_unused: Any) -> Any:
    scale, bias, query, key = (
        (saved * upstream).to(dtype) if saved.numel() else None
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return None, query, key, None, scale, bias, *[None] * (len(VECTORS) + 1 + len(COMPILED))


operator.register_autograd(_scaled, setup_context=_remember)


def apply(
    kind: Loss,
    features: Sequence[Tensor],
    labels: Tensor | None,
    scale: Any,
    temperature: Any,
    bias: Any,
    metrics: bool,
    options: dict[str, Any],
) -> Tensor:
    """The loss as a call of the operator."""
    settings = {**DEFAULTS, **options}
    settings["workspace"] = validation.workspace(settings["workspace"])
    vectors = [settings[name] for name in VECTORS]
    others = options.keys() - {*COMPILED, *VECTORS}
    fits = (
        all(x is None or isinstance(x, Tensor) for x in (labels, *vectors))
        and all(isinstance(settings[name], PLAIN) for name in COMPILED)
        and all(options[name] is None for name in others)
    )
    if metrics or not fits or settings["reduction"] == "none" or transformed():
        raise ValueError(
            "in a compiled graph: expected labels, weights and key_bias as tensors, no metrics, "
            f"{', '.join(NAMES)}, own, guide, reduction='none' nor torch.func, and as options "
            f"plain values of {', '.join(COMPILED)}"
        )
    if not isinstance(scale, Tensor):
        number = validation.scale(kind, temperature, scale, WIDEST)
        scale = torch.tensor(number, dtype=torch.float64)
    elif temperature is not None:
        raise ValueError("temperature, scale: expected one of them, got both")
    if kind.sigmoid and not isinstance(bias, Tensor):
        number = validation.number("bias", kind.bias if bias is None else bias)
        bias = torch.tensor(number, dtype=torch.float64)
    key = features[1] if len(features) > 1 else None
    needs = [torch.is_grad_enabled() and v is not None and v.requires_grad
             for v in (scale, bias, features[0], key)]  # fmt: skip
    return operator(
        kind.name, features[0], key, labels, scale, bias, *vectors, needs,
        *(settings[name] for name in COMPILED),
    )[0]  # fmt: skip
