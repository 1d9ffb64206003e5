"""Which of naive, fused, planned and tiled a call takes on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .. import problem as problems
from ..problem import Gradients, Problem
from ..solve import Solution
from . import fused as gpu_fused
from . import naive as gpu_naive
from . import plan as gpu_plan
from . import recorded
from .device.arguments import whole_strides
from .device.launcher import device_properties
from .linear import needs_kernels_alone
from .schedule import choose_method
from .tiled.backend import GPU


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    given, by_kernels = problem, needs_kernels_alone(problem)
    problem = without_weights(problem, by_kernels)
    method = choose_method(problem)
    if method == "naive":
        return gpu_naive.solve(problem if problem.plain else given, gradients)
    if method == "fused":
        return gpu_fused.solve(problem, gradients, device_properties(device.id))
    problem = plain(problem)
    try:
        return _tiled(problem, gradients, by_kernels)
    except MemoryError:
        if problem.workspace_given:
            raise
    # Once more, with no more than the default
    return _tiled(replace(problem, workspace_given=True), gradients, by_kernels)


def _tiled(problem: Problem, gradients: Gradients | None, by_kernels: bool) -> Solution:
    """By a plan, if it has one."""
    if has_plan(problem, by_kernels):
        properties = device_properties(problem.query.device.id)
        return recorded.solution_of(
            gpu_plan.call(recorded.solution, properties, problem, gradients, graphs=True)
        )
    if by_kernels:
        _compile_kernels(problem, gradients)
    return GPU(problem, gradients).solve(problem, gradients)


def has_plan(problem: Problem, by_kernels: bool) -> bool:
    """Not if the caller wants to see the progress of launches; and operations on arrays cannot be
    recorded."""
    return by_kernels and problem.progress is None


_compiled: set[tuple[Any, ...]] = set()  # kinds of calls without a plan


def _compile_kernels(problem: Problem, gradients: Gradients | None) -> None:
    """Of a first call of its kind: side by side, as calls with a plan have theirs compiled."""
    kind = (
        problem.query.device.id, *problem.shape, problem.query.dtype, problem.key.dtype,
        problem.compute, problem.symmetric, problem.two_sided, problem.bias is None,
        problem.normalize, problem.query_ids is None, problem.retrieval_ranks, gradients is None,
        problem.scalar_grads, problem.moments, problem.set_size > 1, problem.linear_terms,
        problem.joint,
    )  # fmt: skip
    if kind not in _compiled:
        _compiled.add(kind)
        silent = problems.fast_replace(problem, progress=None)
        gpu_plan.compile_kernels(recorded.solution, problem.progress, silent, gradients)


def without_weights(problem: Problem, by_kernels: bool) -> Problem:
    """The problem as kernels take it, if losses follow by kernels: they find weights in
    `upstream`."""
    if problem.weights is None or not by_kernels:
        return problem
    return problems.fast_replace(problem, weights=None)


def plain(problem: Problem) -> Problem:
    """The problem as kernels read it: numbers on the device in float64, strides whole elements."""
    made = {
        name: value.astype(np.float64)
        for name, value in (("scale", problem.scale), ("bias", problem.bias))
        if isinstance(value, cupy.ndarray) and value.dtype != np.float64
    }
    query = whole_strides(problem.query)
    key = query if problem.symmetric else whole_strides(problem.key)
    if query is not problem.query or key is not problem.key:
        made |= {"query": query, "key": key}
    return replace(problem, **made) if made else problem
