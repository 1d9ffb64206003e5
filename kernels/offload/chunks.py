"""Chunks of features and gradients that are copied between host and device.

streamed_pass.py uses them in passes, linear.py and own.py between the passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..linear import LinearGradient
from ..problem import Array
from .device import HostCopies, Ticket


def are_disjoint(rows: slice, columns: slice) -> bool:
    """Whether the two ranges have no common index."""
    return bool(rows.stop <= columns.start or columns.stop <= rows.start)


def empty_like(xp: Any, array: Array, rows: int) -> Array:
    """Memory on the device for `rows` rows of an array on the host."""
    return xp.empty((rows, *array.shape[1:]), array.dtype.newbyteorder("="))


def arrive(
    copies: HostCopies, targets: Sequence[Array], arrays: Sequence[Array], chunk: slice
) -> list[Ticket]:
    """Begin to copy a chunk of each array to its target on the device."""
    return [copies.arrive(to, z[chunk]) for to, z in zip(targets, arrays, strict=True)]


def longest_chunk_rows(chunks: Sequence[slice]) -> int:
    """The number of rows of the longest chunk."""
    return max((chunk.stop - chunk.start for chunk in chunks), default=0)


@dataclass
class StreamedSide:
    """All queries or all keys of a pass, on the host, and the destination of their gradient."""

    arrays: Sequence[Array]  # features, and auxiliary features (`Problem.auxiliary_names`)
    chunks: Sequence[slice]  # rows of each chunk
    to: Array = None  # destination of the gradient; None: no gradient is wanted
    add: bool = False  # the gradient is added to the contents of `to`
    linear: Sequence[LinearGradient] = ()  # linear terms of the gradient
    dots: Array | None = None  # `Gradients.dots`, if they belong to this side's rows


@dataclass
class SideRows:
    """Rows of queries or keys on the device, with the accumulator of their gradient."""

    rows: slice  # of the whole side
    arrays: Sequence[Array]  # of these rows: features, and auxiliary features
    gradient: Array | None  # None: no gradient is wanted

    @property
    def features(self) -> Array:
        return self.arrays[0]

    def part(self, rows: slice) -> SideRows:
        """The part with `rows`, which are numbers of rows of the whole side."""
        own_rows = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        gradient = None if self.gradient is None else self.gradient[own_rows]
        return SideRows(rows, [z[own_rows] for z in self.arrays], gradient)


class Arrivals:
    """Copies of chunks to the device. While one chunk is used, the next is copied.

    A chunk has the same rows of several `arrays`. All chunks share two buffers for each array.
    """

    def __init__(
        self, xp: Any, copies: HostCopies, arrays: Sequence[Array], chunks: Sequence[slice]
    ) -> None:
        self.copies, self.arrays, self.chunks = copies, arrays, deque(chunks)
        rows = longest_chunk_rows(chunks)
        self.buffers = deque([empty_like(xp, z, rows) for z in arrays] for _ in chunks[:2])
        self.arriving = self.start()

    def start(self) -> tuple[list[Array], list[Ticket]] | None:
        """Begin to copy the next chunk to the buffers that are not in use; None after the last."""
        if not self.chunks:
            return None
        chunk = self.chunks.popleft()
        targets = [buffer[: chunk.stop - chunk.start] for buffer in self.buffers[0]]
        self.buffers.rotate(-1)
        return targets, arrive(self.copies, targets, self.arrays, chunk)

    def take(self) -> list[Array]:
        """The next chunk on the device. After this call, nobody may use the chunk before it."""
        assert self.arriving is not None
        targets, tickets = self.arriving
        self.arriving = self.start()
        for ticket in tickets:
            ticket.wait()
        return targets


class Departures:
    """Copies of gradients to the host, through two buffers of `size` bytes on the device."""

    def __init__(self, xp: Any, copies: HostCopies, size: int) -> None:
        self.copies = copies
        self.buffers = deque(xp.empty(size, np.uint8) for _ in range(2 if size else 0))
        self.leaving: deque[Ticket] = deque()

    def wait(self) -> None:
        """Make later work wait for the copies under way: call this before work on the same rows."""
        while self.leaving:
            self.leaving.popleft().wait()

    def leave(self, side: StreamedSide, part: SideRows) -> None:
        """Begin to copy the complete gradient of `part` to the host, rows `part.rows` of `side`.

        The memory of `part` may be used again at once, because a buffer has a copy of the gradient.
        The copy has the destination's dtype if both of these hold: that dtype is smaller, and the
        gradient overwrites the destination (`side.add` is False).
        """
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
