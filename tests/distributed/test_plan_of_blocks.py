"""Plans of what a ring passes: blocks of a rank's rows with others' keys, and steps on vectors."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, MISSING, features, gpu_only
from infonce.kernels.solve import Vectors

pytestmark = gpu_only
if not MISSING:
    import cupy
    from infonce.kernels import epilogues
    from infonce.kernels import problem as problems
    from infonce.kernels.gpu import plan as gpu_plan
    from infonce.kernels.gpu import select as gpu_select
    from infonce.kernels.gpu import shard as gpu_ranks
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.vectors import ElementwiseVectors


@pytest.fixture(autouse=True)
def no_plans() -> None:
    gpu_plan.forget()


def find_not_finite(m: int, n: int, infinite: Any, checked: bool) -> Any:
    """Which rows of a block of other ranks' keys are marked; m stands for all keys."""
    query, key = (features("nt_xent", rows, 64, BFLOAT16, rows)[0] for rows in (m, n))
    key[n // 2, 3] = np.inf if infinite == "key" else 0
    query[m // 2, 3] = np.inf if infinite == "query" else 0
    problem = problems.Problem(
        query=query, key=key, scale=14.0, upstream=cupy.full(m, 1 / m),
        positives=cupy.full(m, -1), column_direction_weight=0.5, key_shard=True,
        lacks_positives=True, compute_precision="bf16", scalar_grads=True, moments=True,
    )  # fmt: skip
    rows, columns = (ElementwiseVectors().identity(size, True) for size in (m, n))
    stats = epilogues.Statistics(rows, columns, cupy.full(m, np.nan))
    not_finite = cupy.zeros(m + 1)
    marks = problems.NotFinite(not_finite[:m], not_finite[m:], checked)
    gpu_ranks.run_block_pass(problem, False, stats, None, marks, columns)
    return np.flatnonzero(np.isnan(not_finite.get())).tolist()


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_not_finite_in_a_block(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are everybody's trouble, queries their own; these need to be looked at once."""
    if not planned:
        monkeypatch.setattr(gpu_select, "has_plan", lambda *_: False)
    for infinite, checked, where in (
        (None, False, []), ("key", False, [300]), ("query", False, [150]), ("query", True, []),
        ("key", True, [300]),
    ):  # fmt: skip
        assert find_not_finite(300, 270, infinite, checked) == where


def test_sums_over_ranks_have_the_same_bits() -> None:
    """A rank with a plan and a rank without one compute the same bits."""
    z = features("nt_xent", 8, 64, np.dtype("float32"), 1)[0]
    by_plan = gpu_ranks.QueuedVectors(problems.Problem(z, z, 1.0, 1.0), Queue())
    for ranks, k in ((1, 1), (2, 1), (5, 3), (1024, 2)):
        numbers = np.random.default_rng(ranks).standard_normal((ranks, k)) ** 5
        divisors = [3.0, 1.0, 7.0][:k]
        for dtype in ("float32", "float64"):
            want = Vectors(np).sum_over_ranks(numbers, divisors, dtype)
            for vectors in (by_plan, ElementwiseVectors()):
                got = vectors.sum_over_ranks(cupy.asarray(numbers), divisors, dtype)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.get(), want)
