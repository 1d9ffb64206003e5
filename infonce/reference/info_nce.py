"""InfoNCE: a softmax over the keys of each query."""

from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import BiasedSoftmax, Gradients, Guide, Ids, Reference


@common.silent
def info_nce(
    query: ArrayLike,
    key: ArrayLike,
    *,
    scale: float,
    labels: ArrayLike | None = None,
    label_weights: ArrayLike | None = None,
    ids: Ids | None = None,
    groups: Ids | None = None,
    positive_ids: Ids | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    guide: Guide | None = None,
    own: ArrayLike | None = None,
    own_mask: ArrayLike | None = None,
    in_batch: bool = True,
    **options: Unpack[BiasedSoftmax],
) -> Reference:
    """InfoNCE loss of queries against keys, with its gradients.

    ::

        x_ij = scale * <q_i, k_j>
        loss_i = log sum_j exp(x_ij) - x_iy        y = labels_i
        loss = sum_i weights_i * loss_i

    where the sum over j leaves out the excluded pairs. With several positives, x_iy is the mean of
    their logits, weighted by `label_weights`.

    Parameters
    ----------
    query : array_like [M, D]
    key : array_like [N, D]
        Keys that are no query's positive are extra negatives, such as a MoCo queue.
    scale : float
        1 / temperature.
    labels : array_like of int [M] or [M, P], optional
        Indices of each query's positive keys: a set, so an index that is given twice counts once. A
        negative index stands for none. Default: i for query i, which needs N >= M.
    label_weights : array_like [M, P], optional
        Weight of each of `labels` [M, P], in which a key comes once in a row: at least 0. A label
        of weight 0 is none. Weights of negative labels are not read.
    ids : array_like [N] or [N, C], or tuple (query ids [M], key ids [N]), optional
        Query i and key j of equal id are excluded, unless j is a positive of i. One array
        serves both sides when M = N.
    groups : array_like [N], or tuple (query groups [M], key groups [N]), optional
        Query i and key j of different groups are excluded, unless j is a positive of i.
    positive_ids : array_like [N], or tuple (of queries [M], of keys [N]), optional
        Queries and keys of equal numbers are positives, in place of `labels`.
    normalize : bool
        Divide the rows of `query` and `key` by their L2 norms first.
    weights : array_like [M], optional
        Upstream gradient of each row's loss; by default 1 / the number of rows that have a
        positive, as in a mean.
    guide : tuple of array_like (query guide [M, E], key guide [N, E]), optional
        Features of another model, the guide: its products exclude likely positives by
        `guide_margin`, as `common.softmax_loss` defines it, but no own negatives. They get no
        gradient; `normalize` normalises them too.
    own : array_like [M, K, D], optional
        Own negatives, K for each row: exp(scale * <q_i, own_ik>) is one more term of the sum of
        row i. They have no `key_bias`.
    own_mask : array_like of bool [M, K], optional
        Which of `own` count; all by default.
    in_batch : bool
        False: row i is compared only with its positives and its own negatives.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `key_bias`, `false_negative_margin`
        and `guide_margin`, as `common.softmax_loss` defines them.

    Returns
    -------
    Reference
        With `grads` for ``query``, ``key``, ``scale`` and, if given, ``own``; and `lse` of the
        rows.

    Notes
    -----
    The gradient with respect to the logits is the gradient of a softmax cross-entropy::

        dX_ij = dloss / dx_ij = weights_i * (p_ij - [j = y])    p_ij = exp(x_ij - lse_i)
                              = weights_i * (p_ij - t_ij)       at a set of positives

    with ``t_ij = 1 / |P|``, or the weight of the label over the sum of the weights of P, and 0 at
    excluded pairs. Each x_ij is bilinear in q_i and k_j and linear in the scale, so the
    chain rule gives::

        dq_i = sum_j dX_ij * scale * k_j        dQ = scale * dX K       [M, D]
        dk_j = sum_i dX_ij * scale * q_i        dK = scale * dX' Q      [N, D]
        dscale = sum_ij dX_ij * <q_i, k_j>

    For dscale, dot products are summed, not logits / scale: an excluded pair contributes
    0 * product, never 0 * inf. With `normalize`, dQ and dK are gradients of the unit rows, and go
    through `normalize_backward`. How the loss keeps its accuracy near 0: see `common.softmax_loss`.

    References
    ----------
    van den Oord, Li, Vinyals. Representation learning with contrastive predictive coding. 2018.
    arXiv:1807.03748, equation 4.

    He, Fan, Wu, Xie, Girshick. Momentum contrast for unsupervised visual representation
    learning. CVPR 2020. arXiv:1911.05722, equation 1 (the queue of extra negatives).
    """
    q, k = common.as_features(query), common.as_features(key)
    if normalize:
        q, q_norm = common.normalize(q)
        k, k_norm = common.normalize(k)
    rows, columns = len(q), len(k)
    positive, target = common.paired(rows, columns, positive_ids), None
    if labels is not None:
        at_labels = np.arange(columns) == np.asarray(labels).reshape(rows, -1, 1)  # [M, P, N]
        positive = at_labels.any(axis=1)
    if label_weights is not None:
        counts = np.any(at_labels, axis=2)  # no weight of a negative label, which may be NaN
        weight_of_label = np.where(counts, np.asarray(label_weights, np.float64), 0.0)
        target = np.einsum("mp,mpn->mn", weight_of_label, at_labels)
        positive = target > 0
        sums = target.sum(axis=1, keepdims=True)
        target = target / np.where(sums == 0, 1.0, sums)
    w = common.row_weights(weights, positive)
    excluded = common.duplicates(ids, positive) | common.other_groups(groups, positive)

    if not in_batch:
        excluded = ~positive
    dot = q @ k.T
    guide_dot = common.guide_products(guide, normalize)
    if own is not None:
        # K more columns: column N + k of row i is its own negative k. A row of ones replaces own
        # negatives that do not count, whose contents may be NaN
        o = common.as_features(own)
        count = o.shape[1]
        own_included = (
            np.ones((rows, count), np.bool_) if own_mask is None else np.asarray(own_mask)
        )
        o = np.where(own_included[:, :, None], o, 1.0)
        if normalize:
            unit, o_norm = common.normalize(o.reshape(-1, o.shape[2]))
            o = unit.reshape(o.shape)
        dot = np.hstack([dot, np.einsum("id,ikd->ik", q, o)])
        positive = np.hstack([positive, np.zeros((rows, count), np.bool_)])
        excluded = np.hstack([excluded, ~own_included])
        if target is not None:
            target = np.hstack([target, np.zeros((rows, count))])
        if guide_dot is not None:  # the guide leaves out no own negative
            guide_dot = np.hstack([guide_dot, np.full((rows, count), np.finfo(float).min)])
        if options.get("key_bias") is not None:
            options["key_bias"] = np.append(np.asarray(options["key_bias"]), np.zeros(count))
    losses, lse, slope = common.softmax_loss(
        dot, positive, excluded, scale=scale, target=target, guide_dot=guide_dot, **options
    )

    dx = w[:, None] * slope
    dq, dk = scale * (dx[:, :columns] @ k), scale * (dx[:, :columns].T @ q)
    if own is not None:
        dq = dq + scale * np.einsum("ik,ikd->id", dx[:, columns:], o)
        do = scale * dx[:, columns:, None] * q[:, None, :]
        if normalize:
            flat_do = common.normalize_backward(do.reshape(unit.shape), unit, o_norm)
            do = flat_do.reshape(do.shape)
    if normalize:
        dq = common.normalize_backward(dq, q, q_norm)
        dk = common.normalize_backward(dk, k, k_norm)
    dscale = float(np.sum(dx * common.scale_slope(dot, positive, **options)))
    grads: Gradients = {"query": dq, "key": dk, "scale": dscale}
    if own is not None:
        grads["own"] = do
    return Reference(losses, float(w @ losses), grads, lse)
