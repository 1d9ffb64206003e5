"""What a device is to `offload`: its vectors, its blocks, and copies to and from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..epilogues import Epilogue
from ..linear import LinearGradient, Rows
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import Solution, Vectors


class Ticket(Protocol):
    """A copy that may not be done yet."""

    def wait(self) -> None:
        """What is asked of the device from now on comes after the copy."""
        ...


class HostCopies(Protocol):
    """Copies between host and device, beside the work of the device. A copy comes after the work
    asked for before it. Leaving the context waits for all of them."""

    def touch(self, target: Array) -> None:
        """Begin to have memory on the host that the system has not provided yet. All of `target`
        will be written."""
        ...

    def arrive(self, target: Array, source: Array) -> Ticket:
        """Copy rows of the host to an array on the device."""
        ...

    def leave(self, target: Array, source: Array, add: bool) -> Ticket:
        """Copy an array on the device to rows of the host, or add it to them."""
        ...


class DeviceRows(Rows, Protocol):
    """`linear.Rows` on the device."""

    def subtract(self, term: LinearGradient, gradient: Array, dots: Array | None) -> None:
        """Add the term's share of the gradient to a complete one, through the normalisation, and
        its share of `Gradients.dots`. All are of these rows."""
        ...


class OffloadDevice(Protocol):
    """The device that computes blocks."""

    xp: Any  # cupy, or a module with its functions

    @property
    def vectors(self) -> Vectors:
        """The mathematics on vectors of length M or N."""
        ...

    def solve(self, problem: Problem, gradients: Gradients | None) -> Solution:
        """`solve.solve` of a problem whose arrays are on the device."""
        ...

    def fold_block(
        self, problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
        not_finite: NotFinite | None,
    ) -> None:  # fmt: skip
        """`solve.fold_block` of a block whose arrays are on the device."""
        ...

    def rows(self, features: Array, problem: Problem) -> DeviceRows:
        """Features on the device as linear terms see them, in the precision of the problem."""
        ...

    def put(self, array: Array) -> Array:
        """A copy of a vector on the device."""
        ...

    def get(self, array: Array) -> Array:
        """A copy of a vector on the host."""
        ...

    def copies(self) -> AbstractContextManager[HostCopies]: ...
