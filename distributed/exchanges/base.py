"""The interface of exchanges: rounds over the ranks, which visit keys and bring sums home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infonce.kernels.problem import Array

RowType = tuple[tuple[int, ...], Any]  # (shape of a row, dtype) of an array with one row a key


@dataclass(frozen=True)
class Keys:
    """The keys of one visit: a part of a shard, a shard, or shards of consecutive ranks."""

    are_own: bool  # whether they are this rank's keys
    rows: slice  # rows of the whole batch; past its end, row N + i stands for row i
    are_whole_shards: bool  # whether they are all keys of their shards
    step: int  # number of this visit in its round
    steps: int  # number of visits in the round

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


def no_keys(arrays: list[Array]) -> tuple[Keys, list[Array]]:
    """No keys and their empty arrays, for a visit that has nothing to do."""
    return Keys(False, slice(0, 0), False, 0, 1), [array[:0] for array in arrays]


# (keys, arrays of the keys, sums of the keys: an output)
Visit = Callable[[Keys, list[Array], list[Array]], None]
# (sums, further sums): adds the second to the first, element-wise
Combine = Callable[[list[Array], list[Array]], None]
# (rows of this rank's shard, sums, further sums if there are any): all added are the complete sums
Keep = Callable[..., None]


@dataclass(frozen=True)
class Round:
    """One round over the ranks, in which each rank visits the keys of all ranks.

    A visit may compute sums over this rank's queries, with one row for each key. The sums go to the
    rank of the keys. There `combine` adds the sums of all ranks, and `keep` receives the result.
    The order of the additions depends only on the number of ranks and on the number of ranks of a
    node. An exchange may leave the last addition to `keep`: then `keep` receives two lists of sums.

    If queries are keys, a rank's own shard is visited in one piece.

    half : Rank r visits the n // 2 shards before its own, of n ranks. So a pair of shards meets on
        one of its two ranks, which computes the sums of both. If n is even, shards n / 2 apart
        meet on both ranks, and each of these ranks computes only the sums of its own rows.
    same_pairs : Logits are compared with limits, so all rounds of a call visit the same keys
        together, this rank's own keys first. If n is even, the rank with the higher number
        computes all sums of shards n / 2 apart, and the other rank leaves them out.
    """

    own: list[Array]  # arrays of this rank's keys
    visit: Visit
    types: Sequence[RowType] = ()  # row types of the sums
    combine: Combine | None = None
    keep: Keep | None = None
    half: bool = False
    same_pairs: bool = False
    results: Sequence[Array] = ()  # arrays that visits fill, except the sums

    def reach(self, shards: int) -> int:
        """The distance, in ranks, of the farthest shard that is visited."""
        return shards // 2 if self.half else shards - 1

    def summed_reach(self, shards: int) -> int:
        """The distance of the farthest shard with sums; 0 if no other rank's shard has sums."""
        if not self.types:
            return 0
        if not self.half:
            return shards - 1
        return shards // 2 if self.same_pairs else (shards - 1) // 2

    def is_left_to_other(self, index: int, distance: int, shards: int) -> bool:
        """Whether rank (or node) `index` leaves its pair with the shard at `distance` to the owner
        of that shard."""
        return self.half and self.same_pairs and index < distance == shards / 2


class Exchange(Protocol):
    """How ranks get each other's keys."""

    def run(self, round: Round) -> None:
        """Visit the keys of every rank."""
        ...
