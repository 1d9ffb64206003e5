"""Distillation on a GPU, by kernels; kernels/distill/solve.py has the formulas.

First come two log-sum-exp passes, of the student and of the teacher, as of losses without
positives. Then the distillation pass (run.py) computes the products of both models, and from them
gradients, and sums for the other terms: the mean of the student's logits under the teacher's
softmax, which is a term of the loss, and the gradient of the scale.
"""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np

from ...direction_losses import DirectionLosses
from ...distill.problem import TaughtProblem, models
from ...epilogues import Statistics, Sums
from ...problem import LN_2, LOG2_E, Array, Gradients, Problem, fast_replace
from ...solve import Solution
from ..device.arguments import readable_by_kernels, valid_scale
from ..device.launcher import device_properties
from ..device.launches import Queue
from ..schedule import Call, Schedule, distillation_schedules
from ..tiled.buffers import Buffers
from ..tiled.lse import StatisticsRun
from ..vectors import ElementwiseVectors, TiledVectors
from .run import (
    Distillation,
    DistillationRun,
    ModelDirections,
    TeacherOperands,
    probability_factors,
)


def solve_distillation_by_kernels(problem: TaughtProblem, gradients: Gradients | None) -> Solution:
    """Loss, log-sum-exps and gradients of a whole call."""
    problem = _with_one_precision(problem)
    properties = device_properties(cupy.cuda.Device().id)
    *lse_schedules, schedule = distillation_schedules(
        Call.from_problem(problem, gradients), properties
    )
    m = problem.shape[0]
    positives = cupy.full(m, -1)  # none
    student, teacher = (
        readable_by_kernels(fast_replace(model, positives=positives, scale=valid_scale(model)))
        for model in models(problem)
    )
    if isinstance(student.upstream, float):
        student = fast_replace(student, upstream=cupy.full(m, student.upstream))
    student_stats, teacher_stats = map(_statistics, (student, teacher), lse_schedules)
    rows = _direction(student_stats.rows), _direction(teacher_stats.rows)
    columns = None
    if student_stats.columns is not None and teacher_stats.columns is not None:
        columns = _direction(student_stats.columns), _direction(teacher_stats.columns)
    student = fast_replace(student, moments=problem.moments)
    return _solve(student, teacher, schedule, rows, columns, gradients)


def _with_one_precision(problem: TaughtProblem) -> TaughtProblem:
    """The problem in a precision that is accurate for the features of both models.

    One kernel multiplies the features of both models, and has one format of operands. So if their
    dtypes differ, both get fp32 (on Hopper fp16x3), or fp64 if the call has it.
    """
    if problem.compute_precision != "fp64" and problem.teacher_query.dtype != problem.query.dtype:
        return fast_replace(problem, compute_precision="fp32")
    return problem


def _statistics(model: Problem, schedule: Schedule) -> Statistics:
    """Run the log-sum-exp pass of a model. Returns the sums of its exponentials."""
    buffers = Buffers(model, schedule, Queue())
    model, stats = buffers.vectors.statistics(model)
    buffers.prepare(model)
    for scheduled in schedule.passes:
        StatisticsRun(buffers, model, scheduled, stats).run()
    return stats


def _direction(sums: Sums) -> DirectionLosses:
    """The log-sum-exps of rows or of columns: in base 2, they are the references of gradients."""
    no_positives = cupy.full(len(sums.max), -cupy.inf)
    return ElementwiseVectors().direction(sums, no_positives)


