"""Sets of tokens as the features of a problem (`Tokens`), and the tokens of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # a NumPy or CuPy array


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
    def row_shape(self) -> tuple[int, int]:
        """(L, D): the shape of a row and of its gradient."""
        _, length, d = self.values.shape
        return length, d

    @property
    def device(self) -> Any:
        """Of CuPy's arrays: the device of the features."""
        return self.values.device

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def counts(self) -> Array:
        """[M] int64: the numbers of tokens of rows that count."""
        if self.mask is None:
            return np.full(len(self), self.length)
        return self.mask.sum(axis=1)

    def pack(self) -> Array:
        """[T, D]: the tokens that count, row after row; a view if all of them do."""
        if self.mask is None:
            return self.values.reshape(-1, self.values.shape[2])
        return self.values[self.mask]

    def read(self) -> Array:
        """[M, L, D]: the values, 0 at tokens that do not count."""
        if self.mask is None:
            return self.values
        out = self.values.copy()
        out[~self.mask] = 0
        return out

    def unpack(self, packed: Array, out: Array) -> None:
        """Write packed values [T, D] to `out` [M, L, D], and 0 at tokens that do not count."""
        if self.mask is None:
            out[...] = packed.reshape(out.shape)
            return
        out[...] = 0
        out[self.mask] = packed


class TokenRows:
    """The unit tokens of a block's rows, as a backend multiplies them."""

    def __init__(self, tokens: Tokens, values: Array) -> None:
        self.tokens, self.values = tokens, values

    def __len__(self) -> int:
        return len(self.tokens)
