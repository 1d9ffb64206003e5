"""Panels of features and gradients, on their way between host and device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..linear import LinearGradient
from ..problem import Array
from .device import HostCopies, Ticket


def apart(rows: slice, columns: slice) -> bool:
    """Whether no index is in both."""
    return bool(rows.stop <= columns.start or columns.stop <= rows.start)


def longest(panels: Sequence[slice]) -> int:
    """Rows of the longest panel."""
    return max((panel.stop - panel.start for panel in panels), default=0)


@dataclass
class StreamedSide:
    """Queries or keys."""

    features: Array  # on the host
    panels: Sequence[slice]
    to: Array = None  # where the gradient goes, on the host; None: it is not wanted
    add: bool = False  # it is added to what is there
    linear: Sequence[LinearGradient] = ()  # terms that are added to the gradient
    dots: Array | None = None  # `Gradients.dots`, if they are of this side


@dataclass
class Part:
    """Rows of a side on the device."""

    rows: slice
    features: Array
    gradient: Array | None

    def part(self, rows: slice) -> Part:
        here = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return Part(
            rows, self.features[here], None if self.gradient is None else self.gradient[here]
        )


class Arrivals:
    """Panels that stream. While one is used, the next is copied; they share two buffers."""

    def __init__(
        self, xp: Any, copies: HostCopies, side: StreamedSide, panels: Sequence[slice]
    ) -> None:
        self.copies, self.side, self.panels = copies, side, deque(panels)
        shape = longest(panels), side.features.shape[1]
        dtype = side.features.dtype.newbyteorder("=")
        self.buffers = deque(xp.empty(shape, dtype) for _ in panels[:2])
        self.arriving = self.start()

    def start(self) -> tuple[Array, Ticket] | None:
        """Begin to copy the next panel, to the buffer that was used longer ago."""
        if not self.panels:
            return None
        panel = self.panels.popleft()
        target = self.buffers[0][: panel.stop - panel.start]
        self.buffers.rotate(-1)
        return target, self.copies.arrive(target, self.side.features[panel])

    def take(self) -> Array:
        """The next panel. The one before it is no longer used."""
        assert self.arriving is not None
        target, ticket = self.arriving
        self.arriving = self.start()
        ticket.wait()
        return target


class Departures:
    """Gradients of panels on their way to the host, in two buffers of `size` bytes."""

    def __init__(self, xp: Any, copies: HostCopies, size: int) -> None:
        self.copies = copies
        self.buffers = deque(xp.empty(size, np.uint8) for _ in range(2 if size else 0))
        self.leaving: deque[Ticket] = deque()

    def leave(self, side: StreamedSide, part: Part) -> None:
        """Copy a complete gradient to the host. Its memory may be used again at once."""
        gradient = part.gradient
        if side.to is None or gradient is None:
            return
        target, dtype = side.to[part.rows], gradient.dtype
        if not side.add and target.dtype.itemsize < dtype.itemsize:
            dtype = target.dtype.newbyteorder("=")
        if len(self.leaving) == len(self.buffers):
            self.leaving.popleft().wait()
        memory = self.buffers[0][: gradient.size * dtype.itemsize]
        self.buffers.rotate(-1)
        passing = memory.view(dtype).reshape(gradient.shape)
        passing[...] = gradient
        self.leaving.append(self.copies.leave(target, passing, side.add))
