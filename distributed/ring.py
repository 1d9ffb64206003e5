"""The folds over ranks: queries stay, keys travel, and with them what the ring gathers about them.

Rank r holds shards Q_r and K_r. In step s it has K_k, k = r - s (mod n), and folds the block
(Q_r, K_k) with the same backend that a single process uses. Row statistics and dQ_r never leave.
What is summed over queries, column statistics and dK_k, goes round one step behind its keys: while
a block is computed, the keys of the next one arrive, and the sums of the ranks before arrive too,
to which this rank's are added. After n steps they are sent home. Sums about shard k are thus always
taken in the order k, k + 1, ...: results are bitwise the same from run to run.

Memory, beyond shards and gradients: two travelling blocks of keys, three of dK, the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from infonce.kernels.blocks import (
    Array,
    Backend,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    Ranks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    mirrored,
    ranks_of,
)

from .communicator import Communicator
from .partition import Partition
from .transport import Transport

Visit = Callable[[int, list[Array], list[Array]], None]  # (shard, its arrays, sums about it)
Kind = tuple[tuple[int, ...], Any]  # (shape of a row, dtype)


class Ring:
    """Blocks of one problem over the ranks: see `infonce.kernels.blocks.Backend`.

    `problem` has this rank's rows and keys, and positives that count the keys of all ranks.
    """

    online = False  # log-sum-exps first, then the gradients

    def __init__(
        self,
        problem: Problem,
        keys: Partition,
        ranks: Communicator,
        transport: Transport,
        backend: Callable[[Problem, Gradients | None], Backend],
        xp: Any,
        labelled: bool,
    ) -> None:
        self.keys, self.ranks, self.transport, self.backend = keys, ranks, transport, backend
        self.xp, self.labelled = xp, labelled
        self.real = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
        self.poisoned = xp.zeros(len(problem.query))

    # -- what blocks.solve asks for

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid([slice(0, m)], [slice(0, n)])

    def key_ranges(self, problem: Problem) -> list[slice]:
        return [slice(0, problem.shape[1])]

    def poison(self, problem: Problem) -> Array:
        """Gathered by the fold of the losses, which has met all keys."""
        return self.poisoned

    def of_positives(self, problem: Problem, of_keys: Array) -> Array:
        xp, positives = self.xp, problem.positives
        if not self.labelled:  # they are this rank's own
            return of_keys[positives - self.keys.starts[self.ranks.rank]]
        out = xp.zeros(len(positives), of_keys.dtype)

        def visit(k: int, arrays: list[Array], sums: list[Array]) -> None:
            if len(arrays[0]):
                local = self.keys.local(xp, positives, k)
                out[:] = xp.where(local < 0, out, arrays[0][xp.maximum(local, 0)])

        self.circulate([xp.ascontiguousarray(of_keys)], visit)
        return out

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        own = [self.xp.ascontiguousarray(problem.key)]
        if problem.key_ids is not None:
            own.append(problem.key_ids)
        if isinstance(epilogue, Statistics):
            self._statistics(problem, epilogue, own)
            if epilogue.row_rank is not None:
                self._ranks(problem, ranks_of(epilogue, problem), own)
        elif gradients is None:
            assert isinstance(epilogue, Sigmoid)

            def visit(k: int, arrays: list[Array], sums: list[Array]) -> None:
                self._block(problem, k, arrays, epilogue, None)

            self.circulate(own, visit)
        else:
            assert not isinstance(epilogue, OnlineSoftmax)
            self._gradients(problem, epilogue, gradients, own)

    # -- one fold

    def _statistics(self, problem: Problem, stats: Statistics, own: list[Array]) -> None:
        """Rows' sums stay, columns' sums travel."""
        xp, two_sided = self.xp, problem.two_sided

        def visit(k: int, arrays: list[Array], sums: list[Array]) -> None:
            columns = None
            if two_sided:
                columns = Sums(*sums)
                columns.max[:], columns.sum[:] = -np.inf, 0.0
            elif stats.columns is stats.rows and k == self.ranks.rank:
                columns = stats.rows  # one triangle of this block
            part = replace(stats, columns=columns, row_rank=None, column_rank=None)
            self._block(problem, k, arrays, part, None)

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            Sums(*sums).merge(Sums(*arrived), xp)

        kinds: list[Kind] = [((), np.dtype(np.float64))] * (2 if two_sided else 0)
        home = self.circulate(own, visit, kinds, combine)
        if two_sided:
            assert stats.columns is not None
            stats.columns.max, stats.columns.sum = home

    def _ranks(self, problem: Problem, ranks: Ranks, own: list[Array]) -> None:
        """Another round, when the positives' logits are known; those of columns travel."""
        by_columns = ranks.column_rank is not None
        if by_columns:
            own = [*own, ranks.column_positive]

        def visit(k: int, arrays: list[Array], sums: list[Array]) -> None:
            part = ranks
            if by_columns:
                sums[0][:] = 0
                part = replace(ranks, column_positive=arrays[-1], column_rank=sums[0])
            self._block(problem, k, arrays, part, None)

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            sums[0] += arrived[0]

        home = self.circulate(own, visit, [((), np.dtype(np.int64))] * by_columns, combine)
        if by_columns:
            ranks.column_rank[:] = home[0]

    def _gradients(
        self,
        problem: Problem,
        epilogue: SoftmaxGradient | Sigmoid,
        gradients: Gradients,
        own: list[Array],
    ) -> None:
        """dQ stays, dK travels."""
        xp, d = self.xp, problem.shape[2]
        first_factor = len(own)
        if isinstance(epilogue, SoftmaxGradient) and epilogue.column_lse is not None:
            own += [epilogue.column_lse, epilogue.column_factor, epilogue.positive]
        dq = gradients.query
        if dq is not None:
            if dq.dtype != self.real:
                dq = xp.empty(dq.shape, self.real)
            dq[...] = 0

        def visit(k: int, arrays: list[Array], sums: list[Array]) -> None:
            part = epilogue
            if isinstance(part, SoftmaxGradient) and len(arrays) > first_factor:
                lse, factor, positive = arrays[first_factor:]
                part = replace(part, column_lse=lse, column_factor=factor, column_positive=positive)
            key = sums[0] if sums else None
            rows = problem.shape[0] if gradients.want_query else self.keys.rows[k]
            mine = replace(
                gradients, query=dq, key=key, dots=xp.zeros(rows), add_query=dq is not None
            )
            if not self._block(problem, k, arrays, part, mine) and key is not None:
                key[...] = 0
            gradients.dots += mine.dots.sum()

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            sums[0] += arrived[0]

        kinds: list[Kind] = [((d,), self.real)] * gradients.want_key
        home = self.circulate(own, visit, kinds, combine)
        if gradients.query is not None and dq is not gradients.query:
            gradients.query[...] = dq
        if gradients.key is not None:
            gradients.key[...] = home[0]

    def _block(
        self,
        problem: Problem,
        k: int,
        arrays: list[Array],
        epilogue: Epilogue,
        gradients: Gradients | None,
    ) -> bool:
        """Fold block (Q_r, K_k); False if it is empty."""
        own = k == self.ranks.rank
        symmetric = problem.symmetric and own
        block = replace(
            problem,
            key=problem.query if symmetric else arrays[0],
            key_ids=None if problem.key_ids is None else arrays[1],
            positives=self.keys.local(self.xp, problem.positives, k),
            part=not own,
            symmetric=symmetric,
            progress=self._progress(problem, k),
        )
        if 0 in block.shape[:2]:
            return False
        inner = self.backend(block, gradients)
        triangle = isinstance(epilogue, Statistics) and symmetric and epilogue.columns is not None
        inner.fold(block, inner.grid(block, triangle), epilogue, gradients)
        if isinstance(epilogue, Statistics) and triangle:
            epilogue.positive[:] = mirrored(self.xp, epilogue.positive, block.positives)
        if isinstance(epilogue, (Statistics, Sigmoid)):
            self.poisoned += inner.poison(block)
        return True

    def _progress(self, problem: Problem, k: int) -> Callable[[str, int, int], None] | None:
        report = problem.progress
        if report is None:
            return None
        n = self.ranks.size
        step = (self.ranks.rank - k) % n
        return lambda phase, done, total: report(phase, step * total + done, n * total)

    # -- the ring

    def circulate(
        self,
        own: list[Array],
        visit: Visit,
        kinds: Sequence[Kind] = (),
        combine: Callable[[list[Array], list[Array]], None] | None = None,
    ) -> list[Array]:
        """Take the shards round: `visit` every one with `own` arrays of its rank.

        `kinds` are the sums about a shard that a visit makes (one row a key); `combine` adds those
        of the ranks before. Returns the sums about this rank's own shard.
        """
        n, r = self.ranks.size, self.ranks.rank
        like: list[Kind] = [(array.shape[1:], array.dtype) for array in own]
        stores: dict[tuple[int, bool], list[Array]] = {}

        def room(slot: int, k: int, sums: bool) -> list[Array]:
            """Buffers for what is about shard k; allocated once, for the largest."""
            if (slot, sums) not in stores:
                stores[slot, sums] = [
                    self.xp.empty((self.keys.largest, *tail), dtype)
                    for tail, dtype in (kinds if sums else like)
                ]
            return [array[: self.keys.rows[k]] for array in stores[slot, sums]]

        arrays = own
        carried: list[Array] = []
        for s in range(n):
            k = (r - s) % n
            last = s == n - 1
            incoming = [] if last else room(s % 2, (k - 1) % n, False)
            arrived = room((s + 1) % 3, k, True) if s and kinds else []
            leaving = [*([] if last else arrays), *carried]
            pending = self.transport.shift(leaving, [*incoming, *arrived]) if n > 1 else None
            sums = room(s % 3, k, True)
            visit(k, arrays, sums)
            if pending is not None:
                pending.wait()
            if combine is not None and arrived:
                combine(sums, arrived)
            arrays, carried = incoming, sums
        if not kinds or n == 1:
            return carried
        home = room(n % 3, r, True)
        self.transport.shift(carried, home).wait()
        return home
