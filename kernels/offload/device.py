"""The interface of the device that computes with features in host memory.

copies.py implements it for a GPU, tests/support/host_device.py for a part of the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..epilogues import Epilogue
from ..linear import LinearGradient, SegmentedRows
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import Solution, Vectors


class Ticket(Protocol):
    """A copy that may be incomplete."""

    def wait(self) -> None:
        """Make later work of the device wait for the copy."""
        ...


class HostCopies(Protocol):
    """Copies between host and device, which run while the device computes.

    A copy begins after the work that was queued before it. The end of the context waits for all
    copies.
    """

    def touch(self, target: Array) -> None:
        """Begin to let the system provide the memory of `target`, a gradient on the host.

        Otherwise the first copies to new memory would wait for its pages.
        """
        ...

    def arrive(self, target: Array, source: Array) -> Ticket:
        """Begin to copy `source`, rows of the host, to `target`, an array on the device."""
        ...

    def leave(self, target: Array, source: Array, add: bool) -> Ticket:
        """Begin to copy `source`, an array on the device, to `target`, rows of the host.

        With `add`, it is added to the contents of `target`.
        """
        ...


class DeviceRows(SegmentedRows, Protocol):
    """`linear.SegmentedRows` on the device."""

    def subtract(self, term: LinearGradient, gradient: Array, dots: Array | None) -> None:
        """Subtract `term`, which is minus a gradient, from the complete gradient of these rows.

        `term` is first differentiated through the normalisation. Its part is subtracted from `dots`
        (`Gradients.dots` of these rows), too.
        """
        ...


class OffloadDevice(Protocol):
    """The device that computes blocks."""

    xp: Any  # cupy, or a module with its functions

    @property
    def vectors(self) -> Vectors:
        """The mathematics on vectors of length M or N."""
        ...

    def solve(self, problem: Problem, gradients: Gradients | None) -> Solution:
        """Loss and gradients of a problem whose arrays are on the device."""
        ...

    def run_block_pass(
        self, problem: Problem, triangle: bool, epilogue: Epilogue, gradients: Gradients | None,
        not_finite: NotFinite | None,
    ) -> None:  # fmt: skip
        """`solve.run_block_pass` of a block whose arrays are on the device."""
        ...

    def rows(self, features: Array, problem: Problem) -> DeviceRows:
        """Features on the device as the rows of linear terms, in the precision of the problem."""
        ...

    def put(self, array: Array) -> Array:
        """A copy of a vector on the device."""
        ...

    def get(self, array: Array) -> Array:
        """A copy of a vector on the host."""
        ...

    def copies(self) -> AbstractContextManager[HostCopies]:
        """A context for copies, whose end waits for all of them."""
        ...
