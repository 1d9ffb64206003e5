"""The public functions: for each loss X a pair, `X_loss` and `X_loss_and_grad`.

`X_loss` returns the loss, `X_loss_and_grad` the loss, its gradients and the log-sum-exps. Their
keywords are in `spec.OPTIONS`; `docstrings.documented` adds them to help and signatures. All
functions call `dispatch`.
"""

from __future__ import annotations

from typing import Any, Unpack

from . import dispatch, spec
from .checks.keywords import with_own
from .checks.teacher import Teacher
from .docstrings import documented
from .result import Array, LossAndGrad
from .spec import GradOptions, LossOptions


@documented
def info_nce_loss(
    query: Array, key: Array, labels: Array | None = None, **options: Unpack[LossOptions]
) -> Array:
    """InfoNCE loss of queries, each of which has a positive among all keys.

    With logits ``x_ij = scale * <query_i, key_j>`` and the positive key y_i of query i,

    ``loss = mean_i ( log sum_j exp(x_ij) - x_{i, y_i} )``.

    Rows of `key` that are no query's positive are extra negatives (a MoCo queue, say).

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    labels : integer array [M] or [M, P], optional
        y_i, in [0, N). Default: y_i = i, which needs N >= M. [M, P]: up to P positives of a row,
        each key once; then x_{i, y_i} is the mean of their logits, by `label_weights` if given. A
        negative label is no positive. A row without a positive is left out of the mean: its loss
        and its gradient are 0.

    References
    ----------
    van den Oord, Li, Vinyals: Representation Learning with Contrastive Predictive Coding, 2018.
    """
    kind, arrays, others = with_own(spec.INFO_NCE, (query, key), options)
    return dispatch.loss(kind, arrays, labels, None, others)


