"""The ring: shards of keys go from rank to rank, and sums over queries follow them.

In step s rank r has the keys of rank k = r - s (mod n). The sums of those keys travel one step
behind them: while a block is computed, the keys of the next one arrive, and so do the sums of the
ranks before, to which this rank's are added. After n steps they are sent to the owner of the keys.
The sums of shard k are thus always added in the order k, k + 1, ...

There are two buffers of keys and three of sums. Where they would be larger than half of the
workspace, shards go round in pieces, one piece of each at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infonce.kernels.problem import Array

from ..transports.base import Exchanger
from .base import Keys, Round, RowType, none_of
from .partition import Partition


@dataclass(frozen=True)
class Ring:
    """How the shards of one call go round: an `Exchange`."""

    xp: Any  # numpy or cupy
    rank: int
    transport: Exchanger
    partition: Partition  # of the keys
    pieces: int  # a shard goes round in so many pieces, one round each
    symmetric: bool  # queries are keys

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        n, r = len(self.partition.rows), self.rank
        own, visit, types = round.own, round.visit, round.types
        steps = round.reach(n) + 1
        # steps that compute sums
        summed = range(round.half, round.summed(n) + 1) if types else range(0)
        largest = -(-self.partition.largest // self.pieces)
        like: list[RowType] = [(array.shape[1:], array.dtype) for array in own]
        stores: dict[tuple[int, bool], list[Array]] = {}
        views: dict[tuple[int, bool, int], list[Array]] = {}

        def buffers(slot: int, rows: int, sums: bool) -> list[Array]:
            """Arrays, or sums, of so many keys; allocated once, for the largest piece."""
            if (slot, sums) not in stores:
                stores[slot, sums] = [
                    self.xp.empty((largest, *tail), dtype)
                    for tail, dtype in (types if sums else like)
                ]
            if (slot, sums, rows) not in views:
                views[slot, sums, rows] = [array[:rows] for array in stores[slot, sums]]
            return views[slot, sums, rows]

        for j in range(self.pieces):
            shards = self.partition.piece(j, self.pieces)
            start = self.partition.starts[r]
            mine = slice(shards[r].start - start, shards[r].stop - start)
            arrays: list[Array] = [array[mine] for array in own]
            carried: list[Array] = []
            for s in range(steps):
                k, following = (r - s) % n, shards[(r - s - 1) % n]
                rows, last = shards[k].stop - shards[k].start, s == steps - 1
                incoming = buffers(s % 2, following.stop - following.start, False) * (not last)
                follow = s in summed and s - 1 in summed
                arrived = buffers((s + 1) % 3, rows, True) if follow else []
                outgoing = [*(arrays * (not last)), *(carried * follow)]
                pending = None
                if n > 1:
                    pending = self.transport.exchange({1: (outgoing, [*incoming, *arrived])})
                sums = buffers(s % 3, rows, True) if s in summed else []
                if s or not self.symmetric:
                    step = s + j * steps
                    keys = Keys(k == r, shards[k], self.pieces == 1, step, self.pieces * steps)
                    # Half way round an even ring, both ranks of a pair meet: one of them computes
                    if round.leaves(r, s, n):
                        visit(*none_of(arrays), sums)
                    else:
                        visit(keys, arrays, sums)
                elif not j:
                    whole = slice(start, self.partition.starts[r + 1])
                    visit(Keys(True, whole, True, 0, self.pieces * steps), own, [])
                if pending is not None:
                    pending.wait()
                if round.combine is not None and arrived:
                    round.combine(sums, arrived)
                arrays = incoming
                carried = sums or carried
            if summed and round.keep is not None:
                if n > 1:
                    rows = shards[r].stop - shards[r].start
                    complete = buffers((summed[-1] + 1) % 3, rows, True)
                    home = {n - summed[-1]: (carried, complete)}
                    self.transport.exchange(home).wait()
                    carried = complete
                round.keep(mine, carried)
