"""The division of a batch's queries, or keys, into shards of any size, one for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Rank r holds rows [starts[r], starts[r] + rows[r]) of the whole batch."""

    rows: list[int]  # for each rank, the number of rows of its shard

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each rank's shard; at the end, the number of rows of the batch."""
        return [0, *accumulate(self.rows)]

    @property
    def total(self) -> int:
        """The number of rows of the batch."""
        return self.starts[-1]

    @property
    def largest(self) -> int:
        """The number of rows of the largest shard."""
        return max(self.rows)

    def piece(self, j: int, pieces: int) -> list[slice]:
        """Piece j (from 0) of `pieces` pieces of each rank's shard, as rows of the whole batch."""
        return [
            slice(start + rows * j // pieces, start + rows * (j + 1) // pieces)
            for start, rows in zip(self.starts, self.rows, strict=False)
        ]
