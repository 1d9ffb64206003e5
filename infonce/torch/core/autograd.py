"""The losses as nodes of autograd's graph: `functions._apply` calls `apply_repeated` and `apply`.

If any gradients are needed, the forward pass computes loss and gradients together, and the backward
pass multiplies the gradients by the upstream gradient. Until then, gradients of float16 features
are kept in float32 (`DTYPES_UNTIL_UPSTREAM`), in twice their memory, so that they do not underflow
before a GradScaler's factor arrives. The backward pass computes the logits again, in twice the
time, in three cases: reduction="none", a second backward pass, and inside of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import dispatch
from ...checks.rows import is_pair
from ...checks.teacher import Teacher
from ...result import LossAndGrad, Metrics
from ...spec import ARRAY_OPTIONS, DTYPES_UNTIL_UPSTREAM, INTEGER_OPTIONS, Loss
from . import repeated

NOTHING: frozenset[str] = frozenset()
ONE_OR_PAIR = (*INTEGER_OPTIONS, "guide")  # options that are one array, or (queries', keys')
# The fields of `Teacher`, as options of distillation
TEACHER_FEATURES = "teacher_query", "teacher_key"
TEACHER_ARRAYS = (*TEACHER_FEATURES, "teacher_temperature", "teacher_scale")
TEACHER_OPTIONS = (*TEACHER_ARRAYS, "two_sided")
ONE_ARRAY = (*ARRAY_OPTIONS, *TEACHER_ARRAYS)
POSSIBLE_ARRAYS = frozenset({"temperature", *ONE_OR_PAIR, *ONE_ARRAY})  # may be arrays
# Names of the arguments for which autograd computes no gradient
UNTRACKED = (
    "labels", *(f"{side} {n}" for n in ONE_OR_PAIR for side in ("row", "column")), *ONE_ARRAY
)  # fmt: skip
NO_TENSORS = (None,) * len(UNTRACKED)
# Dtype of features -> dtype of their gradients until these are multiplied by the upstream gradient
TENSOR_DTYPES_UNTIL_UPSTREAM = {
    getattr(torch, name): getattr(torch, other) for name, other in DTYPES_UNTIL_UPSTREAM.items()
}
NO_SECOND_DERIVATIVE = "gradients of the losses of infonce cannot be differentiated again"
CREATE_GRAPH = f"create_graph: expected False, got True: {NO_SECOND_DERIVATIVE}"
FORWARD = (
    "forward mode (torch.func.jvp, jacfwd, hessian) is not supported by the losses of infonce: use "
    "backward() or torch.func.grad"
)
BATCHED = (
    "torch.vmap (also in torch.func.jacrev, is_grads_batched) is not supported by the losses of "
    "infonce: call them in a loop, batch by batch"
)

TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
forward_ad = torch.autograd.forward_ad
inside_transform = torch._C._are_functorch_transforms_active  # inside torch.func.grad, vmap, ...?
# Whether a tensor stands for a batch of upstream gradients (torch.autograd.grad, is_grads_batched)
_is_batched = torch._C._functorch.is_legacy_batchedtensor
# Returns the callback with which torch.compile compiles Python functions after a graph break, or
# None. The losses run without the callback, because it fails in Numba's own functions.
_compile_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def empty_gradients(
    features: Mapping[str, Tensor], wrt: Container[str], has_upstream: bool
) -> dict[str, Tensor]:
    """Memory of PyTorch for the gradients named in `wrt`, of `features` by name.

    Without the upstream gradient they have the dtypes of TENSOR_DTYPES_UNTIL_UPSTREAM."""
    dtypes: Mapping[Any, Any] = {} if has_upstream else TENSOR_DTYPES_UNTIL_UPSTREAM
    return {
        name: torch.empty_like(z, dtype=dtypes.get(z.dtype), memory_format=torch.contiguous_format)
        for name, z in features.items()
        if name in wrt
    }


def refuse_tangents(*values: Any) -> None:
    """RuntimeError if a tensor, also in a tuple or list, has a tangent: the losses would lose it.

    Inside of `torch.func` and in a graph that is being compiled, nodes and operators refuse it."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0 or inside_transform():
        return
    for value in values:
        if isinstance(value, (tuple, list)):
            refuse_tangents(*value)
        elif isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(FORWARD)


