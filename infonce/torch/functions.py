"""The losses as functions that autograd knows.

One path for all five: `_apply` -> `_Function` (or, in a compiled graph, an operator) -> the same
dispatch as for arrays. Gradients are computed together with the loss where any are needed, in the
pass that the loss takes anyway, and scaled by the upstream gradient when it comes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, losses
from ..losses import Loss
from ..result import LossAndGrad, Metrics

KINDS = {kind.name: kind for kind in (losses.CLIP, losses.INFO_NCE, losses.LIT, losses.NT_XENT,
                                      losses.SIGLIP)}  # fmt: skip
OPTIONS = ("normalize", "reduction", "method", "precision", "workspace")


def _evaluate(
    kind: Loss,
    features: Sequence[Tensor],
    labels: Tensor | None,
    scale: Any,
    bias: Any,
    options: dict[str, Any],
    wrt: frozenset[str],
    **more: Any,
) -> LossAndGrad:
    """Loss and the gradients named in `wrt`, as tensors; those of features in torch's memory."""
    given = {**options, **more, "scale": scale, "wrt": wrt}
    made = {}
    for name, z in zip(kind.arguments, features, strict=True):
        if name in wrt:
            made[name] = torch.empty_like(z, memory_format=torch.contiguous_format)
    group = given.pop("group", None)
    if group is None:
        return dispatch.loss_and_grad(kind, features, labels, bias, given, made)
    from . import process_group

    return process_group.loss_and_grad(kind, features, labels, bias, group, {**given, "out": made})


@functools.cache
def _wanted(kind: Loss, needs: tuple[bool, ...]) -> frozenset[str]:
    """Names of the arguments that need a gradient, `needs` being those of (scale, bias, *features).

    A locked tower gets none: its features are taken as constants.
    """
    names = ["scale", "bias", *kind.arguments]
    return frozenset(
        n for n, need in zip(names, needs, strict=True) if need and n not in kind.locked
    )


NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Call:
    """What of a call autograd does not look at."""

    kind: Loss
    labels: Tensor | None
    scale: Any  # of no use where it is a tensor, an input of autograd's
    bias: Any
    options: dict[str, Any]
    with_metrics: bool
    # found:
    metrics: Metrics | None = None
    wanted: frozenset[str] = NOTHING
    grads: list[Tensor | None] | None = None  # until a backward pass takes them


def _of_inputs(kind: Loss, grads: Any, wanted: frozenset[str]) -> list[Tensor | None]:
    """Gradients in the order of `_Function`'s inputs."""
    return [getattr(grads, n) if n in wanted else None for n in ("scale", "bias", *kind.arguments)]


