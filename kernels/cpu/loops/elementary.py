"""Elementary functions that Numba compiles into vector instructions: 2^x and log(1 + x).

Polynomials, in float32 and float64, for loops over the logits of a tile. NaN is never swallowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compilation import FAST

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
def next_number(typingctx: Any, counter: Any) -> Any:
    """counter[0], which becomes one more: an atomic operation, so threads get different numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), codegen


@intrinsic
def rounded_product(typingctx: Any, a: Any, b: Any) -> Any:
    """a b in float64. An ordinary product may not be rounded before it is added to a number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=("nsz",))  # without a flag, Numba sets those of FAST

    return types.float64(types.float64, types.float64), codegen


# --- elementary functions -------------------------------------------------------------------------

# 2^t = 1 + t p(t) on [-1/2, 1/2], Chebyshev: relative error 8e-8 (float32), 2e-16 (float64) in all
_EXP2 = {types.float32: (
    "0x1.62e4302fc626ep-1", "0x1.ebfbe00e63baep-3", "0x1.c6af6cdbbdcc7p-5",
    "0x1.3b2a53045179ap-7", "0x1.5f0890162a90ap-10", "0x1.4413896e1ad27p-13"),
  types.float64: (
    "0x1.62e42fefa39efp-1", "0x1.ebfbdff82c598p-3", "0x1.c6b08d704a0c2p-5",
    "0x1.3b2ab6fba1ddap-7", "0x1.5d87fe78a5276p-10", "0x1.430913096fd9fp-13",
    "0x1.ffcbfc670dcd4p-17", "0x1.62bfd47773353p-20", "0x1.b524fae627834p-24",
    "0x1.e6063f7217bc6p-28", "0x1.e9d3fe3952179p-32")}  # fmt: skip
# log(1 + e) = 2 atanh(s) = s p(s^2), s = e / (2 + e) in [0, 1/3]
_LOG1P = {types.float32: (
    "0x1.ffffffff2e000p+0", "0x1.5555597b077dap-1", "0x1.999638bb7f313p-2",
    "0x1.25122810f580ap-2", "0x1.b63e15bc9ce88p-3", "0x1.f396553366952p-3"),
  types.float64: (
    "0x1.0000000000000p+1", "0x1.5555555555527p-1", "0x1.99999999a1c4fp-2",
    "0x1.249249201beacp-2", "0x1.c71c7445b2127p-3", "0x1.745caf74cbe5ep-3",
    "0x1.3b1e2bc8a12dep-3", "0x1.106443d797a85p-3", "0x1.f00852a5c69fap-4",
    "0x1.54f8c703ce149p-4", "0x1.5d1081172f887p-3")}  # fmt: skip
# type -> (bits of the mantissa, bias of the exponent)
_FORMATS = {types.float32: (23, 127), types.float64: (52, 1023)}
# type -> least exponent of `probability`. Smaller powers become 0: times a factor they could be
# subnormal, and products of subnormal numbers take a hundred times as long
_LEAST = {types.float32: -100.0, types.float64: -900.0}


class _Real:
    """Arithmetic on numbers of one type, as instructions with the flags FAST."""

    def __init__(self, builder: Any, numba_type: Any) -> None:
        self.builder, self.type = builder, numba_type
        self.llvm = ir.FloatType() if numba_type == types.float32 else ir.DoubleType()

    def number(self, value: float) -> Any:
        value = float(np.float32(value)) if self.type == types.float32 else value
        return ir.Constant(self.llvm, value)

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=FAST)

    def multiply(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=FAST)

    def horner(self, hexadecimals: Any, t: Any) -> Any:
        """The polynomial with these coefficients, the constant first, at t."""
        *others, total = [self.number(float.fromhex(text)) for text in hexadecimals]
        for coefficient in reversed(others):
            total = self.add(self.multiply(total, t), coefficient)
        return total

    def larger(self, a: Any, least: Any, otherwise: Any) -> Any:
        """a, or `otherwise` if a is below `least`; NaN stays NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, least), otherwise, a)

    def power(self, y: Any) -> Any:
        """2^y, where 2^y is a normal number; 0 for y = -bias, whose exponent bits are 0."""
        builder, (mantissa_bits, bias) = self.builder, _FORMATS[self.type]
        rint = builder.module.declare_intrinsic("llvm.rint", [self.llvm])
        k = builder.call(rint, [y])  # reassociation would cancel the usual (y + magic) - magic
        t = builder.fsub(y, k, flags=FAST)
        p = self.add(self.multiply(self.horner(_EXP2[self.type], t), t), self.number(1.0))
        # 2^k: the low bits of k + bias + 1.5 * 2^mantissa_bits hold the biased exponent k
        integer = ir.IntType(32 if self.type == types.float32 else 64)
        biased = builder.fadd(k, self.number(1.5 * 2.0**mantissa_bits + bias))
        shifted = builder.shl(builder.bitcast(biased, integer), integer(mantissa_bits))
        return self.multiply(p, builder.bitcast(shifted, self.llvm))


def _elementary(compute: Any) -> Any:
    """An intrinsic of one number, from a function (real: _Real, x) -> instructions."""

    def declare(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return compute(_Real(builder, x), *args)

        return x(x), codegen

    declare.__name__ = declare.__qualname__ = compute.__name__
    declare.__doc__ = compute.__doc__
    return intrinsic(declare)


@_elementary
def exp2(real: Any, x: Any) -> Any:
    """2^x for x <= 1 or slightly more; at least the smallest normal number."""
    low = real.number(1.0 - _FORMATS[real.type][1])
    return real.power(real.larger(x, low, low))


@_elementary
def probability(real: Any, x: Any) -> Any:
    """2^x for x <= 0 (or rounding above it); 0 if 2^x is below 2^_LEAST."""
    y = real.larger(x, real.number(_LEAST[real.type]), real.number(-_FORMATS[real.type][1]))
    if real.type == types.float64:  # a reference can be a rounding error too low
        zero = real.number(0.0)
        y = real.builder.select(real.builder.fcmp_ordered(">", y, zero), zero, y)
    return real.power(y)


@_elementary
def log1p(real: Any, e: Any) -> Any:
    """log(1 + e) for 0 <= e <= 1, with a small relative error."""
    s = real.builder.fdiv(e, real.add(real.number(2.0), e), flags=FAST)
    return real.multiply(s, real.horner(_LOG1P[real.type], real.multiply(s, s)))
