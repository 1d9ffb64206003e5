"""Contenders of `infonce bench` on the CPU: this library, and full matrices of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import infonce

from ...checks.validation import human
from ...kernels.arrays.naive import MATRICES
from ...kernels.cpu.resources import available_memory
from ...spec import Loss
from .measure import Array, Case, Outcome, Run

LIBRARY = ("naive", "fused", "tiled")
METHODS = ("products", "numpy", *LIBRARY, "torch")


def contender(method: str, case: Case, features: Sequence[Array]) -> Run:
    """A call of `method` on the features, gradients of features and scale included.

    Raises ImportError if torch is missing, and MemoryError if the full matrix, in `MATRICES` (4)
    copies, has no room; methods of `LIBRARY` are not checked here.
    """
    if method in LIBRARY:
        out = [np.empty_like(z) for z in case.select_gradients(features)]
        return lambda: _library(method, case, features, out)
    itemsize = max(4, features[0].dtype.itemsize)
    require(MATRICES * case.rows**2 * itemsize)
    if method == "products":
        return _products(case, features)
    if method == "numpy":
        return lambda: _numpy(case, features)
    return _torch(case, features)


def require(needed: int) -> None:
    """Raise MemoryError if so many bytes cannot be allocated without swapping."""
    room = available_memory()  # 0: not known, and nothing is refused
    if room and needed > room:
        raise MemoryError(f"needs {human(needed)}, of which {human(room)} are free")


def _library(method: str, case: Case, features: Sequence[Array], gradients: list[Array]) -> Outcome:
    function = getattr(infonce, f"{case.kind.name}_loss_and_grad")
    labels = {} if case.labels is None else {"labels": case.labels}
    options = {"method": method, "workspace": case.workspace, "out": gradients}
    result = function(*features, scale=case.scale, **options, **labels)
    return float(result.loss), gradients


def _products(case: Case, features: Sequence[Array]) -> Run:
    """The products that loss and gradient are made of, and nothing else, to compare with."""
    dtype = np.result_type(features[0].dtype, np.float32)
    query, key = (features[i].astype(dtype, copy=False) for i in (0, -1))
    x = np.empty((len(query), len(key)), dtype)
    gradients = [np.empty_like(z) for z in case.select_gradients(features)]
    logits = int(case.products) - len(gradients)  # how often they are computed

    def run() -> Outcome:
        for _ in range(logits):
            np.matmul(query, key.T, out=x)
        for gradient, product in zip(gradients, ((x, key), (x.T, query)), strict=False):
            np.matmul(*product, out=gradient)
        return float("nan"), []

    return run


def _numpy(case: Case, features: Sequence[Array]) -> Outcome:
    """The whole matrix, with the maximum taken out of the exponentials and nothing else done."""
    kind, scale, y = case.kind, case.scale, case.positives
    dtype = np.result_type(features[0].dtype, np.float32)
    query, key = (features[i].astype(dtype, copy=False) for i in (0, -1))
    if kind.joint:
        query = key = np.concatenate([query, key])
    x = scale * (query @ key.T)
    if kind.symmetric:
        np.fill_diagonal(x, -np.inf)
    raw = x
    if kind.joint:
        x = joint_rows(np, x)
    at = np.arange(len(x))[:, None], y
    if kind.sigmoid:
        x += kind.bias
        t = -np.ones_like(x)
        t[at] = 1
        loss = np.logaddexp(0, -t * x).sum() / len(x)
        g = -t / (1 + np.exp(t * x)) / len(x)
    else:
        loss, g = 0.0, np.zeros_like(x)
        for weight, axis in ((kind.row_direction_weight, 1), (kind.column_direction_weight, 0)):
            if weight:
                e = np.exp(x - x.max(axis=axis, keepdims=True))
                p = e / e.sum(axis=axis, keepdims=True)
                loss -= weight * np.log(p[at]).mean()
                p[at] -= 1 / y.shape[1]
                g += weight / len(x) * p
    if kind.joint:
        g = np.concatenate(np.split(g, 2, axis=1))
    with np.errstate(invalid="ignore"):
        raw = np.where(np.isneginf(raw), 0, raw)
    _ = np.vdot(g, raw) / scale  # gradient of the scale
    gradients = [scale * (g @ key)]
    if kind.symmetric:
        gradients[0] += scale * (g.T @ query)
    elif not kind.locked:
        gradients.append(scale * (g.T @ query))
    return float(loss), np.split(gradients[0], 2) if kind.joint else gradients


def joint_rows(xp: Any, x: Any) -> Any:
    """Logits [B, 4 B] from logits [2 B, 2 B]: row i holds rows i and i + B, with their common
    product once."""
    half = len(x) // 2
    rows = xp.concatenate([x[:half], x[half:]], 1)
    rows[xp.arange(half), xp.arange(2 * half, 3 * half)] = -xp.inf
    return rows


def torch_loss(kind: Loss, query: Any, key: Any, scale: Any, y: Any) -> Any:
    """The loss from the whole matrix of logits, as most training code has it."""
    import torch
    from torch.nn import functional

    if kind.joint:
        query = key = torch.concatenate([query, key])
    x = scale * (query @ key.T).to(scale.dtype)
    if kind.sigmoid:  # softplus(-z) = softplus(z) - z at the positives
        x = x + kind.bias
        return (functional.softplus(x).sum() - x.diagonal().sum()) / len(x)
    if kind.symmetric:
        x.fill_diagonal_(-float("inf"))
    if kind.joint:
        x = joint_rows(torch, x)
    if y.shape[1] > 1:
        return -functional.log_softmax(x, 1).gather(1, y).mean()
    loss = kind.row_direction_weight * functional.cross_entropy(x, y[:, 0])
    if kind.column_direction_weight:
        loss = loss + kind.column_direction_weight * functional.cross_entropy(x.T, y[:, 0])
    return loss


def _torch(case: Case, features: Sequence[Array]) -> Run:
    """The whole matrix and autograd."""
    import torch

    leaves = [torch.as_tensor(z.astype(np.promote_types(z.dtype, np.float32))) for z in features]
    wanted = [leaf.requires_grad_() for leaf in case.select_gradients(leaves)]
    factor = torch.tensor(case.scale, dtype=leaves[0].dtype, requires_grad=True)
    y = torch.as_tensor(case.positives)

    def run() -> Outcome:
        loss = torch_loss(case.kind, leaves[0], leaves[-1], factor, y)
        gradients = torch.autograd.grad(loss, [*wanted, factor])
        return loss.item(), [gradient.numpy() for gradient in gradients[:-1]]

    return run
