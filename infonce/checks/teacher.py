"""Distillation: its data as a loss, and the checks of a teacher's features and scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arrays import describe_arrays, native
from ..kernels.distill.problem import make_taught_problem
from ..kernels.problem import Array
from ..result import QueryKeyGrads
from ..spec import (
    INTEGER_OPTIONS,
    LABEL_OPTIONS,
    LOSSES,
    OWN_OPTIONS,
    PREFIX_OPTIONS,
    SOFTMAX_OPTIONS,
    Loss,
)
from . import norms, validation
from .call import Request

# Distillation is not in `spec.LOSSES`, because its functions have arguments that no other loss has
REFUSED = (
    *INTEGER_OPTIONS,
    *SOFTMAX_OPTIONS,
    *OWN_OPTIONS,  # own, own_indices, own_mask, own_bias, in_batch
    *LABEL_OPTIONS,  # label_weights
    *PREFIX_OPTIONS,
    "metrics",  # no row has a positive, whose rank could be counted
    "return_logits",
)
# with a softmax over keys and one over queries (`two_sided`)
DISTILL = Loss(
    "distill", ("query", "key"), QueryKeyGrads, row_direction_weight=0.5,
    column_direction_weight=0.5, square=True, refused=REFUSED, taught=True,
)  # fmt: skip
# with the softmax over keys only
DISTILL_ROWS = Loss("distill", ("query", "key"), QueryKeyGrads, refused=REFUSED, taught=True)

ALL_LOSSES = {**LOSSES, DISTILL.name: DISTILL}  # name -> loss, distillation included


class Teacher(NamedTuple):
    """The arguments that only distillation has, as the caller passes them."""

    query: Any  # features of the teacher
    key: Any
    temperature: Any = None  # of the teacher; neither temperature nor scale: the student's
    scale: Any = None
    two_sided: Any = True  # also a softmax over queries

    @property
    def loss(self) -> Loss:
        """The distillation with one softmax or two."""
        return DISTILL if self.two_sided else DISTILL_ROWS


def add_teacher(loss: Loss, request: Request, features: Sequence[Array], teacher: Teacher) -> None:
    """Check the teacher, and replace the problem of a checked call by a problem with this teacher.

    `features` are the student's. The teacher's features have as many rows, and any width.
    """
    validation.flag("two_sided", teacher.two_sided)
    names = "teacher_query", "teacher_key"
    teachers = [native(z, name) for name, z in zip(names, teacher, strict=False)]
    on_one_device = [features[0], *teachers]
    descriptions = describe_arrays(on_one_device)
    validation.features([loss.arguments[0], *names], on_one_device, descriptions, 0)
    for name, z, rows in zip(names, teachers, features, strict=True):
        if z.shape != (len(rows), teachers[0].shape[1]):
            expected = f"({len(rows)}, {teachers[0].shape[1]})"
            raise ValueError(f"{name}: expected shape {expected}, got {z.shape}")
    problem, static = request.problem, request.static
    scale = problem.scale
    temperatures = teacher.temperature, teacher.scale
    if any(value is not None for value in temperatures):
        if all(value is not None for value in temperatures):
            raise ValueError("teacher_temperature, teacher_scale: expected one of them, got both")
        try:
            scale = validation.scale(loss, *temperatures, problem.compute_precision)
        except (TypeError, ValueError) as error:
            raise type(error)(f"teacher_{error}") from None
    if static.check_finite:
        norms.require_finite(static.xp, dict(zip(names, teachers, strict=True)))
    request.problem = make_taught_problem(problem, teachers[0], teachers[1], scale)
