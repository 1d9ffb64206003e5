"""`label_weights`: several positives of a row, each with a weight, on the CPU."""

from typing import Any

import numpy as np
import pytest
from judge import assert_same_bits
from reference_problems import each_once

import infonce
from infonce import reference

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


OPTIONS: list[dict[str, Any]] = [
    {}, {"margin": 0.1, "hardness": 1.5}, {"decoupled": True},
    {"label_smoothing": 0.2, "key_bias": np.linspace(-1, 1, KEYS)},
    {"false_negative_margin": 0.1, "ids": (np.arange(ROWS) % 20, np.arange(KEYS) % 20)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("method", METHODS)
def test_specification(method: str, options: dict[str, Any]) -> None:
    want = reference.info_nce(
        QUERY, KEY, scale=2.0, normalize=True, labels=LABELS, label_weights=WEIGHTS, **options
    )
    got = call(weights=WEIGHTS, method=method, **options)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)
    for name, gradient in want.grads.items():
        np.testing.assert_allclose(getattr(got.grads, name), gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("weight", [1.0, 0.3, 5e-324, 1e308])
@pytest.mark.parametrize("method", METHODS)
def test_equal_weights_are_none(method: str, weight: float) -> None:
    """The same bits; a sum of such weights may not fit float64."""
    weights = np.where(LABELS < 0, np.nan, weight)
    assert_same_bits(call(weights=weights, method=method), call(method=method))
    assert float(call(weights=WEIGHTS, method=method).loss) != float(call(method=method).loss)


@pytest.mark.parametrize("method", METHODS)
def test_a_label_of_weight_0_is_none(method: str) -> None:
    """Its key is a negative, and a row with no other label has no positive."""
    kept = WEIGHTS > 0
    alone = np.where(kept, WEIGHTS, 0.7)
    options: dict[str, Any] = {"margin": 0.1, "decoupled": True, "method": method}
    want = call(np.where(kept, LABELS, -1), alone, **options)
    assert_same_bits(call(weights=WEIGHTS, **options), want)
    losses = call(weights=WEIGHTS * (np.arange(ROWS) != 4)[:, None], reduction="none").loss
    assert losses[4] == losses[0] == 0.0
    assert (losses != 0.0).sum() == ((LABELS >= 0) & kept).any(axis=1).sum() - 1


@pytest.mark.parametrize("method", METHODS)
def test_one_label_has_the_whole_target(method: str) -> None:
    labels = LABELS[:, -1:]
    weights = WEIGHTS[:, -1:]
    assert_same_bits(
        call(labels, weights, method=method), call(np.where(weights > 0, labels, -1), method=method)
    )


def test_the_order_of_labels_is_free() -> None:
    order = RNG.permuted(np.tile(np.arange(MOST), (ROWS, 1)), axis=1)
    labels, weights = (np.take_along_axis(z, order, axis=1) for z in (LABELS, WEIGHTS))
    assert_same_bits(call(labels, weights), call(LABELS, WEIGHTS))
    assert_same_bits(call(LABELS, WEIGHTS.astype(np.float32).astype(float)),
                     call(LABELS, WEIGHTS.astype(np.float32)))  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_two_positives_are_a_mean_of_one_each(method: str) -> None:
    """The loss is linear in the target, because the log-sum-exp is over the same keys."""
    low, high = RNG.integers(0, KEYS // 2, (2, ROWS))
    labels, w = np.stack([low, high + KEYS // 2], axis=1), RNG.uniform(0.1, 1, ROWS)
    options: dict[str, Any] = {"method": method, "reduction": "none"}
    both = call(labels, np.stack([w, 1 - w], axis=1), **options).loss
    one, other = (call(labels[:, i], **options).loss for i in (0, 1))
    np.testing.assert_allclose(both, w * one + (1 - w) * other, rtol=1e-12)


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
