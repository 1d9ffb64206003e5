"""What the CPU does with one tile of logits: Numba loops that run beside single-threaded BLAS.

Every function works in place on a C-contiguous tile x [m, n] of raw products q_i . k_j, in float32
or float64, without the GIL, and vectorises over j. With c = scale log2 e, base-2 logits are c x.

Differences are taken before they are scaled, 2^(c (x - h)): at x = h that is exactly 1 whatever the
size of the logits, and the rounding of c matters only for terms that hardly count. What has to be
exact, the maxima and log-sum-exps, is kept in float64 vectors outside.

An excluded pair is a logit of -inf. NaN is never swallowed: it passes through every sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# No 'nnan' or 'ninf': NaN and infinity must survive. 'reassoc' lets sums over j vectorise.
FAST = {"contract", "nsz", "reassoc"}


def compiled(function: Any) -> Any:
    """Compiled on first use, kept on disk, run without the GIL."""
    return njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")(function)


# --- instructions that Numba does not spell -------------------------------------------------------


def _llvm_call(name: str, arguments: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        t = args[0].type
        function = builder.module.declare_intrinsic(name, [t], ir.FunctionType(t, [t] * arguments))
        return builder.call(function, args)

    return codegen


@intrinsic
def fmax(typingctx: Any, a: Any, b: Any) -> Any:
    """Maximum that vectorises as a reduction (Python's max does not); ignores one NaN."""
    return a(a, a), _llvm_call("llvm.maxnum", 2)


@intrinsic
def rint(typingctx: Any, a: Any) -> Any:
    """Round to nearest. (x + magic) - magic would be folded away by reassociation."""
    return a(a), _llvm_call("llvm.rint", 1)


@intrinsic
def wide_vectors(typingctx: Any) -> Any:
    """Let LLVM use 512-bit vectors where there are any; its default for most CPUs is 256."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite's own `add` refuses attributes that it does not know
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def exponent_bits(typingctx: Any, a: Any) -> Any:
    """2^k from a = k + bias + 1.5 * 2^mantissa_bits, whose low bits hold the biased exponent k."""
    bits, shift = (32, 23) if a == types.float32 else (64, 52)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(bits)
        shifted = builder.shl(builder.bitcast(args[0], integer), ir.Constant(integer, shift))
        return builder.bitcast(shifted, args[0].type)

    return a(a), codegen


# --- elementary functions -------------------------------------------------------------------------

_F4 = np.float32
# 2^t = 1 + t p(t) on [-1/2, 1/2], Chebyshev: relative error 8e-8 (float32), 2e-16 (float64) in all
_E4 = tuple(_F4(float.fromhex(v)) for v in (
    "0x1.62e4302fc626ep-1", "0x1.ebfbe00e63baep-3", "0x1.c6af6cdbbdcc7p-5",
    "0x1.3b2a53045179ap-7", "0x1.5f0890162a90ap-10", "0x1.4413896e1ad27p-13"))  # fmt: skip
_E8 = tuple(float.fromhex(v) for v in (
    "0x1.62e42fefa39efp-1", "0x1.ebfbdff82c598p-3", "0x1.c6b08d704a0c2p-5",
    "0x1.3b2ab6fba1ddap-7", "0x1.5d87fe78a5276p-10", "0x1.430913096fd9fp-13",
    "0x1.ffcbfc670dcd4p-17", "0x1.62bfd47773353p-20", "0x1.b524fae627834p-24",
    "0x1.e6063f7217bc6p-28", "0x1.e9d3fe3952179p-32"))  # fmt: skip
# log(1 + e) = 2 atanh(s) = s p(s^2), s = e / (2 + e) in [0, 1/3]
_L4 = tuple(_F4(float.fromhex(v)) for v in (
    "0x1.ffffffff2e000p+0", "0x1.5555597b077dap-1", "0x1.999638bb7f313p-2",
    "0x1.25122810f580ap-2", "0x1.b63e15bc9ce88p-3", "0x1.f396553366952p-3"))  # fmt: skip
_L8 = tuple(float.fromhex(v) for v in (
    "0x1.0000000000000p+1", "0x1.5555555555527p-1", "0x1.99999999a1c4fp-2",
    "0x1.249249201beacp-2", "0x1.c71c7445b2127p-3", "0x1.745caf74cbe5ep-3",
    "0x1.3b1e2bc8a12dep-3", "0x1.106443d797a85p-3", "0x1.f00852a5c69fap-4",
    "0x1.54f8c703ce149p-4", "0x1.5d1081172f887p-3"))  # fmt: skip

# low end of the exponent, where 2^x is still a normal number; 1.5 * 2^mantissa_bits + bias
_LOW4, _MAGIC4, _ONE4, _TWO4 = _F4(-126), _F4(12582912 + 127), _F4(1), _F4(2)
_LOW8, _MAGIC8 = -1022.0, 6755399441055744.0 + 1023.0
# Probabilities below 2^least are 0, which is what `exponent_bits` makes of `none`. Times a factor
# they would be subnormal, and products take a hundred times as long over such numbers.
_LEAST4, _NONE4 = _F4(-100), _F4(-127)
_LEAST8, _NONE8 = -900.0, -1023.0


def power(y: Any) -> Any:
    """2^y for low <= y <= 1 or so; 0 for `none`."""


def exp2(x: Any) -> Any:
    """2^x for x <= 1 or so; below the range of normal numbers, the smallest normal number."""


def probability(x: Any) -> Any:
    """2^x for x <= 0, but for rounding; 0 below 2^least."""


def log1p(e: Any) -> Any:
    """log(1 + e) for 0 <= e <= 1, to relative accuracy."""


@overload(power, jit_options={"fastmath": FAST})
def _power(y: Any) -> Any:
    if y == types.float32:

        def single(y: Any) -> Any:
            k = rint(y)
            t = y - k
            p = ((((_E4[5] * t + _E4[4]) * t + _E4[3]) * t + _E4[2]) * t + _E4[1]) * t + _E4[0]
            return (p * t + _ONE4) * exponent_bits(k + _MAGIC4)

        return single

    def double(y: Any) -> Any:
        k = rint(y)
        t = y - k
        p = ((((_E8[10] * t + _E8[9]) * t + _E8[8]) * t + _E8[7]) * t + _E8[6]) * t + _E8[5]
        p = ((((p * t + _E8[4]) * t + _E8[3]) * t + _E8[2]) * t + _E8[1]) * t + _E8[0]
        return (p * t + 1.0) * exponent_bits(k + _MAGIC8)

    return double


@overload(exp2, jit_options={"fastmath": FAST})
def _exp2(x: Any) -> Any:
    low = _LOW4 if x == types.float32 else _LOW8

    def normal(x: Any) -> Any:
        return power(low if x < low else x)  # this way round a NaN stays

    return normal


@overload(probability, jit_options={"fastmath": FAST})
def _probability(x: Any) -> Any:
    least, none = (_LEAST4, _NONE4) if x == types.float32 else (_LEAST8, _NONE8)

    def single(x: Any) -> Any:
        return power(none if x < least else x)

    def double(x: Any) -> Any:
        y = none if x < least else x
        return power(0.0 if y > 0.0 else y)  # heights may be a rounding too low

    return single if x == types.float32 else double


@overload(log1p, jit_options={"fastmath": FAST})
def _log1p(e: Any) -> Any:
    if e == types.float32:

        def single(e: Any) -> Any:
            s = e / (_TWO4 + e)
            z = s * s
            p = ((((_L4[5] * z + _L4[4]) * z + _L4[3]) * z + _L4[2]) * z + _L4[1]) * z + _L4[0]
            return s * p

        return single

    def double(e: Any) -> Any:
        s = e / (2.0 + e)
        z = s * s
        p = ((((_L8[10] * z + _L8[9]) * z + _L8[8]) * z + _L8[7]) * z + _L8[6]) * z + _L8[5]
        p = ((((p * z + _L8[4]) * z + _L8[3]) * z + _L8[2]) * z + _L8[1]) * z + _L8[0]
        return s * p

    return double


# --- pairs that do not count ----------------------------------------------------------------------


@compiled
def take_positives(x, positives, first_column, c, out):  # type: ignore[no-untyped-def]
    """out[i] = c x at row i's positive, which is then excluded from the tile."""
    for i in range(x.shape[0]):
        j = positives[i] - first_column
        if 0 <= j < x.shape[1]:
            out[i] = c * np.float64(x[i, j])
            x[i, j] = -np.inf


@compiled
def exclude_ids(x, row_ids, column_ids):  # type: ignore[no-untyped-def]
    """Pairs of equal ids do not count. (Positives are put in or out by their own functions.)"""
    wide_vectors()
    low = x.dtype.type(-np.inf)
    for i in range(x.shape[0]):
        row, own = x[i], row_ids[i]
        for j in range(row.size):
            row[j] = low if column_ids[j] == own else row[j]


@compiled
def exclude_diagonal(x):  # type: ignore[no-untyped-def]
    """A sample is not its own negative (symmetric losses, blocks on the diagonal)."""
    for i in range(min(x.shape)):
        x[i, i] = -np.inf


@compiled
def place_positives(x, positives, first_column, values):  # type: ignore[no-untyped-def]
    """x at row i's positive = values[i]."""
    for i in range(x.shape[0]):
        j = positives[i] - first_column
        if 0 <= j < x.shape[1]:
            x[i, j] = values[i]


# --- LSE fold -------------------------------------------------------------------------------------


@compiled
def merge(total_max, total_sum, part_max, part_sum):  # type: ignore[no-untyped-def]
    """(max, sum) <- (max, sum) + (part_max, part_sum); (-inf, 0) is the identity."""
    for i in range(total_max.size):
        m = part_max[i]
        if m == -np.inf:
            continue
        if m > total_max[i]:
            total_sum[i] = total_sum[i] * 2.0 ** (total_max[i] - m) + part_sum[i]
            total_max[i] = m
        else:
            total_sum[i] += part_sum[i] * 2.0 ** (m - total_max[i])


@compiled
def row_statistics(x, c, row_max, row_sum):  # type: ignore[no-untyped-def]
    """(max, sum) of 2^(c x) of each row of the tile."""
    wide_vectors()
    for i in range(x.shape[0]):
        row = x[i]
        top = row[0]
        for j in range(row.size):
            top = fmax(top, row[j])
        row_max[i] = np.float64(c) * np.float64(top)
        row_sum[i] = 0.0
        if top == -np.inf:  # nothing but excluded pairs
            continue
        scale = x.dtype.type(c)
        total = x.dtype.type(0)
        for j in range(row.size):
            total += exp2(scale * (row[j] - top))
        row_sum[i] = total


@compiled
def column_statistics(x, c, column_max, column_sum):  # type: ignore[no-untyped-def]
    """(max, sum) of 2^(c x) of each column of the tile, with the columns' own maxima."""
    wide_vectors()
    m, n = x.shape
    scale = x.dtype.type(c)
    high = x[0].copy()
    for i in range(1, m):
        row = x[i]
        for j in range(n):
            high[j] = fmax(high[j], row[j])
    sums = np.zeros_like(high)
    for j in range(n):
        column_max[j] = np.float64(c) * np.float64(high[j])
        if high[j] == -np.inf:
            high[j] = 0  # any finite number: 2^(-inf - 0) adds nothing
    for i in range(m):
        row = x[i]
        for j in range(n):
            sums[j] += exp2(scale * (row[j] - high[j]))
    for j in range(n):
        column_sum[j] = 0.0 if column_max[j] == -np.inf else np.float64(sums[j])


@compiled
def row_and_column_statistics(  # type: ignore[no-untyped-def]
    x, c, row_max, row_sum, column_max, column_sum, sums
):
    """(max, sum) of 2^(c x) of each row and column of the tile, with one exponential a logit.

    The exponential e_ij = 2^(c x_ij - r_i) is exact for the row, whose own maximum r_i it has; the
    columns take it times 2^(r_i - top), `top` being the largest r_i so far. A column far below its
    rows' maxima can lose everything that way. That is seen in its sum, and the columns are then
    summed again with maxima of their own: fast almost always, right always.
    """
    wide_vectors()
    m, n = x.shape
    scale = x.dtype.type(c)
    sums[:] = 0  # [n] in x's dtype
    top = -np.inf
    for i in range(m):
        row = x[i]
        high = row[0]
        for j in range(n):
            high = fmax(high, row[j])
        row_max[i] = np.float64(c) * np.float64(high)
        row_sum[i] = 0.0
        if high == -np.inf:
            continue
        if row_max[i] > top:
            lower = x.dtype.type(2.0 ** (top - row_max[i]))
            for j in range(n):
                sums[j] *= lower
            top = row_max[i]
        weight = x.dtype.type(2.0 ** (row_max[i] - top))
        total = x.dtype.type(0)
        for j in range(n):
            e = exp2(scale * (row[j] - high))
            total += e
            sums[j] += e * weight
        row_sum[i] = total

    least = np.inf
    for j in range(n):
        column_max[j] = top
        column_sum[j] = sums[j]
        least = min(least, column_sum[j])
    # what was lost is below m 2^-126 (float32): nothing beside a sum of 2^-80
    if least < 2.0**-80:
        column_statistics(x, c, column_max, column_sum)


@compiled
def count_above(x, c, row_reference, row_rank):  # type: ignore[no-untyped-def]
    """row_rank[i] += how many logits of row i exceed row_reference[i]."""
    wide_vectors()
    for i in range(x.shape[0]):
        row = x[i]
        bar = x.dtype.type(row_reference[i] / c)
        count = 0
        for j in range(row.size):
            count += row[j] > bar
        row_rank[i] += count


@compiled
def count_above_columns(x, c, column_reference, column_rank):  # type: ignore[no-untyped-def]
    """column_rank[j] += how many logits of column j exceed column_reference[j]."""
    wide_vectors()
    bar = (column_reference / c).astype(x.dtype)
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.size):
            column_rank[j] += row[j] > bar[j]


