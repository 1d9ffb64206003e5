"""The scale that a module learns: exp(log_scale) within limits, as `modules._LossModule` uses it.

Beyond a limit the scale is the limit, and the gradient is that at the limit, if a step against it
leads back. A gradient whose step would lead farther away becomes 0, so that a training that goes on
at the limit does not carry the parameter away from it: it remains about one step of the optimizer
beyond. A clamp of autograd has no gradient beyond the limit, and would keep the parameter there. A
clamp in place would write to a tensor that may not be the module's own: under `functional_call`, in
replicas, views of a flat parameter, and what `parametrize` computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import TENSOR_TYPES, _ReverseModeOnly, inside_transform, refuse_tangents


def learned_scale(log_scale: Tensor, least: float, largest: float) -> Tensor:
    """exp(log_scale), at least `least` and at most `largest`; its gradient: see above."""
    if torch.compiler.is_compiling() and not inside_transform():
        return _operator(log_scale, least, largest)[0]
    # Most scales are within the limits. (On a GPU, to read one would wait for the device.)
    if type(log_scale) in TENSOR_TYPES and log_scale.is_cpu and not inside_transform():
        scale = log_scale.exp()
        if least <= scale.item() <= largest:
            return scale
    limited: Tensor = _LimitedExp.apply(log_scale, least, largest)[0]
    return limited


def _compute(log_scale: Tensor, least: float, largest: float) -> tuple[Tensor, Tensor]:
    """The scale, and by how much exp(log_scale) is beyond its limits."""
    refuse_tangents(log_scale)
    unlimited = log_scale.exp()
    scale = unlimited.clamp(least, largest)
    return scale, unlimited - scale


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)


def _backward(ctx: Any, upstream: Tensor, _: Any) -> Any:
    scale, excess = ctx.saved_tensors
    gradient = upstream * scale
    return gradient.masked_fill(excess * gradient < 0, 0.0), None, None


class _LimitedExp(_ReverseModeOnly):
    """The node in eager calls and inside of `torch.func`."""

    forward = staticmethod(_compute)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_backward)


# The same in a graph of torch.compile. An exported program would lose the gradient of a node
_operator = torch.library.custom_op("infonce::learned_scale", _compute, mutates_args=(), schema=(
    "(Tensor log_scale, float least, float largest) -> (Tensor, Tensor)"
))  # fmt: skip
_operator.register_fake(lambda x, *_: (torch.empty_like(x), torch.empty_like(x)))
_operator.register_autograd(_backward, setup_context=_save_for_backward)
