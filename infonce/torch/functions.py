"""The losses as functions of tensors, differentiable by autograd.

All go one way: `_apply` -> a node of autograd's graph in core/autograd.py (in a graph of
`torch.compile`: the operator of core/compiled.py) -> `infonce.dispatch`, as for arrays. The modules
of modules.py and the drop-in replacements call these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import docstrings, losses, spec
from ..checks import keywords, prefixes, validation
from ..checks.teacher import Teacher
from ..spec import GRAD_ONLY, VECTOR_OPTIONS, Loss, LossOptions
from .core import autograd, compiled

# Keywords of a loss in one process. Other keywords, such as `group` and `exchange`, are for a loss
# over several processes
ONE_PROCESS_OPTIONS = frozenset({*LossOptions.__annotations__, "metrics"})
NO_TEACHER: Mapping[str, Any] = {}
FEATURE_DTYPES = {getattr(torch, name) for name in validation.FLOATS}


def _apply(
    kind: Loss,
    features: Sequence[Tensor],
    options: dict[str, Any],
    labels: Tensor | None = None,
    bias: Any = None,
    teacher: Mapping[str, Any] = NO_TEACHER,
) -> Any:
    """The loss `kind` of features in the order of its arguments; with metrics if `options` ask.

    `options` are the caller's keywords; `teacher` has the arguments that only distillation has.
    Tensors as scale, temperature and bias get gradients.
    """
    if kind.locked:  # a locked tower is a constant: its tensor may require a gradient
        features = [
            z.detach() if name in kind.locked and isinstance(z, Tensor) else z
            for name, z in zip(kind.arguments, features, strict=True)
        ]
    # A call like an earlier one skips the checks below. (Labels and a teacher have to be checked in
    # each call.)
    if labels is None and not teacher:
        loss = autograd.apply_repeated(kind, features, bias, options)
        if loss is not None:
            return loss

    # Checks that only tensors need; `infonce.checks` makes the others
    if not ONE_PROCESS_OPTIONS.issuperset(options):
        function = f"infonce.torch.{kind.name}_loss()"
        require_known(function, options, {**keywords.torch_function(kind), **teacher})
        if "group" not in options:
            name = min(options.keys() - ONE_PROCESS_OPTIONS)
            raise TypeError(f"{function}: expected group with {name}, got None")
        if options["group"] is None:
            raise TypeError(
                "group: expected a process group, got None, as torch.distributed.group.WORLD is "
                "before torch.distributed.init_process_group; leave group out for one process"
            )
        labels = options.pop("labels", labels)  # nt_xent takes labels, only with a group
    kind, features, others = keywords.with_own(kind, features, options)
    options = dict(others)
    if prefixes.has_prefixes(kind, options):
        return _over_prefixes(kind, features, options, labels, bias)
    autograd.refuse_tangents(*features, bias, *options.values())
    tensors = dict(zip(kind.arguments, features, strict=True))
    tensors |= {name: teacher[name] for name in autograd.TEACHER_FEATURES if name in teacher}
    for name, z in tensors.items():
        if not isinstance(z, Tensor):
            validation.refuse_views_apart(name, z)
            raise TypeError(f"{name}: expected a tensor, got {validation.what(z)}")
        _check_tensor(kind, name, z, features[0])
    untracked = [(name, options[name]) for name in VECTOR_OPTIONS if name in options]
    if (guide := options.get("guide")) is not None:
        untracked += [
            ("guide", z) for z in (guide if isinstance(guide, (tuple, list)) else [guide])
        ]
    for name, value in untracked:
        if getattr(value, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that requires no gradient, as it gets none, got one "
                "that does: .detach() makes one"
            )

    # A temperature that is a tensor becomes a scale
    metrics = options.pop("metrics", False)
    scale, bias = _to_scalar("scale", options.pop("scale", None)), _to_scalar("bias", bias)
    temperature: Any = _to_scalar("temperature", options.pop("temperature", None))
    if isinstance(temperature, Tensor):
        if scale is not None:
            raise ValueError("temperature, scale: expected one of them, got both")
        has_value = not (torch.compiler.is_compiling() or autograd.inside_transform())
        # Only for its errors. (To read a number of a GPU would wait for the device.)
        if has_value and not temperature.is_cuda:
            validation.scale(kind, temperature, None, compiled.WIDEST_PRECISION)
        # autograd differentiates this division, which gives the temperature its gradient
        temperature, scale = None, 1.0 / temperature

    # The loss as an operator, or as a node of autograd's graph
    if torch.compiler.is_compiling():
        return compiled.apply(kind, features, labels, scale, temperature, bias, metrics, options)
    if temperature is not None:
        options["temperature"] = temperature
    for name, value in teacher.items():
        options[name] = value.detach() if isinstance(value, Tensor) else value
    call = autograd.TorchCall(kind, labels, scale, bias, options, metrics)
    loss = autograd.apply(call, features)
    return (loss, call.metrics) if metrics else loss


def _over_prefixes(
    kind: Loss, features: Sequence[Tensor], options: dict[str, Any], labels: Any, bias: Any
) -> Any:
    """The weighted sum of the losses of all prefixes (`dims`), and the metrics of the last prefix.

    Each prefix is a call of `_apply`, and autograd differentiates the sum.
    """
    for name, z in zip(kind.arguments, features, strict=True):
        if not isinstance(z, Tensor) or z.ndim < 2:
            came = validation.what(z)
            raise TypeError(f"{name}: expected a tensor [rows, features], got {came}")
    widths_and_weights, others = prefixes.read_prefixes(kind, features, options)
    outs = [  # the widest prefix comes first, as in `prefixes.loss`
        _apply(kind, [z[..., :width] for z in features], dict(others), labels, bias)
        for width, _ in reversed(widths_and_weights)
    ][::-1]
    losses = [out[0] for out in outs] if others.get("metrics") else outs
    total = sum(weight * z for (_, weight), z in zip(widths_and_weights, losses, strict=True))
    return (total, outs[-1][1]) if others.get("metrics") else total


def require_known(function: str, options: Collection[str], known: Collection[str]) -> None:
    """TypeError for an unknown keyword. `function` is the function's name in the message, `known`
    are all its keywords."""
    if refused := (GRAD_ONLY - ONE_PROCESS_OPTIONS).intersection(options):
        raise TypeError(
            f"{function}: unexpected keyword argument {min(refused)!r}: gradients are autograd's"
        )
    for name in options:  # `infonce.checks` refuses ONE_PROCESS_OPTIONS that a loss lacks
        if name not in known and name not in ONE_PROCESS_OPTIONS:
            raise keywords.unexpected(function, name, known)


def _check_tensor(kind: Loss, name: str, z: Tensor, first: Tensor) -> None:
    """The checks that only tensors need: dtype, layout, device."""
    if z.dtype not in FEATURE_DTYPES:
        raise TypeError(f"{name}: expected dtype {', '.join(validation.FLOATS)}, got {z.dtype}")
    if z.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {z.layout}")
    if z is first:
        if z.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: expected a tensor on cpu or cuda, got one on {z.device}")
    elif z.device != first.device:
        raise ValueError(
            f"{name}: expected a tensor on {first.device} like {kind.arguments[0]}, "
            f"got one on {z.device}"
        )


def _to_scalar(name: str, value: Any) -> Any:
    """A tensor of one number as a 0-d tensor; other values unchanged."""
    if torch.compiler.is_compiling() and isinstance(value, np.ndarray):  # also a scalar of NumPy
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, "full_tensor"):  # a DTensor, as fully_shard makes them
        value = value.full_tensor()
    if not value.ndim:
        return value
    if value.numel() != 1:
        came = validation.what(value)
        raise TypeError(f"{name}: expected a number or a tensor of one number, got {came}")
    return value.reshape(())


DOC = """
    >>> loss = infonce.torch.{loss}({call_arguments}, scale=20.0, normalize=True)
    >>> loss.backward()

    Parameters
    ----------
    {arguments} : tensors [rows, features], CPU or CUDA
        float64, float32, float16 or bfloat16; the loss is float32 (float64 for float64). A locked
        tower gets no gradient.
    scale, temperature : float or 0-d tensor
        One of them: logits are ``scale * <q, k>``, and scale = 1 / temperature.
        A 0-d tensor such as ``logit_scale.exp()`` gets its gradient.
    metrics : bool, default False
        Return ``(loss, infonce.Metrics)``.
    group : torch.distributed process group, optional
        Its processes share the batch: each passes its own rows, and gets the loss of all rows.
        DDP's average of the gradients is the gradient of that loss; pass
        ``gradient_scale="global"`` if gradients are summed. None is an error, because
        ``torch.distributed.group.WORLD`` is None until ``torch.distributed.init_process_group`` is
        called: for one process leave `group` out. Also `timeout`, `transport` and
        `exchange`, of `infonce.distributed`.
    {vectors}, guide : tensors, optional
        As in `infonce.{loss}`, as far as it has them; a pair of tensors for `guide`. They get no
        gradient.
    labels, bias, {integers}, {options}
        As in `infonce.{loss}`, as far as it has them.

    Returns
    -------
    0-d tensor, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, what came and what was expected. ValueError also for
        these tensors if they require a gradient: {vectors}, guide.
    RuntimeError
        For second derivatives, forward mode and `torch.vmap`, which are not supported.
        `torch.func.grad` and `vjp` are.
