"""How the rows of one side of the batch are spread over ranks: shards of any size, even empty."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from infonce.kernels.blocks import within

Array = Any


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

    def local(self, xp: Any, rows: Array, k: int) -> Array:
        """Rows of the whole batch as rows of shard k; -1 for those of other shards."""
        return within(xp, rows, slice(self.starts[k], self.starts[k + 1]))
