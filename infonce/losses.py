"""The losses: one documented pair of functions each.

`X_loss` returns the loss, `X_loss_and_grad` the loss, its gradients and the log-sum-exps. Both take
the same keywords, which `infonce.spec` lists and the help of every function prints.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, get_type_hints

from . import dispatch, spec
from .result import Array, LossAndGrad
from .spec import COMPILED, LOSSES, OPTIONS, GradOptions, LossOptions

ERRORS_DOC = """
TypeError, ValueError
    Before any work, naming the argument, what came and what was expected. Masked arrays are
    refused; other subclasses of NumPy's arrays are taken as arrays.
MemoryError
    The logits of ``method="naive"`` do not fit: use "tiled"; or the workspace does not: use less.
"""


_F = TypeVar("_F", bound=Callable[..., Any])


@functools.cache
def _paragraph(name: str) -> str:
    """What the help says of an option."""
    option = OPTIONS[name]
    return f"{name} : {option.type}\n{textwrap.indent(inspect.cleandoc(option.doc), '    ')}"


def _documented(function: _F) -> _F:
    """Append the common keywords to the docstring, and spell them out in the signature."""
    with_grad = function.__name__.endswith("_and_grad")
    options = get_type_hints(GradOptions if with_grad else LossOptions)
    sections = [("Other Parameters", "\n".join(_paragraph(name) for name in options))]
    returns = (
        "LossAndGrad"
        if with_grad
        else (
            'array\n    0-d, or [M] with ``reduction="none"``; of the library of the features;\n'
            "    float64 for float64 features, else float32."
        )
    )
    sections += [("Returns", returns), ("Raises", ERRORS_DOC)]
    doc = inspect.cleandoc(function.__doc__ or "")
    for title, body in sections:
        body = body.strip("\n")
        doc += f"\n\n{title}\n{'-' * len(title)}\n{body}"
    function.__doc__ = doc + "\n"

    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = {p.name for p in parameters}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default)
        for name in options
        if name not in named
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def adapted(like: Callable[..., Any], call: str) -> Callable[[_F], _F]:
    """Document an adapter's function as the loss it stands for: that one's equation and source, and
    how it is called, `call`, where ``{loss}`` and ``{arguments}`` are the loss's and ``{options}``
    those of compiled programs."""
    equation, _, rest = inspect.cleandoc(like.__doc__ or "").partition("\n\nParameters\n")
    source = rest.partition("\nReferences\n----------\n")[2].partition("\n\n")[0]
    arguments = ", ".join(LOSSES[like.__name__.removesuffix("_loss")].arguments)
    usage = inspect.cleandoc(call).format(
        loss=like.__name__, arguments=arguments, options=", ".join(COMPILED)
    )

    def add(function: _F) -> _F:
        function.__doc__ = f"{equation}\n\n{usage}\n\nReferences\n----------\n{source}\n"
        return function

    return add


@_documented
def info_nce_loss(
    query: Array, key: Array, labels: Array | None = None, **options: Unpack[LossOptions]
) -> Array:
    """InfoNCE: each query against all keys, one of which is its positive.

    With logits ``x_ij = scale * <query_i, key_j>`` and the positive key y_i of query i,

    ``loss = mean_i ( log sum_j exp(x_ij) - x_{i, y_i} )``.

    Rows of `key` that are no query's positive are extra negatives (a MoCo queue, say).

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    labels : integer array [M] or [M, P], optional
        y_i, in [0, N). Default: query i belongs to key i, which needs N >= M. Or a set of
        positives: then x_{i, y_i} is their mean. A negative label stands for none; a row without a
        positive is left out of the mean, its loss and gradient are 0.

    References
    ----------
    van den Oord, Li, Vinyals: Representation Learning with Contrastive Predictive Coding, 2018.
    """
    return dispatch.loss(spec.INFO_NCE, (query, key), labels, None, options)


@_documented
def info_nce_loss_and_grad(
    query: Array, key: Array, labels: Array | None = None, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """InfoNCE and its gradients.

    With P the softmax of the logits x over keys and Y the one-hot positives,
    ``dx = (P - Y) / M``, ``dquery = scale dx key``, ``dkey = scale dx' query``,
    ``dscale = sum_ij dx_ij <query_i, key_j>``. See `info_nce_loss`.

    Parameters
    ----------
    query : array [M, D]
    key : array [N, D]
    labels : integer array [M] or [M, P], optional
        The positive key of each query, in [0, N), or a set of them, negative ones standing for
        none; default i. Of a set, Y has 1 / its size.

    References
    ----------
    van den Oord, Li, Vinyals: Representation Learning with Contrastive Predictive Coding, 2018.
    """
    return dispatch.loss_and_grad(spec.INFO_NCE, (query, key), labels, None, options)


@_documented
def nt_xent_loss(features: Array, **options: Unpack[LossOptions]) -> Array:
    """SimCLR's NT-Xent: two views of each of B samples, each row against all others.

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


