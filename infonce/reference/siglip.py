"""SigLIP: a sigmoid of each pair, which is a match or not; there is no softmax."""

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import Gradients, Ids, Reference


@common.silent
def siglip(
    image: ArrayLike,
    text: ArrayLike,
    *,
    scale: float = 10.0,
    bias: float = -10.0,
    ids: Ids | None = None,
    groups: Ids | None = None,
    positive_ids: Ids | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
) -> Reference:
    """Pairwise sigmoid loss of SigLIP, with its gradients.

    ::

        x_ij = scale * <image_i, text_j>
        t_ij = +1 if (i, j) is positive, else -1
        loss_i = -sum_j v_ij log sigmoid(t_ij * (x_ij + bias))
        loss = sum_i weights_i * loss_i

    where the sum over j leaves out the excluded pairs. Pairs i = j are positive, and v_ij = 1. With
    `positive_ids`, pairs of equal positive ids are positive instead. Then a positive pair has
    v_ij = (1 / k_i + 1 / k'_j) / 2, with k_i positives in row i and k'_j in column j; other pairs
    have v_ij = 1.

    Parameters
    ----------
    image, text : array_like [N, D]
        Row i of one belongs to row i of the other. With `positive_ids`, texts may have another
        number of rows.
    scale : float
        1 / temperature; the paper starts it at 10.
    bias : float
        Added to every logit; the paper starts it at -10, since most pairs do not match.
    ids : array_like [N] or [N, C], or tuple (image ids [N], text ids [N]), optional
        Image i and text j of equal id, i != j, are excluded: they contribute 0.
    groups : array_like [N], or tuple (image groups [N], text groups [N]), optional
        Image i and text j of different groups, i != j, are excluded.
    positive_ids : array_like [N], or tuple (of images [M], of texts [N]), optional
        Image i and text j of equal positive ids are positive; they are not excluded.
    normalize : bool
        Divide the rows of both by their L2 norms first. SigLIP does.
    weights : array_like [N], optional
        Upstream gradient of each row's loss; 1/N by default.

    Returns
    -------
    Reference
        With `grads` for ``image``, ``text``, ``scale`` and ``bias``; `lse` is None.

    Notes
    -----
    ``-log sigmoid(a) = softplus(-a)``, whose derivative in a is ``-sigmoid(-a)``. With
    ``a = t_ij * (x_ij + bias)``, of slope t_ij in x_ij::

        dX_ij = -weights_i * v_ij * t_ij * sigmoid(-t_ij * (x_ij + bias))

    and 0 at excluded pairs. From there, as the logits are bilinear in the features and linear in
    the scale, and the bias is added to each::

        dimage = scale * dX text        dtext = scale * dX' image       [N, D]
        dscale = sum_ij dX_ij * <image_i, text_j>
        dbias = sum_ij dX_ij

    With `normalize`, both feature gradients go through `normalize_backward`. Every term of the loss
    is positive, and accurate if it is near 0 (softplus is a log1p there, and 1 - sigmoid(a) is
    computed as sigmoid(-a)), so the sum is accurate too.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer. Sigmoid loss for language image pre-training. ICCV 2023.
    arXiv:2303.15343, algorithm 1.
    """
    # u, v: features of images and texts; w: weights of rows; a_ij = t_ij (x_ij + bias)
    u, v = common.as_features(image), common.as_features(text)
    if normalize:
        u, u_norm = common.normalize(u)
        v, v_norm = common.normalize(v)
    positive = np.eye(len(u), dtype=np.bool_)
    w = common.row_weights(weights, positive)
    pair_weights = np.ones(1)
    if positive_ids is not None:
        positive = common.duplicates(positive_ids, np.zeros((len(u), len(v)), np.bool_))
        row_counts, column_counts = (np.maximum(1, positive.sum(axis=axis)) for axis in (1, 0))
        mean_of_shares = (1 / row_counts[:, None] + 1 / column_counts) / 2
        pair_weights = np.where(positive, mean_of_shares, 1.0)
    excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive)
    t = np.where(positive, 1.0, -1.0)

    dot = u @ v.T
    a = t * (scale * dot + bias)
    losses = np.sum(np.where(excluded, 0.0, pair_weights * common.softplus(-a)), axis=1)

    dx = np.where(excluded, 0.0, -w[:, None] * pair_weights * t * common.sigmoid(-a))
    du, dv = scale * (dx @ v), scale * (dx.T @ u)
    if normalize:
        du = common.normalize_backward(du, u, u_norm)
        dv = common.normalize_backward(dv, v, v_norm)
    grads: Gradients = {
        "image": du,
        "text": dv,
        "scale": float(np.sum(dx * dot)),
        "bias": float(np.sum(dx)),
    }
    return Reference(losses, float(w @ losses), grads, None)
