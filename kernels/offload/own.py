"""Own negatives in host memory: parts of their rows are copied to the device, one by one.

`between_passes.OwnNegatives` computes with the parts, between the passes and after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..problem import Array, Gradients, Problem
from .chunks import Arrivals
from .device import Ticket
from .streamed_pass import StreamedCall

MOST_LEAVING = 2  # largest number of gradients that are on their way to the host at once


class StreamedOwnRows:
    """See `infonce.kernels.between_passes.OwnRows`."""

    def __init__(self, problem: Problem, context: StreamedCall) -> None:
        self.arrays, self.context = [problem.query, problem.own], context
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

    def leave(self, target: Array, gradient: Array, add: bool) -> None:
        """Copy a gradient to the host, or add it; at most MOST_LEAVING copies are under way."""
        if len(self.leaving) == MOST_LEAVING:
            self.leaving.popleft().wait()
        self.leaving.append(self.context.copies.leave(target, gradient, add))
