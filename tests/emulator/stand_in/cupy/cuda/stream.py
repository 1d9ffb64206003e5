"""Streams. In a random schedule they do their work late: when the host or another stream waits for
it, or at random. The default stream does its work at once. Under capture, a stream writes its work
down, for a graph that does it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import engine

from . import runtime

Work = Callable[[], object]

_addresses = itertools.count(0x1000, 0x10)
_thread = threading.local()
_streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
events: WeakValueDictionary[int, Event] = WeakValueDictionary()
chance = random.Random(0)  # emulation.py seeds it for each test
waits: deque[str] = deque(maxlen=1000)  # what the host has waited for
SOON = 0.2  # chance that a stream does a piece of work before anyone waits for it


class Stream:
    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        self.ptr = 0 if null else next(_addresses)
        self.device_id = runtime.getDevice()
        self._written: list[Work] | None = None  # under capture
        self._waiting: deque[Work] = deque()
        with engine.turn:
            _streams[self.ptr] = self

    @staticmethod
    def from_external(stream: Any) -> Stream:
        return stream if isinstance(stream, Stream) else Stream()

    def __enter__(self) -> Stream:
        _current().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current().pop()

    def use(self) -> Stream:
        _current()[-1:] = [self]
        return self

    def submit(self, work: Work) -> None:
        if self._written is not None:
            self._written.append(work)
            return
        with engine.turn:
            self._waiting.append(work)
            # In a random schedule, work of other streams than the null stream waits
            delays = engine.SEED != 0 and self.ptr != 0
            while self._waiting and (not delays or chance.random() <= SOON):
                self._step()

    def _step(self) -> None:
        self._waiting.popleft()()

    def finish(self) -> None:
        """Do all work that waits."""
        with engine.turn:
            while self._waiting:
                self._step()

    def __del__(self) -> None:
        self.finish()

    def synchronize(self) -> None:
        self.note_wait("synchronize")
        self.finish()

    def note_wait(self, what: str) -> None:
        """The host waits for `what`: never for a stream that is being captured."""
        if self._written is not None:
            raise runtime.CUDARuntimeError(
                runtime.CAPTURE_UNSUPPORTED,
                f"{what}: the host waits for a stream that is being captured",
            )
        waits.append(what)

    @property
    def done(self) -> bool:
        return not self._waiting

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if self._written is None:  # a graph does all its work in order
            self.submit(event._mark.reach)

    def is_capturing(self) -> bool:
        return self._written is not None

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == 0 or self._written is not None:
            raise runtime.CUDARuntimeError(
                runtime.CAPTURE_UNSUPPORTED, "capture of the null stream, or a second time"
            )
        self._written = []

    def end_capture(self) -> Graph:
        if self._written is None:
            raise runtime.CUDARuntimeError(runtime.CAPTURE_UNSUPPORTED, "nothing is captured")
        graph, self._written = Graph(self._written), None
        return graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr


Stream.null = Stream(null=True)


class Graph:
    """The work that a captured stream was asked for."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    @property
    def graphExec(self) -> Graph:
        return self

    def run(self) -> None:
        for work in self._works:
            work()

    def launch(self, stream: Stream | None = None) -> None:
        (stream or get_current_stream()).submit(self.run)


class _Mark:
    """A place in the work of a stream."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream
        if stream is None or stream.is_capturing():
            self.pass_by()
        else:
            stream.submit(self.pass_by)

    def pass_by(self) -> None:
        self.stream, self.time = None, time.perf_counter()

    def reach(self) -> None:
        """Do the work of the stream up to the mark: the host or another stream waits for it."""
        with engine.turn:
            while (stream := self.stream) is not None:
                stream._step()


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:  # fmt: skip
        self.ptr, self._mark = next(_addresses), _Mark()
        events[self.ptr] = self

    @property
    def done(self) -> bool:
        return self._mark.stream is None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _Mark(stream or get_current_stream())

    def synchronize(self) -> None:
        waits.append("event")
        self._mark.reach()


def get_elapsed_time(start: Event, end: Event) -> float:
    return 1e3 * (end._mark.time - start._mark.time)


def _current() -> list[Stream]:
    streams: list[Stream] = _thread.__dict__.setdefault("streams", [Stream.null])
    return streams


def get_current_stream(device_id: int = -1) -> Stream:
    return _current()[-1]


def known(stream: int) -> Stream:
    """The stream at this address."""
    state = _streams.get(stream)
    if state is None:
        raise runtime.CUDARuntimeError(runtime.INVALID_VALUE, f"no stream has the address {stream}")
    return state


def submit(stream: int, work: Work) -> None:
    known(stream).submit(work)


def synchronize_all() -> None:
    """All that was asked for is done, but for what is captured."""
    with engine.turn:
        for stream in list(_streams.values()):
            stream.finish()


def synchronize() -> None:
    get_current_stream().note_wait("synchronize")
    synchronize_all()
