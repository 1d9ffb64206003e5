"""One fold of the CPU backend: what its workers share, and what a worker does."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..problem import (
    LOG2_E,
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    slices,
)
from ..solve import conclude
from . import tile_ops as tile
from .context import Block, Context
from .operands import Side
from .workers import SPARES, Cancelled, Turns

EXACT = 2.0**40  # logits below this have digits after the point, in float64
ROUNDING = 2.0**-10  # what factors make up for at most, in base 2


class Fold:
    """What the workers of one fold share."""

    def __init__(
        self,
        context: Context,
        problem: Problem,
        grid: Grid,
        epilogue: Epilogue,
        gradients: Gradients | None,
        turns: Turns,
    ) -> None:
        self.context, self.problem, self.grid = context, problem, grid
        self.epilogue, self.gradients, self.turns = epilogue, gradients, turns
        self.c = float(problem.scale) * (1.0 if isinstance(epilogue, Sigmoid) else LOG2_E)
        d = problem.shape[2]
        dtype = context.dtype

        # Vectors of length M or N in the compute dtype, made once for all tiles
        if isinstance(epilogue, SoftmaxGradient):
            self._factors(epilogue)
        elif isinstance(epilogue, Sigmoid):
            self.a = epilogue.row_factor.astype(dtype)
        elif isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            self.rank_reference = self._positive_logits()

        # dK is gathered in its destination where that has the precision, else beside it
        self.by_columns = gradients is not None and (
            grid.triangle or (gradients.want_key and not problem.symmetric)
        )
        self.in_place = context.accumulators == 0
        if gradients is not None and self.by_columns:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            out = gradients.query if grid.triangle else gradients.key
            self.first_key = 0 if self.in_place and out is not None else keys.start
            if self.in_place and out is not None:
                self.accumulator = out
            else:
                self.accumulator = np.empty((keys.stop - keys.start, d), dtype)
            # the first panel writes, the others add; but these columns meet no panel
            if grid.triangle:
                self.gathered(grid.columns[0])[...] = 0
            if not grid.rows:
                self.gathered(keys)[...] = 0

        self.kept: dict[Block, Array] = {}
        if isinstance(epilogue, SoftmaxGradient):
            self.kept = context.take_kept(grid)
        elif isinstance(epilogue, Statistics) and context.gradient:
            context.keep_logits(problem, grid)
            self.kept = context.kept

    def _factors(self, epilogue: SoftmaxGradient) -> None:
        """Heights in units of raw products; what their rounding leaves goes into the factors."""
        dtype = self.context.dtype
        self.positive_gradient = epilogue.positive_gradient.astype(dtype)
        self.height, self.a, rest = self._height(epilogue.row_reference, epilogue.row_factor)
        self.shared = False
        if epilogue.column_reference is None or epilogue.column_factor is None:
            return
        high, low, least = rest.max(), rest.min(), epilogue.column_reference.min()
        # One exponential serves both directions while no column's terms vanish below a row's
        # height, and heights have digits for their differences
        close = high - least < 40 and high - low < 80
        self.shared = bool(close and max(abs(high), abs(low)) < EXACT)
        if self.shared:
            middle = 0.5 * (high + least)
            self.u = np.exp2(rest - middle).astype(dtype)
            of_columns = np.exp2(middle - epilogue.column_reference)
            self.v = (epilogue.column_factor * of_columns).astype(dtype)
        else:
            self.column_reference, self.b, _ = self._height(
                epilogue.column_reference, epilogue.column_factor
            )

    def _height(self, height: Array, factor: Array) -> tuple[Array, Array, Array]:
        """Heights as raw products and factors, in the compute dtype; and these heights in base 2.

        The largest logit is c times a product, rounded. In float32 the division finds that product
        again; in float64 it may find its neighbour: then the smaller, as exponents above 0 are 0
        there. A log-sum-exp is no such multiple: factors make up for what is a rounding, and not
        for more.
        """
        h = height / self.c
        smaller = np.nextafter(h, -np.inf)
        h = np.where(self.c * smaller >= height, smaller, h).astype(self.context.dtype)
        rest = self.c * h.astype(np.float64)
        made_up = np.exp2(np.minimum(rest - height, ROUNDING))
        return h, (factor * made_up).astype(self.context.dtype), rest

    def _positive_logits(self) -> Array:
        """[M] positives' base-2 logits ahead of the fold, for what has to compare with them."""
        context, positives = self.context, self.problem.positives
        out = np.empty(len(positives))
        for rows in slices(len(positives), 256):
            index = np.arange(rows.start, rows.stop)
            tile.row_dots(context.query.take(index), context.key.take(positives[rows]), out[rows])
        return self.c * out

    def finish(self) -> None:
        """Columns' gradients are complete: scale, normalise, convert."""
        gradients, context = self.gradients, self.context
        if gradients is None or not self.by_columns or self.grid.triangle:
            return
        need_dots = gradients.dots is not None and not gradients.want_query
        buffer = None
        d = self.problem.shape[2]
        for columns in self.grid.columns:
            rows = columns.stop - columns.start
            if not context.key.direct and buffer is None:
                buffer = np.empty((rows, d), context.dtype)
            g = self.gathered(columns)
            destination = None if self.in_place else gradients.key
            self.complete(g, context.key, columns, buffer, destination, need_dots)

    def gathered(self, columns: slice) -> Array:
        """dK's accumulators for these keys."""
        return self.accumulator[columns.start - self.first_key : columns.stop - self.first_key]

    def complete(
        self,
        g: Array,
        side: Side,
        rows: slice,
        buffer: Array | None,
        destination: Array | None,
        need_dots: bool,
        add: bool = False,
    ) -> None:
        """Hand complete gradients g of `rows` to their destination."""
        assert self.gradients is not None
        if need_dots or side.inverse_norms is not None:
            z = side.block(rows, buffer)
            dots = np.empty(len(g))
            tile.row_dots(g, z, dots)
            if need_dots:
                self.gradients.dots[rows] = dots
            if side.inverse_norms is not None:
                tile.through_normalization(g, z, dots, side.inverse_norms[rows])
        if destination is not None and add:
            destination[rows] += g
        elif destination is not None:
            np.copyto(destination[rows], g, casting="same_kind")


