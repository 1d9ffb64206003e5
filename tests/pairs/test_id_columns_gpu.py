"""`ids` of several columns on a GPU; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype
from judge import arguments, assert_grad, assert_loss, judged, largest_logit, pairs

import infonce

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import config

SCALE = 20.0
LOSSES = ["info_nce", "nt_xent", "clip", "siglip", "gte"]


def compare(
    name: str, dtype: str, shape: tuple[int, int, int], columns: int, **options: Any
) -> None:
    """A call against the reference."""
    m, n, d = shape
    place = np.asarray if options.get("offload") else cupy.asarray
    features = arguments(name, *pairs("partly aligned", m, n, d, find_dtype(dtype), 0))
    rng = np.random.default_rng(m)
    ids: Any = rng.integers(-m, m, (len(features[0]), columns))
    if name == "info_nce":
        ids = ids, rng.integers(-m, m, (n, columns))
    placed = tuple(map(place, ids)) if isinstance(ids, tuple) else place(ids)
    bias = {"bias": -2.0} if name == "siglip" else {}
    want = judged(name, features, scale=SCALE, ids=ids, **bias)
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *map(place, features), scale=SCALE, ids=placed, **bias, **options
    )
    logit = largest_logit(SCALE, features[0], features[-1]) + abs(bias.get("bias", 0.0))
    assert_loss(float(got.loss), want.loss, dtype, logit)
    for field, gradient in want.grads.items():
        if (have := getattr(got.grads, field)) is not None and gradient is not None:
            terms = SCALE * np.abs(want.losses).max() / m**0.5
            assert_grad(cupy.asnumpy(have), gradient, dtype, logit, terms=terms)


@pytest.mark.parametrize("method", ["naive", "fused", "tiled"])
@pytest.mark.parametrize(("dtype", "columns"), [("float64", 4), ("float32", 2)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_method(name: str, dtype: str, method: str, columns: int) -> None:
    compare(name, dtype, (40, 40, 9), columns, method=method)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_tiles(name: str, dtype: str, portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, some not whole, with and without the norms of rows; little workspace."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    compare(name, dtype, (140, 140, 20), 3, method="tiled")
    compare(name, dtype, (140, 140, 20), 4, method="tiled", workspace=2**17)


@pytest.mark.parametrize("portable", [False, True])
def test_one_column_is_a_vector(portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, by the same kernels."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    z = [cupy.asarray(side) for side in pairs("random", 150, 150, 20, np.float32, 0)]
    ids = cupy.asarray(np.random.default_rng(0).integers(0, 60, (150, 1)))
    for method in ("naive", "fused", "tiled"):
        plain, column = (
            infonce.clip_loss_and_grad(*z, scale=SCALE, ids=each, method=method)
            for each in (ids[:, 0], ids)
        )
        numbers = zip((plain.loss, *plain.grads), (column.loss, *column.grads), strict=True)
        for one, other in numbers:
            assert cupy.asnumpy(one).tobytes() == cupy.asnumpy(other).tobytes()


@pytest.mark.parametrize("name", ["clip", "nt_xent"])
def test_offload(name: str) -> None:
    compare(name, "float32", (140, 140, 20), 2, offload=True, workspace=2**17)
