"""The interface of transports, and the transport of NumPy arrays.

An exchange (exchanges/) decides which arrays go to which ranks; a transport sends them. choice.py
chooses the transport of a call. gpu.py, nccl.py, peers.py and mailboxes.py carry arrays of GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from infonce.kernels.solve import Solution

from ..communicators.base import Array, Communicator, Pending, Shifts

Divisors = tuple[float, float]  # of the loss summed over ranks, and of d scale and d bias


class Exchanger(Protocol):
    """Sends arrays to other ranks."""

    def exchange(self, shifts: Shifts) -> Pending:
        """Start to send arrays to other ranks, and to receive arrays: see `Communicator.exchange`.

        `shifts` is distance -> (arrays for rank + distance, arrays from rank - distance).
        """
        ...


class Queued(Exchanger, Protocol):
    """An `Exchanger` through a queue of launches, which runs the exchanges or records them for a
    plan."""

    def allgather(self, numbers: Sequence[Array]) -> Array:
        """[ranks, numbers] float64: the values of some 0-d float64 arrays on all ranks."""
        ...


class Transport(Exchanger, Protocol):
    """An `Exchanger` of one kind, which the communicator keeps for later calls."""

    name: str  # as in `choice.CHOICES`
    plans: dict[Any, Any]  # plans of calls over this transport

    @property
    def measured(self) -> bool:
        """Whether exchanges are timed: see `gpu.measuring`."""
        ...

    def queued(self, queue: Any) -> Queued | None:
        """This transport through a queue of launches. None if exchanges need the host's work, so
        that a plan cannot record them: then the call has no plan (planned.py)."""
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


class HostTransport:
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
        """There is no device to wait for."""

    def close(self) -> None:
        """There is nothing to abandon: the communicator ends its own exchanges (`fail`)."""


def sum_over_ranks(
    transport: Queued | Transport, vectors: Any, numbers: Mapping[str, tuple[Array | None, float]],
    dtype: Any,
) -> dict[str, Array]:  # fmt: skip
    """Sums over ranks, by name, as 0-d arrays of `dtype`.

    `numbers` is name -> (this rank's 0-d array or None if the sum is not wanted, divisor of the
    sum). Ranks are added in their order: bitwise the same on every rank and in every run.
    """
    wanted = {name: number for name, (number, _) in numbers.items() if number is not None}
    if not wanted:
        return {}
    rank_values = transport.allgather(list(wanted.values()))
    divisors = [numbers[name][1] for name in wanted]
    return dict(zip(wanted, vectors.sum_over_ranks(rank_values, divisors, dtype), strict=True))


def totals(
    transport: Queued | Transport, vectors: Any, loss: Array | None, solution: Solution,
    divisors: Divisors, dtype: Any,
) -> dict[str, Array]:  # fmt: skip
    """The sums over ranks of the loss and of the gradients of scale and bias, by their names in
    `Solution`. `loss` is this rank's sum of losses, or None."""
    loss_divisor, gradient_divisor = divisors
    numbers = {
        "loss": (loss, loss_divisor), "scale_grad": (solution.scale_grad, gradient_divisor),
        "bias_grad": (solution.bias_grad, gradient_divisor),
    }  # fmt: skip
    return sum_over_ranks(transport, vectors, numbers, dtype)
