"""Groups on a GPU: blocks without a common group are left out where the host knows the groups; also
on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype

import infonce
from infonce import reference, spec

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu.schedule import decisions
    from infonce.kernels.gpu.tiled.run import PassRun

NEAR = {"float64": 1e-11, "bfloat16": 2e-2}  # of the gradients' norms


def near(got: Any, want: Any, dtype: str) -> None:
    error = np.linalg.norm(np.asarray(cupy.asnumpy(got), np.float64) - want)
    assert error <= NEAR[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize(
    "call",
    ["clip bfloat16", "info_nce float64", "lit bfloat16", "nt_xent bfloat16", "siglip bfloat16",
     "gte float64"],
)  # fmt: skip
def test_groups_in_host_memory_leave_out_blocks(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The reference's results, in fewer blocks. No query of info_nce has the group of the last
    keys."""
    name, dtype = call.split()
    side = 64 if name in ("nt_xent", "gte") else 128
    monkeypatch.setattr(decisions, "MAX_GROUP_BLOCK_SIDE", side)
    decisions.tiled_schedule.cache_clear()
    blocks, begin = [], PassRun.__init__

    def count(self: PassRun, *arguments: Any) -> None:
        begin(self, *arguments)
        blocks.append((len(self.grid), len(self.scheduled.grid)))

    monkeypatch.setattr(PassRun, "__init__", count)
    rng = np.random.default_rng(1)
    m = 192 if name == "gte" else 384
    n = m + 200 * (name == "info_nce")
    z = [rng.standard_normal((rows, 40)).astype(find_dtype(dtype)) for rows in (m, n)]
    z = z[: len(spec.LOSSES[name].arguments)]
    groups: Any = np.sort(rng.integers(0, 3, m))
    if name == "nt_xent":  # both views of a sample have its group
        groups = np.tile(groups[::2], 2)
    if n > m:
        groups = groups, np.append(groups, np.full(n - m, 3))
    options: dict[str, Any] = {"scale": 6.0, "normalize": True, "groups": groups}
    want = getattr(reference, name)(*z, **options)
    got = getattr(infonce, f"{name}_loss_and_grad")(
        *map(cupy.asarray, z), method="tiled",
        grad_dtype=None if dtype == "float64" else np.float32, **options,
    )  # fmt: skip
    decisions.tiled_schedule.cache_clear()
    assert all(visited < 0.85 * total for visited, total in blocks), blocks
    near(got.loss, want.loss, dtype)
    for field, gradient in want.grads.items():
        if (have := getattr(got.grads, field)) is not None:
            near(have, gradient, dtype)
