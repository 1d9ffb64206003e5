"""The interface of transports, and the transport of NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from infonce.kernels.solve import Solution

from ..communicators.base import Array, Communicator, Pending, Shifts

Divisors = tuple[float, float]  # of the loss summed over ranks, and of gradients


class Exchanger(Protocol):
    """Sends arrays to other ranks."""

    def exchange(self, shifts: Shifts) -> Pending:
        """Start to send arrays to other ranks, and to receive as many: see `Communicator`.

        `shifts` is distance -> (arrays for rank + distance, arrays from rank - distance).
        """
        ...


class Queued(Exchanger, Protocol):
    """An `Exchanger` through a queue of the device, which may record what it does."""

    def allgather(self, numbers: Sequence[Array]) -> Array:
        """[ranks, numbers] float64: the values of 0-d float64 arrays on all ranks."""
        ...


class Transport(Exchanger, Protocol):
    """An `Exchanger` of one call."""

    name: str
    plans: dict[Any, Any]  # of calls, which hold the transport

    @property
    def measured(self) -> bool:
        """Whether exchanges are timed."""
        ...

    def queued(self, queue: Any) -> Queued | None:
        """The same through a queue of the device; None if the host has a part in exchanges."""
        ...

    def allgather(self, numbers: Sequence[Array]) -> Array:
        """See `Queued`."""
        ...

    def read(self, number: Array) -> float:
        """The value of a 0-d float64 array. Waits for the work queued on the device; RankError if
        that fails."""
        ...

    def finish(self) -> None:
        """Wait for the work queued on the device; RankError if that fails."""
        ...

    def close(self) -> None:
        """Abandon exchanges that are not complete, after an error of which the other ranks have
        been told."""
        ...


class Host:
    """NumPy arrays over the communicator itself."""

    name = "mpi"
    measured = False

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self.plans: dict[Any, Any] = {}

    def exchange(self, shifts: Shifts) -> Pending:
        return self.ranks.exchange(shifts)

    def queued(self, queue: Any) -> Queued | None:
        return None

    def allgather(self, numbers: Sequence[Array]) -> Array:
        return np.array(self.ranks.allgather([float(number) for number in numbers]))

    def read(self, number: Array) -> float:
        return float(number)

    def finish(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Nothing to abandon."""


def sum_over_ranks(
    through: Queued | Transport, vectors: Any, numbers: Mapping[str, tuple[Array | None, float]],
    dtype: Any,
) -> dict[str, Array]:  # fmt: skip
    """Of each name: the sum over ranks of a 0-d array, divided by a number; 0-d of `dtype`. Ranks
    are added in their order: bitwise the same on every rank and in every run."""
    wanted = {name: number for name, (number, _) in numbers.items() if number is not None}
    if not wanted:
        return {}
    rank_values = through.allgather(list(wanted.values()))
    divisors = [numbers[name][1] for name in wanted]
    return dict(zip(wanted, vectors.sum_over_ranks(rank_values, divisors, dtype), strict=True))


def totals(
    through: Queued | Transport, vectors: Any, loss: Array | None, solution: Solution,
    divisors: Divisors, dtype: Any,
) -> dict[str, Array]:  # fmt: skip
    """Over ranks: the loss and the gradients of scale and bias, by their names in `Solution`."""
    loss_divisor, gradient_divisor = divisors
    numbers = {
        "loss": (loss, loss_divisor), "scale_grad": (solution.scale_grad, gradient_divisor),
        "bias_grad": (solution.bias_grad, gradient_divisor),
    }  # fmt: skip
    return sum_over_ranks(through, vectors, numbers, dtype)
