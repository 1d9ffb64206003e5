"""The transport of NCCL. Copy engines carry large arrays between GPUs of a node (peers.py)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy
from infonce.kernels.gpu.device.launches import Queue

from ..communicators.base import Array, Communicator, Pending, Shifts
from . import gpu, mailboxes, peers
from .base import Queued

Message = tuple[int, int]  # bytes, the other rank
Link = tuple[int, bool, bool]  # distance (0: all ranks), whether it sends, whether it receives
BYTES = 1  # NCCL's number for 8-bit unsigned integers: arrays of any dtype are sent as bytes
LITTLE = 2**23  # bytes; NCCL transfers them in about the time that the host takes to launch it
COPIES_ALONE = 0.5  # seconds for copies to end, before NCCL is aborted


@functools.cache
def missing() -> str | None:
    """The reason why NCCL cannot be used; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
        from cupy.cuda import nccl
    if not nccl.available:
        return "CuPy finds no NCCL (pip install 'infonce-kernels[cuda13]' or '[cuda12]')"
    return None


class NCCL(gpu.OnDevice):
    """Sends and receives of NCCL. Copy engines carry large arrays between GPUs of a node."""

    name = "nccl"
    copies: mailboxes.HostCopies | None = None

    def __init__(self, ranks: Communicator) -> None:
        super().__init__(ranks)
        from cupy.cuda import nccl

        self.nccl = nccl
        identity = nccl.get_unique_id() if ranks.rank == 0 else None
        identity = ranks.allgather(identity)[0]
        self.device = cupy.cuda.Device()
        self.linked: set[Link] = set()  # links that NCCL has connected in earlier exchanges
        self.communicator = self._bounded(
            lambda: nccl.NcclCommunicator(ranks.size, identity, ranks.rank)
        )
        self.copies = mailboxes.connect(ranks)

    def _bounded(self, function: Callable[[], Any]) -> Any:
        """Run a function of NCCL that waits for other ranks, within the timeout."""

        def on_device() -> Any:
            with self.device:
                return function()

        return self.ranks.bounded(on_device, "NCCL")

    def exchange(self, shifts: Shifts) -> Pending:
        return _Queued(self, Queue()).exchange(shifts)

    def allgather(self, numbers: Sequence[Array]) -> Array:
        return _Queued(self, Queue()).allgather(numbers)

    def queued(self, queue: Queue) -> Queued:
        return _Queued(self, queue, late=self.ranks.size == 2)

    @property
    def all_copied(self) -> bool:
        """Whether copies (peers.py) carry all arrays, so that exchanges make no call of NCCL."""
        return self.copies is not None and len(self.copies.ranks) == self.ranks.size == 2

    def mark(self, stream: int) -> None:
        """Let the next `transfer` start after the work that is now queued on the stream."""
        cupy.cuda.runtime.eventRecord(self.ready.ptr, stream)

    def transfer(self, form: _Form | _AllGather, stream: int, *addresses: int) -> None:
        """Queue an exchange of this form, which starts after the last `mark`."""
        runtime, mine = cupy.cuda.runtime, self.stream.ptr
        runtime.streamWaitEvent(mine, self.ready.ptr)
        began = self.timer(self.stream)
        if form.links <= self.linked:
            form.launch(self, addresses)
        else:  # NCCL connects ranks in their first transfer, and waits for them
            self._bounded(lambda: form.launch(self, addresses))
            self.linked |= form.links
        if began is None:
            runtime.eventRecord(self.done.ptr, mine)
        else:
            self.timed.append((began, self.timer(self.stream)))

    def join(self, stream: int) -> None:
        """Let later work on the stream start after the exchanges."""
        runtime = cupy.cuda.runtime
        if self.timers is None or not self.timed:
            runtime.streamWaitEvent(stream, self.done.ptr)
            return
        began, ended = self.timed.pop(0)
        current = cupy.cuda.get_current_stream()
        before = self.timer(current)
        runtime.streamWaitEvent(stream, ended.ptr)
        self.timers.append((began, ended, before, self.timer(current)))

    def close(self) -> None:
        self.ranks.__dict__.pop("gpu_transports", None)
        try:
            # The abort comes later. It holds the interpreter's lock, and may wait for the device,
            # whose streams may wait for other ranks
            self._release(COPIES_ALONE)
        finally:
            try:
                self.communicator.abort()
            finally:
                self._release(peers.PATIENCE)  # copies may have waited for transfers of NCCL
                self.plans.clear()  # last, because freeing a graph may wait for its launches

    def _release(self, patience: float) -> None:
        """End all waits for other ranks in the work that is now queued."""
        if self.copies is None:
            return
        with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the call may end by such an error
            left = [stream.record() for stream in (self.work, self.stream)]
            self.copies.release(lambda: all(event.done for event in left), patience)

    def free(self) -> None:
        self.plans.clear()
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.close()
        self.ranks.allgather(None)  # no rank has mapped the mailbox of another any more
        if copies is not None:
            copies.memory.free()
        self.communicator.destroy()


