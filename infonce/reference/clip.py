"""CLIP: a softmax over the texts of each image, and one over the images of each text."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import BiasedSoftmax, Gradients, Guide, Ids, Reference


@common.silent
def clip(
    image: ArrayLike,
    text: ArrayLike,
    *,
    scale: float,
    ids: Ids | None = None,
    groups: Ids | None = None,
    positive_ids: ArrayLike | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    guide: Guide | None = None,
    **options: Unpack[BiasedSoftmax],
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
    ids : array_like [N] or [N, C], or tuple (image ids [N], text ids [N]), optional
        Image i and text j of equal id, i != j, are excluded from row i and from column j.
    groups : array_like [N], or tuple (image groups [N], text groups [N]), optional
        Image i and text j of different groups, i != j, are excluded from row i and column j.
    positive_ids : array_like [N], optional
        Images and texts of equal numbers are positives, and not only pairs i = j. Then x_ii is
        replaced by the mean of x_ij over the positives of row i, and of column i.
    normalize : bool
        Divide the rows of both by their L2 norms first. CLIP does.
    weights : array_like [N], optional
        Upstream gradient of each pair's loss; 1/N by default.
    guide : tuple of array_like (image guide [N, E], text guide [N, E]), optional
        Features of another model, the guide: its products exclude likely positives by
        `guide_margin`, as `common.softmax_loss` defines it. They get no gradient; `normalize`
        normalises them too.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `key_bias`, `false_negative_margin`
        and `guide_margin`, as `common.softmax_loss` defines them, in both directions. `key_bias` is
        the bias of the texts, and only the softmax over texts has it.

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

    With `normalize`, both feature gradients go through `normalize_backward`. How the loss keeps its
    accuracy near 0: see `common.softmax_loss`, used once on X and once on its transpose.

    References
    ----------
    Radford et al. Learning transferable visual models from natural language supervision. ICML
    2021. arXiv:2103.00020, figure 3.
    """
    # u, v: features of images and texts; w: weights of rows; r, c: log-sum-exps of both directions
    u, v = common.as_features(image), common.as_features(text)
    if normalize:
        u, u_norm = common.normalize(u)
        v, v_norm = common.normalize(v)
    positive = common.paired(len(u), len(v), positive_ids)
    w = common.row_weights(weights, positive)
    excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive)

    dot = u @ v.T
    guide_dot = common.guide_products(guide, normalize)
    row_losses, r, row_slope = common.softmax_loss(
        dot, positive, excluded, scale=scale, guide_dot=guide_dot, **options
    )
    column_options: BiasedSoftmax = {**options, "key_bias": None}
    column_losses, c, column_slope = common.softmax_loss(
        dot.T,
        positive,
        excluded.T,
        scale=scale,
        guide_dot=None if guide_dot is None else guide_dot.T,
        **column_options,
    )
    losses = (row_losses + column_losses) / 2

    dx = (w[:, None] * row_slope + (w[:, None] * column_slope).T) / 2
    du, dv = scale * (dx @ v), scale * (dx.T @ u)
    if normalize:
        du = common.normalize_backward(du, u, u_norm)
        dv = common.normalize_backward(dv, v, v_norm)
    dscale = float(np.sum(dx * common.scale_slope(dot, positive, **options)))
    grads: Gradients = {"image": du, "text": dv, "scale": dscale}
    return Reference(losses, float(w @ losses), grads, (r, c))
