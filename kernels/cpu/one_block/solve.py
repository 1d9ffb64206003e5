"""A call whose logits fit one block: three products, and one compiled call between them.

`kernels/cpu/fold.py` does the same for any number of blocks, and for all options. Here vectors of
length M and N are loops of the compiled call, so that a small batch takes little more than its
products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...problem import Array, Gradients, Problem, materialize_vectors
from ...solve import Solution
from ..operands import DTYPES, SQUARES, Norms, Side, norms_of, readable_in_place, row_dots
from ..workers import BLAS, BUFFER_POOL, thread_count
from .loops import sigmoid, softmax, unit_rows
from .team import Team

MOST_LOGITS = 2**20
THREAD_SHARE = 2**21  # multiply-adds of a product: for less, a thread takes longer than it saves
MIN_HALVED_WIDTH = 256  # of rows: their products with themselves take longer than copies of a half
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
    with BLAS.single_threaded(m * n * d), Team(_threads(m, n, d)) as team:
        _multiply(query.z, key.z, x, team)
        solution = _losses(problem, x, gradients is not None)
        if solution is not None and gradients is not None:
            _store(problem, gradients, x, query, key, team)
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


def _multiply(query: Array, key: Array, x: Array, team: Team) -> None:
    """The raw products x."""
    (m, d), n, threads = query.shape, len(key), team.threads
    halved = query is key and d >= MIN_HALVED_WIDTH

    def multiply_part(part: int) -> None:
        if not (halved and threads > 1):  # BLAS itself halves a product in one part
            columns = _part(n, threads, part)
            np.matmul(query, key[columns].T, out=x[:, columns])
            return
        rows = _part(m, threads, part)
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

    team.share(multiply_part)


def _threads(m: int, n: int, d: int) -> int:
    """For products of m x n x d multiply-adds."""
    most = min(m, n, m * n * d // THREAD_SHARE)
    return min(thread_count(), most) if most > 1 else 1


def _store(
    problem: Problem, gradients: Gradients, g: Array, query: _Rows, key: _Rows, team: Team
) -> None:  # fmt: skip
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

    threads = team.threads

    def store_part(part: int) -> None:
        if len(sides) == 2 and threads % 2 == 0:  # a product as a whole takes the least time
            side, of_side = divmod(part, threads // 2)
            to, left, right, own = sides[side]
            store(to, left, right, own, _part(len(to), threads // 2, of_side))
            return
        for to, left, right, own in sides:
            store(to, left, right, own, _part(len(to), threads, part))

    team.share(store_part, last=True)


def _part(n: int, parts: int, part: int) -> slice:
    return slice(n * part // parts, n * (part + 1) // parts)
