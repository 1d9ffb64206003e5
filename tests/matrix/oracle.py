"""The losses from whole matrices in float64 PyTorch, their gradients by its autograd, and how far
from them a result may be. Nothing here is taken from the library.

The rounding of a logit is at most `unit` times the size of the products that it is a sum of, and a
few times that for what the exponentials, sums and matrix products add. Everything else follows from
that by the derivatives: `slopes` are the sizes of dloss_i / dx_ij, term by term.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from option_values import COMPARISONS, above_positives
from problems import Problem, beside, compare_tokens, find_own, in_pair, is_read

Array = np.ndarray
SYMMETRIC = ("nt_xent", "sup_con", "gte")


@dataclass
class Judgement:
    """What is right, and by how much a result may differ from it. Gradients are [rows, D] (of
    tokens [rows tokens, D]) in long double, because rows may have any norm; their bounds are of the
    norms of rows, and their terms the sizes of what adds up to them."""

    losses: Array  # [M], unweighted
    loss: Any
    loss_bound: Any
    grads: dict[str, Any]
    bounds: dict[str, Any]
    terms: list[Array]
    lse: list[Array]  # of rows, and of columns
    lse_bounds: list[Array]
    dots: Array  # [M, N], or scores of tokens
    positive: Array  # [M, N]
    excluded: Array
    logit_bounds: Array  # [M, N]


def compute_norms(z: Array) -> Array:
    """[M] in long double, in which no square of a float64 over- or underflows."""
    wide = z.astype(np.longdouble)
    return np.sqrt((wide * wide).sum(axis=1))


def find_excluded(problem: Problem, positive: Array) -> Array:
    rows, columns = positive.shape
    excluded = np.zeros((rows, columns), bool)
    ids, groups = problem.options.get("ids"), problem.options.get("groups")
    if problem.loss == "gte":
        ids = np.concatenate([np.arange(rows // 2) if ids is None else ids] * 2)
        groups = None if groups is None else np.tile(groups, 2)
    if ids is not None:
        row_ids, column_ids = in_pair(ids)
        for r, c in zip(np.atleast_2d(row_ids.T), np.atleast_2d(column_ids.T), strict=True):
            excluded |= r[:, None] == c
    if groups is not None:
        row_groups, column_groups = in_pair(groups)
        excluded |= row_groups[:, None] != column_groups
    if problem.loss in ("nt_xent", "sup_con"):
        excluded |= np.eye(rows, dtype=bool)
    if not problem.options.get("in_batch", True):
        excluded[:] = True
    return excluded & ~positive


def find_guide_products(problem: Problem) -> Array | None:
    """[M, N], of gte [2B, 2B]."""
    if "guide" not in problem.options:
        return None
    sides = [z.astype(np.float64) for z in in_pair(problem.options["guide"])]
    if problem.loss == "gte":
        sides = [np.concatenate(sides)] * 2
    if problem.normalize:
        sides = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in sides]
    return np.asarray(sides[0] @ sides[1].T)


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
    problem: Problem, dot: torch.Tensor, scale: torch.Tensor, positive: Array, excluded: Array,
    sizes: Array, unit: float, width: int, bias: Array | None, guide: Array | None,
) -> Direction:  # fmt: skip
    """Cross-entropy of each row. `sizes` are products of norms |q| |k|, or their sums over tokens;
    `width` is the number of products that add up to a logit, D or L D.

    `off` is the largest error of a row's logits:
    unit ((8 + sqrt(D)) s |q| |k| + 4 |x| + 2 s |margin| + 4 |bias|).
    The bound of its loss over K keys is
    2 sum_j slopes_j (off + 8 unit) + unit (24 + 4 sqrt(K)) |loss|.
    """
    o = problem.options
    e, margin, hardness = (o.get(k, 0.0) for k in ("label_smoothing", "margin", "hardness"))
    decoupled = o.get("decoupled", False)
    plain = dot.detach().numpy()
    has = positive.any(axis=1)
    for name, each in COMPARISONS.items():
        if name in o:
            beyond = each.is_beyond(plain, each.bound(o[name], plain, positive))
            excluded = excluded | (~positive & beyond)
    if guide is not None:
        above = guide > above_positives(o["guide_margin"], guide, positive)
        excluded = excluded | (~positive & above)
    at, kept = torch.from_numpy(positive), torch.from_numpy(~excluded)
    x = scale * (dot - margin * at.double())
    if bias is not None:
        x = x + torch.from_numpy(bias)
    weighted = x + hardness * dot.detach()
    n, m = masked_lse(weighted, kept & ~at), masked_lse(x, at)
    count = at.sum(dim=1).clamp(min=1)
    target = torch.from_numpy(problem.find_targets(positive))
    mean = (x * target).sum(dim=1)
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
        slopes += positive * (number > 1) * (share.numpy() + target.numpy())
        if e:
            slopes += 2 * e / keys.numpy()[:, None] + e * target.numpy()
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
    problem: Problem, dot: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, positive: Array,
    excluded: Array, sizes: Array, unit: float, width: int,
) -> Direction:  # fmt: skip
    z = (scale * dot + bias) * torch.from_numpy(np.where(positive, -1.0, 1.0))
    of_row, of_column = (np.maximum(1, positive.sum(axis=axis)) for axis in (1, 0))
    times = np.where(positive, (1 / of_row[:, None] + 1 / of_column) / 2, 1.0)
    terms = torch.where(torch.from_numpy(excluded), 0.0, torch.logaddexp(torch.zeros(()), z))
    terms = terms * torch.from_numpy(times)
    with torch.no_grad():
        slopes = torch.sigmoid(z).numpy() * times * ~excluded
        products = float(scale) * sizes
        off = (8 + np.sqrt(width)) * products + 4 * abs(float(bias)) + 4 * np.abs(z.numpy())
        off = unit * np.where(excluded, 0.0, off).max(axis=1)
        losses = terms.sum(dim=1)
        bounds = 2 * slopes.sum(axis=1) * (off + 8 * unit)
        bounds += (24 + 4 * np.sqrt(dot.shape[1])) * unit * losses.numpy()
        # An exponential is at least the smallest normal number
        bounds += dot.shape[1] * (2.0**-1022 if unit < 2.0**-50 else 2.0**-126)
    return Direction(terms.sum(dim=1), losses, slopes, off, bounds)


def distilled(
    dot: torch.Tensor, scale: torch.Tensor, taught: torch.Tensor, sizes: Array, taught_off: Array,
    unit: float, width: int,
) -> Direction:  # fmt: skip
    """Cross-entropy of each row with the softmax of the teacher's logits, whose error is
    `taught_off` [R, K].

    dloss / dtaught_j is t_j (mean of x - x_j), with t the teacher's softmax of the row."""
    x, target = scale * dot, torch.softmax(taught, dim=1)
    mean = (target * x).sum(dim=1)
    lse = masked_lse(x, torch.ones_like(x, dtype=torch.bool))
    losses = lse - mean
    with torch.no_grad():
        slopes = (torch.exp(x - lse[:, None]) + target).numpy()
        spread = (target * (x - mean[:, None]).abs()).sum(dim=1).numpy()
        logits = x.abs().numpy()
        summed = losses.abs().numpy() + (target * x.abs()).sum(dim=1).numpy()
    off = (8 + np.sqrt(width)) * float(scale.detach()) * sizes + 4 * logits
    off, taught_off = unit * off.max(axis=1), taught_off.max(axis=1)
    bounds = 2 * slopes.sum(axis=1) * (off + 8 * unit) + 2 * spread * (2 * taught_off + 8 * unit)
    bounds += (24 + 4 * np.sqrt(dot.shape[1])) * unit * summed
    return Direction(losses, lse, slopes, np.maximum(off, taught_off), bounds)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch uses one thread within this context, because the matrices are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Side:
    """Rows of features: as given, their lengths, and unit rows with `normalize`."""

    z: Array  # [rows, D]
    lengths: Array
    leaf: torch.Tensor  # what gradients are of: rows of length 1 with `normalize`
    rows: torch.Tensor  # what is multiplied

    @classmethod
    def make(cls, z: Array, normalize: bool) -> Side:
        lengths, wide = compute_norms(z), z.astype(np.longdouble)
        if normalize:
            wide = wide / np.where(lengths == 0, 1, lengths)[:, None]
        leaf = torch.from_numpy(wide.astype(np.float64)).requires_grad_()
        nonzero = torch.from_numpy(lengths != 0)[:, None]
        norm = torch.where(nonzero, (leaf * leaf).sum(dim=1, keepdim=True), 1.0).sqrt()
        return cls(z, lengths, leaf, leaf / norm if normalize else leaf)

    def sizes(self, normalize: bool) -> Array:
        return (self.lengths != 0).astype(np.longdouble) if normalize else self.lengths


