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
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from infonce.kernels.gpu.shard import swap_arrays

from ..communicators.base import Communicator

SLOTS = 2  # for each sender
MAILBOX = 2**25  # bytes of all slots of a rank
LEAST = 2**20  # bytes of a message between more than two ranks; what is less is left to NCCL
SMALL, MOST = 2**20, 4  # bytes that a kernel swaps, and arrays
BLOCKS = 16  # of swap.cu
WORD, LINE = 4, 256  # bytes
PATIENCE = 10.0  # seconds that the first copies may take, and work that is abandoned
AT_LEAST, EQUAL = 0, 1  # how streams compare words
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
        # of words that say which slots are full, and as many that say which are in use
        self.words = -(-len(self.ranks) * SLOTS * WORD // LINE) * LINE
        self.room = MAILBOX // (SLOTS * (len(self.ranks) - 1)) // LINE * LINE
        # what comes after the slots: two buffers, numbers of what arrives there, and counters
        self.channel = 2 * self.words + self.room * SLOTS * (len(self.ranks) - 1)

    def take(self, rank: int, size: int) -> bool:
        """Whether a message to or from that rank goes by copies."""
        here = rank in self.mailboxes and rank != self.rank
        return here and (size >= LEAST or len(self.ranks) == 2)

    def run(self, swaps: Sequence[Swap], addresses: Sequence[int], stream: Any) -> None:
        """Queue swaps on the stream. `addresses` of each: of the arrays that go, then of those that
        come. All ranks call this with swaps that fit together, in the same order."""
        first = 0
        for swap in swaps:
            middle = first + len(swap.sent)
            last = middle + len(swap.received)
            outgoing, incoming = addresses[first:middle], addresses[middle:last]
            first = last
            if len(self.ranks) == 2 and max(map(_little, (swap.sent, swap.received))) <= SMALL:
                sides = (self.mailboxes[rank] + self.channel for rank in (swap.to, self.rank))
                self.device.swap(stream, swap, outgoing, incoming, *sides)
                continue
            turns = zip_longest(pieces(swap.sent, self.room), pieces(swap.received, self.room))
            for turn, (sent, received) in enumerate(turns):
                if sent is not None:
                    self._send(swap.to, turn % SLOTS, sent, outgoing, stream)
                if received is not None:
                    self._receive(swap.source, turn % SLOTS, received, incoming, stream)

    def release(self, done: Callable[[], bool]) -> None:
        """End all waits of this rank's streams, until `done`: after an error, other ranks may never
        write."""
        mine, end = self.mailboxes[self.rank], time.monotonic() + PATIENCE
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

    def _full(self, owner: int, source: int, slot: int) -> int:
        """Whether a slot there holds a piece from `source`."""
        return self.mailboxes[owner] + WORD * (SLOTS * self.ranks.index(source) + slot)

    def _in_use(self, owner: int, to: int, slot: int) -> int:
        """Whether `to` has still to take what this rank has sent to a slot there."""
        return self._full(owner, to, slot) + self.words

    def _slot(self, owner: int, source: int, slot: int) -> int:
        place = self.ranks.index(source) - self.ranks.index(owner)
        of_source = (place - 1) % len(self.ranks)
        return self.mailboxes[owner] + 2 * self.words + self.room * (SLOTS * of_source + slot)


def _little(sizes: tuple[int, ...]) -> int:
    """Bytes of these arrays in a buffer of swap.cu; of too many, too many."""
    return SMALL + 1 if len(sizes) > MOST else sum(-(-size // 16) * 16 for size in sizes)


class Device:
    """Operations of CuPy's streams on the current GPU."""

    def __init__(self) -> None:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        self.waits, self.writes = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self.waits, self.writes):
            function.argtypes = (
                ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
            )  # fmt: skip

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        runtime.memcpyAsync(to, source, size, runtime.memcpyDefault, stream.ptr)

    def wait(self, stream: Any, at: int, number: int, how: int) -> None:
        """Until the word is `EQUAL` to this number, or `AT_LEAST` as large."""
        _require(self.waits(stream.ptr, at, number, how), "cuStreamWaitValue32")

    def write(self, stream: Any, at: int, number: int) -> None:
        _require(self.writes(stream.ptr, at, number, 0), "cuStreamWriteValue32")

    def swap(
        self, stream: Any, of: Swap, outgoing: Sequence[int], incoming: Sequence[int], other: int,
        mine: int,
    ) -> None:  # fmt: skip
        """By swap.cu; `other` and `mine` are where the channel begins in both mailboxes."""
        names = "first", "second", "third", "fourth"
        sides = {
            name: {
                **dict.fromkeys(names, 0), **dict(zip(names, arrays, strict=False)),
                **{f"{part}_bytes": 0 for part in names},
                **{f"{part}_bytes": size for part, size in zip(names, sizes, strict=False)},
            }
            for name, arrays, sizes in (
                ("sent", outgoing, of.sent), ("received", incoming, of.received),
            )
        }  # fmt: skip
        with stream:
            swap_arrays(BLOCKS, {
                **sides, "room": SMALL, "counters": mine + 2 * SMALL + LINE,
                "other": {"buffers": other, "arrived": other + 2 * SMALL},
                "mine": {"buffers": mine, "arrived": mine + 2 * SMALL},
            })  # fmt: skip

    def fill(self, at: int, byte: int, size: int) -> None:
        """On a stream that waits for no other."""
        aside = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(at, byte, size, aside.ptr)
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
    if mailbox is None or not all(handles):
        if mailbox is not None:
            runtime.free(mailbox.at)
        return None
    made = None
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
        size = 2**16 + MAILBOX + 2 * SMALL + 2 * LINE  # words of more ranks than any host has
        self.at = runtime.malloc(size)
        runtime.memset(self.at, 0, size)
        runtime.deviceSynchronize()
        self.handle: bytes = runtime.ipcGetMemHandle(self.at)


def _try(copies: Copies) -> bool:
    """Whether each rank gets what the others send, in time."""
    ranks, stream = copies.ranks, cupy.cuda.Stream(non_blocking=True)
    me, size = ranks.index(copies.rank), SMALL + LINE
    sent = cupy.full(size, copies.rank % 251, np.uint8)
    received = cupy.full((2, len(ranks), size), 255, np.uint8)
    sources, swaps, addresses = [], [], []
    for distance in range(1, len(ranks)):
        to, source = (ranks[(me + sign * distance) % len(ranks)] for sign in (1, -1))
        sources.append(source)
        for way, part in enumerate((LINE, size)):
            swaps.append(Swap(to, (part,), source, (part,)))
            addresses += [sent.data.ptr, received[way, distance].data.ptr]
    cupy.cuda.get_current_stream().synchronize()
    try:
        copies.run(swaps, addresses, stream)
        with stream:
            stream.begin_capture()
            try:
                copies.run(swaps, addresses, stream)
            finally:
                graph = stream.end_capture()
        graph.launch(stream)
    except Exception:  # a driver that does not capture waits
        return False
    end = time.monotonic() + PATIENCE
    while not stream.done and time.monotonic() < end:
        time.sleep(1e-3)
    if not stream.done:
        copies.release(lambda: stream.done)
        return False
    want, found = np.array(sources)[:, None] % 251, received[:, 1:].get()
    return bool((found[0, :, :LINE] == want).all() and (found[1] == want).all())
