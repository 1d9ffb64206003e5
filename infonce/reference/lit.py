"""LiT: a softmax over the images of each text; the images get no gradient."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import BiasedSoftmax, Gradients, Guide, Ids, Reference


@common.silent
def lit(
    text: ArrayLike,
    image: ArrayLike,
    *,
    scale: float,
    ids: Ids | None = None,
    groups: Ids | None = None,
    positive_ids: Ids | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    guide: Guide | None = None,
    **options: Unpack[BiasedSoftmax],
) -> Reference:
    """Contrastive loss of texts against images of a frozen encoder, with its gradients.

    ::

        x_ij = scale * <text_i, image_j>
        loss_i = log sum_j exp(x_ij) - x_ii
        loss = sum_i weights_i * loss_i

    where the sum over j leaves out the excluded pairs. The image encoder is not trained, so the
    images get no gradient.

    Parameters
    ----------
    text, image : array_like [N, D]
        Row i of one belongs to row i of the other. With `positive_ids`, images may have another
        number of rows.
    scale : float
        1 / temperature.
    ids : array_like [N] or [N, C], or tuple (text ids [N], image ids [N]), optional
        Text i and image j of equal id, i != j, are excluded.
    groups : array_like [N], or tuple (text groups [N], image groups [N]), optional
        Text i and image j of different groups, i != j, are excluded.
    positive_ids : array_like [N], or tuple (of texts [M], of images [N]), optional
        Texts and images of equal numbers are positives, and M and N may differ. Then x_ii is
        replaced by the mean of x_ij over the positives of row i.
    normalize : bool
        Divide the rows of both by their L2 norms first.
    weights : array_like [N], optional
        Upstream gradient of each row's loss; 1/N by default.
    guide : tuple of array_like (text guide [N, E], image guide [N, E]), optional
        Features of another model, the guide: its products exclude likely positives by
        `guide_margin`, as `common.softmax_loss` defines it. They get no gradient; `normalize`
        normalises them too.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `key_bias`, `false_negative_margin`
        and `guide_margin`, as `common.softmax_loss` defines them.

    Returns
    -------
    Reference
        With `grads` for ``text`` and ``scale``, and None for ``image``; `lse` of the rows.

    Notes
    -----
    A softmax cross-entropy, row by row::

        dX_ij = weights_i * (p_ij - [i = j])        p_ij = exp(x_ij - lse_i)
        dtext = scale * dX image        [N, D]
        dscale = sum_ij dX_ij * <text_i, image_j>

    and dX is 0 at excluded pairs. With `normalize`, dtext goes through `normalize_backward`. How
    the loss keeps its accuracy near 0: see `common.softmax_loss`.

    References
    ----------
    Zhai, Wang, Mustafa, Steiner, Keysers, Kolesnikov, Beyer. LiT: zero-shot transfer with
    locked-image text tuning. CVPR 2022. arXiv:2111.07991. The paper trains the text encoder with
    both directions of CLIP's loss; this loss is the direction whose rows are the texts.
    """
    # t, v: features of texts and images; w: weights of rows
    t, v = common.as_features(text), common.as_features(image)
    if normalize:
        t, t_norm = common.normalize(t)
        v, _ = common.normalize(v)
    positive = common.paired(len(t), len(v), positive_ids)
    w = common.row_weights(weights, positive)
    excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive)

    dot = t @ v.T
    guide_dot = common.guide_products(guide, normalize)
    losses, lse, slope = common.softmax_loss(
        dot, positive, excluded, scale=scale, guide_dot=guide_dot, **options
    )

    dx = w[:, None] * slope
    dt = scale * (dx @ v)
    if normalize:
        dt = common.normalize_backward(dt, t, t_norm)
    dscale = float(np.sum(dx * common.scale_slope(dot, positive, **options)))
    grads: Gradients = {"text": dt, "image": None, "scale": dscale}
    return Reference(losses, float(w @ losses), grads, lse)
