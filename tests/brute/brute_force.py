"""The losses from whole matrices in float64 PyTorch, their gradients by its autograd, and how far
from them a result may be. Nothing here is taken from the library.

The rounding of a logit is at most `unit` times the size of the products that it is a sum of, and a
few times that for what the exponentials, sums and matrix products add. Everything else follows from
that by the derivatives: `slopes` are the sizes of dloss_i / dx_ij, term by term.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

Array = np.ndarray
SYMMETRIC = ("nt_xent", "sup_con", "gte")


@dataclass
class Call:
    """One call of one loss: features as the library gets them, and what it takes besides."""

    loss: str
    features: tuple[Array, ...]
    scale: float
    bias: float = -10.0
    normalize: bool = False
    reduction: str = "mean"
    labels: Any = None
    ids: Any = None
    weights: Any = None
    grad_out: Any = 1.0
    softmax: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Judgement:
    """What is right, and by how much a result may differ from it. Gradients are [rows, D] in long
    double, because rows may have any norm; their bounds are of the norms of rows, and their terms
    the sizes of what adds up to them."""

    losses: Array  # [M], unweighted
    loss: Any
    loss_bound: Any
    grads: dict[str, Any]
    bounds: dict[str, Any]
    terms: list[Array]
    lse: list[Array]  # of rows, and of columns
    lse_bounds: list[Array]
    dots: Array  # [M, N]
    positive: Array  # [M, N]
    excluded: Array
    logit_bounds: Array  # [M, N]


def compute_norms(z: Array) -> Array:
    """[M] in long double, in which no square of a float64 over- or underflows."""
    wide = z.astype(np.longdouble)
    return np.sqrt((wide * wide).sum(axis=1))


def find_positives(call: Call, rows: int, columns: int) -> Array:
    positive = np.zeros((rows, columns), bool)
    index = np.arange(rows)
    if call.loss == "nt_xent":
        positive[index, (index + rows // 2) % rows] = True
    elif call.loss == "sup_con":
        same = call.labels[:, None] == call.labels
        positive = same & (call.labels >= 0) & ~np.eye(rows, dtype=bool)
    elif call.loss == "gte":
        positive[index[: rows // 2], index[: rows // 2] + rows // 2] = True
    elif call.labels is None:
        positive[index, index] = True
    else:
        for i, keys in enumerate(call.labels.reshape(rows, -1)):
            positive[i, keys[keys >= 0]] = True
    return positive


def find_excluded(call: Call, positive: Array) -> Array:
    rows, columns = positive.shape
    excluded = np.zeros((rows, columns), bool)
    ids = call.ids
    if call.loss == "gte":
        ids = np.tile(np.arange(rows // 2) if ids is None else ids, 2)
    if ids is not None:
        row_ids, column_ids = ids if isinstance(ids, tuple) else (ids, ids)
        excluded = row_ids[:, None] == column_ids
    if call.loss in ("nt_xent", "sup_con"):
        excluded = excluded | np.eye(rows, dtype=bool)
    return excluded & ~positive


def masked_lse(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the keys of a mask: -inf over none."""
    some = mask.any(dim=1)
    peak = torch.where(mask, x, -torch.inf).max(dim=1).values.detach()
    peak = torch.where(some, peak, 0.0)
    terms = torch.where(mask, torch.exp(torch.where(mask, x, peak[:, None]) - peak[:, None]), 0.0)
    return torch.where(some, torch.log(torch.where(some, terms.sum(dim=1), 1.0)) + peak, -torch.inf)


@dataclass
class Direction:
    """Rows, or columns as rows."""

    losses: torch.Tensor
    lse: torch.Tensor
    slopes: Array  # [R, K]
    off: Array  # [R] error of logits
    loss_bounds: Array


