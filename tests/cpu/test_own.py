"""Negatives of one row alone, and batches whose other rows are no negatives, on the CPU."""

from typing import Any

import numpy as np
import pytest
from infonce.kernels import between_passes
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


# --- own negatives in a table, and their biases


def table_problem(seed: int = 0, k: int = 5, rows: int = 9) -> Any:
    """Queries, keys, a table and indices of it; the last row has no use. And a generator."""
    query, key, _, rng = problem(seed)
    table = rng.standard_normal((rows, query.shape[1]))
    return query, key, table, rng.integers(-1, rows - 1, (len(query), k)), rng


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_table_is_its_rows(method: str, normalize: bool) -> None:
    """The loss has the bits of the call with the rows in memory of their own, and a row of the
    table has the sum of their gradients. A negative index is one that the mask leaves out. A row
    without a use may hold NaN."""
    query, key, table, indices, _ = table_problem()
    table[-1] = np.nan
    options: dict[str, Any] = {"scale": 3.0, "method": method, "normalize": normalize}
    got = infonce.info_nce_loss_and_grad(query, key, own=table, own_indices=indices, **options)
    want = infonce.info_nce_loss_and_grad(
        query, key, own=table[np.maximum(indices, 0)], own_mask=indices >= 0, **options
    )
    assert got.loss == want.loss
    for field in ("query", "key", "scale"):
        np.testing.assert_array_equal(getattr(got.grads, field), getattr(want.grads, field))
    sums = np.zeros_like(table)
    np.add.at(sums, indices[indices >= 0], want.grads.own[indices >= 0])
    near(got.grads.own, sums)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_of_a_table_with_many_uses(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """Uses of one row in several parts, with the same bits each time."""
    query, key, table, indices, rng = table_problem(k=40)
    query, key, table = (z.astype(dtype) for z in (query, key, table))
    indices[rng.random(indices.shape) < 0.8] = 4
    options: dict[str, Any] = {"own": table, "own_indices": indices, "scale": 3.0}
    want = reference.info_nce(query, key, normalize=True, **options)
    for room in (10_000, 700):
        monkeypatch.setattr(between_passes, "OWN_BYTES", room)
        got, again = (
            infonce.info_nce_loss_and_grad(query, key, normalize=True, **options).grads.own
            for _ in range(2)
        )
        assert got.tobytes() == again.tobytes()
        name = np.dtype(dtype).name
        assert_grad(got, want.grads["own"], name, 3.0, terms=3.0)


@pytest.mark.parametrize("method", METHODS)
def test_a_bias_counts_negatives_several_times(method: str) -> None:
    """log w is the bias of a negative that counts w times."""
    query, key, own, rng = problem()
    times = rng.integers(1, 4, own.shape[:2])
    options: dict[str, Any] = {"scale": 3.0, "method": method, "hardness": 0.5}
    got = infonce.info_nce_loss_and_grad(query, key, own=own, own_bias=np.log(times), **options)
    copies = np.arange(3) < times[:, :, None]
    want = infonce.info_nce_loss_and_grad(
        query, key, own=np.repeat(own, 3, axis=1), own_mask=copies.reshape(24, 9), **options
    )
    near(got.loss, want.loss)
    for field in ("query", "key", "scale"):
        near(getattr(got.grads, field), getattr(want.grads, field))
    near(got.grads.own, want.grads.own.reshape(24, 3, 3, -1).sum(axis=2))


def test_a_sampled_softmax_of_all_items_is_the_softmax() -> None:
    """Each item as a sample once, with probability 1 / T: the bias is -log(T / T) = 0."""
    query, items, _, rng = problem(n=30)
    bought = rng.integers(0, 30, len(query))
    sampled = np.tile(np.arange(30), (len(query), 1))
    got = infonce.info_nce_loss_and_grad(
        query, items[bought], own=items, in_batch=False, scale=3.0,
        own_indices=np.where(sampled == bought[:, None], -1, sampled),
        own_bias=-np.log(30 * np.full(sampled.shape, 1 / 30)),
    )  # fmt: skip
    want = infonce.info_nce_loss_and_grad(query, items, bought, scale=3.0)
    near(got.loss, want.loss)
    near(got.grads.query, want.grads.query)
    items_grad = got.grads.own.copy()
    np.add.at(items_grad, bought, got.grads.key)
    near(items_grad, want.grads.key)


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
