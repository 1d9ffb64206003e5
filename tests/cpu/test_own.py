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
    """And the gradient of the scale, also if no row has a positive."""
    query, key, own, _ = problem()
    for row, dot in ((7, -np.inf), (9, np.inf)):
        own[row, 1, 2] = dot * np.sign(query[row, 2])
    options: dict[str, Any] = {"own": own, "scale": 3.0, "method": method}
    losses = infonce.info_nce_loss(query, key, reduction="none", **options)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [7, 9]
    own[9] = 0
    for labels in (None, np.full(len(query), -1)):
        out = infonce.info_nce_loss_and_grad(query, key, labels, **options)
        assert np.isnan([out.loss, out.grads.scale]).all()


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
    """And write to given destinations."""
    query, key, own, _ = problem()
    for other in (own, -own):
        out = {"own": np.full(own.shape, np.nan), "query": np.full(query.shape, np.nan)}
        got = infonce.info_nce_loss_and_grad(query, key, own=other, scale=3.0, out=out)
        want = reference.info_nce(query, key, own=other, scale=3.0)
        near([got.loss, infonce.info_nce_loss(query, key, own=other, scale=3.0)], want.loss)
        assert got.grads.own is out["own"]
        near(out["own"], want.grads["own"])
        near(out["query"], want.grads["query"])


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


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
