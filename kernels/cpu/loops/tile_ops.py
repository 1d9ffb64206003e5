"""Epilogues of the CPU backend on one tile of logits, in loops that Numba compiles.

Every function works on a C-contiguous tile x [m, n] of raw products q_i . k_j, in float32 or
float64, without the GIL, and vectorises over j. With c = scale log2 e, base-2 logits are c x.

Exponentials are 2^(c (x - r)), so the difference to the reference r is taken before it is scaled.
At x = r the exponential is exactly 1, however large the logits are, and the rounding of c changes
only small terms. Maxima and log-sum-exps are exact: the caller has them as float64 vectors.

The logit of an excluded pair is -inf. A NaN passes through every sum.

Each function has one signature for a dtype, so that it is compiled once: an option that is not
given has an array without an effect, or without elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compilation import compiled
from .elementary import exp2, fmax, next_number, probability, wide_vectors

# Rows of a chunk. Loops with a `counter` take chunks of rows until none is left, so that several
# threads can run the same loop on the same tile (`resources.run_loop`)
CHUNK = 128
BY_ROW, BY_COLUMN = 0, 1  # which direction leaves out a pair
# The bits of `guide_bits`: [direction, row % 4]. A shift by a number of the row takes longer: LLVM
# moves it into the loop over columns.
DIRECTION_BITS = np.array([[1, 4, 16, 64], [2, 8, 32, 128]], np.uint8)
NO_IDS = np.empty(0, np.int64)

# --- positives and excluded pairs -----------------------------------------------------------------


@compiled
def set_aside_positives(  # type: ignore[no-untyped-def]
    x, positives, first_column, c, out, needs_finite
):
    """out[i, p] = c x at row i's positives. Then x = -inf there: sums leave it out.

    If x `needs_finite` products, and one is NaN or infinite, returns False and changes nothing.
    """
    wide_vectors()
    if needs_finite:
        zero = x.dtype.type(0)
        total = zero
        for i in range(x.shape[0]):
            row = x[i]
            for j in range(row.size):
                total += row[j] * zero  # 0 times NaN or infinity is NaN
        if total != zero:
            return False
    for i in range(x.shape[0]):
        for p in range(positives.shape[1]):
            j = positives[i, p] - first_column
            if 0 <= j < x.shape[1]:
                out[i, p] = c * np.float64(x[i, j])
                x[i, j] = -np.inf
    return True


@compiled
def insert_positives(x, positives, first_column, values):  # type: ignore[no-untyped-def]
    """x = values[i, p] at row i's positives."""
    for i in range(x.shape[0]):
        for p in range(positives.shape[1]):
            j = positives[i, p] - first_column
            if 0 <= j < x.shape[1]:
                x[i, j] = values[i, p]


def exclude_diagonal(x: Any, first_row: int, first_column: int) -> None:
    """Exclude pairs i = j, if the queries are the keys: a row is not its own negative.

    The tile x begins at row `first_row` and column `first_column` of the matrix.
    """
    start = max(first_row, first_column)
    square = x[start - first_row :, start - first_column :]
    np.fill_diagonal(square[:, : len(square)], -np.inf)


@compiled
def exclude_pairs(  # type: ignore[no-untyped-def]
    x, row_numbers, column_numbers, equal, row_positive_ids, column_positive_ids
):
    """Exclude pairs of equal numbers (ids) or, if not `equal`, of different numbers (groups).

    Pairs of equal positive ids are never excluded; without such ids, pass NO_IDS. (Single positives
    need no exception: they are set aside before, and inserted afterwards.)
    """
    wide_vectors()
    neg_inf = x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, row_number = x[i], row_numbers[i]
        if row_positive_ids.size:
            positive_id = row_positive_ids[i]
            for j in range(row.size):
                excluded = (column_numbers[j] == row_number) == equal
                excluded = excluded and column_positive_ids[j] != positive_id
                row[j] = neg_inf if excluded else row[j]
        else:
            for j in range(row.size):
                row[j] = neg_inf if (column_numbers[j] == row_number) == equal else row[j]


