"""Panels of features and gradients that are copied between host and device."""

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
    """Whether the two ranges have no common index."""
    return bool(rows.stop <= columns.start or columns.stop <= rows.start)


def longest(panels: Sequence[slice]) -> int:
    """Rows of the longest panel."""
    return max((panel.stop - panel.start for panel in panels), default=0)


@dataclass
class StreamedSide:
    """Queries or keys on the host, and the destination of their gradient."""

    features: Array
    panels: Sequence[slice]  # rows of each panel
    to: Array = None  # destination of the gradient; None: no gradient is wanted
    add: bool = False  # the gradient is added to the contents of `to`
    linear: Sequence[LinearGradient] = ()  # linear terms of the gradient
    dots: Array | None = None  # `Gradients.dots`, if its products are of this side's rows


@dataclass
class Part:
    """Rows of queries or keys on the device, with the accumulator of their gradient."""

    rows: slice
    features: Array
    gradient: Array | None

    def part(self, rows: slice) -> Part:
        """Some of these rows; `rows` counts from the first row of the side."""
        local = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        gradient = None if self.gradient is None else self.gradient[local]
        return Part(rows, self.features[local], gradient)


class Arrivals:
    """Copies of streamed panels to the device. While one panel is used, the next is copied.

    All panels share two buffers.
    """

    def __init__(
        self, xp: Any, copies: HostCopies, side: StreamedSide, panels: Sequence[slice]
    ) -> None:
        self.copies, self.side, self.panels = copies, side, deque(panels)
        shape = longest(panels), side.features.shape[1]
        dtype = side.features.dtype.newbyteorder("=")
        self.buffers = deque(xp.empty(shape, dtype) for _ in panels[:2])
        self.arriving = self.start()

    def start(self) -> tuple[Array, Ticket] | None:
        """Begin to copy the next panel to the buffer that is not in use."""
        if not self.panels:
            return None
        panel = self.panels.popleft()
        target = self.buffers[0][: panel.stop - panel.start]
        self.buffers.rotate(-1)
        return target, self.copies.arrive(target, self.side.features[panel])

    def take(self) -> Array:
        """The next panel on the device. The panel before it must not be used any more."""
        assert self.arriving is not None
        target, ticket = self.arriving
        self.arriving = self.start()
        ticket.wait()
        return target


class Departures:
    """Copies of gradients to the host, through two buffers of `size` bytes."""

    def __init__(self, xp: Any, copies: HostCopies, size: int) -> None:
        self.copies = copies
        self.buffers = deque(xp.empty(size, np.uint8) for _ in range(2 if size else 0))
        self.leaving: deque[Ticket] = deque()

    def leave(self, side: StreamedSide, part: Part) -> None:
        """Copy a complete gradient to the host. The memory of `part` may be used again at once."""
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
        converted = memory.view(dtype).reshape(gradient.shape)
        converted[...] = gradient
        self.leaving.append(self.copies.leave(target, converted, side.add))
