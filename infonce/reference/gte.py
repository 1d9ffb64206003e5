"""GTE: one softmax for each pair of a query and a key, over all queries and keys."""

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from . import common
from .common import Gradients, Guide, Reference, Softmax


@common.silent
def gte(
    query: ArrayLike,
    key: ArrayLike,
    *,
    scale: float,
    ids: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    normalize: bool = False,
    weights: ArrayLike | None = None,
    guide: Guide | None = None,
    **options: Unpack[Softmax],
) -> Reference:
    """Contrastive loss of GTE, whose denominator joins four comparisons, with its gradients.

    ::

        loss_i = log Z_i - x(q_i, k_i)            x(a, b) = scale * <a, b>
        Z_i = exp x(q_i, k_i) + sum_{j != i} (
            exp x(q_i, k_j) + exp x(q_j, k_i) + exp x(q_i, q_j) + exp x(k_i, k_j) )
        loss = sum_i weights_i * loss_i

    where the sum over j leaves out the excluded pairs.

    Parameters
    ----------
    query, key : array_like [B, D]
        Row i of one belongs to row i of the other.
    scale : float
        1 / temperature.
    ids : array_like [B] or [B, C], optional
        Pairs i and j of equal id are excluded as each other's negatives, in all four comparisons.
    groups : array_like [B], optional
        Pairs i and j of different groups are excluded as each other's negatives.
    normalize : bool
        Divide the rows of both by their L2 norms first.
    weights : array_like [B], optional
        Upstream gradient of each pair's loss; 1/B by default.
    guide : tuple of array_like (query guide [B, E], key guide [B, E]), optional
        Features of another model, the guide: its products exclude likely positives by
        `guide_margin`, as `common.softmax_loss` defines it. They get no gradient; `normalize`
        normalises them too.
    **options
        `margin`, `decoupled`, `label_smoothing`, `hardness`, `false_negative_margin` and
        `guide_margin`, as `common.softmax_loss` defines them.

    Returns
    -------
    Reference
        With `grads` for ``query``, ``key`` and ``scale``, and `lse` of the pairs.

    Notes
    -----
    Let z [2B, D] be all queries, followed by all keys, and X = scale * z z' their logits, as in
    NT-Xent. Z_i is the sum of exp over rows i and i + B of X, without the diagonal, and with the
    positive once. So the loss of pair i is the softmax cross-entropy of these two rows side by
    side, 4B logits. With G [2B, 2B] the derivatives of the loss with respect to X::

        dz = scale * (G + G') z        [2B, D]
        dscale = sum_ij G_ij * <z_i, z_j>

    With `normalize`, dz goes through `normalize_backward`. How the loss keeps its accuracy near
    0: see `common.softmax_loss`.

    References
    ----------
    Li, Zhang, Zhang, Long, Xie, Zhang. Towards general text embeddings with multi-stage contrastive
    learning. 2023. arXiv:2308.03281, equation 4.

    Zhang et al. Qwen3 embedding. 2025. arXiv:2506.05176, equation 1 (with a
    `false_negative_margin` of 0.1).
    """
    z = np.concatenate([common.as_features(query), common.as_features(key)])
    if normalize:
        z, norm = common.normalize(z)
    rows = len(z)
    pairs = rows // 2
    row = np.arange(rows)
    pair_ids = np.asarray(row[:pairs] if ids is None else ids)[row % pairs]
    pair_groups = np.asarray(row[:pairs] * 0 if groups is None else groups)[row % pairs]

    def side_by_side(x: Any) -> Any:
        """Rows i and i + B of a matrix [2B, 2B] in one row: [B, 4B]."""
        return np.concatenate([x[:pairs], x[pairs:]], axis=1)

    # Key i is the positive of query i, in row i. Row i + B has the same pair, which is left out
    # there, because its ids are equal: the pair counts once
    is_positive = row == row[:, None] + pairs
    positive = side_by_side(is_positive)
    left_out = common.equal_ids(pair_ids, pair_ids) | (pair_groups[:, None] != pair_groups)
    excluded = side_by_side(left_out & ~is_positive)
    w = common.row_weights(weights, positive)

    dot = z @ z.T
    guide_rows = None if guide is None else np.concatenate([np.asarray(g) for g in guide])
    guide_pair = None if guide_rows is None else (guide_rows, guide_rows)
    guide_dot = common.guide_products(guide_pair, normalize)
    losses, lse, slope = common.softmax_loss(
        side_by_side(dot),
        positive,
        excluded,
        scale=scale,
        guide_dot=None if guide_dot is None else side_by_side(guide_dot),
        **options,
    )

    slope *= w[:, None]  # [B, 4B]; G again has rows i and i + B one below the other
    g = np.concatenate([slope[:, :rows], slope[:, rows:]])
    dz = scale * ((g + g.T) @ z)
    if normalize:
        dz = common.normalize_backward(dz, z, norm)
    dscale = float(np.sum(slope * common.scale_slope(side_by_side(dot), positive, **options)))
    grads: Gradients = {"query": dz[:pairs], "key": dz[pairs:], "scale": dscale}
    return Reference(losses, float(w @ losses), grads, lse)
