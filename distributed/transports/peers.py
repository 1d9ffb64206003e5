"""Copies to other GPUs of this node by copy engines, which take no multiprocessors.

Each rank has a mailbox in the memory of its GPU, which all ranks of its node map (CUDA IPC). A
mailbox has two slots for each other rank, and words that say whether a slot is full or in use. A
message travels in pieces. The sender copies a piece to a slot of the receiver's mailbox, and writes
the word "full" there. The receiver copies the piece to its array, and writes to the sender's
mailbox that the slot is free again.

Streams wait for words and write them. Neither the host nor a kernel takes part, and a CUDA graph
may capture all steps. Each rank sends one piece and receives one piece in turns, so pieces advance
even if all streams of a GPU share one queue.

If a node has two ranks, a kernel swaps small arrays, because a small copy spends most of its time
between its steps. The kernel writes to the other GPU, and waits for the arrays of the other GPU.

mailboxes.py has the memory of GPUs and the operations on their streams.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

SLOTS = 2  # for each sender
MAILBOX = 2**25  # bytes of all slots of a rank
LEAST = 2**20  # bytes; with more than two ranks, NCCL sends smaller messages
SMALL, MOST = 2**20, 4  # a kernel swaps at most so many bytes, and at most so many arrays
BLOCKS = 16  # thread blocks of swap.cu
WORD, LINE = 4, 256  # bytes of a word, and of an aligned line
PATIENCE = 10.0  # seconds to wait for the first copies, and for abandoned work
AT_LEAST, EQUAL = 0, 1  # how streams compare words

# (array, first byte, bytes, place in the slot) of each part of a piece
Pieces = list[list[tuple[int, int, int, int]]]


@dataclass(frozen=True)
class Swap:
    """Bytes of the arrays that are sent to rank `to`, and of those received from rank `source`."""

    to: int
    sent: tuple[int, ...]
    source: int
    received: tuple[int, ...]


@functools.cache
def pieces(sizes: tuple[int, ...], room: int) -> Pieces:
    """Divide arrays of these sizes into pieces for slots of `room` bytes.

    `room` and the places in a slot are multiples of `LINE`.
    """
    result: Pieces = []
    free = 0
    for array, size in enumerate(sizes):
        first = 0
        while first < size:
            if not free:
                result.append([])
                free = room
            part = min(size - first, free)
            result[-1].append((array, first, part, room - free))
            first += part
            free -= -(-part // LINE) * LINE
    return result


class Copies:
    """Copies between this rank and the other ranks of its node.

    `mailboxes` has the address of each rank's mailbox in this process. `device` has the operations
    on streams.
    """

    def __init__(self, rank: int, mailboxes: dict[int, int], device: Any) -> None:
        self.rank, self.mailboxes, self.device = rank, mailboxes, device
        self.ranks = list(mailboxes)
        # the other rank, if the node has two ranks
        self.partner = next(r for r in self.ranks if r != rank) if len(self.ranks) == 2 else None
        # bytes of the words that say which slots are full; as many say which slots are in use
        self.words = -(-len(self.ranks) * SLOTS * WORD // LINE) * LINE
        self.room = MAILBOX // (SLOTS * (len(self.ranks) - 1)) // LINE * LINE
        # offset of the memory after the slots: two buffers, counts of arrivals there, and counters
        self.channel = 2 * self.words + self.room * SLOTS * (len(self.ranks) - 1)

    def take(self, rank: int, size: int) -> bool:
        """Whether a message to or from that rank goes by copies."""
        here = rank in self.mailboxes and rank != self.rank
        return here and (size >= LEAST or self.partner is not None)

    def run(self, swaps: Sequence[Swap], addresses: Sequence[int], stream: Any) -> None:
        """Queue swaps on the stream.

        `addresses` has, for each swap, the addresses of sent arrays and then of received arrays.
        All ranks call this with matching swaps in the same order.
        """
        first = 0
        for swap in swaps:
            middle = first + len(swap.sent)
            last = middle + len(swap.received)
            outgoing, incoming = addresses[first:middle], addresses[middle:last]
            first = last
            if (
                self.partner is not None
                and max(map(padded_bytes, (swap.sent, swap.received))) <= SMALL
            ):
                # `swap.to` or `swap.source` may be on another node. Nothing is copied to it, but
                # both partners launch the kernel, for the arrays that go the other way
                sides = (self.mailboxes[r] + self.channel for r in (self.partner, self.rank))
                self.device.swap(stream, swap, outgoing, incoming, *sides)
                continue
            turns = zip_longest(pieces(swap.sent, self.room), pieces(swap.received, self.room))
            for turn, (sent, received) in enumerate(turns):
                if sent is not None:
                    self._send(swap.to, turn % SLOTS, sent, outgoing, stream)
                if received is not None:
                    self._receive(swap.source, turn % SLOTS, received, incoming, stream)

    def release(self, done: Callable[[], bool], patience: float = PATIENCE) -> None:
        """End all waits of this rank's streams, until `done()` is true. After an error, other ranks
        may never write the words."""
        mine, end = self.mailboxes[self.rank], time.monotonic() + patience
        while not done() and time.monotonic() < end:
            self.device.fill(mine, 1, self.words)
            self.device.fill(mine + self.words, 0, self.words)
            self.device.fill(mine + self.channel + 2 * SMALL, 0x7F, BLOCKS * WORD)
            time.sleep(1e-3)

    def _send(
        self, to: int, slot: int, parts: Sequence[tuple[int, int, int, int]],
        arrays: Sequence[int], stream: Any,
    ) -> None:  # fmt: skip
        device, in_use = self.device, self._in_use(self.rank, to, slot)
        device.wait(stream, in_use, 0, EQUAL)
        device.write(stream, in_use, 1)
        at = self._slot(to, self.rank, slot)
        for array, start, size, place in parts:
            device.copy(stream, at + place, arrays[array] + start, size)
        device.write(stream, self._full(to, self.rank, slot), 1)

    def _receive(
        self, source: int, slot: int, parts: Sequence[tuple[int, int, int, int]],
        arrays: Sequence[int], stream: Any,
    ) -> None:  # fmt: skip
        device, full = self.device, self._full(self.rank, source, slot)
        device.wait(stream, full, 1, AT_LEAST)
        at = self._slot(self.rank, source, slot)
        for array, start, size, place in parts:
            device.copy(stream, arrays[array] + start, at + place, size)
        device.write(stream, full, 0)
        device.write(stream, self._in_use(source, self.rank, slot), 0)

    # -- addresses in the mailbox of `owner`

    @property
    def in_use(self) -> int:
        """Address of the words that say which pieces of this rank the others have not taken yet."""
        return self.mailboxes[self.rank] + self.words

    def _full(self, owner: int, source: int, slot: int) -> int:
        """Address of the word that says whether a slot holds a piece from `source`."""
        return self.mailboxes[owner] + WORD * (SLOTS * self.ranks.index(source) + slot)

    def _in_use(self, owner: int, to: int, slot: int) -> int:
        """Address of the word that says whether `to` has not taken the owner's piece in a slot."""
        return self._full(owner, to, slot) + self.words

    def _slot(self, owner: int, source: int, slot: int) -> int:
        place = self.ranks.index(source) - self.ranks.index(owner)
        source_index = (place - 1) % len(self.ranks)
        return self.mailboxes[owner] + 2 * self.words + self.room * (SLOTS * source_index + slot)


def padded_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes that these arrays take in a buffer of swap.cu; more than it has for too many arrays."""
    return SMALL + 1 if len(sizes) > MOST else sum(-(-size // 16) * 16 for size in sizes)
