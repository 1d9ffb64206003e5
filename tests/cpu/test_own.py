"""Negatives of one row alone, and batches whose other rows are no negatives, on the CPU."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.kernels import between_passes
from infonce.kernels.cpu import schedule
from infonce.kernels.cpu.tiled_pass import TiledPass
from judge import assert_grad, assert_loss, viewed
from reference_problems import each_once, quick, softmax_options

import infonce
from infonce import reference

METHODS = ["naive", "fused", "tiled"]
ARGUMENTS = ("query", "key", "own", "scale")


def problem(seed: int = 0, m: int = 24, n: int = 30, k: int = 3, d: int = 5) -> Any:
    rng = np.random.default_rng(seed)
    shapes = (m, d), (n, d), (m, k, d)
    return *(rng.standard_normal(shape) / d**0.5 for shape in shapes), rng


@pytest.mark.parametrize("method", METHODS)
def test_options_and_sizes(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """All options, gradients and strides; several parts of rows, and several blocks."""
    monkeypatch.setattr(schedule, "TILE", (8, 12))
    monkeypatch.setattr(between_passes, "OWN_BYTES", 2000)

    @settings(quick, max_examples=80)
    @given(st.data())
    def check(data: Any) -> None:
        sizes = [data.draw(st.integers(1, most)) for most in (30, 30, 5, 9)]
        query, key, own, rng = problem(data.draw(st.integers(0, 2**32 - 1)), *sizes)
        m, n, k = len(query), len(key), own.shape[1]
        dtype = data.draw(st.sampled_from([np.float64, np.float32, np.float16]))
        options: dict[str, Any] = {"scale": 4.0, "normalize": data.draw(st.booleans())}
        options |= softmax_options("info_nce", m, n, rng)
        options.pop("label_smoothing", None)
        if n < m or data.draw(st.booleans()):
            labels = rng.integers(-1, n, (m, data.draw(st.integers(1, 3))))
            options["labels"] = each_once(labels)
        if data.draw(st.booleans()):
            options["own_mask"] = rng.random((m, k)) < 0.7
            own[~options["own_mask"]] = np.nan
        if data.draw(st.booleans()):
            options["in_batch"] = False
        elif data.draw(st.booleans()):
            options["ids"] = rng.integers(0, 9, m), rng.integers(0, 9, n)
        strides = data.draw(st.sampled_from(["contiguous", "every other"]))
        features = [viewed(z.astype(dtype), strides) for z in (query, key)]
        rows = np.asarray(own.astype(dtype), order=data.draw(st.sampled_from("CF")))
        ref = reference.info_nce(*features, own=rows, **options)
        if not np.isfinite(ref.loss):  # decoupled, and rows without negatives
            del options["decoupled"]
            ref = reference.info_nce(*features, own=rows, **options)
        wrt = data.draw(st.sampled_from([ARGUMENTS, ("own",), ("query",), ("key", "scale")]))
        how = {"wrt": wrt, "method": method}
        out = infonce.info_nce_loss_and_grad(*features, own=rows, **options, **how)
        name, logit = np.dtype(dtype).name, 60.0
        assert_loss(out.loss, ref.loss, name, logit)
        for field in ARGUMENTS:
            got = getattr(out.grads, field)
            assert (got is None) == (field not in wrt)
            if got is not None:
                assert_grad(got, ref.grads[field], name, logit, terms=10.0)

    check()


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
def test_of_one_query_they_are_more_keys(method: str) -> None:
    query, key, own, _ = problem(m=1)
    options: dict[str, Any] = {"scale": 3.0, "method": method}
    got = infonce.info_nce_loss_and_grad(query, key, own=own, **options)
    want = infonce.info_nce_loss_and_grad(query, np.concatenate([key, own[0]]), **options)
    near(got.loss, want.loss)
    near(got.grads.query, want.grads.query)
    near(got.grads.scale, want.grads.scale)
    near(np.concatenate([got.grads.key, got.grads.own[0]]), want.grads.key)


@pytest.mark.parametrize("method", METHODS)
def test_masked_ones_are_none(method: str) -> None:
    query, key, own, _ = problem()
    nothing = np.zeros(own.shape[:2], bool)
    own[:] = np.inf
    plain = infonce.info_nce_loss_and_grad(query, key, scale=3.0, method=method)
    got = infonce.info_nce_loss_and_grad(
        query, key, own=own, own_mask=nothing, scale=3.0, method=method
    )
    for field in ("query", "key", "scale"):
        near(getattr(got.grads, field), getattr(plain.grads, field))
    near(got.loss, plain.loss)
    assert not got.grads.own.any()


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


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_prefixes_of_own_negatives(method: str, normalize: bool) -> None:
    query, key, own, rng = problem()
    options = {"scale": 3.0, "normalize": normalize, "own_mask": rng.random((24, 3)) < 0.7}
    prefixes = {"dims": (2, 4), "dim_weights": (0.5, 2.0), "method": method}
    got = infonce.info_nce_loss_and_grad(query, key, own=own, **options, **prefixes)
    parts = {
        d: (w, reference.info_nce(query[:, :d], key[:, :d], own=own[..., :d], **options))
        for d, w in ((2, 0.5), (4, 2.0))
    }
    near(got.loss, sum(w * part.loss for w, part in parts.values()))
    near(got.grads.scale, sum(w * part.grads["scale"] for w, part in parts.values()))
    for field, z in (("query", query), ("key", key), ("own", own)):
        want = np.zeros_like(z)
        for d, (w, part) in parts.items():
            want[..., :d] += w * part.grads[field]
        near(getattr(got.grads, field), want)
    alone = infonce.info_nce_loss(query, key, own=own, **options, **prefixes)
    near(alone, got.loss)


@pytest.mark.extras
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_pytorch(reduction: str) -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch

    *z, rng = problem()
    tensors = [torch.tensor(part, requires_grad=True) for part in z]
    mask, groups = rng.random((24, 3)) < 0.8, (rng.integers(0, 3, 24), rng.integers(0, 3, 30))
    options: dict[str, Any] = {"scale": 3.0, "own_mask": mask, "groups": groups}
    loss = infonce.torch.info_nce_loss(
        *tensors[:2], own=tensors[2], reduction=reduction, **options
    ).mean()
    loss.backward()
    want = reference.info_nce(*z[:2], own=z[2], **options)
    near(loss.detach().numpy(), want.loss)
    for field, tensor in zip(ARGUMENTS, tensors, strict=False):
        near(tensor.grad.numpy(), want.grads[field])


@pytest.mark.extras
def test_jax() -> None:
    jax = pytest.importorskip("jax")
    import infonce.jax

    *z, rng = problem()
    mask, groups = rng.random((24, 3)) < 0.8, (rng.integers(0, 3, 24), rng.integers(0, 3, 30))

    @jax.jit
    def loss(query: Any, key: Any, own: Any) -> Any:
        return infonce.jax.info_nce_loss(
            query, key, own=own, own_mask=mask, groups=groups, scale=3.0
        )

    got, grads = jax.value_and_grad(loss, (0, 1, 2))(*(part.astype(np.float32) for part in z))
    want = reference.info_nce(*z[:2], own=z[2], own_mask=mask, groups=groups, scale=3.0)
    np.testing.assert_allclose(got, want.loss, rtol=1e-5)
    for field, grad in zip(ARGUMENTS, grads, strict=False):
        np.testing.assert_allclose(grad, want.grads[field], rtol=1e-3, atol=1e-6)


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
