"""Passes over blocks by operations on arrays, NumPy's or CuPy's: for options that no kernel takes.

They compute the blocks of a loss with a guide or a teacher, if features are on GPUs of several
ranks or in host memory (kernels/gpu/shard.py: `_on_arrays`). `solve` runs the passes with them.
The arrays of a block fit the workspace, so memory is linear in the batch; `array_pass` has the
operations on a block. Exponents are natural. The host reads no element of an array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..epilogues import Epilogue, OnlineSoftmax, Statistics
from ..grid import Grid, has_few_blocks, make_workspace_error, slices
from ..linear import Segments, SegmentSums, segment_sums
from ..norms import Norms, normalized_rows
from ..problem import Array, Gradients, Problem, as_sets
from ..solve import Vectors
from .array_pass import ArrayPass

# The largest number of arrays that are alive at once: with the shape of a block of logits; and with
# the features of its rows or columns (in the compute dtype, products, float64 for the norms)
BLOCK_ARRAYS, ROW_ARRAYS = 8, 6
MOST_ROWS = 8192  # the largest side of a block, in logits: larger blocks are not faster

MakeRows = Callable[
    [Array, Problem], Any
]  # features as linear terms see them: `linear.SegmentedRows`


class ArrayBlocks:
    """Blocks of one problem as arrays: see `infonce.kernels.solve.Backend`."""

    pass_class: type[ArrayPass] = ArrayPass

    def __init__(
        self, problem: Problem, gradients: Gradients | None, vectors: Vectors, make_rows: MakeRows
    ) -> None:
        """`make_rows` makes the `linear.SegmentedRows` of features, which linear terms need."""
        self.vectors, self.xp, self.make_rows = vectors, vectors.xp, make_rows
        self.dtype = np.dtype(np.float64 if problem.compute_precision == "fp64" else np.float32)
        self.key_rows = self._key_rows(problem, gradients)
        self.block = self._block(problem)

    # -- memory: sums of dK, then blocks

    def _key_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        """How many rows of dK a pass accumulates in the workspace; 0: dK accumulates in its
        destination, or no dK is wanted."""
        out = None if gradients is None or problem.symmetric else gradients.key
        if out is None or self.summed_in_place(out):
            return 0
        n, d = out.shape
        # A pair near a limit must count in both passes or in none. Equal blocks round its product
        # equally, so dK is not divided into ranges
        if problem.compares_with_limits:
            return int(n)
        # otherwise dK takes half of the workspace at most, and leaves the rest to blocks
        return int(min(n, max(1, problem.workspace // 2 // (d * self.dtype.itemsize))))

    def summed_in_place(self, out: Array) -> bool:
        """Whether gradients can accumulate in their destination."""
        return bool(out.dtype == self.dtype and out.dtype.isnative)

    def _block(self, problem: Problem) -> tuple[int, int]:
        """(rows, columns) of a block. ValueError if the workspace has no room for small blocks."""
        m, n, d = problem.shape
        width = d + problem.auxiliary_width
        item = self.dtype.itemsize
        sums = self.key_rows * d * item
        arrays = BLOCK_ARRAYS + (problem.auxiliary_key is not None)

        def size(side: int) -> int:
            rows, columns = min(m, side), min(n, side)
            return item * (arrays * rows * columns + ROW_ARRAYS * (rows + columns) * width)

        side = min(MOST_ROWS, max(m, n))
        while size(side) + sums > problem.workspace:
            smaller = max(1, side // 2)
            if smaller == side or not has_few_blocks(m, n, min(m, smaller), min(n, smaller)):
                least = 0 if not self.key_rows else n * d * item
                least = size(side) + (
                    least if problem.compares_with_limits else min(size(side), least)
                )
                raise make_workspace_error(problem.shape, least, problem.workspace)
            side = smaller
        return min(m, side), min(n, side)

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        """All blocks of the square, also for a `triangle`: a block then adds only to its rows, and
        its mirror image adds to the other rows."""
        (m, n, _), (rows, columns) = problem.shape, self.block
        return Grid(slices(m, rows), slices(n, columns))

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return slices(n, self.key_rows or n)

    # -- other methods of `solve.Backend`

    def has_online_softmax(self, problem: Problem, gradients: Gradients) -> bool:
        return False

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN flags of rows.

        Passes do not show all features that are not finite: a pass takes a logit of -inf for an
        excluded pair.
        """
        xp = self.xp
        spoiled = ~self._finite(problem.query)
        spoiled |= spoiled.any() if problem.symmetric else ~self._finite(problem.key).all()
        if problem.auxiliary_query is not None:
            bad_rows = ~self._finite(problem.auxiliary_query)
            # the softmax of a column is over all queries of the guide, or of the teacher
            spoiled |= bad_rows | (bad_rows.any() & (problem.symmetric or problem.two_sided))
            spoiled |= ~self._finite(problem.auxiliary_key).all()
        row_nans = xp.where(spoiled, np.nan, 0.0)
        return row_nans if problem.known_row_nans is None else row_nans + problem.known_row_nans

    def _finite(self, features: Array) -> Array:
        xp, out = self.xp, self.xp.empty(len(features), bool)
        for rows in slices(len(features), self.block[0]):
            out[rows] = xp.isfinite(features[rows].astype(self.dtype, copy=False)).all(axis=1)
        return out

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        """[M] or [M, P]: the dot products of rows with their positives."""
        xp, positives = self.xp, as_sets(problem.positives)
        out = xp.empty(positives.shape)
        for rows in slices(len(out), min(self.block)):
            query, _ = self.unit_rows(problem, problem.query[rows])
            for number in range(out.shape[1]):
                key, _ = self.unit_rows(problem, problem.key[positives[rows, number]])
                out[rows, number] = (query.astype(np.float64) * key).sum(axis=1)
        return out.reshape(problem.positives.shape)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """See `infonce.kernels.linear.Summing`."""
        query, key = self.linear_rows(problem)
        return segment_sums(self.xp, problem, query, key, segments, columns)

    def linear_rows(self, problem: Problem) -> tuple[Any, Any]:
        """Queries and keys as linear terms see them."""
        query = self.make_rows(problem.query, problem)
        return query, query if problem.symmetric else self.make_rows(problem.key, problem)

    def unit_rows(self, problem: Problem, features: Array) -> tuple[Array, Norms]:
        """Rows in the compute dtype, normalised if the loss normalises, and their norms."""
        return normalized_rows(self.xp, features, problem.normalize, self.dtype)

    # -- the pass

    def run_pass(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        assert not isinstance(epilogue, OnlineSoftmax)
        if isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            # ranks compare logits with the positives' logits, which a first pass finds
            self.run_pass(problem, grid, replace(epilogue, row_rank=None, column_rank=None), None)
            epilogue = epilogue.retrieval_ranks
        run = self.pass_class(self, problem, grid, epilogue, gradients)
        for a, rows in enumerate(grid.rows):
            run.run_row_block(a, rows)
        run.finish()
