"""Distillation by every method of the CPU and by array operations."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu.resources import BUFFER_POOL

import infonce

NUMBERS: dict[str, Any] = {"scale": 2.0, "teacher_scale": 3.0}


def features(m: int, n: int, seed: int = 0, d: int = 4, e: int = 3) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    sizes = (m, d), (n, d), (m, e), (n, e)
    return tuple(rng.normal(size=size) for size in sizes)


@pytest.fixture
def method(method: dict[str, Any], small_tiles: None) -> dict[str, Any]:
    return method


# --- every method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_teacher_equal_to_the_student_gives_no_gradient(
    scale: float, dtype: Any, method: dict[str, Any]
) -> None:
    query, key, *_ = (z.astype(dtype) for z in features(58, 58, d=16))
    got = infonce.distill_loss_and_grad(query, key, query, key, scale=scale, **method)
    assert not got.grads.query.any()
    assert not got.grads.key.any()
    probabilities = np.exp(scale * (query @ key.T).astype(np.float64) - got.lse[0][:, None])
    assert got.loss >= 0
    assert probabilities.sum() == pytest.approx(58, rel=1e-4)


@pytest.mark.parametrize("at", range(4))
def test_a_value_that_is_not_finite_is_named(at: int, method: dict[str, Any]) -> None:
    args = features(6, 6)
    args[at][2, 1] = np.nan
    name = ("query", "key", "teacher_query", "teacher_key")[at]
    with pytest.raises(ValueError, match=f"{name}: expected finite values, got .* in row 2"):
        infonce.distill_loss(*args, check_finite=True, **NUMBERS, **method)


def test_temperatures_are_inverse_scales() -> None:
    args = features(6, 6)
    want = infonce.distill_loss(*args, **NUMBERS)
    got = infonce.distill_loss(*args, temperature=0.5, teacher_temperature=1 / 3)
    np.testing.assert_allclose(got, want, rtol=1e-13)
    shared = infonce.distill_loss(*args, scale=2.0)
    np.testing.assert_allclose(shared, infonce.distill_loss(*args, scale=2.0, teacher_scale=2.0))


@pytest.mark.parametrize("name", ["temperature", "scale"])
def test_a_scale_of_two_numbers_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"^teacher_{name}: expected .* one number"):
        infonce.distill_loss(*features(6, 6), scale=1.0, **{f"teacher_{name}": np.ones(2)})


def test_peak_memory_is_within_the_workspace() -> None:
    m, d, e, workspace = 3000, 32, 48, 8 * 2**20
    args = tuple(z.astype(np.float32) for z in features(m, m, d=d, e=e))
    out = {name: np.empty((m, d), np.float32) for name in ("query", "key")}
    options: dict[str, Any] = {"scale": 0.1, "normalize": True, "workspace": workspace}
    infonce.distill_loss_and_grad(*args, **options)
    BUFFER_POOL.clear()
    tracemalloc.start()
    infonce.distill_loss_and_grad(*args, out=out, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert workspace / 2 < peak < workspace + 130 * 8 * m  # vectors of student and teacher


Q, K, TQ, TK = features(4, 4)


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((Q, K, TQ[:3], TK), {}, ValueError, r"teacher_query: expected shape \(4, 3\), got \(3, 3"),
        ((Q, K, TQ, TK[:, :2]), {}, ValueError, r"teacher_key: expected shape \(4, 3\), got"),
        ((Q, K[:3], TQ, TK[:3]), {}, ValueError, "key: expected 4 rows like query"),
        ((Q, K, TQ, [1.0]), {}, TypeError, "teacher_key: expected an array, got list"),
        ((Q, K, TQ.astype(int), TK), {}, TypeError, "teacher_query: expected dtype float64"),
        ((Q, K, TQ[0], TK), {}, ValueError, "teacher_query: expected 2 dimensions"),
        ((Q, K, TQ, TK), {"teacher_scale": -1.0}, ValueError, "teacher_scale: expected a positive"),
        ((Q, K, TQ, TK), {"teacher_temperature": "x"}, TypeError, "teacher_temperature: exp"),
        ((Q, K, TQ, TK), {"teacher_scale": 1.0, "teacher_temperature": 1.0}, ValueError,
         "teacher_temperature, teacher_scale: expected one of them, got both"),
        ((Q, K, TQ, TK), {"two_sided": 1}, TypeError, "two_sided: expected True or False"),
        ((Q, K, TQ, TK), {"margin": 0.1}, ValueError, "margin: expected 0.0 for distill"),
        ((Q, K, TQ, TK), {"ids": np.arange(4)}, ValueError, "ids: expected None for distill"),
        ((Q, K, TQ, TK), {"dims": (2, 4)}, ValueError, "dims: expected None for distill"),
        ((Q, K, TQ, TK), {"own": Q[:, None]}, ValueError, "own: expected None for distill"),
        ((Q, K, TQ, TK), {"scale": None}, ValueError, "temperature, scale: expected one of them"),
    ],
)  # fmt: skip
def test_bad_calls(args: Any, options: dict[str, Any], error: Any, words: str) -> None:
    for function in (infonce.distill_loss, infonce.distill_loss_and_grad):
        with pytest.raises(error, match=words):
            function(*args, **{"scale": 1.0, **options})