class _Function(torch.autograd.Function):
    """loss = f(scale, bias, *features)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: _Call, scale: Tensor | None, bias: Tensor | None, *features: Tensor
    ) -> Tensor:
        wanted = _wanted(call.kind, ctx.needs_input_grad[1:])
        # Per-row losses have no single upstream gradient: theirs are computed when it is known
        now = NOTHING if call.options.get("reduction") == "none" else wanted
        result = _computed(call, scale, bias, features, now, metrics=call.with_metrics)
        call.metrics, call.wanted = result.metrics, wanted
        if now:
            call.grads = _of_inputs(call.kind, result.grads, now)
        if wanted:
            ctx.call = call
            ctx.save_for_backward(scale, bias, *features)
        return result.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True: gradients of the losses of infonce cannot "
                "be differentiated again"
            )
        call = ctx.call
        grads, call.grads = call.grads, None
        if grads is not None:
            # The first backward pass takes the gradients that the forward pass has left, in place;
            # another one (retain_graph) computes them again
            for grad in grads:
                if grad is not None:
                    grad.mul_(upstream)
        else:
            scale, bias, *features = ctx.saved_tensors
            result = _computed(call, scale, bias, features, call.wanted, grad_out=upstream)
            grads = _of_inputs(call.kind, result.grads, call.wanted)
        for i, grad in enumerate(grads[:2]):  # of scale and bias
            if grad is not None:
                grads[i] = grad.to(ctx.saved_tensors[i].dtype)
        return None, *grads


def _computed(
    call: _Call, scale: Tensor | None, bias: Tensor | None, features: Sequence[Tensor],
    wrt: frozenset[str], **more: Any,
) -> LossAndGrad:  # fmt: skip
    """What a call asks for."""
    scale, bias = call.scale if scale is None else scale, call.bias if bias is None else bias
    return _evaluate(call.kind, features, call.labels, scale, bias, call.options, wrt, **more)


# --- compiled graphs ------------------------------------------------------------------------------


@torch.library.custom_op("infonce::loss_and_grad", mutates_args=())
def _operator(
    kind: str,
    query: Tensor,
    key: Tensor | None,
    labels: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    normalize: bool,
    reduction: str,
    method: str,
    precision: str,
    workspace: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, and gradients of scale, bias, query, key), those not needed empty."""
    loss = KINDS[kind]
    features = [query] if key is None else [query, key]
    options = {"normalize": normalize, "reduction": reduction, "method": method,
               "precision": precision, "workspace": workspace}  # fmt: skip
    wanted = _wanted(loss, tuple(needs[: 2 + len(features)]))
    result = _evaluate(loss, features, labels, scale, bias, options, wanted)
    of = {name: getattr(result.grads, name) for name in wanted}
    for name, value in (("scale", scale), ("bias", bias)):
        if name in of and value is not None:
            of[name] = of[name].to(value.dtype, copy=True).reshape(value.shape)
    names = ["scale", "bias", *loss.arguments, *["key"] * (2 - len(features))]
    empties = (query.new_empty(0) for _ in names)
    parts = [of.get(name, empty) for name, empty in zip(names, empties, strict=True)]
    return result.loss, parts[0], parts[1], parts[2], parts[3]


@_operator.register_fake
def _shapes(
    kind: str, query: Tensor, key: Any, labels: Any, scale: Tensor, bias: Any, normalize: bool,
    reduction: str, method: str, precision: str, workspace: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = _wanted(KINDS[kind], tuple(needs[: 3 if key is None else 4]))
    double = torch.float64 in {query.dtype, query.dtype if key is None else key.dtype}
    values = {"scale": scale, "bias": bias}
    arguments = KINDS[kind].arguments
    values.update(zip(arguments, (query, key), strict=False))
    names = ["scale", "bias", *arguments, *["key"] * (2 - len(arguments))]
    parts = [
        torch.empty_like(values[n], memory_format=torch.contiguous_format)
        if n in wanted
        else query.new_empty(0)
        for n in names
    ]
    return query.new_empty((), dtype=torch.float64 if double else torch.float32), *parts


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])


def _scaled(ctx: Any, upstream: Tensor, *_unused: Any) -> Any:
    scale, bias, query, key = (
        saved * upstream if saved.numel() else None for saved in ctx.saved_tensors
    )
    return None, query, key, None, scale, bias, None, None, None, None, None, None


_operator.register_autograd(_scaled, setup_context=_remember)


# --- the functions --------------------------------------------------------------------------------


def _apply(
    kind: Loss,
    features: Sequence[Tensor],
    labels: Tensor | None = None,
    bias: Any = None,
    *,
    scale: Any = None,
    temperature: Any = None,
    metrics: bool = False,
    **options: Any,
) -> Any:
    for name, z in zip(kind.arguments, features, strict=True):
        if not isinstance(z, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(z).__name__}")
        if not z.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {z.dtype}")
        if z is not features[0] and z.device != features[0].device:
            raise ValueError(
                f"{name}: expected a tensor on {features[0].device} like {kind.arguments[0]}, "
                f"got one on {z.device}"
            )
    if temperature is not None:
        if scale is not None:
            raise ValueError("temperature, scale: expected one of them, got both")
        if isinstance(temperature, Tensor) or torch.compiler.is_compiling():
            scale = 1.0 / temperature
        else:  # checked under the name that it came by
            options["temperature"] = temperature
    for name, value in (("scale", scale), ("bias", bias)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name}: expected one number, got shape {tuple(value.shape)}")
    if torch.compiler.is_compiling():
        return _compiled(kind, features, labels, scale, bias, metrics, options)
    if isinstance(scale, Tensor) and scale.ndim:
        scale = scale.reshape(())
    if isinstance(bias, Tensor) and bias.ndim:
        bias = bias.reshape(())
    if not torch.is_grad_enabled():
        result = _evaluate(kind, features, labels, scale, bias, options, NOTHING, metrics=metrics)
        return (result.loss, result.metrics) if metrics else result.loss
    inputs = [value if isinstance(value, Tensor) else None for value in (scale, bias)]
    call = _Call(kind, labels, scale, bias, options, metrics)
    loss = _Function.apply(call, *inputs, *features)
    return (loss, call.metrics) if metrics else loss


