"""Own negatives in host memory: parts of their rows are copied to the device, one by one.

`between_passes.OwnNegatives` computes with the parts, between the passes and after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..between_passes import read_own, write_table_gradient
from ..problem import Array, Gradients, Problem
from .chunks import Arrivals
from .device import Ticket
from .streamed_pass import StreamedCall

MOST_LEAVING = 2  # largest number of gradients that are on their way to the host at once


class _TableRows:
    """The rows of a table that are own negatives, as an array [M, K, D] of which parts are read."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.dtype = problem, problem.own.dtype
        self.shape = (*problem.own_indices.shape, problem.own.shape[1])

    def __getitem__(self, rows: slice) -> Array:
        return read_own(self.problem, rows)


class StreamedOwnRows:
    """See `infonce.kernels.between_passes.OwnRows`. `problem` has its arrays on the host."""

    def __init__(self, problem: Problem, context: StreamedCall) -> None:
        own = problem.own if problem.own_indices is None else _TableRows(problem)
        self.problem, self.arrays, self.context = problem, [problem.query, own], context
        self.leaving: deque[Ticket] = deque()

    def read(self, parts: Sequence[slice]) -> Iterator[tuple[Array, Array]]:
        """Each part on the device: (queries, own negatives). The next part is copied meanwhile."""
        arrivals = Arrivals(self.context.device.xp, self.context.copies, self.arrays, parts)
        for _ in parts:
            query, own = arrivals.take()
            yield query, own

    def add_to_query(self, gradients: Gradients, rows: slice, dq: Array) -> None:
        self.context.departures.wait()  # the passes' part of dQ is on the host after this
        assert gradients.query is not None
        self.leave(gradients.query[rows], dq, True)

    def write_own(self, gradients: Gradients, rows: slice, gradient: Array) -> None:
        assert gradients.own is not None
        target = gradients.own[rows]
        if target.dtype.itemsize < gradient.dtype.itemsize:
            gradient = gradient.astype(target.dtype.newbyteorder("="))
        self.leave(target, gradient, False)

    def write_table(self, gradients: Gradients, factors: Array) -> None:
        """The host adds up the table's gradient: a use has one factor, and a query is there."""
        write_table_gradient(self.problem, self.context.device.get(factors), gradients.own)

    def leave(self, target: Array, gradient: Array, add: bool) -> None:
        """Copy a gradient to the host, or add it; at most MOST_LEAVING copies are under way."""
        if len(self.leaving) == MOST_LEAVING:
            self.leaving.popleft().wait()
        self.leaving.append(self.context.copies.leave(target, gradient, add))
