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
    SOURCES, Factors, OperandSide, find_feature_divisors, find_ranges, new_ranges,
)  # fmt: skip
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
        self._scalars = Scalars(launcher, problem)
        self.logit_scale = self._scalars.scale | {
            "factor": 1, "feature_divisors": address(self.feature_divisors, 2),
        }  # fmt: skip


@dataclass
class Distillation:
    """The epilogue: directions of student and teacher, weights of losses, sums of losses."""

    rows: tuple[Direction, Direction]  # of the student, and of the teacher
    columns: tuple[Direction, Direction] | None  # of a two-sided loss
    row_weight: Array  # [M] float64: dloss / d(row's loss), times the scale
    column_weight: Array | None  # [N]
    # [2, M] float64 out. For each row, the sums over its pairs of the teacher's probability times
    # the student's product of features, and of the difference of probabilities times this product
    row_sums: Array
    column_sums: Array  # [2, N]

    phase = "gradient"


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
        column_references = [None, None]
        if epilogue.columns is not None:
            column_references = [each.reference for each in epilogue.columns]
        self.find_ranges(
            m, n, by_factor=True, row_factor=epilogue.row_weight,
            column_reference=column_references[0], column_factor=epilogue.column_weight,
        )  # fmt: skip
        self.row_weight = self.divided(epilogue.row_weight)
        self.column_weight = None
        if epilogue.column_weight is not None:
            self.column_weight = self.divided(epilogue.column_weight)
        self.factors = [
            self.probability_factors(rows.reference, columns, scale)
            for rows, columns, scale in zip(
                epilogue.rows, column_references, (self.scale, teacher.logit_scale), strict=True
            )
        ]

    def probability_factors(
        self, row_reference: Array, column_reference: Array | None, scale: Fields
    ) -> Factors:
        """The factors of probabilities, which have no weights, and 1 as their divisor."""
        m, n, _ = self.problem.shape
        ranges = new_ranges()
        sources = dict.fromkeys(SOURCES) | {
            "row_reference": row_reference, "row_factor": cupy.ones(m),
            "column_reference": column_reference,
            "column_factor": None if column_reference is None else cupy.ones(n),
        }  # fmt: skip
        find_ranges(self.launcher, (m, n), sources, ranges)
        return Factors(self.launcher, self.buffers.real, (m, n), sources, scale, ranges)

    def divided(self, weight: Array) -> Array:
        """Weights divided by the gradient divisor."""
        out = cupy.empty(len(weight), self.buffers.real)
        self.launcher.vectors(
            "divide_factors", len(weight), x=weight, n=len(weight), ranges=self.ranges, out=out
        )
        return out

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        of_student, of_teacher = (each.fields(rows, columns) for each in self.factors)
        arguments = {
            "teacher": self.teacher_fields(rows, columns),
            "factors": of_student, "teacher_factors": of_teacher,
            "row_weight": address(self.row_weight, rows.start),
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
        self.launcher.vectors(
            "add_pairs", n, pairs=self.memory[f"{side}_partials"], z=None, slots=slots, stride=n,
            n=n, gradient_divisor=self.factors[0].ranges, scale=self.scale, a=address(target, part.start),
            b=address(excess, part.start), c=None,
        )  # fmt: skip
