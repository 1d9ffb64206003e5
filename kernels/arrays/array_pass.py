"""One pass of `ArrayBlocks` by operations on arrays: what each block adds to sums and gradients.

x are logits of a block in natural units, [m, n], without biases; -inf at excluded pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..direction_losses import rounded_reference
from ..distill.problem import TaughtGradient, TaughtProblem
from ..epilogues import RetrievalRanks, Sigmoid, SoftmaxGradient, Statistics
from ..grid import Grid
from ..linear import LinearGradient
from ..norms import Norms, normalization_backward
from ..options import Masks, PairBlock, PositivePairs, find_masks
from ..problem import LOG2_E, Array, Gradients, Problem, as_sets
from .naive import PairMatrix, matrix_sums, sigmoid_terms

Sides = tuple[Array | None, Array | None]  # for the softmax of rows, of columns
# (row reference [M], row factor [M], column reference [N], column factor [N]); the last two
# are None if columns have no softmax
Factors = tuple[Array, Array, Array | None, Array | None]


class ArrayPass:
    """One visit of every block of a grid, for an `ArrayBlocks`."""

    def __init__(
        self, backend: Any, problem: Problem, grid: Grid, epilogue: Any,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        self.backend, self.problem, self.grid = backend, problem, grid
        self.epilogue, self.gradients = epilogue, gradients
        self.xp, self.dtype = backend.xp, backend.dtype
        self.scale = self.xp.asarray(problem.scale, self.dtype)
        # exponents of negatives are logits times `exponent_ratio`; the logits of positives that the
        # pass writes are multiplied by `positive_ratio`
        self.exponent_ratio = self.positive_ratio = None
        if problem.hardness:
            self.exponent_ratio = problem.exponent_scale / problem.scale
            if backend.vectors.passes_on_gpu:
                self.positive_ratio = self.exponent_ratio
        self.key_sums: Array = None  # dK of the grid's columns; None: not needed
        if isinstance(epilogue, SoftmaxGradient):
            self.factors = self._factors(epilogue)
            if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
                self.teacher_factors = self._factors(epilogue.teacher)
        self.linear: tuple[list[Any], list[Any]] = [], []  # of queries, of keys
        if gradients is not None and isinstance(epilogue, SoftmaxGradient) and epilogue.linear:
            self._begin_linear(epilogue)
        self.want_key = gradients is not None and gradients.want_key and not problem.symmetric
        # with one row block, dK of a column block is complete at once
        if gradients is not None and self.want_key and len(grid.rows) > 1:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            self._begin_key_sums(keys, gradients.key)

    def _begin_linear(self, epilogue: SoftmaxGradient) -> None:
        """Prepare the linear terms, which `_store` subtracts from complete gradients."""
        query, key = self.backend.linear_rows(self.problem)
        symmetric = self.problem.symmetric
        for is_key_side in (False, True)[: 1 + (not symmetric)]:
            self.linear[is_key_side].extend(
                LinearGradient(self.xp, query, key, term, is_key_side, symmetric)
                for term in epilogue.linear
            )

    def _begin_key_sums(self, keys: slice, out: Array | None) -> None:
        """Empty sums of dK for the keys of the grid; in their destination `out` if it allows."""
        self.first_key = keys.start
        if out is not None and self.backend.summed_in_place(out):
            self.key_sums = out[keys]
            self.key_sums[...] = 0
        else:
            shape = keys.stop - keys.start, self.problem.shape[2]
            self.key_sums = self.xp.zeros(shape, self.dtype)

    def _sums_of_keys(self, columns: slice) -> Array:
        """The part of `key_sums` for the keys `columns`."""
        return self.key_sums[columns.start - self.first_key : columns.stop - self.first_key]

    def _factors(self, epilogue: SoftmaxGradient) -> Factors:
        """Reference exponents and factors, in natural units and the compute dtype."""
        rows = epilogue.row_reference, epilogue.row_factor
        reference, factor, _ = rounded_reference(self.xp, LOG2_E, *rows, self.dtype)
        if epilogue.column_reference is None or epilogue.column_factor is None:
            return reference, factor, None, None
        columns = epilogue.column_reference, epilogue.column_factor
        column_reference, column_factor, _ = rounded_reference(
            self.xp, LOG2_E, *columns, self.dtype
        )
        return reference, factor, column_reference, column_factor

    def run_row_block(self, a: int, rows: slice) -> None:
        """Compute the blocks of row block `a`, from left to right, and complete dQ of its rows."""
        problem, gradients = self.problem, self.gradients
        query, norms = self.backend.unit_rows(problem, problem.query[rows])
        sums = None
        for step, b in enumerate(self.grid.visits(a)):
            columns = self.grid.columns[b]
            key, key_norms = query, norms
            if not (problem.symmetric and rows == columns):
                key, key_norms = self.backend.unit_rows(problem, problem.key[columns])
            g = self._block(rows, columns, query, key)
            if g is not None:
                sums = self._add_gradients(g, query, key, key_norms, columns, sums)
            if problem.progress is not None:
                blocks_done = a * len(self.grid.columns) + step + 1
                problem.progress(self.epilogue.phase, blocks_done, len(self.grid))
        if gradients is not None and gradients.want_query and sums is not None:
            self._store(sums, query, norms, rows, False, gradients.query)

    def _add_gradients(
        self, g: Array, query: Array, key: Array, key_norms: Norms, columns: slice,
        sums: Array | None,
    ) -> Array | None:  # fmt: skip
        """Add the terms of a block with g = scale dL/dx [m, n] to `sums`, which are dQ of its rows
        (None: the first terms), and to dK. Returns the sums."""
        gradients = self.gradients
        if gradients is None:
            return None
        if gradients.want_query:
            product = self.query_product(g, key)
            if sums is None:
                sums = product
            else:
                sums += product
        if self.want_key:
            product = self.key_product(g, query)
            if self.key_sums is None:
                self._store(product, key, key_norms, columns, True, gradients.key)
            else:
                sums_of_keys = self._sums_of_keys(columns)
                sums_of_keys += product
        return sums

    def finish(self) -> None:
        """Complete dK and store it, after all row blocks have added to it."""
        gradients, problem = self.gradients, self.problem
        if gradients is None or self.key_sums is None:
            return
        for columns in self.grid.columns:
            key, norms = self.backend.unit_rows(problem, problem.key[columns])
            self._store(self._sums_of_keys(columns), key, norms, columns, True, gradients.key)

    def _store(
        self, g: Array, z: Array, norms: Norms, rows: slice, is_key_side: bool, out: Array
    ) -> None:
        """Complete the gradient `g` of unit rows `z` and write it to `out` (None: only the dots).

        Subtracts linear terms, writes `Gradients.dots`, and differentiates the normalisation.
        """
        gradients, xp = self.gradients, self.xp
        assert gradients is not None
        for linear_gradient in self.linear[is_key_side]:
            term, wide = linear_gradient.part(rows), z.astype(np.float64)
            if term.factor is not None:
                mean_term = term.sums[term.segment] - term.own_count * wide
                g = g - (term.factor[:, None] * mean_term).astype(self.dtype)
            if term.weighted is not None:
                g = g - term.weighted[term.segment].astype(self.dtype)
        if gradients.dots is not None and not (is_key_side and gradients.want_query):
            gradients.dots[rows] = (g.astype(np.float64) * z).sum(axis=1)
        if out is None:
            return
        g = normalization_backward(xp, g, z, norms)
        if gradients.add_query and not is_key_side:
            out[rows] += g
        else:
            out[rows] = g

    # -- matrix products

    def dot_products(self, query: Array, key: Array, out: Array | None = None) -> Array:
        """[m, n] dot products of the rows of a block, in `out` if it is given."""
        return self.xp.matmul(query, key.T, out=out)

    def query_product(self, g: Array, key: Array) -> Array:
        """What a block with g = scale dL/dx [m, n] adds to dQ."""
        return g @ key

    def key_product(self, g: Array, query: Array) -> Array:
        """What a block with g = scale dL/dx [m, n] adds to dK."""
        return g.T @ query

    # -- one block

    def _block(self, rows: slice, columns: slice, query: Array, key: Array) -> Array | None:
        """Apply the epilogue to a block. Returns scale dL/dx [m, n]; None if it has no gradient."""
        xp, problem, epilogue = self.xp, self.problem, self.epilogue
        m, n = len(query), len(key)
        x = PairMatrix(xp, m, n, self.dtype)
        self.dot_products(query, key, x.all)
        pairs = PositivePairs.find(xp, problem, rows, columns, self.dtype)
        excluded, left_out = self._find_masks(x.all, rows, columns, pairs)
        x.flat *= self.scale
        if isinstance(problem, TaughtProblem):
            return self._taught(problem, x.all, rows, columns)
        positives = as_sets(problem.positives[rows]) - columns.start
        inside = (as_sets(problem.positives[rows]) >= 0) & (positives >= 0) & (positives < n)
        index = xp.where(inside, xp.arange(m)[:, None] * n + positives, m * n)
        positive = x.flat[index]
        x.flat[index] = -np.inf
        if problem.symmetric and rows.start < columns.stop and columns.start < rows.stop:
            own = xp.arange(rows.start, rows.stop)[:, None] == xp.arange(
                columns.start, columns.stop
            )
            xp.copyto(x.all, -np.inf, where=own)
        if excluded is not None:
            xp.copyto(x.all, -np.inf, where=excluded)
        if isinstance(epilogue, SoftmaxGradient):
            return self._gradient(epilogue, x, index, rows, columns, left_out)
        logits = positive.astype(np.float64)
        if isinstance(epilogue, Sigmoid):
            self._write_positives(epilogue.positive_logits, logits, inside, rows)
            x.flat[index] = positive
            return self._sigmoid(epilogue, x, index, rows, pairs)
        if isinstance(epilogue, RetrievalRanks):
            self._count(epilogue, x.all, rows, columns)
            return None
        logits = LOG2_E * logits
        if self.positive_ratio is not None:
            logits = logits * self.positive_ratio
        self._write_positives(epilogue.positive_logits, logits, inside, rows)
        self._statistics(epilogue, x.all, rows, columns, left_out)
        return None

    def _write_positives(self, out: Array, logits: Array, inside: Array, rows: slice) -> None:
        before = as_sets(out[rows])
        out[rows] = self.xp.where(inside, logits, before).reshape(out[rows].shape)

    def _find_masks(
        self, x: Array, rows: slice, columns: slice, pairs: PositivePairs | None
    ) -> tuple[Array | None, Masks]:
        """The masks of a block (`options.find_masks`), from dot products x. Where the guide's
        product is not finite, x becomes NaN."""
        problem, xp = self.problem, self.xp
        block = PairBlock(problem, rows, columns, x)
        if problem.guided:
            query, key = (
                self.backend.unit_rows(problem, guide)[0]
                for guide in (problem.guide_query[rows], problem.guide_key[columns])
            )
            block.guide_dots = self.dot_products(query, key)
            xp.copyto(block.guide_dots, np.nan, where=~xp.isfinite(block.guide_dots))
        masks = find_masks(block, pairs)
        if problem.guided:
            xp.copyto(x, np.nan, where=xp.isnan(block.guide_dots))
        return masks

    def _exponents(self, x: Array) -> Array:
        """Exponents of negatives without biases, from logits: they differ only with `hardness`."""
        if self.exponent_ratio is None:
            return x
        return x * self.xp.asarray(self.exponent_ratio, self.dtype)

    def _biases(self, rows: slice, columns: slice) -> Sides:
        """Biases [1, n] of keys for the softmax of rows, and [m, 1] of queries, which are keys, for
        the softmax of columns; None: no biases."""
        key_bias, query_bias = self.problem.key_bias, self.problem.query_bias
        return (
            None if key_bias is None else key_bias[None, columns],
            None if query_bias is None else query_bias[rows, None],
        )

    def _statistics(
        self, stats: Statistics, x: Array, rows: slice, columns: slice,
        left_out: Sides,
    ) -> None:  # fmt: skip
        problem, vectors = self.problem, self.backend.vectors
        x, memory = self._exponents(x), self.xp.empty_like(x)
        sides = [(stats.rows.part(rows), 1)]
        # If columns share the sums of rows, they have no sums here: the square has all rows
        if stats.columns is not None and stats.columns is not stats.rows:
            sides.append((stats.columns.part(columns), 0))
        biases = self._biases(rows, columns)
        for side, (total, axis) in enumerate(sides):
            block_sums = matrix_sums(
                self.xp, x, axis, problem.moments, biases[side], left_out[side], memory
            )
            vectors.merge(total, block_sums)

    def _taught(
        self, problem: TaughtProblem, x: Array, rows: slice, columns: slice
    ) -> Array | None:
        """Apply an epilogue of distillation to a block, from x and the teacher's logits t."""
        query, key = (
            self.backend.unit_rows(problem, z)[0]
            for z in (problem.teacher_query[rows], problem.teacher_key[columns])
        )
        t = self.dot_products(query, key)
        t *= self.xp.asarray(problem.teacher_scale, self.dtype)
        if isinstance(self.epilogue, TaughtGradient):
            g = self._softmax_gradient(self.factors, x, rows, columns)
            g -= self._softmax_gradient(self.teacher_factors, t, rows, columns)
            return g
        stats = self.epilogue
        self._statistics(stats, x, rows, columns, (None, None))
        memory = self.xp.empty_like(t)
        for total, of, axis in ((stats.teacher_rows, rows, 1), (stats.teacher_columns, columns, 0)):
            if total is not None:
                block_sums = matrix_sums(self.xp, t, axis, True, None, None, memory, x)
                self.backend.vectors.merge(total.part(of), block_sums)
        return None

    def _count(self, ranks: RetrievalRanks, x: Array, rows: slice, columns: slice) -> None:
        logits = LOG2_E * x.astype(np.float64)
        if self.positive_ratio is not None:
            logits *= self.positive_ratio
        ranks.row_rank[rows] += (logits > ranks.positive_logits[rows, None]).sum(axis=1)
        if ranks.column_rank is not None:
            above = logits > ranks.column_positive_logits[columns]
            ranks.column_rank[columns] += above.sum(axis=0)

    def _gradient(
        self, epilogue: SoftmaxGradient, x: PairMatrix, index: Array, rows: slice, columns: slice,
        left_out: Sides,
    ) -> Array:  # fmt: skip
        gradient = x.like(self.xp)
        exponents, biases = self._exponents(x.all), self._biases(rows, columns)
        gradient.all[...] = self._softmax_gradient(
            self.factors, exponents, rows, columns, biases, left_out
        )
        gradient.flat[index] = as_sets(epilogue.positive_gradient[rows]).astype(self.dtype)
        return gradient.all

    def _softmax_gradient(
        self, factors: Factors, x: Array, rows: slice, columns: slice,
        biases: Sides = (None, None), left_out: Sides = (None, None),
    ) -> Array:  # fmt: skip
        """scale dL/dx at negatives: probabilities of rows, and of columns, times their factors."""
        row_reference, row_factor, column_reference, column_factor = factors
        g = self._probabilities(x, biases[0], left_out[0], row_reference[rows, None])
        g *= row_factor[rows, None]
        if column_reference is not None and column_factor is not None:
            p = self._probabilities(x, biases[1], left_out[1], column_reference[columns])
            p *= column_factor[columns]
            g += p
        return g

    def _probabilities(
        self, x: Array, bias: Array | None, left_out: Array | None, reference: Array
    ) -> Array:
        """exp(x + bias - reference), and 0 at pairs that are left out. At most 1, also if the
        reference was rounded to a number below the largest logit (`rounded_reference`)."""
        xp = self.xp
        y = x - reference if bias is None else (x + bias.astype(x.dtype)) - reference
        if left_out is not None:
            y = xp.where(left_out, x.dtype.type(-np.inf), y)
        return xp.exp(xp.minimum(y, x.dtype.type(0)))

    def _sigmoid(
        self, sigmoid: Sigmoid, x: PairMatrix, index: Array, rows: slice,
        pairs: PositivePairs | None,
    ) -> Array:  # fmt: skip
        """Add the losses of a pairwise sigmoid to `sigmoid`; returns scale dL/dx."""
        xp = self.xp
        losses, g = sigmoid_terms(xp, x, index, xp.asarray(self.problem.bias, self.dtype), pairs)
        sigmoid.losses[rows] += losses
        g *= sigmoid.row_factor[rows, None].astype(g.dtype)
        sigmoid.bias_grad[rows] += g.sum(axis=1, dtype=np.float64)
        if sigmoid.log_scale_grad is not None:
            logits = xp.where(g == 0, 0, x.all)  # 0 times the -inf of an excluded pair is NaN
            moments = (logits * g).sum(axis=1, dtype=np.float64)
            sigmoid.log_scale_grad[rows] += moments / self.problem.scale
        return g
