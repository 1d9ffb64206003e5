"""The CPU backend: BLAS for each tile, an epilogue over it, in one worker thread a core.

A worker takes row panels from a common queue and folds a panel's tiles from left to right, with
single-threaded BLAS: the tile stays in the cache of its core, and no thread waits for another
inside a product. Row sums and dQ belong to one worker. Column sums and dK accumulate in the order
of the panels, whichever worker is first: results are bitwise the same from run to run for a given
number of threads (the rows of a panel depend on it).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays.naive import matrix_bytes, solve_whole_matrix
from ..distill.problem import TaughtProblem
from ..distill.solve import solver_by_folds
from ..epilogues import Epilogue, SoftmaxGradient, Statistics
from ..grid import (
    Grid,
    has_few_blocks,
    least_block_side,
    positive_blocks,
    slices,
    slices_of_runs,
    without_other_groups,
    workspace_too_small,
)
from ..linear import Segments, SegmentSums, segment_sums
from ..problem import Array, Gradients, Problem
from ..solve import Solution, Vectors, one_pass
from .context import Context
from .fold import Fold
from .one_block import solve as one_block
from .operands import DTYPES, Side, dots_at, find_norms, not_finite
from .panel import Worker
from .workers import BLAS, BUFFER_POOL, PanelOrder, in_threads, require_memory, thread_count

TILE = 2048, 1216  # rows x columns; rows of 2^n bytes would all map to the same cache sets
# Side of a tile if one triangle is visited: tiles on the diagonal are computed as a whole
TRIANGLE_SIDE = 896
# With groups: rows of a tile of one group; side of a tile of several, of which smaller ones have
# fewer pairs of different groups; and how many rows or columns of one group have their own tiles
GROUP_ROWS, MIXED_SIDE, LEAST_RUN = 1024, 384, 128
PREFIX_TILE = 1024, 608  # a thread has a tile of each of several prefixes at once
MIN_THREADED_CALL = 2**26  # multiply-adds; with fewer, a second thread takes longer than it saves


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem`: from the full matrix of logits, in one block, or in many."""
    if problem.method == "naive" and not isinstance(problem, TaughtProblem):
        require_memory(problem, matrix_bytes(problem))
        return solve_whole_matrix(problem, gradients, CPU.vectors)
    if one_block.fits(problem):
        solution = one_block.solve(problem, gradients)
        if solution is not None:
            return solution
    return solver_by_folds(problem)(problem, CPU(problem, gradients), gradients)