"""


@docstrings.adapted(losses.clip_loss, DOC, keywords.torch_function)
def clip_loss(image: Tensor, text: Tensor, **options: Any) -> Any:
    return _apply(spec.CLIP, (image, text), options)


@docstrings.adapted(losses.info_nce_loss, DOC, keywords.torch_function)
def info_nce_loss(query: Tensor, key: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
    return _apply(spec.INFO_NCE, (query, key), options, labels)


@docstrings.adapted(losses.nt_xent_loss, DOC, keywords.torch_function)
def nt_xent_loss(features: Tensor, **options: Any) -> Any:
    return _apply(spec.NT_XENT, (features,), options)


@docstrings.adapted(losses.lit_loss, DOC, keywords.torch_function)
def lit_loss(text: Tensor, image: Tensor, **options: Any) -> Any:
    return _apply(spec.LIT, (text, image), options)


@docstrings.adapted(losses.siglip_loss, DOC, keywords.torch_function)
def siglip_loss(image: Tensor, text: Tensor, bias: Any = None, **options: Any) -> Any:
    return _apply(spec.SIGLIP, (image, text), options, bias=bias)


@docstrings.adapted(losses.sup_con_loss, DOC, keywords.torch_function)
def sup_con_loss(features: Tensor, labels: Tensor, **options: Any) -> Any:
    return _apply(spec.SUP_CON, (features,), options, labels)


@docstrings.adapted(losses.gte_loss, DOC, keywords.torch_function)
def gte_loss(query: Tensor, key: Tensor, **options: Any) -> Any:
    return _apply(spec.GTE, (query, key), options)


@keywords.require_positional
def distill_loss(
    query: Tensor, key: Tensor, teacher_query: Tensor, teacher_key: Tensor, *,
    teacher_temperature: Any = None, teacher_scale: Any = None, two_sided: bool = True,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Distillation loss of `infonce.distill_loss`, for autograd.

    >>> loss = infonce.torch.distill_loss(query, key, teacher_query, teacher_key, scale=20.0)
    >>> loss.backward()

    ``loss = - mean_i sum_j p^T_ij log p_ij``, of queries and, by default, of keys as well.

    Parameters
    ----------
    query, key : tensors [M, D], [N, D], CPU or CUDA
    teacher_query, teacher_key : tensors [M, E], [N, E]
    teacher_temperature, teacher_scale : float or 0-d tensor, optional
        The teacher's arguments get no gradient.
    two_sided : bool, default True
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
    RuntimeError
        As of `infonce.torch.clip_loss`.

    References
    ----------
    Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015.
    """
    teacher = Teacher(teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided)
    named = dict(zip(autograd.TEACHER_OPTIONS, teacher, strict=True))
    run: Any = _apply
    if torch.compiler.is_compiling():  # the compiled graph ends here, and goes on after the loss
        run = torch.compiler.disable(_apply)
    return run(teacher.loss, (query, key), options, teacher=named)
