"""infonce.jax.optax against the formula that optax publishes, over all pairs of rows."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import infonce.jax.optax as ij  # noqa: E402

pytestmark = pytest.mark.extras


def formula(z: Any, labels: Any, temperature: Any) -> Any:
    norm = jnp.linalg.norm(z, axis=1, keepdims=True)
    unit = z / jnp.where(norm > 0, norm, 1)
    x = unit @ unit.T / temperature
    same = labels[:, None] == labels
    others = jnp.where(same, 0, jnp.exp(x)).sum(axis=1, keepdims=True)
    losses = jnp.log(jnp.exp(x) + others) - x
    pairs = same & ~np.eye(len(z), dtype=bool)
    return jnp.where(pairs, losses, 0).sum() / pairs.sum()


@pytest.mark.parametrize(
    "labels", [[0, 0, 1, 1, 2, 2], [5, -1, -1, 5, 5, 7], [3] * 6], ids=["pairs", "uneven", "one"]
)
def test_ntxent(labels: list[int]) -> None:
    """Values and gradients, with labels that are known while tracing and with others."""
    z = jax.random.normal(jax.random.key(0), (6, 4))
    classes = np.array(labels)
    want = jax.value_and_grad(formula, (0, 2))(z, classes, 0.4)
    traced = jax.jit(jax.value_and_grad(ij.ntxent, (0, 2)))
    known = jax.jit(jax.value_and_grad(lambda a, t: ij.ntxent(a, classes, t), (0, 1)))
    for got in (traced(z, classes, 0.4), known(z, 0.4)):
        # the sums are of six terms, which float32 rounds at 6e-8
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, want)


def test_ntxent_of_zeros_and_of_half_precision() -> None:
    z = jax.random.normal(jax.random.key(0), (6, 4)).at[2].set(0)
    labels = np.array([0, 0, 1, 1, 2, 2])
    loss, grad = jax.value_and_grad(ij.ntxent)(z, labels)
    np.testing.assert_allclose(loss, formula(z, labels, 0.07), rtol=2e-5)
    assert np.isfinite(grad).all()
    assert not grad[2].any()
    half = z.astype(jnp.bfloat16)
    loss, grad = jax.value_and_grad(ij.ntxent)(half, labels)
    assert loss.dtype == jnp.float32
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, formula(half.astype(jnp.float32), labels, 0.07), rtol=2e-5)


def test_ntxent_refuses() -> None:
    z = jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"labels: expected shape \(4,\), got \(3,\)"):
        ij.ntxent(z, np.zeros(3, int))
    with pytest.raises(TypeError, match=r"embeddings: expected floats \[B, D\], got "):
        ij.ntxent(z.astype(int), np.zeros(4, int))
    assert np.isnan(ij.ntxent(z, np.arange(4)))


def test_hashes_of_64_bits() -> None:
    """Classes that are the same in their lower 32 bits."""
    embeddings = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
    classes = np.arange(6) % 3
    want = ij.ntxent(embeddings, classes)
    for labels in (classes << 32, classes.astype(np.uint64) << 62):
        assert ij.ntxent(embeddings, labels) == want
        assert jax.jit(lambda z, labels=labels: ij.ntxent(z, labels))(embeddings) == pytest.approx(
            float(want), rel=1e-6
        )


@pytest.mark.parametrize("size", [2.0**-80, 2.0**80])
def test_rows_whose_squares_leave_float32(size: float) -> None:
    z = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    labels, value_and_grad = np.arange(6) // 2, jax.value_and_grad(ij.ntxent)
    (want, slope), (got, scaled) = (
        value_and_grad(z, labels, 0.4),
        value_and_grad(z * np.float32(size), labels, 0.4),
    )
    assert got == want
    np.testing.assert_allclose(scaled * np.float32(size), slope, rtol=2e-5, atol=2e-6)
