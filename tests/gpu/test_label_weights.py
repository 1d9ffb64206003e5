"""`label_weights` on a GPU, against the specification; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype
from judge import assert_grad, assert_loss, assert_same_bits, largest_logit, pairs
from reference_problems import each_once

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import config

M, N, D, MOST, SCALE = 70, 150, 20, 4, 10.0
OPTIONS: list[dict[str, Any]] = [
    {},
    {"margin": 0.1, "hardness": 1.5},
    {"decoupled": True},
    {"label_smoothing": 0.2},
]


def draw(dtype: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Queries, keys, labels and weights; rows without a positive, and weights that are not read."""
    query, key = pairs("random", M, N, D, find_dtype(dtype), seed)
    rng = np.random.default_rng(seed)
    labels = each_once(rng.integers(-1, N, (M, MOST)))
    labels[::9] = -3
    weights = rng.uniform(0.1, 2.0, labels.shape) * (rng.random(labels.shape) < 0.8)
    weights[1] = 0.0
    return query, key, labels, np.where(labels < 0, np.nan, weights)


def call(arrays: Any, **options: Any) -> infonce.LossAndGrad:
    query, key, labels, weights = (None if z is None else cupy.asarray(z) for z in arrays)
    return infonce.info_nce_loss_and_grad(
        query, key, labels, scale=SCALE, label_weights=weights, **options
    )


def compare(arrays: Any, dtype: str, got: infonce.LossAndGrad, **options: Any) -> None:
    query, key, labels, weights = arrays
    want = reference.info_nce(
        query, key, scale=SCALE, labels=labels, label_weights=weights, **options
    )
    logit = largest_logit(SCALE + options.get("hardness", 0.0), query, key) + 1.0
    assert_loss(float(got.loss), want.loss, dtype, logit)
    terms = SCALE * np.abs(want.losses).max() / M**0.5
    for name in ("query", "key", "scale"):
        have = cupy.asnumpy(getattr(got.grads, name))
        assert_grad(have, want.grads[name], dtype, logit, terms=terms)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_equal_weights_are_none(
    options: dict[str, Any], portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding: kernels that multiply by a weight of 1 may contract other sums."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    query, key, labels, weights = draw("float32")
    plain = call((query, key, labels, None), method="tiled", **options)
    equal = call((query, key, labels, 0.3 + 0 * weights), method="tiled", **options)
    cupy.testing.assert_allclose(equal.loss, plain.loss, rtol=1e-6)
    for one, other in zip(equal.grads, plain.grads, strict=True):
        cupy.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    weighted = call((query, key, labels, weights), method="tiled", **options)
    assert float(weighted.loss) != float(plain.loss)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids="-".join)
def test_a_plan_for_other_weights(options: dict[str, Any]) -> None:
    """Recorded once, replayed for other labels and weights, and without weights between them."""
    for seed in (0, 1, 0):
        arrays = draw("float32", seed)
        got = call(arrays, method="tiled", **options)
        compare(arrays, "float32", got, **options)
        stepwise = call(arrays, method="tiled", progress=lambda *_: None, **options)
        assert_same_bits(got, stepwise)
        call((*arrays[:3], None), method="tiled", **options)


@pytest.mark.parametrize("bad", [-1.0, np.inf, np.nan])
@pytest.mark.parametrize("method", ["naive", "tiled"])
def test_invalid_weights_make_the_loss_nan(method: str, bad: float) -> None:
    """Values on a GPU are not read: the loss of the row is NaN, and no other."""
    query, key, labels, weights = draw("float32")
    row, column = np.argwhere(labels >= 0)[3]
    weights[row, column] = bad
    losses = call((query, key, labels, weights), method=method, reduction="none", wrt=()).loss
    assert np.flatnonzero(np.isnan(losses.get())).tolist() == [row]


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
def test_one_label_has_the_whole_target(method: str) -> None:
    query, key, labels, weights = draw("float32")
    labels, weights = labels[:, -1:], weights[:, -1:]
    alone = np.where(weights > 0, labels, -1)
    assert_same_bits(call((query, key, labels, weights), method=method),
                     call((query, key, alone, None), method=method))  # fmt: skip
