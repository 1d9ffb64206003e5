"""The ring: shards of keys go from rank to rank, and sums over queries follow them.

Sums are numbers for each key that all ranks add to: dK, or sums of columns. In step s, rank r of n
ranks has the keys of rank k = r - s (mod n). While rank r computes a block with these keys, two
things arrive from rank r - 1:

- the keys of the next block,
- the running sums of the keys of this block: the sums of ranks k, k + 1, ..., r - 1.

Then rank r adds the sums of its block to the running sums. So the sums of shard k are always added
in the order k, k + 1, ... After the last step with sums, the sums are sent to the owner of the
keys.

A round has n steps. If queries are keys, a round may have about half of the steps
(`Round.visits_half`). Then rank k computes no sums for its own keys in step 0, and the order of the
additions begins with rank k + 1. The owner adds these sums to its sums of rows.

There are two buffers of keys (of this block, and arriving) and three buffers of sums (of this
block, arriving, and being sent). If the buffers would be larger than half of the workspace, shards
go round in pieces, one piece of each shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infonce.kernels.problem import Array

from ..transports.base import Exchanger
from .base import Keys, Round, RowType, no_keys
from .partition import Partition

NEXT_RANK = 1  # distance of the rank to which this rank sends in each step


class _Buffers:
    """Memory for the rows of a piece, in several slots; each is allocated when it is first used."""

    def __init__(self, xp: Any, types: Sequence[RowType], largest_piece: int) -> None:
        self.xp, self.types, self.largest_piece = xp, types, largest_piece
        self.slots: dict[int, list[Array]] = {}
        self.views: dict[tuple[int, int], list[Array]] = {}  # by slot and number of rows

    def get(self, slot: int, rows: int) -> list[Array]:
        """The first `rows` rows of the arrays in a slot."""
        if slot not in self.slots:
            self.slots[slot] = [
                self.xp.empty((self.largest_piece, *tail), dtype) for tail, dtype in self.types
            ]
        if (slot, rows) not in self.views:
            self.views[slot, rows] = [array[:rows] for array in self.slots[slot]]
        return self.views[slot, rows]


@dataclass(frozen=True)
class Ring:
    """The exchange "ring" of a call: see `Exchange`."""

    xp: Any  # numpy or cupy
    rank: int
    transport: Exchanger
    partition: Partition  # of the keys
    piece_count: int  # number of pieces of a shard, which go round one after another
    symmetric: bool  # queries are keys

    def run(self, round: Round) -> None:
        """See `Exchange`."""
        largest_piece = -(-self.partition.largest // self.piece_count)  # in keys
        key_types: list[RowType] = [(array.shape[1:], array.dtype) for array in round.own]
        key_buffers = _Buffers(self.xp, key_types, largest_piece)  # slots 0 and 1
        sum_buffers = _Buffers(self.xp, round.types, largest_piece)  # slots 0, 1 and 2
        for piece in range(self.piece_count):
            self._send_round(round, piece, key_buffers, sum_buffers)

    def _send_round(
        self, round: Round, piece: int, key_buffers: _Buffers, sum_buffers: _Buffers
    ) -> None:
        """Send piece number `piece` of each shard round the ring, and its sums to its owner."""
        ranks, rank = len(self.partition.rows), self.rank
        steps, summed_steps = self._count_steps(round)
        piece_rows = self.partition.piece(piece, self.piece_count)  # rows of the batch, by rank
        lengths = [rows.stop - rows.start for rows in piece_rows]
        own_rows = self._own_rows(piece_rows[rank])
        arrays: list[Array] = [array[own_rows] for array in round.own]
        # Step s computes sums in slot s % 3, and receives running sums in slot (s + 1) % 3. It
        # sends the sums of step s - 1, which are in slot (s - 1) % 3
        sums_to_send: list[Array] = []
        for step in range(steps):
            # start the transfers that this step's block hides
            owner, next_owner = (rank - step) % ranks, (rank - step - 1) % ranks
            next_arrays: list[Array] = []
            outgoing: list[Array] = []
            if step < steps - 1:
                next_arrays = key_buffers.get(step % 2, lengths[next_owner])
                outgoing += arrays
            running_sums: list[Array] = []  # of the ranks owner ... rank - 1
            if step in summed_steps and step - 1 in summed_steps:
                running_sums = sum_buffers.get((step + 1) % 3, lengths[owner])
                outgoing += sums_to_send
            pending = None
            if ranks > 1:
                incoming = [*next_arrays, *running_sums]
                pending = self.transport.exchange({NEXT_RANK: (outgoing, incoming)})

            # compute the block
            sums = sum_buffers.get(step % 3, lengths[owner]) if step in summed_steps else []
            self._visit(round, piece, step, steps, piece_rows[owner], arrays, sums)

            # add the sums that have arrived
            if pending is not None:
                pending.wait()
            if round.combine is not None and running_sums:
                round.combine(sums, running_sums)  # then the sums are of ranks owner ... rank
            arrays = next_arrays
            if sums:
                sums_to_send = sums

        # send the last sums to the owner of the keys, and receive the sums of the own keys
        if summed_steps and round.keep is not None:
            sums_of_own_keys = sums_to_send  # of one rank: all sums are of its own keys
            if ranks > 1:
                sums_of_own_keys = sum_buffers.get((summed_steps[-1] + 1) % 3, lengths[rank])
                distance_to_owner = ranks - summed_steps[-1]
                shift_to_owners = {distance_to_owner: (sums_to_send, sums_of_own_keys)}
                self.transport.exchange(shift_to_owners).wait()
            round.keep(own_rows, sums_of_own_keys)

    def _count_steps(self, round: Round) -> tuple[int, range]:
        """The number of steps of a round, and the steps whose blocks have sums for the keys."""
        ranks = len(self.partition.rows)
        # with `visits_half`, the local block (step 0) has sums of rows only, which do not travel
        first = 1 if round.visits_half else 0
        summed_steps = range(first, round.summed_reach(ranks) + 1) if round.types else range(0)
        return round.reach(ranks) + 1, summed_steps

    def _own_rows(self, rows: slice) -> slice:
        """Rows of the batch that this rank has, as rows of its shard."""
        start = self.partition.starts[self.rank]
        return slice(rows.start - start, rows.stop - start)

    def _visit(
        self, round: Round, piece: int, step: int, steps: int, rows: slice, arrays: list[Array],
        sums: list[Array],
    ) -> None:  # fmt: skip
        """Visit the keys of step `step`: `rows` of the batch, whose arrays are `arrays`."""
        ranks, visits = len(self.partition.rows), self.piece_count * steps
        is_own, number = step == 0, step + piece * steps
        if is_own and self.symmetric:  # if queries are keys, the own shard is visited in one piece
            if piece == 0:
                shard = slice(*self.partition.starts[self.rank : self.rank + 2])
                round.visit(Keys(True, shard, True, 0, visits), round.own, [])
        elif round.is_left_to_other(self.rank, step, ranks):
            round.visit(*no_keys(arrays), sums)
        else:
            keys = Keys(is_own, rows, self.piece_count == 1, number, visits)
            round.visit(keys, arrays, sums)
