"""What the matrix does not compare: accuracy of a large batch, metrics, logits, destinations, and
features at the ends of float16's range."""

import copy
import itertools
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from judge import (
    DTYPES,
    LOSSES,
    arguments,
    assert_grad,
    assert_loss,
    cancelling,
    judged,
    largest_logit,
    pairs,
    scale_size,
)

import infonce

METHODS = ["naive", "fused", "tiled"]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


def compare(out: infonce.LossAndGrad, ref: Any, args: Any, scale: float) -> None:
    dtype = args[0].dtype.name
    logit = largest_logit(scale, args[0], args[-1])
    terms = cancelling(ref, args, scale)
    assert_loss(out.loss, ref.loss, dtype, logit)
    for name, got in out.grads._asdict().items():
        want = ref.grads[name]
        if want is None:
            assert got is None
        elif name in ("scale", "bias"):
            single = "float64" if dtype == "float64" else "float32"
            size = max(scale_size(ref, args), abs(want))
            assert_grad(got, want, single, logit, size, terms * np.sqrt(len(args[0])) / scale)
        else:
            assert got.dtype.name == dtype
            assert_grad(got, want, dtype, logit, terms=terms)


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("loss", LOSSES)
def test_accuracy_of_a_batch(loss: str, turn: int) -> None:
    """float32 at a size where rounding averages out: 1e-6 of the loss, 5e-6 of the gradient. Each
    loss has all temperatures and all kinds of rows; all losses together have each pair of them."""
    temperature = (1.0, 0.07, 0.01, 0.005)[turn]
    kinds = ("random", "aligned", "partly aligned", "opposed")
    kind = kinds[(turn + LOSSES.index(loss)) % 4]
    args = arguments(loss, *pairs(kind, 1000, 1000, 64, np.float32, 3))
    ref = judged(loss, args, scale=1 / temperature)
    out = call(loss, *args, temperature=temperature, method="tiled", workspace=2**21)
    if ref.loss < 0.05:  # a loss near 0 is judged beside its logits
        compare(out, ref, args, 1 / temperature)
        return
    assert abs(out.loss - ref.loss) <= 1e-6 * ref.loss
    for name, want in ref.grads.items():
        if isinstance(want, np.ndarray):
            error = np.linalg.norm(getattr(out.grads, name) - want) / np.linalg.norm(want)
            assert error <= 5e-6, name


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip", "lit"])
@pytest.mark.parametrize("method", METHODS)
def test_lse_metrics_and_logits(loss: str, method: str, tile_sides: Any) -> None:
    tile_sides(16, 24)
    args = arguments(loss, *pairs("partly aligned", 45, 45, 4, np.float64, 6))
    x = 5.0 * args[0] @ args[-1].T
    if loss == "nt_xent":
        np.fill_diagonal(x, -np.inf)
    m = len(x)
    positives = (np.arange(m) + m // 2) % m if loss == "nt_xent" else np.arange(m)
    at = x[np.arange(m), positives]
    out = call(loss, *args, scale=5.0, method=method, metrics=True, wrt=())
    ref = judged(loss, args, scale=5.0)
    lse = out.lse if loss == "clip" else (out.lse,)
    want = ref.lse if loss == "clip" else (ref.lse,)
    for got, expected in zip(lse, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert all(g is None for g in out.grads)
    assert out.metrics is not None
    np.testing.assert_array_equal(out.metrics.row_rank, (x > at[:, None]).sum(axis=1))
    np.testing.assert_allclose(out.metrics.row_loss, np.mean(want[0] - at), rtol=1e-11)
    if loss == "clip":
        np.testing.assert_allclose(out.metrics.column_loss, np.mean(want[1] - at), rtol=1e-11)
        np.testing.assert_array_equal(out.metrics.column_rank, (x > at[None, :]).sum(axis=0))
        assert out.metrics.top(m) == (1.0, 1.0)
        none = replace(out.metrics, row_rank=out.metrics.row_rank[:0])  # of a rank without rows
        assert math.isnan(none.top(1)[0])
    else:
        assert out.metrics.column_rank is None
    assert out.metrics.top(1)[0] == np.mean(x.argmax(axis=1) == positives)
    np.testing.assert_allclose(out.metrics.positive, at, rtol=1e-12)
    x[np.arange(m), positives] = -np.inf
    np.testing.assert_allclose(out.metrics.hardest_negative, x.max(axis=1), rtol=1e-12)
    if method == "naive":
        x[np.arange(m), positives] = at
        shown = call(loss, *args, scale=5.0, method=method, return_logits=True).logits
        np.testing.assert_allclose(shown, x, rtol=1e-12)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_results_can_be_copied_and_pickled(loss: str, copied: Any) -> None:
    """Before `lse` is read, and after."""
    args = arguments(loss, *pairs("partly aligned", 20, 20, 5, np.float32, 0))
    out = getattr(infonce, f"{loss}_loss_and_grad")(*args, scale=5.0, metrics=loss != "siglip")
    for _ in range(2):
        np.testing.assert_equal(contents(copied(out)), contents(out))


def contents(out: Any) -> Any:
    metrics = None if out.metrics is None else vars(out.metrics)
    return out.loss, out.grads._asdict(), out.lse, metrics, out.logits


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_copy_of_the_positive_is_not_nearer(dtype: Any, normalize: bool) -> None:
    """Each key is there twice, and BLAS may round the products of equal keys differently."""
    image, text = pairs("partly aligned", 700, 700, 50, dtype, 3)
    text[350:] = text[:350]
    options: dict[str, Any] = {"normalize": normalize, "method": "tiled", "metrics": True}
    metrics = infonce.clip_loss_and_grad(image, text, scale=5.0, **options).metrics
    if dtype == np.float64:  # neither squares of features nor their sums are numbers of float64
        sides = (image * 2.0**700, text * 2.0**-700)
        far = infonce.clip_loss_and_grad(*sides, scale=5.0, **options).metrics
        np.testing.assert_array_equal(far.row_rank, metrics.row_rank)
        np.testing.assert_array_equal(far.column_rank, metrics.column_rank)
    q, k = (z.astype(float) for z in (image, text))
    if normalize:
        q, k = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (q, k))
    x = q @ k.T
    x[:, 350:] = x[:, :350]
    at = np.diagonal(x)
    above = at + 1e-5 * np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1)
    # a key between `at` and `above` may count or not
    for logits, rank in ((x.T, metrics.row_rank), (x, metrics.column_rank)):
        least, most = ((logits > bound).sum(axis=0) for bound in (above, at))
        assert np.all((least <= rank) & (rank <= most))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_the_loss_nan(loss: str, method: str, bad: float) -> None:
    """And the gradient of its scale is not finite, also if no row has a positive."""
    for side in range(1 if loss == "nt_xent" else 2):
        args = arguments(loss, *pairs("random", 20, 20, 3, np.float32, 7))
        args[0][:, 1] = -np.abs(args[0][:, 1])  # all logits with an infinite key are -inf or nan
        args[side][11, 1] = bad
        calls = [args, [*args, np.full(20, -1)]] if loss == "info_nce" else [args]
        for each in calls:
            out = call(loss, *each, scale=3.0, method=method)
            assert np.isnan(out.loss)
            assert not np.isfinite(out.grads.scale)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poisoned", ["query", "key", "guide query", "guide key"])
