"""The interface of transports, and the transport of NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..communicators.base import Array, Communicator, Pending


class Transport(Protocol):
    """Sends arrays to the next rank."""

    name: str

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        """Start to send arrays to rank + distance, and to receive as many from rank - distance."""
        ...

    def read(self, numbers: Sequence[Array]) -> list[float]:
        """The values of 0-d float64 arrays. Waits for the work queued on the device; RankError if
        that fails."""
        ...

    def close(self) -> None:
        """Abandon shifts that are not complete, after an error."""
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
        """Nothing to abandon."""
