"""Copies to other GPUs of this host by copy engines, which take no multiprocessors.

Each rank has a mailbox in the memory of its GPU, which all ranks of its host map (CUDA IPC): two
slots for each of the others, and words that say whether a slot is full, or still in use. A message
goes in pieces. The sender copies a piece into a slot at the receiver, and says there that it is
full. The receiver copies the piece to where it belongs, and says at the sender that the slot is
free again.

Streams wait for words and write them: neither the host nor a kernel takes part, and all may be
captured in a CUDA graph. Every rank sends a piece and receives one in turn. So pieces move on even
if all streams of a GPU share one queue.

Where a host has two ranks, small arrays are swapped by a kernel of some blocks, which writes to the
other GPU and waits for what comes from it: of a small copy, most of the time is between its steps.

mailboxes.py has the memory and the operations of GPUs.
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
LEAST = 2**20  # bytes of a message between more than two ranks; what is less is left to NCCL
SMALL, MOST = 2**20, 4  # bytes that a kernel swaps, and arrays
BLOCKS = 16  # of swap.cu
WORD, LINE = 4, 256  # bytes
PATIENCE = 10.0  # seconds that the first copies may take, and work that is abandoned
AT_LEAST, EQUAL = 0, 1  # how streams compare words

# (array, first byte, bytes, place in the slot) of each part of a piece
Pieces = list[list[tuple[int, int, int, int]]]


@dataclass(frozen=True)
class Swap:
    """Bytes of the arrays that go to one rank, and of those that come from another."""

    to: int
    sent: tuple[int, ...]
    source: int
    received: tuple[int, ...]


@functools.cache
def pieces(sizes: tuple[int, ...], room: int) -> Pieces:
    """Arrays of these sizes, in slots of `room` bytes: a multiple of `LINE`, as are places."""
    found: Pieces = []
    free = 0
    for array, size in enumerate(sizes):
        first = 0
        while first < size:
            if not free:
                found.append([])
                free = room
            part = min(size - first, free)
            found[-1].append((array, first, part, room - free))
            first += part
            free -= -(-part // LINE) * LINE
    return found


class Copies:
    """Between this rank and the others of its host, of which there are some. `mailboxes`: where
    each of these ranks' begins in this process; `device` has the operations of streams."""

    def __init__(self, rank: int, mailboxes: dict[int, int], device: Any) -> None:
        self.rank, self.mailboxes, self.device = rank, mailboxes, device
        self.ranks = list(mailboxes)
        # of a host with two ranks, the other one
        self.partner = next(r for r in self.ranks if r != rank) if len(self.ranks) == 2 else None
        # of words that say which slots are full, and as many that say which are in use
        self.words = -(-len(self.ranks) * SLOTS * WORD // LINE) * LINE
        self.room = MAILBOX // (SLOTS * (len(self.ranks) - 1)) // LINE * LINE
        # what comes after the slots: two buffers, numbers of what arrives there, and counters
        self.channel = 2 * self.words + self.room * SLOTS * (len(self.ranks) - 1)

    def take(self, rank: int, size: int) -> bool:
        """Whether a message to or from that rank goes by copies."""
        here = rank in self.mailboxes and rank != self.rank
        return here and (size >= LEAST or self.partner is not None)

    def run(self, swaps: Sequence[Swap], addresses: Sequence[int], stream: Any) -> None:
        """Queue swaps on the stream. `addresses` of each: of the arrays that go, then of those that
        come. All ranks call this with swaps that fit together, in the same order."""
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
                # `swap.to` or `swap.source` may be on another host, to which nothing is copied:
                # the partner launches the kernel all the same, for what goes the other way
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
        """End all waits of this rank's streams, until `done`: after an error, other ranks may never
        write."""
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
        """Where the words begin that say what the others have still to take from this rank."""
        return self.mailboxes[self.rank] + self.words

    def _full(self, owner: int, source: int, slot: int) -> int:
        """Whether a slot there holds a piece from `source`."""
        return self.mailboxes[owner] + WORD * (SLOTS * self.ranks.index(source) + slot)

    def _in_use(self, owner: int, to: int, slot: int) -> int:
        """Whether `to` has still to take what this rank has sent to a slot there."""
        return self._full(owner, to, slot) + self.words

    def _slot(self, owner: int, source: int, slot: int) -> int:
        place = self.ranks.index(source) - self.ranks.index(owner)
        source_index = (place - 1) % len(self.ranks)
        return self.mailboxes[owner] + 2 * self.words + self.room * (SLOTS * source_index + slot)


def padded_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes of these arrays in a buffer of swap.cu; of too many arrays, more than it has."""
    return SMALL + 1 if len(sizes) > MOST else sum(-(-size // 16) * 16 for size in sizes)
