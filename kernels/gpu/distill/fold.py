"""The run of the distillation fold: sums of losses, gradient blocks, and their products."""

from __future__ import annotations

from dataclasses import dataclass

import cupy

from ...direction_losses import Direction
from ...problem import Array, Gradients, Problem
from ..device.arguments import Fields, address
from ..schedule import Fold, Operands
from ..tiled.buffers import Buffers
from ..tiled.gradient import GradientRun
from ..tiled.operands import (
    SOURCES,
    Factors,
    OperandSide,
    find_feature_divisors,
    find_ranges,
    new_ranges,
)
from ..vectors import Scalars


class Teacher:
    """The features of a teacher as operands, and the scale of its logits."""

    def __init__(self, problem: Problem, operands: Operands, buffers: Buffers) -> None:
        launcher = buffers.launcher
        side = launcher, problem.normalize, buffers.real
        self.width = operands.width
        self.query = OperandSide(*side, problem.query, operands.query)
        self.key = OperandSide(*side, problem.key, operands.key)
        self.feature_divisors = find_feature_divisors(
            launcher, [self.query, self.key], buffers.schedule.device.multiprocessors
        )
        self._scalars = Scalars(launcher, problem)  # holds the array of the scale
        self.logit_scale = self._scalars.scale | {
            "feature_divisors": address(self.feature_divisors, 2)
        }


@dataclass
class Distillation:
    """The epilogue: factors of probabilities, weights of losses, and the sums of losses."""

    factors: tuple[Factors, Factors]  # of the student, and of the teacher
    row_weight: Array  # [M] float64: dL / d(loss of the row), times the scale
    column_weight: Array | None  # [N] of a two-sided loss
    row_sums: Array  # [2, M] float64 out: the sums of kernels/cuda/block/distill.cuh
    column_sums: Array  # [2, N]

    phase = "gradient"


def probability_factors(
    buffers: Buffers, rows: Direction, columns: Direction | None, scale: Fields
) -> Factors:
    """The factors of the probabilities of a model whose logits have a `scale` (struct Scale)."""
    m, n, ranges = len(rows.reference), 0, new_ranges()
    sources = dict.fromkeys(SOURCES)
    sources |= {"row_reference": rows.reference, "row_factor": cupy.ones(m)}
    if columns is not None:
        n = len(columns.reference)
        sources |= {"column_reference": columns.reference, "column_factor": cupy.ones(n)}
    find_ranges(
        buffers.launcher, (m, n), sources, ranges
    )  # no divisor: probabilities are at most 1
    return Factors(buffers.launcher, buffers.real, (m, n), sources, scale, ranges)


class DistillationRun(GradientRun):
    """Blocks of a student and a teacher whose log-sum-exps are known."""

    def __init__(
        self, buffers: Buffers, problem: Problem, fold: Fold, epilogue: Distillation,
        gradients: Gradients | None, teacher: Teacher,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, fold, epilogue.phase, gradients)
        self.epilogue, self.teacher = epilogue, teacher
        m, n, _ = problem.shape
        self.positive_gradient = cupy.zeros(m)
        # columns have the weights of rows
        self.find_ranges(m, n, by_factor=True, row_factor=epilogue.row_weight)
        self.row_weight = self.divided(epilogue.row_weight)
        self.column_weight = None
        if epilogue.column_weight is not None:
            self.column_weight = self.divided(epilogue.column_weight)

    def divided(self, weight: Array) -> Array:
        """Weights divided by the gradient divisor."""
        out = cupy.empty(len(weight), self.buffers.real)
        self.launcher.vectors(
            "divide_factors", len(weight), x=weight, n=len(weight), ranges=self.ranges, out=out
        )
        return out

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        of_student, of_teacher = (each.fields(rows, columns) for each in self.epilogue.factors)
        arguments = {
            "teacher": self.teacher_fields(rows, columns), "factors": of_student,
            "teacher_factors": of_teacher, "row_weight": address(self.row_weight, rows.start),
            "column_weight": address(self.column_weight, columns.start),
            "row_sums": self.memory["row_partials"],
            "column_sums": self.memory.get("column_partials"),
            "gradient_block": self.gradient_fields(),
        }  # fmt: skip
        self.launch(self.fold.kernel, rows, columns, arguments)
        m, n = self.q.rows, self.k.rows
        self.add_sums("row", self.shape.row_slots(m, n), self.epilogue.row_sums, rows)
        if self.column_weight is not None:
            slots = self.shape.column_slots(m, n)
            self.add_sums("column", slots, self.epilogue.column_sums, columns)
        self.multiply(rows, columns, row_block, column_block)

    def teacher_fields(self, rows: slice, columns: slice) -> Fields:
        """struct Block with the features of the teacher."""
        teacher, staged = self.teacher, self.buffers.workspace.staged
        item = self.buffers.operands.item
        query = teacher.query.block(rows, "teacher_query_rows", self.memory, staged)
        key = teacher.key.block(columns, "teacher_key_rows", self.memory, staged)
        return self.block_fields(rows, columns, False) | {
            "q": query.fields(item), "k": key.fields(item), "width": teacher.width,
            "scale": teacher.logit_scale,
        }  # fmt: skip

    def add_sums(self, side: str, slots: int, sums: Array, part: slice) -> None:
        """Add the sums of a block's tiles to those of its rows, or of its columns."""
        n, (target, excess) = part.stop - part.start, sums
        no_divisor = self.epilogue.factors[0].ranges
        self.launcher.vectors(
            "add_pairs", n, pairs=self.memory[f"{side}_partials"], z=None, slots=slots, stride=n,
            n=n, gradient_divisor=no_divisor, scale=self.scale, a=address(target, part.start),
            b=address(excess, part.start), c=None,
        )  # fmt: skip
