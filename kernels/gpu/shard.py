"""One of many ranks on a GPU: blocks of its rows with keys of others, and its vectors, by plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import problem as problems
from .. import solve as blocks
from ..problem import Array, Epilogue, Gradients, Poison, Problem, Statistics, Sums
from . import plan as gpu_plan
from .device.launcher import device_properties
from .device.launches import Queue
from .select import planned, wide
from .tiled.backend import GPU
from .vectors import ElementwiseVectors


def fold_block(
    problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
    poison: Poison | None = None, fresh: Sums | None = None, ahead: Gradients | None = None,
) -> None:  # fmt: skip
    """`solve.fold_block` on the current device; `ahead` as for `Context`."""
    parts = wide(problem), triangle, epilogue, gradients, poison, fresh, ahead
    if planned(problem, gradients):
        gpu_plan.call(_fold_block, device_properties(problem.query.device.id), *parts)
    else:
        _fold_block(*parts, Queue())


def _fold_block(
    problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
    poison: Poison | None, fresh: Sums | None, ahead: Gradients | None, queue: Queue,
) -> dict[str, Array | None]:  # fmt: skip
    gpu = GPU(problem, gradients, ahead, queue)
    if fresh is not None:
        gpu.vectors.clear(fresh)
    blocks.fold_block(gpu, problem, triangle, epilogue, gradients)
    if poison is not None:  # what queries say is written once, keys add theirs
        gpu.context.not_finite(problem, poison.all, poison.rows, poison.known)
    return {}


class VectorsOverRanks(ElementwiseVectors):
    """`solve.Vectors` of a ring, a plan a step."""

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        if not self.known(problem) or problem.ranks:
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
        sums = Statistics(stats.rows, stats.columns, stats.positive)
        one_sided = problems.changed(problem, symmetric=False)  # partners may be on other ranks
        found = self.plan(_conclude, one_sided, sums, backend.poisoned).get
        rows, columns = (
            blocks.Direction(
                found(f"{side}_loss"), found(f"{side}_lse"), None, found(f"{side}_height"), 1.0
            )
            for side in ("row", "column")
        )
        at_positive = found("at_positive")
        if problem.symmetric and gradient:
            at_positive = at_positive + backend.of_positives(problem, at_positive)
        return blocks.Conclusion(
            found("losses"), rows, columns if problem.two_sided else None, found("a"), found("b"),
            at_positive,
        )  # fmt: skip

    def totals(
        self, problem: Problem, losses: Array, gradients: Gradients | None,
        of_bias: Array | None = None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """The sum of the losses, whatever the reduction: others' are to be added."""
        if not self.known(problem):
            return super().totals(problem, losses, gradients, of_bias)
        dots = None if gradients is None else gradients.dots
        whole = problems.changed(problem, row_share=1.0)
        found = self.plan(_totals, whole, losses, dots, of_bias).get
        return found("loss"), found("scale_grad"), found("bias_grad")

    def known(self, problem: Problem) -> bool:
        """Whether there are plans: for rows, of whose progress nobody wants to know."""
        return 0 not in problem.shape and problem.progress is None

    def plan(self, build: gpu_plan.Build, problem: Problem, *parts: Any) -> dict[str, Array]:
        # what steps on vectors do not look at
        problem = problems.changed(problem, normalize=False, query_ids=None, key_ids=None)
        properties = device_properties(problem.query.device.id)
        return gpu_plan.call(build, properties, problem, *parts)


def _begin(problem: Problem, queue: Queue) -> dict[str, Array | None]:
    given = problem.upstream
    gpu = GPU(problem, queue=queue)
    problem, stats = gpu.vectors.statistics(problem)
    columns = stats.columns or Sums(None, None)
    return {
        "row_max": stats.rows.max, "row_sum": stats.rows.sum,
        "column_max": columns.max, "column_sum": columns.sum, "positive": stats.positive,
        "upstream": None if problem.upstream is given else problem.upstream,
    }  # fmt: skip


def _conclude(
    problem: Problem, stats: Statistics, poison: Poison, queue: Queue
) -> dict[str, Array | None]:
    gpu = GPU(problem, queue=queue)
    end = gpu.vectors.conclude(problem, stats, False, True, None, poison)
    found: dict[str, Array | None] = {
        "losses": end.losses, "a": end.row_factor, "b": end.column_factor,
        "at_positive": end.at_positive,
    }  # fmt: skip
    for side, of in (("row", end.rows), ("column", end.columns)):
        if of is not None:
            found |= {f"{side}_loss": of.loss, f"{side}_lse": of.lse, f"{side}_height": of.height}
    return found


def _totals(
    problem: Problem, losses: Array, dots: Array | None, of_bias: Array | None, queue: Queue
) -> dict[str, Array | None]:
    gpu = GPU(problem, queue=queue)
    gpu.vectors.double, gpu.vectors.out = True, np.dtype(np.float64)
    gradients = None if dots is None else Gradients(dots=dots)
    loss, scale_grad, bias_grad = gpu.vectors.totals(problem, losses, gradients, of_bias)
    return {"loss": loss, "scale_grad": scale_grad, "bias_grad": bias_grad}
