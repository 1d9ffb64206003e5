"""The checks of a teacher: its features and its scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arrays import kinds, native
from ..kernels.distill.problem import make_taught_problem
from ..kernels.problem import Array
from ..result import QueryKeyGrads
from ..spec import DIMS, LOSSES, NAMES, OWN, SOFTMAX, Loss
from . import norms, validation
from .call import Request

# Distillation, whose functions have arguments of their own: with the columns' softmax, and without
REFUSED = (*NAMES, *SOFTMAX, *OWN, *DIMS, "metrics", "return_logits")
DISTILL = Loss(
    "distill", ("query", "key"), QueryKeyGrads, row_direction_weight=0.5,
    column_direction_weight=0.5, square=True, refused=REFUSED, taught=True,
)  # fmt: skip
DISTILL_ROWS = Loss("distill", ("query", "key"), QueryKeyGrads, refused=REFUSED, taught=True)

ALL_LOSSES = {**LOSSES, DISTILL.name: DISTILL}  # by name


class Teacher(NamedTuple):
    """The arguments of a teacher, as the caller passes them."""

    query: Any
    key: Any
    temperature: Any = None
    scale: Any = None
    two_sided: Any = True

    @property
    def loss(self) -> Loss:
        return DISTILL if self.two_sided else DISTILL_ROWS


def add_teacher(loss: Loss, request: Request, features: Sequence[Array], teacher: Teacher) -> None:
    """Make the problem of a checked call one with this teacher."""
    validation.flag("two_sided", teacher.two_sided)
    names = "teacher_query", "teacher_key"
    teachers = [native(z, name) for name, z in zip(names, teacher, strict=False)]
    both = [features[0], *teachers]
    validation.features([loss.arguments[0], *names], both, kinds(both), 0)
    for name, z, rows in zip(names, teachers, features, strict=True):
        if z.shape != (len(rows), teachers[0].shape[1]):
            expected = f"({len(rows)}, {teachers[0].shape[1]})"
            raise ValueError(f"{name}: expected shape {expected}, got {z.shape}")
    problem, static = request.problem, request.static
    scale = problem.scale
    temperatures = teacher.temperature, teacher.scale
    if temperatures != (None, None):
        if None not in temperatures:
            raise ValueError("teacher_temperature, teacher_scale: expected one of them, got both")
        try:
            scale = validation.scale(loss, *temperatures, problem.compute)
        except (TypeError, ValueError) as error:
            raise type(error)(f"teacher_{error}") from None
    if static.check_finite:
        norms.require_finite(static.xp, names, teachers)
    request.problem = make_taught_problem(problem, teachers[0], teachers[1], scale)
