"""One round of the ring: shards of keys go from rank to rank, and sums over queries follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infonce.kernels.problem import Array

from .communicators.base import Communicator
from .partition import Partition
from .transports.base import Transport

RowType = tuple[tuple[int, ...], Any]  # (shape of a row, dtype) of an array with one row a key


@dataclass(frozen=True)
class Keys:
    """The keys of one step: all of a rank's shard, or one piece of it."""

    owner: int  # the rank whose keys they are
    rows: slice  # of the whole batch
    whole: bool  # all of the shard
    step: int  # number of this step of the round
    steps: int  # of the round

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


Visit = Callable[[Keys, list[Array], list[Array]], None]  # (keys, their arrays, their sums: output)
Combine = Callable[[list[Array], list[Array]], None]  # adds the second to the first
Keep = Callable[[slice, list[Array]], None]  # (rows of this rank's shard, their complete sums)


@dataclass(frozen=True)
class Circulation:
    """How the shards of one call go round; `run` is one round."""

    xp: Any  # numpy or cupy
    ranks: Communicator
    transport: Transport
    partition: Partition  # of the keys
    pieces: int  # a shard goes round in so many pieces, one round each
    symmetric: bool  # queries are keys

    def run(
        self,
        own: list[Array],
        visit: Visit,
        types: Sequence[RowType] = (),
        combine: Combine | None = None,
        keep: Keep | None = None,
        half: bool = False,
    ) -> None:
        """Visit the shard of every rank, with the arrays that its rank passes as `own`.

        A visit may compute sums over this rank's queries, one row a key: `types` are their shapes
        and dtypes. They follow their keys one step later: `combine` adds what arrives from the
        ranks before, and `keep` gets the complete sums of this rank's own keys.

        Where queries are keys, a rank's own shard is visited whole. `half`: each pair of shards
        meets on one of its two ranks, which computes the sums of both. (With an even number of
        ranks, shards n / 2 steps apart meet on both, and each computes those of its rows alone.)
        """
        n, r = self.ranks.size, self.ranks.rank
        steps = n // 2 + 1 if half else n
        summed = range(1, (n + 1) // 2) if half else range(n)  # steps that compute sums
        summed = summed if types else range(0)
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
                pending = self.transport.shift(outgoing, [*incoming, *arrived]) if n > 1 else None
                sums = buffers(s % 3, rows, True) if s in summed else []
                if s or not self.symmetric:
                    step = s + j * steps
                    keys = Keys(k, shards[k], self.pieces == 1, step, self.pieces * steps)
                    visit(keys, arrays, sums)
                elif not j:
                    whole = slice(start, self.partition.starts[r + 1])
                    visit(Keys(r, whole, True, 0, self.pieces * steps), own, [])
                if pending is not None:
                    pending.wait()
                if combine is not None and arrived:
                    combine(sums, arrived)
                arrays = incoming
                carried = sums or carried
            if summed and keep is not None:
                if n > 1:
                    rows = shards[r].stop - shards[r].start
                    complete = buffers((summed[-1] + 1) % 3, rows, True)
                    self.transport.shift(carried, complete, n - summed[-1]).wait()
                    carried = complete
                keep(mine, carried)
