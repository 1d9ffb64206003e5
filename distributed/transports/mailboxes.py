"""Mailboxes of GPUs, for peers.py: memory that all ranks of a node map, and stream operations."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from infonce.kernels.gpu.shard import swap_arrays

from ..communicators.base import Communicator
from . import peers
from .peers import AT_LEAST, BLOCKS, LINE, Copies, Swap

SWITCH = "INFONCE_COPY_ENGINES"  # environment variable; with the value 0, NCCL makes all transfers
FLUSH = 2**30  # CU_STREAM_WAIT_VALUE_FLUSH of CUDA's driver
LAST_WRITES = 1.0  # seconds that a process waits at its end for writes of others to its mailbox


class Device:
    """Operations on streams of the current GPU."""

    def __init__(self) -> None:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        self.waits, self.writes = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self.waits, self.writes):
            function.argtypes = (
                ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint,
            )  # fmt: skip
        can_flush = runtime.deviceGetAttribute(
            runtime.cudaDevAttrCanFlushRemoteWrites, runtime.getDevice()
        )
        self.flush = FLUSH if can_flush else 0

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        runtime.memcpyAsync(to, source, size, runtime.memcpyDefault, stream.ptr)

    def wait(self, stream: Any, at: int, number: int, how: int) -> None:
        """Let the stream wait until the word is `EQUAL` to this number, or `AT_LEAST` as large."""
        # Another GPU writes a piece, and then the word that says that the slot is full. The piece
        # may arrive after the word. A flush makes it visible to later work on this stream
        flush = self.flush if how == AT_LEAST else 0
        _require(self.waits(stream.ptr, at, number, how | flush), "cuStreamWaitValue32")

    def write(self, stream: Any, at: int, number: int) -> None:
        _require(self.writes(stream.ptr, at, number, 0), "cuStreamWriteValue32")

    def swap(
        self, stream: Any, form: Swap, outgoing: Sequence[int], incoming: Sequence[int], other: int,
        own: int,
    ) -> None:  # fmt: skip
        """Queue a swap by ranks/swap.cu. `other` and `own` are the addresses of the channel in the
        mailbox of the other rank and in this rank's mailbox."""
        names, room = ("first", "second", "third", "fourth"), peers.SMALL
        sides = {
            name: {
                **dict.fromkeys(names, 0), **dict(zip(names, arrays, strict=False)),
                **{f"{part}_bytes": 0 for part in names},
                **{f"{part}_bytes": size for part, size in zip(names, sizes, strict=False)},
            }
            for name, arrays, sizes in (
                ("sent", outgoing, form.sent), ("received", incoming, form.received),
            )
        }  # fmt: skip
        with stream:
            swap_arrays(BLOCKS, {
                **sides, "room": room, "counters": own + 2 * room + LINE,
                "other": {"buffers": other, "arrived": other + 2 * room},
                "own": {"buffers": own, "arrived": own + 2 * room},
            })  # fmt: skip

    def fill(self, at: int, byte: int, size: int) -> None:
        """Write bytes, on a stream that waits for no other stream."""
        aside = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(at, byte, size, aside.ptr)
        aside.synchronize()

    def read(self, at: int, size: int) -> np.ndarray:
        """Read bytes, on a stream that waits for no other stream."""
        values, aside = np.empty(size, np.uint8), cupy.cuda.Stream(non_blocking=True)
        runtime.memcpyAsync(
            values.ctypes.data, at, size, runtime.memcpyDeviceToHost, aside.ptr
        )  # fmt: skip
        aside.synchronize()
        return values


def _require(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function}: error {status} of CUDA's driver")


