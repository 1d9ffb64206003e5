"""Rows of float64 of any finite norm, with and without `normalize`: right, or refused by name; and
the warning of rows far from unit norm."""

import warnings
from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import schedule
from infonce.kernels.norms import near_one
from judge import LOSSES, arguments, assert_grad, pairs

import infonce
from infonce.checks import call as checks
from infonce.checks import norms

METHODS = ["naive", "fused", "tiled"]
POWERS = [-1030, -1000, -664, -532, -500, 0, 500, 511, 532, 664, 1000, 1020]
RANDOM = arguments("nt_xent", *pairs("random", 20, 20, 5, np.float64, 3))[0]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


def scaled(z: np.ndarray, power: int | np.ndarray) -> np.ndarray:
    return np.ldexp(z, power)


@pytest.mark.parametrize("grad_dtype", [None, np.float32])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [*LOSSES, "gte"])
def test_rows_of_any_norm(
    loss: str, method: str, precision: str, grad_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and the gradient by directions do not change with the norm. A power of two changes
    no digit; smaller rows have subnormal features, with fewer digits."""
    monkeypatch.setattr(schedule, "TILE", (16, 12))
    monkeypatch.setattr(schedule, "TRIANGLE_SIDE", 16)
    args = arguments(loss, *pairs("random", 24, 24, 5, np.float64, 3))
    options: dict[str, Any] = {"scale": 5.0, "normalize": True, "method": method}
    options |= {"precision": precision, "grad_dtype": grad_dtype}
    if loss != "siglip":
        options["label_smoothing"] = 0.1  # linear terms go through the normalisation as well
    want = call(loss, *args, **options)
    powers = np.random.default_rng(1).permutation(np.resize(POWERS, len(args[0])))
    for rows in (*POWERS, powers):
        shift = rows if isinstance(rows, int) else rows[:, None]
        got = call(loss, *(scaled(z, shift) for z in args), **options)
        few = np.min(rows) < -1000  # subnormal
        assert abs(got.loss - want.loss) <= (
            1e-7 if few else 1e-6 if precision == "fp32" else 1e-14
        )
        for name, z in zip(got.grads._fields, got.grads, strict=True):
            expected = getattr(want.grads, name)
            if expected is None or name in ("scale", "bias"):
                continue
            with np.errstate(all="ignore"):
                exact = scaled(expected.astype(np.float64), -shift).astype(z.dtype)
            assert z.dtype == exact.dtype
            wide = 3e-5 if precision == "fp32" or grad_dtype else 1e-12
            relative = 1e-6 if few else wide
            row = np.abs(np.where(np.isfinite(exact), exact, 0)).max(axis=1, keepdims=True)
            least = np.finfo(z.dtype).smallest_subnormal
            at_end = ~np.isfinite(exact) | ~np.isfinite(z)  # overflows, or nearly
            error = np.where(at_end, 0.0, np.where(at_end, 0.0, z) - np.where(at_end, 0.0, exact))
            assert (np.abs(error) <= relative * row + least).all(), (name, rows)
            large = np.where(np.isfinite(z), np.inf, np.abs(z)), np.abs(exact)
            assert (np.maximum(*large)[at_end] > 0.99 * np.finfo(z.dtype).max).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_the_other_byte_order_keep_their_range(loss: str, method: str) -> None:
    """float64 rows with features below float32's range count in float32, in both byte orders."""
    args = arguments(loss, *pairs("random", 40, 40, 8, np.float64, 3))
    options: Any = {"scale": 4.0, "normalize": True, "precision": "fp32", "method": method}
    want = call(loss, *args, **options)
    swapped = tuple((z * 1e-110).astype(np.dtype(np.float64).newbyteorder()) for z in args)
    got = call(loss, *swapped, **options)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for gradient, right in zip(got.grads, want.grads, strict=True):
        if right is not None and np.ndim(right):
            assert_grad(gradient * 1e-110, right, "float32", 4.0, terms=4.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [*LOSSES, "gte"])
def test_logits_that_overflow_are_refused(loss: str, method: str) -> None:
    """Long rows are refused without `normalize`. Long rows with short ones have plain logits."""
    args = arguments(loss, *pairs("random", 12, 12, 4, np.float64, 5))
    for power in (500, 700, 1000):
        long = tuple(scaled(z, power) for z in args)
        if power > 500:
            with pytest.raises(ValueError, match=rf"^{infonce.spec.LOSSES[loss].arguments[0]}: "):
                call(loss, *long, scale=2.0, method=method)
        else:
            assert np.isfinite(call(loss, *long, scale=2.0, method=method).loss) or loss == "siglip"
        if len(args) == 2 and loss != "gte":
            mixed = scaled(args[0], power), scaled(args[1], -power)
            want, got = (call(loss, *z, scale=2.0, method=method) for z in (args, mixed))
            assert got.loss == want.loss
            np.testing.assert_array_equal(scaled(got.grads[0], power), want.grads[0])
    small = call(loss, *(scaled(z, -700) for z in args), scale=2.0, method=method)
    assert small.loss == call(loss, *(0 * z for z in args), scale=2.0, method=method).loss


def test_the_refusal_names_what_is_long() -> None:
    short, long = RANDOM[:6] * 1e-9, RANDOM[:6] * 1e300
    with pytest.raises(ValueError, match=r"^text: .* 1e-9 in image and 1e300 in text.* scale of 1"):
        infonce.clip_loss(short, long, scale=1e14)
    long[2, 1] = np.nan  # as ever
    assert np.isnan(infonce.clip_loss(short, long, scale=1e14))


def test_powers_of_two_of_odd_rows() -> None:
    z = np.array([[0.0, 0.0], [5e-324, 0.0], [1.7e308, -1.7e308], [np.nan, 1.0], [np.inf, 2.0]])
    rows, exponent = near_one(np, z)
    assert exponent.tolist() == [0, -1073, 1024, 0, 0]
    np.testing.assert_array_equal(rows[:2], [[0, 0], [0.5, 0]])
    np.testing.assert_array_equal(rows[3:], z[3:])
    np.testing.assert_array_equal(np.ldexp(rows, exponent[:, None]), z)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [*LOSSES, "gte"])
