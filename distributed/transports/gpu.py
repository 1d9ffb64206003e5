"""Transports of CuPy arrays: NCCL, CUDA-aware MPI, MPI through pinned host memory.

An exchange starts after the work that the current stream has when `exchange` is called. Work that
the stream gets after `wait` starts after the exchange; work between the two overlaps with it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import cupyx
import numpy as np

from ..communicators.base import Array, Communicator, Pending, Shifts
from .base import Transport

Message = tuple[int, int, int, int]  # address, elements, their type, the other rank
BYTES = 1  # NCCL's name for 8-bit unsigned integers: any dtype is sent as bytes
MOST_NUMBERS = 8  # in one `read`


_abandoned: list[Any] = []  # host memory that the device may still write to


@functools.cache
def nccl_missing() -> str | None:
    """Why NCCL cannot be used here; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of CuPy, where NCCL is missing
        from cupy.cuda import nccl
    if not nccl.available:
        return "CuPy finds no NCCL (pip install 'infonce[cuda13]' or 'infonce[cuda12]')"
    return None


def device_name() -> str:
    """A name of this rank's current GPU that is unique on its machine."""
    return _name(cupy.cuda.Device().id)


@functools.cache
def _name(index: int) -> str:
    return f"GPU {index} ({cupy.cuda.Device(index).pci_bus_id})"


def make(name: str, ranks: Communicator) -> Transport:
    """The transport of that name for the current device; kept with the communicator. Collective."""
    kept: dict[tuple[str, int], Transport] = ranks.__dict__.setdefault("gpu_transports", {})
    key = name, cupy.cuda.Device().id
    if key not in kept:
        kept[key] = TRANSPORTS[name](ranks)
    return kept[key]


class _Base:
    """Base of the transports: a stream for transfers, and bounded waits for the device."""

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self.timers: list[Any] | None = None  # [] to measure
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)  # transfers are short
        # recorded again by every exchange: a wait refers to the latest record before it
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.done = cupy.cuda.Event(disable_timing=True)
        self.numbers = cupyx.empty_pinned(MOST_NUMBERS, np.float64)

    def begin(self) -> None:
        """Order the next transfers after the work that the current stream has."""
        self.ready.record()
        self.stream.wait_event(self.ready)

    def timer(self, stream: Any) -> Any:
        """An event with a time on `stream`; None unless exchanges are timed."""
        if self.timers is None:
            return None
        event = cupy.cuda.Event()
        event.record(stream)
        return event

    def seconds(self) -> tuple[float, float]:
        """Seconds of exchanges, and seconds that the stream waited for them, since `timers` was
        []."""
        elapsed = cupy.cuda.get_elapsed_time
        timers = self.timers or []
        return (
            sum(elapsed(began, ended) for began, ended, _, _ in timers) / 1e3,
            sum(elapsed(before, after) for _, _, before, after in timers) / 1e3,
        )

    def read(self, numbers: Sequence[Array]) -> list[float]:
        """Waits for the device within the timeout of ranks: its work may wait for other ranks."""
        stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
        to = self.numbers.ctypes.data
        for i, number in enumerate(numbers):
            runtime.memcpyAsync(
                to + 8 * i, number.data.ptr, 8, runtime.memcpyDeviceToHost, stream.ptr
            )
        self.ready.record(stream)
        try:
            self.ranks.until(lambda: bool(self.ready.done))
        except BaseException:
            _abandoned.append(self.numbers)
            raise
        return [float(number) for number in self.numbers[: len(numbers)]]

    def close(self) -> None:
        """Nothing to abandon: the device never waits for another rank."""


