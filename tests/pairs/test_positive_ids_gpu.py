"""Several positives of a row in SigLIP on a GPU; also on CuPy's stand-in."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_problems import MISSING

import infonce

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu.device.launcher import Launcher
    from infonce.kernels.gpu.device.launches import Queue
    from infonce.kernels.gpu.tiled import buffers


@pytest.mark.parametrize("columns", [1, 128, 1025, 9000])
@pytest.mark.parametrize("rows", [1, 129, 300])
def test_tiles_with_positives(rows: int, columns: int) -> None:
    """Ids that are few, that differ in their highest bits alone, and the smallest of all."""
    rng = np.random.default_rng(rows + columns)
    ids = rng.integers(0, 2**12, rows + columns) << rng.choice([0, 51], rows + columns)
    ids[::50] = np.iinfo(np.int64).min
    query, key = ids[:rows], ids[rows:]
    pairs = np.zeros((-(-rows // 128) * 128, -(-columns // 128) * 128), bool)
    pairs[:rows, :columns] = query[:, None] == key
    want = pairs.reshape(len(pairs) // 128, 128, -1, 128).any(axis=(1, 3))
    problem = SimpleNamespace(
        shape=(rows, columns, 8), query_positive_ids=cupy.asarray(query),
        key_positive_ids=cupy.asarray(key),
    )  # fmt: skip
    launcher = Launcher(cupy.cuda.Device(), "fp32", Queue())
    tiles = cupy.asnumpy(buffers.find_positive_tiles(launcher, problem))
    got = np.unpackbits(tiles, axis=1, bitorder="little")
    np.testing.assert_array_equal(got[: len(want), : want.shape[1]], want)
    assert got.sum() == want.sum()  # no other bit


@pytest.mark.parametrize("width", [20, 600])
def test_sweeps_compare_ids_in_marked_tiles_only(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 300, width)).astype(ml_dtypes.bfloat16)
    image, text = map(cupy.asarray, values)
    ids = np.arange(300)

    def losses(a: Any, b: Any) -> Any:
        placed = cupy.asarray(a), cupy.asarray(b)
        options: dict[str, Any] = {"positive_ids": placed, "scale": 0.1, "reduction": "none"}
        return infonce.siglip_loss(image, text, -2.0, method="tiled", **options).get()

    none = losses(ids, ids + 300)
    assert (losses(ids, ids) != none).all()
    monkeypatch.setattr(buffers, "find_positive_tiles", lambda *_: cupy.zeros((4, 1), np.uint8))
    np.testing.assert_array_equal(losses(ids, ids), none)
