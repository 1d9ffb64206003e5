"""Negatives of one row alone, and batches whose other rows are no negatives, on the CPU."""

from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import schedule
from infonce.kernels.cpu.tiled_pass import TiledPass
from judge import assert_grad, assert_loss

import infonce
from infonce import reference

METHODS = ["naive", "fused", "tiled"]


def problem(seed: int = 0, m: int = 24, n: int = 30, k: int = 3, d: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    shapes = (m, d), (n, d), (m, k, d)
    return *(rng.standard_normal(shape) / d**0.5 for shape in shapes), rng


@pytest.mark.parametrize("size", [1e-110, 1e110])
@pytest.mark.parametrize("method", METHODS)
def test_float64_rows_keep_their_range_in_float32(method: str, size: float) -> None:
    """Own keys are normalised before float32, in which their features would be 0 or infinite."""
    query, key, own, rng = problem()
    options: dict[str, Any] = {"scale": 3.0, "normalize": True, "precision": "fp32"}
    options |= {"method": method, "own_mask": rng.random(own.shape[:2]) < 0.7}
    want = infonce.info_nce_loss_and_grad(query, key, own=own, **options)
    got = infonce.info_nce_loss_and_grad(query, key, own=own * size, **options)
    assert_loss(got.loss, want.loss, "float32", 3.0)
    assert_grad(got.grads.query, want.grads.query, "float32", 3.0, terms=3.0)
    assert_grad(got.grads.own * size, want.grads.own, "float32", 3.0, terms=3.0)


@pytest.mark.parametrize("method", METHODS)
def test_own_keys_that_are_not_finite_spoil_their_row(method: str) -> None:
    query, key, own, _ = problem()
    for row, dot in ((7, -np.inf), (9, np.inf)):
        own[row, 1, 2] = dot * np.sign(query[row, 2])
    losses = infonce.info_nce_loss(query, key, own=own, scale=3.0, method=method, reduction="none")
    assert np.flatnonzero(np.isnan(losses)).tolist() == [7, 9]


def test_without_the_batch_blocks_with_a_positive_are_visited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visited = []
    tile_products = TiledPass.tile_products

    def counted(self: TiledPass, a: int, b: int, *operands: Any) -> Any:
        visited.append((a, b))
        return tile_products(self, a, b, *operands)

    monkeypatch.setattr(TiledPass, "tile_products", counted)
    monkeypatch.setattr(schedule, "MIXED_SIDE", 8)
    query, key, own, _ = problem(m=32, n=64)
    infonce.info_nce_loss(query, key, own=own, scale=3.0, in_batch=False, method="tiled")
    assert sorted(visited) == [(a, a) for a in range(4)]


def test_calls_that_differ_in_own_negatives_alone() -> None:
    query, key, own, _ = problem()
    for other in (own, -own):
        got = infonce.info_nce_loss(query, key, own=other, scale=3.0)
        near(got, reference.info_nce(query, key, own=other, scale=3.0).loss)


def test_given_destinations() -> None:
    query, key, own, _ = problem()
    out = {"own": np.full(own.shape, np.nan), "query": np.full(query.shape, np.nan)}
    got = infonce.info_nce_loss_and_grad(query, key, own=own, scale=3.0, out=out)
    assert got.grads.own is out["own"]
    want = reference.info_nce(query, key, own=own, scale=3.0)
    near(out["own"], want.grads["own"])
    near(out["query"], want.grads["query"])


@pytest.mark.parametrize("method", METHODS)
def test_metrics_count_own_negatives(method: str) -> None:
    """Metrics count unmasked own negatives by their logits without `hardness` and `margin`."""
    query, key, own, rng = problem()
    mask = rng.random((24, 3)) < 0.7
    own[~mask] *= 100.0
    got = infonce.info_nce_loss_and_grad(
        query, key, own=own, own_mask=mask, scale=3.0, hardness=2.0, margin=0.1, method=method,
        metrics=True,
    ).metrics  # fmt: skip
    x = 3.0 * np.hstack([query @ key.T, np.einsum("id,ikd->ik", query, own)])
    positive = x.diagonal().copy()
    near(got.positive, positive)
    x[np.arange(24), np.arange(24)] = -np.inf
    x[:, 30:][~mask] = -np.inf
    assert (x[:, 30:] > positive[:, None]).any()
    np.testing.assert_array_equal(got.row_rank, (x > positive[:, None]).sum(axis=1))
    near(got.hardest_negative, x.max(axis=1))


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
