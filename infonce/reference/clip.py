"""CLIP: each image picks its text and each text its image."""

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import Gradients, Ids, Reference


@common.silent
def clip(
    image: ArrayLike,
    text: ArrayLike,
    *,
    scale: float,
    ids: Ids | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
) -> Reference:
    """Symmetric contrastive loss of CLIP, with its gradients.

    ::

        x_ij = scale * <image_i, text_j>
        r_i = log sum_j exp(x_ij)        row: image i against all texts
        c_j = log sum_i exp(x_ij)        column: text j against all images
        loss_i = ((r_i - x_ii) + (c_i - x_ii)) / 2
        loss = sum_i weights_i * loss_i

    where the sums leave out the excluded pairs.

    Parameters
    ----------
    image, text : array_like [N, D]
        Row i of one belongs to row i of the other.
    scale : float
        1 / temperature.
    ids : array_like [N], or tuple (image ids [N], text ids [N]), optional
        Image i and text j of equal id, i != j, are excluded from row i and from column j.
    normalize : bool
        Divide the rows of both by their L2 norms first. CLIP does.
    weights : array_like [N], optional
        Upstream gradient of each pair's loss; 1/N by default.

    Returns
    -------
    Reference
        With `grads` for ``image``, ``text`` and ``scale``; `lse` is the pair (r, c).

    Notes
    -----
    x_ij takes part in row i, whose loss has weight weights_i / 2, and in column j, whose loss has
    weight weights_j / 2. Each is a softmax cross-entropy::

        dX_ij = weights_i * (exp(x_ij - r_i) - [i = j]) / 2
              + weights_j * (exp(x_ij - c_j) - [i = j]) / 2

    and 0 at excluded pairs. From there, as the logits are bilinear in the features and linear in
    the scale::

        dimage = scale * dX text        dtext = scale * dX' image       [N, D]
        dscale = sum_ij dX_ij * <image_i, text_j>

    With `normalize`, both go on through `normalize_backward`. How the loss keeps its accuracy
    near 0: see `common.softmax_loss`, used once on X and once on its transpose.

    References
    ----------
    Radford et al. Learning transferable visual models from natural language supervision. ICML
    2021. arXiv:2103.00020, figure 3.
    """
    u, v = common.as_features(image), common.as_features(text)
    if normalize:
        u, u_norm = common.normalize(u)
        v, v_norm = common.normalize(v)
    w = common.row_weights(weights, len(u))
    positive = np.eye(len(u), dtype=np.bool_)
    excluded = common.duplicates(ids, positive)

    dot = u @ v.T
    logits = scale * dot
    row_losses, r, row_slope = common.softmax_loss(logits, positive, excluded)
    column_losses, c, column_slope = common.softmax_loss(logits.T, positive, excluded.T)
    losses = (row_losses + column_losses) / 2

    dx = (w[:, None] * row_slope + (w[:, None] * column_slope).T) / 2
    du, dv = scale * (dx @ v), scale * (dx.T @ u)
    if normalize:
        du = common.normalize_backward(du, u, u_norm)
        dv = common.normalize_backward(dv, v, v_norm)
    grads: Gradients = {"image": du, "text": dv, "scale": float(np.sum(dx * dot))}
    return Reference(losses, float(w @ losses), grads, (r, c))
