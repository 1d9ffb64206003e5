"""Mailboxes of GPUs, for peers.py: memory that all ranks of a node map, and stream operations.

`connect` makes and tries the copies of a communicator; nccl.py calls it.
"""

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
from .peers import AT_LEAST, LINE_BYTES, MOST_SWAP_BYTES, SWAP_BLOCKS, Copies, Swap

SWITCH = "INFONCE_COPY_ENGINES"  # environment variable; with the value 0, NCCL makes all transfers
FLUSH = 2**30  # CU_STREAM_WAIT_VALUE_FLUSH of CUDA's driver
LAST_WRITES = 1.0  # seconds that a process waits at its end for writes of others to its mailbox
MOST_WORD_BYTES = 2**16  # of all words of a mailbox: enough for more ranks than a node has


class StreamOperations:
    """Operations on streams of the current GPU. Addresses and sizes are in bytes."""

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
        """Let the stream wait for the word at an address. `how` is `EQUAL` (until the word equals
        `number`) or `AT_LEAST` (until the word is `number` or more)."""
        # Another GPU writes a piece, and then the word that says that the slot is full. The piece
        # may arrive after the word. A flush makes the piece visible to later work on this stream
        flush = self.flush if how == AT_LEAST else 0
        _require_success(self.waits(stream.ptr, at, number, how | flush), "cuStreamWaitValue32")

    def write(self, stream: Any, at: int, number: int) -> None:
        """Let the stream write a number to the word at an address."""
        _require_success(self.writes(stream.ptr, at, number, 0), "cuStreamWriteValue32")

    def swap(
        self, stream: Any, swap: Swap, outgoing: Sequence[int], incoming: Sequence[int], other: int,
        own: int,
    ) -> None:  # fmt: skip
        """Queue a swap by ranks/swap.cu.

        `outgoing` and `incoming` are the addresses of the arrays. `other` and `own` are the
        addresses of the channel (see `Copies`) in the other rank's mailbox and in this rank's.
        """
        names, room = ("first", "second", "third", "fourth"), peers.MOST_SWAP_BYTES
        sides = {
            name: {
                **dict.fromkeys(names, 0), **dict(zip(names, arrays, strict=False)),
                **{f"{part}_bytes": 0 for part in names},
                **{f"{part}_bytes": size for part, size in zip(names, sizes, strict=False)},
            }
            for name, arrays, sizes in (
                ("sent", outgoing, swap.sent), ("received", incoming, swap.received),
            )
        }  # fmt: skip
        with stream:
            swap_arrays(SWAP_BLOCKS, {
                **sides, "room": room, "counters": own + 2 * room + LINE_BYTES,
                "other": {"buffers": other, "arrived": other + 2 * room},
                "own": {"buffers": own, "arrived": own + 2 * room},
            })  # fmt: skip

    def fill(self, at: int, byte: int, size: int) -> None:
        """Set `size` bytes to `byte` now, on a stream that waits for no other stream."""
        own_stream = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(at, byte, size, own_stream.ptr)
        own_stream.synchronize()

    def read(self, at: int, size: int) -> np.ndarray:
        """Read `size` bytes now, on a stream that waits for no other stream."""
        values, own_stream = np.empty(size, np.uint8), cupy.cuda.Stream(non_blocking=True)
        runtime.memcpyAsync(
            values.ctypes.data, at, size, runtime.memcpyDeviceToHost, own_stream.ptr
        )  # fmt: skip
        own_stream.synchronize()
        return values


def _require_success(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function}: error {status} of CUDA's driver")