@_documented
def nt_xent_loss_and_grad(features: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """SimCLR's NT-Xent and its gradients.

    With P the softmax over j != i, Y the one-hot positives and ``G = (P - Y) / 2B``,
    ``dfeatures = scale (G + G') features``. Only one triangle of the symmetric logits is computed.
    See `nt_xent_loss`.

    Parameters
    ----------
    features : array [2B, D]

    References
    ----------
    Chen, Kornblith, Norouzi, Hinton: A Simple Framework for Contrastive Learning of Visual
    Representations, 2020.
    """
    return dispatch.loss_and_grad(spec.NT_XENT, (features,), None, None, options)


@_documented
def clip_loss(image: Array, text: Array, **options: Unpack[LossOptions]) -> Array:
    """CLIP: images against texts and texts against images.

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


@_documented
def clip_loss_and_grad(image: Array, text: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """CLIP and its gradients, both directions from one pass over the logits.

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


@_documented
def lit_loss(text: Array, image: Array, **options: Unpack[LossOptions]) -> Array:
    """LiT: texts against the images of a locked tower.

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


@_documented
def lit_loss_and_grad(text: Array, image: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """LiT and its gradients for text and scale; `grads.image` is None.

    With P the softmax of the logits over images, ``dtext = scale (P - I) image / N``, from one pass
    with an online softmax. See `lit_loss`.

    Parameters
    ----------
    text : array [N, D]
    image : array [N, D]

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """
    return dispatch.loss_and_grad(spec.LIT, (text, image), None, None, options)


@_documented
def siglip_loss(
    image: Array, text: Array, bias: Any = None, **options: Unpack[LossOptions]
) -> Array:
    """SigLIP: every pair judged on its own by a sigmoid.

    With ``z_ij = scale * <image_i, text_j> + bias``, t_ij = 1 for i = j and -1 otherwise,

    ``loss = -(1/N) sum_ij log sigmoid(t_ij z_ij)``.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]
    bias : float or 0-d array, default -10
        (and `scale` is 10 by default).

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    return dispatch.loss(spec.SIGLIP, (image, text), None, bias, options)


@_documented
def siglip_loss_and_grad(
    image: Array, text: Array, bias: Any = None, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """SigLIP and its gradients, in one pass: there is no log-sum-exp to wait for.

    ``dz_ij = -t_ij sigmoid(-t_ij z_ij) / N``, ``dimage = scale dz text``,
    ``dtext = scale dz' image``, ``dscale = sum_ij dz_ij <image_i, text_j>``,
    ``dbias = sum_ij dz_ij``. See `siglip_loss`.

    Parameters
    ----------
    image : array [N, D]
    text : array [N, D]
    bias : float or 0-d array, default -10
        (and `scale` is 10 by default).

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    return dispatch.loss_and_grad(spec.SIGLIP, (image, text), None, bias, options)


@_documented
def sup_con_loss(features: Array, labels: Array, **options: Unpack[LossOptions]) -> Array:
    """Supervised contrastive loss: rows of the same class are each other's positives.

    With ``x_ij = scale * <z_i, z_j>``, P(i) the other rows of row i's class, and i = j left out,

    ``loss = mean_i ( log sum_{j != i} exp(x_ij) - mean_{p in P(i)} x_ip )``.

    A row that is alone in its class is left out of the mean: its loss is 0. It is a negative of the
    others. The paper normalises rows: pass unit rows or ``normalize=True``.

    Parameters
    ----------
    features : array [N, D]
    labels : integer array [N]
        Class of each row. Rows of a negative label are of no class.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020 (L_out, equation 2).
    """
    return dispatch.loss(spec.SUP_CON, (features,), labels, None, options)


@_documented
def sup_con_loss_and_grad(
    features: Array, labels: Array, **options: Unpack[GradOptions]
) -> LossAndGrad:
    """Supervised contrastive loss and its gradients.

    With S the softmax over j != i, ``Y_ij = 1 / |P(i)|`` for j in P(i), and ``G = (S - Y) / N``,
    over the N rows that have a positive, ``dfeatures = scale (G + G') features``. What Y
    contributes are sums over classes. See `sup_con_loss`.

    Parameters
    ----------
    features : array [N, D]
    labels : integer array [N]
        Class of each row. Rows of a negative label are of no class.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020 (L_out, equation 2).
    """
    return dispatch.loss_and_grad(spec.SUP_CON, (features,), labels, None, options)


@_documented
def gte_loss(query: Array, key: Array, **options: Unpack[LossOptions]) -> Array:
    """GTE's contrastive loss: queries and keys, each against all queries and all keys.

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


@_documented
def gte_loss_and_grad(query: Array, key: Array, **options: Unpack[GradOptions]) -> LossAndGrad:
    """GTE's contrastive loss and its gradients.

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
