"""The interface of transports, and the transport of NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..communicators.base import Array, Communicator, Pending, Shifts


class Exchanger(Protocol):
    """Sends arrays to other ranks."""

    def exchange(self, shifts: Shifts) -> Pending:
        """Start to send arrays to other ranks, and to receive as many: see `Communicator`."""
        ...


class Queued(Exchanger, Protocol):
    """An `Exchanger` through a queue of the device, which may record what it does."""

    def read_ahead(self, numbers: Sequence[Array]) -> None:
        """What the next `Transport.read` is to read: it does not wait for what is queued later."""
        ...


class Transport(Exchanger, Protocol):
    """An `Exchanger` of one call."""

    name: str

    def queued(self, queue: Any) -> Queued | None:
        """The same through a queue of the device; None if the host has a part in exchanges."""
        ...

    def read(self, numbers: Sequence[Array]) -> list[float]:
        """The values of 0-d float64 arrays. Waits for the work queued on the device, or for that
        before a `read_ahead` of the same; RankError if that fails."""
        ...

    def write(self, numbers: Sequence[float], dtype: Any) -> Array:
        """The numbers as an array."""
        ...

    def finish(self) -> None:
        """Wait for the work that `read` did not wait for; RankError if that fails."""
        ...

    def close(self) -> None:
        """Abandon exchanges that are not complete, after an error."""
        ...


class Host:
    """NumPy arrays over the communicator itself."""

    name = "mpi"

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks

    def exchange(self, shifts: Shifts) -> Pending:
        return self.ranks.exchange(shifts)

    def queued(self, queue: Any) -> Queued | None:
        return None

    def read(self, numbers: Sequence[Array]) -> list[float]:
        return [float(number) for number in numbers]

    def write(self, numbers: Sequence[float], dtype: Any) -> Array:
        return np.array(numbers, dtype)

    def finish(self) -> None:
        """`read` has waited for nothing."""

    def close(self) -> None:
        """Nothing to abandon."""
