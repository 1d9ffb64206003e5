"""The gather: each rank receives the keys of all others at once, and returns sums to their owners.

Rank r of n ranks has its own keys and one buffer with the keys of the w shards before its own: of
ranks r - w, ..., r - 1 (mod n), in this order. w is n - 1, or n // 2 if each pair of shards meets
on one rank. The rank computes its local block while the keys of other ranks arrive, and then one
block with all keys of the buffer. If each pair of shards meets on one rank and n is even, this may
be two blocks instead: one with the shard n / 2 before its own, and one with the other shards. The
sums of these keys go to the ranks that own the keys. Each rank receives up to n - 1 partial sums of
its own keys and adds them pairwise. The order of the additions depends only on the number of ranks.

Keys are gathered once in a call. A later round has all keys from its beginning. So the later round
visits the other shards first, in several visits if their sums are large (dK), and computes the
local block last: the sums of one visit travel while the next block is computed. If logits are
compared with limits (`same_pairs`), a later round visits the same blocks as the first round, in its
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
from infonce.kernels.problem import Array

from ..communicators.base import Pending
from ..cost import visit_count
from ..transports.base import Exchanger
from .base import Combine, Keys, Round, RowType, no_keys
from .partition import Partition


@dataclass(frozen=True)
class Gather:
    """The exchange "gather" of a call: see `Exchange`."""

    xp: Any  # numpy or cupy
    rank: int  # in hierarchical.py, which gathers inside nodes: the local rank
    transport: Exchanger
    partition: Partition  # of the keys
    keys: list[Array]  # arrays of this rank's keys that several rounds visit
    # index in `keys` -> (distance of the farthest shard that was gathered, the gathered array)
    gathered: dict[int, tuple[int, Array]] = field(default_factory=dict)

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        n, r = len(self.partition.rows), self.rank  # as at the top of this file
        rows, starts = self.partition.rows, self.partition.starts
        own, visit, types = round.own, round.visit, round.types
        reach, summed_reach = round.reach(n), round.summed_reach(n)
        # rows_within[d]: the number of rows of the shards of ranks r - d, ..., r - 1
        rows_within = [0, *accumulate(rows[(r - d) % n] for d in range(1, reach + 1))]
        pending, gathered = self._gather(own, rows_within)

        def select_rows(array: Array, far: int, near: int) -> Array:
            """The rows of the keys of ranks r - far, ..., r - near, of an array that ends with the
            keys of rank r - 1."""
            end = len(array)
            return array[end - rows_within[far] : end - rows_within[near - 1]]

        # sums of other ranks' keys over this rank's queries
        other_sums = [
            self.xp.empty((rows_within[summed_reach], *tail), dtype) for tail, dtype in types
        ]  # fmt: skip
        # [ranks, rows] sums of this rank's keys over the queries of each rank. The first are over
        # this rank's queries; with `visits_half` they are missing: the local block has no sums
        own_sum_count = 0 if round.visits_half else 1
        partial_sums = [
            self.xp.empty((own_sum_count + summed_reach, rows[r], *tail), dtype)
            for tail, dtype in types
        ]  # fmt: skip
        # If keys have to arrive, the local block comes first: it is computed meanwhile. Otherwise
        # it comes last, while sums go home. If it comes first, visits are not divided, however
        # large their sums (dK) are. So a sigmoid loss, which has one round, has the same visits,
        # and the same bits, with gradients and without
        local_first = pending is not None or round.same_pairs
        other_visits = list(self._list_visits(reach, summed_reach, () if local_first else types))
        if round.visits_half and round.same_pairs and 2 * reach == n:
            # only one of two ranks visits shards n / 2 apart, so the farthest shard is a visit of
            # its own
            other_visits = [(reach, reach), *self._list_visits(reach - 1, reach - 1, ())]
        # None: the local block
        visits = [None, *other_visits] if local_first else [*other_visits, None]
        going_home: list[Pending] = []
        for step, distances in enumerate(visits):
            if distances is None:
                span = slice(starts[r], starts[r + 1])
                own_sums = [part[0] for part in partial_sums] if own_sum_count else []
                visit(Keys(True, span, True, step, len(visits)), own, own_sums)
                continue
            if pending is not None:
                pending.wait()
                pending = None
            far, near = distances
            first = starts[(r - far) % n]
            span = slice(first, first + rows_within[far] - rows_within[near - 1])
            sums: list[Array] = []
            if near <= summed_reach:
                sums = [select_rows(array, far, near) for array in other_sums]
            arrays = [select_rows(array, far, near) for array in gathered]
            if round.is_left_to_other(r, far, n):
                visit(*no_keys(arrays), sums)
            else:
                visit(Keys(False, span, True, step, len(visits)), arrays, sums)
            if sums:  # send each shard's sums to its owner; receive partial sums of the own keys
                home = {
                    n - d: ([select_rows(array, d, d) for array in other_sums],
                            [part[own_sum_count + d - 1] for part in partial_sums])
                    for d in range(near, far + 1)
                }  # fmt: skip
                going_home.append(self.transport.exchange(home))
        for transfer in going_home:
            transfer.wait()
        has_partial_sums = types and own_sum_count + summed_reach
        if round.combine is not None and round.keep is not None and has_partial_sums:
            # `keep` does the last addition, for dK together with the rounding to its dtype
            round.keep(slice(0, rows[r]), *add_pairwise(partial_sums, round.combine, 2))

    def _gather(
        self, own: list[Array], rows_within: list[int]
    ) -> tuple[Pending | None, list[Array]]:
        """Gather the arrays `own` of all shards in reach. `rows_within` is as in `run`.

        Returns (transfer, gathered arrays). The transfer is None if the arrays are complete:
        earlier rounds have gathered the features, and vectors are waited for here.
        """
        reach = len(rows_within) - 1
        gathered, arriving = [], []
        for array in own:
            index = next((i for i, key in enumerate(self.keys) if key is array), None)
            # -1: no shard of this array has been gathered
            far, buffer = (-1, None) if index is None else self.gathered.get(index, (-1, None))
            # compare distances, not rows: they are equal on all ranks, so all ranks gather or none
            if far < reach:
                buffer = self.xp.empty((rows_within[-1], *array.shape[1:]), array.dtype)
                arriving.append((array, buffer))
                if index is not None:
                    self.gathered[index] = reach, buffer
            gathered.append(buffer)
        if not arriving or not reach:
            return None, gathered
        end = rows_within[-1]
        shifts = {
            d: ([array for array, _ in arriving],
                [buffer[end - rows_within[d] : end - rows_within[d - 1]] for _, buffer in arriving])
            for d in range(1, reach + 1)
        }  # fmt: skip
        pending = self.transport.exchange(shifts)
        if any(array is own[0] for array, _ in arriving):
            # features of keys take long, so the caller computes the local block while they arrive
            return pending, gathered
        pending.wait()
        return None, gathered

    def _list_visits(
        self, reach: int, summed_reach: int, sum_types: Sequence[RowType]
    ) -> Iterator[tuple[int, int]]:
        """The visits of other ranks' keys, as distances (farthest, nearest) of their shards.

        Shards without sums are one visit. Shards with sums are several visits if the sums, of
        `sum_types`, are large; one visit if `sum_types` is empty. All ranks have the same visits.
        """
        if reach > summed_reach:
            yield reach, summed_reach + 1
        if not summed_reach:
            return
        row_bytes = sum(prod(tail) * np.dtype(dtype).itemsize for tail, dtype in sum_types)
        count = visit_count(self.partition.total * row_bytes, summed_reach)
        ends = [summed_reach * i // count for i in range(count, -1, -1)]
        for far, nearer in pairwise(ends):
            yield far, nearer + 1


def add_pairwise(partial_sums: list[Array], combine: Combine, most: int = 1) -> list[list[Array]]:
    """Add partial sums pairwise, until at most `most` sums are left. Returns these sums.

    Each array of `partial_sums` is [sums, rows, ...]. Each operation adds the second half of the
    sums that are left to the first half, in place.
    """
    left = len(partial_sums[0])
    while left > most:
        pairs = left // 2
        combine(
            [part[:pairs] for part in partial_sums],
            [part[left - pairs : left] for part in partial_sums],
        )
        left -= pairs
    return [[part[i] for part in partial_sums] for i in range(left)]
