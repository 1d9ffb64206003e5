"""Rows of features whose prefixes are divided by norms of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cpu.operands import Side, find_norms, normalization_backward
from ..problem import Array

# Largest quotient of the norm of a row and the norm of its prefix. If no quotient is larger, a
# product of two prefixes of unit rows is at least 2^-80 times the product of the unit vectors of
# these prefixes, and does not underflow float32, whose range ends at 2^-126
MOST_RATIO = 2.0**40


@dataclass
class PrefixSide(Side):
    """Rows u_i. If they are normalised, ratio_i times a prefix of u_i is its unit vector v_i."""

    ranges: Sequence[slice] = ()  # the features that each prefix adds
    ratios: Array = None  # [P, n] in the compute dtype; None: not normalised
    dots: Array = None  # [P, n] float64: <dL/dv_i, v_i>, which workers add up in the gradient pass

    def __post_init__(self) -> None:
        if self.norms is None:
            return
        shape, inverse = (len(self.ranges), len(self.features)), self.norms.inverse
        self.ratios, self.dots = np.ones(shape, self.dtype), np.empty(shape)
        for part, ratio in zip(self.ranges[:-1], self.ratios, strict=False):
            norms = find_norms(self.features[:, : part.stop], self.dtype)
            # Norms out of the dtype's range have an exponent; infinity makes `is_moderate` False
            extreme = any(
                each.exponent is not None and each.exponent.any() for each in (self.norms, norms)
            )
            ratio[:] = np.inf if extreme else norms.inverse / np.where(inverse == 0, 1, inverse)

    @property
    def is_moderate(self) -> bool:
        """Whether products of prefixes stay within the range of the compute dtype.

        The product of two prefixes of unit rows, times both ratios, is the product of their unit
        vectors. If False, `solve_prefixes` computes nothing, and each prefix gets its own call.
        """
        return self.ratios is None or bool(self.ratios.max(initial=0.0) <= MOST_RATIO)

    def to_features(
        self, g: Array, u: Array, dots: Array, rows: slice, dtype: np.dtype[Any]
    ) -> Array:
        """See `Side`. Each prefix is differentiated through its own norm.

        Prefix p of row z has the unit vector v_p = r_p (prefix of u), with u = z / |z| and the
        ratio r_p = |z| / |prefix of z|. `g` is sum_p r_p dL/dv_p (`prefix_pass.chain` multiplies by
        ratios), so for a feature in the prefixes p of P

            dL/dz = (g - u sum_{p in P} r_p^2 <dL/dv_p, v_p>) / |z|

        r_p^2 has one factor r_p from v_p = r_p u, and one from 1 / |prefix of z| = r_p / |z|.
        `dots` of all features is not used: `self.dots` has those of each prefix.
        """
        if self.norms is None:
            return g
        if dtype.itemsize > g.itemsize:
            g = g.astype(dtype)
        pull = np.zeros(len(g))  # the sum over the prefixes that have the features of `part`
        for prefix in reversed(range(len(self.ranges))):
            part, ratio = self.ranges[prefix], self.ratios[prefix, rows].astype(np.float64)
            pull += ratio * ratio * self.dots[prefix, rows]
            # copies of one layout: Numba would compile the loop for each
            own, unit = np.ascontiguousarray(g[:, part]), np.ascontiguousarray(u[:, part])
            normalization_backward(own, unit, pull, self.norms.inverse[rows])
            g[:, part] = own
        return g
