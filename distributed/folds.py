"""The folds over ranks: queries stay, keys come, and sums over queries go to their keys.

Rank r holds shards Q_r and K_r. It folds blocks (Q_r, K), K its own keys or those of other ranks,
with the backend that a single process uses. Row statistics and dQ_r stay on their rank. Sums over
queries, which are the column statistics and dK, go to the owner of the keys. The exchange
(exchanges/) brings the keys and the sums, and adds the sums of a shard in a fixed order: results
are bitwise the same from run to run.

Where queries are keys (NT-Xent), each pair of shards meets on one of its two ranks, which computes
the sums of both; those of the keys go to their owner.

Memory, beyond shards and gradients, is one and a half times the workspace, of which the exchange
takes a third, and dQ in float32 where gradients have 16 bits. (Without a given workspace, a gather
takes up to a 32nd of a GPU's memory.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from infonce.kernels.problem import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    NotFinite,
    OnlineSoftmax,
    Problem,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    fast_replace,
)
from infonce.kernels.solve import Vectors, mirror_positive_logits, retrieval_ranks_of

from .communicators.base import Communicator
from .exchanges import choice
from .exchanges.base import Exchange, Keys, RowType
from .partition import Partition
from .transports.base import Exchanger

# `solve.fold_block` on a backend
FoldBlock = Callable[
    [Problem, bool, Epilogue, Gradients | None, NotFinite | None, Sums | None], None
]


class FoldsOverRanks:
    """The backend of one problem over ranks: see `infonce.kernels.solve.Backend`.

    `problem` has this rank's rows and keys; its positives are indices of the keys of all ranks.
    `own` are the arrays of this rank's keys, contiguous, and `start` is the first one's index.
    """

    def __init__(
        self,
        problem: Problem,
        own: list[Array],
        start: int,
        keys: Partition,
        exchange: Exchange,
        fold_block: FoldBlock,
        labelled: bool,
        vectors: Vectors,
        real: np.dtype[Any],
    ) -> None:
        self.own, self.start, self.keys, self.real = own, start, keys, real
        self.exchange, self.fold_block = exchange.run, fold_block
        self.vectors, self.labelled, self.symmetric = vectors, labelled, problem.symmetric
        self.xp = vectors.xp
        # whether the positives of a rank's rows are its own keys
        pairs = problem.two_sided or problem.symmetric or problem.bias is not None
        self.own_positives = pairs and not labelled
        m = len(problem.query)
        self.all_marks = vectors.zeros(m + 1)
        self.not_finite = NotFinite(self.all_marks[:m], self.all_marks[m:])
        self.local: dict[bool, Array] = {}  # kept by `_positives`

    # -- the methods of a backend

    def online(self, problem: Problem, gradients: Gradients) -> bool:
        return False  # log-sum-exps first, then the gradients

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid([slice(0, m)], [slice(0, n)])

    def key_ranges(self, problem: Problem) -> list[slice]:
        return [slice(0, problem.shape[1])]

    def not_finite_marks(self, problem: Problem) -> Array:
        """Found by the fold of the losses, which has seen all keys."""
        return self.not_finite.rows + self.not_finite.any_key

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        xp, positives = self.xp, problem.positives
        if not self.labelled:  # positives are this rank's own keys
            return per_key[positives - self.start]
        out = xp.zeros(len(positives), per_key.dtype)

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            if len(keys):
                local = self._local(positives, keys)
                out[:] = xp.where(local < 0, out, arrays[0][xp.maximum(local, 0)])

        self.exchange([xp.ascontiguousarray(per_key)], visit)
        return out

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics):
            self._statistics(problem, epilogue)
            if epilogue.row_rank is not None:
                self._ranks(problem, retrieval_ranks_of(epilogue, problem))
        elif gradients is None:
            assert isinstance(epilogue, Sigmoid)

            def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
                self._block(problem, keys, arrays, epilogue, None)

            self.exchange(self.own, visit)
        else:
            assert not isinstance(epilogue, OnlineSoftmax)
            self._gradients(problem, epilogue, gradients)

    # -- the folds

    def _statistics(self, problem: Problem, stats: Statistics) -> None:
        """Rows' sums stay, columns' sums go to their keys."""
        xp = self.xp
        half = problem.symmetric and stats.columns is stats.rows
        of_sums = 2 + problem.moments  # vectors: max, sum, moment

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            columns = None
            if sums:
                columns = Sums(*sums[:of_sums])
            elif half and keys.mine:
                columns = stats.rows  # one triangle of this block
            part = fast_replace(stats, columns=columns, row_rank=None, column_rank=None)
            to_clear = columns if sums else None
            if (
                not self._block(problem, keys, arrays, part, None, to_clear)
                and to_clear is not None
            ):
                to_clear.clear()
            if half and columns is not None and sums:
                # a row that is not finite makes all losses of a symmetric loss NaN; on the keys'
                # rank this rank's rows are found by their column sums alone
                columns.sum += self.all_marks.sum()
                sums[-1][:] = self._by_keys(problem, keys, stats.positive_logits)

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            self.vectors.merge(Sums(*sums[:of_sums]), Sums(*arrived[:of_sums]))
            for mine, theirs in zip(sums[of_sums:], arrived[of_sums:], strict=True):
                mine[:] = xp.where(xp.isnan(mine), theirs, mine)

        def keep(mine: slice, sums: list[Array]) -> None:
            assert stats.columns is not None
            to = list(stats.columns.part(mine).arrays[:of_sums])
            if half:
                combine([*to, stats.positive_logits[mine]], sums)
            else:
                for own, arrived in zip(to, sums, strict=True):
                    self.vectors.assign(own, arrived)

        wide = np.dtype(np.float64)
        travelling = of_sums * (problem.two_sided or half) + half
        kinds: list[RowType] = [((), wide)] * travelling
        self.exchange(self.own, visit, kinds, combine, keep, half)

    def _by_keys(self, problem: Problem, keys: Keys, of_rows: Array) -> Array:
        """A vector over this rank's rows, as one over these keys: row i's value at i's positive;
        NaN at keys that are no row's positive."""
        xp, n = self.xp, len(keys)
        local = self._local(problem.positives, keys)
        out = xp.full(n + 1, xp.nan)
        out[xp.where(local < 0, n, local)] = of_rows
        return out[:n]

    def _ranks(self, problem: Problem, ranks: RetrievalRanks) -> None:
        """Retrieval ranks: another round, with the positives' logits; counts of columns go to their
        keys."""
        by_columns = ranks.column_rank is not None
        own = [*self.own, *([ranks.column_positive_logits] if by_columns else [])]

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            part = ranks
            if by_columns:
                sums[0][:] = 0
                part = fast_replace(ranks, column_positive_logits=arrays[-1], column_rank=sums[0])
            self._block(problem, keys, arrays, part, None)

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            self.vectors.add(sums[0], arrived[0])

        def keep(mine: slice, sums: list[Array]) -> None:
            ranks.column_rank[mine] = sums[0]

        self.exchange(own, visit, [((), np.dtype(np.int64))] * by_columns, combine, keep)

    def _gradients(
        self,
        problem: Problem,
        epilogue: SoftmaxGradient | Sigmoid,
        gradients: Gradients,
    ) -> None:
        """dQ stays, dK goes to its keys."""
        xp, vectors, d = self.xp, self.vectors, problem.shape[2]
        own, first_factor = list(self.own), len(self.own)
        if isinstance(epilogue, SoftmaxGradient) and epilogue.column_reference is not None:
            own += [
                epilogue.column_reference, epilogue.column_factor, epilogue.positive_gradient
            ]  # fmt: skip
        dq = gradients.query
        if dq is not None:
            if dq.dtype != self.real:
                dq = xp.empty(dq.shape, self.real)
            vectors.assign(dq, 0.0)
        half = problem.symmetric  # gradients visit each pair of shards once, also with metrics
        wanted = gradients.dots
        dots = None if wanted is None else xp.empty(len(wanted))  # of one block

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            part = epilogue
            if isinstance(part, SoftmaxGradient) and len(arrays) > first_factor:
                reference, factor, positive = arrays[first_factor:]
                part = fast_replace(
                    part, column_reference=reference, column_factor=factor,
                    column_positive_gradient=positive,
                )  # fmt: skip
            key = sums[0] if sums else None
            mine = fast_replace(
                gradients, query=dq, key=key, want_key=key is not None, dots=dots,
                add_query=dq is not None,
            )  # fmt: skip
            if dots is not None and not gradients.want_query:
                mine.dots = dots[: len(keys)]
            if not self._block(problem, keys, arrays, part, mine):
                if key is not None:
                    vectors.assign(key, 0.0)
            elif mine.dots is not None:
                total = wanted[: len(mine.dots)]
                vectors.add(total, mine.dots)
                if half and sums:  # sum_j <dK_j, k_j> of the block equals its sum_i <dQ_i, q_i>
                    vectors.add(total, mine.dots)

        def combine(sums: list[Array], arrived: list[Array]) -> None:
            vectors.add(sums[0], arrived[0])

        def keep(mine: slice, sums: list[Array]) -> None:
            if not half:
                vectors.assign(gradients.key[mine], sums[0])
            elif dq is not None:
                vectors.add(dq[mine], sums[0])

        kinds: list[RowType] = [((d,), self.real)] * (gradients.want_key or half)
        self.exchange(own, visit, kinds, combine, keep, half)
        if gradients.query is not None and dq is not gradients.query:
            vectors.assign(gradients.query, dq)

    def _block(
        self,
        problem: Problem,
        keys: Keys,
        arrays: list[Array],
        epilogue: Epilogue,
        gradients: Gradients | None,
        to_clear: Sums | None = None,
    ) -> bool:
        """Fold the block of these keys; False if it is empty."""
        own = keys.whole and keys.mine
        symmetric = problem.symmetric and own
        no_local = self.own_positives and not keys.mine
        block = fast_replace(
            problem,
            key=problem.query if symmetric else arrays[0],
            key_ids=None if problem.key_ids is None else arrays[1],
            positives=self._positives(problem, keys, no_local),
            key_shard=not own,
            no_local_positives=no_local,
            symmetric=symmetric,
            # of a symmetric problem, keys of other ranks are columns with their own statistics
            column_weight=problem.row_weight if problem.symmetric else problem.column_weight,
            progress=self._progress(problem, keys),
        )
        if 0 in block.shape[:2]:
            return False
        triangle = isinstance(epilogue, Statistics) and symmetric and epilogue.columns is not None
        not_finite = self.not_finite if isinstance(epilogue, (Statistics, Sigmoid)) else None
        self.fold_block(block, triangle, epilogue, gradients, not_finite, to_clear)
        if isinstance(epilogue, Statistics) and triangle:
            epilogue.positive_logits[:] = mirror_positive_logits(
                self.xp, epilogue.positive_logits, block.positives
            )
        if not_finite is not None:
            not_finite.queries_checked = True
        return True

    def _positives(self, problem: Problem, keys: Keys, no_local: bool) -> Array:
        """Indices of the positives among these keys; -1 where the positive is not one of them."""
        same = self.own_positives and (no_local or keys.whole)
        if same and no_local in self.local:
            return self.local[no_local]
        local = self._local(problem.positives, keys)
        if same:
            self.local[no_local] = local
        return local

    def _local(self, positives: Array, keys: Keys) -> Array:
        """Indices of `positives` among these keys; -1 for positives that are not."""
        return self.vectors.local_positives(positives, keys.rows, self.keys.total)

    def _progress(self, problem: Problem, keys: Keys) -> Callable[[str, int, int], None] | None:
        report = problem.progress
        if report is None:
            return None
        return lambda phase, done, total: report(
            phase, keys.step * total + done, keys.steps * total
        )


def folds_over_ranks(
    exchange: str, problem: Problem, gradients: Gradients | None, keys: Partition,
    ranks: Communicator, transport: Exchanger, fold_block: FoldBlock, labelled: bool,
    vectors: Vectors,
) -> FoldsOverRanks:  # fmt: skip
    """The backend of a call that takes this exchange. Makes `gradients.dots` if wanted."""
    if gradients is not None and problem.dots:
        gradients.dots = vectors.zeros(
            len(problem.query) if gradients.want_query else keys.total
        )  # fmt: skip
    own = [vectors.xp.ascontiguousarray(problem.key)]
    if problem.key_ids is not None:
        own.append(problem.key_ids)
    return FoldsOverRanks(
        problem, own, keys.starts[ranks.rank], keys,
        choice.make(exchange, vectors.xp, problem, own, keys, ranks, transport), fold_block,
        labelled, vectors, choice.real_of(problem),
    )  # fmt: skip
