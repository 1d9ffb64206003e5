"""Functions that the reference losses share: result, norms, excluded pairs, softmax of a row.

The softmax losses call `softmax_loss`, which defines their options. A mask is a bool array [M, N].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ids = ArrayLike | tuple[ArrayLike, ArrayLike]  # [N], or of queries [M] and of keys [N]
Guide = tuple[ArrayLike, ArrayLike]  # of queries [M, E] and of keys [N, E]
Gradients = dict[str, Array | float | None]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def silent(function: _Function) -> _Function:
    """Decorator: a value out of range becomes infinity or NaN, without a warning of NumPy."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **options)

    return cast(_Function, call)


class Softmax(TypedDict, total=False):
    """Options that all softmax losses have; `softmax_loss` defines them."""

    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    false_negative_margin: float
    guide_margin: float


class BiasedSoftmax(Softmax, total=False):
    """Options of softmax losses whose keys may have a bias."""

    key_bias: ArrayLike | None


class Reference(NamedTuple):
    """A loss and its gradients, in float64.

    Attributes
    ----------
    losses : ndarray [M]
        Loss of each row; 0 for a row without a positive.
    loss : float
        ``sum_i weights_i * losses_i``; with the default weights, the mean over rows that have a
        positive.
    grads : dict
        Gradient of `loss` under the name of each argument: an array shaped as the features, a
        float for ``scale`` and ``bias``, None for features that are locked.
    lse : ndarray [M], or a pair of them, or None
        Log-sum-exp of each row, the logarithm of the softmax's denominator; for ``clip`` the pair
        (row, column); None for ``siglip``, which has none.
    """

    losses: Array
    loss: float
    grads: Gradients
    lse: Array | tuple[Array, Array] | None


def as_features(x: ArrayLike) -> Array:
    """`x` as float64, exact for float32, float16 and bfloat16; infinities become NaN.

    An infinity may otherwise end in a plausible number: a positive logit of +inf would have
    probability 1 and loss 0.
    """
    z = np.asarray(x, np.float64)
    return np.where(np.isinf(z), np.nan, z)


def row_weights(weights: ArrayLike | None, positive: Mask) -> Array:
    """Upstream gradient of each row's loss [M]: `weights`, if given.

    Otherwise 1 / the number of rows that have a positive, and 0 for rows that have none: the
    upstream gradient of the mean.
    """
    if weights is not None:
        return np.asarray(weights, np.float64)
    has_positive = np.any(positive, axis=1).astype(np.float64)
    w: Array = has_positive / np.maximum(1.0, has_positive.sum())
    return w


@silent
def normalize(z: Array) -> tuple[Array, Array]:
    """Divide each row by its L2 norm.

    Parameters
    ----------
    z : ndarray [M, D]

    Returns
    -------
    u : ndarray [M, D]
        ``u_i = z_i / |z_i|``. A row of zeros has no direction: it becomes NaN.
    norm : ndarray [M, 1]
        ``|z_i|``. Squares would over- or underflow from 1e154 and 1e-154 on, so a power of two is
        taken out of each row first, which is exact.
    """
    exponent = np.frexp(np.max(np.abs(z), axis=1, keepdims=True))[1]
    near_one = np.ldexp(z, -exponent)
    norm = np.sqrt(np.sum(near_one * near_one, axis=1, keepdims=True))
    return near_one / norm, np.ldexp(norm, exponent)


@silent
def normalize_backward(g: Array, u: Array, norm: Array) -> Array:
    """Gradient with respect to z from the gradient `g` with respect to ``u = z / |z|``.

    A change dz of z changes ``|z|`` by <u, dz>, hence u by ``du = (dz - u <u, dz>) / |z|``. This
    linear map is symmetric, so it also maps gradients: ``dz = (g - u <g, u>) / |z|``. The part of
    `g` along the row vanishes, because u does not depend on the length of the row.

    Parameters
    ----------
    g, u : ndarray [M, D]
    norm : ndarray [M, 1]

    Returns
    -------
    ndarray [M, D]
    """
    along: Array = np.sum(g * u, axis=1, keepdims=True)
    return (g - u * along) / norm


def paired(rows: int, columns: int, positive_ids: Ids | None) -> Mask:
    """Mask [M, N] of the positives: pairs of equal positive ids, or without them the pairs i = j.

    Parameters
    ----------
    rows, columns : int
        M and N.
    positive_ids : array_like [N], or tuple (of queries [M], of keys [N]), or None
        Like `ids` of `duplicates`.
    """
    if positive_ids is None:
        return np.eye(rows, columns, dtype=np.bool_)
    return duplicates(positive_ids, np.zeros((rows, columns), np.bool_))


def duplicates(ids: Ids | None, positive: Mask) -> Mask:
    """Mask [M, N] of the pairs of equal ids that are not positives: they are left out.

    Parameters
    ----------
    ids : array_like [N] or [N, C], or tuple (query ids [M], key ids [N]), or None
        One array if queries and keys share it. With C columns, pairs are left out whose ids are
        equal in any of them. Values of any type that ``==`` compares; they are not converted, so
        64-bit integers stay exact. None: no pair is left out.
    positive : ndarray of bool [M, N]
    """
    if ids is None:
        return np.zeros_like(positive)
    query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
    return equal_ids(query_ids, key_ids) & ~positive


