"""Several positives of a row in SigLIP on a GPU; also on CuPy's stand-in."""

from typing import Any

import ml_dtypes
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
    from infonce.kernels.gpu import config
    from infonce.kernels.gpu.tiled import sigmoid

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip
SCALE, BIAS = 3.0, -2.0


def compare(dtype: str, rows: int, columns: int, width: int, names: Any, **options: Any) -> None:
    """Loss and gradients by a method, with ids, groups and weights by `names`."""
    place = np.asarray if options.get("offload") else cupy.asarray
    rng = np.random.default_rng(rows)
    image, text = (
        z.astype(DTYPES[dtype])
        for z in (rng.standard_normal((rows, width)), rng.standard_normal((columns, width)))
    )
    pairs = {
        "positive_ids": (np.arange(rows) // 2, rng.integers(0, rows // 2 + 3, columns)),
        "ids": (np.arange(rows) // 4, rng.integers(0, rows // 4, columns)),
        "groups": (np.arange(rows) // 9, np.sort(rng.integers(0, 5, columns))),
    }
    given = {name: pairs[name] for name in ("positive_ids", *names) if name in pairs}
    weights = rng.uniform(0.5, 2.0, rows) if "weights" in names else np.ones(rows)
    both: dict[str, Any] = {"scale": SCALE, "normalize": True}
    want = reference.siglip(
        image, text, bias=BIAS, weights=weights / weights.sum(), **both, **given
    )
    if "weights" in names:
        options["weights"] = place(weights)
    placed = {name: tuple(map(place, pair)) for name, pair in given.items()}
    got = infonce.siglip_loss_and_grad(place(image), place(text), BIAS, **both, **placed, **options)
    logit = SCALE - BIAS
    assert_loss(float(got.loss), want.loss, dtype, logit)
    for field, gradient in want.grads.items():
        if (have := getattr(got.grads, field)) is not None:
            terms = np.abs(want.losses).max() if np.ndim(gradient) == 0 else 0.0
            assert_grad(cupy.asnumpy(have), gradient, dtype, logit, terms=terms)


@pytest.mark.parametrize("method", ["auto", "fused", "naive"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_against_reference(method: str, dtype: str) -> None:
    compare(dtype, 40, 75, 5, ("ids", "groups", "weights"), method=method)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES])
def test_kernels(dtype: str, portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, some not whole; little workspace; gradients of the scale and bias alone."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    seen = []
    begin = sigmoid.SigmoidRun.__init__
    monkeypatch.setattr(
        sigmoid.SigmoidRun, "__init__", lambda run, *given: seen.append(1) or begin(run, *given)
    )
    compare(dtype, 140, 270, 20, ())
    compare(dtype, 140, 270, 20, ("ids", "groups"), workspace=2**17)
    compare(dtype, 70, 40, 9, ("ids",), wrt=("scale", "bias"))
    assert len(seen) >= 3


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_offload(dtype: str) -> None:
    compare(dtype, 140, 270, 20, ("ids", "weights"), offload=True)
    compare(dtype, 90, 50, 20, ("groups",), offload=True, workspace=2**17)