def softmax(
    call: Call, dot: torch.Tensor, scale: torch.Tensor, positive: Array, excluded: Array,
    sizes: Array, unit: float, width: int, bias: Array | None,
) -> Direction:  # fmt: skip
    """Cross-entropy of each row. `sizes` are products of norms |q| |k|, `width` is D.

    `off` is the largest error of a row's logits:
    unit ((8 + sqrt(D)) s |q| |k| + 4 |x| + 2 s |margin| + 4 |bias|).
    The bound of its loss over K keys is
    2 sum_j slopes_j (off + 8 unit) + unit (24 + 4 sqrt(K)) |loss|.
    """
    o = call.softmax
    e, margin, hardness = (o.get(k, 0.0) for k in ("label_smoothing", "margin", "hardness"))
    decoupled = o.get("decoupled", False)
    plain = dot.detach().numpy()
    has = positive.any(axis=1)
    if "false_negative_margin" in o:
        limit = np.where(positive, plain, -np.inf).max(axis=1) + o["false_negative_margin"]
        excluded = excluded | (~positive & has[:, None] & (plain > limit[:, None]))
    at, kept = torch.from_numpy(positive), torch.from_numpy(~excluded)
    x = scale * (dot - margin * at.double())
    if bias is not None:
        x = x + torch.from_numpy(bias)
    weighted = x + hardness * dot.detach()
    n, m = masked_lse(weighted, kept & ~at), masked_lse(x, at)
    count = at.sum(dim=1).clamp(min=1)
    mean = (x * at.double()).sum(dim=1) / count
    safe = torch.where(torch.from_numpy(has), m, 0.0)
    gap = n - safe
    losses = gap if decoupled else torch.logaddexp(torch.zeros(()), gap)
    losses = losses + torch.where(count > 1, safe - mean, 0.0)  # of one: 1 - 1 in autograd
    keys = kept.sum(dim=1).clamp(min=1)
    if e:
        losses = losses + e * (mean - (x * kept.double()).sum(dim=1) / keys)
    losses = torch.where(torch.from_numpy(has), losses, 0.0)
    lse = n if decoupled else torch.logaddexp(n, m)

    with torch.no_grad():
        share = torch.where(at, torch.exp(x - safe[:, None]), 0.0)
        pull = torch.ones_like(gap) if decoupled else torch.sigmoid(gap)
        finite = torch.where(torch.isneginf(lse), 0.0, lse)
        p = torch.where(kept & ~at, torch.exp(weighted - finite[:, None]), 0.0)
        slopes = torch.where(at, share * pull[:, None], p).numpy()
        number = count.numpy()[:, None]
        slopes += positive * (number > 1) * (share.numpy() + 1 / number)
        if e:
            slopes += 2 * e / keys.numpy()[:, None] + positive * e / number
        slopes *= has[:, None]
        logits = np.where(positive | ~excluded, np.abs(weighted.numpy()), 0.0)
    s = float(scale.detach()) + hardness
    off = (8 + np.sqrt(width)) * s * sizes + 4 * logits + 2 * s * abs(margin) * positive
    if bias is not None:
        off = off + 4 * np.abs(bias)
    off = unit * np.where(excluded & (e == 0), 0.0, off).max(axis=1)
    value = np.abs(np.nan_to_num(losses.detach().numpy(), posinf=0.0, neginf=0.0))
    terms = 24 + 4 * np.sqrt(dot.shape[1])
    bounds = 2 * slopes.sum(axis=1) * (off + 8 * unit) + terms * unit * value
    return Direction(losses, lse, slopes, off, bounds)


