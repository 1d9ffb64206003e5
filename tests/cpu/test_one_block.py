"""Which batches are computed in one block, its bits, and its loop over rows."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from infonce.kernels.cpu import backend, one_block
from infonce.kernels.cpu.loops.finalize import finalize
from infonce.kernels.direction_losses import finalize_direction
from infonce.kernels.epilogues import Sums
from infonce.kernels.problem import SILENT

import infonce


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
