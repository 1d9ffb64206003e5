"""A call whose logits fit one block: three products, and one compiled call between them.

`kernels/cpu/fold.py` does the same for any number of blocks, and for all options. Here vectors of
length M and N are loops of the compiled call, so that a small batch takes little more than its
products.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..direction_losses import ROUNDING
from ..problem import LN_2, LOG2_E, Array, Gradients, Problem, materialize_vectors
from ..sigmoid import tiles as pair_tiles
from ..solve import Solution
from . import tile_ops as tile
from .elementary import compiled, rounded_product, wide_vectors
from .fold import EXACT
from .operands import DTYPES, SQUARES, Norms, Side, norms_of, readable_in_place, row_dots
from .workers import BLAS, BUFFER_POOL, side_by_side, thread_count

MOST_LOGITS = 2**20
MIN_THREADED_BLOCK = 2**23  # multiply-adds of products; for no more, threads save nothing
MIN_HALVED_WIDTH = 512  # of rows: their products with themselves take longer than copies of a half
NO_IDS = np.empty(0, np.int64)


def fits(problem: Problem) -> bool:
    """Whether `solve` knows all options of the problem, and has room for its logits."""
    m, n, d = problem.shape
    if not 0 < m * n <= MOST_LOGITS or d == 0 or problem.method not in ("auto", "fused"):
        return False
    if problem.retrieval_ranks or problem.progress is not None:
        return False
    if (
        problem.set_size > 1
        or not problem.loss_follows_from_sums
        or problem.decoupled
        or problem.hardness
    ):
        return False
    if problem.label_nans is not None or problem.key_shard:
        return False
    item = DTYPES[problem.compute].itemsize
    return bool((m * n + 2 * (m + n) * d) * item <= problem.workspace)


def solve(problem: Problem, gradients: Gradients | None) -> Solution | None:
    """Loss and gradients of a problem that `fits`. None: features or logits are not finite, or rows
    lack a positive."""
    positives = problem.positives
    if problem.weights is not None and positives is not None and positives.min() < 0:
        return None
    problem = materialize_vectors(problem, np)
    m, n, d = problem.shape
    dtype = DTYPES[problem.compute]
    query = key = _Rows(problem.query, dtype, problem.normalize)
    if not problem.symmetric:
        key = _Rows(problem.key, dtype, problem.normalize)
    memory = BUFFER_POOL.take(m * n, dtype)
    x = memory.reshape(m, n)
    with BLAS.single_threaded(m * n * d):
        _multiply(query.z, key.z, x)
        solution = _losses(problem, x, gradients is not None)
        if solution is not None and gradients is not None:
            _store(problem, gradients, x, query, key)
    BUFFER_POOL.give(memory)
    return solution


def _losses(problem: Problem, x: Array, gradient: bool) -> Solution | None:
    """Losses of raw products x, which become dL/dx for a gradient."""
    m, n = x.shape
    positives, row_ids, column_ids = np.ascontiguousarray(problem.positives), NO_IDS, NO_IDS
    if problem.query_ids is not None:
        row_ids = np.ascontiguousarray(problem.query_ids)
        column_ids = np.ascontiguousarray(problem.key_ids)
    scale, losses = float(problem.scale), np.zeros(m)
    # always: variants without moments would double the compile time
    moments = np.empty((2, max(m, n)))
    solution = Solution(losses)
    if problem.bias is not None:
        finite, loss, log_scale_grad, bias_grad = sigmoid(
            x, positives, row_ids, column_ids, scale, float(problem.bias), problem.upstream,
            moments, losses,
        )  # fmt: skip
        solution.bias_grad = np.float64(bias_grad / scale)
    else:
        lse = np.empty((2, max(m, n)))
        finite, loss, log_scale_grad = softmax(
            x, positives, row_ids, column_ids, scale, float(problem.margin), problem.upstream,
            problem.row_direction_weight, problem.column_direction_weight, problem.symmetric,
            gradient, moments, losses, lse,
        )  # fmt: skip
        solution.row_lse = lse[0, :m]
        solution.column_lse = lse[1, :n] if problem.two_sided else None
    if not finite:
        return None
    if problem.scalar_grads:
        solution.scale_grad = np.float64(log_scale_grad / scale)
    if problem.common_share is not None and problem.row_shares is None:
        solution.loss = np.float64(loss * problem.common_share)
    return solution


class _Rows:
    """Features as BLAS reads them: in the compute dtype, of unit length where that is asked for."""

    def __init__(self, features: Array, dtype: np.dtype[Any], normalize: bool) -> None:
        self.z = features
        self.side: Side | None = None  # of features that are normalised
        if normalize:
            self.side = Side(features, dtype, None)
            self.z, inverse = np.empty(features.shape, dtype), np.empty(len(features))
            least, most = SQUARES[dtype.itemsize] if features.dtype.itemsize == 8 else (0.0, np.inf)
            if features.dtype not in DTYPES.values() or not features.dtype.isnative:
                features = features.astype(dtype)
            if not (features.flags.c_contiguous and features.flags.aligned):
                features = features.copy()  # Numba would compile `unit_rows` for each layout
            if unit_rows(features, least, most, self.z, inverse):
                self.side.norms = Norms(inverse, None)
            else:
                self.side.norms = norms_of(self.side.features, dtype)
                self.side.block(slice(0, len(features)), self.z)
        elif not readable_in_place(features, dtype):
            self.z = features.astype(dtype, order="C")


def _multiply(query: Array, key: Array, x: Array) -> None:
    """The raw products x."""
    (m, d), n = query.shape, len(key)
    threads = _threads(m, n, d)
    halved = query is key and d >= MIN_HALVED_WIDTH

    def multiply_part(part: int) -> None:
        rows = _part(m, threads, part)
        if not (halved and threads > 1):
            np.matmul(query[rows], key.T, out=x[rows])  # BLAS itself halves a product in one part
            return
        # Rows of the part beside themselves, and beside those of the next parts around a ring
        np.matmul(query[rows], query[rows].T, out=x[rows, rows])
        for step in range(1, threads // 2 + 1):
            near, far = rows, _part(m, threads, (part + step) % threads)
            if 2 * step == threads:  # the part opposite comes here too: each takes a half
                first, last = sorted((near, far), key=lambda side: side.start)
                middle = (first.start + first.stop) // 2
                half = slice(first.start, middle) if near is first else slice(middle, first.stop)
                near, far = half, last
            np.matmul(query[near], query[far].T, out=x[near, far])
            x[far, near] = x[near, far].T

    side_by_side(multiply_part, threads)


def _threads(m: int, n: int, d: int, products: int = 1) -> int:
    """For products of so many multiply-adds."""
    return min(thread_count(), m, n) if products * m * n * d > MIN_THREADED_BLOCK else 1


def _store(problem: Problem, gradients: Gradients, g: Array, query: _Rows, key: _Rows) -> None:
    """The gradients of features, from dL/dx."""

    def store(to: Array, left: Array, right: Array, own: _Rows, rows: slice) -> None:
        direct = to.dtype == g.dtype and to.flags.c_contiguous and to.dtype.isnative
        out = np.matmul(left[rows], right, out=to[rows] if direct else None)
        if own.side is not None:
            dots, z = np.empty(len(out)), own.z[rows]
            row_dots(out, z, dots)
            out = own.side.to_features(out, z, dots, rows, to.dtype)
        if not direct:
            np.copyto(to[rows], out, casting="same_kind")

    sides = []
    if gradients.query is not None and gradients.want_query:
        sides.append((gradients.query, g, key.z, query))
    if gradients.key is not None and gradients.want_key and not problem.symmetric:
        sides.append((gradients.key, g.T, query.z, key))

    threads = _threads(*problem.shape, products=len(sides))

    def store_part(part: int) -> None:
        for to, left, right, own in sides:
            store(to, left, right, own, _part(len(to), threads, part))

    side_by_side(store_part, threads)


def _part(n: int, parts: int, part: int) -> slice:
    return slice(n * part // parts, n * (part + 1) // parts)


# --- loops that Numba compiles --------------------------------------------------------------------


@compiled
def all_finite(x):  # type: ignore[no-untyped-def]
    """Whether no element is NaN or infinite: 0 times either is NaN."""
    wide_vectors()
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.size):
            total += row[j] * zero
    return total == zero


@compiled
def finalize_direction(high, total, p):  # type: ignore[no-untyped-def]
    """(loss, log-sum-exp, sigmoid(n - p), reference, 2^(reference - log-sum-exp)).

    `high` and `total` are the maximum and the sum over the negatives of a row or column, `p` is
    the logit of its positive: see `finalize_direction` of kernels/direction_losses.py. This
    function computes one power and one logarithm, unless `high` is a bound far above all logits.
    """
    if p >= high:
        rest = total * 2.0 ** (high - p)
        loss = math.log1p(rest)
        return loss, LN_2 * p + loss, rest / (1.0 + rest), p, 1.0 / (1.0 + rest)
    whole = total + 2.0 ** (p - high)
    log = math.log(whole)
    lse = LN_2 * high + log
    if whole >= 1.0 or whole != whole:
        return LN_2 * (high - p) + log, lse, total / whole, high, 1.0 / whole
    gap = (high - p) + math.log2(total)
    rest = 2.0 ** (-abs(gap))
    negative_probability = (rest if gap < 0 else 1.0) / (1.0 + rest)
    loss, log2_sum = LN_2 * max(gap, 0.0) + math.log1p(rest), high + math.log2(whole)
    return loss, lse, negative_probability, log2_sum, 1.0


@compiled
def rounded_reference(c, reference, factor, one):  # type: ignore[no-untyped-def]
    """(reference in units of dot products, the factor for this reference, the reference in base 2).

    See `rounded_reference` of kernels/direction_losses.py. `one`: 1 in the compute dtype.
    """
    r = reference / c
    smaller = np.nextafter(r, -np.inf)
    r = smaller if rounded_product(c, smaller) >= reference else r
    narrow = one.dtype.type(r)
    again = rounded_product(c, np.float64(narrow))
    return narrow, factor * 2.0 ** min(again - reference, ROUNDING), again


@compiled
def softmax(  # type: ignore[no-untyped-def]
    x, positives, row_ids, column_ids, scale, margin, upstream, row_direction_weight,
    column_direction_weight, symmetric, gradient, moments, losses, lse,
):  # fmt: skip
    """Raw products x become dL/dx, for a gradient. `losses` [M] and `lse` [2, .] are written;
    `moments` [2, .] is memory for the sums' moments.

    Returns (whether x is finite, the sum of the losses, d loss / d log(scale)).
    """
    if not all_finite(x):
        return False, 0.0, 0.0
    m, n = x.shape
    c = scale * LOG2_E
    two_sided = column_direction_weight != 0.0
    at = positives.reshape(m, 1)
    positive = np.empty((m, 1))
    tile.set_aside_positives(x, at, 0, c, positive)
    if symmetric:
        tile.exclude_diagonal(x)
    if row_ids.size > 0:
        tile.exclude_ids(x, row_ids, column_ids)
    high, total = np.empty((2, max(m, n))), np.empty((2, max(m, n)))
    row_moment, column_moment = moments[0, :m], moments[1, :n]
    if two_sided:
        part = np.empty((2, n), x.dtype)
        tile.row_and_column_statistics(
            x, c, high[0, :m], total[0, :m], row_moment, high[1, :n], total[1, :n], column_moment,
            part[0], part[1],
        )  # fmt: skip
    else:
        tile.row_statistics(x, c, high[0, :m], total[0, :m], row_moment)

    # From sums to losses, and to references and factors of the gradient
    one = np.ones(1, x.dtype)
    reference, factor = np.empty((2, max(m, n)), x.dtype), np.empty((2, max(m, n)), x.dtype)
    again, pull = np.empty(m), np.zeros((m, 1))
    top, low, least = -np.inf, np.inf, np.inf
    loss, log_scale_grad = 0.0, 0.0
    for i in range(m):
        p = positive[i, 0] - c * margin
        row_loss, lse[0, i], negative_part, base, weight = finalize_direction(
            high[0, i], total[0, i], p
        )
        losses[i] = row_direction_weight * row_loss
        a = upstream[i] * row_direction_weight * scale
        pull[i, 0] = a * negative_part
        if total[0, i] != 0.0:
            mean = moments[0, i] / total[0, i]
            log_scale_grad += upstream[i] * row_direction_weight * negative_part * (mean - p)
        reference[0, i], factor[0, i], again[i] = rounded_reference(c, base, a * weight, one)
        top, low = max(top, again[i]), min(low, again[i])
        if symmetric:
            reference[1, i], factor[1, i], least = reference[0, i], factor[0, i], min(least, base)
            total[1, i], high[1, i] = a * weight, base
    if two_sided:  # key i is the positive of query i
        for j in range(n):
            p = positive[j, 0] - c * margin
            column_loss, lse[1, j], negative_part, base, weight = finalize_direction(
                high[1, j], total[1, j], p
            )
            losses[j] += column_direction_weight * column_loss
            b = upstream[j] * column_direction_weight * scale
            pull[j, 0] += b * negative_part
            if total[1, j] != 0.0:
                mean = moments[1, j] / total[1, j]
                log_scale_grad += upstream[j] * column_direction_weight * negative_part * (mean - p)
            reference[1, j], factor[1, j], _ = rounded_reference(c, base, b * weight, one)
            total[1, j], high[1, j], least = b * weight, base, min(least, base)
    for i in range(m):
        loss += losses[i]
    log_scale_grad *= LN_2
    if not gradient:
        return True, loss, log_scale_grad

    # dL/dx. One exponential for both directions while none underflows: see `Fold._factors`
    if not (two_sided or symmetric):
        tile.softmax_gradient(x, c, reference[0, :m], factor[0, :m])
    elif top - least < 40 and top - low < 80 and max(abs(top), abs(low)) < EXACT:
        middle = 0.5 * (top + least)
        u, v = np.empty(m, x.dtype), np.empty(n, x.dtype)
        for i in range(m):
            u[i] = 2.0 ** (again[i] - middle)
        for j in range(n):
            v[j] = total[1, j] * 2.0 ** (middle - high[1, j])
        tile.softmax_gradient_shared(x, c, reference[0, :m], factor[0, :m], u, v)
    else:
        tile.softmax_gradient_two_sided(
            x, c, reference[0, :m], factor[0, :m], reference[1, :n], factor[1, :n]
        )
    at_positive = np.empty((m, 1), x.dtype)
    for i in range(m):
        at_positive[i, 0] = -(pull[i, 0] + (pull[positives[i], 0] if symmetric else 0.0))
    tile.insert_positives(x, at, 0, at_positive)
    return True, loss, log_scale_grad


@compiled
def sigmoid(  # type: ignore[no-untyped-def]
    x, positives, row_ids, column_ids, scale, bias, upstream, moments, losses
):
    """As `softmax`, of the pairwise sigmoid: raw products x become dL/dx, `losses` are added to.

    Returns (whether x is finite, sum of the losses, d loss / d log(scale), the sum of dL/dx).
    """
    if not all_finite(x):
        return False, 0.0, 0.0, 0.0
    m = len(x)
    positive = np.empty((m, 1))
    tile.set_aside_positives(x, positives.reshape(m, 1), 0, scale, positive)
    if row_ids.size > 0:
        tile.exclude_ids(x, row_ids, column_ids)
    factor, sums = upstream * scale, np.zeros(m)
    narrow = factor.astype(x.dtype)
    row_moment = moments[0, :m]
    row_moment[:] = 0
    pair_tiles.sigmoid(x, scale, bias, narrow, losses, sums, row_moment)
    pair_tiles.sigmoid_positives(
        x, positives, 0, positive[:, 0], scale, bias, factor, losses, sums, row_moment
    )
    return True, losses.sum(), row_moment.sum(), sums.sum()


@compiled
def unit_rows(z, least, most, out, inverse):  # type: ignore[no-untyped-def]
    """out_i = z_i / |z_i|, and 0 for a row of zeros. Whether all squared norms are 0 or within
    [least, most]."""
    wide_vectors()
    for i in range(z.shape[0]):
        zi, to = z[i], out[i]
        square = 0.0
        for d in range(zi.size):
            square += np.float64(zi[d]) * np.float64(zi[d])
        if not least <= square <= most and (square != 0.0 or np.any(zi != 0)):
            return False
        inverse[i] = 0.0 if square == 0.0 else 1.0 / math.sqrt(square)
        for d in range(zi.size):
            to[d] = np.float64(zi[d]) * inverse[i]
    return True