@dataclass(frozen=True)
class _Form:
    """The form of an exchange: sizes and ranks, without the addresses of arrays."""

    sends: list[Message]
    receives: list[Message]
    links: set[Link]
    copies: list[peers.Swap]

    def launch(self, nccl: NCCL, addresses: Sequence[int]) -> None:
        """Queue the copies, then one operation of NCCL with all other transfers."""
        send, receive = nccl.communicator.send, nccl.communicator.recv
        stream, sends = nccl.stream.ptr, len(self.sends)
        if self.copies:
            assert nccl.copies is not None
            nccl_count = sends + len(self.receives)
            nccl.copies.run(self.copies, addresses[nccl_count:], nccl.stream)
            addresses = addresses[:nccl_count]
        if not self.links:
            return
        nccl.nccl.groupStart()
        for at, (size, rank) in zip(addresses[:sends], self.sends, strict=True):
            send(at, size, BYTES, rank, stream)
        for at, (size, rank) in zip(addresses[sends:], self.receives, strict=True):
            receive(at, size, BYTES, rank, stream)
        nccl.nccl.groupEnd()


@dataclass(frozen=True)
class _AllGather:
    """The form of an exchange in which each rank sends the same number of bytes to all ranks."""

    size: int  # bytes that one rank sends
    links: frozenset[Link] = frozenset({(0, True, True)})

    def launch(self, nccl: NCCL, addresses: Sequence[int]) -> None:
        nccl.communicator.allGather(*addresses, self.size, BYTES, nccl.stream.ptr)


class _Queued:
    """Exchanges through a queue, which runs them or records them for a plan.

    `late`: an exchange of at most `LITTLE` bytes by NCCL, or by copy engines, is launched when the
    caller waits for it. The block that hides the exchange is launched before, so that it does not
    wait for the launch of the exchange, and gets multiprocessors first.
    """

    def __init__(self, transport: NCCL, queue: Queue, late: bool = False) -> None:
        self.transport, self.queue, self.late = transport, queue, late
        capturable = transport.all_copied and not transport.measured
        self.do = partial(queue.do, capturable=capturable)

    def exchange(self, shifts: Shifts) -> Pending:
        ranks = self.transport.ranks
        form = _Form([], [], set(), [])
        sent: list[Array] = []
        received: list[Array] = []
        copied: list[Array] = []
        for distance, (send, receive) in shifts.items():
            to, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
            send, to_copy = self._routed(to, send)
            receive, to_be_copied = self._routed(source, receive)
            form.sends.extend((array.nbytes, to) for array in send)
            form.receives.extend((array.nbytes, source) for array in receive)
            if send or receive:
                form.links.add((distance, bool(send), bool(receive)))
            if to_copy or to_be_copied:
                sizes = (tuple(a.nbytes for a in arrays) for arrays in (to_copy, to_be_copied))
                form.copies.append(peers.Swap(to, next(sizes), source, next(sizes)))
            sent += send
            received += receive
            copied += [*to_copy, *to_be_copied]
        self.do(self.transport.mark)
        transfer = partial(self.transport.transfer, form)
        addresses = [array.data.ptr for array in (*sent, *received, *copied)]
        launch = partial(self.do, transfer, *addresses)
        if self.late and sum(size for size, _ in form.receives) <= LITTLE:
            return _Late(self, launch)
        launch()
        return self

    def _routed(self, rank: int, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Arrays for NCCL, and arrays for copies. One of the two lists is empty.

        Ranks of one node exchange messages of at least 1 MiB by copies, and messages of any size if
        the node has two ranks (`Copies.take`).
        """
        arrays, copies = [array for array in arrays if array.nbytes], self.transport.copies
        if copies is not None and copies.take(rank, sum(array.nbytes for array in arrays)):
            return [], arrays
        return arrays, []

    def wait(self) -> None:
        self.do(self.transport.join)

    def allgather(self, numbers: Sequence[Array]) -> Array:
        ranks, k = self.transport.ranks, len(numbers)
        rank_vectors = cupy.empty((ranks.size, k))
        mine = rank_vectors[ranks.rank]
        for i, number in enumerate(numbers):
            self.queue.copy(mine[i:].data, number.data, number.nbytes)
        if self.transport.all_copied:
            self.exchange({1: ([mine], [rank_vectors[1 - ranks.rank]])}).wait()
            return rank_vectors
        self.do(self.transport.mark)
        transfer = partial(self.transport.transfer, _AllGather(mine.nbytes))
        self.do(transfer, mine.data.ptr, rank_vectors.data.ptr)
        self.wait()
        return rank_vectors


class _Late:
    """An exchange that is launched when the caller waits for it."""

    def __init__(self, queued: _Queued, launch: Callable[[], None]) -> None:
        self.queued, self.launch = queued, launch

    def wait(self) -> None:
        self.launch()
        self.queued.wait()