class CPU:
    """Blocks of one problem on the CPU: see `infonce.kernels.solve.Backend`."""

    vectors = Vectors(np)
    worker_class = Worker

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None, ahead: Gradients | None = None,
        further_tiles: int = 0,
    ) -> None:  # fmt: skip
        """`ahead`: gradients that a later fold over ranks will accumulate: its tiles are those of
        this fold. `further_tiles`: see `Context`."""
        m, n, d = problem.shape
        self.dtype = DTYPES[problem.compute]
        query = self.make_side(problem, problem.query)
        self.context = Context(
            self.dtype,
            query,
            query if problem.symmetric else self.make_side(problem, problem.key),
            threads=thread_count() if m * n * d >= MIN_THREADED_CALL else 1,
            gradient=(gradients or ahead) is not None,
            both_folds=gradients is not None,
            query_in_place=gradients is not None and self._in_place(problem, gradients),
            accumulators=self._accumulator_rows(problem, gradients),
            further_tiles=further_tiles,
        )
        if problem.auxiliary_query is not None:
            other = self.make_side(problem, problem.auxiliary_query)
            self.context.auxiliary_query = self.context.auxiliary_key = other
            if not problem.symmetric:
                self.context.auxiliary_key = self.make_side(problem, problem.auxiliary_key)
            self.context.has_teacher = isinstance(problem, TaughtProblem)
        self.tile = self._tile(problem)

    def make_side(self, problem: Problem, features: Array) -> Side:
        norms = find_norms(features, self.dtype) if problem.normalize else None
        return Side(features, self.dtype, norms)

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN flags of rows.

        Folds do not show all features that are not finite: a fold takes a logit of -inf for an
        excluded pair, and ignores NaN when it looks for the largest logit.
        """
        not_finite_rows = not_finite(problem.query)
        if problem.key is not problem.query:
            not_finite_rows |= not_finite(problem.key).any()
        elif not_finite_rows.any():
            not_finite_rows[:] = True
        context = self.context
        if context.auxiliary_query is not None and context.auxiliary_key is not None:
            not_finite_rows |= (bad_other := not_finite(context.auxiliary_query.features))
            spoils_columns = (problem.symmetric or problem.two_sided) and bad_other.any()
            not_finite_rows |= spoils_columns or not_finite(context.auxiliary_key.features).any()
        return np.where(not_finite_rows, np.nan, 0.0)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        context = self.context
        query, key = context.query, context.key
        # the problem may be `targets.guide_problem`, whose features are the guide's
        if (
            context.auxiliary_query is not None
            and problem.query is context.auxiliary_query.features
        ):
            query, key = context.auxiliary_query, context.auxiliary_key or key
        return dots_at(query, key, problem.positives)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """See `infonce.kernels.linear.Summing`."""
        return segment_sums(np, problem, self.context.query, self.context.key, segments, columns)

    # -- memory: accumulators of dK, the workers' buffers, then logits to keep for the gradient

    def _in_place(self, problem: Problem, gradients: Gradients) -> bool:
        """Whether dQ can accumulate in its destination."""
        out = gradients.query
        if out is None or problem.symmetric or gradients.add_query or not gradients.want_query:
            return False
        return bool(out.dtype == self.dtype and out.dtype.isnative and out.flags.c_contiguous)

    def _accumulator_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        """How many rows of dK accumulate in the workspace at once; 0 if in their destination."""
        if gradients is None:
            return 0
        out = gradients.query if problem.symmetric else gradients.key
        if out is None or (out.dtype == self.dtype and out.dtype.isnative):
            return 0
        n, d = out.shape
        if problem.compares_with_limits:  # both folds visit the same blocks: the same pairs count
            return int(n)
        return int(min(n, max(1, problem.workspace // 2 // (d * self.dtype.itemsize))))

    def _tile(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of a tile. If the workspace is too small, first tiles get smaller, then
        threads fewer. With method="naive" over ranks, the tile is the whole block."""
        context = self.context
        m, n, d = problem.shape
        if problem.method == "naive":
            context.threads = 1
            require_memory(problem, context.worker_bytes(d, m, n))
            return max(1, m), max(1, n)
        bm, bn = (TRIANGLE_SIDE, TRIANGLE_SIDE) if problem.symmetric else TILE
        if problem.query_groups is not None:
            bm = min(bm, GROUP_ROWS)
        if context.further_tiles:
            bm, bn = min(bm, PREFIX_TILE[0]), min(bn, PREFIX_TILE[1])
        # at least two panels a thread
        while bm > 16 and context.threads > 1 and 2 * bm * context.threads > m:
            bm //= 2
        if problem.symmetric:
            bn = bm
        bm, bn = max(1, min(bm, m)), max(1, min(bn, n))
        accumulated = context.accumulators * d * self.dtype.itemsize
        room = problem.workspace - accumulated
        while True:
            worker_bytes = context.worker_bytes(d, bm, bn)
            smaller = max(1, bm // 2), max(1, bn // 2)
            fits = context.threads * worker_bytes <= room
            if fits or smaller == (bm, bn) or not has_few_blocks(m, n, *smaller):
                break
            bm, bn = smaller
        if worker_bytes > room:
            rows = 0 if not accumulated else m if problem.symmetric else n
            accumulator_bytes = rows * d * self.dtype.itemsize
            if not problem.compares_with_limits:  # accumulators take half of the workspace at most
                accumulator_bytes = min(worker_bytes, accumulator_bytes)
            least = worker_bytes + accumulator_bytes
            raise ValueError(workspace_too_small(problem.shape, least, problem.workspace))
        context.threads = min(context.threads, room // worker_bytes)
        return bm, bn

    def online(self, problem: Problem, gradients: Gradients) -> bool:
        return problem.plain and one_pass(problem, gradients)

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        if problem.query_groups is None:
            rows, columns = map(slices, (m, n), self.tile)
        else:
            groups, least = (problem.query_groups, problem.key_groups), least_block_side(m, n)
            rows, columns = (
                slices_of_runs(of, step, max(LEAST_RUN, least), min(step, MIXED_SIDE))
                for of, step in zip(groups, self.tile, strict=True)
            )
        return Grid(rows, columns, triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return slices(n, self.context.accumulators or n)

    # -- the fold

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        # The log-sum-exp fold runs backwards, so that the gradient fold begins with the tiles that
        # are still in the buffers
        context = self.context
        backwards = isinstance(epilogue, Statistics) and context.both_folds
        backwards = backwards and not grid.triangle and not problem.retrieval_ranks
        if problem.query_groups is not None:
            groups = problem.query_groups, problem.key_groups
            has_positive, ids = positive_blocks(grid, problem.positives), None
            if problem.has_positive_ids:
                ids = problem.query_positive_ids, problem.key_positive_ids
            grid = without_other_groups(grid, groups, has_positive, ids)
        order = PanelOrder(grid, backwards)
        panels = iter(range(len(grid.rows)))
        run = Fold(context, problem, grid, epilogue, gradients, order)
        threads = min(context.threads, len(grid.rows))
        total = len(grid)

        def work(report: Callable[[], None]) -> None:
            worker = None
            for i in panels:  # next() on a range iterator is atomic
                a = len(grid.rows) - 1 - i if backwards else i
                worker = worker or self.worker_class(run, a)
                worker.panel(a, report)
            if worker is None:
                return
            if backwards and worker.buffered is not None:
                context.worker_memory[worker.buffered] = worker.memory
            else:
                BUFFER_POOL.give(worker.memory)

        def report() -> None:
            if problem.progress is not None:
                problem.progress(epilogue.phase, order.done, total)

        with BLAS.single_threaded():
            if threads == 1:
                work(report)
            else:
                in_threads(work, threads, order, report)
        run.finish()
        if isinstance(epilogue, SoftmaxGradient):
            context.release()
        report()
