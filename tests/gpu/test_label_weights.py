"""`label_weights` on a GPU, against the specification; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype
from judge import assert_same_bits, pairs
from reference_problems import each_once

import infonce

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy

M, N, D, MOST, SCALE = 70, 150, 20, 4, 10.0


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


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids="-".join)
def test_a_plan_for_other_weights(options: dict[str, Any]) -> None:
    """Recorded once, replayed for other labels and weights, and without weights between them."""
    for seed in (0, 1, 0):
        arrays = draw("float32", seed)
        got = call(arrays, method="tiled", **options)
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
