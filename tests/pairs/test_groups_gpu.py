"""Groups on a GPU: blocks without a common group are left out where the host knows the groups."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype

import infonce

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy
    from infonce.kernels.gpu.schedule import decisions


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["info_nce", "clip", "lit", "nt_xent", "siglip", "gte"])
def test_groups_in_host_memory_leave_out_blocks(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of the same pairs as with groups on the device, in another order: within the bound that
    each has to the reference."""
    monkeypatch.setattr(decisions, "MAX_GROUP_BLOCK_SIDE", 2048)
    decisions.tiled_schedule.cache_clear()
    rng = np.random.default_rng(3)
    rows, width = 9000, 40
    z = rng.standard_normal((2, rows, width))
    z = (z / np.linalg.norm(z, axis=2, keepdims=True)).astype(find_dtype(dtype))
    features = [cupy.asarray(side) for side in (z[:1] if name == "nt_xent" else z)]
    groups = np.arange(rows) * 5 // rows
    groups = np.tile(groups[::2], 2) if name == "nt_xent" else groups
    call = getattr(infonce, f"{name}_loss_and_grad")
    options: dict[str, Any] = {
        "scale": 10.0,
        "grad_dtype": np.float64 if dtype == "float64" else np.float32,
    }
    got, want = (call(*features, groups=g, **options) for g in (groups, cupy.asarray(groups)))
    tolerance = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 1e-2}[dtype]
    for field, gradient in zip(want.grads._fields, want.grads, strict=True):
        if gradient is not None:
            have = getattr(got.grads, field)
            assert cupy.linalg.norm(have - gradient) <= tolerance * cupy.linalg.norm(gradient)
    assert abs(float(got.loss) - float(want.loss)) <= tolerance
