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


class Transport(Exchanger, Protocol):
    """An `Exchanger` of one call."""

    name: str

    def queued(self, queue: Any) -> Exchanger | None:
        """The same whose exchanges go through a queue of the device, which may record them; None if
        the host has a part in them."""
        ...

    def read(self, numbers: Sequence[Array]) -> list[float]:
        """The values of 0-d float64 arrays. Waits for the work queued on the device; RankError if
        that fails."""
        ...

    def write(self, numbers: Sequence[float], dtype: Any) -> Array:
        """The numbers as an array."""
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

    def queued(self, queue: Any) -> Exchanger | None:
        return None

    def read(self, numbers: Sequence[Array]) -> list[float]:
        return [float(number) for number in numbers]

    def write(self, numbers: Sequence[float], dtype: Any) -> Array:
        return np.array(numbers, dtype)

    def close(self) -> None:
        """Nothing to abandon."""
