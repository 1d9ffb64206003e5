"""Copies to other GPUs of this host by copy engines, which take no multiprocessors.

Each rank has a mailbox in the memory of its GPU, which all ranks of its host map (CUDA IPC): two
slots for each of the others, and words for numbers. A message goes in pieces. The sender copies a
piece into its slot at the receiver, then writes the piece's number there. The receiver waits for
that number, copies the piece to where it belongs, and writes the number back: the slot is free.

Streams wait for numbers and write them: neither the host nor a kernel takes part. Every rank sends
a piece and receives one in turn. So pieces move on even if all streams of a GPU share one queue.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..communicators.base import Communicator

SLOTS = 2  # for each sender
MAILBOX = 2**25  # bytes of all slots of a rank
LEAST = 2**20  # bytes of a message: of less, NCCL takes about as long
WORD, LINE = 4, 256  # bytes
PATIENCE = 10.0  # seconds that the first copies may take
SWITCH = "INFONCE_COPY_ENGINES"  # of the environment: 0 leaves all transfers to NCCL

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
    """Between this rank and the others of its host. `mailboxes`: where each of these ranks' begins
    in this process; `device` has the operations of streams."""

    def __init__(self, rank: int, mailboxes: dict[int, int], device: Any) -> None:
        self.rank, self.mailboxes, self.device = rank, mailboxes, device
        self.ranks = list(mailboxes)
        self.words = -(-2 * len(self.ranks) * WORD // LINE) * LINE
        self.room = MAILBOX // (SLOTS * (len(self.ranks) - 1)) // LINE * LINE
        self.sent = dict.fromkeys(self.ranks, 0)  # pieces so far
        self.received = dict.fromkeys(self.ranks, 0)

    def reach(self, rank: int) -> bool:
        return rank in self.mailboxes and rank != self.rank

    def run(self, swaps: Sequence[Swap], addresses: Sequence[int], stream: int) -> None:
        """Queue swaps on the stream. `addresses` of each: of the arrays that go, then of those that
        come. All ranks call this with swaps that fit together, in the same order."""
        first = 0
        for swap in swaps:
            middle = first + len(swap.sent)
            last = middle + len(swap.received)
            outgoing, incoming = addresses[first:middle], addresses[middle:last]
            turns = zip_longest(pieces(swap.sent, self.room), pieces(swap.received, self.room))
            for sent, received in turns:
                if sent is not None:
                    self._send(swap.to, sent, outgoing, stream)
                if received is not None:
                    self._receive(swap.source, received, incoming, stream)
            first = last

    def release(self) -> None:
        """End all waits of this rank's streams, after an error: other ranks may never write."""
        self.device.release(self.mailboxes[self.rank], self.words)

    def _send(
        self, to: int, parts: Sequence[tuple[int, int, int, int]], arrays: Sequence[int],
        stream: int,
    ) -> None:  # fmt: skip
        number = self.sent[to] = self.sent[to] + 1
        if number > SLOTS:
            self.device.wait(stream, self._taken(self.rank, to), number - SLOTS)
        slot = self._slot(to, self.rank, number)
        for array, start, size, place in parts:
            self.device.copy(stream, slot + place, arrays[array] + start, size)
        self.device.write(stream, self._arrived(to, self.rank), number)

    def _receive(
        self, source: int, parts: Sequence[tuple[int, int, int, int]], arrays: Sequence[int],
        stream: int,
    ) -> None:  # fmt: skip
        number = self.received[source] = self.received[source] + 1
        self.device.wait(stream, self._arrived(self.rank, source), number)
        slot = self._slot(self.rank, source, number)
        for array, start, size, place in parts:
            self.device.copy(stream, arrays[array] + start, slot + place, size)
        self.device.write(stream, self._taken(source, self.rank), number)

    # -- addresses in the mailbox of `owner`

    def _arrived(self, owner: int, source: int) -> int:
        """The number of the last piece that has come from `source`."""
        return self.mailboxes[owner] + WORD * self.ranks.index(source)

    def _taken(self, owner: int, to: int) -> int:
        """That of the last piece for `to` that has left its slot there."""
        return self.mailboxes[owner] + WORD * (len(self.ranks) + self.ranks.index(to))

    def _slot(self, owner: int, source: int, number: int) -> int:
        place = self.ranks.index(source) - self.ranks.index(owner)
        of_source = (place - 1) % len(self.ranks)
        return self.mailboxes[owner] + self.words + self.room * (SLOTS * of_source + number % SLOTS)


