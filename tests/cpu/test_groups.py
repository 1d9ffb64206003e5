"""Groups of samples on the CPU: what they leave out, and the blocks that are not computed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infonce.kernels.cpu import schedule
from infonce.kernels.cpu.loops import sigmoid
from infonce.kernels.cpu.tiled_pass import TiledPass
from infonce.kernels.grid import Grid, default_positive_blocks, positive_blocks, slices
from infonce.kernels.problem import default_positives
from reference_problems import one_problem, quick

import infonce
from infonce import reference

NAMES = ("info_nce", "nt_xent", "clip", "lit", "siglip", "gte")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"TILE": (16, 12), "TRIANGLE_SIDE": 12, "GROUP_ROWS": 8}
    sizes |= {"MIXED_SIDE": 6, "LEAST_RUN": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(schedule, name, size)


def call(name: str, features: Any, **options: Any) -> Any:
    return getattr(infonce, f"{name}_loss_and_grad")(*features, **options)


@pytest.mark.parametrize("name", ["clip", "info_nce", "siglip", "nt_xent", "gte"])
def test_blocks_without_a_common_group_are_not_computed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    visited = set()
    tile_products = TiledPass.tile_products

    def counted(self: TiledPass, a: int, b: int, *operands: Any) -> Any:
        visited.add((a, b))
        return tile_products(self, a, b, *operands)

    monkeypatch.setattr(TiledPass, "tile_products", counted)
    rows = 128 if name == "nt_xent" else 64
    features = one_problem(name, rows=rows).features
    groups = np.arange(rows) // 16 % 4
    call(name, features, scale=2.0, groups=groups, method="tiled")
    with_groups = len(visited)
    visited.clear()
    call(name, features, scale=2.0, groups=np.zeros(rows, int), method="tiled")
    assert with_groups <= len(visited) / 2


def test_ranks_and_progress_know_visited_blocks_alone() -> None:
    features, groups = one_problem("clip", rows=64).features, np.arange(64) // 16
    seen: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"scale": 2.0, "groups": groups, "metrics": True}
    tiled = call("clip", features, method="tiled", progress=lambda *at: seen.append(at), **options)
    naive = call("clip", features, method="naive", **options)
    assert np.array_equal(tiled.metrics.row_rank, naive.metrics.row_rank)
    assert np.array_equal(tiled.metrics.column_rank, naive.metrics.column_rank)
    assert max(tiled.metrics.row_rank) < 16
    assert seen[-1][1] == seen[-1][2] < 8 * 6 / 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_excluded_pairs_of_a_sigmoid_are_exactly_zero(dtype: Any) -> None:
    """Products of subnormal numbers take ten times as long."""
    x, a = np.full((2, 5), -np.inf, dtype), np.full(2, 1e-3, dtype)
    sums, counter = np.zeros((3, 2)), np.zeros(1, np.int64)
    none = np.full(2, -1), 0, np.zeros(2), np.zeros(2)  # no positives
    sigmoid.sigmoid(x, 10.0, -10.0, a, *sums, *sigmoid.without_ids(x), *none, counter)
    assert not x.any()


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
def test_rows_that_meet_no_key(method: str) -> None:
    """Rows without a positive or a key in their group overwrite gradients of NaN with 0."""
    query, key = one_problem("info_nce", rows=32).features
    labels, groups = np.where(np.arange(32) < 16, -1, np.arange(32)), np.arange(32) // 16
    out = {"query": np.full_like(query, np.nan), "key": np.full_like(key, np.nan)}
    options: dict[str, Any] = {"scale": 2.0, "groups": (groups, np.ones(32, int))}
    got = call("info_nce", (query, key), labels=labels, out=out, method=method, **options)
    want = reference.info_nce(query, key, labels=labels, **options)
    np.testing.assert_allclose(got.grads.query, want.grads["query"], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.grads.key, want.grads["key"], rtol=1e-12, atol=1e-13)
    assert not got.grads.query[:16].any()


@quick
@given(st.integers(1, 40), st.integers(0, 20), st.booleans(), st.data())
def test_blocks_of_default_positives(half: int, more: int, symmetric: bool, data: Any) -> None:
    """Bounds of blocks and the list of positives give the same blocks."""
    m = 2 * half
    n = m if symmetric else m + more
    first = data.draw(st.integers(0, n - 1))
    steps = (data.draw(st.integers(1, 12)) for _ in range(2))
    grid = Grid(slices(m, next(steps)), slices(n, next(steps), first))
    want = positive_blocks(grid, default_positives(m, symmetric, np))
    assert np.array_equal(default_positive_blocks(grid, m, symmetric), want)
    assert want.any() == (first < m)
