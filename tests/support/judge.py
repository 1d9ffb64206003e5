"""Test data, and the bounds that results are held to.

Results are compared with the formulas of `infonce.reference` in float64, which tests/matrix
compares with an oracle that shares no code with them.
"""

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
from infonce.kernels.cpu import resources

import infonce
from infonce import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
LOSSES = ["info_nce", "nt_xent", "clip", "lit", "siglip"]
KINDS = ["random", "aligned", "partly aligned", "opposed", "identical rows", "long"]  # of `pairs`

# By dtype of the features: unit roundoff of the arithmetic; and bounds of errors, relative to the
# float64 result on the same inputs, for unit rows and logits up to 200. GRAD_BOUND is about one
# roundoff of a gradient in 16 bits (2^-11, 2^-8), and 80 roundoffs of sums in float32.
# (README's table of errors is tested by tests/matrix/test_precision.py.)
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-24, "bfloat16": 2.0**-24}
LOSS_BOUND = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5}
GRAD_BOUND = {"float64": 1e-12, "float32": 5e-6, "float16": 6e-4, "bfloat16": 4e-3}


def pairs(
    kind: str, m: int, n: int, d: int, dtype: Any, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Queries [m, d] and keys [n, d] of a kind of KINDS: unit rows (before they are rounded to
    dtype), except that queries of "long" have norm 3. Key i belongs to query i."""
    rng = np.random.default_rng(seed)

    def unit(rows: int) -> np.ndarray:
        z = rng.standard_normal((rows, d))
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    query, key = unit(m), unit(n)
    both = min(m, n)
    if kind == "aligned":
        key[:both] = query[:both]
    elif kind == "partly aligned":
        key[:both] = query[:both] + 0.7 * key[:both]
        key /= np.linalg.norm(key, axis=1, keepdims=True)
    elif kind == "opposed":
        key[:both] = -query[:both]
    elif kind == "identical rows":
        query[:] = key[:] = query[0]
    elif kind == "long":
        query *= 3.0
    return query.astype(dtype), key.astype(dtype)


def largest_logit(scale: float, query: np.ndarray, key: np.ndarray) -> float:
    """The largest absolute value of a logit."""
    wide = np.abs(query.astype(np.float64) @ key.astype(np.float64).T)
    return float(scale * wide.max())


def assert_loss(got: Any, want: float, dtype: str, logit: float) -> None:
    """AssertionError if a loss is too far from `want`. `logit` is the largest logit.

    The bound is relative to the loss, but at least 4 roundings of the largest logit.
    """
    bound = LOSS_BOUND[dtype] * max(1.0, logit / 200) * abs(want)
    bound = max(bound, 4 * ROUNDOFF[dtype] * max(logit, 1.0))
    assert abs(float(got) - want) <= bound, f"loss {got} for {want}, off by more than {bound:.1e}"


def assert_grad(
    got: Any, want: Any, dtype: str, logit: float, size: float | None = None, terms: float = 0.0
) -> None:
    """AssertionError if a gradient is too far from `want`: ||got - want|| <= bound ||want||.

    The rounding of a logit has an error of up to roundoff x logit, and so has every probability,
    relatively: in a large batch such errors average out, in a small one they do not. The factors 6
    and 8 allow for the roundings on the way to a probability: of both operands, their product,
    its scale, the reference exponent and the exponential (two more in a difference). `size` takes
    the place of ||want||. `terms` is the norm of the terms that cancel in the sums of `want`, as
    `cancelling` returns it.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    size = np.linalg.norm(want) if size is None else size
    bound = (GRAD_BOUND[dtype] + 6 * ROUNDOFF[dtype] * logit) * size
    bound += 8 * ROUNDOFF[dtype] * (1 + logit) * terms
    # The absolute error of elements that underflow
    tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-126}.get(dtype, 0.0)
    bound += tiny * np.sqrt(want.size) + 1e-24 * (dtype != "float64") + 1e-290
    error = np.linalg.norm(got - want)
    worst = np.unravel_index(np.argmax(np.abs(got - want)), want.shape) if want.size > 1 else ()
    assert error <= bound, (
        f"gradient off by {error:.2e}, bound {bound:.2e}; worst at {worst}: "
        f"{got[worst]} for {want[worst]}"
    )


def assert_same_bits(got: infonce.LossAndGrad, want: infonce.LossAndGrad) -> None:
    """AssertionError unless losses and gradients are equal bit by bit, on the host or a GPU."""
    for one, other in zip((got.loss, *got.grads), (want.loss, *want.grads), strict=True):
        if one is not None or other is not None:
            one, other = (z.get() if hasattr(z, "get") else np.asarray(z) for z in (one, other))
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


def cancelling(ref: reference.Reference, args: tuple[np.ndarray, ...], scale: float) -> float:
    """A bound of the norm of the terms that cancel in a feature gradient, `terms` of `assert_grad`.

    It bounds scale * || |dL/dx| |key| ||: the probabilities of the negatives of a row add up to at
    most the row's loss, and the gradient of the positive's logit is as large.
    """
    length = max(float(np.linalg.norm(z.astype(np.float64), axis=1).max()) for z in args)
    share = np.minimum(1.0, ref.losses) if ref.lse is not None else ref.losses
    return float(8 * scale * length * np.max(share) / np.sqrt(len(share)))


def arguments(loss: str, query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, ...]:
    """The feature arrays that this loss takes, made of queries and keys: one array of both for
    NT-Xent, and as many queries as keys for all but InfoNCE."""
    if loss == "nt_xent":
        half = min(len(query), len(key))
        return (np.concatenate([query[:half], key[:half]]),)
    if loss == "info_nce":
        return query, key
    half = min(len(query), len(key))
    return query[:half], key[:half]


def judged(loss: str, args: tuple[np.ndarray, ...], **options: Any) -> reference.Reference:
    """The loss and its gradients in float64, by `infonce.reference`."""
    return getattr(reference, loss)(*args, **options)


def scale_size(ref: reference.Reference, args: tuple[np.ndarray, ...]) -> float:
    """The sum of the absolute terms of the gradient of the scale: its error is relative to it."""
    first = next(v for v in ref.grads.values() if isinstance(v, np.ndarray))
    return float(np.sum(np.abs(first * np.asarray(args[0], np.float64)))) + 1e-300


def viewed(z: np.ndarray, how: str) -> np.ndarray:
    """An array of the same values with other strides, for each name of VIEWS."""
    if how == "transposed":
        return np.asfortranarray(z)
    if how == "every other":
        wide = np.full((2 * len(z), 3 * z.shape[1]), np.nan, z.dtype)
        wide[::2, 1::3] = z
        return wide[::2, 1::3]
    if how == "reversed":
        return np.ascontiguousarray(z[::-1, ::-1])[::-1, ::-1]
    if how == "offset":
        wide = np.full((len(z) + 2, z.shape[1] + 5), np.nan, z.dtype)
        wide[1:-1, 2:-3] = z
        return wide[1:-1, 2:-3]
    return z


VIEWS = ["contiguous", "transposed", "every other", "reversed", "offset"]


def peak_memory(call: Any) -> int:
    """Bytes at the peak of NumPy's arrays in a call, which has buffers of its own."""
    resources.BUFFER_POOL.clear()
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def unit(z):
    """Rows divided by their norms."""
    return z / np.sqrt((z * z).sum(axis=1, keepdims=True))
