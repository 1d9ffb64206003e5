"""What a transport is, and that of NumPy arrays: the communicator itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..communicators.base import Array, Communicator, Pending


class Transport(Protocol):
    """A way to the next rank."""

    name: str

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        """Start sending arrays to the rank `distance` further on, and receiving as many."""
        ...

    def read(self, numbers: Sequence[Array]) -> list[float]:
        """0-d float64 arrays, when all that was queued on the device is done; RankError if it
        cannot be."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class Host:
    """NumPy arrays over the communicator itself."""

    name = "mpi"

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        return self.ranks.shift(send, receive, distance)

    def read(self, numbers: Sequence[Array]) -> list[float]:
        return [float(number) for number in numbers]

    def close(self) -> None:
        """Nothing is queued."""
