"""Which of naive, fused, planned and tiled a call takes on the GPU."""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np

from .. import problem as problems
from .. import solve as blocks
from ..problem import Gradients, Problem
from ..solve import Solution
from . import fused as gpu_fused
from . import naive as gpu_naive
from . import plan as gpu_plan
from . import recorded
from .device.launcher import device_properties
from .tiled.backend import GPU


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    if problem.method == "naive":
        return gpu_naive.solve(problems.materialize_vectors(problem, cupy), gradients)
    fused = problem.method == "auto" and not problem.retrieval_ranks and gpu_fused.pays(problem)
    if problem.method == "fused":
        gpu_fused.require(problem)
        fused = True
    if fused:
        return gpu_fused.solve(problem, gradients, device_properties(device.id))
    if planned(problem, gradients):
        properties = device_properties(device.id)
        return Solution(**gpu_plan.call(recorded.solution, properties, wide(problem), gradients))
    return blocks.solve(problem, GPU(problem, gradients, both_folds=True), gradients)


def planned(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether a call has a plan: few blocks, and nothing but kernels, products and copies."""
    m, n, _ = problem.shape
    # without this the queries of each key are listed, by CuPy's functions
    known = (
        problem.paired or problem.no_local_positives or gradients is None or not gradients.want_key
    )
    return (
        m * n <= problem.workspace
        and known
        and not (problem.retrieval_ranks or problem.progress)
        and all(
            step % array.dtype.itemsize == 0
            for array in (problem.query, problem.key)
            for step in array.strides
        )
    )


def wide(problem: Problem) -> Problem:
    """The problem with its numbers on the device in float64, as kernels read them."""
    made = {
        name: value.astype(np.float64)
        for name, value in (("scale", problem.scale), ("bias", problem.bias))
        if isinstance(value, cupy.ndarray) and value.dtype != np.float64
    }
    return replace(problem, **made) if made else problem