def test_what_is_not_finite_makes_the_gradient_of_the_scale_nan(poisoned: str, method: str) -> None:
    """Wherever the loss is NaN: also if ids exclude all negatives, and if only scale has a
    gradient."""
    names = ("query", "key", "guide query", "guide key")
    rng = np.random.default_rng(0)
    sides = {name: rng.standard_normal((3 if "query" in name else 5, 4)) for name in names}
    sides[poisoned][1] = np.nan
    query, key, *guide = sides.values()
    options: dict[str, Any] = {"ids": (np.zeros(3, int), np.zeros(5, int)), "guide": tuple(guide)}
    for labels in (np.full(3, -1), np.array([0, -1, 2])):
        for normalize, wrt in itertools.product((True, False), (None, ["scale"], ["key", "scale"])):
            out = infonce.info_nce_loss_and_grad(
                query, key, labels, scale=2.0, guide_margin=0.1, method=method,
                normalize=normalize, wrt=wrt, **options,
            )  # fmt: skip
            assert np.isnan([out.loss, out.grads.scale]).all()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_makes_the_gradient_of_the_bias_nan(method: str) -> None:
    """Also if the logits are -inf, whose probability is 0."""
    image, text = np.ones((2, 3, 4))
    text[1] = -np.inf
    out = infonce.siglip_loss_and_grad(image, text, method=method)
    assert np.isnan([out.loss, out.grads.scale, out.grads.bias]).all()


