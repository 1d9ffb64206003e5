"""The transport of NCCL, in which copies carry many messages between GPUs of a node (peers.py)."""

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

Message = tuple[int, int]  # (bytes, the other rank)
# (distance, whether this rank sends, whether it receives); distance 0: an all-gather of all ranks
Link = tuple[int, bool, bool]
NCCL_UINT8 = 1  # NCCL's number for 8-bit unsigned integers: arrays of any dtype are sent as bytes
# Between two ranks, an exchange of at most this number of bytes by NCCL is launched after the
# block that hides the exchange: NCCL transfers so few bytes in about the time that the host takes
# to launch NCCL
LATE_BYTES = 2**23  # 8 MiB
COPIES_PATIENCE = 0.5  # seconds for copies to end after an error, before NCCL is aborted


@functools.cache
def why_unavailable() -> str | None:
    """The reason why NCCL cannot be used; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
        from cupy.cuda import nccl
    if not nccl.available:
        return "CuPy finds no NCCL (pip install 'infonce-kernels[cuda13]' or '[cuda12]')"
    return None


class NCCL(gpu.OnDevice):
    """Sends and receives of NCCL, and copies of the messages that `Copies.take` accepts."""

    name = "nccl"
    # copies by copy engines or by the kernel swap.cu; None: NCCL sends all messages
    copies: mailboxes.NodeCopies | None = None

    def __init__(self, ranks: Communicator) -> None:
        super().__init__(ranks)
        from cupy.cuda import nccl

        self.nccl = nccl
        unique_id = nccl.get_unique_id() if ranks.rank == 0 else None
        unique_id = ranks.allgather(unique_id)[0]
        self.device = cupy.cuda.Device()
        self.linked: set[Link] = set()  # links that NCCL has connected in earlier exchanges
        self.communicator = self._run_bounded(
            lambda: nccl.NcclCommunicator(ranks.size, unique_id, ranks.rank)
        )
        self.copies = mailboxes.connect(ranks)

    def _run_bounded(self, function: Callable[[], Any]) -> Any:
        """The result of a function of NCCL that waits for other ranks, within the timeout.

        The function runs in another thread: see `Communicator.bounded`.
        """

        def on_device() -> Any:
            with self.device:
                return function()

        return self.ranks.bounded(on_device, "NCCL")

    def exchange(self, shifts: Shifts) -> Pending:
        return _QueuedNCCL(self, Queue()).exchange(shifts)

    def allgather(self, numbers: Sequence[Array]) -> Array:
        return _QueuedNCCL(self, Queue()).allgather(numbers)

    def queued(self, queue: Queue) -> Queued:
        # a late launch was measured to save time between two ranks
        return _QueuedNCCL(self, queue, may_launch_late=self.ranks.size == 2)

    @property
    def all_copied(self) -> bool:
        """Whether copies (peers.py) carry all arrays, so that exchanges make no call of NCCL."""
        return self.copies is not None and len(self.copies.ranks) == self.ranks.size == 2

    # The three steps of an exchange, which a queue runs, or records for a plan. `stream` is the
    # pointer of the stream of the call

    def mark(self, stream: int) -> None:
        """Let the next `transfer` start after the work that is now queued on the stream."""
        cupy.cuda.runtime.eventRecord(self.ready.ptr, stream)

    def transfer(self, form: _Form | _AllGather, stream: int, *addresses: int) -> None:
        """Queue an exchange of this form, which starts after the last `mark`."""
        runtime, transfers = cupy.cuda.runtime, self.stream.ptr
        runtime.streamWaitEvent(transfers, self.ready.ptr)
        began = self.record_time(self.stream)
        if form.links <= self.linked:
            form.launch(self, addresses)
        else:  # NCCL connects ranks in their first transfer, in which the host waits for them
            self._run_bounded(lambda: form.launch(self, addresses))
            self.linked |= form.links
        if began is None:
            runtime.eventRecord(self.done.ptr, transfers)
        else:
            self.timed.append((began, self.record_time(self.stream)))

    def join(self, stream: int) -> None:
        """Let later work on the stream start after the exchanges that are queued."""
        runtime = cupy.cuda.runtime
        if self.timings is None or not self.timed:
            runtime.streamWaitEvent(stream, self.done.ptr)
            return
        began, ended = self.timed.pop(0)
        current = cupy.cuda.get_current_stream()
        before = self.record_time(current)
        runtime.streamWaitEvent(stream, ended.ptr)
        self.timings.append((began, ended, before, self.record_time(current)))

    def close(self) -> None:
        self.ranks.__dict__.pop("gpu_transports", None)
        try:
            # First release the copies. The abort holds the interpreter's lock, and may wait for the
            # device, whose streams may wait for copies of other ranks
            self._release(COPIES_PATIENCE)
        finally:
            try:
                self.communicator.abort()
            finally:
                self._release(peers.PATIENCE)  # copies may have waited for transfers of NCCL
                self.plans.clear()  # last, because freeing a graph may wait for its launches

    def _release(self, patience: float) -> None:
        """End the waits for other ranks in the copies that are now queued. Stops after `patience`
        seconds."""
        if self.copies is None:
            return
        with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the call may end with such an error
            ends = [stream.record() for stream in (self.call_stream, self.stream)]
            self.copies.release(lambda: all(event.done for event in ends), patience)

    def free(self) -> None:
        self.plans.clear()
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.close()
        self.ranks.allgather(None)  # after this, no rank maps the mailbox of another rank
        if copies is not None:
            copies.mailbox_memory.free()
        self.communicator.destroy()


@dataclass(frozen=True)
class _Form:
    """The form of an exchange: sizes and ranks, without the addresses of arrays."""

    sends: list[Message]  # by NCCL
    receives: list[Message]  # by NCCL
    links: set[Link]  # of NCCL's transfers
    copies: list[peers.Swap]

    def launch(self, nccl: NCCL, addresses: Sequence[int]) -> None:
        """Queue the copies, then one operation of NCCL with all other transfers.

        `addresses` are the addresses of the arrays of `sends`, `receives` and `copies`.
        """
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
            send(at, size, NCCL_UINT8, rank, stream)
        for at, (size, rank) in zip(addresses[sends:], self.receives, strict=True):
            receive(at, size, NCCL_UINT8, rank, stream)
        nccl.nccl.groupEnd()


@dataclass(frozen=True)
class _AllGather:
    """The form of an exchange in which each rank sends the same number of bytes to all ranks."""

    size: int  # bytes that one rank sends
    links: frozenset[Link] = frozenset({(0, True, True)})

    def launch(self, nccl: NCCL, addresses: Sequence[int]) -> None:
        """`addresses` are the addresses of this rank's bytes, and of the bytes of all ranks."""
        nccl.communicator.allGather(*addresses, self.size, NCCL_UINT8, nccl.stream.ptr)


