"""Epilogues of the CPU backend on one tile of logits, in loops that Numba compiles.

Every function works in place on a C-contiguous tile x [m, n] of raw products q_i . k_j, in float32
or float64, without the GIL, and vectorises over j. With c = scale log2 e, base-2 logits are c x.

Exponentials are 2^(c (x - r)), so the difference to the reference r is taken before it is scaled.
At x = r the exponential is exactly 1, however large the logits are, and the rounding of c changes
only small terms. Maxima and log-sum-exps are exact: the caller has them as float64 vectors.

The logit of an excluded pair is -inf. A NaN passes through every sum.

The sums of rows and the sums of columns may have different biases, limits and bits of a guide. So
these numbers are not added to the tile: `apply_options` applies them to one logit in one direction.
Biases and limits are in units of raw products; None stands for an option that is not given.
"""

from __future__ import annotations

import numpy as np

from .elementary import compiled, exp2, fmax, probability, wide_vectors

BY_ROW, BY_COLUMN = 0, 1  # which direction leaves out a pair
# The bits of `guide_bits`: [direction, row % 4]. A shift by a number of the row takes longer: LLVM
# moves it into the loop over columns.
DIRECTION_BITS = np.array([[1, 4, 16, 64], [2, 8, 32, 128]], np.uint8)

# --- positives and excluded pairs -----------------------------------------------------------------


@compiled
def set_aside_positives(x, positives, first_column, c, out):  # type: ignore[no-untyped-def]
    """out[i, p] = c x at row i's positives. Then x = -inf there: sums leave it out."""
    for i in range(x.shape[0]):
        for p in range(positives.shape[1]):
            j = positives[i, p] - first_column
            if 0 <= j < x.shape[1]:
                out[i, p] = c * np.float64(x[i, j])
                x[i, j] = -np.inf


@compiled
def exclude_pairs(  # type: ignore[no-untyped-def]
    x, row_numbers, column_numbers, equal=True, row_positive_ids=None, column_positive_ids=None
):
    """Exclude pairs of equal numbers (ids) or, if not `equal`, of different numbers (groups).

    Pairs of equal positive ids are never excluded. (Single positives need no exception: they are
    set aside before, and inserted afterwards.)
    """
    wide_vectors()
    neg_inf = x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, row_number = x[i], row_numbers[i]
        for j in range(row.size):
            excluded = (column_numbers[j] == row_number) == equal
            if row_positive_ids is not None:
                excluded = excluded and row_positive_ids[i] != column_positive_ids[j]
            row[j] = neg_inf if excluded else row[j]


@compiled
def exclude_diagonal(x):  # type: ignore[no-untyped-def]
    """Exclude pairs i = j, if the queries are the keys: a row is not its own negative."""
    for i in range(min(x.shape)):
        x[i, i] = -np.inf


@compiled
def mark_pairs(g, limits, key_limits, guide_bits):  # type: ignore[no-untyped-def]
    """Set two bits for each pair (i, j), whose guide product is g[i, j]: whether the softmax of row
    i, and the softmax of column j, leaves it out. guide_bits[i // 4, j] has the bits of four rows
    (`DIRECTION_BITS`). A product that is not finite sets no bit.

    Returns whether all products are finite. If not, the caller makes the logits of the pairs whose
    products are not finite NaN (`Worker.compute_products`).
    """
    wide_vectors()
    zero, high = g.dtype.type(0), g.dtype.type(np.inf)
    zero_or_nan = zero  # 0 times a product that is not finite is NaN
    guide_bits[:] = 0
    for i in range(g.shape[0]):
        row, limit, out = g[i], limits[i], guide_bits[i >> 2]
        by_row, by_column = DIRECTION_BITS[BY_ROW, i & 3], DIRECTION_BITS[BY_COLUMN, i & 3]
        for j in range(row.size):
            finite = row[j] < high
            bits = by_row if (row[j] > limit) & finite else np.uint8(0)
            if key_limits is not None:
                bits |= by_column if (row[j] > key_limits[j]) & finite else np.uint8(0)
            out[j] |= bits
            zero_or_nan += row[j] * zero
    return zero_or_nan == zero


@compiled
def insert_positives(x, positives, first_column, values):  # type: ignore[no-untyped-def]
    """x = values[i, p] at row i's positives."""
    for i in range(x.shape[0]):
        for p in range(positives.shape[1]):
            j = positives[i, p] - first_column
            if 0 <= j < x.shape[1]:
                x[i, j] = values[i, p]


