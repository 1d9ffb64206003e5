"""Random calls of all losses and options on the CPU, beside brute force in float64 with autograd.

    python tests/brute/random_calls.py                   20000 calls
    python tests/brute/random_calls.py --count 500 --seed 7 --record results.json
    python tests/brute/random_calls.py --only 1234       one of them, once more

A call is wrong if its loss, a log-sum-exp, a gradient or a metric is further from brute force than
its bound, which follows from the rounding of the logits (brute_force.py). Losses are from 1e-9 to
20, norms of rows from 1e-300 to 1e300. A call follows from the seed and its number. Needs PyTorch.

A tenth of the calls has a NaN or an infinity in an array. Such a call is wrong if two methods
disagree on which numbers of the result are finite, or if all losses of such features are finite.
("naive" multiplies NaN by 0, as the others do not: a query that is not finite spoils all losses of
CLIP, through the softmax of columns. So there it is not compared with them.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from brute_force import Call, Judgement, find_positives, judge, judge_prefixes
from draw import METHODS, Drawn, draw
from infonce.kernels.cpu import schedule
from rich.console import Console
from rich.progress import track
from rich.table import Table

import infonce
from infonce import spec

ROUNDING = {"float64": 0.0, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def evaluate(drawn: Drawn) -> tuple[infonce.LossAndGrad, Any]:
    """The result with gradients, and the result of the loss alone."""
    call = drawn.call
    options = {"scale": call.scale, "normalize": call.normalize, "reduction": call.reduction,
             "weights": call.weights, "ids": call.ids, **call.softmax, **drawn.extra}  # fmt: skip
    if drawn.prefixes is not None:
        options["dims"], options["dim_weights"] = zip(*drawn.prefixes, strict=True)
    if call.loss == "sup_con":
        del options["ids"]
    args = [*call.features]
    if call.labels is not None:
        args.append(call.labels)
    if call.loss == "siglip":
        args.append(call.bias)
    alone = {k: v for k, v in drawn.options.items() if k in ("method", "precision", "workspace")}
    with contextlib.ExitStack() as stack:
        for name, value in drawn.patches.items():
            stack.enter_context(mock.patch.object(schedule, name, value))
        out = getattr(infonce, f"{call.loss}_loss_and_grad")(
            *args, **options, **drawn.options, grad_out=call.grad_out
        )
        return out, getattr(infonce, f"{call.loss}_loss")(*args, **options, **alone)


def shares(drawn: Drawn, want: Judgement) -> Iterator[tuple[str, float]]:
    """For each array that was compared: its name, and its largest error divided by the bound."""
    out, alone = evaluate(drawn)
    call = drawn.call
    rounding = 2.0**-24 if out.loss.dtype == np.float32 else 2.0**-53
    for name, got in (("loss", out.loss), ("loss alone", alone)):
        bound = want.loss_bound + 2 * rounding * np.abs(want.loss) + 1e-43
        yield name, share(got, want.loss, bound)
    if want.lse:
        lses = out.lse if isinstance(out.lse, tuple) else (out.lse,)
        for got, right, bound in zip(lses, want.lse, want.lse_bounds, strict=True):
            yield "lse", share(got, right, bound + 2 * rounding * np.abs(right) + 1e-300)
    for place, name in enumerate(spec.LOSSES[call.loss].arguments):
        got = getattr(out.grads, name)
        if got is not None:
            # a product that underflows is off by half of the smallest number, times the scale
            tiny = float(ml_dtypes.finfo(drawn.compute).smallest_subnormal)
            bound = want.bounds[place] + tiny * max(1.0, call.scale) * max(want.dots.shape)
            roundings = len(drawn.prefixes or [1])  # the gradient of each prefix is rounded
            yield "gradient", gradient_share(got, want.grads[place], bound, roundings)
    for name in ("scale", "bias"):
        got = getattr(out.grads, name, None)
        if got is not None:
            right = float(want.grads[name])
            bound = want.bounds[name] + 2 * rounding * abs(right) + 1e-43
            yield f"d {name}", share(got, right, bound)
    if out.metrics is not None:
        yield "metrics", metrics_share(out.metrics, call, want, rounding)


def disagreements(drawn: Drawn) -> list[str]:
    """What is wrong in a call with a number that is not finite."""
    of_features = "feature" in drawn.poison
    scale_may_stay_finite = of_features or "guide" in drawn.poison
    found: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        drawn.options["method"] = method
        try:
            out, alone = evaluate(drawn)
        except ValueError as error:
            found[method] = {"error": str(error)}
            continue
        numbers = {"loss": out.loss, "loss alone": alone}
        lses = out.lse if isinstance(out.lse, tuple) else (out.lse,)
        if not of_features:  # else the losses say so, and other numbers may stay finite
            numbers |= {f"lse {i}": lse for i, lse in enumerate(lses) if lse is not None}
        for name, gradient in out.grads._asdict().items():
            if gradient is not None and not (scale_may_stay_finite and name == "scale"):
                rows = np.asarray(gradient, np.float64)  # an element may spoil its row
                numbers[f"d {name}"] = rows.sum(axis=tuple(range(1, rows.ndim)))
        found[method] = {k: np.isfinite(np.asarray(z, np.float64)) for k, z in numbers.items()}
    right, wrong = found["auto"], []
    for method, finite in found.items():
        if of_features and np.all(finite.get("loss", False)):
            wrong.append(f"{method}: all losses are finite")
        if method == "naive" and (of_features or "grad_out" in drawn.poison):
            continue  # 0 times NaN spoils more there
        names = finite.keys() ^ right.keys()
        names |= {k for k in finite.keys() & right.keys() if np.any(finite[k] != right[k])}
        if names:
            wrong.append(f"{method} and auto: {', '.join(sorted(names))}")
    return wrong


def share(got: Any, want: Any, bound: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        ratio = np.where(same, 0.0, np.abs(got - want) / bound)
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0.0))


def gradient_share(got: Any, want: Any, bound: Any, roundings: int) -> float:
    """The largest error of a row divided by its bound, with so many roundings to the dtype of the
    gradient. A row may be infinite only near the dtype's limit."""
    finfo = ml_dtypes.finfo(got.dtype)
    wide = got.astype(np.longdouble)
    length = np.sqrt((want * want).sum(axis=1))
    bound = bound + (roundings * ROUNDING[got.dtype.name] + 2.0**-52) * length
    bound = bound + 2 * float(finfo.smallest_subnormal) * np.sqrt(want.shape[1])
    near = np.abs(want).max(axis=1) + bound >= float(finfo.max)
    assert (np.isfinite(wide).all(axis=1) | near).all(), "not finite"
    wide = np.where(near[:, None], want, wide)
    return float((np.sqrt(((wide - want) ** 2).sum(axis=1)) / bound).max())


