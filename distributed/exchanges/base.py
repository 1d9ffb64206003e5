"""What an exchange is: the visits of keys in one round over the ranks, and the way home of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infonce.kernels.problem import Array

RowType = tuple[tuple[int, ...], Any]  # (shape of a row, dtype) of an array with one row a key


@dataclass(frozen=True)
class Keys:
    """The keys of one visit: a part of a shard, a shard, or shards of consecutive ranks."""

    mine: bool  # they are this rank's keys
    rows: slice  # of the whole batch; past its end, the rows from its beginning on
    whole: bool  # no shard is cut
    step: int  # number of this visit in its round
    steps: int  # of the round

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


def none_of(arrays: list[Array]) -> tuple[Keys, list[Array]]:
    """No keys, for a visit that has nothing to do."""
    return Keys(False, slice(0, 0), False, 0, 1), [array[:0] for array in arrays]


Visit = Callable[[Keys, list[Array], list[Array]], None]  # (keys, their arrays, their sums: output)
Combine = Callable[[list[Array], list[Array]], None]  # adds the second to the first, element-wise
# (rows of this rank's shard; their complete sums, or what adds up to them: one or two lists)
Keep = Callable[..., None]


@dataclass(frozen=True)
class Round:
    """One round over the ranks, in which each visits the keys of all of them.

    A visit may compute sums over this rank's queries, one row a key. They go to the rank of the
    keys, which gets its own in `keep`: the sums of all ranks, added by `combine` in an order that
    depends on nothing but the number of ranks and how many of them are on a host. The last addition
    may be left to `keep`.

    Where queries are keys, a rank's own shard is visited whole. `half`: each pair of shards meets
    on one of its two ranks, which computes the sums of both: rank r visits the n // 2 shards before
    its own. (With an even number of ranks, shards n / 2 steps apart meet on both, and each computes
    those of its rows alone.) `same_pairs`: all rounds of a call visit the same keys together, this
    rank's own first, and each pair of shards meets once.
    """

    own: list[Array]  # this rank's arrays of keys
    visit: Visit
    types: Sequence[RowType] = ()  # of the sums
    combine: Combine | None = None
    keep: Keep | None = None
    half: bool = False
    same_pairs: bool = False
    results: Sequence[Array] = ()  # what visits fill, but for sums

    def reach(self, shards: int) -> int:
        """Distance of the farthest shard that is visited."""
        return shards // 2 if self.half else shards - 1

    def summed(self, shards: int) -> int:
        """Distance of the farthest shard with sums; 0: none but perhaps the own one."""
        if not self.types:
            return 0
        return (shards - 1 + self.same_pairs) // 2 if self.half else shards - 1

    def leaves(self, place: int, distance: int, shards: int) -> bool:
        """Whether a pair of shards that could meet on both ranks is left to the other one."""
        return self.half and self.same_pairs and place < distance == shards / 2


class Exchange(Protocol):
    """How ranks get each other's keys."""

    def run(self, round: Round) -> None:
        """Visit the keys of every rank."""
        ...
