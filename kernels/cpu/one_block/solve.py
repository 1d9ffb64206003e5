"""A call whose logits fit one block: three products, and one compiled call between them.

`kernels/cpu/worker.py` does the same for any number of blocks, and for all options. Here there are
no tiles, no running sums, and no second computation of logits. Loops over vectors are parts of
the compiled call, so that a small batch takes little more than its products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...problem import Array, Gradients, Problem, materialize_vectors
from ...solve import Solution
from ..operands import DTYPES, ReadableRows, readable_rows, row_dots
from ..resources import BLAS, BUFFER_POOL, NO_CONTEXT, thread_count
from .loops import sigmoid, softmax
from .team import Team

THREAD_SHARE = 2**21  # least multiply-adds for a thread: with fewer, it takes longer than it saves
# Least number of features of a row for both of these, which were measured to be the faster ways
# (benchmarks/NOTES.md):
# - If queries are the keys, threads compute half of x, and copy it to the other half.
# - Otherwise, threads divide the columns of x among them. (For fewer features, they divide rows.)
WIDE = 256
Product = Callable[..., Array]  # with the arguments of np.matmul
NO_IDS = np.empty(0, np.int64)


def solve_in_one_block(
    problem: Problem, gradients: Gradients | None, product: Product | None = None
) -> Solution | None:
    """Loss and gradients of a problem that `fits_one_block`.

    Returns None if features or logits are not finite, or if a row lacks a positive: the caller then
    runs passes. `product` computes the products instead of NumPy's BLAS, in its own threads:
    `infonce.torch` gives PyTorch's.
    """
    positives = problem.positives
    # Without weights, each row has a positive: a row without a positive has the weight 0
    # (`infonce.checks.rows.row_weights`). With weights, only a search of the labels tells
    if problem.weights is not None and positives is not None and positives.min() < 0:
        return None
    problem = materialize_vectors(problem, np)
    m, n, d = problem.shape
    dtype = DTYPES[problem.compute_precision]
    query = key = readable_rows(problem.query, dtype, problem.normalize)
    if not problem.symmetric:
        key = readable_rows(problem.key, dtype, problem.normalize)
    memory = BUFFER_POOL.take(m * n, dtype)
    x = memory.reshape(m, n)
    with (
        NO_CONTEXT if product else BLAS.single_threaded(m * n * d),  # before threads are counted
        Team(1 if product else _threads(m, n, d, problem.symmetric)) as team,
    ):
        _multiply(query[0], key[0], x, team, product or np.matmul)
        solution = _losses(problem, x, gradients is not None)
        if solution is not None and gradients is not None:
            _store(problem, gradients, x, query, key, team, product or np.matmul)
    BUFFER_POOL.give(memory)
    return solution


def _losses(problem: Problem, x: Array, gradient: bool) -> Solution | None:
    """The losses, from raw products x. For a `gradient`, x becomes dL/dx times the scale."""
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


def _multiply(query: Array, key: Array, x: Array, team: Team, product: Product) -> None:
    """Compute the raw products x."""
    if team.threads == 1:  # BLAS itself halves the product of rows with themselves
        product(query, key.T, out=x)
    elif query is key and query.shape[1] >= WIDE:
        team.share(partial(_multiply_half, query, x, team.threads))
    else:
        team.share(partial(_multiply_part, query, key, x, team.threads))


def _multiply_part(query: Array, key: Array, x: Array, parts: int, part: int) -> None:
    """Compute a part of x: columns, if features have a width of `WIDE` or more; otherwise rows."""
    if query.shape[1] >= WIDE:
        columns = _part(len(key), parts, part)
        np.matmul(query, key[columns].T, out=x[:, columns])
    else:
        rows = _part(len(query), parts, part)
        np.matmul(query[rows], key.T, out=x[rows])


def _multiply_half(z: Array, x: Array, parts: int, part: int) -> None:
    """Products of the rows of a part with themselves, and with the next parts around a ring.

    Each thread has one part. Each pair of parts is multiplied once, and its products are copied to
    the other half of x.
    """
    own = _part(len(z), parts, part)
    np.matmul(z[own], z[own].T, out=x[own, own])
    for step in range(1, parts // 2 + 1):
        rows, columns = own, _part(len(z), parts, (part + step) % parts)
        if 2 * step == parts:
            # The parts are opposite in the ring, so the threads of both come here with this pair.
            # The rows of the part with smaller numbers are halved. Its own thread multiplies the
            # first half of them by the other part, and the other thread the second half
            first, second = sorted((own, columns), key=lambda side: side.start)
            middle = (first.start + first.stop) // 2
            is_first = own.start == first.start
            rows = slice(first.start, middle) if is_first else slice(middle, first.stop)
            columns = second
        np.matmul(z[rows], z[columns].T, out=x[rows, columns])
        x[columns, rows] = x[rows, columns].T


def _threads(m: int, n: int, d: int, symmetric: bool) -> int:
    """The number of threads for products of m x n x d multiply-adds.

    A thread gets `THREAD_SHARE` or more, so two threads need 2^22. If queries are the keys, the
    product of logits may be halved: two threads then need 2^23.
    """
    halved = symmetric and d >= WIDE
    limit = min(m, n, m * n * d // (2 * THREAD_SHARE if halved else THREAD_SHARE))
    return min(thread_count(), limit) if limit > 1 else 1


def _store(
    problem: Problem, gradients: Gradients, g: Array, query: ReadableRows, key: ReadableRows,
    team: Team, product: Product,
) -> None:  # fmt: skip
    """Compute the gradients of features, from g = dL/dx times the scale, and store them."""
    products = []
    if gradients.query is not None and gradients.want_query:
        products.append((gradients.query, g, key[0], query))
    if gradients.key is not None and gradients.want_key and not problem.symmetric:
        products.append((gradients.key, g.T, query[0], key))
    # With an even number of threads, the first half computes dQ and the second half dK, and each
    # half divides the rows of its product. This takes less time than all threads for one product
    # after the other
    one_product_per_half = len(products) == 2 and team.threads % 2 == 0
    parts = team.threads // 2 if one_product_per_half else team.threads

    def store_part(part: int) -> None:
        for to, left, right, own in (
            products[part // parts :][:1] if one_product_per_half else products
        ):
            _store_rows(to, left, right, own, _part(len(to), parts, part % parts), product)

    team.share(store_part, last=True)


def _store_rows(
    to: Array, left: Array, right: Array, own: ReadableRows, rows: slice, product: Product
) -> None:
    """Store rows of a gradient: the product of left and right, through the normalisation."""
    direct = to.dtype == left.dtype and to.flags.c_contiguous and to.dtype.isnative
    out = product(left[rows], right, out=to[rows] if direct else None)
    z, side = own
    if side is not None:
        dots = np.empty(len(out))
        row_dots(out, z[rows], dots)
        out = side.to_features(out, z[rows], dots, rows, to.dtype)
    if not direct:
        np.copyto(to[rows], out, casting="same_kind")


def _part(n: int, parts: int, part: int) -> slice:
    return slice(n * part // parts, n * (part + 1) // parts)
