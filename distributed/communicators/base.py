"""The ranks that share a batch: what the ring needs of them, with bounded waits.

The ring asks little of a communicator (`Communicator`): small Python values from all ranks, and a
shift of arrays to the next rank. mpi.py adapts mpi4py's communicators; anything else that
subclasses `Communicator` can be passed as `comm` as it is.

A rank that raises tells the others, which raise too; so does one that ends between calls. One that
is killed is noticed by the ranks of its host; one that just stops is named when the time is out. So
nobody waits for ever.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Array = Any
TIMEOUT = 300.0  # seconds
LISTEN = 0.05  # seconds between looks at the other ranks
BUSY = 5e-3  # seconds of waiting without sleep, which would last longer than most waits


# lets other processes of this core run, and other threads of this one
_yield: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


class RankError(RuntimeError):
    """Another rank failed, died, or fell silent: the evaluation cannot be completed."""


class Pending(Protocol):
    """A shift under way."""

    def wait(self) -> None:
        """Return when what was sent may be overwritten and what is received may be used."""
        ...


class Communicator:
    """What the ring needs of the ranks. Subclasses supply `allgather` and `shift`.

    Attributes
    ----------
    rank, size : int
    timeout : float or None
        Seconds that a rank waits for others before it gives up; set by each call of a loss.
    waited, moving : float
        Seconds so far that a rank waited for shifts, and that shifts were under way.
    """

    rank: int
    size: int
    timeout: float | None = TIMEOUT
    waited: float = 0.0
    moving: float = 0.0

    def allgather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, in the order of the ranks."""
        raise NotImplementedError

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        """Start sending C-contiguous arrays to rank + distance (mod size) while receiving as many
        from rank - distance, of the sizes that the receiver gives. NumPy arrays (with a CUDA-aware
        library, CuPy arrays) of any dtype; raw bytes travel. Shifts complete in the order of their
        start."""
        raise NotImplementedError

    def listen(self) -> None:
        """Raise RankError if another rank is known to have failed. Called while waiting."""

    def overdue(self) -> None:
        """Half of the time is out: a chance to tell the others that this rank is alive."""

    def silent(self) -> str:
        """Who the others are that have given no sign of life."""
        return "another rank"

    def fail(self, error: BaseException) -> None:
        """This rank leaves an evaluation with `error`: tell the others."""

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for `done()`; RankError if a rank fails meanwhile or the time is out."""
        began = now = time.monotonic()
        look, told = began + LISTEN, False
        while not done():
            now = time.monotonic()
            if now >= look:
                self.listen()
                look = now + LISTEN
            if self.timeout is not None and now - began > self.timeout / 2 and not told:
                self.overdue()
                told = True
            if self.timeout is not None and now - began > self.timeout:
                self.listen()
                raise RankError(
                    f"rank {self.rank} waited {self.timeout:g} s for {self.silent()}; a rank may "
                    "have stopped, or not called the same loss (timeout= sets the limit)"
                )
            if now - began < BUSY:
                _yield()
            else:
                time.sleep(min(1e-3, (now - began) / 100))  # late by at most a hundredth

    def bounded(self, function: Callable[[], Any], library: str) -> Any:
        """What `function` returns, which waits for ranks without end: it runs in a thread.
        RankError as from `until`, and for an error of the `library` that it calls."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # handed to the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.until(lambda: not thread.is_alive())
        if errors:
            raise self.blame(errors[0], library) from errors[0]
        return results[0]

    def blame(self, error: BaseException, library: str) -> RankError:
        """Whose fault an error of a library is: a connection breaks before its process is seen to
        end."""
        for _ in range(50):
            self.listen()
            time.sleep(0.02)
        return RankError(f"rank {self.rank}: {library} says {error}")
