"""The run of the distillation pass: sums of losses, gradient blocks, and their products."""

from __future__ import annotations

from dataclasses import dataclass

import cupy
import numpy as np

from ...direction_losses import DirectionLosses
from ...problem import Array, Gradients, Problem
from .. import config
from ..device.arguments import Fields, address
from ..gradient_factors import (
    FACTOR_SOURCES,
    RANGES_STRUCTURE,
    GradientFactors,
    allocate_ranges,
    find_ranges,
    range_sources,
)
from ..schedule import Operands, ScheduledPass
from ..tiled.buffers import Buffers
from ..tiled.gradient import GradientRun
from ..tiled.operands import Operand, OperandSide, find_feature_divisors
from ..vectors import Scalars

# Of student and teacher: their rows, or their columns
ModelDirections = tuple[DirectionLosses, DirectionLosses]


class TeacherOperands:
    """The features of a teacher as operands, and the scale of its logits.

    `problem` is the teacher's problem. `buffers` are the student's, with the same precision.
    """

    def __init__(self, problem: Problem, operands: Operands, buffers: Buffers) -> None:
        launcher = buffers.launcher
        side = launcher, problem.normalize, buffers.real
        self.part_bytes = operands.part_bytes
        self.query = OperandSide(*side, problem.query, operands.query)
        self.key = OperandSide(*side, problem.key, operands.key)
        self.feature_divisors = find_feature_divisors(
            launcher, [self.query, self.key], buffers.schedule.device.multiprocessors
        )
        self._scalars = Scalars(launcher, problem)  # keeps the array of the scale alive
        # struct Scale, by which kernels multiply the teacher's products to get exponents
        self.exponent_scale = self._scalars.scale | {
            "factor": 1 + buffers.truncation_bias(problem.shape[2]),
            "feature_divisors": address(self.feature_divisors, 2),
        }


@dataclass
class Distillation:
    """The epilogue: factors of probabilities, weights of losses, and the sums of losses.

    Without weights, `Factors` give probabilities: a_i e_ij, that of key j in the softmax of row i.
    """

    factors: tuple[GradientFactors, GradientFactors]  # of the student, and of the teacher
    row_weight: Array  # [M] float64: dL / d(loss of the row), times the scale
    column_weight: Array | None  # [N] float64, the same of columns, of a two-sided loss
    row_sums: Array  # [2, M] float64 out: (target, excess) of kernels/cuda/block/distill.cuh
    column_sums: Array  # [2, N] float64 out; zeros if the loss is not two-sided

    phase = "gradient"


def probability_factors(
    buffers: Buffers, rows: ModelDirections, columns: ModelDirections | None,
    scales: tuple[Fields, Fields],
) -> tuple[GradientFactors, GradientFactors]:  # fmt: skip
    """The factors of the probabilities of student and teacher.

    `scales` are struct Scale of each model. One exponential serves rows and columns of both models
    or of none, because a kernel takes one branch for both.
    """
    shape, sources = (len(rows[0].reference), 0), []
    for model in (0, 1):
        vectors = {"row_reference": rows[model].reference, "row_factor": cupy.ones(shape[0])}
        if columns is not None:
            shape = shape[0], len(columns[model].reference)
            vectors["column_reference"] = columns[model].reference
            vectors["column_factor"] = cupy.ones(shape[1])
        sources.append(dict.fromkeys(FACTOR_SOURCES) | vectors)
    # struct Ranges of each model. The factors are 1, so the gradient divisors are 1, too
    ranges = allocate_ranges(), allocate_ranges()
    for model_sources, model_ranges in zip(sources, ranges, strict=True):
        find_ranges(buffers.launcher, model_ranges, range_sources(shape, model_sources))
    first = RANGES_STRUCTURE.offset("one_exponential") // 8
    flags = [model_ranges.view(np.int64)[first : first + 1] for model_ranges in ranges]
    flags[0] &= flags[1]
    flags[1][:] = flags[0]
    student, teacher = (
        GradientFactors(buffers.launcher, buffers.real, shape, *model)
        for model in zip(sources, scales, ranges, strict=True)
    )
    return student, teacher


class DistillationRun(GradientRun):
    """The pass over blocks of a student and a teacher, whose log-sum-exps are known."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, epilogue: Distillation,
        gradients: Gradients | None, teacher: TeacherOperands,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        self.epilogue, self.teacher = epilogue, teacher
        m, n, _ = problem.shape
        self.positive_gradient = cupy.zeros(m)  # there are no positives
        # abs(dL/dx) is at most the weight of the row plus that of the column. Columns have the
        # weights of rows, so `by_factor` takes twice the largest weight of a row
        self.find_ranges(m, n, by_factor=True, row_factor=epilogue.row_weight)
        # weights over the gradient divisor, so that the kernel computes P
        self.row_weight = buffers.divide_factors(epilogue.row_weight, self.ranges)
        self.column_weight = None
        if epilogue.column_weight is not None:
            self.column_weight = buffers.divide_factors(epilogue.column_weight, self.ranges)

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        student_factors, teacher_factors = (
            factors.fields(rows, columns) for factors in self.epilogue.factors
        )
        query, key = self.teacher_operands(rows, columns)
        item, teacher = self.buffers.operands.item, self.teacher
        teacher_block = self.block_fields(rows, columns, False) | {
            "q": query.fields(item), "k": key.fields(item), "width": teacher.part_bytes,
            "scale": teacher.exponent_scale,
        }  # fmt: skip
        arguments = {
            "teacher": teacher_block, "factors": student_factors,
            "teacher_factors": teacher_factors,
            "row_weight": address(self.row_weight, rows.start),
            "column_weight": address(self.column_weight, columns.start),
            "row_sums": self.parts["row_partials"],
            "column_sums": self.parts.get("column_partials"),
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
        m, n = self.query_operand.rows, self.key_operand.rows
        self.add_sums("row", self.shape.row_slots(m, n), self.epilogue.row_sums, rows)
        if self.column_weight is not None:
            slots = self.shape.column_slots(m, n)
            self.add_sums("column", slots, self.epilogue.column_sums, columns)
        self.multiply(rows, columns, row_block, column_block)

    def teacher_operands(self, rows: slice, columns: slice) -> tuple[Operand, Operand]:
        """The operands of the teacher's features for a block."""
        teacher, staged = self.teacher, self.buffers.workspace.staged
        query = teacher.query.prepare_rows(rows, "teacher_query_rows", self.parts, staged)
        key = teacher.key.prepare_rows(columns, "teacher_key_rows", self.parts, staged)
        return query, key

    def add_sums(self, side: str, slots: int, sums: Array, rows: slice) -> None:
        """Add a block's partial sums, `slots` for each row (column), to `sums` of `rows`."""
        divisor_one = self.epilogue.factors[0].ranges  # begins with the gradient divisor 1
        partial_sums, scale = self.parts[f"{side}_partials"], self.exponent_scale
        self.buffers.add_partial_sums(
            partial_sums, moments=None, slots=slots, ranges=divisor_one, scale=scale, rows=rows,
            first_sums=sums[0], second_sums=sums[1], moment_sums=None,
        )  # fmt: skip
