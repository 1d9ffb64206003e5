"""Options of the softmax on the CPU: pairs that both passes leave out, neutral values, bits, and
small losses."""

from typing import Any

import numpy as np
import pytest
from reference_problems import one_problem

import infonce
from infonce import spec

NAMES = ("info_nce", "nt_xent", "clip", "lit", "sup_con", "gte")
METHODS = ("naive", "fused", "tiled")


@pytest.mark.parametrize("by_guide", [False, True])
@pytest.mark.parametrize("grad_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "clip", "lit", "gte"])
def test_both_passes_leave_out_the_same_pairs(
    tile_sides: Any, name: str, grad_dtype: Any, by_guide: bool
) -> None:
    """Rows, or those of a guide, differ by rounding, so that digits beyond float32 decide which
    pairs take part. The slopes of a row add up to 0 if those in its sum are those in its
    gradient."""
    tile_sides(16, 24)
    rng = np.random.default_rng(2)
    near = rng.standard_normal(37) / 6 + 6e-8 * rng.standard_normal((2, 150, 37))
    sides = 1 if name == "nt_xent" else 2
    features, of_slopes = near.astype(np.float32), slice(None)
    options: dict[str, Any] = {"false_negative_margin": 0.0}
    if by_guide:
        guide, features = features, rng.standard_normal((2, 150, 8)).astype(np.float32)
        features[:, :, -1], of_slopes = 1.0, slice(-1, None)  # its gradient: the sum of the slopes
        options = {"guide": tuple(guide) if sides == 2 else guide[0]}
    for workspace in (None, 40_000):  # logits are kept, and computed once more
        got = getattr(infonce, f"{name}_loss_and_grad")(
            *features[:sides], scale=1.0, reduction="sum", grad_dtype=grad_dtype, method="tiled",
            workspace=workspace, **options,
        )  # fmt: skip
        lse = np.concatenate(got.lse) if name == "clip" else got.lse
        assert len(np.unique(lse.round(2))) > 20  # rows have different numbers of keys
        total = sum(z[:, of_slopes].sum(axis=0) for z in got.grads[:-1] if z is not None)
        assert np.abs(total).max() < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_neutral_values_have_the_bits_of_none(name: str, method: str) -> None:
    problem = one_problem(name)
    options = {key: v for key, v in problem.options().items() if key != "weights"}
    function = getattr(infonce, f"{name}_loss_and_grad")
    plain = function(*problem.features, method=method, **options)
    neutral = {key: spec.DEFAULTS[key] for key in (*spec.SOFTMAX_OPTIONS, "weights")}
    if name == "info_nce":
        neutral["labels"] = np.arange(6)[:, None]
    got = function(*problem.features, method=method, **options | neutral)
    assert got.loss == plain.loss
    for have, want in zip(got.grads, plain.grads, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("rows", [32, 33])
def test_joint_gradients_in_one_array(rows: int) -> None:
    """Gradients are halves of one array if both halves are aligned, else arrays of their own."""
    z = np.random.default_rng(0).standard_normal((2, rows, 4), np.float32)
    got = infonce.gte_loss_and_grad(*z, scale=3.0)
    one = got.grads.query.base is not None and got.grads.query.base is got.grads.key.base
    assert one == (rows == 32)
    out = {name: np.empty((rows, 4), np.float32) for name in ("query", "key")}
    infonce.gte_loss_and_grad(*z, scale=3.0, out=out)
    wide = infonce.gte_loss_and_grad(*z, scale=3.0, grad_dtype=np.float64).grads
    for name, gradient in out.items():
        np.testing.assert_array_equal(getattr(got.grads, name), gradient)
        np.testing.assert_array_equal(getattr(wide, name), gradient)
