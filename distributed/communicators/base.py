"""The interface of communicators: `Communicator`, with bounded waits, and `RankError`.

A communicator has two operations: an allgather of small Python values, and a shift, in which each
rank sends arrays to the rank that is `distance` further on. mpi.py implements both by mpi4py, and
infonce/torch/core/process_group.py by torch.distributed. A caller may pass another subclass of
`Communicator` as `comm`.

No rank waits for ever:

- A rank that raises an error tells the other ranks, which raise a `RankError`. Over MPI, a rank
  that ends between calls tells them too.
- If a rank is killed, the ranks that see its process notice it within 0.05 s of waiting
  (processes.py: `Peers.gone`, which mpi.py: `MPIRanks.listen` asks), and tell the other ranks.
- If a rank hangs, the other ranks raise a `RankError` after the timeout, which names the rank that
  hangs: after half of the timeout, waiting ranks announce that they wait (`announce_wait`), and the
  rank that hangs announces nothing.
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
# distance -> (arrays sent to rank + distance, arrays received from rank - distance)
Shifts = Mapping[int, tuple[Sequence[Array], Sequence[Array]]]
TIMEOUT = 300.0  # seconds: the default of the argument `timeout`
# bytes for the pickled value in a message of an allgather; most values fit. The message has 2 KiB,
# because the length of the value takes 8 bytes
SHORT_VALUE = 2040
LISTEN_INTERVAL = 0.05  # seconds between calls of `listen`
BUSY_WAIT = 5e-3  # seconds of waiting before the first sleep; most waits end earlier
DEVICE_BUSY_WAIT = 50e-3  # `BUSY_WAIT` for a device: a processor is slow after a sleep


# lets other processes and threads run on this core
_yield_core: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


class RankError(RuntimeError):
    """Another rank failed, ended, or did not respond in time: the call cannot be completed."""


def describe_failure(rank: int, error: BaseException) -> str:
    """What `rank`, which leaves a call with `error`, tells the other ranks. A RankError names the
    rank at fault already."""
    return str(error) if isinstance(error, RankError) else f"rank {rank} failed: {describe(error)}"


def describe(error: BaseException) -> str:
    """The type and the message of an error."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


class Pending(Protocol):
    """A shift or an exchange that has been started."""

    def wait(self) -> None:
        """Return when sent arrays may be overwritten and received arrays may be read.

        A transport of GPU arrays may return earlier. Then only work that the caller queues on the
        stream afterwards may overwrite the sent arrays and read the received arrays.
        """
        ...


