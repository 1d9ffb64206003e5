"""The communicator of MPI, through mpi4py.

Arrays and values travel as data messages. Control messages tell the other ranks that this rank has
failed, has ended or waits. The top of base.py lists how a rank that fails, ends or hangs is found.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .base import (
    Array,
    Communicator,
    Pending,
    RankError,
    Shifts,
    describe,
    describe_failure,
    gather_values,
)
from .processes import Peers, identity

FAILED, ENDED, WAITING = "failed", "ended", "waiting"  # kinds of control messages
MOST_MESSAGE_BYTES = 2**30  # all MPI libraries take messages below 2 GiB
CONTROL_TAG = 7  # MPI's tag of all control messages
END_TIMEOUT = 5.0  # seconds that a process waits at its end for other ranks, after an error


def load_mpi() -> Any:
    """mpi4py's MPI; ImportError says what to install."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"mpi4py cannot be imported ({error}): pip install 'infonce-kernels[mpi]'"
        ) from (None)
    except RuntimeError as error:  # mpi4py is installed, but no MPI library
        raise ImportError(
            f"mpi4py finds no MPI library ({error}): pip install 'infonce-kernels[mpi]' brings one"
        ) from None
    return MPI


def is_started() -> bool:
    """Whether this process has started MPI. MPI may be loaded, but not started."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and bool(MPI.Is_initialized())


_attribute: Any = None  # the key of the MPI attribute that stores the MPIRanks of a communicator


def connect(comm: Any = None) -> Communicator:
    """The Communicator for `comm`, which is an mpi4py communicator, or None for all ranks.

    A `Communicator` is returned as it is.
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
    if not is_started():  # else MPI would end the process
        raise RuntimeError(
            "MPI is not started, because mpi4py.rc.initialize was False (`infonce info` sets it): "
            "call mpi4py.MPI.Init_thread()"
        )
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise ValueError("comm: expected an intra-communicator that this rank is part of")
    if _attribute is None:
        # At its end, MPI deletes the attributes of COMM_WORLD too. Ranks may not send then, so
        # `free`, which sends, is not called
        _attribute = MPI.Comm.Create_keyval(
            delete_fn=lambda comm, key, ranks: comm == MPI.COMM_WORLD or ranks.free()
        )
    ranks = comm.Get_attr(_attribute)
    if ranks is None:
        ranks = MPIRanks(MPI, comm)
        comm.Set_attr(_attribute, ranks)
    adapter: Communicator = ranks
    return adapter


