"""Threads and temporary memory of the CPU backend, which later calls reuse."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..grid import Grid
from ..problem import SILENT, Array, Problem

NO_CONTEXT = contextlib.nullcontext()
ONE_THREAD = 2**18  # OpenBLAS computes a product of at most that many multiply-adds in one thread

# --- threads --------------------------------------------------------------------------------------


class Guarded:
    """State that threads share, under a lock.

    `os.fork` takes the lock first, so that no thread changes the state while the child copies it.
    The child gets a new lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._in_child,
            )

    def _in_child(self) -> None:
        """Adapt the state to a forked child, which has one thread."""
        self._lock = threading.RLock()


def _thread_functions(library: Any) -> tuple[Callable[[], int], Callable[[int], Any]]:
    """The functions that get and set the number of threads of a BLAS library.

    They are OpenBLAS's own functions, if these are found. The functions of threadpoolctl take
    longer, which small batches notice. From version 3.8 on, only the first thread that sets a
    number by threadpoolctl can change it: numbers of other threads are ignored while that thread
    is alive.
    """
    symbol = getattr(library, "_get_symbol", lambda name: None)
    if library.internal_api == "openblas" and library.threading_layer == "pthreads":
        get, set_to = symbol("openblas_get_num_threads"), symbol("openblas_set_num_threads")
        if get is not None and set_to is not None:
            return get, set_to
    return partial(getattr, library, "num_threads"), library.set_num_threads


class _Blas(Guarded):
    """Makes BLAS single-threaded while any pass runs, because the workers of a pass are threads
    already, and then restores the caller's setting."""

    def __init__(self) -> None:
        super().__init__()
        self._users: list[int] = []  # identifiers of the threads that run passes
        self._functions: list[tuple[Callable[[], int], Callable[[int], Any]]] | None = None
        self._before: list[int] = []  # number of threads of each library before the passes
        self._only_openblas = False  # set when the libraries are first looked up

    def threads(self) -> int:
        """The number of workers to start, at least 1: the smallest of the number of cores of this
        process and, for each BLAS library, the number of threads that the caller lets it use."""
        with self._lock:
            # while a pass runs, BLAS has 1 thread: take the numbers from before the pass
            blas = self._before if self._users else self._numbers()
            cores = (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            )
            return int(max(1, min([cores or 1, *blas])))

    def _numbers(self) -> list[int]:
        """The number of threads of each BLAS library."""
        if self._functions is None:
            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            self._only_openblas = {b.internal_api for b in libraries} <= {"openblas"}
            self._functions = [_thread_functions(library) for library in libraries]
        return [number() for number, _ in self._functions]

    def single_threaded(self, multiply_adds: float = math.inf) -> Any:
        """A context in which a product of `multiply_adds` is computed in one thread.

        The context does nothing if the product has one thread in any case. Contexts made by
        contextlib take longer, which small batches notice.
        """
        return NO_CONTEXT if self._only_openblas and multiply_adds <= ONE_THREAD else self

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = self._numbers()
                self._set([1] * len(self._before))
            self._users.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users.remove(threading.get_ident())
            if not self._users:
                self._set(self._before)

    def _set(self, threads: list[int]) -> None:
        for (_, set_number), number, before in zip(
            self._functions or [], threads, self._before, strict=True
        ):
            if before != 1:  # a library that had one thread needs no change
                set_number(number)

    def _in_child(self) -> None:
        super()._in_child()
        # Only the thread that forked goes on in the child: only its passes are still running
        had_users = bool(self._users)
        self._users = [thread for thread in self._users if thread == threading.get_ident()]
        if had_users and not self._users:
            self._set(self._before)


BLAS = _Blas()


def thread_count() -> int:
    """The number of worker threads: INFONCE_NUM_THREADS, if set. Otherwise the smallest of the
    number of cores of this process and the numbers of threads that BLAS libraries may use."""
    value = os.environ.get("INFONCE_NUM_THREADS", "")
    if value:
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"INFONCE_NUM_THREADS: expected a positive integer, got {value!r}")
        return int(value)
    return BLAS.threads()


class Cancelled(Exception):
    """Another worker has failed, or the caller has interrupted the call."""


class RowBlockOrder:
    """The order in which workers add to a column block: the order of the row blocks that visit it.

    Workers add to the rows of dK, or to the sums, of a column block one at a time, in the order of
    their row blocks. So the bits do not depend on which worker is first. Workers take row blocks in
    the same order, so the row block that the others wait for is always under way.

    `backwards`: in the reverse order, which only a log-sum-exp pass has (`CPU.run_pass`). `done`
    counts the blocks that workers have finished, for `Problem.progress`.
    """

    def __init__(self, grid: Grid, backwards: bool = False) -> None:
        self.done = 0
        self.cancelled = False
        self.backwards = backwards
        # for each column block: the row blocks that have not added, of which the last is next
        self._row_blocks: list[list[int]] = [[] for _ in grid.columns]
        row_blocks = range(len(grid.rows))
        for a in row_blocks if backwards else reversed(row_blocks):
            for b in grid.visits(a):
                self._row_blocks[b].append(a)
        self._condition = threading.Condition()

    def wait(self, row_block: int, column: int) -> None:
        """Wait until it is the turn of `row_block` to add to column block `column`."""
        with self._condition:
            self._condition.wait_for(
                lambda: self.cancelled or self._row_blocks[column][-1] == row_block
            )
            if self.cancelled:
                raise Cancelled

    def advance(self, row_block: int, column: int) -> None:
        """Let the next row block add to column block `column`."""
        with self._condition:
            # `row_block` may be anywhere in the list: workers that add nothing to columns advance
            # without `wait`
            self._row_blocks[column].remove(row_block)
            self.done += 1
            self._condition.notify_all()

    def cancel(self) -> None:
        """Stop all workers: each raises `Cancelled` at its next wait or next tile
        (`Worker.run_row_block`)."""
        with self._condition:
            self.cancelled = True
            self._condition.notify_all()


