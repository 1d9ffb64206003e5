"""The identity of a stream, and whether a stream is being captured in a CUDA graph."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import cupy

PER_THREAD = 2  # address of cudaStreamPerThread: in each thread, the thread's own default stream

_thread = threading.local()  # `number`: of this thread, once it has one
_thread_numbers = count(1)
_captured: dict[int, Any] = {}  # streams of `note_capture`, by address


def identity(stream: int) -> int:
    """A number that identifies the stream at address `stream`, in all threads.

    It is the address, except for cudaStreamPerThread: this address means another stream in each
    thread, so it gets a negative number, which no other thread ever gets.
    """
    if stream != PER_THREAD:
        return stream
    if not hasattr(_thread, "number"):
        _thread.number = -next(_thread_numbers)
    number: int = _thread.number
    return number


def note_capture(stream: Any) -> None:
    """Remember a stream on which the caller captures a call, for `capture_under_way`.

    `plan.Plan.run` calls this in each call on a stream under capture.
    """
    _captured[stream.ptr] = stream


def capture_under_way() -> bool:
    """Whether the current stream, or a stream of `note_capture` in any thread, is under capture.

    A plan must not free a graph during a capture: CUDA would end the capture with an error.
    """
    if cupy.cuda.get_current_stream().is_capturing():
        return True
    for address, stream in list(_captured.items()):
        if stream.is_capturing():
            return True
        _captured.pop(address, None)
    return False
