"""What the matrix does not compare: accuracy of a large batch, metrics, logits, destinations, and
features at the ends of float16's range."""

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from judge import (
    BFLOAT16,
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


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "clip"])
@pytest.mark.parametrize("method", METHODS)
def test_metrics_and_logits(loss: str, method: str, tile_sides: Any) -> None:
    """Those that the matrix does not compare."""
    tile_sides(16, 24)
    args = arguments(loss, *pairs("partly aligned", 45, 45, 4, np.float64, 6))
    x = 5.0 * args[0] @ args[-1].T
    if loss == "nt_xent":
        np.fill_diagonal(x, -np.inf)
    m = len(x)
    positives = (np.arange(m) + m // 2) % m if loss == "nt_xent" else np.arange(m)
    at, out = x[np.arange(m), positives], call(loss, *args, scale=5.0, method=method, metrics=True)
    assert out.metrics is not None
    np.testing.assert_allclose(out.metrics.row_loss, np.mean(logsumexp(x) - at), rtol=1e-11)
    assert out.metrics.top(1)[0] == np.mean(x.argmax(axis=1) == positives)
    if loss == "clip":
        np.testing.assert_allclose(
            out.metrics.column_loss, np.mean(logsumexp(x.T) - at), rtol=1e-11
        )
        assert out.metrics.top(m) == (1.0, 1.0)
        none = replace(out.metrics, row_rank=out.metrics.row_rank[:0])  # of a rank without rows
        assert math.isnan(none.top(1)[0])
    else:
        assert out.metrics.column_rank is None
    if method == "naive":
        shown = call(loss, *args, scale=5.0, method=method, return_logits=True).logits
        np.testing.assert_allclose(shown, x, rtol=1e-12)


def logsumexp(x: np.ndarray) -> Any:
    return np.log(np.exp(x).sum(axis=1))


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
@pytest.mark.parametrize(("dtype", "grad_dtype"), [
    (np.float64, None), (np.float32, np.float16), (np.float16, np.float64), (BFLOAT16, None),
])  # fmt: skip
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