# --- gradient fold --------------------------------------------------------------------------------


@compiled
def softmax_gradient(x, c, height, a):  # type: ignore[no-untyped-def]
    """x <- a_i 2^(c (x - height_i)): one direction."""
    wide_vectors()
    scale = x.dtype.type(c)
    for i in range(x.shape[0]):
        row, h, ai = x[i], height[i], a[i]
        for j in range(row.size):
            row[j] = ai * probability(scale * (row[j] - h))


@compiled
def softmax_gradient_shared(x, c, height, a, u, v):  # type: ignore[no-untyped-def]
    """x <- 2^(c (x - height_i)) (a_i + u_i v_j): both directions from one exponential."""
    wide_vectors()
    scale = x.dtype.type(c)
    for i in range(x.shape[0]):
        row, h, ai, ui = x[i], height[i], a[i], u[i]
        for j in range(row.size):
            row[j] = probability(scale * (row[j] - h)) * (ai + ui * v[j])


@compiled
def softmax_gradient_two_sided(x, c, height, a, column_height, b):  # type: ignore[no-untyped-def]
    """x <- a_i 2^(c (x - height_i)) + b_j 2^(c (x - column_height_j)): whatever their range."""
    wide_vectors()
    scale = x.dtype.type(c)
    for i in range(x.shape[0]):
        row, h, ai = x[i], height[i], a[i]
        for j in range(row.size):
            row[j] = ai * probability(scale * (row[j] - h)) + b[j] * probability(
                scale * (row[j] - column_height[j])
            )


