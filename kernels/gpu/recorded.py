"""What plans record: the solution of a call, a block over ranks, steps on vectors over ranks.

Each function takes dataclasses of arrays and the queue for its launches: a `Recorder` records them,
and a plain `Queue` launches them. It returns the arrays that it makes, by name (`plan.Build`).
select.py and shard.py pass these functions to `plan.run_by_plan`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..epilogues import Epilogue, Statistics, Sums
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import BlockQuestion, Solution
from . import plan
from .device.launches import Queue
from .schedule import BlockPass, Call
from .tiled.backend import GPU
from .vectors import TiledVectors


def solution(
    problem: Problem, gradients: Gradients | None, queue: Queue
) -> dict[str, Array | None]:
    """Queue all passes of a call. `solution_from_outputs` has the inverse of the dictionary."""
    gpu = GPU(problem, gradients, queue)
    solved = gpu.solve(problem, gradients)
    outputs = {
        "losses": solved.losses if solved.loss is None else None, "loss": solved.loss,
        "row_lse": solved.row_lse, "column_lse": solved.column_lse,
        "scale_grad": solved.scale_grad, "bias_grad": solved.bias_grad,
    }  # fmt: skip
    if problem.retrieval_ranks:
        stats, losses = solved.statistics, solved.direction_losses
        assert stats is not None
        assert losses is not None
        outputs |= {
            "row_loss": losses[0], "column_loss": losses[1], "row_max": stats.rows.max,
            "positive": stats.positive_logits, "row_rank": stats.row_rank,
            "column_rank": stats.column_rank,
        }  # fmt: skip
    return outputs


_compiled: set[tuple[int, Call]] = set()  # (device, kind of call) of `compile_kernels`


def compile_kernels(problem: Problem, gradients: Gradients | None) -> None:
    """Before the first call of a kind without a plan: compile its kernels, all at the same time.

    `select._by_passes` calls this before the first launch.

    A call with a plan needs no such step: its recording starts the compilation of each kernel.
    """
    kind = problem.query.device.id, Call.from_problem(problem, gradients)
    if kind not in _compiled:
        _compiled.add(kind)
        silent = replace(problem, progress=None)
        plan.compile_kernels(solution, problem.progress, silent, gradients)


def solution_from_outputs(outputs: dict[str, Array]) -> Solution:
    """The `Solution` of the arrays that a plan of `solution` has returned."""
    get = outputs.get
    statistics = direction_losses = None
    if "row_rank" in outputs:
        rows = Sums(outputs["row_max"], None)
        statistics = Statistics(
            rows, None, outputs["positive"], outputs["row_rank"], get("column_rank")
        )
        direction_losses = outputs["row_loss"], get("column_loss")
    return Solution(
        get("losses"), get("row_lse"), get("column_lse"), statistics, direction_losses,
        scale_grad=get("scale_grad"), bias_grad=get("bias_grad"), loss=get("loss"),
    )  # fmt: skip


def block(
    problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None, to_clear: Sums | None,
    ahead: Gradients | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    """Queue the pass of a block over ranks; for arguments see `shard.run_block_pass`.

    The pass writes into its arguments, so there are no new arrays.
    """
    scheduled = BlockPass.from_epilogue(epilogue, triangle, gradients is not None)
    gpu = GPU(problem, gradients or ahead, queue, scheduled)
    if to_clear is not None:
        gpu.vectors.clear(to_clear)
    gpu.run_block_pass(problem, epilogue, gradients)
    if not_finite is not None:
        # the first block of the queries writes their NaN flags; each block adds those of its keys
        gpu.vectors.find_row_nans(
            problem, not_finite.any_key, not_finite.rows, not_finite.queries_checked
        )
    return {}


def begin(problem: Problem, queue: Queue) -> dict[str, Array | None]:
    """Queue the start of a log-sum-exp pass over ranks: sums of nothing, default vectors."""
    caller_upstream = problem.upstream
    problem, stats = TiledVectors.without_passes(problem, queue).statistics(problem)
    columns = stats.columns or Sums(None, None)
    return {
        "row_max": stats.rows.max, "row_sum": stats.rows.sum, "row_moment": stats.rows.moment,
        "column_max": columns.max, "column_sum": columns.sum, "column_moment": columns.moment,
        "positive": stats.positive_logits,
        "upstream": None if problem.upstream is caller_upstream else problem.upstream,
    }  # fmt: skip


def finalize(
    problem: Problem, stats: Statistics, not_finite: NotFinite, queue: Queue
) -> dict[str, Array | None]:
    """Queue the step from complete sums to the losses and factors of a rank's rows."""
    vectors = TiledVectors.without_passes(problem, queue)
    # calls with such a plan are `plain`, and need no backend
    finalized = vectors.finalize(
        problem, stats, triangle=False, gradient=True, backend=None, not_finite=not_finite
    )
    outputs: dict[str, Array | None] = {
        "losses": finalized.losses, "row_factor": finalized.row_factor,
        "column_factor": finalized.column_factor,
        "positive_gradient": finalized.positive_gradient,
        "log_scale_grad": finalized.log_scale_grad,
    }  # fmt: skip
    for side, direction in (("row", finalized.rows), ("column", finalized.columns)):
        if direction is not None:
            outputs |= {
                f"{side}_loss": direction.loss,
                f"{side}_lse": direction.lse,
                f"{side}_reference": direction.reference,
            }
    return outputs


def totals(
    problem: Problem, losses: Array, log_scale_grad: Array | None, dots: Array | None,
    bias_grad: Array | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    """Queue the sums of a rank's losses and of its gradients of scale and bias, in float64."""
    vectors = TiledVectors.without_passes(problem, queue)
    vectors.double, vectors.result_dtype = True, np.dtype(np.float64)
    sums = vectors.totals(problem, losses, log_scale_grad, dots, bias_grad)
    return dict(zip(("loss", "scale_grad", "bias_grad"), sums, strict=True))
