"""One fold of the CPU backend: the state that its worker threads share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..conclude import rounded_reference
from ..distill.problem import TaughtGradient, TaughtProblem
from ..epilogues import Epilogue, Sigmoid, SoftmaxGradient, Statistics
from ..grid import Grid
from ..linear import LinearGradient
from ..problem import LOG2_E, Array, Gradients, Problem
from .context import Block, Context
from .operands import Side, dots_at, row_dots, subtract
from .workers import PanelOrder

EXACT = 2.0**40  # logits below this have digits after the point, in float64


class Fold:
    """One visit of every block of a grid: vectors in the compute dtype, accumulators of dK."""

    def __init__(
        self,
        context: Context,
        problem: Problem,
        grid: Grid,
        epilogue: Epilogue,
        gradients: Gradients | None,
        order: PanelOrder,
    ) -> None:
        self.context, self.problem, self.grid = context, problem, grid
        self.epilogue, self.gradients, self.order = epilogue, gradients, order
        self.c = float(problem.scale) * (1.0 if isinstance(epilogue, Sigmoid) else LOG2_E)
        self.positive_c = self.c  # of positives
        if problem.hardness:
            self.c = float(problem.exponent_scale) * LOG2_E
        d = problem.shape[2]
        dtype = context.dtype

        # Vectors of length M or N in the compute dtype, made once for all tiles
        self.key_bias, self.query_bias = (
            None if bias is None else (bias * (LOG2_E / self.c)).astype(dtype)
            for bias in (problem.key_bias, problem.query_bias)
        )
        self.limits, self.key_limits, self.guide_limits, self.guide_key_limits = (
            None if limits is None else limits.astype(dtype)
            for limits in (
                problem.limits, problem.key_limits, problem.guide_limits, problem.guide_key_limits
            )
        )  # fmt: skip
        # the logits of both directions
        self.same_logits = self.key_bias is None and not problem.compares_with_limits
        self.teacher_c = 0.0
        if isinstance(problem, TaughtProblem):
            self.teacher_c = float(problem.teacher_scale) * LOG2_E
        if isinstance(epilogue, SoftmaxGradient):
            self.positive_gradient = epilogue.positive_gradient.astype(dtype)
            self.factors = Factors(epilogue, self.c, dtype, self.same_logits)
            if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
                self.teacher_factors = Factors(epilogue.teacher, self.teacher_c, dtype, True)
        elif isinstance(epilogue, Sigmoid):
            self.a = epilogue.row_factor.astype(dtype)
            if problem.has_positive_ids:
                self.query_pair_weights = problem.query_pair_weights.astype(dtype)
                self.key_pair_weights = problem.key_pair_weights.astype(dtype)
        elif isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            dots = dots_at(context.query, context.key, problem.positives)
            self.rank_threshold = self.positive_c * dots

        # dK accumulates in its destination if that has the compute dtype, else in memory of its own
        self.column_gradients = gradients is not None and (
            grid.triangle or (gradients.want_key and not problem.symmetric)
        )
        self.in_place = context.accumulators == 0
        self.first_panels: dict[int, int] = {}
        if gradients is not None and self.column_gradients:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            out = gradients.query if grid.triangle else gradients.key
            self.first_key = 0 if self.in_place and out is not None else keys.start
            if self.in_place and out is not None:
                self.accumulator = out
            else:
                self.accumulator = np.empty((keys.stop - keys.start, d), dtype)
            # The first panel of a column block writes its products, and the others add
            for a in reversed(range(len(grid.rows))):
                for b in grid.visits(a):
                    if not (grid.triangle and a == b):
                        self.first_panels[b] = a
            for b, columns in enumerate(grid.columns):
                if b not in self.first_panels:
                    self.column_accumulator(columns)[...] = 0

        # Linear terms of dQ and dK, added to them before they are stored
        self.query_linear: list[LinearGradient] = []
        self.key_linear: list[LinearGradient] = []
        if isinstance(epilogue, SoftmaxGradient) and gradients is not None:
            made = functools.partial(
                LinearGradient, np, context.query, context.key, symmetric=problem.symmetric
            )
            if gradients.want_query:
                self.query_linear = [made(term=term, is_key_side=False) for term in epilogue.linear]
            if self.column_gradients and not problem.symmetric:
                self.key_linear = [made(term=term, is_key_side=True) for term in epilogue.linear]

        self.kept_logits: dict[Block, Array] = {}
        if isinstance(epilogue, SoftmaxGradient):
            self.kept_logits = context.take_kept_logits(grid)
        elif isinstance(epilogue, Statistics) and context.both_folds:
            context.keep_logits(problem, grid)
            self.kept_logits = context.kept_logits

    def directions(self, rows: slice, columns: slice) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(bias of keys, limits) of a tile, of its rows and of its columns, whose keys are rows.
        Each is None without the option."""
        return (
            (part(self.key_bias, columns), part(self.limits, rows)),
            (part(self.query_bias, rows), part(self.key_limits, columns)),
        )

    def finish(self) -> None:
        """The columns' gradients are complete: store them."""
        gradients, context = self.gradients, self.context
        if gradients is None or not self.column_gradients or self.grid.triangle:
            return
        need_dots = gradients.dots is not None and not gradients.want_query
        buffer = None
        d = self.problem.shape[2]
        for columns in self.grid.columns:
            rows = columns.stop - columns.start
            if not context.key.readable_in_place and buffer is None:
                buffer = np.empty((rows, d), context.dtype)
            g = self.column_accumulator(columns)
            destination = None if self.in_place else gradients.key
            self.store(g, context.key, columns, buffer, destination, need_dots, is_key_side=True)

    def column_accumulator(self, columns: slice) -> Array:
        """Where dK of these keys accumulates."""
        return self.accumulator[columns.start - self.first_key : columns.stop - self.first_key]

    def store(
        self,
        g: Array,
        side: Side,
        rows: slice,
        buffer: Array | None,
        destination: Array | None,
        need_dots: bool,
        add: bool = False,
        is_key_side: bool = False,
    ) -> None:
        """Complete gradients g of `rows`, through the normalisation, to their destination (None:
        they are there)."""
        assert self.gradients is not None
        linear = self.key_linear if is_key_side else self.query_linear
        if linear or need_dots or side.norms is not None:
            z = side.block(rows, buffer)
            for term in linear:
                subtract(term, g, z, rows)
            dots = np.empty(len(g))
            row_dots(g, z, dots)
            if need_dots:
                self.gradients.dots[rows] = dots
            g = side.to_features(
                g, z, dots, rows, (g if destination is None else destination).dtype
            )
        if destination is not None and add:
            destination[rows] += g
        elif destination is not None:
            np.copyto(destination[rows], g, casting="same_kind")


