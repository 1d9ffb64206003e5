"""The GPUs' side of peers.py: memory that all ranks of a host map, and operations of streams."""

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

SWITCH = "INFONCE_COPY_ENGINES"  # of the environment: 0 leaves all transfers to NCCL
FLUSH = 2**30  # CU_STREAM_WAIT_VALUE_FLUSH of CUDA's driver
LAST_WRITES = 1.0  # seconds that a process waits at its end for what others write to its mailbox


class Device:
    """Operations of CuPy's streams on the current GPU."""

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
        """Until the word is `EQUAL` to this number, or `AT_LEAST` as large."""
        # another GPU writes a piece before it says that the slot is full: what follows here has to
        # see the piece, which a GPU may write after the word
        flush = self.flush if how == AT_LEAST else 0
        _require(self.waits(stream.ptr, at, number, how | flush), "cuStreamWaitValue32")

    def write(self, stream: Any, at: int, number: int) -> None:
        _require(self.writes(stream.ptr, at, number, 0), "cuStreamWriteValue32")

    def swap(
        self, stream: Any, of: Swap, outgoing: Sequence[int], incoming: Sequence[int], other: int,
        own: int,
    ) -> None:  # fmt: skip
        """By swap.cu; `other` and `own` are where the channel begins in both mailboxes."""
        names, room = ("first", "second", "third", "fourth"), peers.SMALL
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
                **sides, "room": room, "counters": own + 2 * room + LINE,
                "other": {"buffers": other, "arrived": other + 2 * room},
                "own": {"buffers": own, "arrived": own + 2 * room},
            })  # fmt: skip

    def fill(self, at: int, byte: int, size: int) -> None:
        """On a stream that waits for no other."""
        aside = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(at, byte, size, aside.ptr)
        aside.synchronize()

    def read(self, at: int, size: int) -> np.ndarray:
        """Bytes, on a stream that waits for no other."""
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
    """This rank's mailbox, and those of the others of its host that it has mapped."""

    def __init__(self) -> None:
        """Memory of its own: pools would hand out parts of it to others."""
        words = 2**16  # bytes, for more ranks than any host has
        size = words + peers.MAILBOX + 2 * peers.SMALL + 2 * LINE
        self.device = cupy.cuda.Device()
        self.mapped: dict[int, int] = {}
        self.own: int | None = runtime.malloc(size)
        try:
            runtime.memset(self.own, 0, size)
            runtime.deviceSynchronize()
            self.handle: bytes = runtime.ipcGetMemHandle(self.own)
        except BaseException:  # memory that cannot be shared
            self.free()
            raise

    def open(self, rank: int, host: Sequence[int], handles: Sequence[bytes]) -> dict[int, int]:
        """Where the mailbox of each rank of the host begins."""
        assert self.own is not None
        for other in host:
            if other != rank:
                self.mapped[other] = runtime.ipcOpenMemHandle(handles[other])
        return {other: self.mapped.get(other, self.own) for other in host}

    def close(self, taken: Callable[[], bool] = lambda: True) -> None:
        """Unmap the others' mailboxes, when they have `taken` what this rank has sent. They say so
        by a last write to its mailbox, which this process must not end before."""
        end = time.monotonic() + LAST_WRITES
        with suppress(runtime.CUDARuntimeError), self.device:
            while not taken() and time.monotonic() < end:
                time.sleep(1e-3)
            while self.mapped:
                runtime.ipcCloseMemHandle(self.mapped.popitem()[1])

    def free(self) -> None:
        """Free this rank's mailbox, when no other rank has mapped it any more: CUDA leaves
        undefined what else happens."""
        if self.own is not None:
            with suppress(runtime.CUDARuntimeError), self.device:
                runtime.free(self.own)
            self.own = None


class HostCopies(Copies):
    """`Copies` of GPUs. Mailboxes are closed with this, or at the end of the process."""

    def __init__(self, rank: int, mailboxes: Mailboxes, addresses: dict[int, int]) -> None:
        device = Device()
        super().__init__(rank, addresses, device)
        self.memory = mailboxes
        at, size = self.in_use, self.words
        self.close = weakref.finalize(
            self, mailboxes.close, lambda: not device.read(at, size).any()
        )


def connect(ranks: Communicator) -> HostCopies | None:
    """The copies between the ranks of each host, tried once; None where a rank cannot make them, or
    is the only one of its host. Collective."""
    hosts = [] if ranks.peers is None else ranks.peers.hosts
    host = next((of for of in hosts if ranks.rank in of), [])
    if all(len(of) < 2 for of in hosts):
        return None
    able, alone = os.environ.get(SWITCH) != "0", len(host) < 2
    mailboxes: Mailboxes | None = None
    if able and not alone:
        try:
            mailboxes = Mailboxes()
        except Exception:  # no memory, or none that can be shared
            able = False
    handles = ranks.allgather((able, b"" if mailboxes is None else mailboxes.handle))
    if not all(able for able, _ in handles):
        if mailboxes is not None:
            mailboxes.free()
        return None
    copies: HostCopies | None = None
    if mailboxes is not None:
        # a GPU may be one that this process does not see, or that is not linked
        with suppress(Exception):
            addresses = mailboxes.open(ranks.rank, host, [handle for _, handle in handles])
            copies = HostCopies(ranks.rank, mailboxes, addresses)
    # whoever tries waits for the others
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
    """Whether each rank gets what the others send, in time."""
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
    with suppress(Exception):  # of a driver that does not capture waits
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
    want, found = np.array(sources)[:, None] % 251, received[:, 1:].get()
    return queued and bool((found[0, :, :LINE] == want).all() and (found[1] == want).all())
