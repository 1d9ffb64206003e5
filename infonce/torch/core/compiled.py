"""The losses in graphs of `torch.compile`: one operator, into which the compiler does not look.

`functions._apply` calls `apply`; the operator computes by `autograd.evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import validation
from ...spec import ARRAY_OPTIONS, COMPILED_OPTIONS, DEFAULTS, INFO_NCE_OWN, LOSSES, Loss
from .autograd import (
    CREATE_GRAPH,
    ONE_OR_PAIR,
    TENSOR_DTYPES_UNTIL_UPSTREAM,
    UNTRACKED,
    differentiated_names,
    evaluate,
    inside_transform,
    refuse_tangents,
    split_untracked,
    untracked_values,
)

# The precision with the widest range of scales. Checks use it before the precision of the products
# is known (here and in `functions._apply`); the full checks of the call then use the real range.
WIDEST_PRECISION = "fp64"
# Python type of a default -> type in the schema. Only `workspace` defaults to None; it is int?.
TYPES = {bool: "bool", str: "str", int: "int", float: "float", type(None): "int?"}
PLAIN_TYPES = (bool, str, int, float, type(None))  # of the options COMPILED_OPTIONS
SETTINGS = ", ".join(f"{TYPES[type(DEFAULTS[name])]} {name}" for name in COMPILED_OPTIONS)
# `autograd.UNTRACKED` as names of the operator's arguments: "row ids" -> "row_ids"
UNTRACKED_NAMES = [name.replace(" ", "_") for name in UNTRACKED]
SCHEMA = (
    "(str kind, Tensor query, Tensor? key, Tensor? own, Tensor scale, Tensor? bias, "
    f"{', '.join(f'Tensor? {name}' for name in UNTRACKED_NAMES)}, "
    f"bool[] needs, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("infonce::loss_and_grad", mutates_args=(), schema=SCHEMA)
def operator(
    kind: str,
    query: Tensor,
    key: Tensor | None,
    own: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    """(loss, gradients of scale, bias, query, key and own), not yet times the upstream gradient.

    `others`: the values of UNTRACKED_NAMES; whether each of (scale, bias, *features) needs a
    gradient; the values of COMPILED_OPTIONS. A gradient that is not needed has no elements.
    Gradients of scale and bias have the dtype of the loss. Gradients of features are float32 for
    float16 features, otherwise in the dtype of the features.
    """
    untracked, settings = others[: len(UNTRACKED_NAMES)], others[len(UNTRACKED_NAMES) + 1 :]
    refuse_tangents(query, key, own, scale, bias, *untracked)
    loss, features, wanted = _read_arguments(kind, (query, key, own), others)
    labels, arrays = split_untracked(untracked)
    options = {**dict(zip(COMPILED_OPTIONS, settings, strict=True)), **arrays}
    result = evaluate(loss, features, labels, scale, bias, options, wanted)
    grads = {name: getattr(result.grads, name) for name in wanted}
    for name, value in (("scale", scale), ("bias", bias)):
        if name in grads and value is not None:
            grads[name] = grads[name].reshape(value.shape).clone()
    return result.loss, *(
        grads[name] if name in wanted else query.new_empty(0) for name in _gradient_names(loss)
    )


def _read_arguments(
    kind: str, tensors: Sequence[Tensor | None], others: Sequence[Any]
) -> tuple[Loss, list[Tensor], frozenset[str]]:
    """The loss, its features, and the names of the arguments that need a gradient."""
    features = [z for z in tensors if z is not None]
    loss = INFO_NCE_OWN if tensors[2] is not None else LOSSES[kind]
    needs = others[len(UNTRACKED_NAMES)]
    return loss, features, differentiated_names(loss, tuple(needs[: 2 + len(features)]))


def _gradient_names(loss: Loss) -> list[str]:
    """For each gradient of the operator, the argument's name; "" if the loss has fewer features."""
    return ["scale", "bias", *loss.arguments, *[""] * (3 - len(loss.arguments))]