@documented
def info_nce_loss_and_grad(
    query: Array, key: Array, labels: Array | None = None, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """InfoNCE loss of queries and keys, with gradients for both and the scale.

    With P the softmax of the logits x over keys and Y the one-hot positives,
    ``dx = (P - Y) / M``, ``dquery = scale dx key``, ``dkey = scale dx' query``,
    ``dscale = sum_ij dx_ij <query_i, key_j>``. See `info_nce_loss`.

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    labels : integer array [M] or [M, P], optional
        The positive key of each query, in [0, N), or several; a negative label is no positive.
        Default: key i for query i. Y_ij = 1 / (number of positives of row i) at its positives, or
        their `label_weights` over the sum of these.

    References
    ----------
    van den Oord, Li, Vinyals: Representation Learning with Contrastive Predictive Coding, 2018.
    """
    kind, arrays, others = with_own(spec.INFO_NCE, (query, key), options)
    return dispatch.loss_and_grad(kind, arrays, labels, None, others)


@documented
def nt_xent_loss(features: Array, **options: Unpack[LossOptions]) -> Array:
    """NT-Xent loss of SimCLR, for two views of each of B samples.

    Rows i and i + B are the two views of sample i. With ``x_ij = scale * <z_i, z_j>``, p(i) the
    other view of row i, and i = j left out,

    ``loss = mean_i ( log sum_{j != i} exp(x_ij) - x_{i, p(i)} )``.

    SimCLR normalises rows: pass unit rows or ``normalize=True``.

    Parameters
    ----------
    features : array [2B, D]

    References
    ----------
    Chen, Kornblith, Norouzi, Hinton: A Simple Framework for Contrastive Learning of Visual
    Representations, 2020.
    """
    return dispatch.loss(spec.NT_XENT, (features,), None, None, options)


@documented
def nt_xent_loss_and_grad(features: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """NT-Xent loss of SimCLR, with gradients for the features and the scale.

    With P the softmax over j != i, Y the one-hot positives and ``G = (P - Y) / 2B``,
    ``dfeatures = scale (G + G') features``, ``dscale = sum_ij G_ij <z_i, z_j>``. "tiled"
    computes one triangle of the symmetric logits. See `nt_xent_loss`.

    Parameters
    ----------
    features : array [2B, D]

    References
    ----------
    Chen, Kornblith, Norouzi, Hinton: A Simple Framework for Contrastive Learning of Visual
    Representations, 2020.
    """
    return dispatch.loss_and_grad(spec.NT_XENT, (features,), None, None, options)


@documented
def clip_loss(image: Array, text: Array, **options: Unpack[LossOptions]) -> Array:
    """CLIP loss of image-text pairs: images pick their texts, and texts their images.

    With ``x_ij = scale * <image_i, text_j>``,

    ``loss = ( mean_i (log sum_j exp(x_ij) - x_ii) + mean_j (log sum_i exp(x_ij) - x_jj) ) / 2``.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """
    return dispatch.loss(spec.CLIP, (image, text), None, None, options)


@documented
def clip_loss_and_grad(image: Array, text: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """CLIP loss of image-text pairs, with gradients for both encoders and the scale.

    With R and C the softmax over rows and over columns, ``dx = ((R + C) / 2 - I) / N``,
    ``dimage = scale dx text``, ``dtext = scale dx' image``,
    ``dscale = sum_ij dx_ij <image_i, text_j>``. See `clip_loss`.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """
    return dispatch.loss_and_grad(spec.CLIP, (image, text), None, None, options)


@documented
def lit_loss(text: Array, image: Array, **options: Unpack[LossOptions]) -> Array:
    """LiT loss of image-text pairs, whose image encoder is frozen.

    With ``x_ij = scale * <text_i, image_j>``, ``loss = mean_i (log sum_j exp(x_ij) - x_ii)``.

    Parameters
    ----------
    text : array [N, D]
    image : array [N, D]

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """
    return dispatch.loss(spec.LIT, (text, image), None, None, options)


@documented
def lit_loss_and_grad(text: Array, image: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """LiT loss of image-text pairs, with gradients for the texts and the scale.

    With P the softmax of the logits over images, ``dtext = scale (P - I) image / N``,
    ``dscale = sum_ij (P - I)_ij <text_i, image_j> / N``; `grads.image` is None. See `lit_loss`.

    Parameters
    ----------
    text : array [N, D]
    image : array [N, D]

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """
    return dispatch.loss_and_grad(spec.LIT, (text, image), None, None, options)


@documented
def siglip_loss(
    image: Array, text: Array, bias: Any = None, **options: Unpack[LossOptions]
) -> Array:
    """SigLIP loss of images and texts: a sigmoid judges each pair on its own.

    With ``z_ij = scale * <image_i, text_j> + bias``, t_ij = 1 for i = j and -1 otherwise,

    ``loss = -(1/N) sum_ij log sigmoid(t_ij z_ij)``.

    With `positive_ids`, t_ij = 1 for pairs of equal ids, and the terms of these pairs have weights.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]
        With `positive_ids`, of any number of rows.
    bias : float or 0-d array, default -10
        Added to every logit. `scale` is 10 by default.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    return dispatch.loss(spec.SIGLIP, (image, text), None, bias, options)


@documented
def siglip_loss_and_grad(
    image: Array, text: Array, bias: Any = None, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """SigLIP loss, with gradients for both encoders, the scale and the bias.

    ``dz_ij = -t_ij sigmoid(-t_ij z_ij) / N``, ``dimage = scale dz text``,
    ``dtext = scale dz' image``, ``dscale = sum_ij dz_ij <image_i, text_j>``,
    ``dbias = sum_ij dz_ij``. See `siglip_loss`.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]
        With `positive_ids`, of any number of rows.
    bias : float or 0-d array, default -10
        Added to every logit. `scale` is 10 by default.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    return dispatch.loss_and_grad(spec.SIGLIP, (image, text), None, bias, options)


@documented
def sup_con_loss(features: Array, labels: Array, **options: Unpack[LossOptions]) -> Array:
    """Supervised contrastive loss: the positives of a row are all others of its class.

    With ``x_ij = scale * <z_i, z_j>``, P(i) the other rows of row i's class, and i = j left out,

    ``loss = mean_i ( log sum_{j != i} exp(x_ij) - mean_{p in P(i)} x_ip )``.

    A row that is alone in its class is left out of the mean: its loss is 0. It remains a negative
    of the other rows. The paper normalises rows: pass unit rows or ``normalize=True``.

    Parameters
    ----------
    features : array [N, D]
    labels : integer array [N]
        Class of each row, of any integer dtype. Rows of a negative label are of no class.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020 (L_out, equation 2).
    """
    return dispatch.loss(spec.SUP_CON, (features,), labels, None, options)


@documented
def sup_con_loss_and_grad(
    features: Array, labels: Array, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """Supervised contrastive loss, with gradients for the features and the scale.

    With S the softmax over j != i, ``Y_ij = 1 / |P(i)|`` for j in P(i), and ``G = (S - Y) / R`` in
    the R rows that have a positive (0 in other rows), ``dfeatures = scale (G + G') features``. The
    terms of Y are sums over classes, so no matrix of positives is stored. See `sup_con_loss`.

    Parameters
    ----------
    features : array [N, D]
    labels : integer array [N]
        Class of each row, of any integer dtype. Rows of a negative label are of no class.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020 (L_out, equation 2).
    """
    return dispatch.loss_and_grad(spec.SUP_CON, (features,), labels, None, options)


@documented
def gte_loss(query: Array, key: Array, **options: Unpack[LossOptions]) -> Array:
    """GTE loss of text pairs: all other queries and keys are negatives of each pair.

    With ``x(a, b) = scale * <a, b>``, ``loss = mean_i ( log Z_i - x(q_i, k_i) )``, where

    ``Z_i = exp x(q_i, k_i) + sum_{j != i} ( exp x(q_i, k_j) + exp x(q_j, k_i) + exp x(q_i, q_j)
    + exp x(k_i, k_j) )``.

    Parameters
    ----------
    query : array [B, D]
    key : array [B, D]

    References
    ----------
    Li et al.: Towards General Text Embeddings with Multi-stage Contrastive Learning, 2023.
    """
    return dispatch.loss(spec.GTE, (query, key), None, None, options)


@documented
def gte_loss_and_grad(query: Array, key: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """GTE loss of text pairs, with gradients for queries, keys and the scale.

    Queries and keys one below the other are 2B rows z, whose logits are those of NT-Xent; rows i
    and i + B have one softmax. With G its derivative, ``dz = scale (G + G') z``. See `gte_loss`.

    Parameters
    ----------
    query : array [B, D]
    key : array [B, D]

    References
    ----------
    Li et al.: Towards General Text Embeddings with Multi-stage Contrastive Learning, 2023.
    """
    return dispatch.loss_and_grad(spec.GTE, (query, key), None, None, options)


@documented
def distill_loss(
    query: Array, key: Array, teacher_query: Array, teacher_key: Array, *,
    teacher_temperature: Any = None, teacher_scale: Any = None, two_sided: bool = True,
    **options: Unpack[LossOptions],
) -> Array:  # fmt: skip
    """Distillation loss: cross-entropy with the softmax of a teacher's logits.

    With logits ``x_ij = scale * <query_i, key_j>`` and p their softmax over keys, p^T the softmax
    of ``teacher_scale * <teacher_query_i, teacher_key_j>``,

    ``loss = - mean_i sum_j p^T_ij log p_ij``.

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    teacher_query : array [M, E]
    teacher_key : array [N, E]
        Features of the same samples by the teacher, of any width. They get no gradient;
        ``normalize=True`` normalises them too.
    teacher_temperature, teacher_scale : float or array of one number, optional
        At most one of them. Without both, the teacher has the student's scale.
    two_sided : bool, default True
        True: half of this loss, plus half of the same loss with queries and keys exchanged, as in
        CLIP; it needs M = N. False: this loss.

    References
    ----------
    Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015; Yang et al.: CLIP-KD,
    2024.
    """
    teacher = Teacher(teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided)
    return dispatch.loss(teacher.loss, (query, key), None, None, options, teacher)


@documented
def distill_loss_and_grad(
    query: Array, key: Array, teacher_query: Array, teacher_key: Array, *,
    teacher_temperature: Any = None, teacher_scale: Any = None, two_sided: bool = True,
    **options: Unpack[GradOptions],
) -> LossAndGrad:  # fmt: skip
    """Distillation loss, with gradients for queries, keys and the scale.

    ``dx = (p - p^T) / M`` (`two_sided`: half of it, plus half of the same for columns),
    ``dquery = scale dx key``, ``dkey = scale dx' query``,
    ``dscale = sum_ij dx_ij <query_i, key_j>``. See `distill_loss`.

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    teacher_query : array [M, E]
    teacher_key : array [N, E]
    teacher_temperature, teacher_scale, two_sided
        As in `distill_loss`.

    References
    ----------
    Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015; Yang et al.: CLIP-KD,
    2024.
    """
    teacher = Teacher(teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided)
    return dispatch.loss_and_grad(teacher.loss, (query, key), None, None, options, teacher=teacher)
