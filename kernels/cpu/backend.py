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
    cut,
    few,
    too_small,
)
from ..solve import Vectors
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
        self.dtype = DTYPES[problem.compute]
        m, n, d = problem.shape
        self.threads = thread_count() if m * n * d >= THREADING_PAYS else 1
        self.query = self._side(problem, problem.query)
        self.key = self.query if problem.symmetric else self._side(problem, problem.key)
        # Tiles of logits that the workspace has room for: the gradient fold need not recompute them
        self.kept: dict[tuple[int, int], Array] = {}
        self.kept_arena: Array | None = None
        self.kept_grid: Grid | None = None
        # ... and the workers' own buffers, with the last tile of each in them
        self.left: dict[tuple[int, int], Array] = {}
        self.gradients = gradients
        self.query_in_place = gradients is not None and self._gathers(problem, gradients)
        self.accumulators = self._accumulator_rows(problem, gradients)
        self.tile = self._tile(problem)

    def _side(self, problem: Problem, features: Array) -> Side:
        norms = inverse_norms(features) if problem.normalize else None
        return Side(features, self.dtype, norms)

    def poison(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite.

        The folds alone could lose one: a logit of -inf is an excluded pair.
        """
        bad = not_finite(problem.query)
        if problem.key is not problem.query:
            bad |= not_finite(problem.key).any()
        elif bad.any():
            bad[:] = True
        return np.where(bad, np.nan, 0.0)

    def of_positives(self, problem: Problem, of_keys: Array) -> Array:
        return of_keys[problem.positives]

    # -- memory: workers' buffers first, then accumulators of dK, then logits worth keeping

    def worker_elements(self, d: int, bm: int, bn: int) -> int:
        """Size of one worker's buffers, in numbers."""
        elements = bm * bn
        elements += (not self.query.direct) * bm * d + (not self.key.direct) * bn * d
        gathered = 0 if self.query_in_place else bm * d
        return int(elements + (self.gradients is not None) * (gathered + max(bm, bn) * d))

    def _worker_bytes(self, d: int, bm: int, bn: int) -> int:
        return int(self.threads * self.worker_elements(d, bm, bn) * self.dtype.itemsize)

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
        m, n, d = problem.shape
        bm, bn = (SQUARE, SQUARE) if problem.symmetric else TILE
        while bm > 16 and self.threads > 1 and 2 * bm * self.threads > m:  # two panels a thread
            bm //= 2
        if problem.symmetric:
            bn = bm
        bm, bn = max(1, min(bm, m)), max(1, min(bn, n))
        gathered = self.accumulators * d * self.dtype.itemsize
        room = problem.workspace - gathered
        while self._worker_bytes(d, bm, bn) > room:
            smaller = max(1, bm // 2), max(1, bn // 2)
            if smaller == (bm, bn) or not few(m, n, *smaller):
                break
            bm, bn = smaller
        one = self.worker_elements(d, bm, bn) * self.dtype.itemsize
        if one > room:
            rows = 0 if not gathered else m if problem.symmetric else n
            least = one + min(one, rows * d * self.dtype.itemsize)
            raise ValueError(too_small(problem.shape, least, problem.workspace))
        self.threads = min(self.threads, room // one)
        return bm, bn

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        bm, bn = self.tile
        return Grid(cut(m, bm), cut(n, bn), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return cut(n, self.accumulators or n)

    def keep_logits(self, problem: Problem, grid: Grid) -> None:
        """Reserve room for the logits of as many blocks as the workspace has room for."""
        m, n, d = problem.shape
        largest = grid.rows[0].stop, grid.columns[0].stop
        room = problem.workspace - self._worker_bytes(d, *largest)
        room -= self.accumulators * d * self.dtype.itemsize
        shapes = {}
        elements = lacking = 0
        blocks = [(a, b) for a in range(len(grid.rows)) for b in grid.visits(a)]
        for a, b in sorted(blocks, key=lambda block: block[1]):  # as much in each panel
            if not grid.triangle and a < self.threads and b == 0 and problem.method != "fused":
                continue  # a worker's last: it stays in the worker's own buffer
            rows, columns = grid.rows[a], grid.columns[b]
            shape = rows.stop - rows.start, columns.stop - columns.start
            size = shape[0] * shape[1] * self.dtype.itemsize
            lacking += max(0, size - room)
            if size <= room:
                room -= size
                shapes[a, b] = slice(elements, elements + shape[0] * shape[1]), shape
                elements += shape[0] * shape[1]
        self.kept_grid = grid
        self.kept_arena = arena = SPARES.take(elements, self.dtype)
        self.kept = {block: arena[part].reshape(shape) for block, (part, shape) in shapes.items()}
        if problem.method == "fused" and lacking:
            raise ValueError(
                f'method: "fused" keeps the {m} x {n} logits within workspace = '
                f'{problem.workspace} bytes, which lacks {lacking}; expected method="tiled" or '
                "a larger workspace"
            )

    # -- the fold

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        # Backwards, if the gradient comes next: it begins with the tiles that were last here
        backwards = isinstance(epilogue, Statistics) and self.gradients is not None
        backwards = backwards and not grid.triangle and not problem.ranks
        turns = Turns(len(grid.columns), len(grid.rows) if backwards else 0)
        panels = iter(range(len(grid.rows)))
        run = Fold(self, problem, grid, epilogue, gradients, turns)
        threads = min(self.threads, len(grid.rows))
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
                self.left[worker.holds] = worker.arena
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
        if isinstance(epilogue, SoftmaxGradient) and self.kept_arena is not None:
            SPARES.give(self.kept_arena)  # its logits are used up
            self.kept_arena = None
            while self.left:
                SPARES.give(self.left.popitem()[1])
        report()
