"""The CPU backend: BLAS for each tile, an epilogue over it, in one worker thread a core.

A worker takes row panels from a common queue and folds a panel's tiles from left to right, with
single-threaded BLAS: its tile stays in its own cache, and no thread waits for another inside a
product. Row sums and dQ belong to the worker. What columns gather, statistics and dK, is added in
the order of the panels, whichever worker comes first: results are bitwise the same from run to run
for a given number of threads (which the cut into panels follows).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import cpu_epilogues as tile
from .blocks import (
    LOG2_E,
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    Ranks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    cut,
)
from .cpu_operands import Side, inverse_norms, not_finite
from .cpu_resources import BLAS, SPARES, Cancelled, Turns, in_threads, thread_count

DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}
TILE = 2048, 1216  # rows x columns; rows of a power of 2 bytes would share cache sets
SQUARE = 896  # a side of a tile where only one triangle is visited; the diagonal is computed whole
THREADING_PAYS = 2**26  # multiply-adds below which a second thread costs more than it brings


class CPU:
    """Blocks of one problem on the CPU: see `infonce.kernels.blocks.Backend`."""

    xp = np
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

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, d = problem.shape
        bm, bn = (SQUARE, SQUARE) if problem.symmetric else TILE
        while bm > 16 and self.threads > 1 and 2 * bm * self.threads > m:  # two panels a thread
            bm //= 2
        if problem.symmetric:
            bn = bm
        # smaller tiles are slower but need less
        room = problem.workspace - self.accumulators * d * self.dtype.itemsize
        while self._worker_bytes(d, bm, bn) > room and bm * bn > 1:
            bm, bn = max(1, bm // 2), max(1, bn // 2)
        smallest = 2 * self._worker_bytes(d, 1, 1)
        if smallest > problem.workspace:
            raise ValueError(
                f"workspace: expected at least {smallest} bytes for features of width {d}, "
                f"got {problem.workspace}"
            )
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
        run = _Fold(self, problem, grid, epilogue, gradients, turns)
        threads = min(self.threads, len(grid.rows))
        total = len(grid)

        def work(report: Callable[[], None]) -> None:
            worker = None
            with np.errstate(invalid="ignore"):  # NaN in, NaN out
                for i in panels:  # next() on a range iterator is atomic
                    a = len(grid.rows) - 1 - i if backwards else i
                    worker = worker or _Worker(run, a)
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


class _Fold:
    """What the workers of one fold share."""

    def __init__(
        self,
        cpu: CPU,
        problem: Problem,
        grid: Grid,
        epilogue: Epilogue,
        gradients: Gradients | None,
        turns: Turns,
    ) -> None:
        self.cpu, self.problem, self.grid = cpu, problem, grid
        self.epilogue, self.gradients, self.turns = epilogue, gradients, turns
        self.c = float(problem.scale) * (1.0 if isinstance(epilogue, Sigmoid) else LOG2_E)
        d = problem.shape[2]
        dtype = cpu.dtype

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
        self.in_place = cpu.accumulators == 0
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

        # Logits of an earlier fold over the same blocks are used up by the gradient
        self.kept: dict[tuple[int, int], Array] = {}
        if isinstance(epilogue, SoftmaxGradient):
            if cpu.kept_grid == grid:  # not where keys come in ranges
                self.kept = cpu.kept
            cpu.kept = {}
        elif isinstance(epilogue, Statistics) and cpu.gradients is not None:
            cpu.keep_logits(problem, grid)
            self.kept = cpu.kept

    def take_left(self, panel: int) -> tuple[Array | None, tuple[int, int] | None]:
        """A worker's memory of the log-sum-exp fold: with the logits of the panel's first tile, and
        which that is; or without use but for its pages, if nobody else will want what is in it."""
        left = self.cpu.left
        if not isinstance(self.epilogue, SoftmaxGradient):
            return None, None
        wanted = panel, 0
        if self.cpu.kept_grid == self.grid and wanted in left:
            return left.pop(wanted), wanted
        for held in list(left):
            if self.cpu.kept_grid != self.grid or held[1] or held[0] >= self.cpu.threads:
                return left.pop(held, None), None
        return None, None

    def _factors(self, epilogue: SoftmaxGradient) -> None:
        """Heights in units of raw products; what their rounding leaves goes into the factors."""
        dtype = self.cpu.dtype

        def height(lse: Array) -> Array:
            return np.where(np.isfinite(lse), lse / self.c, 0.0).astype(dtype)

        self.height = height(epilogue.row_lse)
        rest = self.c * self.height.astype(np.float64)
        self.a = (epilogue.row_factor * np.exp2(rest - epilogue.row_lse)).astype(dtype)
        self.at_positive = epilogue.positive.astype(dtype)
        self.shared = False
        if epilogue.column_lse is None or epilogue.column_factor is None:
            return
        lse = epilogue.column_lse
        # One exponential serves both directions while no column's terms vanish below a row's height
        middle = 0.5 * (rest.max() + lse.min())
        self.shared = bool(rest.max() - lse.min() < 40 and rest.max() - rest.min() < 80)
        if self.shared:
            self.u = np.exp2(rest - middle).astype(dtype)
            self.v = (epilogue.column_factor * np.exp2(middle - lse)).astype(dtype)
        else:
            self.column_height = height(lse)
            rest = self.c * self.column_height.astype(np.float64)
            self.b = (epilogue.column_factor * np.exp2(rest - lse)).astype(dtype)

    def _positive_logits(self) -> Array:
        """[M] positives' base-2 logits ahead of the fold, for what has to compare with them."""
        cpu, positives = self.cpu, self.problem.positives
        out = np.empty(len(positives))
        for rows in cut(len(positives), 256):
            index = np.arange(rows.start, rows.stop)
            tile.row_dots(cpu.query.take(index), cpu.key.take(positives[rows]), out[rows])
        return self.c * out

    def finish(self) -> None:
        """Columns' gradients are complete: scale, normalise, convert."""
        gradients, cpu = self.gradients, self.cpu
        if gradients is None or not self.by_columns or self.grid.triangle:
            return
        need_dots = gradients.dots is not None and not gradients.want_query
        buffer = None
        d = self.problem.shape[2]
        for columns in self.grid.columns:
            rows = columns.stop - columns.start
            if not cpu.key.direct and buffer is None:
                buffer = np.empty((rows, d), cpu.dtype)
            g = self.gathered(columns)
            destination = None if self.in_place else gradients.key
            self.complete(g, cpu.key, columns, buffer, destination, need_dots)

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