class Worker:
    """One thread of a fold, with buffers of its own."""

    def __init__(self, fold: Fold, first: int) -> None:
        """`first`: the panel that it begins with."""
        self.fold = fold
        context, grid, d = fold.context, fold.grid, fold.problem.shape[2]
        bm = max(r.stop - r.start for r in grid.rows)
        bn = max(c.stop - c.start for c in grid.columns)

        arena = self.holds = None  # and the tile whose logits are in the buffer
        if isinstance(fold.epilogue, SoftmaxGradient):
            arena, self.holds = context.take_left(grid, first)
        if arena is None:
            arena = SPARES.take(context.worker_elements(d, bm, bn), context.dtype)
        self.arena = arena
        used = 0

        def buffer(*shape: int) -> Array:
            nonlocal used
            size = math.prod(shape)
            used += size
            return arena[used - size : used].reshape(shape)

        self.logits = buffer(bm * bn)
        self.query_buffer = None if context.query.direct else buffer(bm, d)
        self.key_buffer = None if context.key.direct else buffer(bn, d)
        if fold.gradients is not None:
            self.product = buffer(max(bm, bn), d)
            self.dq = None if context.query_in_place else buffer(bm, d)
        self.row_max, self.row_sum = np.empty(bm), np.empty(bm)
        self.column_max, self.column_sum = np.empty(bn), np.empty(bn)
        self.sums = np.empty(bn, context.dtype)

    def panel(self, a: int, report: Callable[[], None]) -> None:
        """Fold one row panel, from left to right."""
        fold = self.fold
        grid, gradients, turns = fold.grid, fold.gradients, fold.turns
        rows = grid.rows[a]
        q = fold.context.query.block(rows, self.query_buffer)
        first = True
        visits = grid.visits(a)
        for b in reversed(visits) if turns.backwards else visits:
            if turns.cancelled:
                raise Cancelled
            columns = grid.columns[b]
            diagonal = grid.triangle and a == b
            k = fold.context.key.block(columns, self.key_buffer)
            x = self.block(a, b, q, k)
            in_turn = self.epilogue(x, rows, columns, diagonal)
            if gradients is not None and (gradients.want_query or grid.triangle):
                self.add_rows(x, k, rows, first)
            add_columns = fold.by_columns and not diagonal
            if add_columns:
                g = fold.gathered(columns)
                product = g if a == 0 and g.flags.c_contiguous else self.product[: len(k)]
                np.matmul(x.T, q, out=product)
            if in_turn is not None or fold.by_columns:
                turns.wait(a, b)
            if in_turn is not None:
                in_turn()
            if add_columns and product is not g:
                if a == 0:
                    np.copyto(g, product)
                else:
                    np.add(g, product, out=g)
            turns.pass_on(a, b)
            first = False
            report()
        if gradients is not None and (gradients.want_query or grid.triangle):
            self.finish_rows(rows, q)

    def block(self, a: int, b: int, q: Array, k: Array) -> Array:
        """The tile's raw products; excluded pairs are -inf."""
        fold, problem = self.fold, self.fold.problem
        kept = fold.kept.get((a, b))
        if kept is not None and isinstance(fold.epilogue, SoftmaxGradient):
            return kept
        x = kept if kept is not None else self.logits[: len(q) * len(k)].reshape(len(q), len(k))
        if self.holds == (a, b):
            self.holds = None
            return x
        self.holds = None if kept is not None else (a, b)
        np.matmul(q, k.T, out=x)
        rows, columns = fold.grid.rows[a], fold.grid.columns[b]
        if not isinstance(fold.epilogue, SoftmaxGradient):
            positive = fold.epilogue.positive_logits[rows]
            if isinstance(fold.epilogue, RetrievalRanks):
                positive = positive.copy()  # known: only taken out
            tile.take_positives(x, problem.positives[rows], columns.start, fold.c, positive)
        if problem.symmetric and rows.start < columns.stop and columns.start < rows.stop:
            start = max(rows.start, columns.start)
            tile.exclude_diagonal(x[start - rows.start :, start - columns.start :])
        if problem.query_ids is not None:
            tile.exclude_ids(x, problem.query_ids[rows], problem.key_ids[columns])
        return x

    def epilogue(
        self, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """Apply the fold's epilogue; returns what is left to do in the column block's turn."""
        fold, epilogue = self.fold, self.fold.epilogue
        if isinstance(epilogue, SoftmaxGradient):
            if epilogue.column_reference is None:
                tile.softmax_gradient(x, fold.c, fold.height[rows], fold.a[rows])
            elif fold.shared:
                tile.softmax_gradient_shared(
                    x, fold.c, fold.height[rows], fold.a[rows], fold.u[rows], fold.v[columns]
                )
            else:
                tile.softmax_gradient_two_sided(
                    x, fold.c, fold.height[rows], fold.a[rows],
                    fold.column_reference[columns], fold.b[columns],
                )  # fmt: skip
            tile.place_positives(
                x, fold.problem.positives[rows], columns.start, fold.positive_gradient[rows]
            )
            return None
        if isinstance(epilogue, Sigmoid):
            bias, positives = float(fold.problem.bias), fold.problem.positives[rows]
            losses, sums = epilogue.losses[rows], epilogue.bias_grad[rows]
            tile.sigmoid(x, float(fold.problem.scale), bias, fold.a[rows], losses, sums)
            tile.sigmoid_positives(
                x, positives, columns.start, epilogue.positive_logits[rows], bias,
                epilogue.row_factor[rows], losses, sums,
            )  # fmt: skip
            return None
        if isinstance(epilogue, OnlineSoftmax):
            sums = epilogue.rows
            self.rescale = self.row_max[: len(x)]
            tile.online_softmax(x, fold.c, sums.max[rows], sums.sum[rows], self.rescale)
            return None
        if isinstance(epilogue, RetrievalRanks):
            tile.count_above(x, fold.c, epilogue.positive_logits[rows], epilogue.row_rank[rows])
            if epilogue.column_rank is None:
                return None
            counted = epilogue.column_positive_logits[columns], epilogue.column_rank[columns]
            return lambda: tile.count_above_columns(x, fold.c, *counted)
        return self.statistics(epilogue, x, rows, columns, diagonal)

    def statistics(
        self, stats: Statistics, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        fold = self.fold
        row_max, row_sum = self.row_max[: len(x)], self.row_sum[: len(x)]
        column_max, column_sum = self.column_max[: x.shape[1]], self.column_sum[: x.shape[1]]
        both = stats.columns is not None and not diagonal
        if both:
            tile.row_and_column_statistics(
                x, fold.c, row_max, row_sum, column_max, column_sum, self.sums[: x.shape[1]]
            )
        else:
            tile.row_statistics(x, fold.c, row_max, row_sum)

        def in_turn() -> None:
            # rows too: in the symmetric case an earlier panel's columns are these rows
            tile.merge(stats.rows.max[rows], stats.rows.sum[rows], row_max, row_sum)
            if stats.row_rank is not None:
                tile.count_above(x, fold.c, fold.rank_reference[rows], stats.row_rank[rows])
            if both:
                assert stats.columns is not None
                tile.merge(
                    stats.columns.max[columns], stats.columns.sum[columns], column_max, column_sum
                )
                if stats.column_rank is not None:
                    reference = fold.rank_reference[columns]
                    tile.count_above_columns(x, fold.c, reference, stats.column_rank[columns])

        if stats.columns is not None:
            return in_turn
        in_turn()
        return None

    def add_rows(self, x: Array, k: Array, rows: slice, first: bool) -> None:
        """dQ_a += P K_b."""
        dq = self.gathered_rows(rows)
        if first:
            np.matmul(x, k, out=dq)
            return
        product = self.product[: len(x)]
        np.matmul(x, k, out=product)
        if isinstance(self.fold.epilogue, OnlineSoftmax):
            np.multiply(dq, self.rescale[:, None], out=dq, casting="same_kind")
        np.add(dq, product, out=dq)

    def gathered_rows(self, rows: slice) -> Array:
        """dQ's accumulators for these rows."""
        if self.dq is not None:
            return self.dq[: rows.stop - rows.start]
        assert self.fold.gradients is not None
        assert self.fold.gradients.query is not None
        return self.fold.gradients.query[rows]

    def finish_rows(self, rows: slice, q: Array) -> None:
        """The panel's dQ is complete."""
        fold = self.fold
        gradients = fold.gradients
        assert gradients is not None
        g = self.gathered_rows(rows)
        if isinstance(fold.epilogue, OnlineSoftmax):
            self.finish_online(fold.epilogue, g, rows)
        if fold.grid.triangle:
            total = fold.gathered(rows)  # earlier panels have all been here
            g = np.add(total, g, out=total)
        destination = None if self.dq is None else gradients.query
        fold.complete(
            g, fold.context.query, rows, self.query_buffer, destination, True, gradients.add_query
        )

    def finish_online(self, stats: OnlineSoftmax, g: Array, rows: slice) -> None:
        """sum_j 2^(c (x - max)) k_j over negatives -> a_i (sum_j p_ij k_j - (1 - p_iy) k_y)."""
        problem, context = self.fold.problem, self.fold.context
        maximum, positive = stats.rows.max[rows], stats.positive_logits[rows]
        maximum *= self.fold.c  # of products until now
        end = conclude(np, Sums(maximum, stats.rows.sum[rows]), positive)
        a = problem.upstream[rows] * problem.row_weight * float(problem.scale)
        of_sum = a * end.reference_probability * np.exp2(maximum - end.reference)
        np.multiply(g, of_sum[:, None], out=g, casting="same_kind")
        positives = context.key.take(problem.positives[rows])
        positive_gradient = -a * end.negative_probability
        g += np.multiply(positives, positive_gradient[:, None], out=positives, casting="same_kind")