@compiled
def mark_pairs(g, limits, key_limits, guide_bits):  # type: ignore[no-untyped-def]
    """Set two bits for each pair (i, j), whose guide product is g[i, j]: whether the softmax of row
    i, and the softmax of column j, leaves it out. guide_bits[i // 4, j] has the bits of four rows
    (`DIRECTION_BITS`). A product that is not finite sets no bit. Without a softmax over columns,
    `key_limits` are infinite.

    Returns whether all products are finite. If not, the caller makes the logits of the pairs whose
    products are not finite NaN (`TiledPass.compute_products`).
    """
    wide_vectors()
    zero, high = g.dtype.type(0), g.dtype.type(np.inf)
    zero_or_nan = zero  # 0 times a product that is not finite is NaN
    for i in range(guide_bits.shape[0]):
        for j in range(guide_bits.shape[1]):
            guide_bits[i, j] = 0
    for i in range(g.shape[0]):
        row, limit, out = g[i], limits[i], guide_bits[i >> 2]
        by_row, by_column = DIRECTION_BITS[BY_ROW, i & 3], DIRECTION_BITS[BY_COLUMN, i & 3]
        for j in range(row.size):
            finite = row[j] < high
            bits = by_row if (row[j] > limit) & finite else np.uint8(0)
            bits |= by_column if (row[j] > key_limits[j]) & finite else np.uint8(0)
            out[j] |= bits
            zero_or_nan += row[j] * zero
    return zero_or_nan == zero


@compiled
def apply_options(  # type: ignore[no-untyped-def]
    x, row_limits, column_limits, row_bias, column_bias, guide_bits, direction, out
):
    """out = the products x with the options of one direction: -inf for pairs that it leaves out.

    A pair is left out if its product is above the limit of its row or column, or if the guide
    leaves it out in this direction. Biases are added; they are in units of products.
    """
    wide_vectors()
    neg_inf = x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, to, limit, bias = x[i], out[i], row_limits[i], row_bias[i]
        for j in range(row.size):
            is_above = (row[j] > limit) | (row[j] > column_limits[j])
            to[j] = neg_inf if is_above else row[j] + (bias + column_bias[j])
        if guide_bits.size:
            bits, bit = guide_bits[i >> 2], DIRECTION_BITS[direction, i & 3]
            for j in range(row.size):
                to[j] = neg_inf if bits[j] & bit else to[j]


# --- log-sum-exp pass -----------------------------------------------------------------------------


@compiled
def row_statistics(x, moment_logits, c, rows, counter):  # type: ignore[no-untyped-def]
    """rows[:, i] = (max, sum, moment) of 2^(c x) over row i of the tile.

    The moment is sum_j 2^(c x_ij - max) c y_ij. The `moment_logits` y are x itself, unless x has
    options that moments leave out, or is of a teacher.
    """
    wide_vectors()
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    scale = x.dtype.type(c)
    chunk = next_number(counter)
    while chunk * CHUNK < x.shape[0]:
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < x.shape[0] else x.shape[0]):
            row, y = x[i], moment_logits[i]
            top = row[0]
            for j in range(row.size):
                top = fmax(top, row[j])
            rows[0, i] = np.float64(c) * np.float64(top)
            if top == -np.inf:  # all pairs are excluded, but for a NaN, which `fmax` ignores
                has_nan = False
                for j in range(row.size):
                    has_nan |= row[j] != row[j]
                rows[1, i] = rows[2, i] = np.nan if has_nan else 0.0
                rows[0, i] = 0.0 if has_nan else -np.inf
                continue
            total, moment = zero, zero
            for j in range(row.size):
                e = exp2(scale * (row[j] - top))
                total += e
                moment += e * (y[j] if row[j] != neg_inf else zero)
            rows[1, i] = total
            rows[2, i] = np.float64(c) * np.float64(moment)
        chunk = next_number(counter)