def evaluate(
    kind: Loss, features: Sequence[Tensor], labels: Tensor | None, scale: Any, bias: Any,
    options: dict[str, Any], wrt: frozenset[str], **more: Any,
) -> LossAndGrad:  # fmt: skip
    """Loss and gradients named in `wrt`, as tensors. `more`: `metrics`, and `grad_out` if known."""
    is_plain = labels is None and "grad_out" not in more and more.get("metrics", False) is False
    if is_plain and features[0].is_cpu and options.get("group") is None:
        result = repeated.evaluate(kind, features, scale, bias, options, wrt)
        if result is not None:  # None: the call is checked in full below
            loss, grads = result
            names = (*kind.arguments, "scale", "bias")[: None if kind.sigmoid else -1]
            return LossAndGrad(loss, kind.grads(*map(grads.get, names)))
    all_options = {**options, **more, "scale": scale, "wrt": wrt}
    features_by_name = dict(zip(kind.arguments, features, strict=True))
    grad_buffers = empty_gradients(features_by_name, wrt, "grad_out" in more)
    group = all_options.pop("group", None)
    if group is None:
        teacher = None
        if kind.taught:
            teacher = Teacher(*[all_options.pop(name) for name in TEACHER_OPTIONS])
        return dispatch.loss_and_grad(
            kind, features, labels, bias, all_options, grad_buffers, teacher
        )
    from . import process_group

    all_options["out"] = grad_buffers
    return process_group.loss_and_grad(kind, features, labels, bias, group, all_options)


_wanted: dict[tuple[Loss, tuple[bool, ...]], frozenset[str]] = {}  # of `differentiated_names`


def differentiated_names(kind: Loss, needs: tuple[bool, ...]) -> frozenset[str]:
    """Names of the arguments that need a gradient.

    `needs`: for each of (scale, bias, *features), whether autograd needs its gradient. Features of
    a locked tower are constants, which have no gradient.
    """
    wanted = _wanted.get((kind, needs))
    if wanted is None:
        names = zip(("scale", "bias", *kind.arguments), needs, strict=True)
        wanted = frozenset(name for name, need in names if need and name not in kind.locked)
        _wanted[kind, needs] = wanted
    return wanted


