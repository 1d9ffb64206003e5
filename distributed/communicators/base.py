"""The interface of communicators: `Communicator`, with bounded waits, and `RankError`.

Two operations are needed: an allgather of small Python values, and a shift of arrays to a rank
further on. mpi.py has them for mpi4py's communicators; an instance of any other subclass of
`Communicator` can be passed as `comm`.

A rank that raises an error, or ends between calls, tells the others, which raise `RankError`. A
rank that is killed is noticed by the ranks of its host, which tell the others; a rank that hangs is
named after the timeout. So no rank waits for ever.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .processes import Peers

Array = Any
# By distance: arrays that go to rank + distance, and those that come from rank - distance
Shifts = Mapping[int, tuple[Sequence[Array], Sequence[Array]]]
TIMEOUT = 300.0  # seconds
SHORT = 2040  # bytes of most values that all ranks exchange
LISTEN = 0.05  # seconds between calls of `listen`
BUSY = 5e-3  # seconds of waiting before the first sleep: most waits are shorter than one
OF_DEVICE = 50e-3  # the same of waits for a device: a processor that has slept is slow for a while


# lets other processes of this core run, and other threads of this one
_yield: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


class RankError(RuntimeError):
    """Another rank failed, ended, or did not respond in time: the call cannot be completed."""


class Pending(Protocol):
    """A shift or an exchange that has been started."""

    def wait(self) -> None:
        """Return when sent arrays may be overwritten and received arrays may be read."""
        ...


class Communicator:
    """The ranks that share a batch. Subclasses implement `allgather` and `shift`.

    Attributes
    ----------
    rank, size : int
    timeout : float or None
        Seconds that a rank waits for others before `RankError`; set by each call of a loss.
    peers : Peers or None
        The processes of the ranks, where they are known.
    last_schedule : RankSchedule or None
        The schedule of their last call. The next call often has the same one.
    waited, moving : float
        Total seconds that this rank waited for shifts, and that shifts were in progress.
    """

    rank: int
    size: int
    timeout: float | None = TIMEOUT
    peers: Peers | None = None
    last_schedule: Any = None
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
        library, CuPy arrays) of any dtype, sent as bytes. Shifts complete in the order of their
        start."""
        raise NotImplementedError

    def exchange(self, shifts: Shifts) -> Pending:
        """Start shifts by several distances, the same on all ranks: an all-gather or an all-to-all
        of shards that differ in size."""
        return Together([self.shift(*of, distance) for distance, of in shifts.items()])

    def listen(self) -> None:
        """Raise RankError if another rank is known to have failed. Called while waiting."""

    def overdue(self) -> None:
        """Called after half of the timeout: tell the others that this rank is alive and waits."""

    def silent(self) -> str:
        """The ranks that have not told that they are alive, as `RankError` names them."""
        return "another rank"

    def fail(self, error: BaseException) -> None:
        """Called when this rank leaves a call with `error`: tell the others."""

    def free(self) -> None:
        """Free what the ranks keep from call to call: transports of GPUs, with their memory. Called
        on all ranks, after the last call."""
        for transport in self.__dict__.pop("gpu_transports", {}).values():
            transport.free()

    def until(self, done: Callable[[], bool], busy: float = BUSY) -> None:
        """Wait for `done()`; RankError if a rank fails meanwhile, or after the timeout. The first
        `busy` seconds are waited without sleep."""
        began = now = time.monotonic()
        look, overdue = began + LISTEN, False
        while not done():
            now = time.monotonic()
            if now >= look:
                self.listen()
                look = now + LISTEN
            if self.timeout is not None and now - began > self.timeout / 2 and not overdue:
                self.overdue()
                overdue = True
            if self.timeout is not None and now - began > self.timeout:
                self.listen()
                raise RankError(
                    f"rank {self.rank} waited {self.timeout:g} s for {self.silent()}; a rank may "
                    "have stopped, or not called the same loss (timeout= sets the limit)"
                )
            if now - began < busy:
                _yield()
            else:
                time.sleep(min(1e-3, (now - began) / 100))  # a hundredth of the wait so far

    def bounded(self, function: Callable[[], Any], library: str) -> Any:
        """Run `function`, which waits for ranks without a limit, in a thread and return its result.
        RankError as from `until`, and for any error, as one of the `library` that it calls."""
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
        """The RankError for an error of a library: of a rank that has ended, where one is found. A
        broken connection is seen before the end of the process: `listen` for a second."""
        for _ in range(50):
            self.listen()
            time.sleep(0.02)
        return RankError(f"rank {self.rank}: {library} says {error}")


def gathered(value: Any, gather: Callable[[Array], Array]) -> list[Any]:
    """An allgather of values, by one of bytes: `gather` takes [room] of them and returns [size,
    room]. Values that are longer than most take it twice."""
    message = pickle.dumps(value)
    room, longest = 0, SHORT
    while longest > room:
        room = longest
        own = len(message).to_bytes(8, "little") + message[:room].ljust(room, b"\0")
        everyone = gather(np.frombuffer(bytearray(own), np.uint8)).tobytes()  # it may be written
        starts = range(8, len(everyone), 8 + room)
        longest = max([int.from_bytes(everyone[at - 8 : at], "little") for at in starts])
    return [pickle.loads(everyone[at : at + room]) for at in starts]


class Together:
    """Several operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self.parts = parts

    def wait(self) -> None:
        for part in self.parts:
            part.wait()