@pytest.mark.parametrize("method", ["fused", "tiled"])
@pytest.mark.parametrize("loss", LOSSES)
def test_float16_extremes(loss: str, method: str) -> None:
    args = arguments(loss, *pairs("partly aligned", 33, 33, 8, np.float64, 8))
    for size in (60000.0, 6e-8):
        big = [(z * size).astype(np.float16) for z in args]
        ref = judged(loss, tuple(big), scale=1.0)
        out = call(loss, *big, scale=1.0, method=method, grad_dtype=np.float32)
        logit = largest_logit(1.0, big[0], big[-1])
        assert np.isfinite(out.loss)
        assert_loss(out.loss, ref.loss, "float32", logit)
        if size < 1:
            compare_to = out.grads[0]
            assert_grad(compare_to, next(iter(ref.grads.values())), "float32", logit)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shift", [-300.0, 500.0])
def test_a_constant_added_to_all_logits_changes_nothing(method: str, shift: float) -> None:
    """The maximum is not assumed to be anywhere: far from 0 sums neither over- nor underflow."""
    query, key = pairs("partly aligned", 80, 80, 6, np.float32, 11)
    one = np.ones((80, 1), np.float32)
    moved = np.hstack([query, one]), np.hstack([key, shift / 20 * one])
    plain = infonce.clip_loss(query, key, scale=20.0, method=method)
    far = infonce.clip_loss(*moved, scale=20.0, method=method)
    assert abs(far - plain) <= 4 * 2.0**-24 * abs(shift)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("grad_dtype", [None, np.float64, np.float32, np.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_out_and_guard_regions(loss: str, method: str, dtype: Any, grad_dtype: Any) -> None:
    args = arguments(loss, *pairs("partly aligned", 67, 67, 9, dtype, 12))
    workspace = 2**17 if method == "tiled" else 2**28
    plain = call(loss, *args, scale=4.0, method=method, grad_dtype=grad_dtype,
                 workspace=workspace)  # fmt: skip
    names = [n for n, g in plain.grads._asdict().items() if g is not None and g.ndim == 2]
    walls, out = [], {}
    for name in names:
        want = getattr(plain.grads, name)
        wall = np.full((want.shape[0] + 2, want.shape[1] + 7), 99, want.dtype)
        walls.append(wall)
        out[name] = wall[1:-1, 3:-4]
        out[name][:] = np.nan  # every element has to be written
    got = call(loss, *args, scale=4.0, method=method, out=out, workspace=workspace)
    for name, wall in zip(names, walls, strict=True):
        assert getattr(got.grads, name) is out[name]
        np.testing.assert_array_equal(out[name], getattr(plain.grads, name))
        inside = np.zeros(wall.shape, bool)
        inside[1:-1, 3:-4] = True
        assert (wall[~inside] == 99).all()


def test_one_exponential_is_not_enough_for_columns_far_below_their_rows() -> None:
    """Columns whose logits all lie 2^-80 or more below the rows' maxima are summed again."""
    query, key = np.zeros((64, 2), np.float64), np.zeros((64, 2), np.float64)
    query[:, 0] = 1.0
    key[:, 0] = np.linspace(-1, 1, 64)
    for dtype in (np.float32, np.float64):
        args = query.astype(dtype), key.astype(dtype)
        ref = judged("clip", args, scale=500.0)
        for method in METHODS:
            compare(call("clip", *args, scale=500.0, method=method), ref, args, 500.0)