def untracked_values(labels: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of UNTRACKED, in its order. One array instead of a pair is the value of "row"."""
    get = options.get
    sides: list[Any] = []
    for name in ONE_OR_PAIR:
        value = get(name)
        two_items = isinstance(value, (tuple, list)) and len(value) == 2
        has_both = is_pair(value) or (two_items and name == "guide")
        pair: Any = value if has_both else (value, None)
        sides += pair
    return (labels, *sides, *[get(name) for name in ONE_ARRAY])


def split_untracked(values: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """Split values in the order of UNTRACKED into the labels, and the others by option name, of
    options that are given."""
    labels, *sides = values[: 1 + 2 * len(ONE_OR_PAIR)]
    arrays = dict(zip(ONE_ARRAY, values[1 + 2 * len(ONE_OR_PAIR) :], strict=True))
    for name, rows, columns in zip(ONE_OR_PAIR, sides[::2], sides[1::2], strict=True):
        arrays[name] = rows if columns is None else (rows, columns)
    return labels, {name: value for name, value in arrays.items() if value is not None}


@dataclass(slots=True)
class TorchCall:
    """A call: its arguments except the inputs of the node, and results for the backward pass."""

    kind: Loss
    labels: Tensor | None
    scale: Any  # as `bias`, not read if it is a tensor, because then it is an input of the node
    bias: Any
    options: dict[str, Any]
    with_metrics: bool
    # Results
    loss: Tensor | None = None  # computed by `apply_repeated`, until the node returns it
    metrics: Metrics | None = None
    wanted: frozenset[str] = NOTHING  # names of the arguments that need a gradient
    grads: list[Tensor | None] | None = None  # for (scale, bias, *features), until `backward`

    @property
    def untracked(self) -> tuple[Tensor | None, ...]:
        """The values of UNTRACKED, with None for values that are not tensors."""
        if self.labels is None and POSSIBLE_ARRAYS.isdisjoint(self.options):
            return NO_TENSORS
        return tuple(
            [
                x if isinstance(x, Tensor) else None
                for x in untracked_values(self.labels, self.options)
            ]
        )

    def with_untracked(self, tensors: Sequence[Tensor | None]) -> TorchCall:
        """The same call with `tensors` (in the order of UNTRACKED; None: keep the value)."""
        values = [
            value if tensor is None else tensor
            for value, tensor in zip(
                untracked_values(self.labels, self.options), tensors, strict=True
            )
        ]
        labels, arrays = split_untracked(values)
        return replace(self, labels=labels, options={**self.options, **arrays})

    def copy_arrays(self) -> None:
        """Replace arrays by copies, because the caller may change arrays before the backward pass.
        (Tensors are not copied: autograd raises an error if a saved tensor has changed.)"""
        options = self.options
        if self.labels is not None:
            self.labels = _copy_array(self.labels)
        self.scale, self.bias = _copy_array(self.scale), _copy_array(self.bias)
        for name in POSSIBLE_ARRAYS.intersection(options):
            options[name] = _copy_array(options[name])


def _copy_array(value: Any) -> Any:
    """A copy of an array, or of each array of a pair; other values as they are."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor):  # autograd cannot save an inference tensor, so it is cloned
        return value.clone() if value.is_inference() else value
    if isinstance(value, (list, tuple)):
        return [_copy_array(item) for item in value]
    return value.copy() if hasattr(value, "copy") else value


def apply(call: TorchCall, features: Sequence[Tensor]) -> Tensor:
    """The loss, as a node of the graph if gradients are enabled. Stores metrics in `call`."""
    scale, bias = (x if isinstance(x, Tensor) else None for x in (call.scale, call.bias))
    if inside_transform():
        return _TransformableLossNode.apply(call, *call.untracked, scale, bias, *features)
    if torch.is_grad_enabled():
        return _LossNode.apply(call, scale, bias, *features)
    result = _compute(call, scale, bias, features, NOTHING, metrics=call.with_metrics)
    call.metrics = result.metrics
    return result.loss


def apply_repeated(
    kind: Loss, features: Sequence[Tensor], bias: Any, options: dict[str, Any]
) -> Tensor | None:
    """The loss of a call like an earlier one (`repeated`), without checks, as `apply` returns it.
    None (no such call, gradients off, forward mode, torch.compile, torch.func): the caller checks
    and applies."""
    if torch.compiler.is_compiling() or _compile_callback() or inside_transform():
        return None
    if not torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return None
    options = {**options}
    scale = options.pop("scale", None)
    if "temperature" in options:  # move it to the end, where `functions._apply` puts it too: the
        options["temperature"] = options.pop("temperature")  # template's key has the options' order
    inputs = [x if isinstance(x, Tensor) else None for x in (scale, bias)]
    numbers = [x for x in inputs if x is not None]
    if not TENSOR_TYPES.issuperset(map(type, (*features, *numbers))) or any(
        [x.ndim for x in numbers]
    ):  # a DTensor, say, which the caller gathers first
        return None
    needs = [x is not None and x.requires_grad for x in (*inputs, *features)]
    wanted = differentiated_names(kind, tuple(needs))
    result = repeated.evaluate(kind, features, scale, bias, options, wanted, may_be_first=False)
    if result is None or not wanted:
        return None if result is None else result[0]
    loss, grads = result
    call = TorchCall(kind, None, scale, bias, options, False, loss, wanted=wanted)
    call.grads = [grads.get(name) for name in ("scale", "bias", *kind.arguments)]
    node: Tensor = _LossNode.apply_unchecked(call, *inputs, *features)
    return node


def _compute(
    call: TorchCall, scale: Tensor | None, bias: Tensor | None, features: Sequence[Tensor],
    wrt: frozenset[str], **more: Any,
) -> LossAndGrad:  # fmt: skip
    """Compute the loss, and the gradients named in `wrt`. `scale` and `bias` are inputs of the
    node; None: the value in `call` is read."""
    scale, bias = call.scale if scale is None else scale, call.bias if bias is None else bias
    compiling = torch.compiler.is_compiling() or _compile_callback()
    run = torch.compiler.disable(evaluate) if compiling else evaluate
    return run(call.kind, features, call.labels, scale, bias, call.options, wrt, **more)


def _order_by_inputs(kind: Loss, grads: Any, wanted: frozenset[str]) -> list[Tensor | None]:
    """Gradients for (scale, bias, *features), the node's inputs; None if not in `wanted`."""
    return [getattr(grads, n) if n in wanted else None for n in ("scale", "bias", *kind.arguments)]


class _ReverseModeOnly(torch.autograd.Function):
    """Base of the nodes, which raises errors for forward mode and vmap (both not supported)."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError(FORWARD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        raise RuntimeError(BATCHED)


class _LossNode(_ReverseModeOnly):
    """loss = f(scale, bias, *features), outside of `torch.func`."""

    @classmethod
    def apply_unchecked(cls, *inputs: Any) -> Any:
        """`apply` of autograd without its check for transforms: `apply_repeated` has checked."""
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: TorchCall, *inputs: Any
    ) -> Tensor:
        if call.loss is not None:  # a repeated call: loss and gradients are already computed
            ctx.call, ctx.has_untracked = call, False
            loss, call.loss = call.loss, None
            ctx.dtypes = None  # `backward` converts nothing: feature gradients have final dtypes
            for x in inputs[:2]:  # gradients of scale and bias have the dtype of the loss
                if x is not None and x.dtype != loss.dtype:
                    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
            ctx.save_for_backward(*inputs)
            return loss
        scale, bias, *features = inputs
        wanted = differentiated_names(call.kind, ctx.needs_input_grad[1:])
        # With reduction="none" each row has an upstream gradient: `backward` computes the gradients
        per_row = call.options.get("reduction") == "none"
        wanted_now = NOTHING if per_row else wanted
        result = _compute(call, scale, bias, features, wanted_now, metrics=call.with_metrics)
        call.metrics, call.wanted = result.metrics, wanted
        if wanted_now:
            call.grads = _order_by_inputs(call.kind, result.grads, wanted_now)
        if wanted:
            call.copy_arrays()
            ctx.call, ctx.dtypes = call, [None if x is None else x.dtype for x in inputs]
            untracked = call.untracked  # tensors that need no gradient, such as labels and weights
            ctx.has_untracked = untracked is not NO_TENSORS
            ctx.save_for_backward(*(untracked if ctx.has_untracked else ()), *inputs)
        return result.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(CREATE_GRAPH)
        if _is_batched(upstream):
            raise RuntimeError(BATCHED)
        call = ctx.call
        grads, call.grads = call.grads, None
        if grads is not None:
            # The first backward pass uses up the gradients of the forward pass: it returns them, or
            # multiplies them, mostly in place. A second backward pass (retain_graph) computes the
            # gradients again. On a GPU `item()` would wait, so only upstream on the CPU is read.
            is_one = type(upstream) is Tensor and upstream.is_cpu and upstream.item() == 1.0
            dtypes = ctx.dtypes
            if dtypes is None:
                if is_one:
                    return None, *grads
                dtypes = [None if grad is None else grad.dtype for grad in grads]
            grads = [
                grad if grad is None or (is_one and grad.dtype == dtype)
                else _multiply(grad, upstream, dtype)
                for grad, dtype in zip(grads, dtypes, strict=True)
            ]  # fmt: skip
        else:
            untracked, saved = NO_TENSORS, ctx.saved_tensors
            if ctx.has_untracked:
                untracked, saved = _split(saved)
            scale, bias, *features = saved
            call = call.with_untracked(untracked)
            result = _compute(call, scale, bias, features, call.wanted, grad_out=upstream)
            grads = _order_by_inputs(call.kind, result.grads, call.wanted)
        return None, *grads


def _multiply(grad: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * upstream in `dtype`, rounded once; in place if `grad` has that dtype."""
    if grad.dtype == dtype:
        return grad.mul_(upstream)
    return torch.mul(grad, upstream, out=grad.new_empty(grad.shape, dtype=dtype))


def _split(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split inputs into the values of UNTRACKED, and (scale, bias, *features)."""
    return inputs[: len(UNTRACKED)], inputs[len(UNTRACKED) :]


# --- torch.func -----------------------------------------------------------------------------------
# Nodes for the transforms of `torch.func`, which need a method `setup_context`, also in the node of
# the backward pass. Such nodes take longer, which small batches notice, so other calls do not use
# them. Their `forward` does not know which inputs need a gradient: `backward` computes gradients.


class _TransformableLossNode(_ReverseModeOnly):
    """loss = f(*untracked, scale, bias, *features), inside of `torch.func`."""

    @staticmethod
    def forward(call: TorchCall, *inputs: Any) -> Tensor:  # type: ignore[override]
        untracked, (scale, bias, *features) = _split(inputs)
        result = _compute(call.with_untracked(untracked), scale, bias, features, NOTHING,
                           metrics=call.with_metrics)  # fmt: skip
        call.metrics = result.metrics
        return result.loss

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.call.copy_arrays()
        untracked, others = _split(inputs[1:])
        # copies, because autograd does not notice changes of untracked tensors in place
        copies = [None if x is None else x.clone() for x in untracked]
        ctx.save_for_backward(*copies, *others)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        wanted = differentiated_names(ctx.call.kind, _split(ctx.needs_input_grad[1:])[1])
        grads = _GradientNode.apply(ctx.call, wanted, upstream, *ctx.saved_tensors)
        return None, *[None] * len(UNTRACKED), *grads


class _GradientNode(_ReverseModeOnly):
    """The gradients of scale, bias and features, as a node: `torch.func` needs one."""

    @staticmethod
    def forward(  # type: ignore[override]
        call: TorchCall, wanted: frozenset[str], upstream: Tensor, *inputs: Any
    ) -> tuple[Tensor | None, ...]:
        untracked, (scale, bias, *features) = _split(inputs)
        call = call.with_untracked(untracked)
        result = _compute(call, scale, bias, features, wanted, grad_out=upstream)
        return tuple(_order_by_inputs(call.kind, result.grads, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because `backward` only raises an error."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> NoReturn:
        raise RuntimeError(NO_SECOND_DERIVATIVE)
