"""The data of one pass on the CPU, which its worker threads share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..distill.problem import TaughtGradient, TaughtProblem
from ..epilogues import Epilogue, Sigmoid, SoftmaxGradient, Statistics
from ..grid import Grid
from ..linear import LinearGradient
from ..problem import LOG2_E, Array, Gradients, Problem
from .call_state import Block, CallState
from .factors import SoftmaxFactors
from .operands import Side, rank_thresholds, row_dots, subtract
from .resources import RowBlockOrder


class PassState:
    """The data of one visit of all blocks: vectors in the compute dtype, and the sum of dK."""

    def __init__(
        self,
        call_state: CallState,
        problem: Problem,
        grid: Grid,
        epilogue: Epilogue,
        gradients: Gradients | None,
        order: RowBlockOrder,
    ) -> None:
        self.call_state, self.problem, self.grid = call_state, problem, grid
        self.epilogue, self.gradients, self.order = epilogue, gradients, order
        self.has_teacher, self.teacher_exponent_scale = isinstance(problem, TaughtProblem), 1.0
        if isinstance(problem, TaughtProblem):
            self.teacher_exponent_scale = float(problem.teacher_scale) * LOG2_E
        # The dot product of a negative times `exponent_scale` is its exponent in base 2. That of a
        # positive times `positive_scale` is its logit in base 2, which `hardness` does not change.
        # A sigmoid has natural exponents and logits
        unit = 1.0 if isinstance(epilogue, Sigmoid) else LOG2_E
        self.exponent_scale = float(problem.exponent_scale) * unit
        self.positive_scale = float(problem.scale) * unit
        self._convert_options()
        self._convert_epilogue()
        self._prepare_column_gradients()
        self._prepare_linear_terms()

        self.kept_logits: dict[Block, Array] = {}
        if isinstance(epilogue, SoftmaxGradient):
            self.kept_logits = call_state.take_kept_logits(grid)
        elif isinstance(epilogue, Statistics) and call_state.schedule.has_gradients:
            call_state.keep_logits(problem, grid)
            self.kept_logits = call_state.kept_logits

    # -- the steps of `__init__`: vectors of length M or N are converted once for all tiles

    def _convert_options(self) -> None:
        """Convert biases and limits to the compute dtype."""
        problem, dtype = self.problem, self.call_state.dtype
        # in units of dot products, to which loops add them
        self.key_bias, self.query_bias = (
            None if bias is None else (bias * (LOG2_E / self.exponent_scale)).astype(dtype)
            for bias in (problem.key_bias, problem.query_bias)
        )
        self.query_limits, self.key_limits, self.guide_query_limits, self.guide_key_limits = (
            None if limits is None else limits.astype(dtype)
            for limits in (
                problem.query_limits, problem.key_limits,
                problem.guide_query_limits, problem.guide_key_limits,
            )
        )  # fmt: skip
        # whether rows and columns have the same logits, so that one exponential can serve both
        self.same_logits = self.key_bias is None and not problem.compares_with_limits

    def _convert_epilogue(self) -> None:
        """Convert the vectors of the epilogue to the compute dtype: factors of dL/dx, weights of
        pairs. For an epilogue that counts retrieval ranks, find the thresholds."""
        epilogue, problem, dtype = self.epilogue, self.problem, self.call_state.dtype
        if isinstance(epilogue, SoftmaxGradient):
            self.positive_gradient = epilogue.positive_gradient.astype(dtype)
            self.factors = SoftmaxFactors(epilogue, self.exponent_scale, dtype, self.same_logits)
            if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
                self.teacher_factors = SoftmaxFactors(
                    epilogue.teacher, self.teacher_exponent_scale, dtype, same_logits=True
                )
        elif isinstance(epilogue, Sigmoid):
            self.row_factor = epilogue.row_factor.astype(dtype)
            if problem.has_positive_ids:
                self.query_pair_weights = problem.query_pair_weights.astype(dtype)
                self.key_pair_weights = problem.key_pair_weights.astype(dtype)
        elif isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            # Base-2 logits of positives, with a bound of their rounding. They are found before the
            # pass, which counts the logits above them. (`epilogue.positive_logits` are its outputs)
            query, key = self.call_state.query, self.call_state.key
            thresholds = rank_thresholds(query, key, problem.positives)
            self.rank_threshold_logits = self.positive_scale * thresholds

    def _prepare_column_gradients(self) -> None:
        """Choose the memory in which the gradients of columns accumulate, if the pass has any.

        They are dK; or in a triangle, whose columns are rows of the other half, a part of dQ. They
        accumulate in their destination if it has the compute dtype, otherwise in new memory.
        """
        grid, gradients = self.grid, self.gradients
        self.has_column_gradients = gradients is not None and (
            grid.triangle or (gradients.want_key and not self.problem.symmetric)
        )
        self.in_place = self.call_state.schedule.dk_accumulator_rows == 0
        # the row block that overwrites the gradients of a column block; later row blocks add
        self.first_row_blocks: dict[int, int] = {}
        if gradients is None or not self.has_column_gradients:
            return
        keys = slice(grid.columns[0].start, grid.columns[-1].stop)
        destination = gradients.query if grid.triangle else gradients.key
        if self.in_place and destination is not None:
            self.first_key, self.accumulator = 0, destination
        else:
            shape = keys.stop - keys.start, self.problem.shape[2]
            self.first_key, self.accumulator = keys.start, np.empty(shape, self.call_state.dtype)
        for row_block in reversed(range(len(grid.rows))):
            for column_block in grid.visits(row_block):
                if not (grid.triangle and row_block == column_block):
                    self.first_row_blocks[column_block] = row_block
        for column_block, columns in enumerate(grid.columns):
            if column_block not in self.first_row_blocks:
                self.column_accumulator(columns)[...] = 0

    def _prepare_linear_terms(self) -> None:
        """Prepare the gradients of linear terms, which `store` subtracts from dQ and dK."""
        self.query_linear: list[LinearGradient] = []
        self.key_linear: list[LinearGradient] = []
        epilogue, gradients, symmetric = self.epilogue, self.gradients, self.problem.symmetric
        if not isinstance(epilogue, SoftmaxGradient) or gradients is None:
            return
        sides = np, self.call_state.query, self.call_state.key
        if gradients.want_query:
            self.query_linear = [
                LinearGradient(*sides, term, False, symmetric) for term in epilogue.linear
            ]
        if self.has_column_gradients and not symmetric:
            self.key_linear = [
                LinearGradient(*sides, term, True, symmetric) for term in epilogue.linear
            ]

    def directions(self, rows: slice, columns: slice) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """((bias of keys, limits) for the rows of a tile, (bias of keys, limits) for its columns).

        The keys of a column's softmax are the rows. A vector is None if the call lacks its option.
        """
        return (
            (part(self.key_bias, columns), part(self.query_limits, rows)),
            (part(self.query_bias, rows), part(self.key_limits, columns)),
        )

    def finish(self) -> None:
        """Store the gradients of the columns. `CPU.run_pass` calls this when its workers end.
        Over a triangle there is nothing to do: `Worker.finish_dq` has added them to dQ."""
        gradients, call_state = self.gradients, self.call_state
        if gradients is None or not self.has_column_gradients or self.grid.triangle:
            return
        need_dots = gradients.dots is not None and not gradients.want_query
        buffer = None
        if not call_state.key.readable_in_place:
            buffer = np.empty((self.grid.largest[1], self.problem.shape[2]), call_state.dtype)
        for columns in self.grid.columns:
            sums = self.column_accumulator(columns)
            destination = None if self.in_place else gradients.key
            self.store(
                sums, call_state.key, columns, buffer, destination, need_dots, is_key_side=True
            )

    def column_accumulator(self, columns: slice) -> Array:
        """The rows of the accumulator of dK that belong to some keys."""
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
        """Complete the gradients `g` of `rows`, and write them to their destination.

        First, `g` gets the gradient of the linear terms (`subtract`). Then `g` is differentiated
        through the normalisation. `destination` None: the result stays in `g`, which is the
        destination itself, or memory that only `dots` need.
        """
        assert self.gradients is not None
        linear = self.key_linear if is_key_side else self.query_linear
        if linear or need_dots or side.norms is not None:
            features = side.block(rows, buffer)
            for term in linear:
                subtract(term, g, features, rows)
            dots = np.empty(len(g))
            row_dots(g, features, dots)
            if need_dots:
                self.gradients.dots[rows] = dots
            g = side.to_features(
                g, features, dots, rows, (g if destination is None else destination).dtype
            )
        # Both branches convert g to the destination's dtype. (`to_features` has converted g only if
        # rows are normalised and the destination's dtype is wider)
        if destination is not None and add:
            destination[rows] += g
        elif destination is not None:
            np.copyto(destination[rows], g, casting="same_kind")


def part(vector: Array | None, indices: slice) -> Array | None:
    """Some elements of a vector; None if there is no vector."""
    return None if vector is None else vector[indices]
