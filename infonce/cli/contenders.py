"""What `infonce bench` compares: loss and all gradients, by this library and by full matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import infonce

from ..kernels.naive import PASSES, available_memory
from ..losses import Loss

Array = Any
Outcome = tuple[float, list[Array]]  # loss, gradients of the features that get one
LIBRARY = ("naive", "fused", "tiled")
METHODS = ("products", "numpy", *LIBRARY, "torch")


def contender(
    method: str, kind: Loss, features: Sequence[Array], scale: float, workspace: int
) -> Callable[[], Outcome]:
    """A call of `method` on the features, gradients of features and scale included.

    Raises ImportError where torch is missing and MemoryError where the full matrix, in `PASSES`
    copies, has no room.
    """
    if method in LIBRARY:
        out = [np.empty_like(z) for n, z in zip(kind.arguments, features, strict=True)
               if n not in kind.locked]  # fmt: skip
        return lambda: _library(method, kind, features, scale, workspace, out)
    rows, itemsize = len(features[0]), max(4, features[0].dtype.itemsize)
    needed, room = PASSES * rows * rows * itemsize, available_memory()
    if room and needed > room:
        raise MemoryError(f"needs {needed} bytes, of which {room} are free")
    if method == "products":
        return _products(features)
    if method == "numpy":
        return lambda: _numpy(kind, features, scale)
    return _torch(kind, features, scale)


def _library(
    method: str, kind: Loss, features: Sequence[Array], scale: float, workspace: int,
    gradients: list[Array],
) -> Outcome:  # fmt: skip
    function = getattr(infonce, f"{kind.name}_loss_and_grad")
    result = function(*features, scale=scale, method=method, workspace=workspace, out=gradients)
    return float(result.loss), gradients


def positives(kind: Loss, rows: int) -> Array:
    """[rows] the key that is each query's positive."""
    shift = rows // 2 if kind.symmetric else 0
    return (np.arange(rows) + shift) % rows


def _products(features: Sequence[Array]) -> Callable[[], Outcome]:
    """The four products that loss and gradient are made of, and nothing else: a yardstick."""
    dtype = np.result_type(features[0].dtype, np.float32)
    query, key = (features[i].astype(dtype, copy=False) for i in (0, -1))
    x = np.empty((len(query), len(key)), dtype)
    dq, dk = np.empty_like(query), np.empty_like(key)

    def run() -> Outcome:
        for _ in range(2):
            np.matmul(query, key.T, out=x)
        np.matmul(x, key, out=dq)
        np.matmul(x.T, query, out=dk)
        return float("nan"), []

    return run


def _numpy(kind: Loss, features: Sequence[Array], scale: float) -> Outcome:
    """The whole matrix, with the maximum taken out of the exponentials and nothing else done."""
    dtype = np.result_type(features[0].dtype, np.float32)
    query, key = (features[i].astype(dtype, copy=False) for i in (0, -1))
    rows = np.arange(len(query))
    y = positives(kind, len(query))
    x = scale * (query @ key.T)
    if kind.sigmoid:
        x += kind.bias
        t = -np.ones_like(x)
        t[rows, y] = 1
        loss = np.logaddexp(0, -t * x).sum() / len(x)
        g = -t / (1 + np.exp(t * x)) / len(x)
    else:
        if kind.symmetric:
            np.fill_diagonal(x, -np.inf)
        loss, g = 0.0, np.zeros_like(x)
        for weight, axis in ((kind.row_weight, 1), (kind.column_weight, 0)):
            if weight:
                e = np.exp(x - x.max(axis=axis, keepdims=True))
                p = e / e.sum(axis=axis, keepdims=True)
                loss -= weight * np.log(p[rows, y]).mean()
                p[rows, y] -= 1
                g += weight / len(x) * p
    with np.errstate(invalid="ignore"):
        raw = np.where(np.isneginf(x), 0, x)
    _ = np.vdot(g, raw) / scale  # gradient of the scale
    gradients = [scale * (g @ key), scale * (g.T @ query)]
    if kind.symmetric:
        gradients = [gradients[0] + gradients[1]]
    return float(loss), [
        gradient
        for name, gradient in zip(kind.arguments, gradients, strict=True)
        if name not in kind.locked
    ]


def _torch(kind: Loss, features: Sequence[Array], scale: float) -> Callable[[], Outcome]:
    """The whole matrix and autograd."""
    import torch
    from torch.nn import functional

    dtype = torch.float64 if features[0].dtype == np.float64 else torch.float32
    leaves = [torch.as_tensor(z.astype(np.promote_types(z.dtype, np.float32))) for z in features]
    for name, leaf in zip(kind.arguments, leaves, strict=True):
        leaf.requires_grad_(name not in kind.locked)
    factor = torch.tensor(scale, dtype=dtype, requires_grad=True)
    y = torch.as_tensor(positives(kind, len(features[0])))

    def run() -> Outcome:
        for leaf in (*leaves, factor):
            leaf.grad = None
        x = factor * (leaves[0] @ leaves[-1].T)
        if kind.sigmoid:
            t = 2 * torch.eye(len(x), dtype=dtype) - 1
            loss = -functional.logsigmoid(t * (x + kind.bias)).sum() / len(x)
        else:
            if kind.symmetric:
                x = x.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
            loss = kind.row_weight * functional.cross_entropy(x, y)
            if kind.column_weight:
                loss = loss + kind.column_weight * functional.cross_entropy(x.T, y)
        loss.backward()
        return loss.item(), [leaf.grad.numpy() for leaf in leaves if leaf.grad is not None]

    return run