def equal_ids(query_ids: ArrayLike, key_ids: ArrayLike) -> Mask:
    """Mask [M, N] of the pairs whose ids, [M] and [N], or [M, C] and [N, C], are equal in any
    column."""
    sides = np.asarray(query_ids), np.asarray(key_ids)
    rows, columns = (side if side.ndim > 1 else side[:, None] for side in sides)
    equal: Mask = np.any(rows[:, None] == columns[None, :], axis=2)
    return equal


def other_groups(groups: Ids | None, positive: Mask) -> Mask:
    """Mask [M, N] of the pairs of different groups that are not positives: they are left out.

    Parameters
    ----------
    groups : array_like [N], or tuple (query groups [M], key groups [N]), or None
        Like `ids` of `duplicates`.
    positive : ndarray of bool [M, N]
    """
    if groups is None:
        return np.zeros_like(positive)
    query_groups, key_groups = groups if isinstance(groups, tuple) else (groups, groups)
    differ: Mask = np.asarray(query_groups)[:, None] != np.asarray(key_groups)[None, :]
    return differ & ~positive


def guide_products(guide: Guide | None, normalize_rows: bool) -> Array | None:
    """Dot products [M, N] of a guide's features; with `normalize_rows`, of unit rows. None: no
    guide."""
    if guide is None:
        return None
    query, key = map(as_features, guide)
    if normalize_rows:
        query, key = normalize(query)[0], normalize(key)[0]
    products: Array = query @ key.T
    return products


def sum_exp(x: Array, axis: int) -> tuple[Array, Array]:
    """``peak``, the largest element along `axis`, and ``sum exp(x - peak)``.

    Both are 0 if every element is -inf, or if there is none.
    """
    peak = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    # -inf - -inf would be NaN. With a finite peak, exp(-inf - peak) = 0, and so is the sum
    peak = np.where(np.isneginf(peak), 0.0, peak)
    return np.squeeze(peak, axis=axis), np.sum(np.exp(x - peak), axis=axis)


@silent
def log_sum_exp(x: Array, axis: int) -> Array:
    """``log sum exp x`` along `axis`: -inf if every element is -inf or there is none."""
    peak, total = sum_exp(x, axis)
    lse: Array = np.log(total) + peak
    return lse


