"""Methods of the CPU, and array operations, as options of a call."""

from typing import Any

import numpy as np
import pytest
from host_device import Rows
from infonce.kernels import solve
from infonce.kernels.arrays.backend import ArrayBlocks
from infonce.kernels.cpu import backend, schedule
from infonce.kernels.distill.solve import solver_by_passes
from infonce.kernels.problem import Gradients


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TILE", (16, 24))
    monkeypatch.setattr(schedule, "TRIANGLE_SIDE", 16)


@pytest.fixture(params=("naive", "fused", "tiled", "arrays"))
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a call by a method; "arrays" takes the place of "tiled", in small blocks."""
    if request.param != "arrays":
        return {"method": request.param}

    def solve_by_arrays(problem: Any, gradients: Gradients | None) -> solve.Solution:
        blocks = ArrayBlocks(problem, gradients, solve.Vectors(np), Rows)
        blocks.block = min(7, problem.shape[0]), min(5, problem.shape[1])
        return solver_by_passes(problem)(problem, blocks, gradients)

    monkeypatch.setattr(backend, "solve", solve_by_arrays)
    return {}