class _Pools(Guarded):
    """Idle worker threads of earlier calls.

    A new thread may start on a core that another thread uses. Before the system moves the new
    thread, a small batch would be complete. So calls reuse threads. At exit, a hook of
    concurrent.futures ends the threads and waits for them.
    Daemon threads would not be waited for, and could be inside BLAS when its memory is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: dict[int, list[ThreadPoolExecutor]] = {}  # by the number of threads

    def _in_child(self) -> None:
        super()._in_child()
        self._idle = {}  # a child has no threads of its parent

    @contextmanager
    def borrow(self, threads: int) -> Iterator[ThreadPoolExecutor]:
        """An executor of so many threads, which no other call uses meanwhile."""
        with self._lock:
            idle = self._idle.setdefault(threads, [])
            pool = idle.pop() if idle else ThreadPoolExecutor(threads, "infonce")
        try:
            yield pool
        finally:
            with self._lock:
                self._idle.setdefault(threads, []).append(pool)


POOLS = _Pools()


def in_threads(
    work: Callable[[Callable[[], None]], None],
    threads: int,
    order: RowBlockOrder,
    report: Callable[[], None],
) -> None:
    """Run `work` in each of `threads` threads. If one fails, the others stop.

    The calling thread calls `report` after each wait of at most 0.1 seconds. `work` gets a function
    that does nothing, so that no other thread calls `report`, which calls the caller's `progress`.
    """

    def guarded() -> None:
        try:
            with np.errstate(**SILENT):
                work(lambda: None)
        except BaseException:
            order.cancel()  # otherwise other workers would wait for this row block for ever
            raise

    with POOLS.borrow(threads) as pool:
        futures: list[Future[None]] = []
        try:
            for _ in range(threads):
                try:
                    futures.append(pool.submit(guarded))
                except RuntimeError as refusal:
                    if "new futures" not in str(refusal):  # a thread cannot start
                        raise
                    break  # at exit, concurrent.futures refuses new work: fewer threads do it all
            if not futures:  # this thread does it all
                guarded()
            pending = set(futures)
            while pending:
                _, pending = wait(pending, 0.1, FIRST_EXCEPTION)
                report()  # in the caller's thread
        except BaseException:  # Ctrl-C, or a progress callback that raises
            order.cancel()
            raise
        finally:
            wait(futures)
    # Raise the error of the thread that failed. The other threads raised `Cancelled` because
    # of this error, so `Cancelled` is sorted to the end
    errors = [f.exception() for f in futures if f.exception() is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, Cancelled)):
        assert error is not None
        raise error


# --- memory ---------------------------------------------------------------------------------------


LEAST_POOLED = 2**16  # bytes; the system has mapped the memory of smaller arrays already


class BufferPool(Guarded):
    """Temporary memory of earlier calls, which later calls reuse.

    The system has mapped its pages already. To map new pages takes as long as a tenth of the
    products that are computed in them.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit  # largest number of bytes that the pool keeps
        self._buffers: list[Array] = []

    def take(self, elements: int, dtype: np.dtype[Any]) -> Array:
        """An uninitialised array of `elements` elements.

        A caller takes all its memory as one array, which the system can map in large pages.
        """
        size = elements * dtype.itemsize
        if size < LEAST_POOLED:
            return np.empty(elements, dtype)
        with self._lock:
            fitting = [b for b in self._buffers if size <= b.nbytes <= 2 * size]
            if fitting:
                best = min(fitting, key=lambda b: b.nbytes)
                self._buffers = [b for b in self._buffers if b is not best]
                return best[:size].view(dtype)
        return np.empty(size, np.uint8).view(dtype)

    def clear(self) -> None:
        with self._lock:
            self._buffers = []

    def give(self, array: Array) -> None:
        """Return an array of `take` to the pool. The caller may not use the array any more."""
        if array.nbytes < LEAST_POOLED:
            return
        owner = array
        while owner.base is not None:
            owner = owner.base
        with self._lock:
            self._buffers.append(owner)
            while sum(b.nbytes for b in self._buffers) > self.limit:
                del self._buffers[0]


BUFFER_POOL = BufferPool(256 * 2**20)


def available_memory() -> int:
    """Bytes that can be allocated without swapping; 0 if this is not known."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def require_memory(problem: Problem, needed: int) -> None:
    """For the method naive: MemoryError if `needed` bytes are not free."""
    room = available_memory()
    if room and needed > room:
        m, n, _ = problem.shape
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
