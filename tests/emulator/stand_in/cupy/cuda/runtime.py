"""The functions of CUDA's runtime that the library calls."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

# Two of Hopper, which have all kernels, and one that has the portable ones alone
CAPABILITIES = ("90", "90", "80")
OUT_OF_MEMORY, INVALID_VALUE, CAPTURE_UNSUPPORTED = 2, 1, 900
memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = range(4)
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice = range(3)

_thread = threading.local()
pinned: dict[int, int] = {}  # bytes of pinned memory on the host, by address


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(f"emulated CUDA error {status}: {why}")
        self.status = status


def getDeviceCount() -> int:
    return len(CAPABILITIES)


def getDevice() -> int:
    return getattr(_thread, "device", 0)


def setDevice(device: int) -> None:
    if not 0 <= device < len(CAPABILITIES):
        raise CUDARuntimeError(INVALID_VALUE, f"there is no device {device}")
    _thread.device = device


def driverGetVersion() -> int:
    return 13000


runtimeGetVersion = driverGetVersion


def memcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> None:
    streams.submit(stream, lambda: ctypes.memmove(target, source, size))


def memsetAsync(target: int, value: int, size: int, stream: int) -> None:
    streams.submit(stream, lambda: ctypes.memset(target, value, size))


def graphLaunch(graph: Any, stream: int) -> None:
    streams.submit(stream, graph.run)


def eventRecord(event: int, stream: int) -> None:
    streams.events[event].record(streams.known(stream))


def streamWaitEvent(stream: int, event: int) -> None:
    streams.known(stream).wait_event(streams.events[event])


def pointerGetAttributes(address: int) -> Any:
    inside = any(start <= address < start + size for start, size in list(pinned.items()))
    return SimpleNamespace(type=memoryTypeHost if inside else memoryTypeUnregistered)


def deviceSynchronize() -> None:
    streams.synchronize()


from . import stream as streams  # noqa: E402  which needs this module
