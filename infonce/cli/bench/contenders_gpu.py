"""Contenders of `infonce bench --gpu`: this library, torch, a loop over panels, bare products.

All take CuPy arrays and return arrays on the device; nothing waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import infonce

from .contenders_cpu import LIBRARY, torch_loss
from .measure import Array, Case, Outcome, Run

METHODS = ("products", *LIBRARY, "captured", "panels", "torch", "torch.compile")
PANEL = 4096  # rows of a panel
PRECISION = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# cuBLAS's numbers for types of elements and for arithmetics
CUDA_TYPE = {"float64": 1, "float32": 0, "bfloat16": 14, "float16": 2}
COMPUTE = {"fp64": 70, "fp32": 68, "tf32": 77, "bf16": 68, "fp16": 68}


def contender(method: str, case: Case, inputs: Sequence[Sequence[Array]]) -> Run:
    """A call of `method`, gradients of features and scale included; inputs take turns.

    Raises ImportError for what is not installed and ValueError for what a method cannot do.
    """
    if method in (*LIBRARY, "captured"):
        return library(method, case, inputs)
    if method == "products":
        return products(case, inputs, PRECISION[case.dtype])
    tensors = torch_inputs(inputs)
    import torch

    if method == "panels":
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        turns = itertools.cycle(tensors)
        return lambda: by_panels(case, next(turns), wide)
    y = torch.as_tensor(case.positives, device="cuda")

    def matrix_loss(query: Any, key: Any, scale: Any) -> Any:
        return torch_loss(case.kind, query, key, scale, y)

    if method == "torch.compile":
        torch._dynamo.reset()  # or it would generalise over sizes, at the cost of speed
        matrix_loss = torch.compile(matrix_loss, dynamic=False)
    return by_autograd(case, tensors, matrix_loss)


def library(
    method: str, case: Case, inputs: Sequence[Sequence[Array]], **options: Any
) -> Run:  # fmt: skip
    """A call of this library by a method; "captured": in a CUDA graph."""
    function = getattr(infonce, f"{case.kind.name}_loss_and_grad")
    options = {
        "scale": case.scale, "method": "auto" if method == "captured" else method,
        "workspace": case.workspace, **options,
    }  # fmt: skip
    if case.wrt:
        options["wrt"] = case.wrt
    if case.labels is not None:
        options["labels"] = case.labels
        if not isinstance(inputs[0][0], np.ndarray):
            import cupy

            options["labels"] = cupy.asarray(case.labels)
    calls: list[Callable[[], Any]] = [
        infonce.capture(function, *features, **options) if method == "captured"
        else partial(function, *features, **options)
        for features in inputs
    ]  # fmt: skip
    turns = itertools.cycle(calls)
    sides = len(case.kind.arguments)

    def run() -> Outcome:
        result = next(turns)()
        return result.loss, case.select_gradients(result.grads[:sides])

    return run


def products(case: Case, inputs: Sequence[Sequence[Array]], precision: str) -> Run:
    """The products that loss and gradient are made of, from cuBLAS, and nothing else."""
    import cupy

    turns = itertools.cycle(inputs)
    real = np.dtype(np.float64 if case.dtype == "float64" else np.float32)
    gradients = case.select_gradients(case.shapes)
    logits = int(case.products) - len(gradients)  # how often they are computed

    def run() -> Outcome:
        features = next(turns)
        query, key = features[0], features[-1]
        x = cupy.empty((len(query), len(key)), query.dtype)
        for _ in range(logits):
            product(precision, x, query, key, transpose_b=True)
        for i, shape in enumerate(gradients):
            gradient = cupy.empty(shape, real)
            product(precision, gradient, x, (key, query)[i], transpose_a=i == 1)
        return float("nan"), []

    return run


def product(
    precision: str, out: Array, a: Array, b: Array, *,
    transpose_a: bool = False, transpose_b: bool = False,
) -> None:  # fmt: skip
    """out = a b of contiguous CuPy arrays by cuBLAS, in the arithmetic of a precision."""
    import cupy
    from cupy.cuda import cublas

    if precision not in COMPUTE:
        raise ValueError(f"{precision} is no arithmetic of cuBLAS")
    one, zero = np.array(1, out.dtype), np.array(0, out.dtype)
    if out.dtype.itemsize < 4:
        one, zero = one.astype(np.float32), zero.astype(np.float32)
    m, n = out.shape
    k = a.shape[0] if transpose_a else a.shape[1]
    cublas.gemmEx(  # columns come first in cuBLAS: out' = b' a'; -1: its default algorithm
        cupy.cuda.device.get_cublas_handle(), int(transpose_b), int(transpose_a), n, m, k,
        one.ctypes.data, b.data.ptr, CUDA_TYPE[b.dtype.name], b.shape[1],
        a.data.ptr, CUDA_TYPE[a.dtype.name], a.shape[1],
        zero.ctypes.data, out.data.ptr, CUDA_TYPE[out.dtype.name], n, COMPUTE[precision], -1,
    )  # fmt: skip


def torch_inputs(inputs: Sequence[Sequence[Array]]) -> list[list[Any]]:
    """The inputs as tensors; torch's float32 products are in full precision."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this torch has no CUDA")
    torch.set_float32_matmul_precision("highest")
    return [[torch.from_dlpack(z) for z in features] for features in inputs]


