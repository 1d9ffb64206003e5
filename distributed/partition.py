"""How the rows of one side of the batch are spread over ranks: shards of any size, even empty."""

from __future__ import annotations

from itertools import accumulate


class Partition:
    """Rank r holds rows [start(r), start(r) + rows[r]) of the whole batch."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.starts = [0, *accumulate(rows)]

    @property
    def total(self) -> int:
        return self.starts[-1]

    @property
    def largest(self) -> int:
        return max(self.rows)

    def piece(self, j: int, pieces: int) -> list[slice]:
        """Rows of the whole batch that are piece j of each rank's shard."""
        return [
            slice(start + rows * j // pieces, start + rows * (j + 1) // pieces)
            for start, rows in zip(self.starts, self.rows, strict=False)
        ]
