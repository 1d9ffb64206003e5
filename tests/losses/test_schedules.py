"""Temperature schedules against values known by hand."""

import math
from typing import Any

import numpy as np
import pytest

import infonce
from infonce import schedules


def test_constant() -> None:
    assert [schedules.constant(0.07)(step) for step in (0, 1, 10**6)] == [0.07] * 3


def test_cosine_at_the_points_of_a_period() -> None:
    temperature = schedules.cosine(400, low=0.1, high=0.9)
    got = [temperature(step) for step in (0, 100, 200, 300, 400, 50)]
    want = [0.9, 0.5, 0.1, 0.5, 0.9, 0.5 + 0.4 * math.sqrt(0.5)]
    assert got == pytest.approx(want, abs=1e-12)
    for period in (5e-324, 1.0, 1.7e308):  # no warning
        swing = schedules.cosine(period, 1e-300, 1.7e308)
        assert all(1e-300 <= swing(step) <= 1.7e308 for step in (0.0, 1e308, -3e307, 5e-324))


@pytest.mark.extras
@pytest.mark.parametrize("kind", ["float", "numpy", "torch", "jax"])
def test_clamp(kind: str) -> None:
    def make(value: float) -> Any:
        if kind == "float":
            return value
        if kind == "torch":
            return pytest.importorskip("torch").tensor(value)
        return (np if kind == "numpy" else pytest.importorskip("jax.numpy")).asarray(value)

    for value, want in ((-0.5, 0.0), (2.0, 2.0), (4.7, math.log(100)), (math.nan, math.nan)):
        argument = make(value)
        got = schedules.clamp(argument)
        assert type(got).__name__ == {"numpy": "float64"}.get(kind, type(argument).__name__)
        assert float(got) == pytest.approx(want, nan_ok=True)
        assert float(argument) == pytest.approx(value, nan_ok=True)  # the caller's is left alone
    assert schedules.clamp(make(9.0), largest=math.e) == pytest.approx(1.0)


def test_a_learned_temperature_comes_down_to_where_the_loss_is_least() -> None:
    rng = np.random.default_rng(0)
    image = rng.standard_normal((32, 8))
    text = image + 1.5 * rng.standard_normal((32, 8))
    t = schedules.log_scale(0.07)
    assert math.exp(t) == pytest.approx(1 / 0.07)
    for _ in range(200):
        out = infonce.clip_loss_and_grad(image, text, scale=math.exp(t), normalize=True)
        t = schedules.clamp(t - 0.5 * float(out.grads.scale) * math.exp(t))
    best, *others = (
        infonce.clip_loss(image, text, scale=math.exp(t + by), normalize=True)
        for by in (0.0, 0.05, -0.05)
    )
    assert 0 < t < math.log(100)
    assert best < min(others)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"temperature: expected a positive finite number, got 0"):
        schedules.constant(0)
    with pytest.raises(TypeError, match=r"period: expected a number, got str '9'"):
        schedules.cosine("9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"low: expected at most high = 0\.1, got 0\.5"):
        schedules.cosine(9, low=0.5, high=0.1)
    with pytest.raises(ValueError, match=r"largest: expected at least 1, got 0\.5"):
        schedules.clamp(1.0, largest=0.5)
    with pytest.raises(TypeError, match=r"parameter: expected a number or an array, got str"):
        schedules.clamp("1")
    with pytest.raises(ValueError, match="temperature: expected a positive finite number, got nan"):
        schedules.log_scale(math.nan)
