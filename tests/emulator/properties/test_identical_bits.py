"""The same bits in every schedule: public calls that reach all kernels, several times each."""

import os
from typing import Any

import cupy
import engine
import numpy as np
import pytest
from gpu_problems import find_dtype
from infonce.kernels.gpu import config

import infonce

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
# Of missing synchronisations, mutants.py noticed each in its first 4 schedules, or in none of 32
SCHEDULES = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 4
DTYPES = {"fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}  # float32 for others
DEVICES = {"Hopper": 0, "portable": 2}  # of the stand-in
SETS = (np.arange(140)[:, None] * 3 + [0, 7, 31]) % 150  # of one to three keys
SETS[SETS >= 140] = -1
PICKED = np.random.default_rng(1).integers(-1, 140, 140)
CLASSES = np.random.default_rng(2).integers(-1, 30, 140)
WEIGHTS = np.random.default_rng(3).uniform(0.5, 1.0, 140)
BIAS = np.random.default_rng(4).standard_normal(140)
IDS = np.arange(140) // 2
LITTLE = 60_000  # bytes of a workspace: several blocks

# Device, method, loss, precision, queries, keys, width of rows, options. Tiles have 64 or 128 rows
# and columns, query tiles of wide rows 256 rows
CALLS: list[tuple[str, str, str, str, int, int, int, dict[str, Any]]] = [
    ("Hopper", "naive", "clip", "fp64", 36, 36, 20, {}),
    ("Hopper", "naive", "nt_xent", "fp32", 36, 0, 20, {"ids": IDS[:36], "normalize": True}),
    ("Hopper", "naive", "siglip", "fp32", 36, 36, 20, {"bias": -2.0}),
    ("Hopper", "naive", "info_nce", "bf16", 20, 36, 20, {"metrics": True}),
    ("Hopper", "fused", "clip", "fp32", 140, 140, 40, {}),
    ("Hopper", "fused", "nt_xent", "fp64", 140, 0, 40, {"ids": IDS}),
    ("Hopper", "fused", "siglip", "bf16", 70, 70, 130, {"bias": -2.0}),
    ("Hopper", "fused", "lit", "fp32", 70, 70, 300, {"normalize": True}),
    ("portable", "fused", "info_nce", "fp16", 70, 140, 40, {"normalize": True}),
    # tiled/lse.cu, gradient.cu, sigmoid.cu, ranks.cu
    ("portable", "tiled", "clip", "fp64", 140, 140, 40, {}),
    ("portable", "tiled", "clip", "fp32", 140, 140, 40, {"normalize": True, "ids": IDS}),
    ("portable", "tiled", "clip", "tf32", 140, 140, 40, {}),
    ("portable", "tiled", "clip", "bf16x3", 140, 140, 40, {}),
    ("portable", "tiled", "clip", "bf16", 140, 140, 40, {"workspace": LITTLE}),
    ("portable", "tiled", "clip", "fp16", 140, 140, 300, {}),
    ("portable", "tiled", "clip", "bf16", 140, 140, 40, {"metrics": True}),
    ("portable", "tiled", "nt_xent", "bf16", 280, 0, 40, {}),
    ("portable", "tiled", "nt_xent", "fp64", 140, 0, 40, {"metrics": True}),
    ("portable", "tiled", "siglip", "fp32", 140, 140, 40, {"bias": -2.0}),
    ("portable", "tiled", "siglip", "fp16", 140, 140, 40, {"bias": -2.0, "ids": IDS}),
    ("portable", "tiled", "info_nce", "bf16", 140, 140, 40, {"labels": SETS}),
    ("portable", "tiled", "info_nce", "fp32", 140, 260, 40, {"labels": PICKED}),
    ("portable", "tiled", "lit", "bf16", 140, 140, 40, {"key_bias": BIAS, "wrt": ["text"]}),
    ("portable", "tiled", "clip", "fp32", 140, 140, 40, {"false_negative_margin": 0.1}),
    ("portable", "tiled", "gte", "fp32", 70, 70, 40, {"hardness": 2.0}),
    ("portable", "tiled", "sup_con", "fp64", 140, 0, 40, {"labels": CLASSES}),
    # sm90/sweep_lse.cu and sweep_gradient.cu: resident rows, streamed ones, wide ones
    ("Hopper", "tiled", "clip", "bf16", 140, 140, 72, {}),
    ("Hopper", "tiled", "clip", "fp16", 140, 140, 72, {"normalize": True, "ids": IDS}),
    ("Hopper", "tiled", "clip", "tf32", 300, 300, 72, {"wrt": ["image", "text"]}),
    ("Hopper", "tiled", "clip", "fp32", 140, 140, 72, {"wrt": ["image", "text"]}),
    ("Hopper", "tiled", "clip", "bf16x3", 140, 140, 72, {"margin": 0.1, "hardness": 1.0}),
    ("Hopper", "tiled", "clip", "bf16", 140, 140, 72, {"metrics": True, "workspace": LITTLE}),
    ("Hopper", "tiled", "nt_xent", "fp32", 280, 0, 72, {}),
    ("Hopper", "tiled", "info_nce", "fp16", 140, 140, 72, {"labels": SETS}),
    ("Hopper", "tiled", "clip", "bf16", 140, 140, 72, {"false_negative_margin": 0.1}),
    ("Hopper", "tiled", "info_nce", "fp32", 140, 140, 72, {"key_bias": BIAS}),
    ("Hopper", "tiled", "nt_xent", "bf16", 140, 0, 1152, {}),
    ("Hopper", "tiled", "info_nce", "fp16", 70, 300, 1152, {"weights": WEIGHTS[:70]}),
    # cached_gradient.cu
    ("Hopper", "tiled", "clip", "bf16", 130, 130, 600, {}),
    ("Hopper", "tiled", "clip", "fp32", 130, 130, 400, {}),
    # sweep_narrow.cu, sweep_online.cu, sweep_sigmoid.cu
    ("Hopper", "tiled", "nt_xent", "bf16", 200, 0, 64, {}),
    ("Hopper", "tiled", "nt_xent", "fp16", 140, 0, 100, {"normalize": True, "ids": IDS}),
    ("Hopper", "tiled", "lit", "bf16", 140, 140, 72, {}),
    ("Hopper", "tiled", "info_nce", "bf16", 140, 300, 72, {"normalize": True}),
    ("Hopper", "tiled", "siglip", "bf16", 140, 140, 72, {"bias": -2.0}),
    ("Hopper", "tiled", "siglip", "fp32", 140, 140, 72, {"bias": -2.0, "ids": IDS}),
    # labels.cu, linear.cu, blocks between host and device
    ("Hopper", "tiled", "sup_con", "bf16", 140, 0, 72, {"labels": CLASSES, "decoupled": True}),
    ("Hopper", "tiled", "gte", "bf16", 70, 70, 72, {"label_smoothing": 0.1}),
    ("Hopper", "offload", "clip", "bf16", 140, 140, 72, {"workspace": 3 * LITTLE}),
    ("portable", "offload", "nt_xent", "fp32", 140, 0, 40, {"workspace": 2 * LITTLE}),
]  # fmt: skip
assert len(CALLS) == 50


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.workspace, "MIN_CACHED_COLUMNS", 128)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(map(str, call[:7])))
def test_bits(call: tuple[str, str, str, str, int, int, int, dict[str, Any]]) -> None:
    device, method, loss, precision, m, n, d, options = call
    rng = np.random.default_rng(m + n + d)
    dtype = find_dtype(DTYPES.get(precision, "float32"))
    z = [rng.standard_normal((rows, d)) / np.sqrt(d) for rows in (m, n) if rows]
    place = np.asarray if method == "offload" else cupy.asarray
    how: dict[str, Any] = {"offload": True} if method == "offload" else {"method": method}
    options = {k: place(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    first: list[Any] = []
    for seed in range(SCHEDULES):
        with engine.schedule(seed), cupy.cuda.Device(DEVICES[device]):
            features = [place(side.astype(dtype)) for side in z]
            out = getattr(infonce, f"{loss}_loss_and_grad")(
                *features, scale=14.0, precision=precision, **options, **how
            )
            results = arrays(out)
        first = first or results
        for one, other in zip(first, results, strict=True):
            assert one.tobytes() == other.tobytes(), f"schedule {seed} has other bits"


def arrays(out: Any) -> list[Any]:
    """Everything that a call returns."""
    lse = out.lse if isinstance(out.lse, tuple) else (out.lse,)
    metric_values = () if out.metrics is None else vars(out.metrics).values()
    values = (out.loss, *out.grads, *lse, *metric_values)
    return [cupy.asnumpy(z) for z in values if z is not None]
