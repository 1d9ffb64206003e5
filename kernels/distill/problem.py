"""Distillation as data: a problem with a teacher, and its epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..epilogues import SoftmaxGradient, Statistics, Sums
from ..problem import Array, Problem, fast_replace


@dataclass(eq=False)
class TaughtProblem(Problem):
    """The student's softmax, without positives; the targets are the teacher's softmax."""

    teacher_query: Array = None  # [M, E]
    teacher_key: Array = None  # [N, E]
    teacher_scale: Any = 1.0
    auxiliary_names: ClassVar[tuple[str, str]] = "teacher_query", "teacher_key"

    @property
    def plain_logits(self) -> bool:
        return False  # code for plain logits computes no teacher's logits


def make_taught_problem(problem: Problem, query: Array, key: Array, scale: Any) -> TaughtProblem:
    """The problem with this teacher."""
    taught_problem = object.__new__(TaughtProblem)
    taught_problem.__dict__.update(
        problem.__dict__, teacher_query=query, teacher_key=key, teacher_scale=scale
    )
    return taught_problem


def models(problem: TaughtProblem) -> tuple[Problem, Problem]:
    """The softmax of the student, and the softmax of the teacher, as problems without positives.

    The fields are those of a shard of keys that contains no positive. A GPU runs the log-sum-exp
    pass of each problem by its kernels.
    """
    values = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    values |= {"key_shard": True, "lacks_positives": True, "moments": False}
    student = Problem(**values)
    teacher = fast_replace(
        student, query=problem.teacher_query, key=problem.teacher_key, scale=problem.teacher_scale
    )
    return student, teacher


@dataclass
class TaughtStatistics(Statistics):
    """The sums of the student's exponentials, and those of the teacher's.

    The moments of the teacher's sums are moments of the student's logits x, not of the teacher's
    logits t: sum_j 2^(t_ij - max_i) x_ij.
    """

    teacher_rows: Sums | None = None
    teacher_columns: Sums | None = None

    @property
    def row_sums(self) -> list[Sums]:
        assert self.teacher_rows is not None
        return [self.rows, self.teacher_rows]

    @property
    def column_sums(self) -> list[Sums]:
        if self.columns is None or self.teacher_columns is None:
            return []
        return [self.columns, self.teacher_columns]

    def for_block(self, column_sums: Sequence[Sums]) -> TaughtStatistics:
        columns, teacher_columns = column_sums or (None, None)
        block: TaughtStatistics = fast_replace(
            self, columns=columns, teacher_columns=teacher_columns
        )
        return block


@dataclass
class TaughtGradient(SoftmaxGradient):
    """Gradient pass of distillation: the formula of `SoftmaxGradient` for the student's logits,
    minus the same formula for the teacher's logits, whose vectors are in `teacher`."""

    teacher: SoftmaxGradient | None = None
