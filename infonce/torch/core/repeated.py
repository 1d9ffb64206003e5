"""Calls on the CPU that differ from an earlier call only in features, scale and bias.

A training loop repeats the same call, and in a small batch the checks take longer than the matrix
products. So only the first call is checked in full. Its problem, without features, is the template
for later calls, which are computed as one block.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import arrays
from ...checks.call import DOUBLE, PLAIN, SINGLE, check
from ...kernels.problem import SCALES, SILENT, Gradients, Problem, fast_replace
from ...spec import Loss

MOST_TEMPLATES = 256  # if there are as many, all are forgotten before the next is stored
TEMPLATE_DTYPES = {torch.float32, torch.float64}  # of features in calls that have a template
NUMBER_TYPES = (float, int)
# Matrix products that PyTorch computes faster than NumPy's BLAS: PyTorch's threads also run the
# other operations of a model, and so are often awake. Measured at 128 x 256 and 256 x 256
TORCH_MULTIPLY_ADDS = 2**21, 2**24  # the least and the most multiply-adds of a product
TORCH_WIDTH_LIMIT = 2**9  # rows have fewer features: MKL divides wider ones badly among threads
EXACT_PRECISIONS = {"highest", "ieee", "none"}  # of PyTorch's products of float32
# Key of a call -> its template: the checked problem of an earlier call, without features. None: a
# call that cannot have a template (`_make_template`), and is checked each time
_templates: dict[tuple[Any, ...], Problem | None] = {}


def evaluate(
    kind: Loss, features: Sequence[Tensor], scale: Any, bias: Any, options: dict[str, Any],
    wrt: frozenset[str], may_be_first: bool = True,
) -> tuple[Tensor, dict[str, Tensor]] | None:  # fmt: skip
    """(loss, gradients by argument name) of a call that has a template.

    None if this function does not compute the call: then the caller checks the call in full, and
    that check names an error. `may_be_first`: whether to make a template if there is none. False
    for calls whose arguments nobody has checked (`autograd.apply_repeated`).
    """
    types = tuple(map(type, options.values()))  # a part of the template's key, because True == 1
    if not PLAIN.issuperset(types):  # an array, which has to be checked in each call
        return None
    template_key = (
        kind, wrt, scale is None, bias is None, types, *options.items(),
        *[(z.shape, z.dtype, z.is_cpu) for z in features],
    )  # fmt: skip
    template = _templates.get(template_key)
    if template is None:
        if template_key in _templates or not may_be_first:
            return None
        if len(_templates) >= MOST_TEMPLATES:
            _templates.clear()
        template = _make_template(kind, features, scale, bias, {**options, "wrt": wrt})
        _templates[template_key] = template
        if template is None:
            return None
    scale = template.scale if scale is None else _read_number(scale)
    low, high = SCALES[template.compute_precision]
    # `_read_number` leaves a tensor on a GPU as it is, so this scale is no number
    if type(scale) not in NUMBER_TYPES or not low <= scale <= high:
        return None
    if kind.sigmoid:
        bias = template.bias if bias is None else _read_number(bias)
        if type(bias) not in NUMBER_TYPES or not math.isfinite(bias):
            return None
    try:
        views = [arrays.view_tensor(z) for z in features]
    except (TypeError, RuntimeError):  # the full checks of the call will name the error
        return None
    return _solve(kind, template, views, scale, bias, wrt)


def _make_template(
    kind: Loss, features: Sequence[Tensor], scale: Any, bias: Any, options: dict[str, Any]
) -> Problem | None:  # fmt: skip
    """Check a call, and return its problem without features.

    None: such a call cannot be computed here, and is checked each time. These are calls with

    - features, a scale or a bias in a tensor that is not on the CPU;
    - features of another dtype than float32 and float64 (`TEMPLATE_DTYPES`);
    - features whose elements are checked: `check_finite`, and float64 that is not normalized, whose
      products may overflow;
    - reduction="none";
    - a joint loss, classes, own negatives, or more than 2^20 logits (`template_has_defaults`);
    - options that one block lacks, or logits beyond the workspace (`fits_one_block`).
    """
    numbers = [value for value in (scale, bias) if isinstance(value, Tensor)]
    on_cpu = all(tensor.is_cpu for tensor in (*features, *numbers))
    if not on_cpu or not {z.dtype for z in features} <= TEMPLATE_DTYPES:
        return None
    if scale is not None:
        options["scale"] = scale
    with np.errstate(**SILENT):
        natives = arrays.natives(features, kind.arguments)
        request = check(kind, natives, None, bias, options, with_grad=True)
    static = request.static
    if static.products_may_overflow or static.check_finite or static.reduction == "none":
        return None
    from ...kernels.cpu.schedule import fits_one_block

    if not static.template_has_defaults or not fits_one_block(request.problem):
        return None
    return static.template


@cache
def _solve_in_one_block() -> Any:
    """The function `solve_in_one_block`, imported once: an import statement in each call of a small
    batch would take a notable time."""
    from ...kernels.cpu.one_block import solve_in_one_block

    return solve_in_one_block


def _choose_product(shape: tuple[int, int, int]) -> Any:
    """The function that computes the matrix products of a call; None: NumPy's BLAS.

    `shape` is (queries, keys, features). PyTorch computes the products if all of these hold: their
    size is within `TORCH_MULTIPLY_ADDS` and `TORCH_WIDTH_LIMIT`; PyTorch has several threads;
    INFONCE_NUM_THREADS, which PyTorch does not read, sets no number of threads; and the caller does
    not let PyTorch round float32 operands (`torch.set_float32_matmul_precision`).
    """
    (m, n, d), (least, most) = shape, TORCH_MULTIPLY_ADDS
    if not least <= m * n * d <= most or d >= TORCH_WIDTH_LIMIT:
        return None
    if torch.get_num_threads() == 1 or os.environ.get("INFONCE_NUM_THREADS"):
        return None
    onednn = getattr(torch.backends.mkldnn, "matmul", None)  # PyTorch >= 2.9 has it
    precision = torch.get_float32_matmul_precision() if onednn is None else onednn.fp32_precision
    return _torch_product if precision in EXACT_PRECISIONS else None


def _torch_product(left: Any, right: Any, out: Any = None) -> Any:
    """np.matmul of NumPy arrays, computed by PyTorch."""
    out = np.empty((len(left), right.shape[1]), left.dtype) if out is None else out
    torch.mm(torch.from_numpy(left), torch.from_numpy(right), out=torch.from_numpy(out))
    return out


def _read_number(value: Any) -> Any:
    """The number in a CPU tensor of one element; other values as they are."""
    return value.item() if isinstance(value, Tensor) and value.is_cpu else value


def _solve(
    kind: Loss, template: Problem, views: list[Any], scale: float, bias: Any, wrt: frozenset[str]
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Loss and gradients of a checked problem.

    None if features or logits are not finite, or if memory does not suffice: then the caller checks
    the call in full and computes it by `infonce.dispatch`.
    """
    names = kind.arguments
    query, key = views[0], views[-1]
    query_out = np.empty(query.shape, query.dtype) if names[0] in wrt else None
    key_out = None
    if not kind.symmetric and names[1] in wrt:
        key_out = np.empty(key.shape, key.dtype)
    gradients = None
    if query_out is not None or key_out is not None:
        gradients = Gradients(
            query_out, key_out, want_query=query_out is not None, want_key=key_out is not None
        )
    problem = fast_replace(template, query=query, key=key, scale=scale, bias=bias)
    try:
        with np.errstate(**SILENT):
            solution = _solve_in_one_block()(problem, gradients, _choose_product(problem.shape))
    except MemoryError:  # the full call raises a MemoryError again, with advice on what to use
        return None
    if solution is None or solution.loss is None:
        return None
    dtype = DOUBLE if DOUBLE in (query.dtype, key.dtype) else SINGLE
    grads = {}
    if query_out is not None:
        grads[names[0]] = torch.from_numpy(query_out)
    if key_out is not None:
        grads[names[1]] = torch.from_numpy(key_out)
    if "scale" in wrt:
        grads["scale"] = torch.from_numpy(np.asarray(solution.scale_grad, dtype))
    if "bias" in wrt:
        grads["bias"] = torch.from_numpy(np.asarray(solution.bias_grad, dtype))
    return torch.from_numpy(np.asarray(solution.loss, dtype)), grads