@compiled
def apply_options(  # type: ignore[no-untyped-def]
    product, key_bias, key, limits, query, neg_inf, guide_bits, i, j, direction
):
    """The product of pair (i, j) with the options of one direction, or `neg_inf` if excluded.

    A pair is excluded if its product is above the limit of its query, or if the guide leaves it out
    in this direction. The bias of its key is added (`PassState` has divided it by the scale). The
    query is row i and the key column j BY_ROW; the query is column j and the key row i BY_COLUMN.
    """
    if limits is not None:
        product = neg_inf if product > limits[query] else product
    if guide_bits is not None:
        is_left_out = guide_bits[i >> 2, j] & DIRECTION_BITS[direction, i & 3]
        product = neg_inf if is_left_out else product
    if key_bias is not None:
        product += key_bias[key]
    return product


# --- log-sum-exp pass -----------------------------------------------------------------------------


@compiled
def merge(  # type: ignore[no-untyped-def]
    total_max, total_sum, total_moment, part_max, part_sum, part_moment
):
    """Merge the pairs (part_max, part_sum) into the pairs (total_max, total_sum).

    A pair (max, sum) stands for the sum 2^max sum, and (-inf, 0) for an empty sum. Moments (or
    None) are merged with the same factors.
    """
    for i in range(total_max.size):
        top = part_max[i]
        if top == -np.inf:
            continue
        if top > total_max[i]:
            lower = 2.0 ** (total_max[i] - top)
            total_sum[i] = total_sum[i] * lower + part_sum[i]
            if total_moment is not None:
                total_moment[i] = total_moment[i] * lower + part_moment[i]
            total_max[i] = top
        else:
            lower = 2.0 ** (top - total_max[i])
            total_sum[i] += part_sum[i] * lower
            if total_moment is not None:
                total_moment[i] += part_moment[i] * lower


@compiled
def moment_logit(moment_logits, row, i, j):  # type: ignore[no-untyped-def]
    return row[j] if moment_logits is None else moment_logits[i, j]


@compiled
def row_statistics(  # type: ignore[no-untyped-def]
    x, c, row_max, row_sum, row_moment, key_bias=None, limits=None, guide_bits=None,
    moment_logits=None,
):  # fmt: skip
    """Write (max, sum) of 2^(c y) over each row of the tile: y is x with the options of the row.

    Also the moment sum_j 2^(c y - max) c x, unless `row_moment` is None. If `moment_logits` [m, n]
    are given, they replace the last x: the moments are then moments of other logits.
    """
    wide_vectors()
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row = x[i]
        top = apply_options(row[0], key_bias, 0, limits, i, neg_inf, guide_bits, i, 0, BY_ROW)
        for j in range(row.size):
            top = fmax(
                top,
                apply_options(row[j], key_bias, j, limits, i, neg_inf, guide_bits, i, j, BY_ROW),
            )
        row_max[i] = np.float64(c) * np.float64(top)
        row_sum[i] = 0.0
        if row_moment is not None:
            row_moment[i] = 0.0
        if top == -np.inf:  # all pairs are excluded, but for a NaN, which `fmax` ignores
            if not np.isnan(row).any():
                continue
            row_max[i], top = 0.0, zero
        scale = x.dtype.type(c)
        total, moment = zero, zero
        for j in range(row.size):
            y = apply_options(row[j], key_bias, j, limits, i, neg_inf, guide_bits, i, j, BY_ROW)
            e = exp2(scale * (y - top))
            total += e
            if row_moment is not None:
                moment += e * (moment_logit(moment_logits, row, i, j) if y != neg_inf else zero)
        row_sum[i] = total
        if row_moment is not None:
            row_moment[i] = np.float64(c) * np.float64(moment)


@compiled
def column_statistics(  # type: ignore[no-untyped-def]
    x, c, column_max, column_sum, column_moment, key_bias=None, limits=None, guide_bits=None,
    moment_logits=None,
):  # fmt: skip
    """(max, sum) and moment of each column: `row_statistics` with rows and columns exchanged.

    The keys of a column's softmax are the rows, so `key_bias` has a number for each row.
    """
    wide_vectors()
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    m, n = x.shape
    scale = x.dtype.type(c)
    high = x[0].copy()
    for j in range(n):
        high[j] = apply_options(
            high[j], key_bias, 0, limits, j, neg_inf, guide_bits, 0, j, BY_COLUMN
        )
    for i in range(1, m):
        row = x[i]
        for j in range(n):
            high[j] = fmax(
                high[j],
                apply_options(row[j], key_bias, i, limits, j, neg_inf, guide_bits, i, j, BY_COLUMN),
            )
    sums, moments = np.zeros_like(high), np.zeros_like(high)
    for j in range(n):
        column_max[j] = np.float64(c) * np.float64(high[j])
        if high[j] == -np.inf:
            high[j] = 0  # any finite number: 2^(-inf - 0) adds nothing
    for i in range(m):
        row = x[i]
        for j in range(n):
            y = apply_options(row[j], key_bias, i, limits, j, neg_inf, guide_bits, i, j, BY_COLUMN)
            e = exp2(scale * (y - high[j]))
            sums[j] += e
            if column_moment is not None:
                moments[j] += e * (moment_logit(moment_logits, row, i, j) if y != neg_inf else zero)
    for j in range(n):
        if np.isnan(sums[j]) and column_max[j] == -np.inf:
            column_max[j] = 0.0  # all pairs are excluded, but for a NaN, which `fmax` ignores
        empty = column_max[j] == -np.inf
        column_sum[j] = 0.0 if empty else np.float64(sums[j])
        if column_moment is not None:
            column_moment[j] = 0.0 if empty else np.float64(c) * np.float64(moments[j])


