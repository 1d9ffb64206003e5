"""Transports of CuPy arrays: NCCL, CUDA-aware MPI, MPI through pinned host memory.

A shift starts after the work that the current stream has when `shift` is called. Work that the
stream gets after `wait` starts after the shift; work between the two overlaps with it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import cupyx
import numpy as np

from ..communicators.base import Array, Communicator, Pending
from .base import Transport

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
        # recorded again by every shift: a wait refers to the latest record before it
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.done = cupy.cuda.Event(disable_timing=True)
        self.numbers = cupyx.empty_pinned(MOST_NUMBERS, np.float64)

    def begin(self) -> None:
        """Order the next transfers after the work that the current stream has."""
        self.ready.record()
        self.stream.wait_event(self.ready)

    def timer(self, stream: Any) -> Any:
        """An event with a time on `stream`; None unless shifts are timed."""
        if self.timers is None:
            return None
        event = cupy.cuda.Event()
        event.record(stream)
        return event

    def seconds(self) -> tuple[float, float]:
        """Seconds of shifts, and seconds that the stream waited for them, since `timers` was []."""
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
        self.linked: set[tuple[int, bool, bool]] = set()  # shifts whose ranks are connected
        self.communicator = self._bounded(
            lambda: nccl.NcclCommunicator(ranks.size, identity, ranks.rank)
        )

    def _bounded(self, function: Callable[[], Any]) -> Any:
        """Run a function of NCCL that waits for other ranks, within the timeout."""

        def on_device() -> Any:
            with self.device:
                return function()

        return self.ranks.bounded(on_device, "NCCL")

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        left = (self.ranks.rank - distance) % self.ranks.size
        right = (self.ranks.rank + distance) % self.ranks.size
        send = [a for a in send if a.nbytes]
        receive = [a for a in receive if a.nbytes]
        self.begin()
        began = self.timer(self.stream)
        link = distance, bool(send), bool(receive)
        if link in self.linked:
            self._queue(send, right, receive, left)
        else:  # NCCL connects two ranks in their first transfer, and waits for both
            self._bounded(lambda: self._queue(send, right, receive, left))
            self.linked.add(link)
        return _Queued(self, began)

    def _queue(self, send: list[Array], right: int, receive: list[Array], left: int) -> None:
        self.nccl.groupStart()
        for array in send:
            self.communicator.send(array.data.ptr, array.nbytes, BYTES, right, self.stream.ptr)
        for array in receive:
            self.communicator.recv(array.data.ptr, array.nbytes, BYTES, left, self.stream.ptr)
        self.nccl.groupEnd()

    def close(self) -> None:
        self.ranks.__dict__.pop("gpu_transports", None)
        self.communicator.abort()


class _Queued:
    """A shift that is queued on the transport's stream."""

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

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()
        return _ByHost(self, ready, send, receive, distance)


class _ByHost:
    """A shift that the host makes while the device computes: in `wait`, which is called when the
    products of the step are queued."""

    def __init__(
        self, transport: _Base, ready: Any, send: Sequence[Array], receive: Sequence[Array],
        distance: int,
    ) -> None:  # fmt: skip
        self.ranks, self.ready = transport.ranks, ready
        self.of_shift = send, receive, distance

    def wait(self) -> None:
        self.ranks.until(lambda: bool(self.ready.done))
        self.ranks.shift(*self.of_shift).wait()


class Staged(_Base):
    """Pinned host memory between the device and any MPI."""

    name = "staged"

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        return _Staged(self, send, receive, distance)


class _Staged:
    """A shift through pinned host memory: copied to it at once, sent in `wait`."""

    def __init__(
        self, transport: Staged, send: Sequence[Array], receive: Sequence[Array], distance: int
    ) -> None:
        self.transport, self.receive, self.distance = transport, receive, distance
        transport.begin()
        self.out = [_pinned_like(a) for a in send]
        with transport.stream:
            for host, array in zip(self.out, send, strict=True):
                array.get(stream=transport.stream, out=host, blocking=False)
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.ready.record(transport.stream)

    def wait(self) -> None:
        transport = self.transport
        transport.ranks.until(lambda: bool(self.ready.done))
        arrived = [_pinned_like(a) for a in self.receive]
        transport.ranks.shift(self.out, arrived, self.distance).wait()
        with transport.stream:
            for array, host in zip(self.receive, arrived, strict=True):
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
