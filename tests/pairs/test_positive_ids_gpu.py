"""Several positives of a row in SigLIP on a GPU; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING
from judge import assert_grad, assert_loss

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy


@pytest.mark.parametrize("method", ["auto", "fused", "naive"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_against_reference(method: str, dtype: str) -> None:
    """In several blocks, with ids, groups and weights."""
    rng = np.random.default_rng(0)
    image, text = rng.standard_normal((40, 5)), rng.standard_normal((75, 5))
    given: dict[str, Any] = {
        "positive_ids": (np.arange(40) // 2, rng.integers(0, 24, 75)),
        "ids": (np.arange(40) // 4, rng.integers(0, 10, 75)),
        "groups": (np.arange(40) // 9, np.sort(rng.integers(0, 5, 75))),
    }
    weights = rng.uniform(0.5, 2.0, 40)
    options: dict[str, Any] = {"scale": 3.0, "normalize": True}
    want = reference.siglip(
        image, text, bias=-2.0, weights=weights / weights.sum(), **options, **given
    )
    placed = {name: tuple(map(cupy.asarray, pair)) for name, pair in given.items()}
    got = infonce.siglip_loss_and_grad(
        *(cupy.asarray(z.astype(dtype)) for z in (image, text)), -2.0, method=method,
        weights=cupy.asarray(weights), workspace=2**16 if method == "auto" else None,
        **options, **placed,
    )  # fmt: skip
    assert_loss(got.loss.get(), want.loss, dtype, 5.0)
    for field, gradient in want.grads.items():
        terms = np.abs(want.losses).max() if np.ndim(gradient) == 0 else 0.0
        assert_grad(getattr(got.grads, field).get(), gradient, dtype, 5.0, terms=terms)
