"""SupCon: rows of the same class are each other's positives."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import BiasedSoftmax, Gradients, Reference


@common.silent
def sup_con(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    scale: float,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    **options: Unpack[BiasedSoftmax],
) -> Reference:
    """Supervised contrastive loss, with its gradients.

    The positives P(i) of row i are the other rows of its class. A row is not compared with itself::

        x_ij = scale * <z_i, z_j>
        r_i = log sum_{j != i} exp(x_ij)
        loss_i = r_i - mean of x_ij over P(i)
        loss = sum_i weights_i * loss_i

    A row that is alone in its class has the loss 0; it remains a negative of the other rows.

    Parameters
    ----------
    features : array_like [N, D]
    labels : array_like of int [N]
        Class of each row. Rows of a negative label are of no class.
    scale : float
        1 / temperature.
    normalize : bool
        Divide the rows by their L2 norms first. The paper does.
    weights : array_like [N], optional
        Upstream gradient of each row's loss; by default 1 / the number of rows that have a
        positive, as in a mean.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `key_bias` and
        `false_negative_margin`, as `common.softmax_loss` defines them.

    Returns
    -------
    Reference
        With `grads` for ``features`` and ``scale``, and `lse` of the rows.

    Notes
    -----
    The mean over P(i) is outside of the logarithm: the paper's L_out. As for NT-Xent, with x_ij and
    x_ji as different variables::

        G_ij = weights_i * (p_ij - [j in P(i)] / |P(i)|)    p_ij = exp(x_ij - r_i), p_ii = 0
        dZ = scale * (G + G') Z                             [N, D]
        dscale = sum_ij G_ij * <z_i, z_j>

    With `normalize`, dZ goes through `normalize_backward`. With two rows in each class this is
    NT-Xent. How the loss keeps its accuracy near 0: see `common.softmax_loss`.

    References
    ----------
    Khosla, Teterwak, Wang, Sarna, Tian, Isola, Maschinot, Liu, Krishnan. Supervised contrastive
    learning. NeurIPS 2020. arXiv:2004.11362, equation 2.
    """
    z = common.as_features(features)
    if normalize:
        z, norm = common.normalize(z)
    y = np.asarray(labels)
    itself = np.eye(len(z), dtype=np.bool_)
    positive = (y[:, None] == y) & (y >= 0) & ~itself
    w = common.row_weights(weights, positive)

    dot = z @ z.T
    losses, lse, slope = common.softmax_loss(dot, positive, itself, scale=scale, **options)

    g = w[:, None] * slope
    dz = scale * ((g + g.T) @ z)
    if normalize:
        dz = common.normalize_backward(dz, z, norm)
    dscale = float(np.sum(g * common.scale_slope(dot, positive, **options)))
    grads: Gradients = {"features": dz, "scale": dscale}
    return Reference(losses, float(w @ losses), grads, lse)
