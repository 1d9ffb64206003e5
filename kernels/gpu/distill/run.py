"""The run of the distillation pass: sums of losses, gradient blocks, and their products."""

from __future__ import annotations

from dataclasses import dataclass

import cupy
import numpy as np

from ...direction_losses import Direction
from ...problem import Array, Gradients, Problem
from .. import config
from ..device.arguments import Fields, address
from ..schedule import Operands, ScheduledPass
from ..tiled.buffers import Buffers
from ..tiled.gradient import GradientRun
from ..tiled.gradient_blocks import RANGES, SOURCES, Factors, find_ranges, new_ranges
from ..tiled.operands import Operand, OperandSide, find_feature_divisors
from ..vectors import Scalars

Pair = tuple[Direction, Direction]  # of student and teacher


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
            "factor": 1 + buffers.truncation_bias(problem.shape[2]),
            "feature_divisors": address(self.feature_divisors, 2),
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
    buffers: Buffers, rows: Pair, columns: Pair | None, scales: tuple[Fields, Fields]
) -> tuple[Factors, Factors]:
    """The factors of the probabilities of student and teacher, whose logits have these `scales`
    (struct Scale). One exponential serves rows and columns of both models, or of none."""
    shape, sources = (len(rows[0].reference), 0), []
    for model in (0, 1):
        vectors = {"row_reference": rows[model].reference, "row_factor": cupy.ones(shape[0])}
        if columns is not None:
            shape = shape[0], len(columns[model].reference)
            vectors["column_reference"] = columns[model].reference
            vectors["column_factor"] = cupy.ones(shape[1])
        sources.append(dict.fromkeys(SOURCES) | vectors)
    ranges = new_ranges(), new_ranges()
    for of, out in zip(sources, ranges, strict=True):
        find_ranges(buffers.launcher, shape, of, out)  # no divisor: probabilities are at most 1
    first = RANGES.offset("one_exponential") // 8
    flags = [each.view(np.int64)[first : first + 1] for each in ranges]
    flags[0] &= flags[1]
    flags[1][:] = flags[0]
    student, teacher = (
        Factors(buffers.launcher, buffers.real, shape, *each)
        for each in zip(sources, scales, ranges, strict=True)
    )
    return student, teacher


class DistillationRun(GradientRun):
    """Blocks of a student and a teacher whose log-sum-exps are known."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: Distillation,
        gradients: Gradients | None, teacher: Teacher,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue, self.teacher = epilogue, teacher
        m, n, _ = problem.shape
        self.positive_gradient = cupy.zeros(m)
        # columns have the weights of rows
        self.find_ranges(m, n, by_factor=True, row_factor=epilogue.row_weight)
        self.row_weight = buffers.divide_factors(epilogue.row_weight, self.ranges)
        self.column_weight = None
        if epilogue.column_weight is not None:
            self.column_weight = buffers.divide_factors(epilogue.column_weight, self.ranges)

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        of_student, of_teacher = (each.fields(rows, columns) for each in self.epilogue.factors)
        query, key = self.teacher_operands(rows, columns)
        item, teacher = self.buffers.operands.item, self.teacher
        teacher_block = self.block_fields(rows, columns, False) | {
            "q": query.fields(item), "k": key.fields(item), "width": teacher.width,
            "scale": teacher.logit_scale,
        }  # fmt: skip
        arguments = {
            "teacher": teacher_block, "factors": of_student,
            "teacher_factors": of_teacher, "row_weight": address(self.row_weight, rows.start),
            "column_weight": address(self.column_weight, columns.start),
            "row_sums": self.memory["row_partials"],
            "column_sums": self.memory.get("column_partials"),
        }  # fmt: skip
        if isinstance(self.shape, config.Sweep):
            arguments |= {
                **self.gradient_arguments(),
                "teacher_q": teacher.query.tensor_map(query, self.shape.query_box),
                "teacher_k": teacher.key.tensor_map(key, config.BLOCK_M),
            }
        else:
            arguments["gradient_block"] = self.gradient_fields()
        self.launch(self.scheduled.kernel, rows, columns, arguments)
        m, n = self.q.rows, self.k.rows
        self.add_sums("row", self.shape.row_slots(m, n), self.epilogue.row_sums, rows)
        if self.column_weight is not None:
            slots = self.shape.column_slots(m, n)
            self.add_sums("column", slots, self.epilogue.column_sums, columns)
        self.multiply(rows, columns, row_block, column_block)

    def teacher_operands(self, rows: slice, columns: slice) -> tuple[Operand, Operand]:
        """The rows of the teacher's features for a block."""
        teacher, staged = self.teacher, self.buffers.workspace.staged
        query = teacher.query.block(rows, "teacher_query_rows", self.memory, staged)
        return query, teacher.key.block(columns, "teacher_key_rows", self.memory, staged)

    def add_sums(self, side: str, slots: int, sums: Array, part: slice) -> None:
        """Add the sums of a block's tiles to those of its rows, or of its columns."""
        no_divisor = self.epilogue.factors[0].ranges
        partial_sums, scale = self.memory[f"{side}_partials"], self.scale
        self.buffers.add_partial_sums(
            partial_sums, None, slots, no_divisor, scale, part, sums[0], sums[1], None
        )