@compiled
def online_softmax(x, c, row_max, row_sum, rescale):  # type: ignore[no-untyped-def]
    """x <- 2^(c (x - row_max)) with the running maximum of products; rescale[i] = 2^(c (old - new))
    for what was summed before."""
    wide_vectors()
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
        if row_max[i] == -np.inf:
            row[:] = 0
            continue
        h = x.dtype.type(row_max[i])  # it came from such a number
        total = x.dtype.type(0)
        for j in range(row.size):
            e = probability(scale * (row[j] - h))
            row[j] = e
            total += e
        row_sum[i] += total


@compiled
def sigmoid(x, scale, bias, a, losses, gradient_sums):  # type: ignore[no-untyped-def]
    """x <- a_i sigmoid(z), losses += softplus(z), with z = scale x + bias: pairs that should not
    match."""
    wide_vectors()
    one = x.dtype.type(1)
    zero = x.dtype.type(0)
    s, b = x.dtype.type(scale), x.dtype.type(bias)
    log2_e = x.dtype.type(1.4426950408889634)
    for i in range(x.shape[0]):
        row, ai = x[i], a[i]
        loss, total = zero, zero
        for j in range(row.size):
            z = s * row[j] + b
            e = exp2(-abs(z) * log2_e)
            share = one / (one + e)
            p = share if z >= zero else e * share
            loss += (z if z > zero else zero) + log1p(e)
            p = z if z != z else ai * p
            total += p
            row[j] = p
        losses[i] += loss
        gradient_sums[i] += total


