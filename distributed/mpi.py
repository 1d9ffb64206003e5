"""mpi4py's communicators, as the ring wants them."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .communicator import Array, Communicator, Pending, RankError
from .processes import _gone, _identity

FAILED, WAITING = "failed", "waiting"
PIECE = 2**30  # bytes of one message
SHORT = 2040  # bytes of most values that all ranks exchange
CONTROL_TAG = 7


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
