"""Comparison of a result with what is right, relative to the bounds of oracle.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from oracle import Judgement, judge
from problems import Problem, draw

ROUNDING = {"float64": 0.0, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
METRICS = ("row_rank", "column_rank", "positive", "hardest_negative")  # those that are compared
Result = dict[str, Any]  # loss, gradients by the names of arguments; also "lse", "metrics"


@lru_cache(maxsize=4000)
def judged(seed: int, number: int, largest: int) -> Judgement:
    """What is right for a problem: all executors compute the same problems."""
    problem = draw(seed, number, largest)
    with np.errstate(all="ignore"):
        return judge(problem, problem.compute)


def shares(
    problem: Problem, want: Judgement, got: Result, roundings: int = 1, device: bool = False
) -> dict[str, float]:
    """For each kind of array that was compared: its largest error, divided by the bound.

    `roundings`: so many times a gradient is rounded to the dtype of features. `device`: of a
    GPU, whose exponentials in float32 are within 2^-22, which takes subnormal losses for 0, and
    which rounds elements of dL/dx to 16 bits, too.
    """
    with np.errstate(all="ignore"):
        worst: dict[str, float] = {}
        for name, value in _shares(problem, want, got, roundings, device):
            worst[name] = max(worst.get(name, 0.0), value)
        return worst


def _shares(
    problem: Problem, want: Judgement, got: Result, roundings: int, device: bool
) -> Iterator[tuple[str, float]]:
    rounding = 2.0**-24 if np.asarray(got["loss"]).dtype == np.float32 else 2.0**-53
    wider = 4 if device and problem.compute == "float32" else 1
    upstream = float(np.abs(problem.grad_out).max(initial=0.0))
    # a row's loss has a weight of at most 2
    flushed = 2.0**-125 * problem.shape[0] if wider > 1 else 1e-43
    for name in ("loss", "loss alone"):
        if name in got:
            bound = wider * want.loss_bound + 2 * rounding * np.abs(want.loss) + flushed
            yield name, share(got[name], want.loss, bound)
    for have, right, bound in zip(got.get("lse", ()), want.lse, want.lse_bounds, strict=False):
        yield "lse", share(have, right, bound + 2 * rounding * np.abs(right) + 1e-300)
    # a product that underflows is off by half of the smallest number, times the scale
    tiny = float(ml_dtypes.finfo(problem.compute).smallest_subnormal)
    tiny *= max(1.0, problem.scale, upstream) * max(want.dots.shape)
    if "scores" in got:
        bound = want.logit_bounds / problem.scale + 2 * rounding * np.abs(want.dots)
        yield "scores", share(got["scores"], want.dots, wider * bound)
    for name, right in want.grads.items():
        if got.get(name) is None:
            if name in problem.settings.get("wrt", want.grads):
                yield f"no d {name}", np.inf
            continue
        if name in ("scale", "bias"):
            right = float(right)
            bound = wider * want.bounds[name] + 2 * roundings * rounding * abs(right) + 1e-43
            yield f"d {name}", share(got[name], right, bound)
        else:  # the gradient of each prefix is rounded
            times = roundings * len(problem.options.get("dims", [1]))
            have = np.asarray(got[name]).reshape(right.shape)
            bound = wider * want.bounds[name] + tiny
            if name == "query" and "own" in problem.options:
                # the parts of keys and of own negatives are rounded and added
                # (each part has the dtype of the gradient, and its range)
                terms = want.terms[0] * (1 if "dims" not in problem.options else np.inf)
                bound = bound + ROUNDING[have.dtype.name] * terms
                if have.dtype.itemsize == 2:
                    beyond = want.terms[0] >= float(ml_dtypes.finfo(have.dtype).max)
                    bound = np.where(beyond, np.inf, bound)
            if device and "dims" not in problem.options:
                place = problem.kind.arguments.index(name)
                bound = bound + ROUNDING.get(problem.dtype, 0.0) * want.terms[place]
            if device and problem.dtype in ("float16", "float32"):
                # Elements of dL/dx are one or two float16 numbers, divided so that a bound of all,
                # twice the largest, becomes 2^13. So each is off by up to 2^-25 2^-13 of the bound
                sums = want.terms[problem.kind.arguments.index(name)]
                prefixes = np.sum(problem.options.get("dim_weights", times))
                rows = max(want.dots.shape)
                bound = bound + 2.0**-37 * prefixes * rows * np.max(sums, initial=0.0)
            yield "gradient", gradient_share(have, right, bound, times, upstream)
    if got.get("metrics") is not None:
        yield "metrics", metrics_share(got["metrics"], problem, want, rounding)


def share(got: Any, want: Any, bound: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    ratio = np.where(same, 0.0, np.abs(got - want) / bound)
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0.0))


def gradient_share(got: Any, want: Any, bound: Any, roundings: int, upstream: float) -> float:
    """The largest error of a row divided by its bound, with so many roundings to the dtype of the
    gradient. A row may be infinite only near the dtype's limit."""
    if not got.size:
        return 0.0
    finfo = ml_dtypes.finfo(got.dtype)
    wide = got.astype(np.longdouble)
    length = np.sqrt((want * want).sum(axis=1))
    bound = bound + (roundings * ROUNDING[got.dtype.name] + 2.0**-52) * length
    smallest = float(finfo.smallest_subnormal) * max(1.0, upstream * (roundings - 1))
    bound = bound + 2 * smallest * np.sqrt(want.shape[1])
    near = np.abs(want).max(axis=1) + bound >= float(finfo.max) / max(1.0, 1 / (upstream or 1.0))
    assert (np.isfinite(wide).all(axis=1) | near).all(), "not finite"
    wide = np.where(near[:, None], want, wide)
    return float((np.sqrt(((wide - want) ** 2).sum(axis=1)) / bound).max())


