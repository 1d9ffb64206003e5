"""The entry of the GPU backend: runs a call by the method that kernels/gpu/schedule chooses."""

from __future__ import annotations

from dataclasses import replace

import cupy

from ..distill.problem import TaughtProblem
from ..problem import Gradients, Problem
from ..solve import Solution
from . import plan as gpu_plan
from . import recorded
from .device.arguments import readable_by_kernels
from .distill.solve import solve_distillation_by_kernels
from .fused import solve_in_one_launch
from .naive import solve_by_naive_arrays, solve_by_naive_kernels
from .schedule import choose_method, has_plan, is_computed_by_kernels_only
from .tiled.backend import GPU


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    if isinstance(problem, TaughtProblem):  # by blocks, whatever `method` asks for
        return solve_distillation_by_kernels(problem, gradients)
    for_kernels = problem  # kernels find the weights of rows in the upstream gradient
    if problem.weights is not None and is_computed_by_kernels_only(problem):
        for_kernels = problem.without_weights()
    method = choose_method(for_kernels)
    if method == "naive" and not for_kernels.plain:
        return METHODS["naive arrays"](problem, gradients)  # operations on arrays read the weights
    return METHODS[method](for_kernels, gradients)


def _tiled(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients by passes over blocks.

    If the caller gives no `workspace`, the schedule may exceed the default workspace where that
    saves time. If the device has no room for that, the call runs again within the default
    workspace.
    """
    try:
        return _by_passes(problem, gradients)
    except MemoryError:
        if problem.workspace_given:
            raise
    # as if the caller had given the default workspace: the schedule then does not exceed it
    return _by_passes(replace(problem, workspace_given=True), gradients)


def _by_passes(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients by a plan if the call may have one, otherwise launch by launch."""
    problem, by_kernels = readable_by_kernels(problem), is_computed_by_kernels_only(problem)
    if has_plan(problem, by_kernels):
        arrays = gpu_plan.run_by_plan(recorded.solution, problem, gradients, graphs=True)
        return recorded.solution_from_outputs(arrays)
    if by_kernels:
        recorded.compile_kernels(problem, gradients)
    gpu = GPU(problem, gradients)
    return gpu.solve(problem, gradients)


METHODS = {
    "naive": solve_by_naive_kernels, "naive arrays": solve_by_naive_arrays,
    "fused": solve_in_one_launch, "tiled": _tiled,
}  # fmt: skip