def _solve(
    problem: Problem, teacher_problem: Problem, schedule: Schedule, rows: ModelDirections,
    columns: ModelDirections | None, gradients: Gradients | None,
) -> Solution:  # fmt: skip
    """The solution, from the log-sum-exps of both models; `problem` is the student's."""
    m, n, _ = problem.shape
    buffers = Buffers(problem, schedule, Queue())
    vectors = buffers.vectors
    buffers.prepare(problem)
    gradients = vectors.with_dots(problem, gradients)
    assert schedule.teacher is not None
    teacher = TeacherOperands(teacher_problem, schedule.teacher, buffers)

    # The epilogue of the distillation pass. NaN flags of both models make weights and losses NaN
    nans = _row_nans(problem, vectors, queries_spoil_all=False)
    # the softmax of a column, whose probabilities are targets, is over all queries of the teacher
    nans = nans + _row_nans(teacher_problem, vectors, queries_spoil_all=problem.two_sided)
    weight = (problem.upstream + nans) * problem.scale
    scales = buffers.exponent_scale, teacher.exponent_scale
    factors = probability_factors(buffers, rows, columns, scales)
    row_weight, column_weight = problem.row_direction_weight, problem.column_direction_weight
    row_sums, column_sums = cupy.zeros((2, m)), cupy.zeros((2, n))
    epilogue = Distillation(
        factors, row_weight * weight,
        None if columns is None else column_weight * weight, row_sums, column_sums,
    )  # fmt: skip

    # One pass computes everything; or the first pass computes dQ and the sums for the losses, and
    # the others ranges of dK. These add to copies of the sums, which nobody reads
    for before, scheduled in zip((None, *schedule.passes), schedule.passes, strict=False):
        follows_dq = before is not None and before.dk_accumulator is None
        if follows_dq:
            epilogue = replace(epilogue, row_sums=row_sums.copy(), column_sums=column_sums.copy())
        DistillationRun(buffers, problem, scheduled, epilogue, gradients, teacher).run()

    # Losses, and their derivatives by log(scale)
    row_loss, row_slope = _losses(problem, buffers, row_sums, factors[0].row_reference, rows[0])
    losses, slope = row_weight * row_loss + nans, row_weight * row_slope
    log_scale_grad = column_lse = None
    if columns is not None:
        column_loss, column_slope = _losses(
            problem, buffers, column_sums, factors[0].column_reference, columns[0]
        )
        losses = losses + column_weight * column_loss
        slope, column_lse = slope + column_weight * column_slope, columns[0].lse
    if problem.moments:
        log_scale_grad = problem.upstream * (slope + nans)
    dots = None if gradients is None else gradients.dots
    loss, scale_grad, _ = vectors.totals(problem, losses, log_scale_grad, dots, bias_grad=None)
    return Solution(losses, rows[0].lse, column_lse, scale_grad=scale_grad, loss=loss)


def _losses(
    problem: Problem, buffers: Buffers, sums: Array, rounded_reference: Array,
    direction: DirectionLosses,
) -> tuple[Array, Array]:  # fmt: skip
    """Losses of rows, or of columns, and d loss / d log(scale), from complete sums.

    `sums` are (target, excess) of block/distill.cuh. The target is sum_j q y, with the exponents y
    = c' x - h, where c' and h (`rounded_reference`) are c and the reference r, rounded to float32.
    With u = c / c', which takes out the rounding,

        log2 p = c x - r = u (y + h) - r,    loss = -sum_j q log p = -ln 2 (u target + u h - r),

    because q adds up to 1. The second result is the gradient of log(scale) from the excess. In a
    call without MOMENTS, this gradient comes from <dQ, q> in `TiledVectors.totals`.
    """
    # the factor of products in base-2 logits, and its quotient to the rounded factor
    c = problem.scale if isinstance(problem.scale, cupy.ndarray) else np.float64(problem.scale)
    c = c * (LOG2_E * buffers.exponent_scale["factor"])
    if buffers.feature_divisors is not None:
        c = buffers.feature_divisors[2] * c
    u = c / c.astype(buffers.real)
    rest = u * rounded_reference.astype(np.float64) - direction.reference
    losses = -LN_2 * (u * sums[0] + rest)
    return cupy.maximum(losses, 0.0), LN_2 * sums[1]


def _row_nans(problem: Problem, vectors: TiledVectors, queries_spoil_all: bool) -> Array:
    """[M] NaN for rows whose loss depends on a feature of a model that is not finite, else 0.

    Such a feature of a query makes the loss of its row NaN, or with `queries_spoil_all` all losses.
    Such a feature of a key makes all losses NaN.
    """
    any_key = cupy.zeros(1)
    rows = vectors.find_row_nans(problem, any_key)
    if queries_spoil_all:
        queries = fast_replace(problem, key=problem.query, symmetric=True)
        vectors.find_row_nans(queries, any_key)
    return vectors.add_nans(cupy.zeros(problem.shape[0]), rows, any_key)
