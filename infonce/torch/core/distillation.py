"""Distillation for autograd: `distill_loss`, and the node of autograd's graph that it applies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import losses
from ...checks import validation
from .autograd import NO_SECOND_DERIVATIVE, empty_gradients

GRADIENT_INPUTS = ("scale", "query", "key")  # arguments that may have a gradient: the node's inputs


class _Distillation(torch.autograd.Function):
    """loss = f(scale, query, key).

    The forward pass computes the gradients; with reduction="none" the backward pass does, because
    each row has an upstream gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, options: dict[str, Any], teacher: tuple[Tensor, Tensor], *inputs: Any
    ) -> Tensor:
        wanted = [
            n for n, need in zip(GRADIENT_INPUTS, ctx.needs_input_grad[2:], strict=True) if need
        ]
        ctx.in_backward = options.get("reduction") == "none"
        result = _evaluate(options, teacher, inputs, () if ctx.in_backward else wanted)
        ctx.options, ctx.teacher, ctx.wanted = options, teacher, wanted
        ctx.dtypes = [getattr(z, "dtype", None) for z in inputs]
        grads = [
            None if ctx.in_backward else getattr(result.grads, name) for name in GRADIENT_INPUTS
        ]
        tensors = [z if isinstance(z, Tensor) else None for z in inputs]
        ctx.plain_scale = None if isinstance(inputs[0], Tensor) else inputs[0]
        ctx.save_for_backward(*(tensors if ctx.in_backward else grads))
        loss: Tensor = result.loss
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph: expected False, got True: {NO_SECOND_DERIVATIVE}")
        grads = ctx.saved_tensors
        if ctx.in_backward:
            scale, *features = ctx.saved_tensors
            inputs = [ctx.plain_scale if scale is None else scale, *features]
            result = _evaluate(ctx.options, ctx.teacher, inputs, ctx.wanted, grad_out=upstream)
            grads, upstream = [getattr(result.grads, name) for name in GRADIENT_INPUTS], None
        return None, None, *(
            None if grad is None else (grad if upstream is None else grad * upstream).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        )  # fmt: skip


def _evaluate(
    options: dict[str, Any], teacher: tuple[Tensor, Tensor], inputs: Any, wrt: Any, **more: Any
) -> Any:
    """Loss and the gradients named in `wrt`, in one process or over the ranks of `group`.

    `inputs` are (scale, query, key). Over ranks, feature gradients are multiplied by the number of
    ranks, because DDP averages over ranks (``gradient_scale="ddp"``). Gradients of float16 features
    are float32 until they are multiplied by the upstream gradient (`spec.DTYPES_UNTIL_UPSTREAM`).
    """
    scale, query, key = (z.detach() if isinstance(z, Tensor) else z for z in inputs)
    teacher_query, teacher_key = (z.detach() for z in teacher)
    keywords = {**options, **more, "scale": scale, "wrt": wrt}
    keywords["out"] = empty_gradients({"query": query, "key": key}, wrt, "grad_out" in more)
    function: Any = losses.distill_loss_and_grad
    if (group := keywords.pop("group", None)) is not None:
        from infonce import distributed

        from . import process_group

        function = distributed.distill_loss_and_grad
        keywords = {"gradient_scale": "ddp", **keywords, "comm": process_group.connect(group)}
    return function(query, key, teacher_query, teacher_key, **keywords)


def distill_loss(
    query: Tensor, key: Tensor, teacher_query: Tensor, teacher_key: Tensor, *,
    temperature: Any = None, scale: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Distillation loss of `infonce.distill_loss`, for autograd.

    >>> loss = infonce.torch.distill_loss(query, key, teacher_query, teacher_key, scale=20.0)
    >>> loss.backward()

    ``loss = - mean_i sum_j p^T_ij log p_ij``, of queries and, by default, of keys as well.

    Parameters
    ----------
    query, key : tensors [M, D], [N, D], CPU or CUDA
    teacher_query, teacher_key : tensors [M, E], [N, E]
        They get no gradient.
    scale, temperature : float or 0-d tensor
        One of them; a tensor gets its gradient.
    group : torch.distributed process group, optional
        The loss is that of the rows of all its processes, and gradients are for the rows of this
        process, as in `infonce.distributed.distill_loss`, with ``gradient_scale="ddp"``.
    options
        As in `infonce.distill_loss`, and with `group` as in `infonce.distributed.distill_loss`.

    Returns
    -------
    0-d tensor, or [M] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, what came and what was expected.

    References
    ----------
    Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015.
    """
    names = "query", "key", "teacher_query", "teacher_key"
    tensors = query, key, teacher_query, teacher_key
    for name, z in zip(names, tensors, strict=True):
        if not isinstance(z, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {validation.what(z)}")
        if z.device != query.device:
            raise ValueError(
                f"{name}: expected a tensor on {query.device} like query, got one on {z.device}"
            )
    if (temperature is None) == (scale is None):
        came = "neither" if scale is None else "both"
        raise ValueError(f"temperature, scale: expected one of them, got {came}")
    scale = 1.0 / temperature if scale is None else scale
    if isinstance(scale, Tensor):
        scale = scale.reshape(())
    teacher = teacher_query, teacher_key
    run: Any = _Distillation.apply
    if torch.compiler.is_compiling():  # the compiled graph ends here, and goes on after the loss
        run = torch.compiler.disable(run)
    loss: Tensor = run(options, teacher, scale, query, key)
    return loss
