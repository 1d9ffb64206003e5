"""The GPU as the device of `offload.backend`, and copies of chunks from and to host memory.

The GPU copies pinned memory without the CPU. Other memory is copied through pinned buffers, by
several threads: one thread reaches only a fraction of the rate of PCIe. Each thread has a pinned
buffer and a stream. While the GPU copies the buffer of one thread, the other threads fill or empty
their buffers. Threads and buffers are kept for later calls: 2 x `THREADS` buffers of `COPY_BYTES`,
or of a row if a row is longer.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime

from ..epilogues import Epilogue, Sums
from ..gpu import select, shard
from ..gpu.linear import GPURows
from ..gpu.vectors import ElementwiseVectors
from ..grid import slices
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import BlockQuestion, Solution
from . import backend

THREADS = 6  # in each direction; with 8, calls took longer
COPY_BYTES = 2**22  # largest number of bytes of one copy by a thread, unless a row is longer
LEAST_COPY_BYTES = 2**20  # for fewer bytes, threads mainly wait for Python's global lock


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of host features, computed on the current GPU."""
    return backend.solve(problem, gradients, GPUDevice())


def run_block_pass(
    problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None = None, to_clear: Sums | None = None,
    ahead: Gradients | None = None,
) -> None:  # fmt: skip
    """`backend.run_block_pass` on the current GPU."""
    backend.run_block_pass(
        GPUDevice(), problem, triangle, epilogue, gradients, not_finite, to_clear, ahead
    )  # fmt: skip


class GPUDevice:
    """The current GPU: see `infonce.kernels.offload.device.OffloadDevice`."""

    xp = cupy
    solve = staticmethod(select.solve)
    # records a plan for each shape of blocks, which many blocks share
    run_block_pass = staticmethod(shard.run_block_pass)

    def __init__(self) -> None:
        self.vectors = ElementwiseVectors()

    @staticmethod
    def rows(features: Array, problem: Problem) -> GPURows:
        return GPURows.from_features(features, problem)

    @staticmethod
    def put(array: Array) -> Array:
        return cupy.asarray(array)

    @staticmethod
    def get(array: Array) -> Array:
        return cupy.asnumpy(array)

    @staticmethod
    @contextmanager
    def copies() -> Iterator[GPUCopies]:
        copies = GPUCopies()
        try:
            yield copies
        except BaseException:
            copies.finish(raising=False)
            raise
        copies.finish()


# --- copies ---------------------------------------------------------------------------------------


class GPUCopies:
    """See `infonce.kernels.offload.device.HostCopies`."""

    def __init__(self) -> None:
        self.device = runtime.getDevice()
        self.current = cupy.cuda.get_current_stream()
        self.inwards, self.outwards = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        # copies under way, and their arrays
        self.pending: dict[GPUTicket, tuple[Array, Array]] = {}
        self.touching: list[Future[None]] = []

    def touch(self, target: Array) -> None:
        # Pinned memory has its pages already; `_touch` writes the pages of contiguous memory
        if target.flags.c_contiguous and not _pinned(target, target.dtype):
            parts = _parts_to_copy(target, target.nbytes)
            self.touching += [_pool("out").submit(_touch, target[part]) for part in parts]

    def arrive(self, target: Array, source: Array) -> GPUTicket:
        ready = self.current.record()
        if _pinned(source, target.dtype):
            self.inwards.wait_event(ready)
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, self.inwards)
            return self.ticket([], self.inwards.record(), target, source)
        parts = self.submit("in", _Lane.arrive, target, source, ready)
        return self.ticket(parts, None, target, source)

    def leave(self, target: Array, source: Array, add: bool) -> GPUTicket:
        wait(self.touching)  # they write to the same memory
        ready = self.current.record()
        if not add and _pinned(target, source.dtype):  # with `add`, threads of the CPU add
            self.outwards.wait_event(ready)
            source.data.copy_to_host_async(target.ctypes.data, source.nbytes, self.outwards)
            return self.ticket([], self.outwards.record(), target, source)
        parts = self.submit("out", partial(_Lane.leave, add=add), source, target, ready)
        return self.ticket(parts, None, target, source)

    def submit(
        self, direction: str, copy: Callable[..., Any], device_array: Array, host_array: Array,
        ready: Any,
    ) -> list[Future[Any]]:  # fmt: skip
        """Copy parts of the rows, each part by a thread, with the stream and buffer of its `_Lane`.

        `ready` is an event after which the device's array may be read or written. Threads get
        addresses on the device, and no arrays: an array that a thread still refers to would be
        freed later than the caller expects.
        """

        def on_lane(address: int, part: Array) -> Any:
            return copy(_lane(device), address, part, dtype, ready)

        device, dtype, start = self.device, device_array.dtype, device_array.data.ptr
        row_bytes = device_array[:1].nbytes
        return [
            _pool(direction).submit(on_lane, start + part.start * row_bytes, host_array[part])
            for part in _parts_to_copy(host_array, device_array.nbytes)
        ]

    def ticket(
        self, parts: Sequence[Future[Any]], event: Any, target: Array, source: Array
    ) -> GPUTicket:
        ticket = GPUTicket(self, parts, event)
        self.pending[ticket] = target, source
        return ticket

    def finish(self, raising: bool = True) -> None:
        """Wait until all copies are complete. With `raising`, errors of threads are raised."""
        wait(self.touching)
        for ticket in self.pending:
            wait(ticket.parts)
        for ticket in self.pending:
            for part in ticket.parts:
                if raising or part.exception() is None:
                    part.result().synchronize()
        for stream in (self.inwards, self.outwards, self.current):
            stream.synchronize()
        self.pending.clear()


