"""What plans record: the solution of a call, a block over ranks, steps on vectors over ranks.

Each function takes dataclasses of arrays and the queue for its launches. It returns the arrays that
it makes, by name (`plan.Build`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..epilogues import Epilogue, Statistics, Sums
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import BlockQuestion, Solution
from . import plan
from .device.launches import Queue
from .schedule import BlockFold, Call
from .tiled.backend import GPU
from .vectors import TiledVectors


def solution(
    problem: Problem, gradients: Gradients | None, queue: Queue
) -> dict[str, Array | None]:
    gpu = GPU(problem, gradients, queue)
    found = gpu.solve(problem, gradients)
    made = {
        "losses": found.losses if found.loss is None else None, "loss": found.loss,
        "row_lse": found.row_lse, "column_lse": found.column_lse,
        "scale_grad": found.scale_grad, "bias_grad": found.bias_grad,
    }  # fmt: skip
    if problem.retrieval_ranks:
        stats, losses = found.statistics, found.direction_losses
        assert stats is not None
        assert losses is not None
        made |= {
            "row_loss": losses[0], "column_loss": losses[1], "row_max": stats.rows.max,
            "positive": stats.positive_logits, "row_rank": stats.row_rank,
            "column_rank": stats.column_rank,
        }  # fmt: skip
    return made


_compiled: set[tuple[int, Call]] = set()  # kinds of calls, by device


def compile_kernels(problem: Problem, gradients: Gradients | None) -> None:
    """Compile all kernels of a first call of its kind at once, as a plan does."""
    kind = problem.query.device.id, Call.of(problem, gradients)
    if kind not in _compiled:
        _compiled.add(kind)
        silent = replace(problem, progress=None)
        plan.compile_kernels(solution, problem.progress, silent, gradients)


def solution_of(made: dict[str, Array]) -> Solution:
    """The solution whose arrays `solution` has returned."""
    get = made.get
    statistics = direction_losses = None
    if "row_rank" in made:
        rows = Sums(made["row_max"], None)
        statistics = Statistics(rows, None, made["positive"], made["row_rank"], get("column_rank"))
        direction_losses = made["row_loss"], get("column_loss")
    return Solution(
        get("losses"), get("row_lse"), get("column_lse"), statistics, direction_losses,
        scale_grad=get("scale_grad"), bias_grad=get("bias_grad"), loss=get("loss"),
    )  # fmt: skip


def block(
    problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None, to_clear: Sums | None,
    ahead: Gradients | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    fold = BlockFold.of(epilogue, triangle, gradients is not None)
    gpu = GPU(problem, gradients or ahead, queue, fold)
    if to_clear is not None:
        gpu.vectors.clear(to_clear)
    gpu.fold_block(problem, epilogue, gradients)
    if (
        not_finite is not None
    ):  # marks of queries are written once; each block adds the marks of its keys
        gpu.vectors.find_row_nans(
            problem, not_finite.any_key, not_finite.rows, not_finite.queries_checked
        )
    return {}


def begin(problem: Problem, queue: Queue) -> dict[str, Array | None]:
    given = problem.upstream
    problem, stats = TiledVectors.alone(problem, queue).statistics(problem)
    columns = stats.columns or Sums(None, None)
    return {
        "row_max": stats.rows.max, "row_sum": stats.rows.sum, "row_moment": stats.rows.moment,
        "column_max": columns.max, "column_sum": columns.sum, "column_moment": columns.moment,
        "positive": stats.positive_logits,
        "upstream": None if problem.upstream is given else problem.upstream,
    }  # fmt: skip


def finalize(
    problem: Problem, stats: Statistics, not_finite: NotFinite, queue: Queue
) -> dict[str, Array | None]:
    vectors = TiledVectors.alone(problem, queue)
    finalized = vectors.finalize(problem, stats, False, True, None, not_finite)
    found: dict[str, Array | None] = {
        "losses": finalized.losses, "row_factor": finalized.row_factor,
        "column_factor": finalized.column_factor,
        "positive_gradient": finalized.positive_gradient,
        "log_scale_grad": finalized.log_scale_grad,
    }  # fmt: skip
    for side, of in (("row", finalized.rows), ("column", finalized.columns)):
        if of is not None:
            found |= {
                f"{side}_loss": of.loss,
                f"{side}_lse": of.lse,
                f"{side}_reference": of.reference,
            }
    return found


def totals(
    problem: Problem, losses: Array, log_scale_grad: Array | None, dots: Array | None,
    bias_grad: Array | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    vectors = TiledVectors.alone(problem, queue)
    vectors.double, vectors.out = True, np.dtype(np.float64)
    made = vectors.totals(problem, losses, log_scale_grad, dots, bias_grad)
    return dict(zip(("loss", "scale_grad", "bias_grad"), made, strict=True))
