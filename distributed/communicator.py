"""The ranks that share a batch: what the ring needs of them, over MPI, with bounded waits.

The ring asks little of a communicator (`Communicator`): small Python values from all ranks, and a
shift of arrays to the next rank. mpi4py's communicators are adapted here; anything else that
subclasses `Communicator` can be passed as `comm` as it is.

A rank that raises tells the others, which raise too. One that dies is noticed by the ranks of its
host; one that just stops is named when the time is out. So nobody waits for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Array = Any
TIMEOUT = 300.0  # seconds
FAILED, WAITING = "failed", "waiting"
PIECE = 2**30  # bytes of one message
SHORT = 2040  # bytes of most values that all ranks exchange
LISTEN = 0.05  # seconds between looks at the other ranks
BUSY = 5e-3  # seconds of waiting without sleep, which would last longer than most waits
CONTROL_TAG = 7


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


# --- MPI ------------------------------------------------------------------------------------------


def load_mpi() -> Any:
    """mpi4py's MPI, or what to install."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"mpi4py cannot be imported ({error}): pip install 'infonce[mpi]'") from (
            None
        )
    except RuntimeError as error:  # mpi4py is there, a library is not
        raise ImportError(
            f"mpi4py finds no MPI library ({error}): pip install 'infonce[mpi]' brings one"
        ) from None
    return MPI


_attribute: Any = None  # MPI's key under which a communicator keeps its adapter


def connect(comm: Any = None) -> Communicator:
    """`comm` as the ring wants it: None (all ranks), an mpi4py communicator, or a Communicator.

    Collective for an mpi4py communicator that was not used before.
    """
    global _attribute
    if isinstance(comm, Communicator):
        return comm
    if comm is not None and "mpi4py" not in sys.modules:
        raise TypeError(f"comm: expected an mpi4py communicator, got {type(comm).__name__}")
    MPI = load_mpi()
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm: expected an mpi4py communicator, got {type(comm).__name__}")
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise ValueError("comm: expected an intra-communicator that this rank is part of")
    if _attribute is None:
        _attribute = MPI.Comm.Create_keyval()
    ranks = comm.Get_attr(_attribute)
    if ranks is None:
        ranks = MPIRanks(MPI, comm)
        comm.Set_attr(_attribute, ranks)
    adapter: Communicator = ranks
    return adapter