def by_autograd(
    case: Case, inputs: Sequence[Sequence[Any]], loss: Callable[[Any, Any, Any], Any]
) -> Run:
    """torch's gradients of `loss(query, key, scale)`."""
    import torch

    for tensors in inputs:
        for leaf in case.select_gradients(tensors):
            leaf.requires_grad_()
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    scale = torch.tensor(case.scale, dtype=dtype, device="cuda", requires_grad=True)
    turns = itertools.cycle(inputs)

    def run() -> Outcome:
        tensors = next(turns)
        value = loss(tensors[0], tensors[-1], scale)
        wanted = [*case.select_gradients(tensors), scale]
        return value.detach(), list(torch.autograd.grad(value, wanted, allow_unused=True)[:-1])

    return run


def by_panels(case: Case, features: Sequence[Any], wide: Any) -> Outcome:
    """Loss and gradients of torch tensors as one writes them without kernels: a loop over panels
    of rows, products in the features' dtype, all else in `wide`. In float64 it is the reference."""
    import torch

    kind, n = case.kind, case.rows
    if wide == torch.float64:
        features = [z.double() for z in features]
    queries = features if kind.joint else features[:1]  # of a joint loss both, against both
    key = torch.cat(list(features)) if kind.joint else features[-1]
    device = key.device
    y = torch.as_tensor(case.positives, device=device)
    panels = [slice(a, min(a + PANEL, n)) for a in range(0, n, PANEL)]
    gradients = [torch.zeros(z.shape, dtype=wide, device=device) for z in features[:-1]]
    key_gradient = torch.zeros(key.shape, dtype=wide, device=device)
    gradients = list(key_gradient.split(n)) if kind.joint else [*gradients, key_gradient]
    wants_key = kind.arguments[-1] in case.select_gradients(kind.arguments)
    loss = torch.zeros((), dtype=wide, device=device)

    def logits(panel: slice) -> tuple[Any, Any, Any]:
        """Rows of the matrix, and where and what their positives are."""
        x = queries[0][panel] @ key.T
        if kind.joint:
            x = torch.cat([x, queries[1][panel] @ key.T], 1)
        x = x.to(wide) * case.scale
        if kind.sigmoid:
            x += kind.bias
        if kind.symmetric:  # of a joint loss also the positive's second time, and the keys
            for first in (0, 2 * n, 3 * n) if kind.joint else (0,):
                x[:, first + panel.start : first + panel.stop].fill_diagonal_(-torch.inf)
        at = torch.arange(len(x), device=device)[:, None], y[panel]
        return x, at, x[at]

    def add_gradient(panel: slice, g: Any) -> None:
        parts = g.to(key.dtype).split(len(key), 1)
        for query, gradient, part in zip(queries, gradients, parts, strict=False):
            gradient[panel] += part @ key
            if wants_key:
                key_gradient.add_(part.T @ query[panel])

    if kind.sigmoid:
        for panel in panels:
            x, at, positive = logits(panel)
            loss += torch.nn.functional.softplus(x).sum() - positive.sum()
            x.sigmoid_()[at] -= 1
            add_gradient(panel, x)
    else:
        rows = torch.empty(n, dtype=wide, device=device)
        columns = torch.full((n,), -torch.inf, dtype=wide, device=device)
        weights = kind.row_direction_weight, kind.column_direction_weight
        for panel in panels:
            x, _, positive = logits(panel)
            rows[panel] = x.logsumexp(1)
            loss -= sum(weights) * positive.mean(1).sum()
            if kind.column_direction_weight:
                columns = torch.logaddexp(columns, x.logsumexp(0))
        loss += weights[0] * rows.sum()
        if kind.column_direction_weight:
            loss += weights[1] * columns.sum()
        for panel in panels:
            x, at, _ = logits(panel)
            g = weights[0] * (x - rows[panel, None]).exp_()
            if kind.column_direction_weight:
                g += weights[1] * (x - columns).exp_()
            g[at] -= sum(weights) / y.shape[1]  # before any rounding: what remains may be small
            add_gradient(panel, g)
    wanted = case.select_gradients(gradients)
    return loss / n, [(g * (case.scale / n)).to(key.dtype) for g in wanted]