class NCCL(_Base):
    """Point-to-point sends and receives of NCCL."""

    name = "nccl"

    def __init__(self, ranks: Communicator) -> None:
        super().__init__(ranks)
        from cupy.cuda import nccl

        self.nccl = nccl
        identity = nccl.get_unique_id() if ranks.rank == 0 else None
        identity = ranks.allgather(identity)[0]
        self.device = cupy.cuda.Device()
        self.linked: set[tuple[int, bool, bool]] = set()  # distances whose ranks are connected
        self.communicator = self._bounded(
            lambda: nccl.NcclCommunicator(ranks.size, identity, ranks.rank)
        )

    def _bounded(self, function: Callable[[], Any]) -> Any:
        """Run a function of NCCL that waits for other ranks, within the timeout."""

        def on_device() -> Any:
            with self.device:
                return function()

        return self.ranks.bounded(on_device, "NCCL")

    def exchange(self, shifts: Shifts) -> Pending:
        self.begin()
        began = self.timer(self.stream)
        rank, size = self.ranks.rank, self.ranks.size
        sends: list[Message] = []
        receives: list[Message] = []
        links = set()
        for distance, (send, receive) in shifts.items():
            to, source = (rank + distance) % size, (rank - distance) % size
            sends += [(array.data.ptr, array.nbytes, BYTES, to) for array in send if array.nbytes]
            receives += [
                (array.data.ptr, array.nbytes, BYTES, source) for array in receive if array.nbytes
            ]
            some_sent, some_received = (any(array.nbytes for array in of) for of in (send, receive))
            links.add((distance, some_sent, some_received))
        if links <= self.linked:
            self._queue(sends, receives)
        else:  # NCCL connects two ranks in their first transfer, and waits for both
            self._bounded(lambda: self._queue(sends, receives))
            self.linked |= links
        return _Queued(self, began)

    def _queue(self, sends: list[Message], receives: list[Message]) -> None:
        """One operation of NCCL: it makes all transfers at once."""
        stream = self.stream.ptr
        self.nccl.groupStart()
        for of in sends:
            self.communicator.send(*of, stream)
        for of in receives:
            self.communicator.recv(*of, stream)
        self.nccl.groupEnd()

    def close(self) -> None:
        self.ranks.__dict__.pop("gpu_transports", None)
        self.communicator.abort()


class _Queued:
    """An exchange that is queued on the transport's stream."""

    def __init__(self, transport: _Base, began: Any = None) -> None:
        self.transport, self.began = transport, began
        self.event = transport.done if began is None else cupy.cuda.Event()
        self.event.record(transport.stream)

    def wait(self) -> None:
        stream, timer = cupy.cuda.get_current_stream(), self.transport.timer
        before = timer(stream)
        stream.wait_event(self.event)
        if self.transport.timers is not None and self.began is not None:
            self.transport.timers.append((self.began, self.event, before, timer(stream)))


class CudaAware(_Base):
    """MPI that reads and writes device memory itself."""

    name = "cuda-aware"

    def exchange(self, shifts: Shifts) -> Pending:
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()
        return _ByHost(self, ready, shifts)


class _ByHost:
    """An exchange that the host makes while the device computes: in `wait`, which is called when
    the products of the step are queued."""

    def __init__(self, transport: _Base, ready: Any, shifts: Shifts) -> None:
        self.ranks, self.ready, self.shifts = transport.ranks, ready, shifts

    def wait(self) -> None:
        self.ranks.until(lambda: bool(self.ready.done))
        self.ranks.exchange(self.shifts).wait()


class Staged(_Base):
    """Pinned host memory between the device and any MPI."""

    name = "staged"

    def exchange(self, shifts: Shifts) -> Pending:
        return _Staged(self, shifts)


class _Staged:
    """An exchange through pinned host memory: copied to it at once, sent in `wait`."""

    def __init__(self, transport: Staged, shifts: Shifts) -> None:
        self.transport, self.shifts = transport, shifts
        transport.begin()
        copies: dict[int, Array] = {}  # an array may go to several ranks
        self.out: dict[int, list[Array]] = {}
        with transport.stream:
            for distance, (send, _) in shifts.items():
                for array in send:
                    if id(array) not in copies:
                        host = copies[id(array)] = _pinned_like(array)
                        array.get(stream=transport.stream, out=host, blocking=False)
                self.out[distance] = [copies[id(array)] for array in send]
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.ready.record(transport.stream)

    def wait(self) -> None:
        transport = self.transport
        transport.ranks.until(lambda: bool(self.ready.done))
        arrived = {d: [_pinned_like(a) for a in of] for d, (_, of) in self.shifts.items()}
        shifts = {d: (send, arrived[d]) for d, send in self.out.items()}
        transport.ranks.exchange(shifts).wait()
        with transport.stream:
            for d, (_, receive) in self.shifts.items():
                for array, host in zip(receive, arrived[d], strict=True):
                    array.set(host, stream=transport.stream)
        done = _Queued(transport)
        done.wait()
        # pinned memory goes back to its pool when the copies are over
        transport.ranks.until(lambda: bool(done.event.done))


def _pinned_like(array: Array) -> Any:
    if array.nbytes == 0:
        return np.empty(array.shape, array.dtype)
    return cupyx.empty_pinned(array.shape, array.dtype)


TRANSPORTS: dict[str, Callable[[Communicator], Transport]] = {
    "nccl": NCCL, "cuda-aware": CudaAware, "staged": Staged,
}  # fmt: skip
