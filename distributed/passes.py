"""The passes over ranks: queries stay, keys come, and sums over queries go to their keys.

Rank r holds shards Q_r and K_r. With the backend of a single process it computes blocks (Q_r, K),
where K are its own keys or keys of other ranks. Row sums and dQ_r stay on their rank. Sums over
queries, which are the column sums and dK, go to the owner of the keys. The exchange (exchanges/)
brings keys and sums, and adds the sums of a shard in a fixed order: the same bits in every run.

If queries are keys (NT-Xent), each pair of shards meets on one of its two ranks. This rank computes
the sums of both shards, and sends the sums of the keys to their owner.

Memory, beyond shards and gradients: the workspace; buffers of the exchange
(`schedule.find_exchange_room`); dQ in float32 if gradients have 16 bits; for linear terms, up to
4 D numbers for each segment of this rank's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from infonce.kernels.epilogues import (
    Epilogue,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    list_arrays,
    make_sums,
)
from infonce.kernels.grid import Grid
from infonce.kernels.linear import Segments, SegmentSums
from infonce.kernels.problem import Array, Gradients, NotFinite, Problem, fast_replace
from infonce.kernels.solve import BlockQuestion, Vectors
from infonce.kernels.targets import mirror_positive_logits

from .exchanges.arrays import gradient_arrays, key_arrays, key_fields, row_shape, with_arrays
from .exchanges.base import Combine, Exchange, Keep, Keys, Round, RowType, Visit
from .exchanges.partition import Partition
from .schedule import enough_room

# `solve.run_block_pass` on a backend: block, triangle, epilogue, gradients, not_finite, to_clear
RunBlockPass = Callable[
    [Problem, bool, Epilogue | BlockQuestion, Gradients | None, NotFinite | None, Sums | None],
    object,
]


class PassesOverRanks:
    """The backend of one problem over ranks: see `infonce.kernels.solve.Backend`.

    `problem` has this rank's rows and keys as contiguous arrays; its positives are indices of the
    keys of all ranks. `first_key` is the index of this rank's first key, and `partition` has the
    shards of keys. `labelled`: the caller gave labels. `sum_dtype` is the dtype of dQ and dK while
    they accumulate. Makes `gradients.dots` if the gradient of the scale follows from dots.
    """

    def __init__(
        self, problem: Problem, gradients: Gradients | None, first_key: int, partition: Partition,
        exchange: Exchange, run_block_pass: RunBlockPass, labelled: bool, vectors: Vectors,
        sum_dtype: np.dtype[Any],
    ) -> None:  # fmt: skip
        self.first_key, self.key_count, self.sum_dtype = first_key, partition.total, sum_dtype
        self.exchange, self.run_block_pass = exchange, run_block_pass
        self.same_pairs = problem.compares_with_limits  # see `Round.same_pairs`
        self.vectors, self.xp = vectors, vectors.xp
        # whether the positives of a rank's rows are its own keys: not in `info_nce` and `lit`
        pairs = problem.two_sided or problem.symmetric or problem.bias is not None
        self.positives_are_own = pairs and not labelled
        m = len(problem.query)
        if gradients is not None and problem.scale_grad_from_dots:
            gradients.dots = vectors.zero_vector(m if gradients.want_query else partition.total)
        self.nan_flags = vectors.zero_vector(m + 1)  # [m] of rows, and one of all keys
        self.not_finite = NotFinite(self.nan_flags[:m], self.nan_flags[m:])
        self.known_positives: dict[bool, Array] = {}  # see `_block_positives`

    def round(
        self, results: Sequence[Array], own: list[Array], visit: Visit,
        types: Sequence[RowType] = (), combine: Combine | None = None, keep: Keep | None = None,
        visits_half: bool = False,
    ) -> None:  # fmt: skip
        """Visit the keys of all or about half of the ranks. The arguments are fields of `Round`."""
        round = Round(own, visit, types, combine, keep, visits_half, self.same_pairs, results)
        self.exchange.run(round)

    # -- the methods of a backend

    def has_online_softmax(self, problem: Problem, gradients: Gradients) -> bool:
        return False  # log-sum-exps first, then the gradients

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid([slice(0, m)], [slice(0, n)])

    def key_ranges(self, problem: Problem) -> list[slice]:
        return [slice(0, problem.shape[1])]

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN flags, which the pass of the losses has collected from all keys."""
        return self.not_finite.rows + self.not_finite.any_key

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        xp, positives = self.xp, problem.positives
        if self.positives_are_own:
            return per_key[positives - self.first_key]
        out = xp.zeros(positives.shape, per_key.dtype)

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            if len(keys):
                index = self._index_among(keys, positives)
                out[:] = xp.where(index < 0, out, arrays[0][xp.maximum(index, 0)])

        self.round([out], [xp.ascontiguousarray(per_key)], visit)
        return out

    def positive_dots(self, problem: Problem) -> Array:
        xp = self.xp
        out = xp.zeros(problem.positives.shape)

        def add(backend: Any, block: Problem) -> None:
            out[:] = xp.where(block.positives < 0, out, backend.positive_dots(block))

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            self._block(problem, keys, arrays, add, None)

        own = key_arrays(problem)
        if self.positives_are_own:
            own_keys = slice(self.first_key, self.first_key + len(problem.key))
            visit(Keys(True, own_keys, True, step=0, steps=1), own, [])
        else:
            self.round([out], own, visit)
        return out

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """See `infonce.kernels.linear.Summing`. An id of a segment is the same on all ranks."""
        zeros = self.vectors.zero_vector
        rows, column_sums = (SegmentSums(zeros(n), zeros(n), zeros(n)) for n in problem.shape[:2])

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            block_segments = replace(segments, columns=arrays[-1])

            def add(backend: Any, block: Problem) -> None:
                block_rows, to_keys = backend.segment_sums(block, block_segments, bool(sums))
                self._add(rows.arrays, block_rows.arrays)
                if to_keys is not None:
                    for total, part in zip(sums, to_keys.arrays, strict=True):
                        total[:] = part

            for total in sums:
                total[:] = 0
            self._block(problem, keys, arrays, add, None)

        def keep(own_rows: slice, sums: list[Array], *others: list[Array]) -> None:
            self._add(sums, *others)
            for own, arrived in zip(column_sums.arrays, sums, strict=True):
                own[own_rows] = arrived

        own = [*key_arrays(problem), segments.columns]
        types = [((), np.float64)] * (3 if columns else 0)
        self.round(rows.arrays, own, visit, types, self._add, keep)
        return rows, column_sums if columns else None

    def members(self, segments: Segments) -> tuple[Array, Array]:
        """For each row, the number of keys of all ranks in its segment, and the sum of the indices
        of these keys in the batch: see `Segments.members`."""
        xp, m = self.xp, len(segments.rows)
        number, indices = xp.zeros(m, xp.int64), xp.zeros(m, xp.int64)

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            if m and len(keys):
                index = (keys.rows.start + xp.arange(len(keys))) % self.key_count
                members = replace(segments, columns=arrays[0]).members(xp, index)
                self._add([number, indices], members)

        self.round([number, indices], [segments.columns], visit)
        return number, indices

    def run_pass(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics):
            self._log_sum_exps(problem, epilogue)
            if epilogue.row_rank is not None:
                self._retrieval_ranks(problem, epilogue.retrieval_ranks)
        elif gradients is None:
            assert isinstance(epilogue, Sigmoid)

            def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
                self._block(problem, keys, arrays, epilogue, None)

            self.round([], key_arrays(problem), visit)
        else:
            assert isinstance(epilogue, SoftmaxGradient | Sigmoid)
            self._gradients(problem, epilogue, gradients)

    # -- the passes

    def _log_sum_exps(self, problem: Problem, stats: Statistics) -> None:
        """The log-sum-exp pass. Sums of columns go to the owners of the keys."""
        xp = self.xp
        # With metrics, rows meet all keys, and `columns` is None
        visits_half = problem.symmetric and stats.columns is stats.rows
        row_sums = list_arrays(stats.row_sums)
        sum_count = len(row_sums)

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            columns = make_sums(sums, stats.row_sums) if sums else []
            if visits_half and keys.are_own:  # a triangle, whose columns are added to rows
                columns = [stats.rows]
            block_epilogue = stats.for_block(columns)
            to_clear = columns[0] if sums else None
            for others in columns[1:]:
                others.clear()
            if not self._block(problem, keys, arrays, block_epilogue, None, to_clear) and sums:
                columns[0].clear()  # the block has no logits, so `_block` has not cleared the sums
            if visits_half and sums:
                # A NaN or infinity makes all losses of a symmetric loss NaN. The owner of the keys
                # does not visit this rank's rows: if a row has a NaN, the sums for the owner get it
                columns[0].sum += self.nan_flags.sum()
                # not a sum: logits that only this rank computes, for the owner of the keys
                logits_by_key = sums[-1]
                logits_by_key[:] = xp.nan
                logits_by_key[: len(keys)] = self._by_keys(problem, keys, stats.positive_logits)

        def combine(sums: list[Array], *further_sums: list[Array]) -> None:
            for arrived in further_sums:
                pairs = (make_sums(each, stats.row_sums) for each in (sums, arrived))
                for total, further in zip(*pairs, strict=True):
                    self.vectors.merge(total, further)
                # with `visits_half`, logits of positives, in which NaN stands for no logit
                for logits, others in zip(sums[sum_count:], arrived[sum_count:], strict=True):
                    logits[:] = xp.where(xp.isnan(logits), others, logits)

        def keep(own_rows: slice, sums: list[Array], *others: list[Array]) -> None:
            own_sums = list_arrays([total.part(own_rows) for total in stats.column_sums])
            if visits_half:  # `own_sums` are the sums of rows, which visits have begun
                combine([*own_sums, stats.positive_logits[own_rows]], sums, *others)
                return
            combine(sums, *others)
            for own, arrived in zip(own_sums, sums, strict=True):
                self.vectors.assign(own, arrived)

        # number of vectors that travel: column sums; with `visits_half`, also logits of positives
        vector_count = sum_count + visits_half if problem.two_sided or visits_half else 0
        types: list[RowType] = [((), np.float64)] * vector_count
        results = [*row_sums, stats.positive_logits, self.nan_flags]
        self.round(results, key_arrays(problem), visit, types, combine, keep, visits_half)

    def _by_keys(self, problem: Problem, keys: Keys, row_values: Array) -> Array:
        """[keys]: the value of row i at the key that is its positive, NaN at all other keys."""
        xp, n = self.xp, len(keys)
        index = self._index_among(keys, problem.positives)
        out = xp.full(n + 1, xp.nan)  # element n takes the values of rows with other positives
        out[xp.where(index < 0, n, index)] = row_values
        return out[:n]

    def _retrieval_ranks(self, problem: Problem, ranks: RetrievalRanks) -> None:
        """Retrieval ranks, in a further round: they need the complete logits of positives, which
        travel with the keys. The counts of columns go to the owners of the keys."""
        by_columns = ranks.column_rank is not None
        own = [*key_arrays(problem), *([ranks.column_positive_logits] if by_columns else [])]

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            epilogue = ranks
            if by_columns:
                sums[0][:], logits = 0, arrays[-1]
                epilogue = fast_replace(ranks, column_positive_logits=logits, column_rank=sums[0])
            self._block(problem, keys, arrays, epilogue, None)

        def keep(own_rows: slice, sums: list[Array], *others: list[Array]) -> None:
            self._add(sums, *others)
            ranks.column_rank[own_rows] = sums[0]

        types = [((), np.int64)] if by_columns else []
        self.round([ranks.row_rank], own, visit, types, self._add, keep)

    def _gradients(
        self, problem: Problem, epilogue: SoftmaxGradient | Sigmoid, gradients: Gradients
    ) -> None:
        """The gradient pass. dK goes to the owners of the keys."""
        xp, vectors = self.xp, self.vectors
        own = key_arrays(problem)
        key_array_count = len(own)
        if isinstance(epilogue, SoftmaxGradient):
            own += gradient_arrays(xp, problem, epilogue)
        dq = gradients.query
        if dq is not None:
            if dq.dtype != self.sum_dtype:
                dq = xp.empty(dq.shape, self.sum_dtype)
            vectors.assign(dq, 0.0)
        visits_half = problem.symmetric  # also with metrics
        all_dots = gradients.dots
        dots = None if all_dots is None else xp.empty(len(all_dots))  # of one block

        def visit(keys: Keys, arrays: list[Array], sums: list[Array]) -> None:
            block_epilogue = epilogue
            if isinstance(epilogue, SoftmaxGradient) and len(arrays) > key_array_count:
                block_epilogue = with_arrays(problem, epilogue, arrays[key_array_count:])
            dk = sums[0] if sums else None
            block_gradients = fast_replace(
                gradients, query=dq, key=dk, want_key=dk is not None, dots=dots,
                add_query=dq is not None and not self._is_triangle(problem, keys, block_epilogue),
            )  # fmt: skip
            if dots is not None and not gradients.want_query:
                block_gradients.dots = dots[: len(keys)]
            if not self._block(problem, keys, arrays, block_epilogue, block_gradients):
                if dk is not None:
                    vectors.assign(dk, 0.0)
            elif (block_dots := block_gradients.dots) is not None:
                total = all_dots[: len(block_dots)]
                vectors.add(total, block_dots)
                if visits_half and sums:  # sum_j <dK_j, k_j> of a block is its sum_i <dQ_i, q_i>
                    vectors.add(total, block_dots)

        def keep(own_rows: slice, sums: list[Array], *others: list[Array]) -> None:
            if not visits_half:
                assert gradients.key is not None  # rows of dK that travel have a destination
                vectors.assign(gradients.key[own_rows], sums[0], *(other[0] for other in others))
            elif dq is not None:  # queries are the keys, so dK of other ranks is a part of dQ
                self._add([dq[own_rows]], sums, *others)

        types: list[RowType] = []
        if gradients.want_key or visits_half:
            types = [(row_shape(problem.key), self.sum_dtype)]
        self.round([], own, visit, types, self._add, keep, visits_half)
        if gradients.query is not None and dq is not gradients.query:
            vectors.assign(gradients.query, dq)

    def _add(self, sums: Sequence[Array], *others: Sequence[Array]) -> None:
        for other in others:
            for total, part in zip(sums, other, strict=True):
                self.vectors.add(total, part)

    def _block(
        self, problem: Problem, keys: Keys, arrays: list[Array], epilogue: Epilogue | BlockQuestion,
        gradients: Gradients | None, to_clear: Sums | None = None,
    ) -> bool:  # fmt: skip
        """Compute the block of these keys, whose `key_arrays` come first in `arrays`. Returns
        whether the block has logits."""
        is_local_block = keys.are_whole_shards and keys.are_own
        symmetric = problem.symmetric and is_local_block
        lacks_positives = self.positives_are_own and not keys.are_own
        fields = key_fields(problem, arrays)
        if symmetric:
            fields["key"] = problem.query
        block = fast_replace(
            problem,
            **fields,
            positives=self._block_positives(problem, keys, lacks_positives),
            key_shard=not is_local_block,
            lacks_positives=lacks_positives,
            symmetric=symmetric,
            column_direction_weight=problem.block_column_weight,
            progress=self._progress(problem, keys),
        )
        if 0 in block.shape[:2]:
            return False
        if callable(epilogue):
            # A question has no tiles, so `run.require_room` does not know of it. It may be about
            # more keys than a pass visits at once, or wider features: a backend gets room for those
            (m, n, _), features = block.shape, math.prod(row_shape(block.key))
            room = enough_room(m, n, features + block.auxiliary_width)
            block.workspace = max(block.workspace, room)
        triangle = self._is_triangle(problem, keys, epilogue)
        not_finite = self.not_finite if isinstance(epilogue, (Statistics, Sigmoid)) else None
        self.run_block_pass(block, triangle, epilogue, gradients, not_finite, to_clear)
        if triangle and isinstance(epilogue, Statistics):
            epilogue.positive_logits[:] = mirror_positive_logits(
                self.xp, epilogue.positive_logits, block.positives
            )
        if not_finite is not None:
            not_finite.queries_checked = True
        return True

    def _is_triangle(
        self, problem: Problem, keys: Keys, epilogue: Epilogue | BlockQuestion
    ) -> bool:
        """Whether the block computes each pair of rows of a symmetric problem's local block once.
        The first pass does so without metrics. The gradient pass does so with limits, to leave out
        the same pairs, and visits this block first, because a triangle overwrites dQ."""
        if not (problem.symmetric and keys.are_whole_shards and keys.are_own):
            return False
        if isinstance(epilogue, Statistics):
            return epilogue.columns is not None
        return problem.compares_with_limits and isinstance(epilogue, SoftmaxGradient)

    def _block_positives(self, problem: Problem, keys: Keys, lacks_positives: bool) -> Array:
        """[M] or [M, P]: the `positives` of the block of these keys."""
        # kept for later blocks if all are -1, or if they are the positives of the local block
        is_fixed = self.positives_are_own and (lacks_positives or keys.are_whole_shards)
        known = self.known_positives if is_fixed else {}
        if lacks_positives not in known:
            known[lacks_positives] = self._index_among(keys, problem.positives)
        return known[lacks_positives]

    def _index_among(self, keys: Keys, positives: Array) -> Array:
        """The index of each positive among these keys; -1 for a positive that is another key."""
        return self.vectors.positives_in_block(positives, keys.rows, self.key_count)

    def _progress(self, problem: Problem, keys: Keys) -> Callable[[str, int, int], None] | None:
        report = problem.progress
        if report is None:
            return None
        return lambda phase, done, total: report(
            phase, keys.step * total + done, keys.steps * total
        )
