"""The division of a batch's queries, or keys, into shards of any size, one for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from infonce.kernels.problem import Array, Problem


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


def shard_positives(xp: Any, problem: Problem, first_query: int) -> Array:
    """[M] the positives of a shard without labels, as indices of the keys of all ranks.

    Row i of all ranks belongs to key i of all ranks. Of a rank's 2B views, a row belongs to the
    view B rows further on (mod 2B), on the same rank.
    `first_query` is the index of the shard's first row in the batch.
    """
    m, row = len(problem.query), xp.arange(len(problem.query))
    return first_query + ((row + m // 2) % max(m, 1) if problem.symmetric else row)