@operator.register_fake
def _make_fake_outputs(
    kind: str, query: Tensor, key: Any, own: Any, scale: Tensor, bias: Any, *others: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors without values, with shapes and dtypes of `operator`'s outputs, for the compiler."""
    loss, features, wanted = _read_arguments(kind, (query, key, own), others)
    double = any(z.dtype == torch.float64 for z in features)
    dtype = torch.float64 if double else torch.float32  # of the loss
    values = dict(zip(loss.arguments, features, strict=True))
    # argument name -> (tensor that has the shape of the gradient, dtype of the gradient)
    gradient_likes = {
        n: (z, TENSOR_DTYPES_UNTIL_UPSTREAM.get(z.dtype, z.dtype)) for n, z in values.items()
    }
    gradient_likes |= {"scale": (scale, dtype), "bias": (bias, dtype)}
    grads = [
        query.new_empty(gradient_likes[n][0].shape, dtype=gradient_likes[n][1])
        if n in wanted
        else query.new_empty(0)
        for n in _gradient_names(loss)
    ]
    return query.new_empty((), dtype=dtype), *grads


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the operator's gradients for `_backward`, and the dtypes of the inputs."""
    _kind, query, key, own, scale, bias, *_others = inputs
    ctx.dtypes = [None if x is None else x.dtype for x in (scale, bias, query, key, own)]
    ctx.save_for_backward(*output[1:])


# Whether the backward pass that runs keeps its graph. Old versions of PyTorch do not tell
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)


@torch.library.custom_op(
    "infonce::first_derivative", mutates_args=(), schema="(Tensor x) -> Tensor"
)
def first_derivative(upstream: Tensor) -> Tensor:
    """A copy of the upstream gradient, or the error for a second derivative.

    An operator, because only a run of a compiled backward pass tells whether it is to be
    differentiated. PyTorch itself may then take the gradients for constants, without an error."""
    # With create_graph, PyTorch runs a compiled backward pass with gradients enabled, or as the
    # forward pass of another node, where gradients and forward mode are disabled
    in_other_node = not torch._C._is_fwd_grad_enabled()
    if torch.is_grad_enabled() or (in_other_node and _keeps_graph()):
        raise RuntimeError(CREATE_GRAPH)
    return upstream.clone()


first_derivative.register_fake(torch.empty_like)


def _backward(ctx: Any, upstream: Tensor, *_unused: Any) -> Any:
    """The saved gradients times the upstream gradient of the loss, in the order of the inputs."""
    if torch.is_grad_enabled():  # in an exported program, or with backend="eager"
        raise RuntimeError(CREATE_GRAPH)
    upstream = first_derivative(upstream)
    scale, bias, *features = (
        (saved * upstream).to(dtype) if saved.numel() else None
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return (
        None,
        *features,
        scale,
        bias,
        *[None] * (len(UNTRACKED_NAMES) + 1 + len(COMPILED_OPTIONS)),
    )


operator.register_autograd(_backward, setup_context=_save_for_backward)


def _to_tensor(number: float) -> Tensor:
    """The number as a tensor. By a product, because torch.tensor() of a number that changes from
    call to call would be compiled again for each value."""
    return number * torch.ones((), dtype=torch.float64)


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
    """The loss as a call of the operator. ValueError for arguments that its schema cannot have.

    reduction="none" is refused too: its gradients follow from an upstream gradient of each row, and
    the operator computes gradients before the upstream gradient is known.
    """
    settings = {**DEFAULTS, **options}
    settings["workspace"] = validation.workspace(settings["workspace"])
    untracked = untracked_values(labels, options)
    others = options.keys() - {*COMPILED_OPTIONS, *ONE_OR_PAIR, *ARRAY_OPTIONS}
    fits = (
        all(x is None or isinstance(x, Tensor) for x in untracked)
        and all(isinstance(settings[name], PLAIN_TYPES) for name in COMPILED_OPTIONS)
        and all(options[name] is None for name in others)
    )
    if metrics or not fits or settings["reduction"] == "none" or inside_transform():
        raise ValueError(
            f"in a compiled graph: expected labels, {', '.join((*ONE_OR_PAIR, *ARRAY_OPTIONS))} as "
            "tensors, no metrics, group, reduction='none' nor torch.func, and as options plain "
            f"values of {', '.join(COMPILED_OPTIONS)}"
        )
    # Inputs of an exported program may require gradients where its examples did not. (For such
    # inputs torch.compile compiles again.)
    exporting = getattr(torch.compiler, "is_exporting", lambda: False)()  # PyTorch >= 2.7 has it
    needs = [isinstance(v, Tensor) and (exporting or (torch.is_grad_enabled() and v.requires_grad))
             for v in (scale, bias, *features)]  # fmt: skip
    if not isinstance(scale, Tensor):
        number = validation.scale(kind, temperature, scale, WIDEST_PRECISION)
        scale = _to_tensor(number)
    elif temperature is not None:
        raise ValueError("temperature, scale: expected one of them, got both")
    if kind.sigmoid and not isinstance(bias, Tensor):
        number = validation.number("bias", kind.bias if bias is None else bias)
        bias = _to_tensor(number)
    query, key, own = (*features, None, None)[:3]
    return operator(
        kind.name, query, key, own, scale, bias, *untracked, needs,
        *(settings[name] for name in COMPILED_OPTIONS),
    )[0]  # fmt: skip