@compiled
def column_statistics(x, moment_logits, c, columns, memory):  # type: ignore[no-untyped-def]
    """columns[:, j] = (max, sum, moment) of 2^(c x) over column j of the tile: `row_statistics`
    with rows and columns exchanged. `memory` [3, n] is of x's dtype."""
    wide_vectors()
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    m, n = x.shape
    scale = x.dtype.type(c)
    high, sums, moments = memory[0], memory[1], memory[2]
    for j in range(n):
        high[j] = x[0, j]
    for i in range(1, m):
        row = x[i]
        for j in range(n):
            high[j] = fmax(high[j], row[j])
    for j in range(n):
        columns[0, j] = np.float64(c) * np.float64(high[j])
        if high[j] == -np.inf:
            high[j] = 0  # any finite number: 2^(-inf - 0) adds nothing
        sums[j] = moments[j] = zero
    for i in range(m):
        row, y = x[i], moment_logits[i]
        for j in range(n):
            e = exp2(scale * (row[j] - high[j]))
            sums[j] += e
            moments[j] += e * (y[j] if row[j] != neg_inf else zero)
    for j in range(n):
        if columns[0, j] == -np.inf:  # all pairs are excluded, but for a NaN, which `fmax` ignores
            has_nan = sums[j] != sums[j]
            columns[0, j] = 0.0 if has_nan else -np.inf
            columns[1, j] = columns[2, j] = np.nan if has_nan else 0.0
        else:
            columns[1, j] = sums[j]
            columns[2, j] = np.float64(c) * np.float64(moments[j])


# In float32, the terms of a column that underflow in `row_and_column_statistics` have a sum below
# m 2^-126. If the column's sum is 2^-80 or more, its rounding error is larger
LEAST_SHARED_SUM = 2.0**-80


@compiled
def row_and_column_statistics(  # type: ignore[no-untyped-def]
    x, moment_logits, c, rows, tops, parts, counter
):
    """rows[:, i] as `row_statistics`, and sums of the columns of each chunk, with one exponential a
    logit. Only for logits that are the same for rows and columns (`TiledPass.same_logits`).

    The exponential of a logit is e_ij = 2^(c x_ij - r_i), where r_i is the maximum of row i. The
    sum of column j adds e_ij 2^(r_i - top), where `top` is the largest r_i of the chunk so far.
    tops[chunk] is the last of them, and parts[chunk] [2, n], of x's dtype, has the sums and the
    moments of x: `merge_columns` adds them up.
    """
    wide_vectors()
    m, n = x.shape
    scale = x.dtype.type(c)
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    chunk = next_number(counter)
    while chunk * CHUNK < m:
        sums, moments = parts[chunk, 0], parts[chunk, 1]
        for j in range(n):
            sums[j] = moments[j] = zero
        top = -np.inf
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < m else m):
            row, y = x[i], moment_logits[i]
            high = row[0]
            for j in range(n):
                high = fmax(high, row[j])
            rows[0, i] = np.float64(c) * np.float64(high)
            rows[1, i] = rows[2, i] = 0.0
            if high == -np.inf:
                continue
            if rows[0, i] > top:
                lower = x.dtype.type(2.0 ** (top - rows[0, i]))
                for j in range(n):
                    sums[j] *= lower
                    moments[j] *= lower
                top = rows[0, i]
            weight = x.dtype.type(2.0 ** (rows[0, i] - top))
            total, moment = zero, zero
            for j in range(n):
                e = exp2(scale * (row[j] - high))
                total += e
                sums[j] += e * weight
                ex = e * (y[j] if row[j] != neg_inf else zero)
                moment += ex
                moments[j] += ex * weight
            rows[1, i] = total
            rows[2, i] = np.float64(c) * np.float64(moment)
        tops[chunk] = top
        chunk = next_number(counter)


@compiled
def merge_columns(tops, parts, c, columns):  # type: ignore[no-untyped-def]
    """columns[:, j] = (max, sum, moment) of column j, from the chunks of its rows.

    Terms of a column far below the maxima of their rows may have underflowed. The sum is then
    small. Returns the least sum of a column: below LEAST_SHARED_SUM, which is rare, the caller asks
    `column_statistics` for the columns.
    """
    top = -np.inf
    for chunk in range(tops.size):
        top = tops[chunk] if tops[chunk] > top else top
    for j in range(columns.shape[1]):
        columns[0, j], columns[1, j], columns[2, j] = top, 0.0, 0.0
    for chunk in range(tops.size):
        if tops[chunk] == -np.inf:
            continue
        factor = 2.0 ** (tops[chunk] - top)
        for j in range(columns.shape[1]):
            columns[1, j] += factor * parts[chunk, 0, j]
            columns[2, j] += factor * c * parts[chunk, 1, j]
    least = np.inf
    for j in range(columns.shape[1]):
        least = columns[1, j] if columns[1, j] < least else least
    return least


