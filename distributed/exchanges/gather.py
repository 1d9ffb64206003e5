"""The gather: each rank gets the keys of the others at once, and sends their sums home at once.

Rank r has its own keys and, in one buffer, those of the shards before it: of ranks r - w, ..., r -
1 (mod n), in that order, w = n - 1 (half as many where each pair of shards meets on one rank). It
folds its own block while they arrive, then all others in one. Its sums of the others' keys go to
their owners, and it gets n - 1 partial sums of its own keys, which are added pairwise: in an order
that depends on nothing but the number of ranks.

Keys are gathered once a call. In a later round they are there already, and the own block comes
last: sums travel behind it, those of some shards while the next are computed.
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
from ..cost import chunks_of
from ..transports.base import Exchanger
from .base import Combine, Keys, Round, RowType, none_of
from .partition import Partition


@dataclass(frozen=True)
class Gather:
    """How the shards of one call are gathered: an `Exchange`."""

    xp: Any  # numpy or cupy
    rank: int
    transport: Exchanger
    partition: Partition  # of the keys
    keys: list[Array]  # arrays of this rank's keys that several rounds visit
    # of these, by their index: how far they were gathered, and the array
    gathered: dict[int, tuple[int, Array]] = field(default_factory=dict)

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        n, r = len(self.partition.rows), self.rank
        rows, starts = self.partition.rows, self.partition.starts
        own, visit, types, half = round.own, round.visit, round.types, round.half
        reach, summed = round.reach(n), round.summed(n)
        # rows of the shards of ranks r - d, ..., r - 1
        near = [0, *accumulate(rows[(r - d) % n] for d in range(1, reach + 1))]
        pending, everyone = self._gather(own, near)

        def of(array: Array, far: int, last: int) -> Array:
            """Of one row a key of all shards visited, those of ranks r - far, ..., r - last."""
            end = len(array)
            return array[end - near[far] : end - near[last - 1]]

        others = [self.xp.empty((near[summed], *tail), dtype) for tail, dtype in types]
        mine = 0 if half else 1  # sums of its own keys by this rank itself: the first of all
        parts = [
            self.xp.empty((mine + summed, rows[r], *tail), dtype) for tail, dtype in types
        ]  # fmt: skip
        # one while keys arrive: a sigmoid loss is the same with gradients and without
        own_first = pending is not None or round.same_pairs
        chunks = list(self._chunks(reach, summed, () if own_first else types))
        if half and round.same_pairs and 2 * reach == n:  # of shards that one of two ranks visits
            chunks = [(reach, reach), *self._chunks(reach - 1, reach - 1, ())]
        order = [None, *chunks] if own_first else [*chunks, None]  # None: the own block
        leaving: list[Pending] = []
        for step, chunk in enumerate(order):
            if chunk is None:
                span = slice(starts[r], starts[r + 1])
                sums = [part[0] for part in parts] if mine else []
                visit(Keys(True, span, True, step, len(order)), own, sums)
                continue
            if pending is not None:
                pending.wait()
                pending = None
            far, last = chunk
            first = starts[(r - far) % n]
            span = slice(first, first + near[far] - near[last - 1])
            sums = [of(array, far, last) for array in others] if last <= summed else []
            arrays = [of(array, far, last) for array in everyone]
            if round.leaves(r, far, n):
                visit(*none_of(arrays), sums)
            else:
                visit(Keys(False, span, True, step, len(order)), arrays, sums)
            if sums:
                home = {
                    n - d: ([of(array, d, d) for array in others],
                            [part[mine + d - 1] for part in parts])
                    for d in range(last, far + 1)
                }  # fmt: skip
                leaving.append(self.transport.exchange(home))
        for arriving in leaving:
            arriving.wait()
        if round.combine is not None and round.keep is not None and types and mine + summed:
            round.keep(slice(0, rows[r]), *added(parts, round.combine, 2))

    def _gather(self, own: list[Array], near: list[int]) -> tuple[Pending | None, list[Array]]:
        """Arrays of the shards in reach: what is under way to them, if features are, and they."""
        reach = len(near) - 1
        everyone, arriving = [], []
        for array in own:
            index = next((i for i, key in enumerate(self.keys) if key is array), None)
            far, there = (-1, None) if index is None else self.gathered.get(index, (-1, None))
            if far < reach:  # not by their rows: all ranks decide the same
                there = self.xp.empty((near[-1], *array.shape[1:]), array.dtype)
                arriving.append((array, there))
                if index is not None:
                    self.gathered[index] = reach, there
            everyone.append(there)
        if not arriving or not reach:
            return None, everyone
        end = near[-1]
        shifts = {
            d: ([array for array, _ in arriving],
                [there[end - near[d] : end - near[d - 1]] for _, there in arriving])
            for d in range(1, reach + 1)
        }  # fmt: skip
        pending = self.transport.exchange(shifts)
        if any(array is own[0] for array, _ in arriving):
            return pending, everyone
        pending.wait()
        return None, everyone

    def _chunks(
        self, reach: int, summed: int, divisible: Sequence[RowType]
    ) -> Iterator[tuple[int, int]]:
        """The visits of others' keys, as distances (farthest, nearest) of their shards: those
        without sums in one, those with sums in a few if these are large. The same on all ranks."""
        if reach > summed:
            yield reach, summed + 1
        if not summed:
            return
        size = sum(prod(tail) * np.dtype(dtype).itemsize for tail, dtype in divisible)
        count = chunks_of(self.partition.total * size, summed)
        ends = [summed * i // count for i in range(count, -1, -1)]
        for far, nearer in pairwise(ends):
            yield far, nearer + 1


def added(parts: list[Array], combine: Combine, most: int = 1) -> list[list[Array]]:
    """The sums of stacked parts, pairwise: a few operations, however many ranks there are. Ends
    with so many sums at most."""
    n = len(parts[0])
    while n > most:
        pairs = n // 2
        combine([part[:pairs] for part in parts], [part[n - pairs : n] for part in parts])
        n -= pairs
    return [[part[i] for part in parts] for i in range(n)]
