"""The threads of a call in one block, which divide each product among them."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...problem import SILENT
from ..loops.elementary import wait_awake
from ..resources import Guarded

# Threads of a call wait awake for each other, because to fall asleep takes 20 to 50 us, and so does
# to wake up. A step of a wait takes about 40 ns. When the number that a thread waits for appears,
# the thread that wrote it still holds the GIL. The waiting thread would fall asleep if it asked for
# the GIL at once, so it waits awake for some more steps (`STEPS_TO_END`, `STEPS_TO_BEGIN`)
MOST_STEPS = 2000  # about 80 us; then the thread falls asleep
STEPS_TO_END, STEPS_TO_BEGIN = 20, 100


class _Helper:
    """A thread that does pieces of work while its caller does other pieces.

    The thread waits for a bare lock. The queue and the future of an executor take twice as long.
    """

    def __init__(self) -> None:
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        # Numbers of pieces of work that have begun and ended, for threads that wait awake
        self._beginnings, self._ends = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._work: Any = None
        self._last = True
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="infonce", daemon=True).start()

    def begin(self, work: Callable[[], None], last: bool) -> None:
        """Begin a piece of work. After the `last` piece of a call, the thread falls asleep at once:
        awake, it would take a core from what the caller does next."""
        self._work, self._last, self._error = work, last, None
        self._begun.release()
        self._beginnings[0] += 1

    def end(self) -> BaseException | None:
        """Wait for the end of the work. Returns the error that stopped it, or None."""
        wait_awake(self._ends, self._beginnings[0], MOST_STEPS, STEPS_TO_END)
        self._ended.acquire()
        return self._error

    def _run(self) -> None:
        with np.errstate(**SILENT):
            while True:
                self._begun.acquire()
                last = self._last
                try:
                    self._work()
                except BaseException as error:
                    self._error = error
                self._work = None  # frees the caller's arrays
                number = self._ends[0] + 1
                self._ended.release()
                self._ends[0] = number
                if not last:
                    wait_awake(self._beginnings, number + 1, MOST_STEPS, STEPS_TO_BEGIN)


class _Helpers(Guarded):
    """Idle helpers of earlier calls.

    The exit of the process waits for busy helpers, because BLAS frees its memory at exit; but for a
    second at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[_Helper] = []
        self._busy: set[_Helper] = set()
        self._closed = False
        atexit.register(self._close)

    def _in_child(self) -> None:
        super()._in_child()
        self._idle, self._busy = [], set()  # a child has no threads of its parent

    def take(self, count: int) -> list[_Helper]:
        """`count` helpers, or an empty list if no thread can start."""
        with self._lock:
            if self._closed:
                return []
            try:
                while len(self._idle) < count:
                    self._idle.append(_Helper())
            except RuntimeError:
                return []
            helpers, self._idle = self._idle[:count], self._idle[count:]
            self._busy.update(helpers)
            return helpers

    def give(self, helpers: list[_Helper]) -> None:
        with self._lock:
            self._busy.difference_update(helpers)
            self._idle += helpers

    def _close(self) -> None:
        self._closed = True
        deadline = time.monotonic() + 1
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.001)


HELPERS = _Helpers()


class Team:
    """The threads of a call, among which each step of its work is divided."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers: list[_Helper] = []

    def __enter__(self) -> Team:
        if self.threads > 1:
            self._helpers = HELPERS.take(self.threads - 1)
        return self

    def __exit__(self, *error: object) -> None:
        if self._helpers:
            HELPERS.give(self._helpers)

    def share(self, work: Callable[[int], None], last: bool = False) -> None:
        """Call `work` with 0, 1, ... at the same time, each in one thread; 0 in this thread.

        If no helper could start, this thread does all pieces, one after another. `last`: the call
        shares no further work.
        """
        if self.threads == 1:
            work(0)
            return
        for part, helper in enumerate(self._helpers, 1):
            helper.begin(partial(work, part), last)
        try:
            for part in range(1 if self._helpers else self.threads):
                work(part)
        finally:
            errors = [helper.end() for helper in self._helpers]
        for error in errors:
            if error is not None:
                raise error
