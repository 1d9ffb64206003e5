"""Test data, and the bounds that results are held to. Nothing here is taken from the library."""

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from infonce import reference

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
LOSSES = ["info_nce", "nt_xent", "clip", "lit", "siglip"]
KINDS = ["random", "aligned", "partly aligned", "opposed", "identical rows", "long"]

# unit roundoff of the arithmetic, and bounds relative to the float64 result on the same inputs, for
# unit rows and logits up to 200. (What README states, tests/brute/test_precision.py holds.)
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-24, "bfloat16": 2.0**-24}
LOSS_BOUND = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-5, "bfloat16": 1e-5}
GRAD_BOUND = {"float64": 1e-12, "float32": 5e-6, "float16": 6e-4, "bfloat16": 4e-3}


def pairs(
    kind: str, m: int, n: int, d: int, dtype: Any, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Queries [m, d] and keys [n, d]: unit rows (before rounding to dtype), except "long"."""
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
    wide = np.abs(query.astype(np.float64) @ key.astype(np.float64).T)
    return float(scale * wide.max())


def assert_loss(got: Any, want: float, dtype: str, logit: float) -> None:
    """Relative bound; absolute where the loss is small beside its logits."""
    bound = LOSS_BOUND[dtype] * max(1.0, logit / 200) * abs(want)
    bound = max(bound, 4 * ROUNDOFF[dtype] * max(logit, 1.0))
    assert abs(float(got) - want) <= bound, f"loss {got} for {want}, off by more than {bound:.1e}"


def assert_grad(
    got: Any, want: Any, dtype: str, logit: float, size: float | None = None, terms: float = 0.0
) -> None:
    """||got - want|| <= bound ||want||. A rounded logit is off by roundoff x logit, and with it
    every probability: in a large batch that averages out, in a small one it does not. `terms` is
    the size of what cancels in the sums that `want` is made of."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    size = np.linalg.norm(want) if size is None else size
    bound = (GRAD_BOUND[dtype] + 6 * ROUNDOFF[dtype] * logit) * size
    bound += 8 * ROUNDOFF[dtype] * (1 + logit) * terms
    tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-126}.get(dtype, 0.0)  # below: no normal numbers
    bound += tiny * np.sqrt(want.size) + 1e-24 * (dtype != "float64") + 1e-290
    error = np.linalg.norm(got - want)
    worst = np.unravel_index(np.argmax(np.abs(got - want)), want.shape) if want.size > 1 else ()
    assert error <= bound, (
        f"gradient off by {error:.2e}, bound {bound:.2e}; worst at {worst}: "
        f"{got[worst]} for {want[worst]}"
    )


def cancelling(ref: reference.Reference, args: tuple[np.ndarray, ...], scale: float) -> float:
    """Bound on scale * || |dL/dx| |key| ||: probabilities off the positive sum to at most the
    row's loss, and the positive's gradient is as large."""
    length = max(float(np.linalg.norm(z.astype(np.float64), axis=1).max()) for z in args)
    share = np.minimum(1.0, ref.losses) if ref.lse is not None else ref.losses
    return float(8 * scale * length * np.max(share) / np.sqrt(len(share)))


def arguments(loss: str, query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, ...]:
    """The feature arrays that this loss takes, from queries and keys."""
    if loss == "nt_xent":
        half = min(len(query), len(key))
        return (np.concatenate([query[:half], key[:half]]),)
    if loss == "info_nce":
        return query, key
    half = min(len(query), len(key))
    return query[:half], key[:half]


def judged(loss: str, args: tuple[np.ndarray, ...], **options: Any) -> reference.Reference:
    return getattr(reference, loss)(*args, **options)


def scale_size(ref: reference.Reference, args: tuple[np.ndarray, ...]) -> float:
    """Size of the terms that cancel in d scale: its error is relative to these."""
    first = next(v for v in ref.grads.values() if isinstance(v, np.ndarray))
    return float(np.sum(np.abs(first * np.asarray(args[0], np.float64)))) + 1e-300


temperatures = st.floats(np.log(0.005), 0.0).map(lambda t: float(np.exp(t)))
sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 300]))
widths = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 33, 64, 70]))


def viewed(z: np.ndarray, how: str) -> np.ndarray:
    """The same values behind other strides."""
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
