"""One worker thread of a pass on the CPU: row blocks, tile by tile.

For each tile, `run_row_block` calls `tile_logits` (a matrix product of features, or logits that the
first pass has kept), `apply_epilogue` (sums of exponentials, or dL/dx in the memory of the logits)
and, for gradients, the products with dL/dx, which are added to dQ and dK.

Letters: q [m, D] and k [n, D] are the features of a tile's rows and columns, x [m, n] is the tile:
dot products, then dL/dx times the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..direction_losses import finalize_direction
from ..distill import tiles as distillation
from ..distill.problem import TaughtStatistics
from ..epilogues import OnlineSoftmax, RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics, Sums
from ..problem import Array
from .loops import sigmoid
from .loops import tile_ops as tile
from .loops.ranks import count_above, count_above_columns
from .pass_state import PassState, part
from .resources import BUFFER_POOL, Cancelled


class Worker:
    """One thread of a pass, with buffers that no other thread uses."""

    def __init__(self, state: PassState, first_row_block: int) -> None:
        """`first_row_block`: the row block that the worker computes first."""
        self.state = state
        call_state, grid, d = state.call_state, state.grid, state.problem.shape[2]
        bm, bn = grid.largest

        sizes = call_state.schedule.memory
        memory = self.buffered = None  # `buffered`: the block whose products `self.logits` has
        if isinstance(state.epilogue, SoftmaxGradient):
            memory, self.buffered = call_state.take_left_buffer(grid, first_row_block)
        if memory is None:
            memory = BUFFER_POOL.take(sizes.worker_elements(bm, bn), call_state.dtype)
        self.memory = memory
        used_elements = 0

        def buffer(*shape: int) -> Array:
            nonlocal used_elements
            size = math.prod(shape)
            used_elements += size
            return memory[used_elements - size : used_elements].reshape(shape)

        self.logits = buffer(sizes.block_elements(bm, bn))
        self.query_buffer = None if call_state.query.readable_in_place else buffer(bm, d)
        self.key_buffer = None if call_state.key.readable_in_place else buffer(bn, d)
        self.auxiliary_query_buffer, self.auxiliary_key_buffer = (
            None if side is None or side.readable_in_place else buffer(rows, side.features.shape[1])
            for side, rows in ((call_state.auxiliary_query, bm), (call_state.auxiliary_key, bn))
        )
        self.auxiliary_tile: Array | None = None  # bits of a guide, or products of a teacher
        if state.gradients is not None:
            self.product = buffer(max(bm, bn), d)
            self.dq = None if call_state.schedule.dq_in_place else buffer(bm, d)
        # Sums of a tile's rows and columns; `partial`: its column sums in the compute dtype
        sums = 2 if state.problem.moments else 1
        self.tile_rows, self.tile_columns = (Sums(*np.empty((1 + sums, n))) for n in (bm, bn))
        self.partial = np.empty((sums, bn), call_state.dtype)

    def run_row_block(self, row_block: int, report: Callable[[], None]) -> None:
        """Compute the tiles of one row block, from left to right (`order.backwards`: from right).

        Sums of columns and dK get contributions from all row blocks. So that results do not depend
        on which worker is faster, `order.wait` makes each column block take them in the order of
        the row blocks. `report` is called after each tile.
        """
        state = self.state
        grid, gradients, order = state.grid, state.gradients, state.order
        rows = grid.rows[row_block]
        q = state.call_state.query.block(rows, self.query_buffer)
        has_row_gradients = gradients is not None and (gradients.want_query or grid.triangle)
        is_first_tile = True
        column_blocks = grid.visits(row_block)
        for column_block in reversed(column_blocks) if order.backwards else column_blocks:
            if order.cancelled:
                raise Cancelled
            columns = grid.columns[column_block]
            diagonal = grid.triangle and row_block == column_block
            if diagonal and state.query_limits is not None:
                k = q  # so x_ij and x_ji have the same digits, and are on one side of a limit
            else:
                k = state.call_state.key.block(columns, self.key_buffer)
            x = self.tile_products(row_block, column_block, q, k)
            # a step that must run in the order of the row blocks; None: this tile has no such step
            merge_tile = self.apply_epilogue(x, rows, columns, diagonal)
            if has_row_gradients:
                self.add_to_dq(x, k, rows, is_first_tile)
            add_columns = state.has_column_gradients and not diagonal
            if add_columns:
                dk = state.column_accumulator(columns)
                overwrites = state.first_row_blocks[column_block] == row_block
                # Only the first row block writes to dk before `order.wait`: no other row block uses
                # dk before the first row block calls `order.advance`
                product = dk if overwrites and dk.flags.c_contiguous else self.product[: len(k)]
                self.multiply_gradient(x, q, product, transposed=True)
            if merge_tile is not None or state.has_column_gradients:
                order.wait(row_block, column_block)
            if merge_tile is not None:
                merge_tile()
            if add_columns and product is not dk:
                if overwrites:
                    np.copyto(dk, product)
                else:
                    np.add(dk, product, out=dk)
            order.advance(row_block, column_block)
            is_first_tile = False
            report()
        if has_row_gradients:
            if is_first_tile:  # the grid leaves out all blocks of these rows
                self.dq_accumulator(rows)[...] = 0
            self.finish_dq(rows, q)

    def tile_products(self, row_block: int, column_block: int, q: Array, k: Array) -> Array:
        """The tile's dot products x [m, n] of q and k, -inf for excluded pairs.

        The gradient pass takes products that the log-sum-exp pass has kept, if there are any. Sets
        `auxiliary_tile`.
        """
        state = self.state
        kept_memory = state.kept_logits.get((row_block, column_block))
        memory = self.logits if kept_memory is None else kept_memory
        x, self.auxiliary_tile = state.call_state.schedule.memory.split_block(
            memory, len(q), len(k)
        )
        if kept_memory is not None and isinstance(state.epilogue, SoftmaxGradient):
            return x
        if self.buffered == (row_block, column_block):
            self.buffered = None
            return x
        self.buffered = None if kept_memory is not None else (row_block, column_block)
        self.compute_products(x, q, k, state.grid.rows[row_block], state.grid.columns[column_block])
        return x

    def compute_products(self, x: Array, q: Array, k: Array, rows: slice, columns: slice) -> None:
        """Compute the dot products of a tile into x, -inf for excluded pairs.

        Except in a gradient pass, positives become -inf, too. Their logits are then written to the
        epilogue's `positive_logits` (`RetrievalRanks` has them already).
        """
        state, problem = self.state, self.state.problem
        not_finite = None  # pairs whose guide's product is not finite: their logits become NaN
        if state.has_teacher:
            self.multiply_auxiliary_features(rows, columns, self.auxiliary_tile)
        elif self.auxiliary_tile is not None:
            not_finite = self.write_guide_bits(x, rows, columns, self.auxiliary_tile)
        np.matmul(q, k.T, out=x)
        if not_finite is not None:
            x[not_finite] = np.nan
        if not isinstance(state.epilogue, SoftmaxGradient):
            logits = state.epilogue.positive_logits[rows]
            if isinstance(state.epilogue, RetrievalRanks):
                logits = logits.copy()  # an earlier pass has stored them: keep them
            positives = problem.positives[rows].reshape(len(x), -1)
            tile.set_aside_positives(
                x, positives, columns.start, state.positive_scale, logits.reshape(positives.shape)
            )
        if problem.symmetric and rows.start < columns.stop and columns.start < rows.stop:
            start = max(rows.start, columns.start)
            tile.exclude_diagonal(x[start - rows.start :, start - columns.start :])
        sides = (problem.query_positive_ids, rows), (problem.key_positive_ids, columns)
        positive_ids = [part(ids, side) for ids, side in sides]
        if problem.query_ids is not None:
            ids = problem.query_ids[rows], problem.key_ids[columns]
            tile.exclude_pairs(x, *ids, True, *positive_ids)
        if problem.query_groups is not None:
            groups = problem.query_groups[rows], problem.key_groups[columns]
            has_other_groups = any((numbers != groups[0][0]).any() for numbers in groups)
            if has_other_groups:  # otherwise the tile has only pairs of one group
                tile.exclude_pairs(x, *groups, False, *positive_ids)

    def multiply_auxiliary_features(self, rows: slice, columns: slice, out: Array | None) -> None:
        """Compute the products [m, n] of the guide's features, or of the teacher's, into `out`."""
        state, call_state = self.state, self.state.call_state
        assert call_state.auxiliary_query is not None
        assert call_state.auxiliary_key is not None
        query = call_state.auxiliary_query.block(rows, self.auxiliary_query_buffer)
        key = query
        if not (state.grid.triangle and rows == columns):  # else rows and columns are the same
            key = call_state.auxiliary_key.block(columns, self.auxiliary_key_buffer)
        np.matmul(query, key.T, out=out)

    def write_guide_bits(
        self, g: Array, rows: slice, columns: slice, guide_bits: Array
    ) -> Array | None:
        """Compare the guide's products with its limits, and write the result to `guide_bits`.

        A pair has one bit for each direction, 1 if the direction leaves out the pair. `g` [m, n] is
        memory for the guide's products. Returns [m, n] bool, which products are not finite; None:
        all are finite.
        """
        state = self.state
        self.multiply_auxiliary_features(rows, columns, g)
        assert state.guide_query_limits is not None
        limits = state.guide_query_limits[rows]
        if tile.mark_pairs(g, limits, part(state.guide_key_limits, columns), guide_bits):
            return None
        return ~np.isfinite(g)

    def apply_epilogue(
        self, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """Apply the pass's epilogue to a tile of products x, which it may overwrite by dL/dx.

        Returns the step that merges the tile's sums (or ranks), for the caller to run in the order
        of row blocks. None: no such step, or it has run. `diagonal`: rows of the tile are columns.
        """
        epilogue = self.state.epilogue
        if isinstance(epilogue, SoftmaxGradient):
            self.write_softmax_gradient(x, rows, columns)
        elif isinstance(epilogue, Sigmoid):
            self.write_sigmoid_gradient(epilogue, x, rows, columns)
        elif isinstance(epilogue, OnlineSoftmax):
            # factors of dQ in rows whose largest logit changes, in memory that is otherwise unused
            self.rescale = self.tile_rows.max[: len(x)]
            sums = epilogue.rows.part(rows).arrays
            tile.online_softmax(x, self.state.exponent_scale, *sums, self.rescale)
        elif isinstance(epilogue, RetrievalRanks):
            return self.count_higher_logits(epilogue, x, rows, columns)
        elif isinstance(epilogue, TaughtStatistics):
            constants = self.state.exponent_scale, self.state.teacher_exponent_scale
            merge_tile = distillation.statistics(
                epilogue, x, self.auxiliary_tile, *constants, rows, columns
            )
            if epilogue.columns is not None:
                return merge_tile
            merge_tile()
        else:
            return self.statistics(epilogue, x, rows, columns, diagonal)
        return None

    def write_softmax_gradient(self, x: Array, rows: slice, columns: slice) -> None:
        """x <- dL/dx times the scale, of a softmax; with a teacher, of both models' softmaxes."""
        state = self.state
        guide_bits = None if state.has_teacher else self.auxiliary_tile
        options = *state.directions(rows, columns), guide_bits
        state.factors.write_gradient(x, rows, columns, *options)
        if state.has_teacher:
            teacher_tile, no_options = self.auxiliary_tile, ((None, None), (None, None), None)
            assert teacher_tile is not None
            state.teacher_factors.write_gradient(teacher_tile, rows, columns, *no_options)
            np.subtract(x, teacher_tile, out=x)
            return
        positives = state.problem.positives[rows].reshape(len(x), -1)
        values = state.positive_gradient[rows].reshape(positives.shape)
        tile.insert_positives(x, positives, columns.start, values)

    def write_sigmoid_gradient(
        self, epilogue: Sigmoid, x: Array, rows: slice, columns: slice
    ) -> None:
        """x <- dL/dx times the scale, of a pairwise sigmoid, and its sums over rows."""
        state, log_scale_grad = self.state, epilogue.log_scale_grad
        problem = state.problem
        scale, bias = float(problem.scale), float(problem.bias)
        sums = (
            epilogue.losses[rows], epilogue.bias_grad[rows],
            None if log_scale_grad is None else log_scale_grad[rows],
        )  # fmt: skip
        if problem.has_positive_ids:  # positives are the tile's pairs of equal ids
            pairs = (
                problem.query_positive_ids[rows], problem.key_positive_ids[columns],
                state.query_pair_weights[rows], state.key_pair_weights[columns],
            )  # fmt: skip
            sigmoid.sigmoid(x, scale, bias, state.row_factor[rows], *sums, *pairs)
            return
        sigmoid.sigmoid(x, scale, bias, state.row_factor[rows], *sums)
        sigmoid.sigmoid_positives(
            x, problem.positives[rows], columns.start, epilogue.positive_logits[rows], scale, bias,
            epilogue.row_factor[rows], *sums,
        )  # fmt: skip

    def count_higher_logits(
        self, ranks: RetrievalRanks, x: Array, rows: slice, columns: slice
    ) -> Callable[[], None] | None:
        """Add to the ranks of rows. Returns the step that adds to the ranks of columns, or None."""
        scale = self.state.positive_scale
        count_above(x, scale, ranks.positive_logits[rows], ranks.row_rank[rows])
        if ranks.column_rank is None:
            return None
        counts = ranks.column_positive_logits[columns], ranks.column_rank[columns]
        return lambda: count_above_columns(x, scale, *counts)

    def statistics(
        self, stats: Statistics, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """Sum the exponentials of a tile by row, and by column if columns have sums.

        Returns the step that merges the sums of the tile into those of the pass, if it has to run
        in the order of the row blocks; None: the step has run already.
        """
        state, scale = self.state, self.state.exponent_scale
        m, n = x.shape
        tile_rows, tile_columns = self.tile_rows.part(slice(m)), self.tile_columns.part(slice(n))
        both = stats.columns is not None and not diagonal
        row_arguments, column_arguments = state.directions(rows, columns)
        if both and state.same_logits:
            partial = self.partial[:, :n]
            tile.row_and_column_statistics(
                x, scale, *tile_rows.arrays, *tile_columns.arrays, partial[0], partial[-1]
            )
        else:
            guide_bits = self.auxiliary_tile
            tile.row_statistics(x, scale, *tile_rows.arrays, *row_arguments, guide_bits)
            if both:
                tile.column_statistics(
                    x, scale, *tile_columns.arrays, *column_arguments, guide_bits
                )

        def merge_tile() -> None:
            # Row sums are also merged in order: if queries are the keys, earlier row blocks add to
            # them as columns
            tile.merge(*stats.rows.part(rows).arrays, *tile_rows.arrays)
            if stats.row_rank is not None:
                thresholds = state.rank_threshold_logits[rows]
                count_above(x, state.positive_scale, thresholds, stats.row_rank[rows])
            if both:
                assert stats.columns is not None
                tile.merge(*stats.columns.part(columns).arrays, *tile_columns.arrays)
                if stats.column_rank is not None:
                    counts = state.rank_threshold_logits[columns], stats.column_rank[columns]
                    count_above_columns(x, state.positive_scale, *counts)

        if stats.columns is not None:
            return merge_tile
        merge_tile()
        return None

    def add_to_dq(self, x: Array, k: Array, rows: slice, is_first_tile: bool) -> None:
        """dQ of the row block += x k, with dL/dx in the tile x; the first tile overwrites dQ."""
        dq = self.dq_accumulator(rows)
        if is_first_tile:
            self.multiply_gradient(x, k, dq)
            return
        product = self.product[: len(x)]
        self.multiply_gradient(x, k, product)
        if isinstance(self.state.epilogue, OnlineSoftmax):
            np.multiply(dq, self.rescale[:, None], out=dq, casting="same_kind")
        np.add(dq, product, out=dq)

    def multiply_gradient(
        self, x: Array, features: Array, out: Array, transposed: bool = False
    ) -> None:
        """out = x k, or x' q for the gradients of columns, with dL/dx in the tile x."""
        np.matmul(x.T if transposed else x, features, out=out)

    def dq_accumulator(self, rows: slice) -> Array:
        """The memory [m, D] in which dQ of these rows accumulates."""
        if self.dq is not None:
            return self.dq[: rows.stop - rows.start]
        assert self.state.gradients is not None
        assert self.state.gradients.query is not None
        return self.state.gradients.query[rows]

    def finish_dq(self, rows: slice, q: Array) -> None:
        """Store dQ of a row block, after its last tile."""
        state, gradients = self.state, self.state.gradients
        assert gradients is not None
        g = self.dq_accumulator(rows)
        if isinstance(state.epilogue, OnlineSoftmax):
            self.finish_online_softmax(state.epilogue, g, rows)
        if state.grid.triangle:
            total = state.column_accumulator(rows)  # complete: all earlier row blocks have added
            g = np.add(total, g, out=total)
        destination = None if self.dq is None else gradients.query
        side, add = state.call_state.query, gradients.add_query
        need_dots = gradients.dots is not None
        state.store(g, side, rows, self.query_buffer, destination, need_dots, add)

    def finish_online_softmax(self, stats: OnlineSoftmax, g: Array, rows: slice) -> None:
        """Complete dQ of an online softmax, whose exponentials were not divided by their sum yet.

        g_i: sum_j 2^(c (x_ij - max_i)) k_j over negatives -> a_i (sum_j p_ij k_j - (1 - p_iy) k_y),
        where c is `exponent_scale`, a_i is upstream_i row_direction_weight scale, and y is the
        positive of row i.
        """
        problem, call_state = self.state.problem, self.state.call_state
        sums, positive = stats.rows.part(rows), stats.positive_logits[rows]
        # `sums` are views of `stats.rows`, whose maxima and moments are those of dot products. They
        # become those of base-2 logits in place: `between_passes.finalize` reads `stats.rows` after
        # the pass
        sums.max *= self.state.exponent_scale
        if sums.moment is not None:
            sums.moment *= self.state.exponent_scale
        end = finalize_direction(np, sums, positive)
        a = problem.upstream[rows] * problem.row_direction_weight * float(problem.scale)
        # `reference_probability` is 2^(reference - lse), so `sum_factor` is a 2^(max - lse)
        sum_factor = a * end.reference_probability * np.exp2(sums.max - end.reference)
        np.multiply(g, sum_factor[:, None], out=g, casting="same_kind")
        positives = call_state.key.take(problem.positives[rows])
        positive_gradient = -a * end.negative_probability
        g += np.multiply(positives, positive_gradient[:, None], out=positives, casting="same_kind")
