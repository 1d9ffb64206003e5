"""Logits of long rows that overflow are refused by name; the warning of rows far from unit norm."""

import warnings
from typing import Any

import numpy as np
import pytest
from infonce.kernels.norms import near_one
from judge import LOSSES, arguments, pairs

import infonce
from infonce.checks import call as checks
from infonce.checks import norms

METHODS = ["naive", "fused", "tiled"]
RANDOM = arguments("nt_xent", *pairs("random", 20, 20, 5, np.float64, 3))[0]


def call(loss: str, *args: Any, **options: Any) -> infonce.LossAndGrad:
    return getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)


def scaled(z: np.ndarray, power: int | np.ndarray) -> np.ndarray:
    return np.ldexp(z, power)


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
