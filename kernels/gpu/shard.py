"""One of many ranks on a GPU: blocks of its rows with keys of others, and its vectors, by plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import problem as problems
from .. import solve as blocks
from ..problem import Array, Epilogue, Gradients, NotFinite, Problem, Statistics, Sums
from . import plan as gpu_plan
from . import select
from .device.launcher import device_properties
from .device.launches import Queue
from .tiled.backend import GPU
from .vectors import ElementwiseVectors


def fold_block(
    problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
    not_finite: NotFinite | None = None, to_clear: Sums | None = None,
    ahead: Gradients | None = None,
) -> None:  # fmt: skip
    """`solve.fold_block` on the current device; `ahead` as for `Context`."""
    parts = select.wide(problem), triangle, epilogue, gradients, not_finite, to_clear, ahead
    if select.planned(problem, gradients):
        gpu_plan.call(_fold_block, device_properties(problem.query.device.id), *parts)
    else:
        _fold_block(*parts, Queue())


def _fold_block(
    problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
    not_finite: NotFinite | None, to_clear: Sums | None, ahead: Gradients | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    gpu = GPU(problem, gradients, ahead, queue)
    if to_clear is not None:
        gpu.vectors.clear(to_clear)
    blocks.fold_block(gpu, problem, triangle, epilogue, gradients)
    if not_finite is not None:  # what queries say is written once, keys add theirs
        gpu.context.not_finite(
            problem, not_finite.any_key, not_finite.rows, not_finite.queries_checked
        )
    return {}


class VectorsOverRanks(ElementwiseVectors):
    """`solve.Vectors` of a ring, a plan a step."""

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        if not self.known(problem) or problem.retrieval_ranks:
            return super().statistics(problem)
        made = self.plan(_begin, problem)
        upstream = made.get("upstream", problem.upstream)
        rows = Sums(made["row_max"], made["row_sum"])
        columns = rows if problem.symmetric else None
        if problem.two_sided:
            columns = Sums(made["column_max"], made["column_sum"])
        return replace(problem, upstream=upstream), Statistics(rows, columns, made["positive"])

    def conclude(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool, backend: Any
    ) -> blocks.Conclusion:
        if not self.known(problem):
            return super().conclude(problem, stats, triangle, gradient, backend)
        sums = Statistics(stats.rows, stats.columns, stats.positive_logits)
        one_sided = problems.fast_replace(
            problem, symmetric=False
        )  # partners may be on other ranks
        found = self.plan(_conclude, one_sided, sums, backend.not_finite).get
        rows, columns = (
            blocks.Direction(
                found(f"{side}_loss"), found(f"{side}_lse"), None, found(f"{side}_reference"), 1.0
            )
            for side in ("row", "column")
        )
        positive_gradient = found("positive_gradient")
        if problem.symmetric and gradient:
            positive_gradient = positive_gradient + backend.take_at_positives(
                problem, positive_gradient
            )
        return blocks.Conclusion(
            found("losses"), rows, columns if problem.two_sided else None, found("row_factor"),
            found("column_factor"), positive_gradient,
        )  # fmt: skip

    def totals(
        self, problem: Problem, losses: Array, gradients: Gradients | None,
        of_bias: Array | None = None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """The sum of the losses, whatever the reduction: others' are to be added."""
        if not self.known(problem):
            return super().totals(problem, losses, gradients, of_bias)
        dots = None if gradients is None else gradients.dots
        whole = problems.fast_replace(problem, reduction_weight=1.0)
        found = self.plan(_totals, whole, losses, dots, of_bias).get
        return found("loss"), found("scale_grad"), found("bias_grad")

    def known(self, problem: Problem) -> bool:
        """Whether a step has a plan: not for empty shards, nor for calls with `progress`."""
        return 0 not in problem.shape and problem.progress is None

    def plan(self, build: gpu_plan.Build, problem: Problem, *parts: Any) -> dict[str, Array]:
        # what steps on vectors do not look at
        problem = problems.fast_replace(problem, normalize=False, query_ids=None, key_ids=None)
        properties = device_properties(problem.query.device.id)
        return gpu_plan.call(build, properties, problem, *parts)


def _begin(problem: Problem, queue: Queue) -> dict[str, Array | None]:
    given = problem.upstream
    gpu = GPU(problem, queue=queue)
    problem, stats = gpu.vectors.statistics(problem)
    columns = stats.columns or Sums(None, None)
    return {
        "row_max": stats.rows.max, "row_sum": stats.rows.sum,
        "column_max": columns.max, "column_sum": columns.sum, "positive": stats.positive_logits,
        "upstream": None if problem.upstream is given else problem.upstream,
    }  # fmt: skip


def _conclude(
    problem: Problem, stats: Statistics, not_finite: NotFinite, queue: Queue
) -> dict[str, Array | None]:
    gpu = GPU(problem, queue=queue)
    end = gpu.vectors.conclude(problem, stats, False, True, None, not_finite)
    found: dict[str, Array | None] = {
        "losses": end.losses, "row_factor": end.row_factor, "column_factor": end.column_factor,
        "positive_gradient": end.positive_gradient,
    }  # fmt: skip
    for side, of in (("row", end.rows), ("column", end.columns)):
        if of is not None:
            found |= {
                f"{side}_loss": of.loss,
                f"{side}_lse": of.lse,
                f"{side}_reference": of.reference,
            }
    return found


def _totals(
    problem: Problem, losses: Array, dots: Array | None, of_bias: Array | None, queue: Queue
) -> dict[str, Array | None]:
    gpu = GPU(problem, queue=queue)
    gpu.vectors.double, gpu.vectors.out = True, np.dtype(np.float64)
    gradients = None if dots is None else Gradients(dots=dots)
    loss, scale_grad, bias_grad = gpu.vectors.totals(problem, losses, gradients, of_bias)
    return {"loss": loss, "scale_grad": scale_grad, "bias_grad": bias_grad}
