"""Limits of logits and gradients of prefixes on a GPU."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING, find_dtype, smaller
from judge import GRAD_BOUND, assert_grad, assert_loss, judged

import infonce
from infonce import spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy


def near_each_other(
    name: str, rows: int, width: int, dtype: str, precision: str, small: float = 3e-3
) -> tuple[Any, ...]:
    """Rows whose products differ by some units of float32's rounding: half of the features are the
    same in all rows, the others `small`."""
    rng = np.random.default_rng(2)
    z = np.empty((2, rows, width))
    z[..., ::2] = rng.choice([-1, 1], (width + 1) // 2) * width**-0.5
    z[..., 1::2] = small * rng.standard_normal((2, rows, width // 2)) * width**-0.25
    if precision == "tf32":
        z = z.astype(np.float16)
    z = z.astype(find_dtype(dtype))
    return (z.reshape(-1, width),) if name == "nt_xent" else (z[0], z[1])


# rows in shared memory, beside the keys, wider than that; with a gradient in registers
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (150, 37),
        (300, 128),
        (300, 512),
        (300, 1200),
        *smaller([(2200, 128), (4200, 72)], [(600, 128)]),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float64", "auto"), ("float32", "auto"), ("float32", "bf16x3"), ("float32", "tf32"),
     ("bfloat16", "auto"), ("float16", "auto")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent", "gte"])
def test_both_passes_leave_out_the_same_pairs(
    name: str, dtype: str, precision: str, rows: int, width: int
) -> None:
    """The slopes of a softmax add up to 0 if the pairs in its sum are those in its gradient. So,
    where all products are nearly the same, does the gradient of the scale: in large batches it
    comes from the gradient pass."""
    normalize = rows > 4096
    # Products that differ by d add d to the gradient of the scale: less than the bound
    small = 1e-3 if normalize else 3e-3
    z = tuple(map(cupy.asarray, near_each_other(name, rows, width, dtype, precision, small)))
    for options in ({}, {"key_bias": cupy.linspace(-1, 1, len(z[-1]))}):
        if name == "gte" and options:
            continue
        got = getattr(infonce, f"{name}_loss_and_grad")(
            *z, scale=1.0, reduction="sum", grad_dtype=np.float32, precision=precision,
            normalize=normalize, false_negative_margin=0.0, method="tiled",
            workspace=2**20 if rows == 300 else None, **options,
        )  # fmt: skip
        lse = cupy.concatenate(got.lse) if name == "clip" else got.lse
        kept = np.exp(lse.get() - lse.get().max())
        assert kept.std() > 0.01  # rows have different numbers of keys
        total = sum(gradient.astype(np.float64).sum(axis=0) for gradient in got.grads[:-1])
        slope = float(cupy.abs(total[::2]).max()) * width**0.5  # of one pair: 1
        if normalize:
            slope = abs(float(got.grads.scale))
        # A row's elements of dL/dx are nearly one number, and share its rounding: up to 2^-8 of it
        # in bfloat16, 2^-11 in float16 and tf32, for rows and for columns. From one row to the next
        # it varies. Of two parts, less is rounded than tensor cores cut off from long sums.
        bounds = {"bfloat16": 4e-3, "float16": 1e-3, "tf32": 1e-3, "bf16x3": 1e-4}
        rounding = bounds.get(dtype if precision == "auto" else precision, 1e-5)
        assert slope < rounding * sum(len(gradient) for gradient in got.grads[:-1])
        if name == "info_nce" and not normalize:
            row_norms = cupy.abs(got.grads.query[:, ::2]).max(axis=1) * width**0.5
            assert float(row_norms.max()) < rounding


def find_clear_margin(features: tuple[Any, ...]) -> float:
    """A margin near 0.1 from which all pairs are far, so that rounding decides about none."""
    query, key = features if len(features) == 2 else np.split(features[0], 2)
    above = []
    for rows, columns in ((query, key), (key, query)):
        dots = rows @ (columns if len(features) == 2 else np.concatenate([columns, rows])).T
        above.append((dots - np.diag(dots)[:, None]).ravel())
    near = np.sort(np.clip(np.concatenate(above), 0.05, 0.15))
    widest = np.diff(near).argmax()
    return float(near[widest : widest + 2].mean())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent"])
def test_limits_far_apart(name: str, dtype: str) -> None:
    """Positives of all similarities at a high scale: what one row leaves out exceeds by 2^100 what
    it keeps, and rows are left without negatives."""
    rng = np.random.default_rng(5)
    z = rng.standard_normal((2, 300, 64))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z[1] = np.linspace(-1, 1, 300)[:, None] * z[0] + 0.3 * z[1]
    z[1, :150] += 2 * z[0, 7]
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z = z.astype(find_dtype(dtype))
    features = (z.reshape(-1, 64),) if name == "nt_xent" else (z[0], z[1])
    wide = tuple(side.astype(np.float64) for side in features)
    options: dict[str, Any] = {"scale": 100.0, "false_negative_margin": find_clear_margin(wide)}
    want = judged(name, wide, **options)
    got = getattr(infonce, f"{name}_loss_and_grad")(*map(cupy.asarray, features), **options)
    assert_loss(cupy.asnumpy(got.loss), float(want.loss), dtype, 100.0)
    for field, gradient in want.grads.items():
        if isinstance(gradient, np.ndarray):
            have = cupy.asnumpy(getattr(got.grads, field))
            assert_grad(have, gradient, dtype, 100.0, terms=100.0 * len(wide[0]) ** -0.5)
    np.testing.assert_allclose(float(got.grads.scale), want.grads["scale"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "clip", "lit", "siglip"])
def test_gradients_of_prefixes_are_as_precise_as_asked(name: str, place: str) -> None:
    """Those of all prefixes (`dims`), in arrays of several dtypes; in 16 bits they underflow."""
    rng = np.random.default_rng(0)
    sides = [rng.standard_normal((60, 24)) / 5 for _ in spec.LOSSES[name].arguments]
    features = [z.astype(np.float16) for z in sides]
    options: dict[str, Any] = {
        "scale": 2.0, "dims": (3, 8, 20), "dim_weights": (1.0, -2.0, 0.5), "precision": "fp64",
        "grad_out": 2.0**-30,
    }  # fmt: skip
    function = getattr(infonce, f"{name}_loss_and_grad")
    want = function(*(z.astype(np.float64) for z in features), normalize=False, **options)
    there = [cupy.asarray(z) for z in features] if place == "device" else features
    xp = cupy if place == "device" else np
    argument = spec.LOSSES[name].arguments[0]
    for way in (
        {"grad_dtype": np.float32}, {"grad_dtype": np.float64},
        {"out": {argument: xp.empty((60, 24), np.float32)}},
    ):  # fmt: skip
        got = function(*there, normalize=False, offload=place == "host", **options, **way)
        for field in spec.LOSSES[name].arguments if "grad_dtype" in way else (argument,):
            gradient, exact = getattr(got.grads, field), getattr(want.grads, field)
            if exact is None:
                continue
            assert gradient.dtype == way.get("grad_dtype", np.float32)
            error = abs(cupy.asnumpy(gradient).astype(np.float64) - exact).max()
            assert error <= GRAD_BOUND[gradient.dtype.name] * abs(exact).max()