def metrics_share(got: Any, call: Call, want: Judgement, rounding: float) -> float:
    """Of the positive's logits. Infinity if a rank is wrong: less than the number of rivals that
    are above the positive by more than the bounds, or more than the number of those that may be.
    """
    rows = np.arange(len(want.dots))
    at = want.positive.argmax(axis=1)
    logits = np.where(want.excluded, -np.inf, call.scale * want.dots)
    off = want.logit_bounds + 4 * rounding * np.abs(call.scale * want.dots)
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
    return share(got.positive, positive, 2 * its_off + 1e-43)


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    losses: Counter[int] = field(default_factory=Counter)
    norms: list[float] = field(default_factory=lambda: [np.inf, 0.0])

    def add(self, number: int, drawn: Drawn) -> None:
        call = drawn.call
        for key in (call.loss, drawn.dtype, drawn.options["method"]):
            self.counts[key] += 1
        self.counts.update(call.softmax.keys())
        low, high = drawn.norms
        self.norms = [min(self.norms[0], low or np.inf), max(self.norms[1], high)]
        self.counts["dims"] += drawn.prefixes is not None
        self.counts["not finite"] += bool(drawn.poison)
        self.counts["no positives"] += bool(np.ndim(call.labels) and not has_positives(call))
        try:
            if drawn.poison:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    different = disagreements(drawn)
                if different:
                    self.wrong.append({"number": number, "loss": call.loss, "dtype": drawn.dtype,
                                       "poison": drawn.poison, "methods": different})  # fmt: skip
                return
            with np.errstate(all="ignore"):
                want = (
                    judge(call, drawn.compute)
                    if drawn.prefixes is None
                    else judge_prefixes(call, drawn.compute, drawn.prefixes)
                )
                judged = max_by_name(shares(drawn, want))
        except Exception as error:
            self.wrong.append({"number": number, "error": f"{type(error).__name__}: {error}"})
            return
        for what, value in judged.items():
            kind = f"{what} of {drawn.dtype}"
            self.worst[kind] = max(self.worst.get(kind, 0.0), value)
        bad = {what: value for what, value in judged.items() if not value <= 1}
        if bad:
            self.wrong.append({"number": number, "loss": call.loss, "dtype": drawn.dtype,
                               "compute": drawn.compute, **drawn.options, **bad})  # fmt: skip
        loss = want.losses[np.isfinite(want.losses) & (want.losses > 0)]
        self.losses.update(np.floor(np.log10(loss)).astype(int).tolist() if len(loss) else [])


def has_positives(call: Call) -> bool:
    return bool(find_positives(call, len(call.features[0]), len(call.features[-1])).any())


def max_by_name(pairs: Iterator[tuple[str, float]]) -> dict[str, float]:
    most: dict[str, float] = {}
    for name, value in pairs:
        most[name] = max(most.get(name, 0.0), value)
    return most


def versions() -> dict[str, str]:
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions_by_name = {
        "commit": commit,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in ("infonce", "numpy", "numba", "torch"):
        versions_by_name[name] = str(__import__(name).__version__)
    return versions_by_name


def main() -> int:
    as_written = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--count", type=int, default=20_000, help="number of calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one call")
    parser.add_argument("--record", type=Path, help="write counts and worst shares here, JSON")
    arguments = parser.parse_args()
    console, tally, provenance = Console(), Tally(), versions()
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    for number in track(numbers, "random calls", console=console):
        tally.add(number, draw(arguments.seed, number))
    table = Table("compared", "largest share of its bound")
    for name, value in sorted(tally.worst.items()):
        table.add_row(name, f"{value:.2g}")
    console.print(table)
    decades = {f"1e{k}": v for k, v in sorted(tally.losses.items())}
    console.print(f"calls: {dict(tally.counts)}\nrows by size of loss: {decades}")
    for wrong in tally.wrong[:40]:
        console.print(f"wrong: {wrong}", markup=False)
    console.print(f"{len(numbers)} calls, {len(tally.wrong)} wrong")
    if arguments.record:
        record = {"seed": arguments.seed, "calls": len(numbers), "wrong": tally.wrong,
                  "versions": provenance, "counts": dict(sorted(tally.counts.items())),
                  "largest_norms": tally.norms, "rows_by_decade_of_loss": decades,
                  "worst_share_of_bound": dict(sorted(tally.worst.items()))}  # fmt: skip
        arguments.record.write_text(
            json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8"
        )
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
