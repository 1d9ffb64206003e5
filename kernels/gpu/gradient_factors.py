"""Factors that a kernel computes a gradient block from, and the ranges that they follow from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

from ..problem import Array
from .device.arguments import Fields, address
from .device.launcher import Launcher
from .device.signatures import structure

# Fields of struct FactorSources: the vectors of `SoftmaxGradient` from which factors are computed
FACTOR_SOURCES = tuple(name for name, _ in structure("vectors.cu", "FactorSources").fields)
RANGES_STRUCTURE = structure("vectors.cu", "Ranges")  # see `find_ranges`
RANGE_THREADS = 1024  # threads of the single thread block that computes struct Ranges
# `largest_element` of `find_ranges`, by precision of the operands; 1 for others. float16 overflows
# at 65504, and the factors that normalise two rows multiply by at most 2 each: 8192 x 2 x 2 = 32768
LARGEST_ELEMENT = {"fp16": 8192.0, "fp16x3": 8192.0}


def allocate_ranges() -> Array:
    """Memory for struct Ranges, for `find_ranges`. Its first number is the gradient divisor."""
    return cupy.empty(RANGES_STRUCTURE.size // 8)


def range_sources(
    shape: tuple[int, int], vectors: Mapping[str, Array], largest_element: float = 1.0,
    by_factor: bool = False, set_size: int = 1,
) -> Fields:  # fmt: skip
    """struct RangeSources, for `find_ranges`.

    `vectors` are `FACTOR_SOURCES` by name, of M rows and N columns, without those that the loss
    lacks. References are log-sum-exps in base 2.
    """
    m, n = shape
    return {"f": dict.fromkeys(FACTOR_SOURCES) | {**vectors}, "m": m, "n": n, "set_size": set_size,
            "by_factor": by_factor, "largest_element": largest_element}  # fmt: skip


def find_ranges(launcher: Launcher, out: Array, sources: Fields) -> None:
    """Write struct Ranges to `out`: numbers that follow from the ranges of `sources`.

    The fields of struct Ranges are

    - gradient_divisor: a bound of abs(dL/dx) over `largest_element`; 1 if the bound is below 1e-300
      or not finite. The bound is the largest of these numbers:
      twice the largest gradient at a positive, because dL/dx has a term of the row and a term of
      the column, each at most the gradient at its positive;
      2^-60 of the largest factor, so that factors over the divisor fit float32;
      with `by_factor`, twice the largest factor;
      without `positive_gradient`, the largest factor.
    - middle: halfway between the largest reference of a row and the smallest of a column
    - one_exponential: 1 if one exponential serves row and column of a logit. The largest reference
      of a row is then less than 40 above the smallest of a column, and 80 above that of a row.
    """
    arguments = {"sources": sources, "out": out}
    launcher.launch("vectors.cu", "ranges", 1, RANGE_THREADS, arguments)


class GradientFactors:
    """The vectors from which kernels compute a gradient block P = (dL/dx) / gradient_divisor.

    With x2_ij a logit in base 2, and r_i = row_reference, s_j = column_reference the reference
    exponents as kernels subtract them, rounded:

        P_ij = e_ij (a_i + u_i v_j),  e_ij = 2^(x2_ij - r_i)      if `one_exponential`
        P_ij = e_ij a_i + 2^(x2_ij - s_j) v_j                     otherwise

    With R_i, C_j the references of `sources` in float64, which are log-sum-exps, and the ranges of
    `find_ranges`:

        a_i = row_factor_i 2^(r_i - R_i) / gradient_divisor
        u_i = 2^(r_i - middle)                                            if `one_exponential`
        v_j = column_factor_j 2^(middle - C_j) / gradient_divisor         if `one_exponential`
        v_j = column_factor_j 2^(s_j - C_j) / gradient_divisor            otherwise

    Without a softmax of columns, P_ij = e_ij a_i. The powers of two of a and v correct the rounding
    of r and s.
    """

    def __init__(
        self, launcher: Launcher, real: np.dtype[Any], shape: tuple[int, int],
        sources: Mapping[str, Array], scale: Fields, ranges: Array,
    ) -> None:  # fmt: skip
        (m, n), self.ranges = shape, ranges
        # r, a and u of the formulas above, of rows; s and v, of columns
        self.row_reference, self.a, self.u = cupy.empty((3, m), real)
        self.column_reference = self.v = None
        if sources["column_reference"] is not None:
            self.column_reference, self.v = cupy.empty((2, n), real)
        launcher.launch_vectors(
            "factors", max(m, n), f=sources, m=m, n=n, scale=scale, ranges=ranges,
            out={
                "row_reference": self.row_reference, "a": self.a, "u": self.u,
                "column_reference": self.column_reference, "v": self.v,
            },
        )  # fmt: skip

    def fields(self, rows: slice, columns: slice) -> Fields:
        """The fields of struct Factors for the block of `rows` and `columns`."""
        return {
            "row_reference": address(self.row_reference, rows.start),
            "a": address(self.a, rows.start), "u": address(self.u, rows.start),
            "column_reference": address(self.column_reference, columns.start),
            "v": address(self.v, columns.start),
            "one_exponential": self.ranges.data.ptr + RANGES_STRUCTURE.offset("one_exponential"),
        }  # fmt: skip


# --- accumulators ---------------------------------------------------------------------------------
