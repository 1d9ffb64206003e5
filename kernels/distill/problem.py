"""Distillation as data: a problem with a teacher, and its epilogues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..epilogues import SoftmaxGradient, Statistics, Sums
from ..problem import Array, Problem


@dataclass(eq=False)
class TaughtProblem(Problem):
    """A softmax without positives, whose targets are the softmax of a teacher's logits."""

    teacher_query: Array = None  # [M, E]
    teacher_key: Array = None  # [N, E]
    teacher_scale: Any = 1.0

    @property
    def plain_logits(self) -> bool:
        return False

    @property
    def needs_arrays(self) -> bool:
        return True


def taught(problem: Problem, query: Array, key: Array, scale: Any) -> TaughtProblem:
    """The problem with this teacher."""
    made = object.__new__(TaughtProblem)
    made.__dict__.update(
        problem.__dict__, teacher_query=query, teacher_key=key, teacher_scale=scale
    )
    return made


@dataclass
class TaughtStatistics(Statistics):
    """The sums of the teacher's exponentials too. Their moments are of the student's logits:
    sum_j 2^(t_ij - max_i) x_ij."""

    teacher_rows: Sums | None = None
    teacher_columns: Sums | None = None


@dataclass
class TaughtGradient(SoftmaxGradient):
    """Less the same of the teacher's logits."""

    teacher: SoftmaxGradient | None = None