def _compiled(
    kind: Loss,
    features: Sequence[Tensor],
    labels: Tensor | None,
    scale: Any,
    bias: Any,
    metrics: bool,
    options: dict[str, Any],
) -> Tensor:
    unknown = set(options) - set(OPTIONS)
    if metrics or unknown or options.get("reduction") == "none":
        raise ValueError(
            "in a compiled graph: expected no metrics, ids nor reduction='none' "
            f"(options are {', '.join(OPTIONS)})"
        )
    if scale is None:
        scale = kind.scale
    if scale is None:
        raise ValueError("temperature, scale: expected one of them, got neither")
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float64)
    if kind.sigmoid and not isinstance(bias, Tensor):
        bias = torch.tensor(kind.bias if bias is None else bias, dtype=torch.float64)
    settings = {**dispatch.DEFAULTS, **options}
    key = None if kind.symmetric else features[1]
    needs = [torch.is_grad_enabled() and v is not None and v.requires_grad
             for v in (scale, bias, features[0], key)]  # fmt: skip
    return _operator(
        kind.name, features[0], key, labels, scale, bias, settings["normalize"],
        settings["reduction"], settings["method"], settings["precision"], settings["workspace"],
        needs,
    )[0]  # fmt: skip


DOC = """
    Parameters
    ----------
    {arguments} : tensors [rows, features], CPU or CUDA
        float64, float32, float16 or bfloat16; the loss is float32 (float64 for float64). Of
        gradients, a locked tower gets none.
    scale, temperature : float or 0-d tensor
        One of them: logits are ``scale * <q, k>``, and scale = 1 / temperature.
        A 0-d tensor such as ``logit_scale.exp()`` gets its gradient.
    metrics : bool, default False
        Return ``(loss, infonce.Metrics)``.
    group : torch.distributed process group, optional
        Its processes share the batch: each passes its own rows, and gets the loss of all rows and
        gradients that DDP's average makes those of that loss; ``gradient_scale="global"`` where
        gradients are summed. Also `timeout` and `transport`, of `infonce.distributed`.
    labels, bias, normalize, reduction, method, precision, workspace, ids
        As in `infonce.{loss}`, as far as it has them.

    Returns
    -------
    0-d tensor, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, what came and what was expected.
    RuntimeError
        On a second derivative: gradients are not differentiable again.
"""


@losses.adapted(losses.clip_loss, DOC)
def clip_loss(image: Tensor, text: Tensor, **options: Any) -> Any:
    return _apply(losses.CLIP, (image, text), **options)


@losses.adapted(losses.info_nce_loss, DOC)
def info_nce_loss(query: Tensor, key: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
    return _apply(losses.INFO_NCE, (query, key), labels, **options)


@losses.adapted(losses.nt_xent_loss, DOC)
def nt_xent_loss(features: Tensor, **options: Any) -> Any:
    return _apply(losses.NT_XENT, (features,), **options)


@losses.adapted(losses.lit_loss, DOC)
def lit_loss(text: Tensor, image: Tensor, **options: Any) -> Any:
    return _apply(losses.LIT, (text, image), **options)


@losses.adapted(losses.siglip_loss, DOC)
def siglip_loss(image: Tensor, text: Tensor, bias: Any = None, **options: Any) -> Any:
    return _apply(losses.SIGLIP, (image, text), None, bias, **options)
