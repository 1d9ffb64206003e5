"""Elementary functions that Numba compiles into vector instructions: 2^x and log(1 + x).

Polynomials, in float32 and float64, for loops over the logits of a tile. NaN is never swallowed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# No 'nnan' or 'ninf': NaN and infinity must survive. 'reassoc' lets sums over j vectorise.
FAST = {"contract", "nsz", "reassoc"}


def compiled(function: Any) -> Any:
    """Compiled on first use, kept on disk, run without the GIL.

    `inline="always"` makes a function that another compiled function calls a part of the caller's
    code. Without `inline`, LLVM would optimise the function once for itself and once more for its
    caller, to other last bits. The process that compiles would run the first version, and later
    processes, which load the code from disk, the second.
    """
    options = {"nogil": True, "cache": True, "error_model": "numpy", "inline": "always"}
    return njit(fastmath=FAST, **options)(function)


# --- instructions that Numba does not offer -------------------------------------------------------


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
    """Round to nearest. (Reassociation would cancel the usual (x + magic) - magic.)"""
    return a(a), _llvm_call("llvm.rint", 1)


@intrinsic
def wide_vectors(typingctx: Any) -> Any:
    """Let LLVM use 512-bit vectors on CPUs that have them; its default for most CPUs is 256.
    LLVM does not inline the function: Python's wrapper around it has narrower vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # llvmlite's own `add` refuses attributes that it does not know
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def rounded_product(typingctx: Any, a: Any, b: Any) -> Any:
    """a b in float64. An ordinary product may not be rounded before it is added to a number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=("nsz",))  # without a flag, Numba sets those of FAST

    return types.float64(types.float64, types.float64), codegen


@intrinsic
def exponent_bits(typingctx: Any, a: Any) -> Any:
    """2^k from a = k + bias + 1.5 * 2^mantissa_bits, whose low bits hold the biased exponent k."""
    bits, shift = (32, 23) if a == types.float32 else (64, 52)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(bits)
        shifted = builder.shl(builder.bitcast(args[0], integer), ir.Constant(integer, shift))
        return builder.bitcast(shifted, args[0].type)

    return a(a), codegen


@intrinsic
def loaded_again(typingctx: Any, pointed: Any) -> Any:
    """The first element of an array, as another thread wrote it last. (LLVM would load it once.)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(array.data, "acquire", 8)

    return pointed.dtype(pointed), codegen


@compiled
def wait_awake(turn, number, step_limit, after):  # type: ignore[no-untyped-def]
    """Wait until turn[0] is `number`, but at most `step_limit` steps; then take `after` more.

    A step takes about 40 ns. It is a chain of square roots, so that the core's other hardware
    thread can use the core.
    """
    left, x = step_limit, 1.5
    while left > 0:
        for _ in range(8):
            x = math.sqrt(x + 1.0)
        if loaded_again(turn) == number and left > after:
            left = after
        else:
            left -= 1
    return x


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

# _LOW: the least x for which 2^x is a normal number. _MAGIC: 1.5 * 2^mantissa_bits + bias
_LOW4, _MAGIC4, _ONE4, _TWO4 = _F4(-126), _F4(12582912 + 127), _F4(1), _F4(2)
_LOW8, _MAGIC8 = -1022.0, 6755399441055744.0 + 1023.0
# Probabilities below 2^_LEAST are set to 0. Times a factor they could be subnormal, and products of
# subnormal numbers take a hundred times as long. `power` of _ZERO is 0: its exponent bits are 0.
_LEAST4, _ZERO4 = _F4(-100), _F4(-127)
_LEAST8, _ZERO8 = -900.0, -1023.0


def power(y: Any) -> Any:
    """2^y for _LOW <= y <= 1 or slightly more; 0 for y = _ZERO."""


def exp2(x: Any) -> Any:
    """2^x for x <= 1 or slightly more; at least the smallest normal number."""


def probability(x: Any) -> Any:
    """2^x for x <= 0 (or rounding above it); 0 if 2^x is below 2^_LEAST."""


def log1p(e: Any) -> Any:
    """log(1 + e) for 0 <= e <= 1, with a small relative error."""


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
        return power(low if x < low else x)  # in this order a NaN stays NaN

    return normal


@overload(probability, jit_options={"fastmath": FAST})
def _probability(x: Any) -> Any:
    least, zero = (_LEAST4, _ZERO4) if x == types.float32 else (_LEAST8, _ZERO8)

    def single(x: Any) -> Any:
        return power(zero if x < least else x)

    def double(x: Any) -> Any:
        y = zero if x < least else x
        return power(0.0 if y > 0.0 else y)  # a reference can be a rounding error too low

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