class MaxSim:
    """Of the tokens of queries: the tokens of keys with the largest products, the first of equal
    ones, and the weights of these products in scores."""

    def __init__(self, problem: Problem) -> None:
        counts, key_counts = problem.find_tokens()
        features, length = problem.read_features(), key_counts.shape[1]
        _, winners, _ = compare_tokens(*features, key_counts, problem.normalize)
        self.key_counts, starts = key_counts, length * np.arange(len(key_counts))
        self.winners = (winners + starts).reshape(-1, len(key_counts))  # [M L, N]
        divisors = np.ones(len(counts))
        if problem.options.get("token_mean", False):
            divisors = np.maximum(counts.sum(axis=1), 1)
        of_row = np.repeat(np.eye(len(counts)), counts.shape[1], axis=1)
        self.weights = of_row * counts.ravel() / divisors[:, None]  # [M, M L]

    def find_scores(self, dot: torch.Tensor) -> torch.Tensor:
        """[M, N], of products of tokens [M L, N K]."""
        return torch.from_numpy(self.weights) @ dot.gather(1, torch.from_numpy(self.winners))

    def find_sizes(self, lengths: list[Array]) -> Array:
        """Sums of products of norms [M, N]: rounding may choose another token."""
        of_keys = np.where(self.key_counts, lengths[1].reshape(self.key_counts.shape), 0)
        return np.outer(self.weights @ lengths[0], of_keys.max(axis=1))

    def find_feature_terms(self, every: Array, lengths: list[Array]) -> list[Array]:
        """Sizes of gradients of tokens, from sizes of gradients of scores."""
        of_tokens, key_terms = self.weights.T @ every, np.zeros(len(lengths[1]), np.longdouble)
        np.add.at(key_terms, self.winners, of_tokens * lengths[0][:, None])
        return [(of_tokens * lengths[1][self.winners]).sum(axis=1), key_terms]


