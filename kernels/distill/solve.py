"""Distillation as two passes: cross-entropies with the softmax of a teacher's logits.

    loss_i = log sum_j exp(x_ij) - sum_j p^T_ij x_ij,    dloss_i / dx_ij = p_ij - p^T_ij

The first pass keeps the sums of rows and columns of both models. The sums of the teacher have a
moment with the student's logits, sum_j exp(x^T_ij) x_ij, where x^T are the teacher's logits.
Divided by the sum of exp(x^T_ij), it is the mean sum_j p^T_ij x_ij of the loss. The second pass
computes the logits of both models again, and their probabilities from the sums of the first pass.
Probabilities of student and teacher are computed by the same operations, so that the gradient is 0
where their logits are equal. p is the student's softmax, p^T the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..direction_losses import DirectionLosses
from ..epilogues import SoftmaxGradient, Sums
from ..problem import LN_2, Array, Gradients, Problem, fast_replace
from ..solve import Backend, Solution, Vectors, run_gradient_pass, solve_by_passes
from .problem import TaughtGradient, TaughtProblem, TaughtStatistics

Pair = tuple[DirectionLosses, DirectionLosses]  # of student and teacher


def solver_by_passes(problem: Problem) -> Callable[[Any, Backend, Gradients | None], Solution]:
    """The function that solves the problem by passes, with its teacher or without one."""
    return solve_distillation if isinstance(problem, TaughtProblem) else solve_by_passes


def solve_distillation(
    problem: TaughtProblem, backend: Backend, gradients: Gradients | None
) -> Solution:
    """Loss, log-sum-exps of the student, and gradients of its features, in two passes."""
    vectors, xp = backend.vectors, backend.vectors.xp
    m, n, _ = problem.shape
    gradients = vectors.with_dots(problem, gradients)
    problem = fast_replace(problem, positives=xp.full(m, -1))
    if isinstance(problem.upstream, float):
        problem = fast_replace(problem, upstream=xp.full(m, problem.upstream))
    _, begun = vectors.statistics(problem)
    stats = TaughtStatistics(
        begun.rows, begun.columns, begun.positive_logits,
        teacher_rows=vectors.identity(m, True),
        teacher_columns=vectors.identity(n, True) if problem.two_sided else None,
    )  # fmt: skip
    backend.run_pass(problem, backend.grid(problem, False), stats, None)

    row_nans = backend.row_nans(problem)
    rows, row_loss, slope = _side(vectors, stats.rows, stats.teacher_rows)
    losses, columns = problem.row_direction_weight * row_loss + row_nans, None
    if problem.two_sided:
        columns, column_loss, column_slope = _side(vectors, stats.columns, stats.teacher_columns)
        losses = losses + problem.column_direction_weight * column_loss
        if slope is not None:
            slope = problem.row_direction_weight * slope
            slope += problem.column_direction_weight * column_slope
    log_scale_grad = None if slope is None else problem.upstream * (slope + row_nans)
    if gradients is not None:
        student_gradient, teacher_gradient = (
            _gradient(problem, rows[which], columns and columns[which]) for which in (0, 1)
        )
        epilogue = TaughtGradient(**student_gradient.__dict__, teacher=teacher_gradient)
        run_gradient_pass(problem, backend, False, epilogue, gradients)
    dots = None if gradients is None else gradients.dots
    loss, scale_grad, _ = vectors.totals(problem, losses, log_scale_grad, dots, None)
    column_lse = None if columns is None else columns[0].lse
    return Solution(losses, rows[0].lse, column_lse, scale_grad=scale_grad, loss=loss)


def _side(
    vectors: Vectors, student: Sums | None, teacher: Sums | None
) -> tuple[Pair, Array, Array]:
    """The directions of student and teacher, the losses, and d loss / d log(scale), of all rows or
    of all columns. Without moments in the student's sums, the last is None."""
    assert student is not None
    assert teacher is not None
    no_positive = vectors.xp.full(len(student.max), -vectors.xp.inf)
    student_direction, teacher_direction = (
        vectors.direction(Sums(sums.max, sums.sum), no_positive) for sums in (student, teacher)
    )
    target = LN_2 * teacher.moment / teacher.sum  # sum_j p^T_ij x_ij
    slope = None
    if student.moment is not None:
        slope = LN_2 * student.moment / student.sum - target
    return (student_direction, teacher_direction), student_direction.lse - target, slope


def _gradient(
    problem: TaughtProblem, rows: DirectionLosses, columns: DirectionLosses | None
) -> SoftmaxGradient:
    """The gradient epilogue of one model: reference exponents, and factors with row shares."""
    row_weight = problem.row_direction_weight * problem.scale
    a = problem.upstream * row_weight * rows.reference_probability
    zeros = 0.0 * problem.upstream  # no row has a positive
    if columns is None:
        return SoftmaxGradient(rows.reference, a, None, None, zeros)
    column_weight = problem.column_direction_weight * problem.scale
    b = problem.upstream * column_weight * columns.reference_probability
    return SoftmaxGradient(rows.reference, a, columns.reference, b, zeros)
