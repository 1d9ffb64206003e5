"""Prefixes as data: the problem of all features, the problem of each prefix, their epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..epilogues import SoftmaxGradient, Statistics
from ..problem import Array, Problem, fast_replace


@dataclass
class PrefixStatistics(Statistics):
    """The sums of each prefix. The fields of `Statistics` are the sums with all features."""

    prefixes: Sequence[Statistics] = ()


@dataclass
class PrefixGradient(SoftmaxGradient):
    """The gradient of each prefix: its `SoftmaxFactors`, and dL/dx at its positives."""

    prefixes: Sequence[tuple[Any, Array]] = ()


def prefix_problems(problem: Problem, prefixes: Sequence[tuple[int, float]]) -> list[Problem]:
    """The problem of each prefix of the features: (width, weight of its losses)."""
    return [
        fast_replace(
            problem, query=problem.query[:, :width], key=problem.key[:, :width],
            upstream=problem.upstream * weight,
        )
        for width, weight in prefixes
    ]  # fmt: skip