def find_taught(problem: Problem, unit: float) -> tuple[torch.Tensor, Array]:
    """The teacher's logits, and their errors: [M, N]."""
    o = problem.options
    sides = [Side.make(o[name], problem.normalize) for name in ("teacher_query", "teacher_key")]
    scale = o.get("teacher_scale", problem.scale)
    logits = scale * (sides[0].rows @ sides[1].rows.T).detach()
    lengths = [side.sizes(problem.normalize).astype(np.float64) for side in sides]
    width = o["teacher_query"].shape[1]
    off = (8 + np.sqrt(width)) * scale * lengths[0][:, None] * lengths[1]
    return logits, unit * (off + 4 * logits.abs().numpy())


@one_thread()
def judge_one(problem: Problem, compute: str) -> Judgement:
    """`compute`: "float64" or "float32", of products and exponentials."""
    unit = (2.0**-53 if compute == "float64" else 2.0**-24) + 2.0**-53  # this module's own, too
    # Smaller probabilities may be 0: where one exponential serves two directions, sooner
    shared = problem.loss in (*SYMMETRIC, "clip", "distill")
    floor = 2.0**-850 if compute == "float64" else 2.0 ** (-58 if shared else -95)
    o, normalize, features = problem.options, problem.normalize, problem.read_features()
    width = int(np.prod(features[0].shape[1:]))
    if problem.loss == "gte":
        features = (np.concatenate([z.astype(np.float64) for z in features]),)
    sides = [Side.make(z.reshape(-1, z.shape[-1]), normalize) for z in features]
    q, k = sides[0].rows, sides[-1].rows
    lengths = [side.sizes(normalize) for side in sides]
    dot, sizes = q @ k.T, (lengths[0][:, None] * lengths[-1]).astype(np.float64)
    maxsim = MaxSim(problem) if problem.has_tokens else None
    if maxsim:
        dot, sizes = maxsim.find_scores(dot), maxsim.find_sizes(lengths).astype(np.float64)
    rows, columns = dot.shape
    scale = torch.tensor(problem.scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(o.get("bias", -10.0), dtype=torch.float64, requires_grad=True)
    positive, guide = problem.find_positives(), find_guide_products(problem)
    excluded = find_excluded(problem, positive)
    key_bias = o.get("key_bias")
    in_batch = dot, positive, excluded, sizes
    if "own" in o:  # more columns, which are other keys for each row
        read, counts, in_table = find_own(o)
        many = counts.shape[1]
        if in_table is None:
            in_table = np.arange(rows * many).reshape(rows, many)
            sides.append(Side.make(read.reshape(rows * many, width), normalize))
        else:  # rows of the table have gradients
            used = is_read(o)[:, None]
            sides.append(Side.make(np.where(used, o["own"], 0), normalize))
        own = sides[-1].rows[in_table]
        own_lengths = sides[-1].sizes(normalize)[in_table]
        none, more = np.zeros((rows, many), bool), (q[:, None] * own).sum(dim=2)
        dot = torch.cat([dot, more], dim=1)
        positive = np.c_[positive, none]
        excluded = np.c_[excluded, ~counts]
        sizes = np.c_[sizes, (lengths[0][:, None] * own_lengths).astype(np.float64)]
        if key_bias is not None or "own_bias" in o:
            of_keys = np.zeros((rows, columns)) + (0 if key_bias is None else key_bias)
            key_bias = np.c_[of_keys, o.get("own_bias", np.zeros((rows, many)))]
        # a guide leaves out none of them
        guide = None if guide is None else np.c_[guide, np.full((rows, many), -np.inf)]
    common = sizes, unit, width
    directions: list[tuple[Direction, float, bool]] = []
    if problem.loss == "siglip":
        directions = [(sigmoid(problem, dot, scale, bias, positive, excluded, *common), 1.0, False)]
    elif problem.loss == "distill":
        taught, off = find_taught(problem, unit)
        both = problem.options.get("two_sided", True)
        share = 0.5 if both else 1.0
        row_direction = distilled(dot, scale, taught, sizes, off, unit, width)
        directions = [(row_direction, share, False)]
        if both:
            column_direction = distilled(dot.T, scale, taught.T, sizes.T, off.T, unit, width)
            directions.append((column_direction, share, True))
    elif problem.loss == "gte":
        half = rows // 2
        row_direction = softmax(
            problem, torch.cat([dot[:half], dot[half:]], 1), scale, beside(positive),
            beside(excluded), beside(sizes), unit, width, None,
            None if guide is None else beside(guide),
        )  # fmt: skip
        directions = [(row_direction, 1.0, False)]
    else:
        share = 0.5 if problem.loss == "clip" else 1.0
        row_direction = softmax(problem, dot, scale, positive, excluded, *common, key_bias, guide)
        directions = [(row_direction, share, False)]
        if problem.loss == "clip":
            column_direction = softmax(
                problem, dot.T, scale, positive.T, excluded.T, sizes.T, unit, width, None,
                None if guide is None else guide.T,
            )  # fmt: skip
            directions.append((column_direction, share, True))
    losses = sum(share * d.losses for d, share, _ in directions)
    bounds = sum(share * d.loss_bounds for d, share, _ in directions)
    assert isinstance(losses, torch.Tensor)

    one = beside(positive) if problem.loss == "gte" else positive
    every = problem.loss in ("siglip", "distill")
    w = np.ones(rows) if every else one.any(axis=1).astype(np.float64)
    w = w * o.get("weights", 1.0)
    if problem.reduction == "mean":
        w = w / (w.sum() or 1.0)
    weights = torch.from_numpy(w)
    used = torch.where(weights == 0, 0.0, losses)  # and no 0 times -inf
    upstream = torch.from_numpy(np.broadcast_to(problem.grad_out, (len(w),)).copy())
    parts = weights * used
    (torch.where(weights == 0, 0.0, upstream * parts)).sum().backward()

    # Errors of dL/dx, [rows, columns]: relative to its terms
    up = np.abs(w * upstream.numpy())
    terms = 32 + 4 * np.sqrt(max(len(q), len(k))) + np.sqrt(width)
    dx, wrong = np.zeros(dot.shape), np.zeros(dot.shape)
    for d, share, turned in directions:
        size = share * up[:, None] * d.slopes
        error = size * (4 * d.off + terms * unit)[:, None] + share * up[:, None] * floor
        if problem.loss == "gte":
            size, error = (np.concatenate(np.split(a, 2, axis=1)) for a in (size, error))
        dx += size.T if turned else size
        wrong += error.T if turned else error
    grads: dict[str, Any] = {"scale": scale.grad, "bias": bias.grad}
    margin = abs(o.get("margin", 0.0))
    limits: dict[str, Any] = {"scale": 2 * (wrong * (sizes + margin * positive)).sum()}
    limits["bias"] = 2 * wrong.sum()

    def feature_sizes(logit_terms: Array) -> list[Array]:
        """Norms of rows of gradients, from sizes of dL/dx."""
        every = logit_terms.astype(np.longdouble) * problem.scale
        if maxsim:
            return maxsim.find_feature_terms(every, lengths)
        logit_terms, of_own = every[:, :columns], every[:, columns:]
        query_terms, key_terms = logit_terms @ lengths[-1], logit_terms.T @ lengths[0]
        if "own" in o:
            query_terms = query_terms + (of_own * own_lengths).sum(axis=1)
            own_terms = np.zeros(len(sides[-1].z), np.longdouble)
            np.add.at(own_terms, in_table, of_own * lengths[0][:, None])
            return [query_terms, key_terms, own_terms]
        if problem.loss in SYMMETRIC:
            return [query_terms + key_terms]
        return [query_terms, key_terms]

    found: list[list[Array]] = [[], [], []]  # gradients, their bounds, sizes of their terms
    for side, error, size in zip(sides, feature_sizes(wrong), feature_sizes(dx), strict=True):
        assert side.leaf.grad is not None
        g, length = side.leaf.grad.numpy().astype(np.longdouble), side.lengths
        if normalize:
            length = np.where(length == 0, np.inf, length)
            g, error, size = g / length[:, None], 4 * error / length, size / length
        for values, value in zip(found, (g, error, size), strict=True):
            values.append(value)
    if problem.loss == "gte":
        found = [np.split(both[0], 2) for both in found]
    grads |= dict(zip(problem.kind.arguments, found[0], strict=True))
    limits |= dict(zip(problem.kind.arguments, found[1], strict=True))
    for name in (*problem.kind.locked, *([] if problem.kind.sigmoid else ["bias"])):
        del grads[name], limits[name]
    loss, bound = parts.detach().numpy(), np.where(w == 0, 0.0, w * bounds)
    if problem.reduction != "none":
        loss, bound = loss.sum(), bound.sum()
    lse = [] if problem.loss == "siglip" else [d.lse.detach().numpy() for d, *_ in directions]
    offsets = [d.off for d, *_ in directions[: len(lse)]]
    lse_bounds = [
        2 * off + 24 * unit * (1 + np.abs(x)) for off, x in zip(offsets, lse, strict=True)
    ]
    dot, positive, excluded, sizes = in_batch
    return Judgement(
        losses.detach().numpy(), loss, bound, grads, limits, found[2], lse, lse_bounds,
        dot.detach().numpy(), positive, excluded,
        unit * ((8 + np.sqrt(width)) * problem.scale * sizes + 1e-300),
    )  # fmt: skip


def judge(problem: Problem, compute: str) -> Judgement:
    """The loss; with `dims` the sum of the losses of prefixes, each times its weight.

    Log-sum-exps are those of all features, the last prefix.
    """
    total = judge_one(problem, compute)
    if "dims" not in problem.options:
        return total
    width = problem.features[0].shape[-1]
    sums = replace(total, loss=0.0, loss_bound=0.0)
    sums.grads, sums.bounds = dict.fromkeys(total.grads, 0.0), dict.fromkeys(total.bounds, 0.0)
    for narrow, weight in zip(*(problem.options[z] for z in ("dims", "dim_weights")), strict=True):
        options = dict(problem.options)
        if "own" in options:
            options["own"] = options["own"][..., :narrow]
        features = tuple(z[..., :narrow] for z in problem.features)
        part = judge_one(replace(problem, features=features, options=options), compute)
        sums.loss += weight * part.loss
        sums.loss_bound += weight * part.loss_bound
        for name, gradient in part.grads.items():
            if name not in ("scale", "bias"):
                others = [(0, 0)] * (gradient.ndim - 1)
                gradient = np.pad(gradient, [*others, (0, width - narrow)])
            sums.grads[name] += weight * gradient
            sums.bounds[name] += weight * part.bounds[name]
    return sums