@compiled
def online_softmax(  # type: ignore[no-untyped-def]
    x, c, row_max, row_sum, row_moment, rescale
):
    """x <- 2^(c (x - row_max)), where row_max is the running maximum of the raw products.

    `row_sum` and `row_moment` are the sum and the moment of the raw products so far. The caller has
    to multiply dQ_i of earlier tiles by rescale[i] = 2^(c (old maximum - new maximum)), because
    their exponentials had the old maximum (`TiledPass.add_to_dq`).
    """
    wide_vectors()
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    scale = x.dtype.type(c)
    for i in range(x.shape[0]):
        row = x[i]
        high = row[0]
        for j in range(row.size):
            high = fmax(high, row[j])
        rescale[i] = 1
        if high > row_max[i]:
            old = row_max[i]
            row_max[i] = high
            rescale[i] = 2.0 ** (c * (old - row_max[i]))
            row_sum[i] *= rescale[i]
            row_moment[i] *= rescale[i]
        if row_max[i] == -np.inf:
            for j in range(row.size):
                row[j] = zero
            continue
        r = x.dtype.type(row_max[i])  # exact: the maximum of numbers of this type
        total, moment = zero, zero
        for j in range(row.size):
            e = probability(scale * (row[j] - r))
            moment += e * (row[j] if row[j] != neg_inf else zero)
            row[j] = e
            total += e
        row_sum[i] += total
        row_moment[i] += moment


# --- gradient pass --------------------------------------------------------------------------------


@compiled
def softmax_gradient(x, c, row_reference, row_factor, counter):  # type: ignore[no-untyped-def]
    """x <- row_factor_i 2^(c (x - row_reference_i))."""
    wide_vectors()
    scale = x.dtype.type(c)
    chunk = next_number(counter)
    while chunk * CHUNK < x.shape[0]:
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < x.shape[0] else x.shape[0]):
            row, reference, factor = x[i], row_reference[i], row_factor[i]
            for j in range(row.size):
                row[j] = factor * probability(scale * (row[j] - reference))
        chunk = next_number(counter)


@compiled
def softmax_gradient_shared(  # type: ignore[no-untyped-def]
    x, c, row_reference, row_factor, shared_row_factor, shared_column_factor, counter
):
    """Both directions from one exponential a logit, with reference exponents of rows.

    x <- 2^(c (x - row_reference_i)) (row_factor_i + shared_row_factor_i shared_column_factor_j).
    """
    wide_vectors()
    scale = x.dtype.type(c)
    chunk = next_number(counter)
    while chunk * CHUNK < x.shape[0]:
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < x.shape[0] else x.shape[0]):
            row, reference = x[i], row_reference[i]
            factor, shared_factor = row_factor[i], shared_row_factor[i]
            for j in range(row.size):
                e = probability(scale * (row[j] - reference))
                row[j] = e * (factor + shared_factor * shared_column_factor[j])
        chunk = next_number(counter)


@compiled
def softmax_gradient_two_sided(  # type: ignore[no-untyped-def]
    x, columns_x, c, row_reference, row_factor, column_reference, column_factor, counter
):
    """x <- row_factor_i 2^(c (x - row_reference_i))
    + column_factor_j 2^(c (columns_x - column_reference_j)).

    `columns_x` has the products with the options of the columns; without options it is x itself.
    """
    wide_vectors()
    scale = x.dtype.type(c)
    chunk = next_number(counter)
    while chunk * CHUNK < x.shape[0]:
        first, last = chunk * CHUNK, chunk * CHUNK + CHUNK
        for i in range(first, last if last < x.shape[0] else x.shape[0]):
            row, y, reference, factor = x[i], columns_x[i], row_reference[i], row_factor[i]
            for j in range(row.size):
                row[j] = factor * probability(scale * (row[j] - reference)) + column_factor[
                    j
                ] * probability(scale * (y[j] - column_reference[j]))
        chunk = next_number(counter)
