"""Own negatives, and blocks that groups leave out, on emulated devices beside the float64
reference."""

from typing import Any

import cupy
import engine
import numpy as np
import pytest
from gpu_problems import find_dtype
from infonce.kernels import between_passes
from infonce.kernels.gpu.schedule import decisions
from infonce.kernels.gpu.tiled.run import PassRun

import infonce
from infonce import reference, spec

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
HOPPER, PORTABLE = 0, 2  # devices of the stand-in
NEAR = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2}  # of the gradients' norms


@pytest.mark.parametrize("device", [HOPPER, PORTABLE])
@pytest.mark.parametrize("method", ["naive", "fused", "tiled", "offload"])
@pytest.mark.parametrize("dtype", NEAR)
def test_own_negatives(dtype: str, method: str, device: int) -> None:
    rng = np.random.default_rng(0)
    query, key, own = (
        rng.standard_normal((*n, 24)).astype(find_dtype(dtype)) for n in ((40,), (70,), (40, 3))
    )
    mask, labels = rng.random((40, 3)) < 0.8, rng.integers(0, 70, 40)
    guide = np.where(rng.random((2, 70, 8)) < 0.5, -1.0, 1.0).astype(find_dtype(dtype))
    guided = {"guide": (guide[0, :40], guide[1]), "guide_margin": 0.1, "margin": 0.2}
    for more in (
        {}, {"in_batch": False}, {"false_negative_margin": 0.1, "hardness": 1.0}, guided,
    ):  # fmt: skip
        options: dict[str, Any] = {"scale": 6.0, "normalize": True, **more}
        want = reference.info_nce(query, key, labels=labels, own=own, own_mask=mask, **options)
        with cupy.cuda.Device(device):
            place, how = cupy.asarray, {"method": method}
            if method == "offload":
                place, how = np.asarray, {"offload": True, "workspace": 2**15}
            arrays = [place(z) for z in (query, key, labels)]
            options |= {"own": place(own), "own_mask": place(mask), **how}
            if "guide" in more:
                options["guide"] = tuple(place(z) for z in more["guide"])
            got = infonce.info_nce_loss_and_grad(
                *arrays, grad_dtype=None if dtype == "float64" else np.float32, **options
            )
            again = infonce.info_nce_loss_and_grad(*arrays, wrt=["own", "scale"], **options)
            if dtype == "float64" and method != "fused" and not more:
                metrics = infonce.info_nce_loss_and_grad(*arrays, metrics=True, **options).metrics
                check_metrics(metrics, (query, key, own, mask), labels)
        near(got.loss, want.loss, dtype)
        near(again.grads.scale, want.grads["scale"], dtype)
        for name in ("query", "key", "own", "scale"):
            near(getattr(got.grads, name), want.grads[name], dtype)


@pytest.mark.parametrize("device", [HOPPER, PORTABLE])
@pytest.mark.parametrize("method", ["naive", "fused", "tiled", "offload"])
@pytest.mark.parametrize("dtype", NEAR)
def test_own_negatives_in_a_table(
    monkeypatch: pytest.MonkeyPatch, dtype: str, method: str, device: int
) -> None:
    """One row of the table has the uses of a whole piece. One has none, and holds NaN. With
    offload, rows arrive in several parts."""
    monkeypatch.setattr(between_passes, "OWN_BYTES", 100_000)
    rng = np.random.default_rng(0)
    query, key, table = (
        rng.standard_normal((n, 24)).astype(find_dtype(dtype)) for n in (40, 70, 13)
    )
    table[12] = np.nan
    labels, indices = rng.integers(0, 70, 40), rng.integers(-2, 12, (40, 17))
    indices[:, :16] = np.where(rng.random((40, 16)) < 0.9, 5, indices[:, :16])
    mask, bias = rng.random((40, 17)) < 0.8, rng.standard_normal((40, 17))
    for more in (
        {}, {"in_batch": False, "scale": 1.0, "normalize": False},
        {"false_negative_margin": 0.1, "hardness": 1.0, "own_bias": bias},
        {"own_mask": mask, "own_bias": bias, "scale": 1.0, "normalize": False},
    ):  # fmt: skip
        options: dict[str, Any] = {"scale": 6.0, "normalize": True, "own_indices": indices, **more}
        want = reference.info_nce(query, key, labels=labels, own=table, **options)
        with cupy.cuda.Device(device):
            place, how = cupy.asarray, {"method": method}
            if method == "offload":
                place, how = np.asarray, {"offload": True, "workspace": 2**15}
            arrays = [place(z) for z in (query, key, labels)]
            options |= {"own": place(table), **how}
            for name in options.keys() & {"own_indices", "own_mask", "own_bias"}:
                options[name] = place(options[name])
            got = infonce.info_nce_loss_and_grad(
                *arrays, grad_dtype=None if dtype == "float64" else np.float32, **options
            )
            again = infonce.info_nce_loss_and_grad(*arrays, wrt=["own", "scale"], **options)
        near(got.loss, want.loss, dtype)
        near(again.grads.scale, want.grads["scale"], dtype)
        for name in ("query", "key", "own", "scale"):
            near(getattr(got.grads, name), want.grads[name], dtype)


@pytest.mark.parametrize("device", [HOPPER, PORTABLE])
@pytest.mark.parametrize("method", ["naive", "tiled", "offload"])
def test_float64_own_keys_keep_their_range_in_float32(method: str, device: int) -> None:
    """Own keys are normalised before float32, in which their features would be infinite."""
    rng = np.random.default_rng(0)
    query, key, own = (rng.standard_normal((*n, 24)) for n in ((40,), (70,), (40, 3)))
    options: dict[str, Any] = {"scale": 6.0, "normalize": True}
    want = reference.info_nce(query, key, own=own, **options)
    place, how = cupy.asarray, {"method": method}
    if method == "offload":
        place, how = np.asarray, {"offload": True, "workspace": 2**15}
    with cupy.cuda.Device(device):
        arrays, options["own"] = [place(z) for z in (query, key)], place(own * 1e110)
        got = infonce.info_nce_loss_and_grad(*arrays, precision="fp32", **options, **how)
    near(got.loss, want.loss, "float32")
    near(got.grads.query, want.grads["query"], "float32")
    near(cupy.asnumpy(got.grads.own) * 1e110, want.grads["own"], "float32")


def check_metrics(metrics: infonce.Metrics, args: Any, labels: np.ndarray) -> None:
    """Own negatives that the mask counts compete with the positive."""
    query, key, own, mask = args
    query, key, own = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (query, key, own))
    x = 6.0 * np.hstack([query @ key.T, np.einsum("id,ikd->ik", query, own)])
    rows = np.arange(len(x))
    positive = x[rows, labels]
    x[rows, labels], x[:, 70:][~mask] = -np.inf, -np.inf
    ranks = (x > positive[:, None]).sum(axis=1)
    np.testing.assert_array_equal(cupy.asnumpy(metrics.row_rank), ranks)
    near(metrics.hardest_negative, x.max(axis=1), "float64")


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
