"""Linear terms as the GPU computes them, with its kernels played by NumPy."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from infonce.kernels.gpu import config, linear
from infonce.kernels.gpu.schedule import is_computed_by_kernels_only
from infonce.kernels.linear import LinearGradient, LinearTerm, Segments, segment_sums
from infonce.kernels.problem import Problem

from infonce.checks import rows

pytestmark = pytest.mark.extras


class Kernels:
    """The kernels of kernels/cuda/linear.cu in NumPy."""

    precision = "fp64"

    def launch(self, file: str, kernel: str, grid: int, block: int, a: dict[str, Any]) -> None:
        """Segments that lie in several pieces are joined with the pieces."""
        assert file == "linear.cu"
        n, d, (segment, order) = a["n"], a["d"], a["segments"].values()
        if kernel == "join_pieces":
            assert grid == -(-n // config.PLACE_ROWS) * -(-d // linear.JOIN_FEATURES)
            return
        assert kernel == "segment_pieces"
        assert grid * block >= -(-n // config.PLACE_ROWS) * -(-d // linear.LANE_FEATURES)
        segment = np.zeros(n, int) if segment is None else segment
        order = np.arange(n) if order is None else order
        places = segment[order]
        assert len(set(places)) == 1 + (np.diff(places) != 0).sum()
        terms = unit_rows(a["rows"])
        if a["weight"] is not None:
            terms = a["weight"][:, None] * terms
        for at in range(n):
            if segment[at] >= 0:
                a["out"][segment[at]] = terms[segment == segment[at]].sum(axis=0)

    def launch_rows(self, kernel: str, n: int, d: int = 0, /, *, file: str, **a: Any) -> None:
        assert file == "linear.cu"
        if kernel == "positive_products":
            at = a["positives"].reshape(-1)
            u, v = unit_rows(a["query"]), unit_rows(a["key"])
            dots = (np.repeat(u, a["set_size"], axis=0) * v[at]).sum(axis=1)
            a["out"].reshape(-1)[:] = np.where(at < 0, 0.0, dots)
            return
        u, segment = unit_rows(a["rows"])[:n], a["segment"]
        segment = np.zeros(n, int) if segment is None else segment[:n]
        row_sums = 0.0 if a["sums"] is None else a["sums"][segment]
        if kernel == "segment_products":
            a["out"][:] = (u * (row_sums - a["own_count"] * u)).sum(axis=1) * (segment >= 0)
            return
        assert kernel == "subtract_linear"
        t = 0.0 if a["factor"] is None else a["factor"][:n, None] * (row_sums - a["own_count"] * u)
        if a["weighted"] is not None:
            t = t + a["weighted"][segment]
        inverse, radial = 1.0, ((t * u).sum(axis=1) * (segment >= 0))[:, None]
        if a["dots"] is not None:
            a["dots"][:n] -= radial[:, 0]
        if a["rows"]["factor"] is not None:
            t = t - u * radial
            inverse = inverses(a["rows"])[:n]
        a["g"][:n] -= t * inverse * (segment >= 0)[:, None]


def inverses(rows: dict[str, Any]) -> Any:
    return np.ldexp(rows["factor"], -rows["exponent"])[:, None]


def unit_rows(rows: dict[str, Any]) -> Any:
    """u_i of struct Rows."""
    return rows["z"] if rows["factor"] is None else rows["z"] * inverses(rows)


def make_rows(
    monkeypatch: pytest.MonkeyPatch, *features: Any, normalize: bool
) -> list[linear.GPURows]:
    monkeypatch.setattr(linear, "cupy", np)
    monkeypatch.setattr(
        linear, "order_by_segment", lambda segment: np.argsort(segment, kind="stable")
    )
    for name in ("matrix", "address"):
        monkeypatch.setattr(linear, name, lambda z, first=0: None if z is None else z[first:])
    rows = []
    for z in features:
        factor = exponent = None
        if normalize:
            mantissa, exponent = np.frexp(np.linalg.norm(z, axis=1))
            factor = 1 / mantissa
        side: Any = SimpleNamespace(features=z, factor=factor, exponent=exponent)
        kernels: Any = Kernels()
        rows.append(linear.GPURows(kernels, side))
    return rows


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("set_size", [1, 3])
def test_products_with_positives(
    set_size: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((40, 5)), rng.standard_normal((50, 5))
    positives = rng.integers(-1, 50, (40, set_size))
    query, key = make_rows(monkeypatch, q, k, normalize=normalize)
    if normalize:
        q, k = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (q, k))
    wanted = np.where(positives < 0, 0.0, np.einsum("id,ipd->ip", q, k[positives]))
    if set_size == 1:
        positives, wanted = positives[:, 0], wanted[:, 0]
    np.testing.assert_allclose(query.positive_products(key, positives), wanted, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
def test_sums_and_gradients(
    by_ids: bool, symmetric: bool, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums and gradients of sum_ij (a_i + b_j) u_i . v_j over a segment equal those of the whole
    matrix."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((40, 5)), rng.standard_normal((50, 5))
    k = q if symmetric else k
    m, n, count = len(q), len(k), 4
    query_segments = rng.integers(0, count, m)
    key_segments = query_segments if symmetric else rng.integers(0, count, n)
    ids = np.array([7, -3, 50, 0])  # in the place of segments' numbers
    segments = Segments(query_segments, key_segments, count)
    if by_ids:
        query_ids = ids[query_segments]
        segments = Segments(query_ids, query_ids if symmetric else ids[key_segments])
    sides = make_rows(monkeypatch, *((q,) if symmetric else (q, k)), normalize=normalize)
    query, key = sides[0], sides[-1]

    same = (query_segments[:, None] == key_segments).astype(float)
    if symmetric:
        np.fill_diagonal(same, 0)
    length = [np.linalg.norm(z, axis=1, keepdims=True) if normalize else 1.0 for z in (q, k)]
    u, v = q / length[0], k / length[1]
    bias = rng.standard_normal(n)
    problem: Any = SimpleNamespace(symmetric=symmetric, key_bias=bias, query_bias=None)
    rows, columns = segment_sums(np, problem, query, key, segments, not symmetric)
    dots = (u @ v.T) * same
    np.testing.assert_allclose(rows.products, dots.sum(axis=1), atol=1e-12)
    np.testing.assert_array_equal(rows.number, same.sum(axis=1))
    np.testing.assert_allclose(rows.biases, same @ bias, atol=1e-12)
    if columns is not None:
        np.testing.assert_allclose(columns.products, dots.sum(axis=0), atol=1e-12)
        np.testing.assert_array_equal(columns.number, same.sum(axis=0))

    a, b = rng.standard_normal(m), None if symmetric else rng.standard_normal(n)
    weight = (a[:, None] + (0.0 if b is None else b)) * same
    if symmetric:
        weight = weight + weight.T
    wanted, wanted_dots = [], []
    for g, z, norms in ((weight @ v, u, length[0]), (weight.T @ u, v, length[1])):
        wanted_dots.append(-(g * z).sum(axis=1))
        if normalize:
            g = g - z * (g * z).sum(axis=1, keepdims=True)
        wanted.append(-g / norms)
    dq, dk, query_dots, key_dots = np.zeros_like(q), np.zeros_like(k), np.zeros(m), np.zeros(n)
    term = LinearTerm(segments, a, b)
    query.subtract(LinearGradient(np, query, key, term, False, symmetric), dq, query_dots)
    np.testing.assert_allclose(dq, wanted[0], atol=1e-12)
    np.testing.assert_allclose(query_dots, wanted_dots[0], atol=1e-12)
    if symmetric:
        return
    key_gradient = LinearGradient(np, query, key, term, True, False)
    for part in (slice(0, 20), slice(20, n)):
        key.subtract(key_gradient.part(part), dk[part], key_dots[part], part.start)
    np.testing.assert_allclose(dk, wanted[1], atol=1e-12)
    np.testing.assert_allclose(key_dots, wanted_dots[1], atol=1e-12)


def test_classes_found_on_the_host_are_for_steps() -> None:
    """Features in host memory, or over ranks: kernels take classes that the device has sorted."""
    classes, positives, _ = rows.classes(np, np.array([0, 0, 1, 1, 1]), 5, False, 0, True)
    z = np.ones((5, 2))
    problem = Problem(z, z, 1.0, 0.2, positives, classes=classes)
    assert not is_computed_by_kernels_only(problem)
    assert is_computed_by_kernels_only(replace(problem, classes=None))
