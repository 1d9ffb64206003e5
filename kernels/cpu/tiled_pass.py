"""One pass on the CPU: row blocks from top to bottom, tile by tile.

For each tile, `run` calls `tile_products` (a matrix product of features, or products that the first
pass has kept), `apply_epilogue` (sums of exponentials, or dL/dx in the memory of the products) and,
for gradients, the products with dL/dx, which are added to dQ and dK. Threads of BLAS compute the
products, and a few threads the loops between them.

Letters: q [m, D] and k [n, D] are the features of a tile's rows and columns, x [m, n] is the tile:
dot products, then dL/dx times the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..direction_losses import finalize_direction
from ..distill.problem import TaughtGradient, TaughtProblem, TaughtStatistics
from ..epilogues import (
    Epilogue,
    OnlineSoftmax,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
)
from ..grid import Grid, slices
from ..linear import LinearGradient
from ..options import PairBlock
from ..problem import LOG2_E, Array, Gradients, Problem
from ..solve import Vectors
from .call_state import Block, CallState
from .factors import SoftmaxFactors
from .loops import sigmoid
from .loops import tile_ops as tile
from .operands import Side, rank_thresholds, row_dots, subtract
from .resources import BLAS, BUFFER_POOL, run_loop
from .sums import sum_columns, sum_tile

VECTORS = Vectors(np)


class TiledPass:
    """One visit of all blocks: vectors in the compute dtype, buffers, and the sum of dK."""

    def __init__(
        self,
        call_state: CallState,
        problem: Problem,
        grid: Grid,
        epilogue: Epilogue,
        gradients: Gradients | None,
    ) -> None:
        self.call_state, self.problem, self.grid = call_state, problem, grid
        self.epilogue, self.gradients = epilogue, gradients
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
        self._divide_memory()

        self.kept_products: dict[Block, Array] = {}
        if isinstance(epilogue, SoftmaxGradient):
            self.kept_products = call_state.take_kept_products(grid)
        elif isinstance(epilogue, Statistics) and call_state.schedule.has_gradients:
            call_state.keep_products(problem, grid)
            self.kept_products = call_state.kept_products

    # -- the steps of `__init__`: vectors of length M or N are converted once for all tiles

    def _convert_options(self) -> None:
        """Convert biases and limits to the compute dtype. Options that are not given have biases of
        0 and infinite limits."""
        problem, dtype = self.problem, self.call_state.dtype
        m, n, _ = problem.shape

        def converted(vector: Array | None, size: int, neutral: float, factor: float = 1) -> Array:
            if vector is None:
                return np.full(size, neutral, dtype)
            return (vector * factor).astype(dtype)

        # whether rows and columns have the same logits, so that one exponential can serve both
        options = problem.pair_options
        self.same_logits = options.same_logits
        self.excluded = []  # equal or different numbers of queries and keys: ids, groups
        for option in options.by_numbers:
            for query, key in option.columns(problem):
                numbers = np.ascontiguousarray(query), np.ascontiguousarray(key)
                self.excluded.append((option.equal, *numbers))
        if self.same_logits:
            return
        # in units of dot products, to which loops add them
        unit = LOG2_E / self.exponent_scale
        query_limits, key_limits, self.guide_query_limits, self.guide_key_limits = (
            converted(limits, size, np.inf)
            for limits, size in (
                (problem.query_limits, m), (problem.key_limits, n),
                (problem.guide_query_limits, m), (problem.guide_key_limits, n),
            )
        )  # fmt: skip
        no_limits, no_biases = np.full(max(m, n), np.inf, dtype), np.zeros(max(m, n), dtype)
        # the vectors of `tile_ops.apply_options` for each direction: of rows, of columns
        self.directions = (
            ((query_limits, no_biases), (no_limits, converted(problem.key_bias, n, 0.0, unit))),
            ((no_limits, converted(problem.query_bias, m, 0.0, unit)), (key_limits, no_biases)),
        )

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
        self.begun_columns: set[int] = set()  # column blocks to which a row block has added
        if gradients is None or not self.has_column_gradients:
            return
        keys = slice(grid.columns[0].start, grid.columns[-1].stop)
        destination = gradients.query if grid.triangle else gradients.key
        if self.in_place and destination is not None:
            self.first_key, self.accumulator = 0, destination
        else:
            shape = keys.stop - keys.start, self.problem.shape[2]
            self.first_key, self.accumulator = keys.start, np.empty(shape, self.call_state.dtype)

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

    def _divide_memory(self) -> None:
        """Take the memory of all buffers at once, and divide it."""
        call_state, d = self.call_state, self.problem.shape[2]
        bm, bn = self.grid.largest
        sizes = call_state.schedule.memory
        self.memory = BUFFER_POOL.take(sizes.elements(bm, bn), call_state.dtype)
        used_elements = 0

        def buffer(*shape: int) -> Array:
            nonlocal used_elements
            size = math.prod(shape)
            used_elements += size
            return self.memory[used_elements - size : used_elements].reshape(shape)

        self.products = buffer(sizes.block_elements(bm, bn))
        self.query_buffer = None if call_state.query.readable_in_place else buffer(bm, d)
        self.key_buffer = None if call_state.key.readable_in_place else buffer(bn, d)
        self.auxiliary_query_buffer, self.auxiliary_key_buffer = (
            None if side is None or side.readable_in_place else buffer(rows, side.features.shape[1])
            for side, rows in ((call_state.auxiliary_query, bm), (call_state.auxiliary_key, bn))
        )
        self.auxiliary_tile: Array | None = None  # bits of a guide, or products of a teacher
        if self.gradients is not None:
            self.gradient_product = buffer(max(bm, bn), d)
            self.dq = None if call_state.schedule.dq_in_place else buffer(bm, d)
        self.further_tiles = buffer(sizes.further_tiles, bm * bn)

    # -- the pass

    def run(self, report: Callable[[], None]) -> None:
        """Visit all blocks, then store the gradients of columns. Calls `report` after each tile."""
        for row_block in range(len(self.grid.rows)):
            self.run_row_block(row_block, report)
        self.finish_columns()
        BUFFER_POOL.give(self.memory)

    def run_row_block(self, row_block: int, report: Callable[[], None]) -> None:
        """Compute the tiles of one row block, from left to right."""
        grid, gradients = self.grid, self.gradients
        rows = grid.rows[row_block]
        q = self.call_state.query.block(rows, self.query_buffer)
        has_row_gradients = gradients is not None and (gradients.want_query or grid.triangle)
        is_first_tile = True
        for column_block in grid.visits(row_block):
            columns = grid.columns[column_block]
            diagonal = grid.triangle and row_block == column_block
            if diagonal and self.problem.pair_options.by_products:
                k = q  # so x_ij and x_ji have the same digits, and are on one side of a limit
            else:
                k = self.call_state.key.block(columns, self.key_buffer)
            x = self.tile_products(row_block, column_block, q, k)
            self.apply_epilogue(x, rows, columns, diagonal)
            if has_row_gradients:
                self.add_to_dq(x, k, rows, is_first_tile)
            if self.has_column_gradients and not diagonal:
                self.add_to_dk(x, q, columns, column_block not in self.begun_columns)
                self.begun_columns.add(column_block)
            is_first_tile = False
            report()
        if has_row_gradients:
            if is_first_tile:  # the grid leaves out all blocks of these rows
                self.dq_accumulator(rows)[...] = 0
            self.finish_dq(row_block, q)

    def tile_products(self, row_block: int, column_block: int, q: Array, k: Array) -> Array:
        """The tile's dot products x [m, n] of q and k, -inf for excluded pairs.

        The gradient pass takes products that the log-sum-exp pass has kept, if there are any. Sets
        `auxiliary_tile`.
        """
        kept_memory = self.kept_products.get((row_block, column_block))
        memory = self.products if kept_memory is None else kept_memory
        x, self.auxiliary_tile = self.call_state.schedule.memory.split_block(memory, len(q), len(k))
        if kept_memory is None or not isinstance(self.epilogue, SoftmaxGradient):
            rows, columns = self.grid.rows[row_block], self.grid.columns[column_block]
            self.compute_products(x, q, k, rows, columns)
        return x

    def compute_products(self, x: Array, q: Array, k: Array, rows: slice, columns: slice) -> None:
        """Compute the dot products of a tile into x, -inf for excluded pairs.

        Except in a gradient pass, positives become -inf, too. Their logits are then written to the
        epilogue's `positive_logits` (`RetrievalRanks` has them already).
        """
        problem = self.problem
        not_finite = None  # pairs whose guide's product is not finite: their logits become NaN
        if self.has_teacher:
            self.multiply_auxiliary_features(rows, columns, self.auxiliary_tile)
        elif self.auxiliary_tile is not None:
            not_finite = self.write_guide_bits(x, rows, columns, self.auxiliary_tile)
        BLAS.matmul(q, k.T, out=x)
        if not_finite is not None:
            x[not_finite] = np.nan
        if not isinstance(self.epilogue, SoftmaxGradient):
            logits = self.epilogue.positive_logits[rows]
            if isinstance(self.epilogue, RetrievalRanks):
                logits = logits.copy()  # an earlier pass has stored them: keep them
            positives = problem.positives[rows].reshape(len(x), -1)
            logits = logits.reshape(positives.shape)
            tile.set_aside_positives(
                x, positives, columns.start, self.positive_scale, logits, False
            )
        if problem.symmetric and rows.start < columns.stop and columns.start < rows.stop:
            tile.exclude_diagonal(x, rows.start, columns.start)
        positive_ids = tile.NO_IDS, tile.NO_IDS
        if problem.has_positive_ids:
            positive_ids = problem.query_positive_ids[rows], problem.key_positive_ids[columns]
        for equal, queries, keys in self.excluded:
            numbers = queries[rows], keys[columns]
            # a tile of one group has no pairs of different groups
            if equal or any((side != numbers[0][0]).any() for side in numbers):
                tile.exclude_pairs(x, *numbers, equal, *positive_ids)
        for option in problem.pair_options.by_masks:
            left_out, _ = option.masks(PairBlock(problem, rows, columns, x))
            x[left_out] = -np.inf

    def multiply_auxiliary_features(self, rows: slice, columns: slice, out: Array | None) -> None:
        """Compute the products [m, n] of the guide's features, or of the teacher's, into `out`."""
        call_state = self.call_state
        assert call_state.auxiliary_query is not None
        assert call_state.auxiliary_key is not None
        query = call_state.auxiliary_query.block(rows, self.auxiliary_query_buffer)
        key = query
        if not (self.grid.triangle and rows == columns):  # else rows and columns are the same
            key = call_state.auxiliary_key.block(columns, self.auxiliary_key_buffer)
        BLAS.matmul(query, key.T, out=out)

    def write_guide_bits(
        self, g: Array, rows: slice, columns: slice, guide_bits: Array
    ) -> Array | None:
        """Compare the guide's products with its limits, and write the result to `guide_bits`.

        A pair has one bit for each direction, 1 if the direction leaves out the pair. `g` [m, n] is
        memory for the guide's products. Returns [m, n] bool, which products are not finite; None:
        all are finite.
        """
        self.multiply_auxiliary_features(rows, columns, g)
        limits = self.guide_query_limits[rows], self.guide_key_limits[columns]
        return None if tile.mark_pairs(g, *limits, guide_bits) else ~np.isfinite(g)

    def apply_epilogue(self, x: Array, rows: slice, columns: slice, diagonal: bool) -> None:
        """Apply the pass's epilogue to a tile of products x, which it may overwrite by dL/dx.

        `diagonal`: rows of the tile are columns.
        """
        epilogue = self.epilogue
        if isinstance(epilogue, SoftmaxGradient):
            self.write_softmax_gradient(x, rows, columns)
        elif isinstance(epilogue, Sigmoid):
            self.write_sigmoid_gradient(epilogue, x, rows, columns)
        elif isinstance(epilogue, OnlineSoftmax):
            self.rescale = np.empty(len(x))  # factors of dQ in rows whose largest logit changes
            sums = epilogue.rows.part(rows)
            moment = np.zeros(len(x)) if sums.moment is None else sums.moment
            tile.online_softmax(x, self.exponent_scale, sums.max, sums.sum, moment, self.rescale)
        elif isinstance(epilogue, RetrievalRanks):
            counted = epilogue.positive_logits, epilogue.column_positive_logits
            self.count_above(x, rows, columns, *counted, epilogue.row_rank, epilogue.column_rank)
        elif isinstance(epilogue, TaughtStatistics):
            self.sum_both_models(epilogue, x, rows, columns)
        else:
            self.sum_exponentials(epilogue, x, rows, columns, diagonal)

    def with_options(self, x: Array, rows: slice, columns: slice, direction: int) -> Array:
        """A further tile: the products x with the options of one direction."""
        out = self.further_tiles[direction, : x.size].reshape(x.shape)
        sides = zip((rows, columns), self.directions[direction], strict=True)
        (row_limits, row_bias), (column_limits, column_bias) = (
            [vector[part] for vector in vectors] for part, vectors in sides
        )
        bits = np.empty((0, 0), np.uint8) if self.auxiliary_tile is None else self.auxiliary_tile
        tile.apply_options(
            x, row_limits, column_limits, row_bias, column_bias, bits, direction, out
        )  # fmt: skip
        return out

    def sum_exponentials(
        self, stats: Statistics, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> None:
        """Sum the exponentials of a tile by row, and by column if columns have sums."""
        (m, n), scale = x.shape, self.exponent_scale
        row_sums, column_sums = np.empty((3, m)), np.empty((3, n))
        both = stats.columns is not None and not diagonal
        if self.same_logits:
            sum_tile(x, x, scale, row_sums, column_sums if both else None)
        else:
            y = self.with_options(x, rows, columns, tile.BY_ROW)
            sum_tile(y, x, scale, row_sums, None)
            if both:
                y = self.with_options(x, rows, columns, tile.BY_COLUMN)
                sum_columns(y, x, scale, column_sums)
        VECTORS.merge(stats.rows.part(rows), Sums(*row_sums))
        if both:
            assert stats.columns is not None
            VECTORS.merge(stats.columns.part(columns), Sums(*column_sums))
        if stats.row_rank is not None:
            thresholds, column_rank = (
                self.rank_threshold_logits,
                stats.column_rank if both else None,
            )
            self.count_above(x, rows, columns, thresholds, thresholds, stats.row_rank, column_rank)

    def sum_both_models(
        self, stats: TaughtStatistics, x: Array, rows: slice, columns: slice
    ) -> None:
        """Sum the exponentials of a tile, of the student's logits and of the teacher's.

        Both models go through the same loops, so that equal logits have equal sums. The moments of
        both are sums of the student's logits c x_ij, times the exponentials of the model: of the
        student for the gradient of the scale, of the teacher for the mean of the student's logits
        under the teacher's probabilities, which the loss contains.
        """
        c, teacher_tile = self.exponent_scale, self.auxiliary_tile
        assert teacher_tile is not None
        for values, factor, total_rows, total_columns in (
            (x, c, stats.rows, stats.columns),
            (teacher_tile, self.teacher_exponent_scale, stats.teacher_rows, stats.teacher_columns),
        ):
            assert total_rows is not None
            row_sums, column_sums = np.empty((3, len(x))), np.empty((3, x.shape[1]))
            sum_tile(values, x, factor, row_sums, None if total_columns is None else column_sums)
            # the loops multiply the moments of x by `factor`; base-2 logits of the student are c x
            row_sums[2] *= c / factor
            VECTORS.merge(total_rows.part(rows), Sums(*row_sums))
            if total_columns is not None:
                column_sums[2] *= c / factor
                VECTORS.merge(total_columns.part(columns), Sums(*column_sums))

    def count_above(
        self, x: Array, rows: slice, columns: slice, row_logits: Array, column_logits: Array,
        row_rank: Array, column_rank: Array | None,
    ) -> None:  # fmt: skip
        """Add to the ranks how many logits of a row exceed `row_logits`, and of a column
        `column_logits`; None: columns are not ranked."""
        row_thresholds = (row_logits[rows] / self.positive_scale).astype(x.dtype)
        for part in slices(len(x), 256):
            is_above = x[part] > row_thresholds[part, None]
            row_rank[rows][part] += np.count_nonzero(is_above, axis=1)
            if column_rank is not None:
                thresholds = (column_logits[columns] / self.positive_scale).astype(x.dtype)
                column_rank[columns] += np.count_nonzero(x[part] > thresholds, axis=0)

    def write_softmax_gradient(self, x: Array, rows: slice, columns: slice) -> None:
        """x <- dL/dx times the scale, of a softmax; with a teacher, of both models' softmaxes."""
        if self.has_teacher:
            teacher_tile = self.auxiliary_tile
            assert teacher_tile is not None
            self.factors.write_gradient(x, rows, columns)
            self.teacher_factors.write_gradient(teacher_tile, rows, columns)
            np.subtract(x, teacher_tile, out=x)
            return
        columns_x = None
        if not self.same_logits:
            if self.factors.two_sided:
                columns_x = self.with_options(x, rows, columns, tile.BY_COLUMN)
            np.copyto(x, self.with_options(x, rows, columns, tile.BY_ROW))
        self.factors.write_gradient(x, rows, columns, columns_x)
        positives = self.problem.positives[rows].reshape(len(x), -1)
        values = self.positive_gradient[rows].reshape(positives.shape)
        tile.insert_positives(x, positives, columns.start, values)

    def write_sigmoid_gradient(
        self, epilogue: Sigmoid, x: Array, rows: slice, columns: slice
    ) -> None:
        """x <- dL/dx times the scale, of a pairwise sigmoid, and its sums over rows."""
        problem, moments = self.problem, epilogue.log_scale_grad
        scale, bias = float(problem.scale), float(problem.bias)
        sums = (
            epilogue.losses[rows], epilogue.bias_grad[rows],
            np.zeros(len(x)) if moments is None else moments[rows],
        )  # fmt: skip
        positives, logits = problem.positives[rows], epilogue.positive_logits[rows]
        of_positives = positives, columns.start, logits, epilogue.row_factor[rows]
        pairs = sigmoid.without_ids(x)
        if problem.has_positive_ids:  # positives are the tile's pairs of equal ids
            pairs = (
                problem.query_positive_ids[rows], problem.key_positive_ids[columns],
                self.query_pair_weights[rows], self.key_pair_weights[columns],
            )  # fmt: skip
        arguments = scale, bias, self.row_factor[rows], *sums, *pairs, *of_positives
        run_loop(sigmoid.sigmoid, x, *arguments)

    # -- gradients of rows and columns

    def add_to_dq(self, x: Array, k: Array, rows: slice, is_first_tile: bool) -> None:
        """dQ of the row block += x k, with dL/dx in the tile x; the first tile overwrites dQ."""
        dq = self.dq_accumulator(rows)
        if is_first_tile:
            self.multiply_gradient(x, k, dq)
            return
        product = self.gradient_product[: len(x)]
        self.multiply_gradient(x, k, product)
        if isinstance(self.epilogue, OnlineSoftmax):
            np.multiply(dq, self.rescale[:, None], out=dq, casting="same_kind")
        np.add(dq, product, out=dq)

    def add_to_dk(self, x: Array, q: Array, columns: slice, is_first_tile: bool) -> None:
        """dK of the column block += x' q; the first row block overwrites dK."""
        dk = self.column_accumulator(columns)
        if is_first_tile and dk.flags.c_contiguous:
            self.multiply_gradient(x, q, dk, transposed=True)
            return
        product = self.gradient_product[: len(dk)]
        self.multiply_gradient(x, q, product, transposed=True)
        if is_first_tile:
            np.copyto(dk, product)
        else:
            np.add(dk, product, out=dk)

    def multiply_gradient(
        self, x: Array, features: Array, out: Array, transposed: bool = False
    ) -> None:
        """out = x k, or x' q for the gradients of columns, with dL/dx in the tile x."""
        BLAS.matmul(x.T if transposed else x, features, out=out)

    def dq_accumulator(self, rows: slice) -> Array:
        """The memory [m, D] in which dQ of these rows accumulates."""
        if self.dq is not None:
            return self.dq[: rows.stop - rows.start]
        assert self.gradients is not None
        assert self.gradients.query is not None
        return self.gradients.query[rows]

    def column_accumulator(self, columns: slice) -> Array:
        """The rows of the accumulator of dK that belong to some keys."""
        return self.accumulator[columns.start - self.first_key : columns.stop - self.first_key]

    def finish_dq(self, row_block: int, q: Array) -> None:
        """Store dQ of a row block, after its last tile."""
        gradients, rows = self.gradients, self.grid.rows[row_block]
        assert gradients is not None
        g = self.dq_accumulator(rows)
        if isinstance(self.epilogue, OnlineSoftmax):
            self.finish_online_softmax(self.epilogue, g, rows)
        if self.grid.triangle and row_block in self.begun_columns:
            total = self.column_accumulator(rows)  # complete: all earlier row blocks have added
            g = np.add(total, g, out=total)
        elif self.grid.triangle:
            total = self.column_accumulator(rows)
            np.copyto(total, g)
            g = total
        destination = None if self.dq is None else gradients.query
        add, need_dots = gradients.add_query, gradients.dots is not None
        self.store(g, self.call_state.query, rows, q, destination, need_dots, add)

    def finish_online_softmax(self, stats: OnlineSoftmax, g: Array, rows: slice) -> None:
        """Complete dQ of an online softmax, whose exponentials were not divided by their sum yet.

        g_i: sum_j 2^(c (x_ij - max_i)) k_j over negatives -> a_i (sum_j p_ij k_j - (1 - p_iy) k_y),
        where c is `exponent_scale`, a_i is upstream_i row_direction_weight scale, and y is the
        positive of row i.
        """
        problem = self.problem
        sums, positive = stats.rows.part(rows), stats.positive_logits[rows]
        # `sums` are views of `stats.rows`, whose maxima and moments are those of dot products. They
        # become those of base-2 logits in place: `between_passes.finalize` reads `stats.rows` after
        # the pass
        sums.max *= self.exponent_scale
        if sums.moment is not None:
            sums.moment *= self.exponent_scale
        end = finalize_direction(np, sums, positive)
        a = problem.upstream[rows] * problem.row_direction_weight * float(problem.scale)
        # `reference_probability` is 2^(reference - lse), so `sum_factor` is a 2^(max - lse)
        sum_factor = a * end.reference_probability * np.exp2(sums.max - end.reference)
        np.multiply(g, sum_factor[:, None], out=g, casting="same_kind")
        positives = self.call_state.key.take(problem.positives[rows])
        positive_gradient = -a * end.negative_probability
        g += np.multiply(positives, positive_gradient[:, None], out=positives, casting="same_kind")

    def finish_columns(self) -> None:
        """Store the gradients of the columns, after the last tile. Over a triangle there is nothing
        to do: `finish_dq` has added them to dQ."""
        gradients, call_state = self.gradients, self.call_state
        if gradients is None or not self.has_column_gradients or self.grid.triangle:
            return
        need_dots = gradients.dots is not None and not gradients.want_query
        destination = None if self.in_place else gradients.key
        for column_block, columns in enumerate(self.grid.columns):
            sums = self.column_accumulator(columns)
            if column_block not in self.begun_columns:  # the grid leaves out all of its blocks
                sums[...] = 0
            k = None
            if self.key_linear or need_dots or call_state.key.norms is not None:
                k = call_state.key.block(columns, self.key_buffer)
            self.store(sums, call_state.key, columns, k, destination, need_dots, is_key_side=True)

    def store(
        self,
        g: Array,
        side: Side,
        rows: slice,
        features: Array | None,
        destination: Array | None,
        need_dots: bool,
        add: bool = False,
        is_key_side: bool = False,
    ) -> None:
        """Complete the gradients `g` of `rows`, whose features are `features`, and write them to
        their destination.

        First, `g` gets the gradient of the linear terms (`subtract`). Then `g` is differentiated
        through the normalisation. `destination` None: the result stays in `g`, which is the
        destination itself, or memory that only `dots` need.
        """
        assert self.gradients is not None
        linear = self.key_linear if is_key_side else self.query_linear
        if linear or need_dots or side.norms is not None:
            assert features is not None
            for term in linear:
                subtract(term, g, features, rows)
            dots = np.empty(len(g))
            row_dots(g, np.ascontiguousarray(features), dots)
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
