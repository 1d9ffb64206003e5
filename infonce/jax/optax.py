"""A drop-in replacement for optax's contrastive loss: `ntxent` of optax.losses.

The signature is the same, inside and outside of `jit`. What differs: no matrix is kept, the loss is
float32 (float64 for float64), and there are no second derivatives, as for all losses of
`infonce.jax`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import validation
from .functions import info_nce_loss

__all__ = ["ntxent"]


def ntxent(embeddings: Any, labels: Any, temperature: Any = 0.07) -> Any:
    """NT-Xent of classes, mean over the pairs (i, p) of rows of one class.

    With ``x_ij = cos(z_i, z_j) / temperature`` and N(i) the rows of other classes,

    ``loss = mean_ip ( log( exp x_ip + sum_{j in N(i)} exp x_ij ) - x_ip )``.

    Memory is linear in the batch: the negatives of a row are one log-sum-exp, and its positives are
    dot products, one in each step of a loop. The loop has one step for each other row of the
    largest class, or of the batch if `labels` is an argument of the function that `jit` compiles.

    Parameters
    ----------
    embeddings : array [B, D]
    labels : integer array [B]
        Class of each row. Without two rows of one class the loss is NaN.
    temperature : float or 0-d array, default 0.07

    Returns
    -------
    0-d array

    Raises
    ------
    TypeError, ValueError
        While tracing, naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """
    embeddings, known = jnp.asarray(embeddings), not isinstance(labels, jax.core.Tracer)
    if embeddings.ndim != 2 or not jnp.issubdtype(embeddings.dtype, jnp.floating):
        raise TypeError(
            f"embeddings: expected floats [B, D], got {validation.what(embeddings)}"
        )  # fmt: skip
    if jnp.shape(labels) != embeddings.shape[:1]:
        raise ValueError(
            f"labels: expected shape {embeddings.shape[:1]}, got {jnp.shape(labels)}"
        )  # fmt: skip
    largest_class = len(embeddings)  # rows; if labels are traced, a bound
    if known:  # number the classes from 0, because JAX may cut integers to 32 bits
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        largest_class = int(counts.max())
    labels = jnp.asarray(labels)
    z = _unit(embeddings.astype(jnp.promote_types(embeddings.dtype, jnp.float32)))

    # In `order`, rows of a class are neighbours. For each row: the begin of its class in `order`,
    # the size of its class, and its position in the class.
    order = jnp.argsort(labels, stable=True)
    begin, end = (jnp.searchsorted(labels[order], labels, side=s) for s in ("left", "right"))
    size, position = end - begin, jnp.argsort(order) - begin

    def partner(n: Any) -> Any:
        """For each row, the row of its class that is n positions after it, cyclically."""
        return order[begin + (position + n) % size]

    negatives = info_nce_loss(  # for each row: log-sum-exp of negatives - logit of first partner
        z, z, partner(1), ids=(labels, labels), decoupled=True, reduction="none",
        temperature=temperature,
    )  # fmt: skip

    def logits(n: Any) -> Any:
        """For each row, its logit with its n-th partner."""
        return (z * z[partner(n)]).sum(axis=1) / temperature

    # With the log-sum-exp Z_i of the negatives: log(exp x_ip + exp Z_i) - x_ip =
    # softplus(Z_i - x_ip), and Z_i = negatives + logits(1). A row alone in its class is its own
    # partner, and counts in no step, because n < size is false.
    @jax.checkpoint  # the backward pass computes a step again, so it keeps no vectors of steps
    def add_partner_losses(total: Any, n: Any) -> Any:
        losses = jax.nn.softplus(negatives + logits(1) - logits(n))
        return total + jnp.where(n < size, losses, 0.0).sum(), None

    steps = jnp.arange(1, max(largest_class, 2))
    total, _ = jax.lax.scan(add_partner_losses, jnp.zeros((), negatives.dtype), steps)
    return total / (size - 1).sum()  # divided by the number of pairs


def _unit(z: Any) -> Any:
    """Rows divided by their norm; rows of zeros, and their gradients, stay zero."""
    largest = jax.lax.stop_gradient(jnp.abs(z).max(axis=1, keepdims=True))
    # A power of two divides each row, which is exact: then squares neither over- nor underflow
    z = jnp.ldexp(z, -jnp.frexp(largest)[1])
    squares = (z * z).sum(axis=1, keepdims=True)
    return z * jnp.where(squares > 0, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
