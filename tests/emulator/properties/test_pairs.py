"""Own negatives on emulated devices, by every method, beside the float64 reference."""

from typing import Any

import cupy
import engine
import numpy as np
import pytest
from gpu_problems import dtype_of

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
HOPPER, PORTABLE = 0, 2  # devices of the stand-in
NEAR = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2}  # of the gradients' norms


@pytest.mark.parametrize("device", [HOPPER, PORTABLE])
@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
@pytest.mark.parametrize("dtype", NEAR)
def test_own_negatives(dtype: str, method: str, device: int) -> None:
    rng = np.random.default_rng(0)
    query, key, own = (
        rng.standard_normal((*n, 24)).astype(dtype_of(dtype)) for n in ((40,), (70,), (40, 3))
    )
    mask, labels = rng.random((40, 3)) < 0.8, rng.integers(0, 70, 40)
    for more in ({}, {"in_batch": False}, {"false_negative_margin": 0.1, "hardness": 1.0}):
        options: dict[str, Any] = {"scale": 6.0, "normalize": True, **more}
        want = reference.info_nce(query, key, labels=labels, own=own, own_mask=mask, **options)
        with cupy.cuda.Device(device):
            arrays = [cupy.asarray(z) for z in (query, key, labels)]
            got = infonce.info_nce_loss_and_grad(
                *arrays, own=cupy.asarray(own), own_mask=cupy.asarray(mask), method=method,
                grad_dtype=None if dtype == "float64" else np.float32, **options,
            )  # fmt: skip
            again = infonce.info_nce_loss_and_grad(
                *arrays, own=cupy.asarray(own), own_mask=cupy.asarray(mask), method=method,
                wrt=["own", "scale"], **options,
            )  # fmt: skip
        near(got.loss, want.loss, dtype)
        near(again.grads.scale, want.grads["scale"], dtype)
        for name in ("query", "key", "own", "scale"):
            near(getattr(got.grads, name), want.grads[name], dtype)


def near(got: Any, want: Any, dtype: str) -> None:
    error = np.linalg.norm(np.asarray(cupy.asnumpy(got), np.float64) - want)
    assert error <= NEAR[dtype] * np.linalg.norm(want)