class Communicator:
    """The ranks that share a batch. Subclasses implement `allgather` and `shift`.

    Attributes
    ----------
    rank, size : int
    timeout : float or None
        Seconds that a rank waits for others before `RankError`; set by each call of a loss.
    over_mpi : bool
        Whether MPI carries `exchange`, which then takes GPU arrays if MPI is CUDA-aware.
    peers : Peers or None
        The processes of the ranks, if they are known.
    last_schedule : RankSchedule or None
        The schedule of the last call of the ranks, which the next call often has again.
    waited, moving : float
        Seconds that this rank has waited for shifts, and seconds that shifts were under way, both
        since the start. mpi.py counts them, and benchmarks/ranks/step.py reads them.
    """

    rank: int
    size: int
    timeout: float | None = TIMEOUT
    over_mpi: bool = False
    peers: Peers | None = None
    last_schedule: Any = None
    waited: float = 0.0
    moving: float = 0.0

    def allgather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in the order of the ranks. The largest are the rows of a
        small batch (whole_batch.py)."""
        raise NotImplementedError

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        """Start to send arrays to rank + distance (mod size), and to receive arrays from rank -
        distance into `receive`.

        Arrays are C-contiguous NumPy arrays (with a CUDA-aware library, CuPy arrays) of any dtype.
        They are sent as bytes. Shifts complete in the order of their start.
        """
        raise NotImplementedError

    def exchange(self, shifts: Shifts) -> Pending:
        """Start shifts by several distances. All ranks pass the same distances.

        With all distances, this is an all-gather or an all-to-all of shards of any sizes.
        """
        return AllPending([self.shift(*arrays, distance) for distance, arrays in shifts.items()])

    def listen(self) -> None:
        """Raise RankError if another rank is known to have failed.

        `until` calls this every `LISTEN_INTERVAL` seconds while it waits.
        """

    def announce_wait(self) -> None:
        """Tell the other ranks that this rank waits. `until` calls this after half of the timeout.

        The method does nothing in a communicator whose ranks cannot tell this.
        """

    def find_waiting_ranks(self) -> set[int] | None:
        """The ranks that have announced that they wait in the step of this rank. None: the ranks of
        this communicator cannot tell."""
        return None

    def name_silent_ranks(self) -> str:
        """Words for a `RankError`: the ranks that have not announced that they wait."""
        waiting = self.find_waiting_ranks()
        if waiting is None:
            return "another rank"
        silent = [f"rank {r}" for r in range(self.size) if r not in {self.rank, *waiting}]
        return ", ".join(silent) or "ranks that wait too"

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank leaves a call with `error`."""

    def free(self) -> None:
        """Free transports of GPUs, with their memory. All ranks call this after the last call."""
        for transport in self.__dict__.pop("gpu_transports", {}).values():
            transport.free()

    def until(
        self, done: Callable[[], bool], busy_wait: float = BUSY_WAIT,
        block: Callable[[float], object] | None = None,
    ) -> None:  # fmt: skip
        """Wait until `done()` is true. RankError if another rank fails, or after the timeout.

        In the first `busy_wait` seconds the thread does not sleep. Then it calls `block`, which
        waits until `done()` may be true, or for so many seconds. Without `block`, it sleeps.
        """
        began = now = time.monotonic()
        next_listen, has_announced = began + LISTEN_INTERVAL, False
        while not done():
            now = time.monotonic()
            if now >= next_listen:
                self.listen()
                next_listen = now + LISTEN_INTERVAL
            if self.timeout is not None and now - began > self.timeout / 2 and not has_announced:
                self.announce_wait()
                has_announced = True
            if self.timeout is not None and now - began > self.timeout:
                self.listen()
                raise RankError(
                    f"rank {self.rank} waited {self.timeout:g} s for {self.name_silent_ranks()}; "
                    "a rank may have stopped, or not called the same loss (timeout= sets the limit)"
                )
            if now - began < busy_wait:
                _yield_core()
            elif block is not None:
                block(LISTEN_INTERVAL)
            else:
                time.sleep(min(1e-3, (now - began) / 100))  # a hundredth of the wait so far

    def bounded(self, function: Callable[[], Any], library: str) -> Any:
        """The result of `function`, whose own wait for other ranks may have no limit.

        `function` runs in a daemon thread, so that the caller can stop to wait for it. The thread
        is abandoned if this method raises an error: a RankError as in `until`. An error of
        `function` also becomes a RankError, which names `library`.
        """
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # handed to the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.until(lambda: not thread.is_alive(), 0.0, thread.join)
        if errors:
            raise self.blame(errors[0], library) from errors[0]
        return results[0]

    def blame(self, error: BaseException, library: str) -> RankError:
        """The RankError for an error of a library. It names a rank that has ended, if there is one.

        The method listens for a second, because a connection to a rank breaks before other ranks
        can know that the process of the rank has ended.
        """
        for _ in range(50):
            self.listen()
            time.sleep(0.02)
        return RankError(f"{library} failed on rank {self.rank}, and no rank said why: {error}")


def gather_values(value: Any, gather_bytes: Callable[[Array], Array]) -> list[Any]:
    """An allgather of picklable values, for `Communicator.allgather`.

    `gather_bytes` is an allgather of the same number of bytes from each rank: from [n] to
    [size, n]. A message is the length of a pickled value, in 8 bytes, and the value in `room`
    bytes. If the value of some rank needs more than `SHORT_VALUE` bytes, `gather_bytes` is called a
    second time, with room for the longest value.
    """
    pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    room, longest = 0, SHORT_VALUE
    while longest > room:
        room = longest
        own = len(pickled).to_bytes(8, "little") + pickled[:room].ljust(room, b"\0")
        # a bytearray, because a library may require memory that can be written
        messages = gather_bytes(np.frombuffer(bytearray(own), np.uint8)).tobytes()
        starts = range(8, len(messages), 8 + room)  # of the values
        longest = max([int.from_bytes(messages[at - 8 : at], "little") for at in starts])
    return [pickle.loads(messages[at : at + room]) for at in starts]


class AllPending:
    """Several pending operations as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self.parts = parts

    def wait(self) -> None:
        for part in self.parts:
            part.wait()
