"""Problems by an executor, and what is wrong with its results."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import comparison
import numpy as np
from executors import EXECUTORS
from problems import Problem, draw

MOST_DRAWS = 1500  # among which rare options are sought


@lru_cache
def draws_with_options(seed: int, largest: int) -> dict[str, list[int]]:
    """Which of the first draws have each option."""
    found: dict[str, list[int]] = {}
    for number in range(MOST_DRAWS):
        for option in draw(seed, number, largest).options:
            found.setdefault(option, []).append(number)
    return found


def numbers(name: str, seed: int) -> list[int]:
    """The first draws, as many as the executor has; and the first one with each option that none of
    these has, if the executor takes it."""
    executor, chosen = EXECUTORS[name], list(range(EXECUTORS[name].draws))

    def find_options(number: int) -> set[str]:
        problem = draw(seed, number, executor.largest)
        return {*problem.options} if executor.takes(problem) else set()

    compared = set[str]().union(*map(find_options, chosen))
    for option, later in draws_with_options(seed, executor.largest).items():
        if option not in compared:
            first = next((n for n in later if option in find_options(n)), None)
            if first is not None:
                chosen.append(first)
                compared |= find_options(first)
    return chosen


@dataclass
class Tally:
    """What executors computed."""

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # share of the bound, by kind of array
    wrong: list[dict[str, Any]] = field(default_factory=list)
    losses: Counter[int] = field(default_factory=Counter)  # by decade

    def run(self, name: str, seed: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.add(name, seed, number)

    def add(self, name: str, seed: int, number: int) -> None:
        """Adds one problem, if the executor takes it."""
        executor = EXECUTORS[name]
        problem = draw(seed, number, executor.largest)
        if not executor.takes(problem):
            self.counts["left out"] += 1
            return
        self.counts["compared"] += 1
        self.counts.update([problem.loss, problem.dtype, *problem.options, *problem.settings])
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if problem.poison:
                    self.counts["not finite"] += 1
                    bad: Any = disagreements(name, problem)
                    judged = {}
                else:
                    want = comparison.judged(seed, number, executor.largest)
                    got = executor.run(problem)
                    judged = comparison.shares(
                        problem, want, got, executor.roundings, executor.device
                    )
                    bad = {what: value for what, value in judged.items() if not value <= 1}
                    loss = want.losses[np.isfinite(want.losses) & (want.losses > 0)]
                    self.losses.update(np.floor(np.log10(loss)).astype(int).tolist())
        except Exception as error:
            bad = f"{type(error).__name__}: {error}"
            judged = {}
        for what, value in judged.items():
            kind = f"{what} of {problem.dtype}"
            self.worst[kind] = max(self.worst.get(kind, 0.0), value)
        if bad:
            self.wrong.append({"executor": name, "problem": repr(problem), "wrong": bad})


def disagreements(name: str, problem: Problem) -> list[str]:
    """What is wrong with the result of a problem with a number that is not finite: losses are
    finite, or other numbers are finite than by "NumPy, auto"."""
    of_features = "feature" in problem.poison or "teacher" in problem.poison
    problem.settings.pop("workspace", None)
    found = []
    for each in ("NumPy, auto", name):
        try:
            found.append(comparison.finite(EXECUTORS[each].run(problem), of_features))
        except ValueError as error:
            found.append({"error": str(error).partition(":")[0]})
    right, got = found
    wrong = ["all losses are finite"] if of_features and np.all(got.get("loss", False)) else []
    # Blocks without a common group are computed or not; 0 times NaN spoils more in "naive"; a query
    # spoils losses of clip through the columns
    skips = bool({"groups", "in_batch"} & {*problem.options})
    spreads = "naive" in name and (of_features or "grad_out" in problem.poison)
    spreads |= problem.loss in ("clip", "distill") and of_features
    if skips or spreads or EXECUTORS[name].not_finite == "loss":
        right, got = ({k: z for k, z in each.items() if k == "error"} for each in (right, got))
    for key in sorted(right.keys() | got.keys()):
        if key in right and key in got and np.array_equal(right[key], got[key]):
            continue
        if key in ("error", "loss") or (key in right and key in got):
            wrong.append(f"{key}: {got.get(key)}, by NumPy {right.get(key)}")
    return wrong