class Mailboxes:
    """This rank's mailbox, and the mailboxes of other ranks of its node that it has mapped."""

    def __init__(self) -> None:
        """Allocate the mailbox apart from memory pools, which would give parts of it to arrays."""
        words = 2**16  # bytes, enough for more ranks than a node has
        size = words + peers.MAILBOX + 2 * peers.SMALL + 2 * LINE
        self.device = cupy.cuda.Device()
        self.mapped: dict[int, int] = {}
        self.own: int | None = runtime.malloc(size)
        try:
            runtime.memset(self.own, 0, size)
            runtime.deviceSynchronize()
            self.handle: bytes = runtime.ipcGetMemHandle(self.own)
        except BaseException:  # for example, memory that cannot be shared
            self.free()
            raise

    def open(self, rank: int, node: Sequence[int], handles: Sequence[bytes]) -> dict[int, int]:
        """Map the mailboxes of the node's ranks, and return their addresses by rank."""
        assert self.own is not None
        for other in node:
            if other != rank:
                self.mapped[other] = runtime.ipcOpenMemHandle(handles[other])
        return {other: self.mapped.get(other, self.own) for other in node}

    def close(self, taken: Callable[[], bool] = lambda: True) -> None:
        """Unmap the mailboxes of other ranks, after these ranks have `taken` all messages.

        They report it by a last write to this rank's mailbox. The process must not end before.
        """
        end = time.monotonic() + LAST_WRITES
        with suppress(runtime.CUDARuntimeError), self.device:
            while not taken() and time.monotonic() < end:
                time.sleep(1e-3)
            while self.mapped:
                runtime.ipcCloseMemHandle(self.mapped.popitem()[1])

    def free(self) -> None:
        """Free this rank's mailbox. All other ranks must have unmapped it: otherwise CUDA's
        behaviour is undefined."""
        if self.own is not None:
            with suppress(runtime.CUDARuntimeError), self.device:
                runtime.free(self.own)
            self.own = None


class HostCopies(Copies):
    """`Copies` between GPUs. Mailboxes are closed with this object, or at the process's end."""

    def __init__(self, rank: int, mailboxes: Mailboxes, addresses: dict[int, int]) -> None:
        device = Device()
        super().__init__(rank, addresses, device)
        self.memory = mailboxes
        at, size = self.in_use, self.words
        self.close = weakref.finalize(
            self, mailboxes.close, lambda: not device.read(at, size).any()
        )


def connect(ranks: Communicator) -> HostCopies | None:
    """Make and try the copies between the ranks of each node. All ranks call this together.

    None if some rank cannot make copies, or if this rank is the only one of its node.
    """
    nodes = [] if ranks.peers is None else ranks.peers.nodes
    node = next((members for members in nodes if ranks.rank in members), [])
    if all(len(members) < 2 for members in nodes):
        return None
    able, alone = os.environ.get(SWITCH) != "0", len(node) < 2
    mailboxes: Mailboxes | None = None
    if able and not alone:
        try:
            mailboxes = Mailboxes()
        except Exception:  # no memory is left, or memory cannot be shared
            able = False
    handles = ranks.allgather((able, b"" if mailboxes is None else mailboxes.handle))
    if not all(able for able, _ in handles):
        if mailboxes is not None:
            mailboxes.free()
        return None
    copies: HostCopies | None = None
    if mailboxes is not None:
        # another rank's GPU may be invisible to this process, or not linked to this GPU
        with suppress(Exception):
            addresses = mailboxes.open(ranks.rank, node, [handle for _, handle in handles])
            copies = HostCopies(ranks.rank, mailboxes, addresses)
    # all ranks try, because each one waits for the others
    works = all(ranks.allgather(alone or copies is not None))
    if works and copies is not None:
        works = _try(copies)
    if all(ranks.allgather(works)):
        return copies
    if copies is not None:
        copies.close()
    elif mailboxes is not None:
        mailboxes.close()
    ranks.allgather(None)  # no rank has mapped the mailbox of another any more
    if mailboxes is not None:
        mailboxes.free()
    return None


def _try(copies: Copies) -> bool:
    """Send a test message to each rank of the node. Returns whether all messages arrive in time."""
    ranks, stream = copies.ranks, cupy.cuda.Stream(non_blocking=True)
    me, size = ranks.index(copies.rank), peers.SMALL + LINE
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
    queued = False
    with suppress(Exception):  # some drivers cannot capture waits
        copies.run(swaps, addresses, stream)
        with stream:
            stream.begin_capture()
            try:
                copies.run(swaps, addresses, stream)
            finally:
                graph = stream.end_capture()
        graph.launch(stream)
        queued = True
    end = time.monotonic() + peers.PATIENCE
    while not stream.done and time.monotonic() < end:
        time.sleep(1e-3)
    if not stream.done:
        copies.release(lambda: stream.done)
        return False
    expected, got = np.array(sources)[:, None] % 251, received[:, 1:].get()
    return queued and bool((got[0, :, :LINE] == expected).all() and (got[1] == expected).all())
