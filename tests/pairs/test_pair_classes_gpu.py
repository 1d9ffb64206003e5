"""`positive_ids` of a softmax on a GPU: which passes compute them; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import BFLOAT16, MISSING

import infonce

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import select
    from infonce.kernels.gpu.tiled import buffers


def call(names: tuple[str, ...] = (), **options: Any) -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2, 140, 20)).astype(BFLOAT16)
    arrays = {name: cupy.asarray(rng.integers(0, 40, 140)) for name in ("positive_ids", *names)}
    if "weights" in names:
        arrays["weights"] = cupy.asarray(rng.uniform(0.5, 2.0, 140))
    infonce.clip_loss_and_grad(*map(cupy.asarray, features), scale=3.0, **arrays, **options)


def test_one_plan_unless_ids_or_groups_need_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    stepwise = []
    begin = select.GPU
    monkeypatch.setattr(select, "GPU", lambda *args: stepwise.append(1) or begin(*args))
    call()
    call(("weights",), decoupled=True)
    call(label_smoothing=0.2, workspace=2**18)
    assert not stepwise
    call(("ids", "groups"), workspace=2**18)
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
    call()
    assert set(seen) == {None}
    call(("ids",))
    assert seen[-1] is not None