class MPIRanks(Communicator):
    """An mpi4py communicator, duplicated: nothing here meets the caller's own messages.

    Of mpi4py it uses Idup, Iallgather, Isend, Irecv, Iprobe, Testall, Ibarrier and Abort.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.MPI = MPI
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.broken: str | None = None
        self.peers: list[Any] = []
        self.call = 0
        self._control: Any = None
        self._waiting: dict[int, int] = {}  # rank -> call in which it last said that it waits
        self._sent: list[Any] = []  # control messages under way
        self._active: list[_Shift] = []
        self._work = threading.Condition()
        self._worker: threading.Thread | None = None
        self._threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._data = self._duplicate(comm)
        self._control = self._duplicate(comm)
        self.peers = self.allgather(_identity())

    def _duplicate(self, comm: Any) -> Any:
        duplicate, request = comm.Idup()
        self.until(request.Test)
        duplicate.Set_errhandler(self.MPI.ERRORS_RETURN)  # mpi4py raises them
        return duplicate

    # -- data

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self.call += 1
        message = pickle.dumps(value)
        size = len(message)
        room, longest = 0, SHORT
        while longest > room:  # once, or where a message is long, twice
            room = longest
            own = np.zeros(8 + room, np.uint8)
            own[:8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
            own[8 : 8 + size] = np.frombuffer(message[:room], np.uint8)
            everyone = np.zeros((self.size, 8 + room), np.uint8)
            self._collective(own, everyone)
            sizes = [int.from_bytes(row[:8].tobytes(), "little") for row in everyone]
            longest = max(sizes)
        return [
            pickle.loads(row[8 : 8 + n].tobytes()) for row, n in zip(everyone, sizes, strict=True)
        ]

    def _collective(self, send: Array, receive: Array) -> None:
        if self.broken:
            raise RankError(f"this communicator is out of step: {self.broken}")
        request = self._data.Iallgather(send, receive)
        self.until(lambda: bool(self._checked(request.Test)))

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        left, right = (self.rank - distance) % self.size, (self.rank + distance) % self.size
        byte = self.MPI.BYTE
        requests = [
            self._data.Irecv([piece, byte], left, tag)
            for tag, array in enumerate(receive)
            for piece in _pieces(array)
        ]
        requests += [
            self._data.Isend([piece, byte], right, tag)
            for tag, array in enumerate(send)
            for piece in _pieces(array)
        ]
        shift = _Shift(self, requests, (list(send), list(receive)))
        if self._threads and requests:
            self._advance_in_background(shift)
        return shift

    def _advance_in_background(self, shift: _Shift) -> None:
        """MPI moves large messages only while it is called: a thread does that during products."""
        with self._work:
            self._active.append(shift)
            if self._worker is None:
                self._worker = threading.Thread(target=self._advance, daemon=True)
                self._worker.start()
            self._work.notify()

    def _advance(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._active)
                active = list(self._active)
            for shift in active:
                if shift.done():
                    with self._work:
                        if shift in self._active:
                            self._active.remove(shift)
            time.sleep(1e-3)

    def _checked(self, call: Callable[[], Any]) -> Any:
        """An MPI call; its error as one of the ranks."""
        try:
            return call()
        except self.MPI.Exception as error:
            raise self.blame(error) from None

    def blame(self, error: BaseException) -> RankError:
        """Whose fault an error of MPI is: a connection breaks before its process is seen to end."""
        for _ in range(50):
            self.listen()
            time.sleep(0.02)
        return RankError(f"rank {self.rank}: MPI says {error}")

    # -- signs of life

    def listen(self) -> None:
        if self._control is None:
            return
        with contextlib.suppress(self.MPI.Exception):  # of a rank that is gone, as will be seen
            self._hear()
        for r, peer in enumerate(self.peers):
            if r != self.rank and _gone(peer):
                with contextlib.suppress(self.MPI.Exception):  # it may have left a message
                    self._hear()
                raise RankError(f"rank {r} (process {peer[2]} on {peer[0]}) is gone")

    def _hear(self) -> None:
        status = self.MPI.Status()
        while self._control.Iprobe(tag=CONTROL_TAG, status=status):
            message = bytearray(status.Get_count(self.MPI.BYTE))
            source = status.Get_source()
            self._control.Recv([message, self.MPI.BYTE], source, CONTROL_TAG)
            what, call, text = pickle.loads(message)
            if what == FAILED:
                raise RankError(text)
            self._waiting[source] = call

    def _tell(self, what: str, text: str = "") -> None:
        message = bytearray(pickle.dumps((what, self.call, text)))
        for r in range(self.size):
            if r != self.rank:
                request = self._control.Isend([message, self.MPI.BYTE], r, CONTROL_TAG)
                self._sent.append((request, message))
        self._sent = [s for s in self._sent if not s[0].Test()]

    def overdue(self) -> None:
        if self._control is not None:
            self._tell(WAITING)

    def silent(self) -> str:
        quiet = [
            f"rank {r}" for r in range(self.size)
            if r != self.rank and self._waiting.get(r) != self.call
        ]  # fmt: skip
        return ", ".join(quiet) if quiet else "ranks that wait too"

    def fail(self, error: BaseException) -> None:
        if self.broken or self.size == 1:
            return
        self.broken = str(error)
        if not isinstance(error, RankError):
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            self.broken = f"rank {self.rank} failed: {what}"
        with self._work:
            left, self._active = self._active, []
        _abandoned.extend(left)
        with contextlib.suppress(self.MPI.Exception):  # there may be nobody left to tell
            self._tell(FAILED, self.broken)
        atexit.register(self._leave)

    def _leave(self) -> None:
        """At the end of a process whose ranks are out of step: finish together, or end them all."""
        try:
            request, patience = self._control.Ibarrier(), time.monotonic() + 5.0
            while time.monotonic() < patience:
                if request.Test():
                    return
                if any(_gone(p) for r, p in enumerate(self.peers) if r != self.rank):
                    time.sleep(2.0)  # let the others say their error
                    break
                time.sleep(0.01)
        except self.MPI.Exception:
            pass
        sys.stdout.flush()
        sys.stderr.flush()
        self._control.Abort(1)


_abandoned: list[Any] = []  # shifts that will never complete: their buffers must outlive them


class _Shift:
    """Requests of one shift; the background thread and the caller both look at them."""

    def __init__(self, ranks: MPIRanks, requests: list[Any], buffers: Any) -> None:
        self.ranks, self.requests, self.buffers = ranks, requests, buffers
        self.finished = not requests
        self.error: BaseException | None = None
        self.began = time.perf_counter()
        self.lock = threading.Lock()

    def done(self) -> bool:
        """Whether it is complete, or failed."""
        with self.lock:
            if not self.finished:
                try:
                    self.finished = self.ranks.MPI.Request.Testall(self.requests)
                except self.ranks.MPI.Exception as error:
                    self.error, self.finished = error, True
                if self.finished:
                    self.ranks.moving += time.perf_counter() - self.began
        return self.finished

    def wait(self) -> None:
        began = time.perf_counter()
        try:
            self.ranks.until(self.done)
        except BaseException:
            _abandoned.append(self)
            raise
        self.ranks.waited += time.perf_counter() - began
        if self.error is not None:
            raise self.ranks.blame(self.error)


def _pieces(array: Array) -> list[Array]:
    """The bytes of a contiguous array, in messages of a size that every library takes."""
    if array.nbytes == 0:
        return []
    flat = array.reshape(-1).view(np.uint8)
    return [flat[i : i + PIECE] for i in range(0, flat.size, PIECE)]


def _identity() -> tuple[str, str, int, str]:
    """(host, process namespace, process, when it started): by which others see it is alive."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return socket.gethostname(), space, os.getpid(), _started(os.getpid()) or ""


def _started(process: int) -> str | None:
    """When a process started; None if there is none, "" where the system does not tell."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_here = _identity()[:2]


def _gone(peer: tuple[str, str, int, str]) -> bool:
    """Whether a rank of this host has ended."""
    host, space, process, started = peer
    return (host, space) == _here and started != "" and _started(process) != started
