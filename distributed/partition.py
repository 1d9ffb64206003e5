"""How the queries, or the keys, of a batch are split into shards: one a rank, of any size."""

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
        """Of each rank's shard the j-th of so many pieces, as rows of the whole batch."""
        return [
            slice(start + rows * j // pieces, start + rows * (j + 1) // pieces)
            for start, rows in zip(self.starts, self.rows, strict=False)
        ]