@compiled
def row_and_column_statistics(  # type: ignore[no-untyped-def]
    x, c, row_max, row_sum, row_moment, column_max, column_sum, column_moment, sums, moments,
    moment_logits=None,
):  # fmt: skip
    """(max, sum) and moment of each row and column of the tile, with one exponential a logit.

    Only for logits that are the same for rows and columns (`PassState.same_logits`).
    The exponential of a logit is e_ij = 2^(c x_ij - r_i), where r_i is the maximum of row i. The
    sum of column j adds e_ij 2^(r_i - top), where `top` is the largest r_i so far. If the logits of
    a column are far below the maxima of their rows, terms of the column's sum may underflow. The
    sum is then small. If the sum of any column is that small, which is rare, `column_statistics`
    computes the sums of all columns again, with the maximum of each column.
    """
    wide_vectors()
    m, n = x.shape
    scale = x.dtype.type(c)
    zero, neg_inf = x.dtype.type(0), x.dtype.type(-np.inf)
    sums[:] = 0  # [n] in x's dtype, as are `moments`
    if row_moment is not None:
        moments[:] = 0
    top = -np.inf
    for i in range(m):
        row = x[i]
        high = row[0]
        for j in range(n):
            high = fmax(high, row[j])
        row_max[i] = np.float64(c) * np.float64(high)
        row_sum[i] = 0.0
        if row_moment is not None:
            row_moment[i] = 0.0
        if high == -np.inf:
            continue
        if row_max[i] > top:
            lower = x.dtype.type(2.0 ** (top - row_max[i]))
            for j in range(n):
                sums[j] *= lower
                if row_moment is not None:
                    moments[j] *= lower
            top = row_max[i]
        weight = x.dtype.type(2.0 ** (row_max[i] - top))
        total, moment = zero, zero
        for j in range(n):
            e = exp2(scale * (row[j] - high))
            total += e
            sums[j] += e * weight
            if row_moment is not None:
                ex = e * (moment_logit(moment_logits, row, i, j) if row[j] != neg_inf else zero)
                moment += ex
                moments[j] += ex * weight
        row_sum[i] = total
        if row_moment is not None:
            row_moment[i] = np.float64(c) * np.float64(moment)

    least = np.inf
    for j in range(n):
        column_max[j] = top
        column_sum[j] = sums[j]
        if row_moment is not None:
            column_moment[j] = np.float64(c) * np.float64(moments[j])
        least = min(least, column_sum[j])
    # In float32, the terms of a column that underflowed have a sum below m 2^-126. If the column's
    # sum is 2^-80 or more, its rounding error is larger. A smaller sum may need these terms
    if least < 2.0**-80:
        column_statistics(
            x, c, column_max, column_sum, column_moment, key_bias=None, limits=None,
            guide_bits=None, moment_logits=moment_logits,
        )  # fmt: skip


@compiled
def online_softmax(  # type: ignore[no-untyped-def]
    x, c, row_max, row_sum, row_moment, rescale
):
    """x <- 2^(c (x - row_max)), where row_max is the running maximum of the raw products.

    `row_sum` and `row_moment` (or None) are the sum and the moment of the raw products so far. The
    caller has to multiply dQ_i of earlier tiles by rescale[i] = 2^(c (old maximum - new maximum)),
    because their exponentials had the old maximum (`Worker.add_to_dq`).
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
            if row_moment is not None:
                row_moment[i] *= rescale[i]
        if row_max[i] == -np.inf:
            row[:] = 0
            continue
        r = x.dtype.type(row_max[i])  # exact: the maximum of numbers of this type
        total, moment = zero, zero
        for j in range(row.size):
            e = probability(scale * (row[j] - r))
            if row_moment is not None:
                moment += e * (row[j] if row[j] != neg_inf else zero)
            row[j] = e
            total += e
        row_sum[i] += total
        if row_moment is not None:
            row_moment[i] += moment