class MPIRanks(Communicator):
    """The ranks of an mpi4py communicator.

    Messages use two duplicates of the communicator, so that they do not mix with messages of the
    caller. The first allgather makes the duplicates, within the timeout of the call.
    """

    over_mpi = True
    peers: Peers

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.MPI, self._comm = MPI, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.broken: str | None = None  # message of the error that ended this communicator
        self.peers = Peers()
        # Allgathers so far; control messages carry the sender's count. ENDED from before this
        # rank's current allgather is an error. WAITING counts only for the current allgather
        self.allgather_count = 0
        self._process = os.getpid()  # a forked process is no rank
        self._data: Any = None  # the duplicate for data messages
        self._control: Any = None  # the duplicate for control messages
        # rank -> its `allgather_count` at its end, reason of its end
        self._ended: dict[int, tuple[int, str]] = {}
        self._waiting: dict[int, int] = {}  # rank -> its `allgather_count` when it sent WAITING
        self._sent: list[Any] = []  # control messages that are being sent
        self._active: list[_PendingExchange] = []  # exchanges that the background thread advances
        self._active_changed = threading.Condition()
        self._worker: threading.Thread | None = None  # the background thread
        self._open = True  # until `free`
        # whether a background thread advances exchanges; if not, only `wait` advances them
        self._may_use_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        atexit.register(self._leave)

    def _duplicate_both(self) -> None:
        """Duplicate the communicator, for data and for control messages; learn the processes."""
        self._data = self._duplicate()
        self._control = self._duplicate()
        self.peers = Peers(self.allgather(identity()))

    def _duplicate(self) -> Any:
        duplicate, request = self._comm.Idup()
        self._complete(request, duplicate)
        duplicate.Set_errhandler(self.MPI.ERRORS_RETURN)  # mpi4py raises errors that MPI returns
        return duplicate

    def free(self) -> None:
        """Free the duplicates. MPI calls this on all ranks when the caller frees the communicator
        (`delete_fn` in `connect`)."""
        atexit.unregister(self._leave)
        if self._data is None or self.broken:
            return
        super().free()
        with self._active_changed:
            self._open = False
            self._active_changed.notify()
        if self._worker is not None:
            self._worker.join()
        self._data.Free()
        self._control.Free()
        self._data = self._control = None

    # -- data

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        if self.broken:
            raise RankError(f"this communicator is out of step: {self.broken}")
        if self._data is None:
            self._duplicate_both()
        self.allgather_count += 1
        return gather_values(value, self._gather_bytes)

    def _gather_bytes(self, own: Array) -> Array:
        """The bytes [size, n] of all ranks, from this rank's bytes `own` [n]."""
        all_bytes = np.empty((self.size, len(own)), np.uint8)
        self._complete(self._data.Iallgather(own, all_bytes), own, all_bytes)
        return all_bytes

    def _complete(self, request: Any, *buffers: Any) -> None:
        """Wait for a collective operation on these buffers. An error breaks the communicator."""
        try:
            self.until(lambda: bool(self._call_mpi(request.Test)))
        except BaseException as error:
            _abandoned.append((request, buffers))
            self.fail(error)
            raise

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        return self.exchange({distance: (send, receive)})

    def exchange(self, shifts: Shifts) -> Pending:
        byte, requests = self.MPI.BYTE, []
        for distance, (_, receive) in shifts.items():
            source = (self.rank - distance) % self.size
            requests += [
                self._data.Irecv([piece, byte], source, tag)
                for tag, array in enumerate(receive)
                for piece in _split_into_messages(array)
            ]
        for distance, (send, _) in shifts.items():
            target = (self.rank + distance) % self.size
            requests += [
                self._data.Isend([piece, byte], target, tag)
                for tag, array in enumerate(send)
                for piece in _split_into_messages(array)
            ]
        exchange = _PendingExchange(self, requests, shifts)
        if self._may_use_threads and requests:
            self._advance_in_background(exchange)
        return exchange

    def _advance_in_background(self, exchange: _PendingExchange) -> None:
        """Let a thread call MPI until the exchange is complete.

        MPI transfers large messages only while a thread is inside one of its functions.
        """
        with self._active_changed:
            self._active.append(exchange)
            if self._worker is None:
                self._worker = threading.Thread(target=self._advance, daemon=True)
                self._worker.start()
            self._active_changed.notify()

    def _advance(self) -> None:
        """The background thread: test the active exchanges every millisecond, until `free`."""
        while True:
            with self._active_changed:
                self._active_changed.wait_for(lambda: self._active or not self._open)
                if not self._open:
                    return
                active = list(self._active)
            for exchange in active:
                if exchange.done():
                    with self._active_changed:
                        if exchange in self._active:
                            self._active.remove(exchange)
            time.sleep(1e-3)

    def _call_mpi(self, function: Callable[[], Any]) -> Any:
        """The result of an MPI function. An error of MPI becomes a RankError."""
        try:
            return function()
        except self.MPI.Exception as error:
            raise self.blame(error, "MPI") from None

    # -- control messages

    def listen(self) -> None:
        if self._control is None:
            return
        gone = self.peers.gone()
        # A rank that is gone may have sent its reason before: read messages after `gone()`
        with contextlib.suppress(self.MPI.Exception):  # MPI's errors about a rank that is gone
            self._read_messages()
        for r, (last_allgather, reason) in self._ended.items():
            gone.pop(r, None)
            # a rank that ended after the current allgather has sent all that this rank waits for
            if last_allgather < self.allgather_count:
                raise RankError(reason)
        for message in gone.values():
            raise RankError(message)

    def _read_messages(self) -> None:
        """Read the control messages that have arrived. RankError if one is FAILED."""
        status = self.MPI.Status()
        while self._control.Iprobe(tag=CONTROL_TAG, status=status):
            message = bytearray(status.Get_count(self.MPI.BYTE))
            source = status.Get_source()
            self._control.Recv([message, self.MPI.BYTE], source, CONTROL_TAG)
            kind, their_allgather_count, text = pickle.loads(message)
            if kind == FAILED:
                raise RankError(text)
            if kind == ENDED:
                self._ended[source] = their_allgather_count, text
            else:
                self._waiting[source] = their_allgather_count

    def _send_to_all(self, kind: str, text: str = "") -> None:
        """Send a control message of a kind (FAILED, ENDED, WAITING) to all other ranks."""
        if self._control is None:
            return
        message = bytearray(pickle.dumps((kind, self.allgather_count, text)))
        for r in range(self.size):
            if r != self.rank:
                with contextlib.suppress(self.MPI.Exception):  # the rank may be gone
                    request = self._control.Isend([message, self.MPI.BYTE], r, CONTROL_TAG)
                    self._sent.append((request, message))
        with contextlib.suppress(self.MPI.Exception):
            self._sent = [s for s in self._sent if not s[0].Test()]

    def announce_wait(self) -> None:
        self._send_to_all(WAITING)

    def find_waiting_ranks(self) -> set[int] | None:
        if self._control is None and self.size > 2:
            return None  # no rank can announce its wait before the duplicates are made
        return {r for r, count in self._waiting.items() if count == self.allgather_count}

    def fail(self, error: BaseException) -> None:
        if self.broken or self.size == 1:
            return
        self.broken = describe_failure(self.rank, error)
        with self._active_changed:
            unfinished, self._active = self._active, []
        _abandoned.extend(unfinished)
        self._send_to_all(FAILED, self.broken)

    def _leave(self) -> None:
        """Tell the other ranks that this process ends; runs at the exit of the process.

        After an error of the communicator, wait in a barrier for the other ranks to end too. After
        `END_TIMEOUT`, or if a rank has ended already (so that it is not in the barrier), abort all
        ranks that still run.
        """
        if self.size == 1 or self.MPI.Is_finalized() or os.getpid() != self._process:
            return
        if not self.broken:
            error = getattr(sys, "last_value", None)  # the exception that ends the process
            reason = f"rank {self.rank} has ended"
            if error is not None:
                reason += f": {describe(error)}"
            self._send_to_all(ENDED, reason)
            return
        try:
            request = None if self._control is None else self._control.Ibarrier()
            deadline = time.monotonic() + END_TIMEOUT
            while time.monotonic() < deadline:
                if request is not None and request.Test():
                    return
                if self._ended or self.peers.gone():
                    time.sleep(2.0)  # the other ranks print their errors meanwhile
                    break
                time.sleep(0.01)
        except self.MPI.Exception:
            pass
        sys.stdout.flush()
        sys.stderr.flush()
        (self._control or self._comm).Abort(1)


# Operations that may never complete. MPI may still write to their buffers, so they are not freed
_abandoned: list[Any] = []


class _PendingExchange:
    """The requests of one exchange, which the background thread and the caller both test."""

    def __init__(self, ranks: MPIRanks, requests: list[Any], buffers: Any) -> None:
        # `buffers` are kept alive, because MPI reads and writes them
        self.ranks, self.requests, self.buffers = ranks, requests, buffers
        self.finished = not requests
        self.error: BaseException | None = None
        self.began = time.perf_counter()
        self.lock = threading.Lock()

    def done(self) -> bool:
        """Whether the exchange is complete, or has failed."""
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
            raise self.ranks.blame(self.error, "MPI")


def _split_into_messages(array: Array) -> list[Array]:
    """The bytes of a contiguous array, as messages of at most `MOST_MESSAGE_BYTES`."""
    if array.nbytes == 0:
        return []
    flat, step = array.reshape(-1).view(np.uint8), MOST_MESSAGE_BYTES
    return [flat[i : i + step] for i in range(0, flat.size, step)]
