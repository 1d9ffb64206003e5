"""Calls on the CPU that differ from an earlier call only in features, scale and bias.

A training loop repeats the same call, and in a small batch the checks take longer than the
products. So only the first call is checked in full. Its problem is the template for later calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import arrays
from ...checks.call import DOUBLE, PLAIN, SINGLE, check
from ...kernels.problem import (
    SCALES,
    SILENT,
    Gradients,
    Problem,
    fast_replace,
    materialize_vectors,
)  # fmt: skip
from ...result import LossAndGrad
from ...spec import Loss

MOST_TEMPLATES = 256
MOST_ROWS = 2**12  # of a call whose template keeps its vectors
DTYPES = {torch.float32: SINGLE, torch.float64: DOUBLE}
NUMBERS = (float, int)
_templates: dict[tuple[Any, ...], Problem | None] = {}  # None: calls that are checked each time


def evaluate(
    kind: Loss, features: Sequence[Tensor], scale: Any, bias: Any, options: dict[str, Any],
    wrt: frozenset[str],
) -> LossAndGrad | None:  # fmt: skip
    """Loss and gradients of a call like an earlier one. None: the call has to be checked."""
    types = tuple(map(type, options.values()))  # a part of the key, because True == 1
    if not PLAIN.issuperset(types):
        return None
    key = (
        kind, wrt, scale is None, bias is None, types, *options.items(),
        *[(z.shape, z.dtype, z.is_cpu) for z in features],
    )  # fmt: skip
    if key not in _templates:
        if len(_templates) >= MOST_TEMPLATES:
            _templates.clear()
        _templates[key] = _template(kind, features, scale, bias, {**options, "wrt": wrt})
    template = _templates[key]
    if template is None:
        return None
    scale = template.scale if scale is None else _number(scale)
    low, high = SCALES[template.compute]
    if type(scale) not in NUMBERS or not low <= scale <= high:
        return None
    if kind.sigmoid:
        bias = template.bias if bias is None else _number(bias)
        if type(bias) not in NUMBERS or not math.isfinite(bias):
            return None
    query = key = arrays.native(features[0], kind.arguments[0])
    if not kind.symmetric:
        key = arrays.native(features[1], kind.arguments[1])
    problem = fast_replace(template, query=query, key=key, scale=scale, bias=bias)
    return _solved(kind, problem, features, wrt)


def _template(
    kind: Loss, features: Sequence[Tensor], scale: Any, bias: Any, options: dict[str, Any]
) -> Problem | None:  # fmt: skip
    """The checked problem of a call, without its features; None: check such calls each time."""
    numbers = [value for value in (scale, bias) if isinstance(value, Tensor)]
    on_cpu = all(tensor.is_cpu for tensor in (*features, *numbers))
    if not on_cpu or not DTYPES.keys() >= {z.dtype for z in features}:
        return None
    if scale is not None:
        options["scale"] = scale
    with np.errstate(**SILENT):
        natives = arrays.natives(features, kind.arguments)
        request = check(kind, natives, None, bias, options, with_grad=True)
    static = request.static
    if static.wide_products or static.check_finite or static.reduction == "none":
        return None
    if static.template is None or not _one_block().fits(request.problem):
        return None
    if request.problem.shape[0] > MOST_ROWS:
        return static.template
    vectors = materialize_vectors(request.problem, np)
    return fast_replace(static.template, positives=vectors.positives, upstream=vectors.upstream)


@cache
def _one_block() -> Any:
    """The module of one block. An import statement would take time in small batches."""
    from ...kernels.cpu.one_block import solve as one_block

    return one_block


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.is_cpu else value


def _solved(
    kind: Loss, problem: Problem, features: Sequence[Tensor], wrt: frozenset[str]
) -> LossAndGrad | None:
    """Loss and gradients of a checked problem; None if it cannot be computed as one block."""
    names = kind.arguments
    outs: dict[str, Any] = {
        name: np.empty(z.shape, DTYPES[z.dtype])
        for name, z in zip(names, features, strict=True)
        if name in wrt
    }
    gradients = None
    if outs:
        query_gradient = outs.get(names[0])
        key_gradient = None if kind.symmetric else outs.get(names[1])
        gradients = Gradients(
            query_gradient, key_gradient, None, query_gradient is not None, key_gradient is not None
        )
    try:
        with np.errstate(**SILENT):
            solution = _one_block().solve(problem, gradients)
    except MemoryError:  # the call is checked then, and its error says what to use instead
        return None
    if solution is None or solution.loss is None:
        return None
    dtype = DOUBLE if DOUBLE in (problem.query.dtype, problem.key.dtype) else SINGLE
    grads = {name: torch.from_numpy(outs[name]) if name in outs else None for name in names}
    grads["scale"] = _scalar_tensor(solution.scale_grad, dtype) if "scale" in wrt else None
    if kind.sigmoid:
        grads["bias"] = _scalar_tensor(solution.bias_grad, dtype) if "bias" in wrt else None
    return LossAndGrad(_scalar_tensor(solution.loss, dtype), kind.grads(**grads))


def _scalar_tensor(value: Any, dtype: np.dtype[Any]) -> Tensor:
    """`value` as a tensor without dimensions."""
    return torch.from_numpy(np.asarray(value, dtype))
