"""NT-Xent: rows are two views of each sample; a softmax over all other rows of each row."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import BiasedSoftmax, Gradients, Reference


@common.silent
def nt_xent(
    features: ArrayLike,
    *,
    scale: float,
    ids: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    guide: ArrayLike | None = None,
    **options: Unpack[BiasedSoftmax],
) -> Reference:
    """Normalized temperature-scaled cross-entropy of SimCLR, with its gradients.

    The first B rows are one view of B samples, the last B rows the other view in the same order;
    the positive of row i is p(i) = i + B or i - B. A row is not compared with itself::

        x_ij = scale * <z_i, z_j>
        loss_i = log sum_{j != i} exp(x_ij) - x_ip(i)
        loss = sum_i weights_i * loss_i

    where the sum over j leaves out the excluded pairs too.

    Parameters
    ----------
    features : array_like [2B, D]
    scale : float
        1 / temperature.
    ids : array_like [2B] or [2B, C], optional
        Rows of equal id are excluded as each other's negatives; the positive stays.
    groups : array_like [2B], optional
        Rows of different groups are excluded as each other's negatives; the positive stays.
    normalize : bool
        Divide the rows by their L2 norms first. SimCLR does.
    weights : array_like [2B], optional
        Upstream gradient of each row's loss; 1/2B by default.
    guide : array_like [2B, E], optional
        Features of another model, the guide: its products exclude likely positives by
        `guide_margin`, as `common.softmax_loss` defines it. They get no gradient; `normalize`
        normalises them too.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `key_bias`, `false_negative_margin`
        and `guide_margin`, as `common.softmax_loss` defines them.

    Returns
    -------
    Reference
        With `grads` for ``features`` and ``scale``, and `lse` of the rows.

    Notes
    -----
    The gradient with respect to the logits, with x_ij and x_ji as different variables, is::

        G_ij = weights_i * (p_ij - [j = p(i)])    p_ij = exp(x_ij - lse_i), p_ii = 0

    Row z_i is a query in row i of X, where it meets z_j with slope G_ij, and a key in column i,
    where it meets z_j with slope G_ji::

        dz_i = scale * sum_j (G_ij + G_ji) z_j        dZ = scale * (G + G') Z       [2B, D]
        dscale = sum_ij G_ij * <z_i, z_j>

    The diagonal, where z_i would meet itself, is excluded and has slope 0. With `normalize`, dZ
    goes through `normalize_backward`. How the loss keeps its accuracy near 0: see
    `common.softmax_loss`.

    References
    ----------
    Chen, Kornblith, Norouzi, Hinton. A simple framework for contrastive learning of visual
    representations. ICML 2020. arXiv:2002.05709, equation 1. There the two views are
    interleaved, 2k - 1 and 2k; the loss is the same.
    """
    z = common.as_features(features)
    if normalize:
        z, norm = common.normalize(z)
    rows = len(z)
    row = np.arange(rows)
    partner = (row + rows // 2) % rows
    positive = row == partner[:, None]
    w = common.row_weights(weights, positive)
    itself = row == row[:, None]
    excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive) | itself

    dot = z @ z.T
    pair = None if guide is None else (guide, guide)
    guide_dot = common.guide_products(pair, normalize)
    losses, lse, slope = common.softmax_loss(
        dot, positive, excluded, scale=scale, guide_dot=guide_dot, **options
    )

    g = w[:, None] * slope
    dz = scale * ((g + g.T) @ z)
    if normalize:
        dz = common.normalize_backward(dz, z, norm)
    dscale = float(np.sum(g * common.scale_slope(dot, positive, **options)))
    grads: Gradients = {"features": dz, "scale": dscale}
    return Reference(losses, float(w @ losses), grads, lse)