def sigmoid(
    call: Call, dot: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, positive: Array,
    excluded: Array, sizes: Array, unit: float, width: int,
) -> Direction:  # fmt: skip
    z = (scale * dot + bias) * torch.from_numpy(np.where(positive, -1.0, 1.0))
    terms = torch.where(torch.from_numpy(excluded), 0.0, torch.logaddexp(torch.zeros(()), z))
    with torch.no_grad():
        slopes = torch.sigmoid(z).numpy() * ~excluded
        products = float(scale) * sizes
        off = (8 + np.sqrt(width)) * products + 4 * abs(float(bias)) + 4 * np.abs(z.numpy())
        off = unit * np.where(excluded, 0.0, off).max(axis=1)
        losses = terms.sum(dim=1)
        bounds = 2 * slopes.sum(axis=1) * (off + 8 * unit)
        bounds += (24 + 4 * np.sqrt(dot.shape[1])) * unit * losses.numpy()
        # An exponential is at least the smallest normal number
        bounds += dot.shape[1] * (2.0**-1022 if unit < 2.0**-50 else 2.0**-126)
    return Direction(terms.sum(dim=1), losses, slopes, off, bounds)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch uses one thread within this context, because the matrices are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def judge(call: Call, compute: str) -> Judgement:
    """`compute`: "float64" or "float32", of products and exponentials."""
    unit = (2.0**-53 if compute == "float64" else 2.0**-24) + 2.0**-53  # this module's own, too
    # Smaller probabilities may be 0: where one exponential serves two directions, sooner
    shared = call.loss in (*SYMMETRIC, "clip")
    floor = 2.0**-850 if compute == "float64" else 2.0 ** (-58 if shared else -95)
    features = call.features
    if call.loss == "gte":
        features = (np.concatenate([z.astype(np.float64) for z in features]),)
    lengths = [compute_norms(z) for z in features]
    leaves, units = [], []
    for z, length in zip(features, lengths, strict=True):
        wide = z.astype(np.longdouble)
        if call.normalize:
            wide = wide / np.where(length == 0, 1, length)[:, None]
        leaf = torch.from_numpy(wide.astype(np.float64)).requires_grad_()
        leaves.append(leaf)
        nonzero = torch.from_numpy(length != 0)[:, None]
        norm = torch.where(nonzero, (leaf * leaf).sum(dim=1, keepdim=True), 1.0).sqrt()
        units.append(leaf / norm if call.normalize else leaf)
    q, k, width = units[0], units[-1], features[0].shape[1]
    dot = q @ k.T
    rows, columns = dot.shape
    scale = torch.tensor(call.scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(call.bias, dtype=torch.float64, requires_grad=True)
    positive = find_positives(call, rows, columns)
    excluded = find_excluded(call, positive)
    if call.normalize:
        lengths = [(length != 0).astype(np.longdouble) for length in lengths]
    sizes = (lengths[0][:, None] * lengths[-1]).astype(np.float64)
    key_bias = call.softmax.get("key_bias")
    common = sizes, unit, width
    directions: list[tuple[Direction, float, bool]] = []
    if call.loss == "siglip":
        directions = [(sigmoid(call, dot, scale, bias, positive, excluded, *common), 1.0, False)]
    elif call.loss == "gte":
        half = rows // 2

        def beside(x: Any) -> Any:
            join = torch.cat if isinstance(x, torch.Tensor) else np.concatenate
            return join([x[:half], x[half:]], 1)

        row_direction = softmax(
            call, beside(dot), scale, beside(positive), beside(excluded), beside(sizes), unit,
            width, None,
        )  # fmt: skip
        directions = [(row_direction, 1.0, False)]
    else:
        share = 0.5 if call.loss == "clip" else 1.0
        row_direction = softmax(call, dot, scale, positive, excluded, *common, key_bias)
        directions = [(row_direction, share, False)]
        if call.loss == "clip":
            column_direction = softmax(
                call, dot.T, scale, positive.T, excluded.T, sizes.T, unit, width, None
            )
            directions.append((column_direction, share, True))
    losses = sum(share * d.losses for d, share, _ in directions)
    bounds = sum(share * d.loss_bounds for d, share, _ in directions)
    assert isinstance(losses, torch.Tensor)

    one = beside(positive) if call.loss == "gte" else positive
    w = one.any(axis=1).astype(np.float64) if call.loss != "siglip" else np.ones(rows)
    if call.weights is not None:
        w = w * call.weights
    if call.reduction == "mean":
        w = w / (w.sum() or 1.0)
    weights = torch.from_numpy(w)
    used = torch.where(weights == 0, 0.0, losses)  # and no 0 times -inf
    upstream = torch.from_numpy(np.broadcast_to(call.grad_out, (len(w),)).copy())
    parts = weights * used
    (torch.where(weights == 0, 0.0, upstream * parts)).sum().backward()

    # Errors of dL/dx, [rows, columns]: relative to its terms
    up = np.abs(w * upstream.numpy())
    terms = 32 + 4 * np.sqrt(max(rows, columns)) + np.sqrt(width)
    dx, wrong = np.zeros((rows, columns)), np.zeros((rows, columns))
    for d, share, turned in directions:
        size = share * up[:, None] * d.slopes
        error = size * (4 * d.off + terms * unit)[:, None] + share * up[:, None] * floor
        if call.loss == "gte":
            size, error = (np.concatenate(np.split(a, 2, axis=1)) for a in (size, error))
        dx += size.T if turned else size
        wrong += error.T if turned else error
    grads: dict[str, Any] = {"scale": scale.grad, "bias": bias.grad}
    margin = abs(call.softmax.get("margin", 0.0))
    limits: dict[str, Any] = {"scale": 2 * (wrong * (sizes + margin * positive)).sum()}
    limits["bias"] = 2 * wrong.sum()

    def feature_sizes(logit_terms: Array) -> list[Array]:
        """Norms of rows of gradients, from sizes of dL/dx."""
        logit_terms = logit_terms.astype(np.longdouble) * call.scale
        query_terms, key_terms = logit_terms @ lengths[-1], logit_terms.T @ lengths[0]
        return [query_terms + key_terms] if call.loss in SYMMETRIC else [query_terms, key_terms]

    feature_grads, feature_bounds, feature_terms = [], [], []
    for z, leaf, error, size in zip(
        features, leaves, feature_sizes(wrong), feature_sizes(dx), strict=True
    ):
        assert leaf.grad is not None
        g, length = leaf.grad.numpy().astype(np.longdouble), compute_norms(z)
        if call.normalize:
            length = np.where(length == 0, np.inf, length)
            g, error, size = g / length[:, None], 4 * error / length, size / length
        feature_grads.append(g)
        feature_bounds.append(error)
        feature_terms.append(size)
    if call.loss == "gte":
        feature_grads, feature_bounds, feature_terms = (
            np.split(both[0], 2) for both in (feature_grads, feature_bounds, feature_terms)
        )
    grads |= dict(enumerate(feature_grads))
    limits |= dict(enumerate(feature_bounds))
    loss, bound = parts.detach().numpy(), np.where(w == 0, 0.0, w * bounds)
    if call.reduction != "none":
        loss, bound = loss.sum(), bound.sum()
    lse = [] if call.loss == "siglip" else [d.lse.detach().numpy() for d, *_ in directions]
    offsets = [d.off for d, *_ in directions[: len(lse)]]
    lse_bounds = [
        2 * off + 24 * unit * (1 + np.abs(x)) for off, x in zip(offsets, lse, strict=True)
    ]
    return Judgement(
        losses.detach().numpy(), loss, bound, grads, limits, feature_terms, lse, lse_bounds,
        dot.detach().numpy(), positive, excluded,
        unit * ((8 + np.sqrt(width)) * call.scale * sizes + 1e-300),
    )  # fmt: skip


def judge_prefixes(call: Call, compute: str, prefixes: list[tuple[int, float]]) -> Judgement:
    """The sum of the losses of the first `width` features times `weight`, over the prefixes.

    Log-sum-exps are those of all features, the last prefix.
    """
    total, width = judge(call, compute), call.features[0].shape[1]
    sums = replace(total, loss=0.0, loss_bound=0.0)
    sums.grads, sums.bounds = dict.fromkeys(total.grads, 0.0), dict.fromkeys(total.bounds, 0.0)
    for narrow, weight in prefixes:
        part = judge(replace(call, features=tuple(z[:, :narrow] for z in call.features)), compute)
        sums.loss += weight * part.loss
        sums.loss_bound += weight * part.loss_bound
        for name, gradient in part.grads.items():
            if isinstance(name, int):
                gradient = np.pad(gradient, ((0, 0), (0, width - narrow)))
            if gradient is not None:
                sums.grads[name] += weight * gradient
            sums.bounds[name] += weight * part.bounds[name]
    return sums