class _QueuedNCCL:
    """The transport through a queue, which runs the exchanges or records them for a plan.

    `may_launch_late`: an exchange is launched only when the caller waits for it, if this rank
    receives at most `LATE_BYTES` of it by NCCL. (If copies carry all arrays, NCCL receives 0 bytes:
    then every exchange is launched late.) So the block that hides the exchange is launched first.
    The block does not wait for that launch, and gets multiprocessors first. On the device, the
    exchange waits for `mark`, not for the block.
    """

    def __init__(self, transport: NCCL, queue: Queue, may_launch_late: bool = False) -> None:
        self.transport, self.queue = transport, queue
        self.may_launch_late = may_launch_late
        # A CUDA graph may have an exchange if both of these hold: copies carry all arrays, because
        # NCCL may register the buffers of captured transfers; and exchanges are not measured,
        # because events with times are no part of a graph
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
            send, copied_out = self._divide_by_route(to, send)
            receive, copied_in = self._divide_by_route(source, receive)
            form.sends.extend((array.nbytes, to) for array in send)
            form.receives.extend((array.nbytes, source) for array in receive)
            if send or receive:
                form.links.add((distance, bool(send), bool(receive)))
            if copied_out or copied_in:
                sizes = (tuple(a.nbytes for a in arrays) for arrays in (copied_out, copied_in))
                form.copies.append(peers.Swap(to, next(sizes), source, next(sizes)))
            sent += send
            received += receive
            copied += [*copied_out, *copied_in]
        self.do(self.transport.mark)
        transfer = partial(self.transport.transfer, form)
        addresses = [array.data.ptr for array in (*sent, *received, *copied)]
        launch = partial(self.do, transfer, *addresses)
        if self.may_launch_late and sum(size for size, _ in form.receives) <= LATE_BYTES:
            return _LateExchange(self, launch)
        launch()
        return self

    def _divide_by_route(
        self, rank: int, arrays: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
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
        ranks = self.transport.ranks
        rank_vectors = cupy.empty((ranks.size, len(numbers)))
        own_vector = rank_vectors[ranks.rank]
        for i, number in enumerate(numbers):
            self.queue.copy(own_vector[i:].data, number.data, number.nbytes)
        if self.transport.all_copied:  # two ranks
            self.exchange({1: ([own_vector], [rank_vectors[1 - ranks.rank]])}).wait()
            return rank_vectors
        self.do(self.transport.mark)
        transfer = partial(self.transport.transfer, _AllGather(own_vector.nbytes))
        self.do(transfer, own_vector.data.ptr, rank_vectors.data.ptr)
        self.wait()
        return rank_vectors


class _LateExchange:
    """An exchange that is launched when the caller waits for it."""

    def __init__(self, queued: _QueuedNCCL, launch: Callable[[], None]) -> None:
        self.queued, self.launch = queued, launch

    def wait(self) -> None:
        self.launch()
        self.queued.wait()
