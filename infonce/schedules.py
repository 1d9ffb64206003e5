"""Temperatures over training: functions from a step to a number, for any framework.

>>> temperature = infonce.schedules.cosine(400, low=0.1, high=1.0)
>>> loss = infonce.nt_xent_loss(features, temperature=temperature(epoch))

A learned temperature is a parameter t with ``scale = exp(t)``, as in CLIP:

>>> t = infonce.schedules.log_scale(0.07)
>>> out = infonce.clip_loss_and_grad(image, text, scale=math.exp(t))
>>> t = infonce.schedules.clamp(t - rate * out.grads.scale * math.exp(t))

Here `rate` is the learning rate, and ``dL/dt = dL/dscale * scale``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any


def _positive(name: str, value: Any) -> float:
    """A positive finite number as a float; otherwise an error that names the argument `name`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}"[:120])
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a positive finite number, got {value!r}")
    return number


def constant(temperature: float) -> Callable[[float], float]:
    """The same temperature at every step.

    Raises
    ------
    TypeError, ValueError
        If `temperature` is not a positive number.
    """
    temperature = _positive("temperature", temperature)
    return lambda step: temperature


def cosine(period: float, low: float = 0.1, high: float = 1.0) -> Callable[[float], float]:
    """A temperature that swings between `high` (at step 0) and `low` (half a period later):

    ``temperature(step) = low + (high - low) (1 + cos(2 pi step / period)) / 2``.

    With ``period = 2 * steps`` it goes down once, from `high` to `low`.

    Raises
    ------
    TypeError, ValueError
        If a number is not positive, or `low` is above `high`.

    References
    ----------
    Kukleva, Boehle, Schiele, Kuehne, Rupprecht: Temperature Schedules for Self-Supervised
    Contrastive Methods on Long-Tail Data, 2023.
    """
    period, low, high = (
        _positive(name, value) for name, value in (("period", period), ("low", low), ("high", high))
    )
    if low > high:
        raise ValueError(f"low: expected at most high = {high}, got {low}")

    def temperature(step: float) -> float:
        fraction = step % period / period
        return low + (high - low) * ((1 + math.cos(2 * math.pi * fraction)) / 2)

    return temperature


def log_scale(temperature: float = 0.07) -> float:
    """The initial parameter of a learned temperature: ``t = log(1 / temperature)``.

    The loss takes ``scale = exp(t)``, and dL/dt = dL/dscale * scale.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """
    return -math.log(_positive("temperature", temperature))


def clamp(parameter: Any, largest: float = 100.0) -> Any:
    """Clamp the parameter of `log_scale` to [0, log(largest)], after each training step.

    So the scale is at least 1 and at most `largest` (100 in CLIP).

    Parameters
    ----------
    parameter : float or array
        Of any library whose arrays have a method ``clip(least, most)``: NumPy, CuPy, PyTorch, JAX.
        It is not changed; PyTorch: ``t.data = clamp(t.data)``.

    Raises
    ------
    TypeError, ValueError
        If `largest` is not a number of at least 1.
    """
    largest = _positive("largest", largest)
    if largest < 1:
        raise ValueError(f"largest: expected at least 1, got {largest}")
    upper = math.log(largest)
    if hasattr(parameter, "clip"):
        return parameter.clip(0.0, upper)
    if isinstance(parameter, bool) or not isinstance(parameter, Real):
        raise TypeError(f"parameter: expected a number or an array, got {type(parameter).__name__}")
    return min(max(float(parameter), 0.0), upper)  # in this order NaN stays NaN, as in arrays