class Mailboxes:
    """This rank's mailbox, and the mailboxes of other ranks of its node that it has mapped."""

    def __init__(self) -> None:
        """Allocate this rank's mailbox, and clear it.

        The memory is not from a pool of CuPy: other processes map it, so it must not be reused.
        """
        size = MOST_WORD_BYTES + peers.SLOTS_BYTES + 2 * peers.MOST_SWAP_BYTES + 2 * LINE_BYTES
        self.device = cupy.cuda.Device()
        self.mapped: dict[int, int] = {}  # rank -> address of its mailbox in this process
        self.own: int | None = runtime.malloc(size)  # address; None after `free`
        try:
            runtime.memset(self.own, 0, size)
            runtime.deviceSynchronize()
            self.handle: bytes = runtime.ipcGetMemHandle(self.own)
        except BaseException:  # for example, memory that cannot be shared
            self.free()
            raise

    def open(
        self, rank: int, node_ranks: Sequence[int], handles: Sequence[bytes]
    ) -> dict[int, int]:
        """Map the mailboxes of the node's ranks, and return their addresses by rank.

        `rank` is this rank. `handles` are the handles of the mailboxes of all ranks.
        """
        assert self.own is not None
        for other in node_ranks:
            if other != rank:
                self.mapped[other] = runtime.ipcOpenMemHandle(handles[other])
        return {other: self.mapped.get(other, self.own) for other in node_ranks}

    def close(self, are_taken: Callable[[], bool] = lambda: True) -> None:
        """Unmap the mailboxes of other ranks, after these ranks have taken all messages.

        A rank that takes a message of this rank writes to this rank's mailbox, so this process must
        not end before. `are_taken` tells whether all messages of this rank are taken. The wait ends
        after LAST_WRITES seconds.
        """
        end = time.monotonic() + LAST_WRITES
        with suppress(runtime.CUDARuntimeError), self.device:
            while not are_taken() and time.monotonic() < end:
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


class NodeCopies(Copies):
    """`Copies` between GPUs, with the memory of the mailboxes.

    Mailboxes are closed with this object, or at the end of the process.
    """

    def __init__(self, rank: int, mailboxes: Mailboxes, addresses: dict[int, int]) -> None:
        device = StreamOperations()
        super().__init__(rank, addresses, device)
        self.mailbox_memory = mailboxes
        at, size = self.in_use, self.word_bytes
        # all messages are taken if no word "in use" is set
        self.close = weakref.finalize(
            self, mailboxes.close, lambda: not device.read(at, size).any()
        )


def connect(ranks: Communicator) -> NodeCopies | None:
    """Make and try the copies between the ranks of each node. All ranks call this together.

    None if some rank of any node cannot make copies, or if this rank is the only one of its node:
    then NCCL makes all transfers of this rank.
    """
    nodes = [] if ranks.peers is None else ranks.peers.nodes
    node_ranks = next((members for members in nodes if ranks.rank in members), [])
    if all(len(members) < 2 for members in nodes):
        return None

    # allocate a mailbox on each rank
    able, alone = os.environ.get(SWITCH) != "0", len(node_ranks) < 2
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

    # map the mailboxes of the node's ranks
    copies: NodeCopies | None = None
    if mailboxes is not None:
        # another rank's GPU may be invisible to this process, or not linked to this GPU
        with suppress(Exception):
            addresses = mailboxes.open(ranks.rank, node_ranks, [handle for _, handle in handles])
            copies = NodeCopies(ranks.rank, mailboxes, addresses)

    # Try the copies only if all ranks have copies, because each rank waits for the others
    works = all(ranks.allgather(alone or copies is not None))
    if works and copies is not None:
        works = _try_copies(copies)
    if all(ranks.allgather(works)):
        return copies

    # a rank cannot copy: free all mailboxes
    if copies is not None:
        copies.close()
    elif mailboxes is not None:
        mailboxes.close()
    ranks.allgather(None)  # after this, no rank maps the mailbox of another rank
    if mailboxes is not None:
        mailboxes.free()
    return None


def _try_copies(copies: Copies) -> bool:
    """Send two test messages to each rank of the node: a small one, which a kernel swaps between
    two ranks, and a large one, which copy engines carry. Returns whether all arrive in time.

    The messages are sent by launches and again by a CUDA graph.
    """
    ranks, stream = copies.ranks, cupy.cuda.Stream(non_blocking=True)
    own_index, small, large = ranks.index(copies.rank), LINE_BYTES, MOST_SWAP_BYTES + LINE_BYTES
    sent = cupy.full(large, copies.rank % 251, np.uint8)  # each byte stands for the sender
    received = cupy.full((2, len(ranks), large), 255, np.uint8)  # no sender has the byte 255
    sources, swaps, addresses = [], [], []
    for distance in range(1, len(ranks)):
        to, source = (ranks[(own_index + sign * distance) % len(ranks)] for sign in (1, -1))
        sources.append(source)
        for message, size in enumerate((small, large)):
            swaps.append(Swap(to, (size,), source, (size,)))
            addresses += [sent.data.ptr, received[message, distance].data.ptr]
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
    return queued and bool((got[0, :, :small] == expected).all() and (got[1] == expected).all())