def test_gradients_beyond_float32_of_float32_rows(loss: str, method: str) -> None:
    """`grad_dtype` has room for them."""
    args = arguments(loss, *pairs("random", 12, 12, 4, np.float32, 5))
    options: dict[str, Any] = {"scale": 2.0, "normalize": True, "grad_dtype": np.float64}
    options |= {"grad_out": 1e-12, "method": method}
    want = call(loss, *args, **options)
    for power in (-126, 100):  # from 2^-149 to 2^128
        got = call(loss, *(scaled(z, power) for z in args), **options)
        for name, argument in zip(got.grads._fields, args, strict=False):
            if getattr(want.grads, name) is None:
                continue
            z = scaled(getattr(got.grads, name), power)
            rows = np.linalg.norm(getattr(want.grads, name), axis=1, keepdims=True)
            few = 2.0**-18 if power < 0 else 3e-5  # features are subnormal numbers
            assert z.dtype == np.float64
            assert (np.abs(z - getattr(want.grads, name)) <= few * rows * len(argument)).all()


# --- a warning ------------------------------------------------------------------------------------


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Unit rows of another shape in each test, as in a process that has not warned yet."""
    monkeypatch.setattr(norms, "_warned", False)
    monkeypatch.setattr(checks, "_cache", {})
    z = np.random.default_rng(0).standard_normal((40, 8))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def record_warnings(*calls: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in calls:
            run()
    return caught


@pytest.mark.parametrize("length", [0.4, 2.5])
def test_rows_far_from_unit_norm_warn_once(rows: np.ndarray, length: float) -> None:
    """The warning names the argument, and points at the caller's line."""
    text = rows.copy()
    text[:20] *= length
    (warning,) = record_warnings(*[lambda: infonce.clip_loss(rows, text, scale=2.0)] * 2)
    low, high = sorted((length, 1.0))
    assert str(warning.message) == (
        f"norms of rows of text are {low:g} to {high:g}, expected about 1: "
        "normalize=True divides rows by them; normalize=False silences this warning"
    )
    assert (warning.category, warning.filename) == (UserWarning, __file__)


def test_rows_that_are_meant_do_not_warn(rows: np.ndarray) -> None:
    odd = rows.copy()
    odd[::4], odd[1::4] = 0.0, np.nan
    assert not record_warnings(
        lambda: infonce.clip_loss(rows, 3.0 * rows, scale=2.0, normalize=False),
        lambda: infonce.clip_loss(rows, 3.0 * rows, scale=2.0, normalize=True),
        lambda: infonce.clip_loss(1.9 * rows, 0.6 * rows, scale=2.0),
        lambda: infonce.nt_xent_loss(odd, scale=2.0),
    )


@pytest.mark.extras
def test_the_warning_of_tensors_is_at_the_callers_line(rows: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    import infonce.torch as it

    z = torch.from_numpy(3.0 * rows).requires_grad_()
    (warning,) = record_warnings(lambda: it.CLIPLoss(scale=2.0)(z, z))
    assert warning.filename == __file__


def test_a_call_of_a_kind_that_has_been_checked_looks_at_no_row(
    rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    def looked_at(z: np.ndarray) -> np.ndarray:
        seen.append(z)
        return np.zeros(len(z))

    monkeypatch.setattr(norms, "log2_norms", looked_at)
    large = np.concatenate([rows] * 50)
    for _ in range(3):
        infonce.clip_loss(large, large, scale=2.0)
    assert [len(z) for z in seen] == [16, 16]