class _Worker:
    """One thread of a fold, with buffers of its own."""

    def __init__(self, fold: _Fold, first: int) -> None:
        """`first`: the panel that it begins with."""
        self.fold = fold
        cpu, grid, d = fold.cpu, fold.grid, fold.problem.shape[2]
        bm = max(r.stop - r.start for r in grid.rows)
        bn = max(c.stop - c.start for c in grid.columns)

        arena, self.holds = fold.take_left(first)  # and the tile whose logits are in the buffer
        if arena is None:
            arena = SPARES.take(cpu.worker_elements(d, bm, bn), cpu.dtype)
        self.arena = arena
        used = 0

        def buffer(*shape: int) -> Array:
            nonlocal used
            size = math.prod(shape)
            used += size
            return arena[used - size : used].reshape(shape)

        self.logits = buffer(bm * bn)
        self.query_buffer = None if cpu.query.direct else buffer(bm, d)
        self.key_buffer = None if cpu.key.direct else buffer(bn, d)
        if fold.gradients is not None:
            self.product = buffer(max(bm, bn), d)
            self.dq = None if cpu.query_in_place else buffer(bm, d)
        self.row_max, self.row_sum = np.empty(bm), np.empty(bm)
        self.column_max, self.column_sum = np.empty(bn), np.empty(bn)
        self.sums = np.empty(bn, cpu.dtype)

    def panel(self, a: int, report: Callable[[], None]) -> None:
        """Fold one row panel, from left to right."""
        fold = self.fold
        grid, gradients, turns = fold.grid, fold.gradients, fold.turns
        rows = grid.rows[a]
        q = fold.cpu.query.block(rows, self.query_buffer)
        first = True
        visits = grid.visits(a)
        for b in reversed(visits) if turns.backwards else visits:
            if turns.cancelled:
                raise Cancelled
            columns = grid.columns[b]
            diagonal = grid.triangle and a == b
            k = fold.cpu.key.block(columns, self.key_buffer)
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
            positive = fold.epilogue.positive[rows]
            if isinstance(fold.epilogue, Ranks):
                positive = positive.copy()  # known: only taken out
            tile.take_positives(x, problem.positives[rows], columns.start, fold.c, positive)
        if problem.symmetric and rows.start < columns.stop and columns.start < rows.stop:
            self.exclude_diagonal(x, rows, columns)
        if problem.query_ids is not None:
            tile.exclude_ids(x, problem.query_ids[rows], problem.key_ids[columns])
        return x

    @staticmethod
    def exclude_diagonal(x: Array, rows: slice, columns: slice) -> None:
        start = max(rows.start, columns.start)
        tile.exclude_diagonal(x[start - rows.start :, start - columns.start :])

    def epilogue(
        self, x: Array, rows: slice, columns: slice, diagonal: bool
    ) -> Callable[[], None] | None:
        """Apply the fold's epilogue; returns what is left to do in the column block's turn."""
        fold, epilogue = self.fold, self.fold.epilogue
        if isinstance(epilogue, SoftmaxGradient):
            if epilogue.column_lse is None:
                tile.softmax_gradient(x, fold.c, fold.height[rows], fold.a[rows])
            elif fold.shared:
                tile.softmax_gradient_shared(
                    x, fold.c, fold.height[rows], fold.a[rows], fold.u[rows], fold.v[columns]
                )
            else:
                tile.softmax_gradient_two_sided(
                    x, fold.c, fold.height[rows], fold.a[rows],
                    fold.column_height[columns], fold.b[columns],
                )  # fmt: skip
            tile.place_positives(
                x, fold.problem.positives[rows], columns.start, fold.at_positive[rows]
            )
            return None
        if isinstance(epilogue, Sigmoid):
            bias, positives = float(fold.problem.bias), fold.problem.positives[rows]
            losses, sums = epilogue.losses[rows], epilogue.bias_grad[rows]
            tile.sigmoid(x, float(fold.problem.scale), bias, fold.a[rows], losses, sums)
            tile.sigmoid_positives(
                x, positives, columns.start, epilogue.positive[rows], bias,
                epilogue.row_factor[rows], losses, sums,
            )  # fmt: skip
            return None
        if isinstance(epilogue, OnlineSoftmax):
            sums = epilogue.rows
            self.rescale = self.row_max[: len(x)]
            tile.online_softmax(x, fold.c, sums.max[rows], sums.sum[rows], self.rescale)
            return None
        if isinstance(epilogue, Ranks):
            tile.count_above(x, fold.c, epilogue.positive[rows], epilogue.row_rank[rows])
            if epilogue.column_rank is None:
                return None
            counted = x, fold.c, epilogue.column_positive[columns], epilogue.column_rank[columns]
            return lambda: tile.count_above_columns(*counted)
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
            g, fold.cpu.query, rows, self.query_buffer, destination, True, gradients.add_query
        )

    def finish_online(self, stats: OnlineSoftmax, g: Array, rows: slice) -> None:
        """sum_j 2^(x2 - max) k_j over negatives -> a_i (sum_j p_ij k_j - (1 - p_iy) k_y)."""
        problem, cpu = self.fold.problem, self.fold.cpu
        log2_sum = stats.rows.log2(np)[rows]
        lse = np.logaddexp2(log2_sum, stats.positive[rows])
        a = problem.upstream[rows] * problem.row_weight * float(problem.scale)
        maximum = np.where(np.isneginf(stats.rows.max[rows]), lse, stats.rows.max[rows])
        np.multiply(g, (a * np.exp2(maximum - lse))[:, None], out=g, casting="same_kind")
        rest = -a * np.exp2(log2_sum - lse)
        positives = cpu.key.take(problem.positives[rows])
        g += np.multiply(positives, rest[:, None], out=positives, casting="same_kind")
