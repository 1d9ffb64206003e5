"""Own negatives on emulated devices: their range in float32, and their place in metrics."""

from typing import Any

import cupy
import engine
import numpy as np
import pytest

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
NEAR = {"float64": 1e-11, "float32": 2e-5}  # of the gradients' norms


def draw(method: str) -> tuple[Any, ...]:
    """Queries, keys and own negatives on the host, the generator, where they go, and keywords."""
    rng = np.random.default_rng(0)
    z = [rng.standard_normal((*n, 24)) for n in ((40,), (70,), (40, 3))]
    if method == "offload":
        return *z, rng, np.asarray, {"scale": 6.0, "offload": True, "workspace": 2**15}
    return *z, rng, cupy.asarray, {"scale": 6.0, "method": method}


@pytest.mark.parametrize("method", ["naive", "tiled", "offload"])
def test_float64_own_keys_keep_their_range_in_float32(method: str) -> None:
    """Own keys are normalised before float32, in which their features would be infinite."""
    query, key, own, _, place, options = draw(method)
    want = reference.info_nce(query, key, own=own, scale=6.0, normalize=True)
    got = infonce.info_nce_loss_and_grad(
        *map(place, (query, key)), own=place(own * 1e110), precision="fp32", normalize=True,
        **options,
    )  # fmt: skip
    near(got.loss, want.loss, "float32")
    near(got.grads.query, want.grads["query"], "float32")
    near(cupy.asnumpy(got.grads.own) * 1e110, want.grads["own"], "float32")


@pytest.mark.parametrize("method", ["naive", "tiled", "offload"])
def test_own_negatives_compete_with_the_positive(method: str) -> None:
    """In metrics, those that the mask counts."""
    query, key, own, rng, place, options = draw(method)
    mask, labels = rng.random((40, 3)) < 0.8, rng.integers(0, 70, 40)
    metrics = infonce.info_nce_loss_and_grad(
        *map(place, (query, key, labels)), own=place(own), own_mask=place(mask), metrics=True,
        **options,
    ).metrics  # fmt: skip
    x = 6.0 * np.hstack([query @ key.T, np.einsum("id,ikd->ik", query, own)])
    rows = np.arange(len(x))
    positive = x[rows, labels]
    x[rows, labels], x[:, 70:][~mask] = -np.inf, -np.inf
    ranks = (x > positive[:, None]).sum(axis=1)
    np.testing.assert_array_equal(cupy.asnumpy(metrics.row_rank), ranks)
    near(metrics.hardest_negative, x.max(axis=1), "float64")


def near(got: Any, want: Any, dtype: str) -> None:
    error = np.linalg.norm(np.asarray(cupy.asnumpy(got), np.float64) - want)
    assert error <= NEAR[dtype] * np.linalg.norm(want)
