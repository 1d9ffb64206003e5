"""What the reference losses have in common: the result, row norms and the softmax of a row."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ids = ArrayLike | tuple[ArrayLike, ArrayLike]
Gradients = dict[str, Array | float | None]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def silent(function: _Function) -> _Function:
    """What is out of range comes out as infinity or NaN, and not as a warning."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **options)

    return cast(_Function, call)


class Reference(NamedTuple):
    """A loss and its gradients, in float64.

    Attributes
    ----------
    losses : ndarray [M]
        Loss of each row.
    loss : float
        ``sum_i weights_i * losses_i``; with the default weights 1/M, the mean.
    grads : dict
        Gradient of `loss` under the name of each argument: an array shaped as the features, a
        float for ``scale`` and ``bias``, None for features that are locked.
    lse : ndarray [M], or a pair of them, or None
        Log-sum-exp over the kept logits of each row; for ``clip`` the pair (row, column); None
        for ``siglip``, which has none.
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


def row_weights(weights: ArrayLike | None, rows: int) -> Array:
    """Upstream gradient of each row's loss [M]: 1/M each, the mean, unless given."""
    return np.full(rows, 1.0 / rows) if weights is None else np.asarray(weights, np.float64)


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
        ``|z_i|``. Its square is formed on the way, so it must lie within 1e-150 ... 1e150.
    """
    norm = np.sqrt(np.sum(z * z, axis=1, keepdims=True))
    return z / norm, norm


@silent
def normalize_backward(g: Array, u: Array, norm: Array) -> Array:
    """Gradient with respect to z from the gradient `g` with respect to ``u = z / |z|``.

    Moving z by dz moves ``|z|`` by <u, dz>, hence ``du = (dz - u <u, dz>) / |z|``. That map is
    symmetric, so the gradient goes back through the same one: ``dz = (g - u <g, u>) / |z|``.
    Only the part of `g` across the row is left, since a row's length does not matter to u.

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


def duplicates(ids: Ids | None, positive: Mask) -> Mask:
    """Pairs to leave out [M, N]: equal id, but not the positive.

    Parameters
    ----------
    ids : array_like [N], or tuple (query ids [M], key ids [N]), or None
        One array when queries and keys share it. Anything that compares with ``==``; it is not
        converted, so 64-bit integers stay exact. None excludes nothing.
    positive : ndarray of bool [M, N]
    """
    if ids is None:
        return np.zeros_like(positive)
    query_ids, key_ids = ids if isinstance(ids, tuple) else (ids, ids)
    equal: Mask = np.asarray(query_ids)[:, None] == np.asarray(key_ids)[None, :]
    return equal & ~positive


def sum_exp(x: Array, axis: int) -> tuple[Array, Array]:
    """The largest element along `axis`, ``peak``, and ``sum exp(x - peak)``; both are 0 where every
    element is -inf or there is none."""
    peak = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    # -inf - -inf would be NaN; any finite shift leaves a sum of zeros.
    peak = np.where(np.isneginf(peak), 0.0, peak)
    return np.squeeze(peak, axis=axis), np.sum(np.exp(x - peak), axis=axis)


@silent
def log_sum_exp(x: Array, axis: int) -> Array:
    """``log sum exp x`` along `axis`: -inf where every element is -inf or there is none."""
    peak, total = sum_exp(x, axis)
    lse: Array = np.log(total) + peak
    return lse


def softplus(x: Array) -> Array:
    """``log(1 + exp x)`` without overflow, and with log1p's accuracy where it is near 0.

    For x > 0 it is ``log(exp(x) * (exp(-x) + 1)) = x + log(1 + exp(-x))``.
    """
    y: Array = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
    return y


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x)) = exp(-softplus(-x))``: no overflow, full accuracy in both tails."""
    return np.exp(-softplus(-x))


def softmax_loss(logits: Array, positive: Mask, excluded: Mask) -> tuple[Array, Array, Array]:
    """Cross-entropy of each row against its positive, and its slope.

    With y the positive of row i, and sums over the pairs that are not excluded::

        r_i = log sum_j exp(x_ij)                     log-sum-exp of the row
        loss_i = r_i - x_iy = -log p_iy               where p_ij = exp(x_ij - r_i)
        dloss_i / dx_ij = dr_i / dx_ij - [j = y] = p_ij - [j = y]

    Parameters
    ----------
    logits : ndarray [M, N]
    positive : ndarray of bool [M, N]
        True once in each row.
    excluded : ndarray of bool [M, N]
        Pairs that do not take part; never the positive.

    Returns
    -------
    losses : ndarray [M]
    lse : ndarray [M]
        r_i.
    slope : ndarray [M, N]
        dloss_i / dx_ij: 0 at excluded pairs.

    Notes
    -----
    Once the positive wins by a wide margin, r_i and x_iy agree in all their digits and their
    difference holds none of the loss; so do p_iy and 1. At temperature 0.005 the logits of an
    aligned pair are 200, whose rounding alone is 3e-14, while the loss may be 1e-40. Let
    ``n_i = log sum_{j != y} exp(x_ij)`` be the log-sum-exp of the negatives. Then, exactly::

        loss_i = log((exp(x_iy) + exp(n_i)) / exp(x_iy)) = softplus(n_i - x_iy)
        dloss_i / dx_iy = -(1 - p_iy) = -exp(n_i) / (exp(x_iy) + exp(n_i)) = -sigmoid(n_i - x_iy)

    where nothing cancels: the rounding of the logits is a relative error of the result, however
    small that is. A row without negatives has n_i = -inf, hence loss 0 and slope 0.

    Logits above 2^53 have no digits for what a log-sum-exp is above the largest of them. So r_i and
    n_i are kept as their peak and a sum, and peaks are subtracted first: ``p_ij`` never exceeds 1.
    """
    x_positive = logits[positive]
    kept = np.where(excluded, -np.inf, logits)
    peak, total = sum_exp(kept, axis=1)
    negative_peak, negative_total = sum_exp(np.where(positive, -np.inf, kept), axis=1)
    gap = (negative_peak - x_positive) + np.log(negative_total)  # n - x_iy
    slope = np.exp(kept - peak[:, None]) / total[:, None]
    slope[positive] = -sigmoid(gap)
    return softplus(gap), np.log(total) + peak, slope
