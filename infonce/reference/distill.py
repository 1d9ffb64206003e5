"""Distillation: the targets of each query are the probabilities of keys by a teacher."""

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import Array, Gradients, Reference


@common.silent
def distill(
    query: ArrayLike,
    key: ArrayLike,
    teacher_query: ArrayLike,
    teacher_key: ArrayLike,
    *,
    scale: float,
    teacher_scale: float | None = None,
    two_sided: bool = True,
    normalize: bool = False,
    weights: ArrayLike | None = None,
) -> Reference:
    """Cross-entropy with the softmax of a teacher's logits, with its gradients.

    ::

        x_ij = scale * <q_i, k_j>            t_ij = teacher_scale * <tq_i, tk_j>
        p_ij = exp(x_ij - r_i)               r_i = log sum_j exp(x_ij)
        loss_i = - sum_j p^T_ij log p_ij = r_i - sum_j p^T_ij x_ij

    with p^T the softmax of t over j. `two_sided`: half of this loss, plus half of the same loss
    with queries and keys exchanged; it needs M = N.

    Parameters
    ----------
    query : array_like [M, D]
    key : array_like [N, D]
    teacher_query : array_like [M, E]
    teacher_key : array_like [N, E]
        Features by the teacher; constants without gradient.
    scale : float
        1 / temperature.
    teacher_scale : float, optional
        `scale` by default.
    two_sided : bool
    normalize : bool
        Divide the rows of all four by their L2 norms first.
    weights : array_like [M], optional
        Upstream gradient of each row's loss; 1/M by default.

    Returns
    -------
    Reference
        With `grads` for ``query``, ``key`` and ``scale``; `lse` of the rows, or the pair (rows,
        columns).

    Notes
    -----
    ``dX_ij = dloss / dx_ij = weights_i (p_ij - p^T_ij)``; gradients follow as in `info_nce`.
    `two_sided`: half of it, plus half of ``weights_j (p'_ij - p'^T_ij)``, with p' and p'^T the
    softmax of x and of t over i.

    References
    ----------
    Hinton, Vinyals, Dean. Distilling the knowledge in a neural network. 2015. arXiv:1503.02531.

    Yang et al. CLIP-KD: an empirical study of CLIP model distillation. CVPR 2024. arXiv:2307.12732.
    """
    q, k = common.as_features(query), common.as_features(key)
    tq, tk = common.as_features(teacher_query), common.as_features(teacher_key)
    if normalize:
        q, q_norm = common.normalize(q)
        k, k_norm = common.normalize(k)
        tq, tk = common.normalize(tq)[0], common.normalize(tk)[0]
    w = np.full(len(q), 1 / len(q)) if weights is None else np.asarray(weights, np.float64)
    dot = q @ k.T
    x, t = scale * dot, (scale if teacher_scale is None else teacher_scale) * (tq @ tk.T)
    losses, r, slope = _softmax_loss(x, t)
    dx = w[:, None] * slope
    lse: tuple[Array, Array] | Array = r
    if two_sided:
        column_losses, c, column_slope = _softmax_loss(x.T, t.T)
        losses = (losses + column_losses) / 2
        dx = (dx + (w[:, None] * column_slope).T) / 2
        lse = (r, c)
    dq, dk = scale * (dx @ k), scale * (dx.T @ q)
    if normalize:
        dq = common.normalize_backward(dq, q, q_norm)
        dk = common.normalize_backward(dk, k, k_norm)
    grads: Gradients = {"query": dq, "key": dk, "scale": float(np.sum(dx * dot))}
    return Reference(losses, float(w @ losses), grads, lse)


def _softmax_loss(x: Array, t: Array) -> tuple[Array, Array, Array]:
    """Losses [M], log-sum-exps [M] and slopes dloss_i / dx_ij [M, N] from both models' logits."""
    r, teacher_r = common.log_sum_exp(x, axis=1), common.log_sum_exp(t, axis=1)
    target = np.exp(t - teacher_r[:, None])
    losses = np.sum(target * (r[:, None] - x), axis=1)
    return losses, r, np.exp(x - r[:, None]) - target