class GPUTicket:
    """See `infonce.kernels.offload.device.Ticket`."""

    def __init__(self, copies: GPUCopies, parts: Sequence[Future[Any]], event: Any) -> None:
        self.copies, self.parts, self.event = copies, parts, event

    def wait(self) -> None:
        events = [self.event] if self.event is not None else [part.result() for part in self.parts]
        for event in events:
            self.copies.current.wait_event(event)
        self.copies.pending.pop(self, None)


def _pinned(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether the GPU can copy this memory by itself, as elements of `dtype`."""
    if not array.flags.c_contiguous or not array.nbytes or array.dtype != dtype:
        return False
    attributes = runtime.pointerGetAttributes(array.ctypes.data)
    return bool(attributes.type == runtime.memoryTypeHost)


# --- threads --------------------------------------------------------------------------------------


@cache
def _pool(direction: str) -> ThreadPoolExecutor:
    """The threads of a direction: "in" to the device, or "out" to the host."""
    return ThreadPoolExecutor(THREADS, f"infonce-offload-{direction}")


def _parts_to_copy(array: Array, size: int) -> list[slice]:
    """Divide the rows of an array, of `size` bytes on the device, into parts for one copy each.

    There are at least as many parts as threads, unless parts would be below LEAST_COPY_BYTES.
    """
    part_bytes, rows = min(COPY_BYTES, max(LEAST_COPY_BYTES, size // THREADS)), len(array)
    return slices(rows, max(1, part_bytes * rows // max(1, size)))


def _touch(array: Array) -> None:
    """Write one byte of each page, unchanged, so that the system provides the page."""
    array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] |= 0


_thread_local = threading.local()


def _lane(device: int) -> _Lane:
    """The lane of this thread on a device, which becomes the current one."""
    cupy.cuda.Device(device).use()
    lanes: dict[int, _Lane] = _thread_local.__dict__.setdefault("lanes", {})
    if device not in lanes:
        lanes[device] = _Lane()
    return lanes[device]


class _Lane:
    """A thread's pinned buffer and stream, which it copies with."""

    def __init__(self) -> None:
        self.memory = cupyx.empty_pinned(COPY_BYTES, np.uint8)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.last = self.stream.record()

    def buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in the pinned memory, after the last copy of this lane is complete."""
        self.last.synchronize()
        size = math.prod(shape) * dtype.itemsize
        if self.memory.nbytes < size:
            self.memory = cupyx.empty_pinned(size, np.uint8)
        return self.memory[:size].view(dtype).reshape(shape)

    def copy(self, target: int, source: int, size: int, kind: int, ready: Any) -> Any:
        self.stream.wait_event(ready)
        runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)
        self.last = self.stream.record()
        return self.last

    def arrive(self, address: int, source: Array, dtype: np.dtype[Any], ready: Any) -> Any:
        staged = self.buffer(source.shape, dtype)
        np.copyto(staged, source)
        at, size = staged.ctypes.data, staged.nbytes
        return self.copy(address, at, size, runtime.memcpyHostToDevice, ready)

    def leave(
        self, address: int, target: Array, dtype: np.dtype[Any], ready: Any, add: bool
    ) -> Any:
        staged = self.buffer(target.shape, dtype)
        at, size = staged.ctypes.data, staged.nbytes
        self.copy(at, address, size, runtime.memcpyDeviceToHost, ready).synchronize()
        if add:
            np.add(target, staged, out=target, casting="unsafe")
        else:
            np.copyto(target, staged, casting="unsafe")
        return self.last
