"""Which stream work is on, and whether one is being captured in a CUDA graph."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import cupy

PER_THREAD = 2  # cudaStreamPerThread: what every thread calls a default stream of its own

_thread = threading.local()
_threads = count(1)
_captured: dict[int, Any] = {}  # streams that calls have found under capture, by address


def identity(stream: int) -> int:
    """The stream at this address. The default stream of a thread is a negative number, which no
    other thread has or will have."""
    if stream != PER_THREAD:
        return stream
    if not hasattr(_thread, "number"):
        _thread.number = -next(_threads)
    number: int = _thread.number
    return number


def note_capture(stream: Any) -> None:
    """A call on this stream becomes part of a graph of the caller's."""
    _captured[stream.ptr] = stream


def capture_under_way() -> bool:
    """Whether the current stream is under capture, or one that a call has found to be, in any
    thread. CUDA ends a capture with an error if a graph is freed meanwhile."""
    if cupy.cuda.get_current_stream().is_capturing():
        return True
    for address, stream in list(_captured.items()):
        if stream.is_capturing():
            return True
        _captured.pop(address, None)
    return False
