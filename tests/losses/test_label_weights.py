"""`label_weights`: several positives of a row, each with a weight, on the CPU."""

from typing import Any

import numpy as np
import pytest
from judge import assert_same_bits
from reference_problems import each_once

import infonce

ROWS, KEYS, MOST = 60, 90, 5
RNG = np.random.default_rng(0)
QUERY, KEY = RNG.standard_normal((ROWS, 8)), RNG.standard_normal((KEYS, 8))
LABELS = each_once(RNG.integers(-1, KEYS, (ROWS, MOST)))
LABELS[::9] = -2
WEIGHTS = np.where(RNG.random(LABELS.shape) < 0.2, 0.0, RNG.uniform(0.1, 2.0, LABELS.shape))
METHODS = ("naive", "auto", "tiled")


def call(labels: Any = LABELS, weights: Any = None, **options: Any) -> infonce.LossAndGrad:
    return infonce.info_nce_loss_and_grad(
        QUERY, KEY, labels, scale=2.0, normalize=True, label_weights=weights, **options
    )


@pytest.mark.parametrize("weight", [1.0, 0.3, 5e-324, 1e308])
@pytest.mark.parametrize("method", METHODS)
def test_equal_weights_are_none(method: str, weight: float) -> None:
    """The same bits; a sum of such weights may not fit float64."""
    weights = np.where(LABELS < 0, np.nan, weight)
    assert_same_bits(call(weights=weights, method=method), call(method=method))
    assert float(call(weights=WEIGHTS, method=method).loss) != float(call(method=method).loss)


def test_weights_far_apart() -> None:
    """Of a weight of 1e-300 beside 1, the loss is that of one positive, and its key a positive."""
    labels = np.stack([np.arange(ROWS), np.arange(ROWS) + 1], axis=1)
    got = call(labels, np.tile([1.0, 1e-300], (ROWS, 1)))
    np.testing.assert_allclose(got.loss, call(labels[:, 0]).loss, rtol=1e-13)
    decoupled = call(labels, np.tile([1.0, 1e-300], (ROWS, 1)), decoupled=True)
    assert float(decoupled.loss) < float(call(labels[:, 0], decoupled=True).loss)


def test_lists_and_integers() -> None:
    weights = np.arange(1, MOST + 1) + np.zeros((ROWS, 1), int)
    assert_same_bits(call(weights=weights.tolist()), call(weights=weights.astype(float)))
