"""Test data, the bounds that results are held to, and the losses by definition.

Results are compared with float64: the formulas of `infonce.reference`, and loops over pairs at the
end of this file. Nothing here uses the code that is tested.
"""

from typing import Any

import ml_dtypes
import numpy as np

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


# --- losses by definition: loops over pairs, in real or complex numbers, without subtracting a
# maximum before exponentials. `positives`: for each row, the set of its positive keys. `ids` and
# `groups` are pairs (of rows, of columns), each an array or None; ids may have several columns.


def kept_keys(i, positives, columns, ids, groups, itself_too=True):
    """The keys that count for query i: positives, and negatives that ids and groups do not exclude.

    `positives` is the set of query i. `itself_too=False`: queries are keys, and i is left out.
    """
    kept = []
    for j in range(columns):
        if j == i and not itself_too:
            continue
        if j not in positives and ids[0] is not None and np.any(ids[0][i] == ids[1][j]):
            continue
        if j not in positives and groups[0] is not None and groups[0][i] != groups[1][j]:
            continue
        kept.append(j)
    return kept


def row_by_definition(
    dot,
    positives,
    kept,
    *,
    scale,
    weight_of=None,
    margin=0.0,
    decoupled=False,
    label_smoothing=0.0,
    hardness=0.0,
    key_bias=None,
    false_negative_margin=None,
    guide_dot=None,
    guide_margin=0.0,
):
    """(loss, log-sum-exp) of one row: the log-sum-exp less the mean of the logits over the targets.

    `dot[j]` is the dot product with key j, `positives` the set of positive keys, `kept` the keys
    that count, `weight_of[j]` the weight of positive j in the target (None: equal). Numbers of
    which gradients are not taken (limits, hardness) are real parts.
    """
    if positives and false_negative_margin is not None:
        limit = max(dot[p].real for p in positives) + false_negative_margin
        kept = [j for j in kept if j in positives or dot[j].real <= limit]
    if positives and guide_dot is not None:
        limit = max(guide_dot[p] for p in positives) + guide_margin
        kept = [j for j in kept if j in positives or guide_dot[j] <= limit]
    weight_of = weight_of or dict.fromkeys(positives, 1.0)
    x, total, target = {}, 0.0, {}
    for j in kept:
        x[j] = scale * (dot[j] - margin * (j in positives))
        if key_bias is not None:
            x[j] = x[j] + key_bias[j]
        if j in positives:
            total = total + (0 if decoupled else np.exp(x[j]))
            share = weight_of[j] / sum(weight_of.values())
            target[j] = (1 - label_smoothing) * share + label_smoothing / len(kept)
        else:
            total = total + np.exp(hardness * dot[j].real) * np.exp(x[j])
            target[j] = label_smoothing / len(kept)
    with np.errstate(divide="ignore"):
        lse = np.log(total)  # -inf if no key counts
    return (lse - sum(target[j] * x[j] for j in kept) if positives else 0.0), lse


def rows_by_definition(
    dot, positives, ids, groups, itself_too=True, guide_dot=None, weights=None, **options
):
    """(losses, log-sum-exps) of all rows, by `row_by_definition`. `weights`: `weight_of` each."""
    rows = [
        row_by_definition(
            dot[i], positive_keys,
            kept_keys(i, positive_keys, len(dot[i]), ids, groups, itself_too),
            guide_dot=None if guide_dot is None else guide_dot[i],
            weight_of=None if weights is None else weights[i], **options,
        )
        for i, positive_keys in enumerate(positives)
    ]  # fmt: skip
    losses, lse = zip(*rows, strict=True)
    return np.array(losses), np.array(lse)


def pairwise_by_definition(logits, positives, ids, groups):
    """Losses of the rows of a pairwise sigmoid. A positive pair has the mean of two weights: 1 /
    (number of positives of its row), and 1 / (number of positives of its column)."""
    losses, columns = [], range(logits.shape[1])
    positives_of_column = [sum(j in keys for keys in positives) for j in columns]
    for i, keys in enumerate(positives):
        loss = 0.0
        for j in kept_keys(i, keys, logits.shape[1], ids, groups):
            if j in keys:
                weight = (1 / len(keys) + 1 / positives_of_column[j]) / 2
                loss = loss + weight * np.log(1 + np.exp(-logits[i, j]))
            else:
                loss = loss + np.log(1 + np.exp(logits[i, j]))
        losses.append(loss)
    return np.array(losses)


def four_comparisons(q, k, i, others):
    """The pairs of rows that GTE's softmax of row i compares: its positive pair, then four pairs
    for each row j of `others`."""
    yield q[i], k[i]
    for j in others:
        yield from ((q[i], k[j]), (q[j], k[i]), (q[i], q[j]), (k[i], k[j]))


def unit(z):
    """Rows divided by their norms."""
    return z / np.sqrt((z * z).sum(axis=1, keepdims=True))


def gte_by_definition(q, k, ids, groups, guide=None, **options):
    """(losses, log-sum-exps) of GTE: a softmax over four comparisons with each other pair.

    `guide` is a pair of features (of queries, of keys), or None.
    """
    ids = range(len(q)) if ids is None else ids
    groups = [0] * len(q) if groups is None else groups
    rows = []
    for i in range(len(q)):
        others = [
            j for j in range(len(q)) if not np.any(ids[j] == ids[i]) and groups[j] == groups[i]
        ]
        dots, guide_dot = (
            None if z is None else [(a * b).sum() for a, b in four_comparisons(*z, i, others)]
            for z in ((q, k), guide)
        )
        kept = range(len(dots))
        rows.append(row_by_definition(dots, {0}, kept, guide_dot=guide_dot, **options))
    losses, lse = zip(*rows, strict=True)
    return np.array(losses), np.array(lse)
