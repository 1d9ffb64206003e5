"""`ids` of several columns on a GPU; also on CuPy's stand-in."""

import numpy as np
import pytest
from gpu_problems import MISSING
from judge import assert_same_bits, pairs

import infonce

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import config


@pytest.mark.parametrize("portable", [False, True])
def test_one_column_is_a_vector(portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, by the same kernels."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    z = [cupy.asarray(side) for side in pairs("random", 150, 150, 20, np.float32, 0)]
    ids = cupy.asarray(np.random.default_rng(0).integers(0, 60, (150, 1)))
    for method in ("naive", "fused", "tiled"):
        plain, column = (
            infonce.clip_loss_and_grad(*z, scale=20.0, ids=each, method=method)
            for each in (ids[:, 0], ids)
        )
        assert_same_bits(column, plain)