@compiled
def sigmoid_positives(  # type: ignore[no-untyped-def]
    x, positives, first_column, logits, bias, a, losses, gradient_sums
):
    """The pairs that should match: x <- -a_i sigmoid(-z), losses += softplus(-z)."""
    for i in range(x.shape[0]):
        j = positives[i] - first_column
        if 0 <= j < x.shape[1]:
            z = logits[i] + bias
            e = np.exp(-abs(z))
            p = (e if z >= 0 else 1.0) / (1.0 + e)
            losses[i] += max(-z, 0.0) + np.log1p(e)
            gradient_sums[i] += -a[i] * p
            x[i, j] = -a[i] * p


# --- rows -----------------------------------------------------------------------------------------

REAL = (np.dtype(np.float32), np.dtype(np.float64))


@compiled
def not_finite(z, out):  # type: ignore[no-untyped-def]
    """out[i] = whether row i has a NaN or an infinity: 0 times that is no number."""
    wide_vectors()
    for i in range(z.shape[0]):
        row = z[i]
        total = z.dtype.type(0)
        for d in range(row.size):
            total += row[d] * z.dtype.type(0)
        out[i] = total != z.dtype.type(0)


@compiled
def normalize_rows(z, inverse_norms):  # type: ignore[no-untyped-def]
    """z_i <- z_i / |z_i|, divided in float64: rounding here would be multiplied by the scale."""
    wide_vectors()
    for i in range(z.shape[0]):
        row, inverse = z[i], inverse_norms[i]
        for d in range(row.size):
            row[d] = np.float64(row[d]) * inverse


@compiled
def row_dots(g, z, out):  # type: ignore[no-untyped-def]
    """out[i] = <g_i, z_i> in float64."""
    wide_vectors()
    for i in range(g.shape[0]):
        gi, zi = g[i], z[i]
        total = 0.0
        for d in range(gi.size):
            total += np.float64(gi[d]) * np.float64(zi[d])
        out[i] = total


@compiled
def through_normalization(g, u, dots, inverse_norms):  # type: ignore[no-untyped-def]
    """g_i <- (g_i - u_i <g_i, u_i>) / |z_i|: the gradient with respect to the rows as they came."""
    wide_vectors()
    for i in range(g.shape[0]):
        gi, ui, dot, inverse = g[i], u[i], dots[i], inverse_norms[i]
        for d in range(gi.size):
            gi[d] = (np.float64(gi[d]) - np.float64(ui[d]) * dot) * inverse