class Device:
    """Operations of streams on the current GPU."""

    def __init__(self) -> None:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        self.waits, self.writes = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self.waits, self.writes):
            function.argtypes = (
                ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
            )  # fmt: skip

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        runtime.memcpyAsync(to, source, size, runtime.memcpyDefault, stream)

    def wait(self, stream: int, at: int, number: int) -> None:
        """Until the word is at least this number."""
        _require(self.waits(stream, at, number, 0), "cuStreamWaitValue32")

    def write(self, stream: int, at: int, number: int) -> None:
        _require(self.writes(stream, at, number, 0), "cuStreamWriteValue32")

    def release(self, at: int, size: int) -> None:
        """Numbers larger than any, on a stream that waits for no other."""
        aside = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(at, 0x7F, size, aside.ptr)
        aside.synchronize()


def _require(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function}: error {status} of CUDA's driver")


def connect(ranks: Communicator) -> Copies | None:
    """The copies between the ranks of each host, tried once; None where a rank cannot make them.
    Collective."""
    hosts = [] if ranks.peers is None else ranks.peers.hosts
    host = next((of for of in hosts if ranks.rank in of), [])
    if all(len(of) < 2 for of in hosts):
        return None
    mailbox, handle = None, b""
    if os.environ.get(SWITCH) != "0":
        try:
            mailbox = _Mailbox()
            handle = mailbox.handle
        except Exception:  # no memory, or none that can be shared
            handle = b""
    handles = ranks.allgather(handle)
    made = None
    if all(handles) and mailbox is not None:
        try:
            mapped = {rank: mailbox.at if rank == ranks.rank else
                      runtime.ipcOpenMemHandle(handles[rank]) for rank in host}  # fmt: skip
            made = Copies(ranks.rank, mapped, Device())
        except Exception:  # a GPU that this process does not see, or that is not linked
            made = None
    works = all(ranks.allgather(made is not None))  # whoever tries waits for the others
    if works and made is not None and len(host) > 1:
        works = _try(made)
    if all(ranks.allgather(works)):
        return made if len(host) > 1 else None
    return None


class _Mailbox:
    """Memory of its own: pools would hand out parts of it to others."""

    def __init__(self) -> None:
        words = 2**16  # more than any host has ranks
        self.at = runtime.malloc(words + MAILBOX)
        runtime.memset(self.at, 0, words + MAILBOX)
        runtime.deviceSynchronize()
        self.handle: bytes = runtime.ipcGetMemHandle(self.at)


def _try(copies: Copies) -> bool:
    """Whether each rank gets what the others send, in time."""
    ranks, stream = copies.ranks, cupy.cuda.Stream(non_blocking=True)
    me, size = ranks.index(copies.rank), LINE
    sent = cupy.full(size, copies.rank % 251, np.uint8)
    received = cupy.full((len(ranks), size), 255, np.uint8)
    sources, swaps, addresses = [], [], []
    for distance in range(1, len(ranks)):
        to, source = (ranks[(me + sign * distance) % len(ranks)] for sign in (1, -1))
        sources.append(source)
        swaps.append(Swap(to, (size,), source, (size,)))
        addresses += [sent.data.ptr, received[distance].data.ptr]
    cupy.cuda.get_current_stream().synchronize()
    try:
        copies.run(swaps, addresses, stream.ptr)
    except RuntimeError:
        copies.release()
        return False
    end = time.monotonic() + PATIENCE
    while not stream.done and time.monotonic() < end:
        time.sleep(1e-3)
    if not stream.done:
        copies.release()
        return False
    want = np.array(sources)[:, None] % 251
    return bool((received[1:].get() == want).all())
