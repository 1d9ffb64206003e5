"""The CPU backend: BLAS for each tile, an epilogue over it, in one worker thread a core.

A worker takes row panels from a common queue and folds a panel's tiles from left to right, with
single-threaded BLAS: its tile stays in its own cache, and no thread waits for another inside a
product. Row sums and dQ belong to the worker. What columns gather, statistics and dK, is added in
the order of the panels, whichever worker comes first: results are bitwise the same from run to run
for a given number of threads (which the cut into panels follows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..problem import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    Problem,
    SoftmaxGradient,
    Statistics,
    few_blocks,
    slices,
    workspace_too_small,
)
from ..solve import Vectors
from .context import Context
from .fold import Fold, Worker
from .operands import Side, inverse_norms, not_finite
from .workers import BLAS, SPARES, Turns, in_threads, thread_count

DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
TILE = 2048, 1216  # rows x columns; rows of a power of 2 bytes would share cache sets
SQUARE = 896  # a side of a tile where only one triangle is visited; the diagonal is computed whole
THREADING_PAYS = 2**26  # multiply-adds below which a second thread costs more than it brings


class CPU:
    """Blocks of one problem on the CPU: see `infonce.kernels.solve.Backend`."""

    vectors = Vectors(np)
    online = True

    def __init__(self, problem: Problem, gradients: Gradients | None = None) -> None:
        m, n, d = problem.shape
        self.dtype = DTYPES[problem.compute]
        query = self._side(problem, problem.query)
        self.context = Context(
            self.dtype,
            query,
            query if problem.symmetric else self._side(problem, problem.key),
            threads=thread_count() if m * n * d >= THREADING_PAYS else 1,
            gradient=gradients is not None,
            query_in_place=gradients is not None and self._gathers(problem, gradients),
            accumulators=self._accumulator_rows(problem, gradients),
        )
        self.tile = self._tile(problem)

    def _side(self, problem: Problem, features: Array) -> Side:
        norms = inverse_norms(features) if problem.normalize else None
        return Side(features, self.dtype, norms)

    def not_finite_marks(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite.

        The folds alone could lose one: a logit of -inf is an excluded pair.
        """
        bad = not_finite(problem.query)
        if problem.key is not problem.query:
            bad |= not_finite(problem.key).any()
        elif bad.any():
            bad[:] = True
        return np.where(bad, np.nan, 0.0)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    # -- memory: workers' buffers first, then accumulators of dK, then logits worth keeping

    def _gathers(self, problem: Problem, gradients: Gradients) -> bool:
        """Whether dQ can be gathered where it is handed out."""
        out = gradients.query
        if out is None or problem.symmetric or gradients.add_query or not gradients.want_query:
            return False
        return bool(out.dtype == self.dtype and out.dtype.isnative and out.flags.c_contiguous)

    def _accumulator_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        """How many rows of dK can be gathered in the workspace; 0 if none need to be."""
        if gradients is None:
            return 0
        out = gradients.query if problem.symmetric else gradients.key
        if out is None or (out.dtype == self.dtype and out.dtype.isnative):
            return 0
        n, d = out.shape
        return int(min(n, max(1, problem.workspace // 2 // (d * self.dtype.itemsize))))

    def _tile(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of a tile. Smaller ones are slower but need less, and so do threads that
        are fewer."""
        context = self.context
        m, n, d = problem.shape
        bm, bn = (SQUARE, SQUARE) if problem.symmetric else TILE
        while bm > 16 and context.threads > 1 and 2 * bm * context.threads > m:  # two a thread
            bm //= 2
        if problem.symmetric:
            bn = bm
        bm, bn = max(1, min(bm, m)), max(1, min(bn, n))
        gathered = context.accumulators * d * self.dtype.itemsize
        room = problem.workspace - gathered
        while context.worker_bytes(d, bm, bn) > room:
            smaller = max(1, bm // 2), max(1, bn // 2)
            if smaller == (bm, bn) or not few_blocks(m, n, *smaller):
                break
            bm, bn = smaller
        one = context.worker_elements(d, bm, bn) * self.dtype.itemsize
        if one > room:
            rows = 0 if not gathered else m if problem.symmetric else n
            least = one + min(one, rows * d * self.dtype.itemsize)
            raise ValueError(workspace_too_small(problem.shape, least, problem.workspace))
        context.threads = min(context.threads, room // one)
        return bm, bn

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        bm, bn = self.tile
        return Grid(slices(m, bm), slices(n, bn), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return slices(n, self.context.accumulators or n)

    # -- the fold

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        # Backwards, if the gradient comes next: it begins with the tiles that were last here
        context = self.context
        backwards = isinstance(epilogue, Statistics) and context.gradient
        backwards = backwards and not grid.triangle and not problem.retrieval_ranks
        turns = Turns(len(grid.columns), len(grid.rows) if backwards else 0)
        panels = iter(range(len(grid.rows)))
        run = Fold(context, problem, grid, epilogue, gradients, turns)
        threads = min(context.threads, len(grid.rows))
        total = len(grid)

        def work(report: Callable[[], None]) -> None:
            worker = None
            for i in panels:  # next() on a range iterator is atomic
                a = len(grid.rows) - 1 - i if backwards else i
                worker = worker or Worker(run, a)
                worker.panel(a, report)
            if worker is None:
                return
            if backwards and worker.holds is not None:
                context.left[worker.holds] = worker.arena
            else:
                SPARES.give(worker.arena)

        def report() -> None:
            if problem.progress is not None:
                problem.progress(epilogue.phase, turns.done, total)

        with BLAS.single_threaded():
            if threads == 1:
                work(report)
            else:
                in_threads(work, threads, turns, report)
        run.finish()
        if isinstance(epilogue, SoftmaxGradient):
            context.give_back()
        report()
