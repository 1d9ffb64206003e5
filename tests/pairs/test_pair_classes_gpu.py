"""`positive_ids` of a softmax on a GPU; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, check_positive_ids

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    from infonce.kernels.gpu import config, select
    from infonce.kernels.gpu.tiled import buffers

DTYPES = ("float64", "float32", "float16", "bfloat16")
LOSSES = ("clip", "lit", "info_nce")


def compare(
    loss: str, dtype: str, rows: int, columns: int, width: int, names: Any = (), **options: Any
) -> None:
    """`check_positive_ids` with ids of few values, some on one side only."""
    rng, few = np.random.default_rng(rows), max(2, rows // 3)
    of_rows, of_columns = rng.integers(0, few, rows), rng.integers(2, few + 2, columns)
    pair = (of_rows, of_rows if loss == "clip" else of_columns)
    check_positive_ids(loss, dtype, pair, width, names, **options)


@pytest.mark.parametrize("method", ["auto", "fused", "naive"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_against_reference(loss: str, dtype: str, method: str) -> None:
    compare(loss, dtype, 40, 75, 5, ("weights",), method=method)
    compare(loss, dtype, 40, 75, 5, ("key_bias",), method=method)
    compare(loss, dtype, 40, 75, 5, ("ids", "groups", "key_bias"), method=method)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_kernels_of_pair_classes(
    loss: str, dtype: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles, some not whole; in one plan, unless ids, groups or biases need arrays."""
    monkeypatch.setattr(config.precision, "PORTABLE", portable)
    stepwise = []
    begin = select.GPU
    monkeypatch.setattr(select, "GPU", lambda *args: stepwise.append(1) or begin(*args))
    compare(loss, dtype, 140, 270, 20)
    compare(loss, dtype, 140, 270, 20, ("weights",), decoupled=True)
    compare(loss, dtype, 140, 270, 20, label_smoothing=0.2, workspace=2**18)
    assert not stepwise
    compare(loss, dtype, 140, 270, 20, ("ids", "groups"), workspace=2**18)
    assert stepwise


def test_passes_are_those_of_the_loss_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the passes compare no positive ids: the same -D options as without."""
    seen: list[Any] = []
    prepare = buffers.Buffers.prepare

    def record(call_buffers: Any, problem: Any) -> None:
        prepare(call_buffers, problem)
        seen.append(call_buffers.pair_vectors)

    monkeypatch.setattr(buffers.Buffers, "prepare", record)
    monkeypatch.setattr(select, "has_plan", lambda *_: False)
    compare("clip", "bfloat16", 140, 140, 20)
    assert set(seen) == {None}
    compare("clip", "bfloat16", 140, 140, 20, ("ids",))
    assert seen[-1] is not None


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_offload(loss: str, dtype: str) -> None:
    compare(loss, dtype, 140, 270, 20, ("ids", "weights"), offload=True)
    compare(loss, dtype, 90, 50, 20, ("key_bias",), offload=True, workspace=2**18)


def test_own_negatives() -> None:
    compare("info_nce", "float32", 60, 90, 12, ("own", "weights"))
    compare("info_nce", "float32", 60, 90, 12, ("own",), in_batch=True, method="naive")
