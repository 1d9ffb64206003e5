"""`positive_ids` of a softmax on a GPU; also on CuPy's stand-in."""

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
    from infonce.kernels.gpu import config, select
    from infonce.kernels.gpu.tiled import buffers

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16,
          "bfloat16": ml_dtypes.bfloat16}  # fmt: skip
LOSSES = ("clip", "lit", "info_nce")
SCALE = 3.0


def compare(
    loss: str, dtype: str, rows: int, columns: int, width: int, names: Any = (), **options: Any
) -> None:
    """Loss and gradients by a method, with the arrays `names`."""
    place = np.asarray if options.get("offload") else cupy.asarray
    rng = np.random.default_rng(rows)
    columns = rows if loss == "clip" else columns
    query, key = (rng.standard_normal((n, width)).astype(DTYPES[dtype]) for n in (rows, columns))
    few = max(2, rows // 3)
    pairs: dict[str, Any] = {
        "positive_ids": (rng.integers(0, few, rows), rng.integers(2, few + 2, columns)),
        "ids": (np.arange(rows) // 4, rng.integers(0, rows // 4 + 1, columns)),
        "groups": (np.arange(rows) // 9, np.sort(rng.integers(0, 5, columns))),
        "own": rng.standard_normal((rows, 2, width)).astype(DTYPES[dtype]),
        "key_bias": rng.standard_normal(columns), "weights": rng.uniform(0.5, 2.0, rows),
    }  # fmt: skip
    given = {name: pairs[name] for name in ("positive_ids", *names)}
    of_rows, of_columns = given["positive_ids"]
    if loss == "clip":
        given["positive_ids"] = of_columns = of_rows
    numbers = {k: v for k, v in options.items() if k in ("decoupled", "label_smoothing")}
    weights = given.get("weights", 1.0) * np.isin(of_rows, of_columns)
    assert weights.any()
    both: dict[str, Any] = {"scale": SCALE, "normalize": True}
    want = getattr(reference, loss)(
        query, key, **both, **given | numbers | {"weights": weights / weights.sum()}
    )
    placed = {
        name: tuple(map(place, v)) if isinstance(v, tuple) else place(v)
        for name, v in given.items()
    }
    function = getattr(infonce, f"{loss}_loss_and_grad")
    got = function(place(query), place(key), **both, **placed, **options)
    logit = SCALE + abs(given.get("key_bias", np.zeros(1))).max()
    assert_loss(float(got.loss), want.loss, dtype, logit)
    for name, gradient in want.grads.items():
        if (have := getattr(got.grads, name)) is not None:
            terms = np.abs(want.losses).max() if np.ndim(gradient) == 0 else 0.0
            assert_grad(cupy.asnumpy(have), gradient, dtype, logit, terms=terms)


@pytest.mark.parametrize("method", ["auto", "fused", "naive"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_against_reference(loss: str, dtype: str, method: str) -> None:
    compare(loss, dtype, 40, 75, 5, ("weights",), method=method)
    compare(loss, dtype, 40, 75, 5, ("key_bias",), method=method)
    compare(loss, dtype, 40, 75, 5, ("ids", "groups", "key_bias"), method=method)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES])
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