def metrics_share(got: Any, problem: Problem, want: Judgement, rounding: float) -> float:
    """Of the positive's logits. Infinity if a rank is wrong: less than the number of rivals that
    are above the positive by more than the bounds, or more than the number of those that may be.
    """
    rows = np.arange(len(want.dots))
    at = want.positive.argmax(axis=1)
    logits = np.where(want.excluded, -np.inf, problem.scale * want.dots)
    off = want.logit_bounds + 4 * rounding * np.abs(problem.scale * want.dots)
    positive, its_off = logits[rows, at], off[rows, at]
    both = [(got.row_rank, logits, off, rows, at)]
    if got.column_rank is not None:
        both.append((got.column_rank, logits.T, off.T, at, rows))
    for rank, x, e, row, key in both:
        p, room = x[row, key][:, None], e + e[row, key][:, None]
        rivals = np.ones_like(x, bool)
        rivals[row, key] = False
        low, high = ((rivals & (x > p + by * room)).sum(axis=1) for by in (1, -1))
        if not ((low <= rank) & (rank <= high)).all():
            return np.inf
    rivals = np.ones_like(logits, bool)
    rivals[rows, at] = False
    hardest = np.where(rivals, logits, -np.inf).max(axis=1)
    bound = 2 * np.where(rivals, off, 0.0).max(axis=1) + 1e-43
    return max(
        share(got.positive, positive, 2 * its_off + 1e-43),
        share(got.hardest_negative, hardest, bound),
    )


def finite(got: Result, features_spoilt: bool) -> dict[str, Any]:
    """Which numbers of a result are finite: losses, and rows of gradients.

    Of features that are not finite only the losses, and the gradients of features: the others may
    stay finite."""
    names = [
        z for z in got if z not in ("metrics", "lse", *(("scale",) if features_spoilt else ()))
    ]
    rows = {name: np.asarray(got[name], np.float64) for name in names if got[name] is not None}
    if not features_spoilt:
        rows |= {f"lse {i}": z for i, z in enumerate(got.get("lse", ()))}
    with np.errstate(all="ignore"):
        return {name: np.isfinite(z.sum(axis=tuple(range(1, z.ndim)))) for name, z in rows.items()}
