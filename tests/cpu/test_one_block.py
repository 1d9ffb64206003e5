"""Batches whose logits fit one block, beside the same call in many blocks."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infonce.kernels.cpu import backend, one_block, schedule
from infonce.kernels.cpu.loops.finalize import finalize
from infonce.kernels.direction_losses import finalize_direction
from infonce.kernels.epilogues import Sums
from infonce.kernels.problem import SILENT

import infonce

# Of the largest element: rounding of products of 40 features, at logits up to 200
BOUNDS = {np.float32: 2e-4, np.float64: 4e-13}


def call(loss: str, *args: Any, **options: Any) -> Any:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


def in_one_block(loss: str, *args: Any, **options: Any) -> tuple[Any, bool]:
    """The result, and whether one block computed it."""
    solved = []

    def spy(*args: Any) -> Any:
        solved.append(solve(*args))
        return solved[-1]

    solve = one_block.solve_in_one_block
    with mock.patch.object(backend, "solve_in_one_block", spy):
        out = call(loss, *args, **options)
    return out, bool(solved) and solved[0] is not None


def numbers(out: Any) -> dict[str, Any]:
    """The arrays of a result in float64, by name."""
    lse = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    named = {"loss": out.loss, **out.grads._asdict(), "lse": lse[0], "column_lse": lse[-1]}
    return {name: np.asarray(x, np.float64) for name, x in named.items() if x is not None}


def assert_near(got: Any, want: Any, bound: float) -> None:
    arrays, wanted = numbers(got), numbers(want)
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        # Terms of the scale's gradient are products of rows, of about 1, and may cancel: its floor
        # is that of 3 roundings of such a term
        size = max(np.abs(wanted[name]).max(initial=0.0), 1e-3 if name == "scale" else 1e-30)
        assert np.abs(array - wanted[name]).max(initial=0.0) <= bound * size, name


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    loss = draw(st.sampled_from(["clip", "lit", "info_nce", "nt_xent", "siglip"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    n, d = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    order = draw(st.sampled_from(["C", "F", "strided"]))

    def features(rows: int) -> Any:
        wide = rng.standard_normal((rows, 2 * d)).astype(dtype)
        return wide[:, ::2] if order == "strided" else np.asarray(wide[:, :d], order=order)

    options: dict[str, Any] = {"normalize": draw(st.booleans())}
    options["scale"] = draw(st.sampled_from([0.01, 1.0, 20.0, 200.0]))
    options["reduction"] = draw(st.sampled_from(["mean", "sum", "none"]))
    if loss == "nt_xent":
        z: tuple[Any, ...] = (features(2 * n),)
    elif loss == "info_nce":
        z = features(n), features(n + draw(st.integers(0, 5)))
        options["labels"] = rng.integers(0, len(z[1]), n)
    else:
        z = features(n), features(n)
    if loss in ("clip", "siglip", "lit") and draw(st.booleans()):
        options["ids"] = rng.integers(0, n // 2 + 1, n)
    if loss != "siglip" and draw(st.booleans()):
        options["margin"] = 0.3
    if loss != "nt_xent" and draw(st.booleans()):
        options["weights"] = rng.random(n) + 0.1
    if draw(st.booleans()):
        options["grad_dtype"] = np.float64
    if loss == "siglip":
        options["bias"] = rng.uniform(-10, 2)
    return loss, z, options


@given(calls())
def test_same_as_in_many_blocks(case: Any) -> None:
    loss, args, options = case
    got, used = in_one_block(loss, *args, **options)
    assert used
    with mock.patch.object(schedule, "TILE", (24, 16)):
        assert_near(got, call(loss, *args, method="tiled", **options), BOUNDS[args[0].dtype.type])


def test_calls_that_need_many_blocks() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((40, 8)).astype(np.float32) for _ in range(2))
    _, used = in_one_block("clip", q, k, scale=5.0)
    assert used
    steps: list[Any] = []
    for options in (
        {"progress": lambda *step: steps.append(step)}, {"metrics": True}, {"workspace": 2000},
        {"label_smoothing": 0.1}, {"method": "tiled"}, {"false_negative_margin": 0.1},
    ):  # fmt: skip
        got, used = in_one_block("clip", q, k, scale=5.0, **options)
        assert not used
        assert np.isfinite(got.loss)
    assert steps
    labels = np.where(np.arange(40) % 3, np.arange(40), -1)
    _, used = in_one_block("info_nce", q, k, scale=5.0, labels=labels)
    assert not used
    q[3, 2] = np.nan
    got, used = in_one_block("clip", q, k, scale=5.0)
    assert not used
    assert np.isnan(got.loss)


def test_same_bits_beside_other_threads() -> None:
    """Products have the same threads, whatever other calls run. (Some of OpenBLAS's kernels have
    other bits in two threads: OPENBLAS_CORETYPE=Haswell, for one.)"""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((300, 128)).astype(np.float32) for _ in range(2))
    want = numbers(call("clip", q, k, scale=1.0))
    wrong = []

    def repeat(method: str) -> None:
        for _ in range(20):
            got = numbers(call("clip", q, k, scale=1.0, method=method))
            if method == "auto" and any((got[name] != z).any() for name, z in want.items()):
                wrong.append(got)

    threads = [threading.Thread(target=repeat, args=(m,)) for m in ("auto", "auto", "tiled")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3, 1e9])
def test_losses_of_directions(size: float) -> None:
    """The loop equals `kernels.direction_losses`, also if a reference is far above all logits."""
    rng = np.random.default_rng(0)
    high, positive = size * rng.standard_normal((2, 400))
    total = np.exp2(rng.uniform(-90, 12, 400))
    total[:10], high[:10] = 0.0, -np.inf  # of nothing
    with np.errstate(**SILENT):
        want = finalize_direction(np, Sums(high, total, None), positive)
    m = len(high)
    losses, lse, factors = np.empty(m), np.empty((1, m)), np.empty((6, m))
    positive_gradient = np.empty((m, 1))
    finalize(
        np.stack([high, total, total])[None], positive[:, None], np.arange(m)[:, None], np.ones(m),
        1.0, 1.0, 0.0, (1.0, 0.0), False, losses, lse, factors, positive_gradient, np.empty((6, m)),
    )  # fmt: skip
    got = np.stack(
        [losses, lse[0], -positive_gradient[:, 0], factors[0], factors[1]], axis=1
    )  # with a scale, c and weights of 1: the reference, and 2^(reference - log-sum-exp)
    fields = want.loss, want.lse, want.negative_probability
    for mine, theirs in zip(got.T, fields, strict=False):
        np.testing.assert_allclose(mine, theirs, rtol=4e-16 * (64 + size), atol=4e-16 * (64 + size))
    mine, theirs = (
        reference + np.log2(probability)
        for reference, probability in (
            got.T[3:], (want.reference, want.reference_probability + 0 * want.reference),
        )
    )  # fmt: skip
    np.testing.assert_allclose(mine, theirs, rtol=4e-15, atol=4e-15)