class Factors:
    """Reference exponents and factors of a gradient in the compute dtype. Logits are c times raw
    products; `shared`: one exponential serves both directions."""

    def __init__(
        self, epilogue: SoftmaxGradient, c: float, dtype: np.dtype[Any], same_logits: bool
    ) -> None:
        """`same_logits`: the two directions have the same."""
        self.c, self.shared = c, False
        self.row_reference, self.a, rounded = rounded_reference(
            np, c, epilogue.row_reference, epilogue.row_factor, dtype
        )
        self.two_sided = epilogue.column_reference is not None
        if epilogue.column_reference is None or epilogue.column_factor is None:
            return
        high, low, least = rounded.max(), rounded.min(), epilogue.column_reference.min()
        # Shared while no column's terms underflow beside a row's reference, and differences of
        # references are exact enough
        close = high - least < 40 and high - low < 80
        self.shared = bool(same_logits and close and max(abs(high), abs(low)) < EXACT)
        if self.shared:
            middle = 0.5 * (high + least)
            self.u = np.exp2(rounded - middle).astype(dtype)
            column_exponentials = np.exp2(middle - epilogue.column_reference)
            self.v = (epilogue.column_factor * column_exponentials).astype(dtype)
        else:
            self.column_reference, self.b, _ = rounded_reference(
                np, c, epilogue.column_reference, epilogue.column_factor, dtype
            )


def part(vector: Array | None, of: slice) -> Array | None:
    """Some elements of a vector that an option may lack."""
    return None if vector is None else vector[of]
