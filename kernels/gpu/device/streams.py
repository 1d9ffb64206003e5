"""The identity of a stream, and whether a stream is being captured in a CUDA graph."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import cupy

PER_THREAD = 2  # cudaStreamPerThread: for each thread, the thread's own default stream

_thread = threading.local()
_threads = count(1)
_captured: dict[int, Any] = {}  # streams on which a call was captured, by address


def identity(stream: int) -> int:
    """A number that identifies the stream at this address.

    The default stream of a thread gets a negative number, which no other thread ever gets.
    """
    if stream != PER_THREAD:
        return stream
    if not hasattr(_thread, "number"):
        _thread.number = -next(_threads)
    number: int = _thread.number
    return number


def note_capture(stream: Any) -> None:
    """Note that the caller captures a call on this stream in a graph."""
    _captured[stream.ptr] = stream


def capture_under_way() -> bool:
    """Whether the current stream, or a stream of `note_capture` in any thread, is under capture.

    No graph may be freed meanwhile: CUDA would end the capture with an error.
    """
    if cupy.cuda.get_current_stream().is_capturing():
        return True
    for address, stream in list(_captured.items()):
        if stream.is_capturing():
            return True
        _captured.pop(address, None)
    return False
