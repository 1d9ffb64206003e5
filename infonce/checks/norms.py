"""The checks that read the elements of features; other checks read only shapes and dtypes.

They find NaN and infinity, find float64 rows in host memory whose products may overflow, and warn
if rows are far from unit norm. `call.check` calls them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import find_caller_level, native
from ..kernels.norms import has_moderate_squares, log2_norms
from ..kernels.problem import Array
from ..spec import Loss

# The warning reads the norms of at least so many rows of an array, of all rows if it has fewer
SAMPLE_ROWS = 16
LARGEST_USUAL_NORM = 2.0  # norms from 1/2 to 2 cause no warning

LARGEST_LOGIT = 2.0**1010  # float64 ends at 2^1024: sums of less than 2^14 such numbers fit


def rows_not_finite(xp: Any, z: Array) -> Iterator[int]:
    """The indices of rows that hold NaN or infinity, in ascending order."""
    chunk = 4096  # rows that are converted to float64 at a time, to save memory
    for start in range(0, len(z), chunk):
        finite = xp.isfinite(z[start : start + chunk].astype(np.float64))
        bad = ~finite.reshape(len(finite), -1).all(axis=1)
        yield from (start + xp.flatnonzero(bad)).tolist()


def without_unread(
    xp: Any, features: Mapping[str, Array], options: Mapping[str, Any]
) -> dict[str, Array]:
    """The features of a loss by name, with 0 in place of those that masks and indices leave out."""

    def given(name: str) -> Any:
        value = options.get(name)
        return None if value is None else xp.asarray(native(value, name))

    counts = dict(zip(features, (given("query_mask"), given("key_mask")), strict=False))
    if (own := features.get("own")) is not None:
        counts["own"], indices = given("own_mask"), given("own_indices")
        if indices is not None:
            in_table = (indices >= 0) & (indices < len(own))
            read = indices[in_table if counts["own"] is None else in_table & counts["own"]]
            counts["own"] = xp.zeros(len(own), bool)
            counts["own"][read] = True
    out = dict(features)
    for name, which in counts.items():
        if which is not None:
            out[name] = features[name].copy()
            out[name][~which] = 0
    return out


def require_finite(xp: Any, arrays: Mapping[str, Array]) -> None:
    """ValueError if a feature is NaN or infinite. Without this check, the loss becomes NaN."""
    for name, z in arrays.items():
        for row in rows_not_finite(xp, z):
            raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")


def require_finite_logits(loss: Loss, arrays: Sequence[Array], scale: Any) -> None:
    """ValueError if logits of finite float64 features may exceed `LARGEST_LOGIT`.

    Without this check, logits of finite features could be infinite. The bound of a logit is the
    scale times the largest norm of the queries times the largest norm of the keys and own
    negatives. If queries are the keys, or the loss is joint, each row may be on both sides.
    """
    flat = [z.reshape(-1, z.shape[-1]) for z in arrays]
    if all(z.itemsize == 8 and has_moderate_squares(z) for z in flat):
        return  # the quick bound: sums of squares below 2^900; a scale is at most 2^53
    # base-2 logarithm of the largest norm of each argument; NaN, which passes, if a feature is NaN
    norms = [log2_norms(z).max(initial=-np.inf) for z in flat]
    largest_dot = 2.0 * max(norms) if loss.joint else norms[0] + max(norms[1:] or norms)
    if largest_dot + math.log2(scale) > math.log2(LARGEST_LOGIT):
        name = loss.arguments[int(np.argmax(norms))]
        sizes = " and ".join(
            f"{_decimal(n)} in {z}" for n, z in zip(norms, loss.arguments, strict=True)
        )
        raise ValueError(
            f"{name}: expected rows whose logits, scale times products, are at most "
            f"{LARGEST_LOGIT:.1e}; got norms up to {sizes}, and a scale of {scale!r}. With "
            "normalize=True, rows may have any norm"
        )


def _decimal(log2: float) -> str:
    """The number 2^log2, which may exceed float64, as a power of ten."""
    return f"1e{log2 * math.log10(2.0):.0f}"


_warned = False  # whether this process has warned of norms


def warn_if_far_from_one(loss: Loss, arrays: Sequence[Array]) -> None:
    """Warn at the caller's line if norms of rows are far from 1. A process warns once.

    `call.check` calls this for arrays in host memory, if the caller does not pass `normalize`, at
    the first call of each kind. Rows of zeros, and rows that are not finite, do not count.
    """
    global _warned
    if _warned:
        return
    for name, z in list(zip(loss.arguments, arrays, strict=True))[:2]:
        sample = z[:: max(1, len(z) // SAMPLE_ROWS)]  # fewer than 2 * SAMPLE_ROWS rows
        norms = log2_norms(sample.reshape(-1, z.shape[-1]))  # base-2 logarithms
        norms = norms[np.isfinite(norms)]
        if len(norms) and max(norms.max(), -norms.min()) > math.log2(LARGEST_USUAL_NORM):
            _warned = True
            low, high = (f"{2.0 ** float(norm):.3g}" for norm in (norms.min(), norms.max()))
            warnings.warn(
                f"norms of rows of {name} are {low} to {high}, expected about 1: "
                "normalize=True divides rows by them; normalize=False silences this warning",
                stacklevel=find_caller_level(),
            )
            return
