"""Sets of tokens as the features of a problem: `Tokens`, and the tokens of a block (`TokenRows`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Array


@dataclass(eq=False)
class Tokens:
    """Features of which a row is a set of tokens; in `Problem` they take the place of an array.

    A slice of it has some of the rows, on the same memory.
    """

    values: Array  # [M, L, D]
    mask: Array = None  # [M, L] bool: the tokens that count; None: all
    # True: a score is divided by the number of the row's tokens. Only queries have that
    takes_mean: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Tokens:
        mask = None if self.mask is None else self.mask[rows]
        return Tokens(self.values[rows], mask, self.takes_mean)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, D), as of features whose row is one vector."""
        m, _, d = self.values.shape
        return m, d

    @property
    def length(self) -> int:
        """L, the largest number of tokens of a row."""
        return int(self.values.shape[1])

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def counts(self) -> Array:
        """[M] int64: the numbers of tokens of rows that count."""
        if self.mask is None:
            return np.full(len(self), self.length)
        return self.mask.sum(axis=1)

    @property
    def token_rows(self) -> Array:
        """[T] int64: the row of each packed token."""
        return np.repeat(np.arange(len(self)), self.counts)

    def with_values(self, values: Array) -> Tokens:
        """The same tokens with other values [M, L, D]."""
        return Tokens(values, self.mask, self.takes_mean)

    def pack(self) -> Array:
        """[T, D]: the tokens that count, row after row; a view if all of them do."""
        if self.mask is None:
            return self.values.reshape(-1, self.values.shape[2])
        return self.values[self.mask]

    def unpack(self, packed: Array, out: Array) -> None:
        """Write packed values [T, D] to `out` [M, L, D], and 0 at tokens that do not count."""
        if self.mask is None:
            out[...] = packed.reshape(out.shape)
            return
        out[...] = 0
        out[self.mask] = packed


class TokenRows:
    """The unit tokens of a block's rows, packed, in the dtype of the computation."""

    def __init__(self, tokens: Tokens, values: Array) -> None:
        self.tokens, self.values = tokens, values
        counts = tokens.counts
        self.token_rows = tokens.token_rows
        self.starts = np.concatenate([[0], np.cumsum(counts)])  # [m + 1] of rows in `values`
        divisors = np.maximum(counts, 1) if tokens.takes_mean else np.ones(len(counts))
        self.weights = (1.0 / divisors).astype(values.dtype)  # [m], factors of scores

    def __len__(self) -> int:
        return len(self.tokens)
