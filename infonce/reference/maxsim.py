"""MaxSim: scores of late interaction between sets of token vectors, and their gradients."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import common
from .common import Array


class MaxSim(NamedTuple):
    """Scores, and what their gradients need, in float64.

    Attributes
    ----------
    scores : ndarray [M, N]
    winners : ndarray of int [M, N, L]
        Of each query token, the token of the key with the largest product: the first of equal ones.
    weights : ndarray [M, L]
        ds_ij / dmax of each query token: 1, or 1 / the number of tokens; 0 for those that do not
        count.
    """

    scores: Array
    winners: NDArray[np.int64]
    weights: Array


@common.silent
def maxsim(
    query: ArrayLike,
    key: ArrayLike,
    *,
    query_mask: ArrayLike | None = None,
    key_mask: ArrayLike | None = None,
    token_mean: bool = False,
    normalize: bool = False,
) -> MaxSim:
    """MaxSim scores of all pairs of queries and keys.

    ::

        s_ij = w_i * sum_a max_b <q_ia, k_jb>        w_i = 1, or 1 / (number of tokens of query i)

    over the tokens a of query i and b of key j that count. Losses over these scores are those of
    the other references: with queries s [M, N] and the unit matrix as keys, their products are s,
    and their gradient of the queries is G = scale * dL/dx, which `maxsim_gradients` takes.

    Parameters
    ----------
    query : array_like [M, L, D]
    key : array_like [N, K, D]
    query_mask : array_like of bool [M, L], optional
        Tokens of queries that count; all by default. A query without tokens has scores of 0.
    key_mask : array_like of bool [N, K], optional
        Tokens of keys that count; each key has one at least.
    token_mean : bool
        Divide scores by the number of the query's tokens.
    normalize : bool
        Divide tokens by their L2 norm first.

    Returns
    -------
    MaxSim

    References
    ----------
    Khattab, Zaharia. ColBERT: efficient and effective passage search via contextualized late
    interaction over BERT. SIGIR 2020. arXiv:2004.12832, equation 3.
    """
    q, k = (_tokens(z, normalize)[0] for z in (query, key))
    counts = np.ones(q.shape[:2]) if query_mask is None else np.asarray(query_mask, np.float64)
    products = np.einsum("iad,jbd->ijab", q, k)
    if key_mask is not None:
        products = np.where(np.asarray(key_mask)[:, None, :], products, -np.inf)
    winners = products.argmax(axis=3)
    largest = np.take_along_axis(products, winners[..., None], axis=3)[..., 0]
    weights = counts
    if token_mean:
        weights = counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True))
    # tokens that do not count may hold anything
    scores = np.where(counts[:, None, :] > 0, weights[:, None, :] * largest, 0.0).sum(axis=2)
    return MaxSim(scores, winners, weights)


@common.silent
def maxsim_gradients(
    g: ArrayLike, of: MaxSim, query: ArrayLike, key: ArrayLike, normalize: bool = False
) -> tuple[Array, Array]:
    """Gradients of queries and keys, from G = dL/ds.

    ::

        dq_ia = w_i * sum_j G_ij k_jb        dk_jb = sum_ij w_i G_ij q_ia        b the winner of ija

    The second sum is over the query tokens whose winner is b. A maximum is differentiable where its
    winner is the only one; of equal products, the first gets the gradient.

    Parameters
    ----------
    g : array_like [M, N]
    of : MaxSim
        The result of `maxsim` for these arguments.
    query : array_like [M, L, D]
    key : array_like [N, K, D]
    normalize : bool

    Returns
    -------
    dq : ndarray [M, L, D]
    dk : ndarray [N, K, D]
    """
    (q, q_norm), (k, k_norm) = (_tokens(z, normalize) for z in (query, key))
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    counted = of.weights > 0
    for i, j in np.ndindex(of.scores.shape):
        a = np.flatnonzero(counted[i])
        factor = (np.asarray(g, np.float64)[i, j] * of.weights[i, a])[:, None]
        dq[i, a] += factor * k[j, of.winners[i, j, a]]
        np.add.at(dk[j], of.winners[i, j, a], factor * q[i, a])
    if normalize:
        dq, dk = (
            common.normalize_backward(g.reshape(-1, g.shape[2]), u.reshape(-1, u.shape[2]), norm)
            .reshape(g.shape)
            for g, u, norm in ((dq, q, q_norm), (dk, k, k_norm))
        )  # fmt: skip
    return dq, dk


def _tokens(z: ArrayLike, normalize: bool) -> tuple[Array, Array]:
    """The tokens in float64, normalised if wanted, and their norms [rows * tokens, 1]."""
    tokens = common.as_features(z)
    if not normalize:
        return tokens, np.ones(1)
    unit, norm = common.normalize(tokens.reshape(-1, tokens.shape[2]))
    return unit.reshape(tokens.shape), norm
