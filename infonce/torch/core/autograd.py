"""The losses as nodes of autograd's graph.

Gradients are computed together with the loss where any are needed, in the pass that the loss takes
anyway, and scaled by the upstream gradient when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import dispatch
from ...result import LossAndGrad, Metrics
from ...spec import VECTORS, Loss

NOTHING: frozenset[str] = frozenset()
UNTRACKED = ("labels", "ids", *VECTORS)
AGAIN = "gradients of the losses of infonce cannot be differentiated again"
FORWARD = (
    "forward mode (torch.func.jvp, jacfwd, hessian) is not supported by the losses of infonce: use "
    "backward() or torch.func.grad"
)
BATCHED = (
    "torch.vmap (also in torch.func.jacrev, is_grads_batched) is not supported by the losses of "
    "infonce: call them in a loop, batch by batch"
)

transformed = torch._C._are_functorch_transforms_active  # whether in torch.func.grad, vmap, ...
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched passes them
# Returns the callback by which torch.compile compiles Python functions that run after a graph
# break; else None. The losses are run without it: it fails in Numba's own functions.
_compile_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def evaluate(
    kind: Loss,
    features: Sequence[Tensor],
    labels: Tensor | None,
    scale: Any,
    bias: Any,
    options: dict[str, Any],
    wrt: frozenset[str],
    **more: Any,
) -> LossAndGrad:
    """Loss and the gradients named in `wrt`, as tensors; torch allocates those of features."""
    given = {**options, **more, "scale": scale, "wrt": wrt}
    grad_buffers = {}
    for name, z in zip(kind.arguments, features, strict=True):
        if name in wrt:
            grad_buffers[name] = torch.empty_like(z, memory_format=torch.contiguous_format)
    group = given.pop("group", None)
    if group is None:
        return dispatch.loss_and_grad(kind, features, labels, bias, given, grad_buffers)
    from . import process_group

    given["out"] = grad_buffers
    return process_group.loss_and_grad(kind, features, labels, bias, group, given)


_wanted: dict[tuple[Loss, tuple[bool, ...]], frozenset[str]] = {}


def wanted_of(kind: Loss, needs: tuple[bool, ...]) -> frozenset[str]:
    """Names of the arguments that need a gradient, `needs` being those of (scale, bias, *features).

    A locked tower gets none: its features are taken as constants.
    """
    wanted = _wanted.get((kind, needs))
    if wanted is None:
        names = zip(("scale", "bias", *kind.arguments), needs, strict=True)
        wanted = frozenset(name for name, need in names if need and name not in kind.locked)
        _wanted[kind, needs] = wanted
    return wanted


@dataclass(slots=True)
class Call:
    """A call: its inputs that autograd does not track, and results for the backward pass."""

    kind: Loss
    labels: Tensor | None
    scale: Any  # unused where it is a tensor: an input of the node
    bias: Any
    options: dict[str, Any]
    with_metrics: bool
    # results:
    metrics: Metrics | None = None
    wanted: frozenset[str] = NOTHING
    grads: list[Tensor | None] | None = None  # until a backward pass takes them

    @property
    def untracked(self) -> tuple[Tensor | None, ...]:
        """Labels, ids and vectors where they are tensors: inputs that get no gradient."""
        given = {"labels": self.labels, **self.options}
        return tuple(x if isinstance(x := given.get(name), Tensor) else None for name in UNTRACKED)

    def with_untracked(self, tensors: Sequence[Tensor | None]) -> Call:
        """The same call, with `tensors` in the place of its own."""
        given = {n: x for n, x in zip(UNTRACKED, tensors, strict=True) if x is not None}
        labels = given.pop("labels", self.labels)
        return replace(self, labels=labels, options={**self.options, **given})


def apply(call: Call, features: Sequence[Tensor]) -> Tensor:
    """The loss: as a node of the graph, where there is one. Metrics are left in `call`."""
    scale, bias = (x if isinstance(x, Tensor) else None for x in (call.scale, call.bias))
    if transformed():
        return _Transformed.apply(call, *call.untracked, scale, bias, *features)
    if torch.is_grad_enabled():
        return _Function.apply(call, scale, bias, *features)
    result = _computed(call, scale, bias, features, NOTHING, metrics=call.with_metrics)
    call.metrics = result.metrics
    return result.loss


def _computed(
    call: Call, scale: Tensor | None, bias: Tensor | None, features: Sequence[Tensor],
    wrt: frozenset[str], **more: Any,
) -> LossAndGrad:  # fmt: skip
    """Loss and gradients of a call; `scale` and `bias` where they are inputs of the node."""
    scale, bias = call.scale if scale is None else scale, call.bias if bias is None else bias
    compiling = torch.compiler.is_compiling() or _compile_callback()
    run = torch.compiler.disable(evaluate) if compiling else evaluate
    return run(call.kind, features, call.labels, scale, bias, call.options, wrt, **more)


def _of_inputs(kind: Loss, grads: Any, wanted: frozenset[str]) -> list[Tensor | None]:
    """Gradients in the order of the inputs."""
    return [getattr(grads, n) if n in wanted else None for n in ("scale", "bias", *kind.arguments)]


class _ReverseModeOnly(torch.autograd.Function):
    """Errors for what the losses do not support: forward mode and vmap."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError(FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        raise RuntimeError(BATCHED)


class _Function(_ReverseModeOnly):
    """loss = f(scale, bias, *features)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: Call, scale: Tensor | None, bias: Tensor | None, *features: Tensor
    ) -> Tensor:
        wanted = wanted_of(call.kind, ctx.needs_input_grad[1:])
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
            raise RuntimeError(f"create_graph: expected False, got True: {AGAIN}")
        if _is_batched(upstream):
            raise RuntimeError(BATCHED)
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
        return None, *grads


# --- torch.func -----------------------------------------------------------------------------------
# Its transforms need functions with `setup_context`, and a backward pass that is such a function
# itself. These take time that small batches notice: they serve the transforms alone. `forward` does
# not know which inputs need a gradient, so gradients are computed in the backward pass.


def _split(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The untracked inputs, and the others."""
    return inputs[: len(UNTRACKED)], inputs[len(UNTRACKED) :]


class _Transformed(_ReverseModeOnly):
    """loss = f(*untracked, scale, bias, *features)."""

    @staticmethod
    def forward(call: Call, *inputs: Any) -> Tensor:  # type: ignore[override]
        untracked, (scale, bias, *features) = _split(inputs)
        result = _computed(call.with_untracked(untracked), scale, bias, features, NOTHING,
                           metrics=call.with_metrics)  # fmt: skip
        call.metrics = result.metrics
        return result.loss

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        wanted = wanted_of(ctx.call.kind, _split(ctx.needs_input_grad[1:])[1])
        grads = _Gradients.apply(ctx.call, wanted, upstream, *ctx.saved_tensors)
        return None, *[None] * len(UNTRACKED), *grads


class _Gradients(_ReverseModeOnly):
    """Gradients of scale, bias and features."""

    @staticmethod
    def forward(  # type: ignore[override]
        call: Call, wanted: frozenset[str], upstream: Tensor, *inputs: Any
    ) -> tuple[Tensor | None, ...]:
        untracked, (scale, bias, *features) = _split(inputs)
        call = call.with_untracked(untracked)
        result = _computed(call, scale, bias, features, wanted, grad_out=upstream)
        return tuple(_of_inputs(call.kind, result.grads, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> NoReturn:
        raise RuntimeError(AGAIN)
