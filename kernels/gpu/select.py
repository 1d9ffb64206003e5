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
from .schedule import Call, choose_method, has_plan, needs_kernels_alone
from .tiled.backend import GPU


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    bare = without_weights(problem, needs_kernels_alone(problem))
    method = choose_method(bare)
    on_arrays = method == "naive" and not bare.plain
    return METHODS[method](problem if on_arrays else bare, gradients)


def _tiled(problem: Problem, gradients: Gradients | None) -> Solution:
    """By folds over blocks; if there is no memory for what a call takes unasked, without that."""
    problem = plain(problem)
    try:
        return _by_folds(problem, gradients)
    except MemoryError:
        if problem.workspace_given:
            raise
    return _by_folds(replace(problem, workspace_given=True), gradients)


def _by_folds(problem: Problem, gradients: Gradients | None) -> Solution:
    if has_plan(problem):
        properties = device_properties(problem.query.device.id)
        return recorded.solution_of(
            gpu_plan.call(recorded.solution, properties, problem, gradients, graphs=True)
        )
    if needs_kernels_alone(problem):
        _compile_kernels(problem, gradients)
    return GPU(problem, gradients).solve(problem, gradients)


METHODS = {"naive": gpu_naive.solve, "fused": gpu_fused.solve, "tiled": _tiled}
_compiled: set[tuple[Any, ...]] = set()  # kinds of calls without a plan


def _compile_kernels(problem: Problem, gradients: Gradients | None) -> None:
    """Of a first call of its kind: side by side, as calls with a plan have theirs compiled."""
    kind = problem.query.device.id, Call.of(problem, gradients)
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
