"""The division of a batch's queries, or keys, into shards of any size, one for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Partition:
    """Rank r holds rows [starts[r], starts[r] + rows[r]) of the whole batch."""

    rows: list[int]

    @cached_property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.rows)]

    @property
    def total(self) -> int:
        return self.starts[-1]

    @property
    def largest(self) -> int:
        return max(self.rows)

    def piece(self, j: int, pieces: int) -> list[slice]:
        """The j-th of `pieces` pieces of each rank's shard, as rows of the whole batch."""
        return [
            slice(start + rows * j // pieces, start + rows * (j + 1) // pieces)
            for start, rows in zip(self.starts, self.rows, strict=False)
        ]
