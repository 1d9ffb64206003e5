"""Transports of CuPy arrays: the base class, and two over MPI, CUDA-aware or by pinned memory.

An exchange starts after all work that was queued on the current stream before `exchange`. Work that
is queued after `wait` starts after the exchange. Work between the two calls overlaps with the
exchange. nccl.py has the third transport.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import cupyx
import numpy as np
from infonce.kernels.gpu.device.launches import Queue
from infonce.kernels.gpu.plan import OwnedPlans

from ..communicators.base import DEVICE_BUSY_WAIT, Array, Communicator, Pending, Shifts
from .base import Queued


def device_name() -> str:
    """A name of this rank's current GPU that is unique on its machine."""
    return _name_device(cupy.cuda.Device().id)


@functools.cache
def _name_device(index: int) -> str:
    # not by the index, because CUDA_VISIBLE_DEVICES may number one GPU differently in processes
    return f"GPU {cupy.cuda.Device(index).pci_bus_id}"


def get_transport(name: str, ranks: Communicator, make: Callable[[Communicator], Any]) -> Any:
    """The transport called `name` for the current device and stream.

    The first call makes it, and the communicator keeps it for later calls. All ranks call this
    together.
    """
    transports = _get_transports(ranks)
    key = name, cupy.cuda.runtime.getDevice()
    if key not in transports:
        transports[key] = make(ranks)
    transports[key].call_stream = cupy.cuda.get_current_stream()
    return transports[key]


def _get_transports(ranks: Communicator) -> dict[tuple[str, int], Any]:
    transports: dict[tuple[str, int], Any] = ranks.__dict__.setdefault("gpu_transports", {})
    return transports


@contextmanager
def measuring(ranks: Communicator) -> Iterator[Callable[[], tuple[float, float]]]:
    """A context that yields a function, which returns two numbers about exchanges in the context:

    - the seconds of the exchanges;
    - the seconds that other work waited for them.

    The ranks must have made a call of the same kind before: only transports that exist are timed.
    """
    transports = list(_get_transports(ranks).values())
    for transport in transports:
        transport.timings = []
    try:
        yield lambda: (
            sum(transport.seconds()[0] for transport in transports),
            sum(transport.seconds()[1] for transport in transports),
        )
    finally:
        for transport in transports:
            transport.timings = None


class OnDevice:
    """Base of transports of CuPy arrays: a stream for transfers, bounded waits for the device."""

    # While exchanges are measured, four events of each exchange: its begin and end on the stream of
    # transfers, and the begin and end of the wait for it on the stream of the call. Otherwise None
    timings: list[Any] | None = None

    def __init__(self, ranks: Communicator) -> None:
        self.ranks = ranks
        self.call_stream: Any = None  # the caller's stream, which computes blocks
        self.timed: list[Any] = []  # (begin, end) of measured exchanges, before `wait`
        self.plans = OwnedPlans()  # of calls: they hold this transport
        # the stream of transfers; of high priority, because transfers are short
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        # `ready`: the call's work before an exchange is done. `done`: the exchange is done. Each
        # exchange records both events again; a wait refers to the latest record before the wait
        self.ready = cupy.cuda.Event(disable_timing=True)
        self.done = cupy.cuda.Event(disable_timing=True)

    @property
    def measured(self) -> bool:
        return self.timings is not None

    def order_after_call(self) -> None:
        """Let the next transfers start after the work that is queued on the current stream."""
        self.ready.record()
        self.stream.wait_event(self.ready)

    def record_time(self, stream: Any) -> Any:
        """An event with a time on `stream`; None unless exchanges are measured."""
        if self.timings is None:
            return None
        event = cupy.cuda.Event()
        event.record(stream)
        return event

    def seconds(self) -> tuple[float, float]:
        """Seconds of the measured exchanges, and seconds that the call's stream waited for them."""
        milliseconds = cupy.cuda.get_elapsed_time
        timings = self.timings or []
        return (
            sum(milliseconds(began, ended) for began, ended, _, _ in timings) / 1e3,
            sum(milliseconds(before, after) for _, _, before, after in timings) / 1e3,
        )

    def allgather(self, numbers: Sequence[Array]) -> Array:
        return cupy.array(self.ranks.allgather([self.read(number) for number in numbers]))

    def read(self, number: Array) -> float:
        self.finish()
        return float(number)

    def finish(self) -> None:
        """Wait until the device has done the call's work. The wait ends after the communicator's
        timeout, because the device may wait for another rank that does not respond."""
        self.ready.record()
        self.ranks.until(lambda: self.ready.done, DEVICE_BUSY_WAIT)

    def queued(self, queue: Queue) -> Queued | None:
        return None

    def close(self) -> None:
        """Nothing is to abandon: over MPI, the host alone waits for ranks. NCCL overrides this."""

    def free(self) -> None:
        """Free the memory that stays from call to call. All ranks call this together.

        The transports over MPI keep no such memory.
        """


class CudaAware(OnDevice):
    """MPI that reads and writes device memory itself."""

    name = "cuda-aware"

    def exchange(self, shifts: Shifts) -> Pending:
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()
        return _ExchangeInWait(self, ready, shifts)


class _ExchangeInWait:
    """An exchange that the host makes in `wait`, while the device computes queued blocks.

    MPI knows no streams. So the host waits until the work before `exchange` is done (`ready`).
    """

    def __init__(self, transport: OnDevice, ready: Any, shifts: Shifts) -> None:
        self.ranks, self.ready, self.shifts = transport.ranks, ready, shifts

    def wait(self) -> None:
        self.ranks.until(lambda: bool(self.ready.done))
        self.ranks.exchange(self.shifts).wait()


class Staged(OnDevice):
    """Pinned host memory between the device and any MPI."""

    name = "staged"

    def exchange(self, shifts: Shifts) -> Pending:
        return _StagedExchange(self, shifts)


class _StagedExchange:
    """An exchange through pinned host memory. Copies from the device begin at once. `wait` sends
    the copies, and copies what arrives to the device."""

    def __init__(self, transport: Staged, shifts: Shifts) -> None:
        self.transport, self.shifts = transport, shifts
        transport.order_after_call()
        copies: dict[int, Array] = {}  # by the id of an array, which may go to several ranks
        self.out: dict[int, list[Array]] = {}  # distance -> copies of the arrays to send
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
        arrived = {d: [_pinned_like(a) for a in receive] for d, (_, receive) in self.shifts.items()}
        shifts = {d: (send, arrived[d]) for d, send in self.out.items()}
        transport.ranks.exchange(shifts).wait()
        with transport.stream:
            for d, (_, receive) in self.shifts.items():
                for array, host in zip(receive, arrived[d], strict=True):
                    array.set(host, stream=transport.stream)
        transport.done.record(transport.stream)
        cupy.cuda.get_current_stream().wait_event(transport.done)
        # the pinned memory may return to its pool only after the copies
        transport.ranks.until(lambda: bool(transport.done.done))


def _pinned_like(array: Array) -> Any:
    if array.nbytes == 0:
        return np.empty(array.shape, array.dtype)
    return cupyx.empty_pinned(array.shape, array.dtype)
