"""The interface of exchanges: rounds over the ranks, which visit keys and bring sums home.

passes.py makes the rounds of a call. ring.py, gather.py and hierarchical.py run them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infonce.kernels.problem import Array

RowType = tuple[tuple[int, ...], Any]  # (shape of a row, dtype) of an array with a row for each key


@dataclass(frozen=True)
class Keys:
    """The keys of one visit: a part of a shard, a shard, or shards of consecutive ranks."""

    are_own: bool  # whether the keys are this rank's: the block is (a part of) the local block
    rows: slice  # of the N keys of the batch; past the end of the batch, N + i stands for key i
    are_whole_shards: bool  # whether the keys are all keys of one or more ranks
    step: int  # number of this visit in its round, from 0; for `progress`
    steps: int  # number of visits in the round; for `progress`

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


def no_keys(arrays: list[Array]) -> tuple[Keys, list[Array]]:
    """No keys and their empty arrays, for a visit that computes no block and clears its sums."""
    return Keys(False, slice(0, 0), False, 0, 1), [array[:0] for array in arrays]


# (keys, arrays of the keys, sums of the keys): computes a block. The sums are an output, which it
# overwrites; the list is empty if no sums are wanted
Visit = Callable[[Keys, list[Array], list[Array]], None]
# (sums, further sums): adds the second to the first, element-wise
Combine = Callable[[list[Array], list[Array]], None]
# (rows of this rank's shard, sums, *further sums): takes the sums of these rows over the queries of
# all ranks, which are the total of all these arguments
Keep = Callable[..., None]


@dataclass(frozen=True)
class Round:
    """One round over the ranks, in which each rank visits the keys of all ranks.

    A visit may compute sums over this rank's queries, with one row for each key: dK, or the sums of
    columns. The sums go to the rank of the keys. There `combine` adds the sums of all ranks, and
    `keep` receives the result. The order of the additions depends only on the number of ranks and
    on the number of ranks of a node. An exchange may leave the last addition to `keep`: then `keep`
    receives two lists of sums.

    If queries are keys, a rank's own shard is visited in one piece.

    visits_half : Only if queries are keys. Of n ranks, rank r visits its own shard and the n // 2
        shards before it. So a pair of shards meets on one of its two ranks, which computes the sums
        of both shards. If n is even, shards n / 2 apart meet on both ranks, and each rank computes
        only the sums of its own rows. The local block has no sums for keys, because the sums of its
        rows are the sums of its keys.
    same_pairs : Logits are compared with limits. A product of another shape may be rounded
        differently. So all rounds of a call visit the same keys together, this rank's own keys
        first: then all rounds leave out the same pairs. If `visits_half` and n is even, the rank
        with the higher number computes all sums of shards n / 2 apart, and the other rank computes
        none of these sums.
    """

    own: list[Array]  # arrays of this rank's keys, which travel
    visit: Visit
    types: Sequence[RowType] = ()  # row types of the sums; empty: no sums
    combine: Combine | None = None
    keep: Keep | None = None
    visits_half: bool = False
    same_pairs: bool = False
    # Arrays that visits fill, except the sums. infonce/jax/rounds.py, whose callbacks run a call
    # from its beginning, restores them
    results: Sequence[Array] = ()

    def reach(self, shards: int) -> int:
        """The distance, in ranks (or nodes), of the farthest shard that is visited.

        `shards` is the number of ranks (or nodes).
        """
        return shards // 2 if self.visits_half else shards - 1

    def summed_reach(self, shards: int) -> int:
        """The distance of the farthest shard with sums; 0 if no other rank's shard has sums."""
        if not self.types:
            return 0
        if not self.visits_half:
            return shards - 1
        return shards // 2 if self.same_pairs else (shards - 1) // 2

    def is_left_to_other(self, index: int, distance: int, shards: int) -> bool:
        """Whether rank (or node) `index` leaves out the shard that is `distance` before its own.

        Rank `index` does so if all of these hold: `visits_half`; `same_pairs`; the two shards are
        `shards` / 2 apart; and the owner of the other shard has the higher number. Then the owner
        visits the pair of shards.
        """
        half_apart = 2 * distance == shards
        # the owner is rank index - distance (mod shards), above `index` if index - distance < 0
        owner_is_higher = index < distance
        return self.visits_half and self.same_pairs and half_apart and owner_is_higher


class Exchange(Protocol):
    """How ranks get each other's keys."""

    def run(self, round: Round) -> None:
        """Visit the keys of every rank, or of about half of the ranks: see `Round.visits_half`."""
        ...
