"""One worker thread of a pass on the CPU: row blocks, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..direction_losses import finalize_direction
from ..distill import tiles as distillation
from ..distill.problem import TaughtStatistics
from ..epilogues import OnlineSoftmax, RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics, Sums
from ..problem import Array
from .loops import sigmoid
from .loops import tile_ops as tile
from .loops.elementary import compiled, wide_vectors
from .pass_state import Factors, PassState, part
from .resources import BUFFER_POOL, Cancelled


class Worker:
    """One thread of a pass, with its own buffers."""

    def __init__(self, state: PassState, first_row_block: int) -> None:
        """`first_row_block`: the row block that the worker begins with."""
        self.state = state
        context, grid, d = state.context, state.grid, state.problem.shape[2]
        bm, bn = grid.largest

        sizes = context.schedule.memory
        memory = self.buffered = None  # `buffered`: the block whose logits are in the buffer
        if isinstance(state.epilogue, SoftmaxGradient):
            memory, self.buffered = context.take_worker_memory(grid, first_row_block)
        if memory is None:
            memory = BUFFER_POOL.take(sizes.worker_elements(bm, bn), context.dtype)
        self.memory = memory
        used_elements = 0

        def buffer(*shape: int) -> Array:
            nonlocal used_elements
            size = math.prod(shape)
            used_elements += size
            return memory[used_elements - size : used_elements].reshape(shape)

        self.logits = buffer(sizes.block_elements(bm, bn))
        self.query_buffer = None if context.query.readable_in_place else buffer(bm, d)
        self.key_buffer = None if context.key.readable_in_place else buffer(bn, d)
        self.auxiliary_query_buffer, self.auxiliary_key_buffer = (
            None if side is None or side.readable_in_place else buffer(rows, side.features.shape[1])
            for side, rows in ((context.auxiliary_query, bm), (context.auxiliary_key, bn))
        )
        self.auxiliary_tile: Array | None = None  # bits of a guide, or products of a teacher
        if state.gradients is not None:
            self.product = buffer(max(bm, bn), d)
            self.dq = None if context.schedule.dq_in_place else buffer(bm, d)
        # Sums of a tile's rows and columns; `partial`: its column sums in the compute dtype
        sums = 2 if state.problem.moments else 1
        self.tile_rows, self.tile_columns = (Sums(*np.empty((1 + sums, n))) for n in (bm, bn))
        self.partial = np.empty((sums, bn), context.dtype)

    def run_row_block(self, row_block: int, report: Callable[[], None]) -> None:
        """Compute one row block, from left to right."""
        state = self.state
        grid, gradients, order = state.grid, state.gradients, state.order
        rows = grid.rows[row_block]
        q = state.context.query.block(rows, self.query_buffer)
        row_gradients = gradients is not None and (gradients.want_query or grid.triangle)
        is_first_tile = True
        column_blocks = grid.visits(row_block)
        for column_block in reversed(column_blocks) if order.backwards else column_blocks:
            if order.cancelled:
                raise Cancelled
            columns = grid.columns[column_block]
            diagonal = grid.triangle and row_block == column_block
            if diagonal and state.limits is not None:
                k = q  # x_ij and x_ji are then equal in all digits, and as much above a limit
            else:
                k = state.context.key.block(columns, self.key_buffer)
            x = self.block(row_block, column_block, q, k)
            run_in_order = self.epilogue(x, rows, columns, diagonal)
            if row_gradients:
                self.add_rows(x, k, rows, is_first_tile)
            add_columns = state.column_gradients and not diagonal
            if add_columns:
                dk = state.column_accumulator(columns)
                overwrites = state.first_row_blocks[column_block] == row_block
                # Only the first row block writes dk before `order.wait`: the others wait for it
                product = dk if overwrites and dk.flags.c_contiguous else self.product[: len(k)]
                self.multiply(x, q, product, of_columns=True)
            if run_in_order is not None or state.column_gradients:
                order.wait(row_block, column_block)
            if run_in_order is not None:
                run_in_order()
            if add_columns and product is not dk:
                if overwrites:
                    np.copyto(dk, product)
                else:
                    np.add(dk, product, out=dk)
            order.advance(row_block, column_block)
            is_first_tile = False
            report()
        if row_gradients:
            if is_first_tile:
                self.row_accumulator(rows)[...] = 0
            self.finish_rows(rows, q)

    def block(self, row_block: int, column_block: int, q: Array, k: Array) -> Array:
        """The tile's raw products, -inf for excluded pairs. The gradient pass reuses kept ones."""
        state = self.state
        kept_memory = state.kept_logits.get((row_block, column_block))
        memory = self.logits if kept_memory is None else kept_memory
        x, self.auxiliary_tile = state.context.schedule.memory.split_block(memory, len(q), len(k))
        if kept_memory is not None and isinstance(state.epilogue, SoftmaxGradient):
            return x
        if self.buffered == (row_block, column_block):
            self.buffered = None
            return x
        self.buffered = None if kept_memory is not None else (row_block, column_block)
        self.compute(x, q, k, state.grid.rows[row_block], state.grid.columns[column_block])
        return x

    def compute(self, x: Array, q: Array, k: Array, rows: slice, columns: slice) -> None:
        """Write the raw products of a tile into x, -inf for excluded pairs."""
        state, problem = self.state, self.state.problem
        spoiled = None
        if state.has_teacher:
            self.multiply_auxiliary_features(rows, columns, self.auxiliary_tile)
        elif self.auxiliary_tile is not None:
            spoiled = self.write_guide_bits(x, rows, columns, self.auxiliary_tile)
        np.matmul(q, k.T, out=x)
        if spoiled is not None:
            x[spoiled] = np.nan
        if not isinstance(state.epilogue, SoftmaxGradient):
            logits = state.epilogue.positive_logits[rows]
            if isinstance(state.epilogue, RetrievalRanks):
                logits = logits.copy()  # known already: do not overwrite them
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
            if any(
                (numbers != groups[0][0]).any() for numbers in groups
            ):  # else all are of one group
                tile.exclude_pairs(x, *groups, False, *positive_ids)

    def multiply_auxiliary_features(self, rows: slice, columns: slice, out: Array | None) -> None:
        """The products of the guide's features, or of the teacher's."""
        state, context = self.state, self.state.context
        assert context.auxiliary_query is not None
        assert context.auxiliary_key is not None
        query = context.auxiliary_query.block(rows, self.auxiliary_query_buffer)
        key = query
        if not (state.grid.triangle and rows == columns):  # as the features of a diagonal tile
            key = context.auxiliary_key.block(columns, self.auxiliary_key_buffer)
        np.matmul(query, key.T, out=out)

    def write_guide_bits(
        self, g: Array, rows: slice, columns: slice, guide_bits: Array
    ) -> Array | None:
        """Write the guide's products to `g`, and to `guide_bits` the directions that leave out
        each pair. Returns [m, n] bool, which products are not finite; None: all are finite."""
        state = self.state
        self.multiply_auxiliary_features(rows, columns, g)
        assert state.guide_limits is not None
        limits = state.guide_limits[rows]
        if tile.mark_pairs(g, limits, part(state.guide_key_limits, columns), guide_bits):
            return None
        return ~np.isfinite(g)

    def epilogue(
        self, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """Apply the pass's epilogue to a tile. Returns the part that has to run in the order of the
        row blocks, as a function; None: there is no such part."""
        state, epilogue = self.state, self.state.epilogue
        if isinstance(epilogue, SoftmaxGradient):
            guide_bits = None if state.has_teacher else self.auxiliary_tile
            options = *state.directions(rows, columns), guide_bits
            self.softmax_gradient(x, state.factors, rows, columns, *options)
            if state.has_teacher:
                t, plain = self.auxiliary_tile, ((None, None), (None, None), None)
                assert t is not None
                self.softmax_gradient(t, state.teacher_factors, rows, columns, *plain)
                np.subtract(x, t, out=x)
                return None
            positives = state.problem.positives[rows].reshape(len(x), -1)
            values = state.positive_gradient[rows].reshape(positives.shape)
            tile.insert_positives(x, positives, columns.start, values)
            return None
        if isinstance(epilogue, Sigmoid):
            problem, moments = state.problem, epilogue.log_scale_grad
            scale, bias = float(problem.scale), float(problem.bias)
            positives = problem.positives[rows]
            sums = (
                epilogue.losses[rows], epilogue.bias_grad[rows],
                None if moments is None else moments[rows],
            )  # fmt: skip
            if problem.has_positive_ids:
                pairs = (
                    problem.query_positive_ids[rows], problem.key_positive_ids[columns],
                    state.query_pair_weights[rows], state.key_pair_weights[columns],
                )  # fmt: skip
                sigmoid.sigmoid(x, scale, bias, state.row_factor[rows], *sums, *pairs)
                return None
            sigmoid.sigmoid(x, scale, bias, state.row_factor[rows], *sums)
            sigmoid.sigmoid_positives(
                x, positives, columns.start, epilogue.positive_logits[rows], scale, bias,
                epilogue.row_factor[rows], *sums,
            )  # fmt: skip
            return None
        if isinstance(epilogue, OnlineSoftmax):
            self.rescale = self.tile_rows.max[: len(x)]
            sums = epilogue.rows.part(rows).arrays
            tile.online_softmax(x, state.logit_scale, *sums, self.rescale)
            return None
        if isinstance(epilogue, RetrievalRanks):
            scale = state.positive_scale
            count_above(x, scale, epilogue.positive_logits[rows], epilogue.row_rank[rows])
            if epilogue.column_rank is None:
                return None
            counts = epilogue.column_positive_logits[columns], epilogue.column_rank[columns]
            return lambda: count_above_columns(x, scale, *counts)
        if isinstance(epilogue, TaughtStatistics):
            constants = state.logit_scale, state.teacher_logit_scale
            run_in_order = distillation.statistics(
                epilogue, x, self.auxiliary_tile, *constants, rows, columns
            )
            if epilogue.columns is not None:
                return run_in_order
            return run_in_order()
        return self.statistics(epilogue, x, rows, columns, diagonal)

    def softmax_gradient(
        self, x: Array, factors: Factors, rows: slice, columns: slice, row_arguments: Any,
        column_arguments: Any, guide_bits: Array | None,
    ) -> None:  # fmt: skip
        """Replace the dot products x by dL/dx of a softmax. For `row_arguments` and
        `column_arguments` see `PassState.directions`."""
        scale, reference = factors.logit_scale, factors.row_reference[rows]
        row_factor = factors.row_factor[rows]
        if not factors.two_sided:
            tile.softmax_gradient(x, scale, reference, row_factor, *row_arguments, guide_bits)
        elif factors.one_exponential:
            tile.softmax_gradient_shared(
                x, scale, reference, row_factor, factors.shared_row_factor[rows],
                factors.shared_column_factor[columns],
            )  # fmt: skip
        else:
            tile.softmax_gradient_two_sided(
                x, scale, reference, row_factor, factors.column_reference[columns],
                factors.column_factor[columns],
                *row_arguments, *column_arguments, guide_bits,
            )  # fmt: skip

    def statistics(
        self, stats: Statistics, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        state = self.state
        m, n = x.shape
        tile_rows, tile_columns = self.tile_rows.part(slice(m)), self.tile_columns.part(slice(n))
        both = stats.columns is not None and not diagonal
        row_arguments, column_arguments = state.directions(rows, columns)
        if both and state.same_logits:
            partial = self.partial[:, :n]
            tile.row_and_column_statistics(
                x, state.logit_scale, *tile_rows.arrays, *tile_columns.arrays, partial[0],
                partial[-1],
            )  # fmt: skip
        else:
            guide_bits = self.auxiliary_tile
            tile.row_statistics(x, state.logit_scale, *tile_rows.arrays, *row_arguments, guide_bits)
            if both:
                tile.column_statistics(
                    x, state.logit_scale, *tile_columns.arrays, *column_arguments, guide_bits
                )

        def run_in_order() -> None:
            # Row sums are also merged in order: if queries are the keys, earlier row blocks add to
            # them as columns
            tile.merge(*stats.rows.part(rows).arrays, *tile_rows.arrays)
            if stats.row_rank is not None:
                threshold = state.rank_threshold[rows]
                count_above(x, state.positive_scale, threshold, stats.row_rank[rows])
            if both:
                assert stats.columns is not None
                tile.merge(*stats.columns.part(columns).arrays, *tile_columns.arrays)
                if stats.column_rank is not None:
                    threshold = state.rank_threshold[columns]
                    ranks = stats.column_rank[columns]
                    count_above_columns(x, state.positive_scale, threshold, ranks)

        if stats.columns is not None:
            return run_in_order
        run_in_order()
        return None

    def add_rows(self, x: Array, k: Array, rows: slice, is_first_tile: bool) -> None:
        """dQ_a += P K_b."""
        dq = self.row_accumulator(rows)
        if is_first_tile:
            self.multiply(x, k, dq)
            return
        product = self.product[: len(x)]
        self.multiply(x, k, product)
        if isinstance(self.state.epilogue, OnlineSoftmax):
            np.multiply(dq, self.rescale[:, None], out=dq, casting="same_kind")
        np.add(dq, product, out=dq)

    def multiply(self, x: Array, features: Array, out: Array, of_columns: bool = False) -> None:
        """out = P K_b, or P' Q_a for the gradients of columns, with dL/dx in the tile x."""
        np.matmul(x.T if of_columns else x, features, out=out)

    def row_accumulator(self, rows: slice) -> Array:
        """Where dQ of these rows accumulates."""
        if self.dq is not None:
            return self.dq[: rows.stop - rows.start]
        assert self.state.gradients is not None
        assert self.state.gradients.query is not None
        return self.state.gradients.query[rows]

    def finish_rows(self, rows: slice, q: Array) -> None:
        """The row block's dQ is complete: store it."""
        state = self.state
        gradients = state.gradients
        assert gradients is not None
        g = self.row_accumulator(rows)
        if isinstance(state.epilogue, OnlineSoftmax):
            self.finish_online_softmax(state.epilogue, g, rows)
        if state.grid.triangle:
            total = state.column_accumulator(rows)  # complete: all earlier row blocks have added
            g = np.add(total, g, out=total)
        destination = None if self.dq is None else gradients.query
        side, add = state.context.query, gradients.add_query
        need_dots = gradients.dots is not None
        state.store(g, side, rows, self.query_buffer, destination, need_dots, add)

    def finish_online_softmax(self, stats: OnlineSoftmax, g: Array, rows: slice) -> None:
        """sum_j 2^(c (x - max)) k_j over negatives -> a_i (sum_j p_ij k_j - (1 - p_iy) k_y)."""
        problem, context = self.state.problem, self.state.context
        sums, positive = stats.rows.part(rows), stats.positive_logits[rows]
        maximum = sums.max
        # the maximum and the moment are those of dot products
        maximum *= self.state.logit_scale
        if sums.moment is not None:
            sums.moment *= self.state.logit_scale
        end = finalize_direction(np, sums, positive)
        a = problem.upstream[rows] * problem.row_direction_weight * float(problem.scale)
        sum_factor = a * end.reference_probability * np.exp2(maximum - end.reference)
        np.multiply(g, sum_factor[:, None], out=g, casting="same_kind")
        positives = context.key.take(problem.positives[rows])
        positive_gradient = -a * end.negative_probability
        g += np.multiply(positives, positive_gradient[:, None], out=positives, casting="same_kind")


# --- loops that Numba compiles ------------------------------------------------------------------


@compiled
def count_above(x, c, row_threshold, row_rank):  # type: ignore[no-untyped-def]
    """row_rank[i] += how many logits of row i exceed row_threshold[i]."""
    wide_vectors()
    for i in range(x.shape[0]):
        row = x[i]
        threshold = x.dtype.type(row_threshold[i] / c)
        count = 0
        for j in range(row.size):
            count += row[j] > threshold
        row_rank[i] += count


@compiled
def count_above_columns(x, c, column_threshold, column_rank):  # type: ignore[no-untyped-def]
    """column_rank[j] += how many logits of column j exceed column_threshold[j]."""
    wide_vectors()
    threshold = (column_threshold / c).astype(x.dtype)
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.size):
            column_rank[j] += row[j] > threshold[j]