def softplus(x: Array) -> Array:
    """``log(1 + exp x)`` without overflow, and with log1p's accuracy if it is near 0.

    For x > 0 it is ``log(exp(x) * (exp(-x) + 1)) = x + log(1 + exp(-x))``.
    """
    y: Array = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    return y


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x)) = exp(-softplus(-x))``: no overflow, full accuracy in both tails."""
    return np.exp(-softplus(-x))


def scale_slope(dot: Array, positive: Mask, margin: float = 0.0, **_: Any) -> Array:
    """dx_ij / dscale of the logits of `softmax_loss`: ``dot_ij - margin * [j in P(i)]``.

    It takes all options of `softmax_loss`; no other option changes this derivative.
    """
    return dot - margin * positive


def softmax_loss(
    dot: Array,
    positive: Mask,
    excluded: Mask,
    *,
    scale: float,
    target: Array | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    key_bias: ArrayLike | None = None,
    false_negative_margin: float = np.inf,
    guide_dot: Array | None = None,
    guide_margin: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Cross-entropy of each row against its positives, and its slope: dloss_i / dx_ij.

    With P(i) the positives of row i, and sums over the pairs that are not excluded::

        x_ij = scale * (dot_ij - margin * [j in P(i)]) + key_bias_j
        r_i = log sum_j exp(x_ij)                     log-sum-exp of the row
        loss_i = r_i - sum_j t_ij x_ij                t_ij = [j in P(i)] / |P(i)| or `target`
        dloss_i / dx_ij = p_ij - t_ij                 p_ij = exp(x_ij - r_i)

    Parameters
    ----------
    dot : ndarray [M, N]
        Products of queries and keys.
    positive : ndarray of bool [M, N]
        P(i). A row without any has loss 0 and slope 0.
    excluded : ndarray of bool [M, N]
        Pairs that do not take part; never positives.
    scale : float
        1 / temperature.
    target : ndarray [M, N], optional
        t_ij: numbers that add up to 1 over P(i), and 0 at other keys.
    margin : float
        Subtracted from the products of positives.
    decoupled : bool
        The sum of r_i leaves out the positives: loss_i = n_i - mean of x_ij over P(i), with n_i
        the log-sum-exp of the negatives. Without negatives that is -inf.
    label_smoothing : float
        e in [0, 1): t_ij becomes (1 - e) t_ij + e / K_i, of the K_i keys that are not excluded.
    hardness : float
        h >= 0: negatives count exp(h * dot_ij) times in r_i. These weights are constants, they are
        not differentiated.
    key_bias : array_like [N], optional
        Added to the logits of each key, 0 by default.
    false_negative_margin : float
        Negatives with ``dot_ij > max over P(i) of dot_ij + false_negative_margin`` are excluded.
    guide_dot : ndarray [M, N], optional
        Products by another model, the guide: constants. Negatives with
        ``guide_dot_ij > max over P(i) of guide_dot_ij + guide_margin`` are excluded. NaN makes the
        logit NaN.
    guide_margin : float

    Returns
    -------
    losses : ndarray [M]
    lse : ndarray [M]
        r_i.
    slope : ndarray [M, N]
        dloss_i / dx_ij: 0 at excluded pairs.

    Notes
    -----
    If the positive y is far above the negatives, r_i and x_iy agree in all their digits, so their
    difference has no digit of the loss; likewise p_iy and 1. At temperature 0.005 the logit of an
    aligned pair is 200, which is rounded by 3e-14, while the loss may be 1e-40. Let n_i be the
    log-sum-exp of the negatives, m_i that of the positives, and a_ij = exp(x_ij - m_i) the share of
    a positive. Then, exactly::

        loss_i = log(exp(m_i) + exp(n_i)) - sum_j t_ij x_ij
               = softplus(n_i - m_i) + (m_i - sum_j t_ij x_ij)
        dloss_i / dx_ij = a_ij (1 - sigmoid(n_i - m_i)) - t_ij                   j in P(i)
                        = (a_ij - t_ij) - a_ij sigmoid(n_i - m_i)

    Here nothing cancels. With a single positive y, m_i = x_iy and a_iy = 1, both brackets are 0,
    and the rounding of the logits causes a relative error of the result, however small the result
    is. With several positives, the second term of the loss is at least the entropy of their t_ij. A
    row without negatives has n_i = -inf.

    With `decoupled`, the probabilities of the negatives add up to 1, so n_i - m_i replaces its
    softplus, and 1 replaces its sigmoid.

    A log-sum-exp exceeds its largest logit by less than the rounding of logits above 2^53. So n_i
    and m_i are kept as a peak and a sum (`sum_exp`), and peaks are subtracted first: ``p_ij`` never
    exceeds 1.
    """
    # pairs that limits leave out, by the dot products of the features and of the guide
    has_positive: Mask = np.any(positive, axis=1)
    products_and_margins = [(dot, false_negative_margin)]
    if guide_dot is not None:
        dot = dot + 0.0 * guide_dot  # NaN of the guide reaches the logits
        products_and_margins = [(dot, false_negative_margin), (guide_dot, guide_margin)]
    for products, limit_margin in products_and_margins:
        limit = np.max(products, axis=1, initial=-np.inf, where=positive) + limit_margin
        likely_positive = ~positive & has_positive[:, None] & (products > limit[:, None])
        excluded = excluded | likely_positive

    # logits, and those of negatives, of positives and of all terms of r_i; -inf: not in the sum
    bias = 0.0 if key_bias is None else np.asarray(key_bias, np.float64)
    logits = scale * (dot - margin * positive) + bias
    weighted = np.where(positive, logits, logits + hardness * dot)
    negatives = np.where(positive | excluded, -np.inf, weighted)
    positives = np.where(positive, logits, -np.inf)
    softmax_logits = negatives if decoupled else np.where(excluded, -np.inf, weighted)

    # losses
    peak, total = sum_exp(softmax_logits, axis=1)
    negative_peak, negative_total = sum_exp(negatives, axis=1)
    positive_peak, positive_total = sum_exp(positives, axis=1)
    # n_i - m_i
    gap = (negative_peak - positive_peak) + (np.log(negative_total) - np.log(positive_total))
    if target is None:
        target = positive / np.maximum(1, np.count_nonzero(positive, axis=1))[:, None]
    below_peak = np.sum(np.where(positive, target * (positive_peak[:, None] - logits), 0.0), axis=1)
    losses = (gap if decoupled else softplus(gap)) + (np.log(positive_total) + below_peak)

    # slopes
    share = np.exp(positives - positive_peak[:, None]) / positive_total[:, None]  # a_ij
    negative_probability = np.ones_like(gap) if decoupled else sigmoid(gap)
    at_positives = (share - target) - share * negative_probability[:, None]
    divisor = np.where(total == 0, 1.0, total)  # a total of 0: no key takes part
    slope = np.where(
        positive, at_positives, np.exp(softmax_logits - peak[:, None]) / divisor[:, None]
    )
    if label_smoothing:  # targets move from the positives to all K_i keys
        keys = np.maximum(1, np.count_nonzero(~excluded, axis=1))
        moved = target - ~excluded / keys[:, None]
        losses = losses + label_smoothing * np.sum(moved * np.where(excluded, 0.0, logits), axis=1)
        slope = slope + label_smoothing * moved
    losses = np.where(has_positive, losses, 0.0)
    slope = np.where(has_positive[:, None], slope, 0.0)
    return losses, np.log(total) + peak, slope
