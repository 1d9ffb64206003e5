"""Passes by operations on arrays, in blocks: their workspace, their memory, logits of any size."""

from types import SimpleNamespace
from typing import Any

import host_device
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from infonce.kernels.arrays import naive
from infonce.kernels.arrays.backend import ArrayBlocks
from infonce.kernels.cpu import backend
from infonce.kernels.linear import Segments, find_members, sum_members
from infonce.kernels.problem import Gradients, Problem
from infonce.kernels.solve import Solution, Vectors, solve_by_passes
from judge import peak_memory
from reference_problems import LOSSES, one_problem

import infonce


def by_blocks(monkeypatch: pytest.MonkeyPatch, side: int | None = None) -> None:
    """All calls on the CPU go to `ArrayBlocks`, of so many rows and columns."""

    def solution(problem: Problem, gradients: Gradients | None) -> Solution:
        assert problem.query.dtype.kind == "f"
        array_blocks = ArrayBlocks(problem, gradients, Vectors(np), host_device.Rows)
        if side is not None:
            array_blocks.block = min(side, problem.shape[0]), min(side + 1, problem.shape[1])
            array_blocks.key_rows = min(array_blocks.key_rows, 3 * side)
        return solve_by_passes(problem, array_blocks, gradients)

    monkeypatch.setattr(backend, "solve", solution)


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


SEGMENTS = st.lists(st.integers(-3, 6), max_size=70)


@hypothesis.given(SEGMENTS, SEGMENTS, st.integers(0, 2**32 - 1))
def test_members_of_segments(rows: list[int], columns: list[int], seed: int) -> None:
    """As on a GPU, without atomics; NaN and infinity stay in their segments, and some segments
    have no members."""
    rng, own, others = np.random.default_rng(seed), np.array(rows, int), np.array(columns, int)
    values = rng.normal(size=len(others))
    values[rng.random(len(others)) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(invalid="ignore"):
        order, begin, end = find_members(np, own, others)
        got = sum_members(np, others[order], values[order], begin, end)
        want = [sum(values[others == number]) for number in rows]
    near(got, want)
    for xp in (np, SimpleNamespace(**vars(np))):  # the second one as CuPy
        number, index_sums = Segments(own, others).members(xp, np.arange(len(others)))
        assert number.tolist() == [columns.count(each) for each in rows]
        assert index_sums.tolist() == [np.flatnonzero(others == each).sum() for each in rows]


@pytest.mark.parametrize("grad_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_workspaces_that_are_just_enough(
    monkeypatch: pytest.MonkeyPatch, name: str, grad_dtype: Any
) -> None:
    """The least workspace that the error names is enough, and a byte less is not."""
    problem = one_problem(name, rows=40, width=6)
    options = {k: v for k, v in problem.options().items() if k != "weights"}
    function = getattr(infonce, f"{name}_loss_and_grad")
    want = problem.reference()
    by_blocks(monkeypatch)
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        function(*problem.features, workspace=100, grad_dtype=grad_dtype, **options)
    least = int(str(error.value).split()[4])
    got = function(*problem.features, workspace=least, grad_dtype=grad_dtype, **options)
    near(got.loss, want.loss)
    for argument, gradient in want.grads.items():
        if gradient is not None:
            tolerance = {"rtol": 1e-6, "atol": 1e-6}
            np.testing.assert_allclose(getattr(got.grads, argument), gradient, **tolerance)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        function(*problem.features, workspace=least - 1, grad_dtype=grad_dtype, **options)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [2.0**-20, 2.0**20, 2.0**40])
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent", "siglip"])
def test_logits_of_any_size(
    monkeypatch: pytest.MonkeyPatch, name: str, size: float, dtype: str
) -> None:
    """Exact products with ties: the numbers of `naive`, silently."""
    one = np.eye(4)[np.arange(12) % 4].astype(dtype)
    features = [one * np.asarray(size, dtype), one[::-1] * np.asarray(size, dtype)]
    function = getattr(infonce, f"{name}_loss_and_grad")
    features = features[: 1 if name == "nt_xent" else 2]
    for scale in (1e-9, 1.0, 1.1, 3.3, 1.5e7):
        want = function(*features, scale=scale, method="naive")
        with monkeypatch.context() as patch:
            by_blocks(patch, 5)
            got = function(*features, scale=scale)
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
        for have, expected in zip(got.grads[:-1], want.grads[:-1], strict=True):
            largest = np.abs(expected).max() or 1.0
            assert np.abs(have / largest - expected / largest).max() <= 1e-5


def test_memory_is_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of NumPy's arrays beside inputs, gradients and vectors."""
    m, d, workspace = 2000, 32, 4 * 2**20
    z = np.random.default_rng(0).standard_normal((2, m, d), np.float32)
    by_blocks(monkeypatch)
    out = {name: np.empty((m, d), np.float32) for name in ("image", "text")}
    options: dict[str, Any] = {"scale": 1.0, "normalize": True, "out": out}
    infonce.clip_loss_and_grad(*z[:, :64], scale=1.0)
    options |= {"workspace": workspace, "key_bias": np.zeros(m), "false_negative_margin": 0.1}
    peak = peak_memory(lambda: infonce.clip_loss_and_grad(*z, **options))
    assert workspace / 4 < peak < workspace + 60 * 8 * m
    assert naive.MATRICES_WITH_OPTIONS * m * m * 4 > 10 * peak
