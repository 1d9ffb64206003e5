"""The ring: shards of keys go from rank to rank, and sums over queries follow them.

Sums are numbers for each key that all ranks add to: dK, or sums of columns. In step s, rank r of n
ranks has the keys of rank k = r - s (mod n). While a block is computed, two things arrive from rank
r - 1: the keys of the next block, and the running sums of the keys of this block, to which the
ranks k, k + 1, ..., r - 1 have added. Rank r adds its own sums. So the sums of shard k are always
added in the order k, k + 1, ... After the last step with sums, the sums are sent to the owner of
the keys.

A round has n steps. If queries are keys, a round may have about half of the steps
(`Round.visits_half`). Then rank k computes no sums for its own keys in step 0, and the order of the
additions begins with rank k + 1. The owner adds these sums to its sums of rows.

There are two buffers of keys (of this block, and arriving) and three buffers of sums (of this
block, arriving, and being sent). If the buffers would be larger than half of the workspace, shards
go round in pieces, one piece of each shard at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infonce.kernels.problem import Array

from ..transports.base import Exchanger
from .base import Keys, Round, RowType, no_keys
from .partition import Partition

NEXT_RANK = 1  # distance of the rank to which this rank sends in each step


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
        ranks, rank = len(self.partition.rows), self.rank
        own, visit, types = round.own, round.visit, round.types
        steps = round.reach(ranks) + 1
        # with `visits_half`, the local block (step 0) has sums of rows only, which do not travel
        first_summed_step = 1 if round.visits_half else 0
        summed_steps = (
            range(first_summed_step, round.summed_reach(ranks) + 1) if types else range(0)
        )
        largest_piece = -(-self.partition.largest // self.piece_count)  # in keys
        key_types: list[RowType] = [(array.shape[1:], array.dtype) for array in own]
        stores: dict[tuple[int, bool], list[Array]] = {}  # by slot and `for_sums`
        views: dict[tuple[int, bool, int], list[Array]] = {}  # by slot, `for_sums` and `rows`

        def buffers(slot: int, rows: int, for_sums: bool) -> list[Array]:
            """Buffers for the arrays, or for the sums, of `rows` keys.

            They are parts of memory that is allocated once, for the largest piece. `slot` is the
            number of the buffer: 0 or 1 for arrays, 0 to 2 for sums.
            """
            if (slot, for_sums) not in stores:
                stores[slot, for_sums] = [
                    self.xp.empty((largest_piece, *tail), dtype)
                    for tail, dtype in (types if for_sums else key_types)
                ]
            if (slot, for_sums, rows) not in views:
                views[slot, for_sums, rows] = [array[:rows] for array in stores[slot, for_sums]]
            return views[slot, for_sums, rows]

        for j in range(self.piece_count):
            pieces = self.partition.piece(j, self.piece_count)  # rows of the batch, by rank
            start = self.partition.starts[rank]
            own_rows = slice(pieces[rank].start - start, pieces[rank].stop - start)
            arrays: list[Array] = [array[own_rows] for array in own]
            sums_to_send: list[Array] = []  # the sums that the next step sends
            for step in range(steps):
                # start the transfers that this step's block hides
                owner, next_piece = (rank - step) % ranks, pieces[(rank - step - 1) % ranks]
                rows, is_last = pieces[owner].stop - pieces[owner].start, step == steps - 1
                next_arrays: list[Array] = []
                outgoing: list[Array] = []
                if not is_last:
                    next_arrays = buffers(step % 2, next_piece.stop - next_piece.start, False)
                    outgoing += arrays
                running_sums: list[Array] = []  # of the ranks owner ... rank - 1
                if step in summed_steps and step - 1 in summed_steps:
                    running_sums = buffers((step + 1) % 3, rows, True)
                    outgoing += sums_to_send
                pending = None
                if ranks > 1:
                    incoming = [*next_arrays, *running_sums]
                    pending = self.transport.exchange({NEXT_RANK: (outgoing, incoming)})

                # compute the block
                sums = buffers(step % 3, rows, True) if step in summed_steps else []
                if step or not self.symmetric:
                    if round.is_left_to_other(rank, step, ranks):
                        visit(*no_keys(arrays), sums)
                    else:
                        keys = Keys(
                            owner == rank, pieces[owner], self.piece_count == 1,
                            step + j * steps, self.piece_count * steps,
                        )  # fmt: skip
                        visit(keys, arrays, sums)
                elif j == 0:  # if queries are keys, the own shard is visited once, in one piece
                    shard = slice(start, self.partition.starts[rank + 1])
                    visit(Keys(True, shard, True, 0, self.piece_count * steps), own, [])

                # add the sums that have arrived
                if pending is not None:
                    pending.wait()
                if round.combine is not None and running_sums:
                    round.combine(sums, running_sums)  # then the sums are of ranks owner ... rank
                arrays = next_arrays
                sums_to_send = sums or sums_to_send

            # send the last sums to the owner of the keys, and receive the sums of the own keys
            if summed_steps and round.keep is not None:
                sums_of_own_keys = sums_to_send  # of one rank: all sums are of its own keys
                if ranks > 1:
                    rows = pieces[rank].stop - pieces[rank].start
                    sums_of_own_keys = buffers((summed_steps[-1] + 1) % 3, rows, True)
                    distance_to_owner = ranks - summed_steps[-1]
                    shift_to_owners = {distance_to_owner: (sums_to_send, sums_of_own_keys)}
                    self.transport.exchange(shift_to_owners).wait()
                round.keep(own_rows, sums_of_own_keys)
