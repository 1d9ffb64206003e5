"""Threads and memory of the CPU backend, both reused by later calls; how much memory is free."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..grid import Grid
from ..problem import SILENT, Array, Problem

NO_CONTEXT = contextlib.nullcontext()
ONE_THREAD = 2**18  # multiply-adds of a product: OpenBLAS itself uses one thread for no more

# --- threads --------------------------------------------------------------------------------------


class Guarded:
    """State that threads share, under a lock. A fork waits for the thread that holds the lock, so
    that no other thread is changing the state that the child copies. The child gets a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._in_child,
            )

    def _in_child(self) -> None:
        """In a forked child, whose only thread is the one that called fork."""
        self._lock = threading.RLock()


class _Blas(Guarded):
    """Makes BLAS single-threaded while any fold runs, and restores the caller's setting after."""

    def __init__(self) -> None:
        super().__init__()
        self._users: list[int] = []  # threads that run folds
        self._libraries: list[Any] | None = None
        self._before: list[int] = []  # threads of each library before the first fold
        self._only_openblas = False  # known from the first fold on

    def threads(self) -> int:
        """How many threads the caller lets BLAS use: that many workers start."""
        with self._lock:
            blas = self._before if self._users else self._numbers()
            cores = (
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            )
            return int(max(1, min([cores or 1, *blas])))

    def _numbers(self) -> list[int]:
        """Threads of each library."""
        if self._libraries is None:
            self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            self._only_openblas = {b.internal_api for b in self._libraries} <= {"openblas"}
        return [library.num_threads for library in self._libraries]

    def single_threaded(self, multiply_adds: float = math.inf) -> Any:
        """A context, for products of so many multiply-adds. (One made by contextlib would take time
        that small batches notice.)"""
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
        for library, number, before in zip(
            self._libraries or [], threads, self._before, strict=True
        ):
            if before == 1:  # and stays so
                continue
            # From threadpoolctl 3.8 on, OpenBLAS heeds the first thread that sets a number until
            # this is called. Folds begin and end in any thread.
            heed_any = getattr(library, "clear_controlling_thread", lambda force: None)
            heed_any(force=True)
            library.set_num_threads(number)
            heed_any(force=True)

    def _in_child(self) -> None:
        super()._in_child()
        folds = bool(self._users)
        self._users = [thread for thread in self._users if thread == threading.get_ident()]
        if folds and not self._users:
            self._set(self._before)


BLAS = _Blas()


def thread_count() -> int:
    """Worker threads: INFONCE_NUM_THREADS, else what BLAS may use on this process's cores."""
    asked = os.environ.get("INFONCE_NUM_THREADS", "")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise ValueError(f"INFONCE_NUM_THREADS: expected a positive integer, got {asked!r}")
        return int(asked)
    return BLAS.threads()


class Cancelled(Exception):
    """Another worker failed or the caller interrupted."""


class PanelOrder:
    """Makes workers add to a column block in the order of the panels that visit it, or `backwards`
    (never a gradient fold); counts finished blocks."""

    def __init__(self, grid: Grid, backwards: bool = False) -> None:
        self.done = 0
        self.cancelled = False
        self.backwards = backwards
        # by column block: the panels that have not added to it, the next one last
        self._panels: list[list[int]] = [[] for _ in grid.columns]
        panels = range(len(grid.rows))
        for a in panels if backwards else reversed(panels):
            for b in grid.visits(a):
                self._panels[b].append(a)
        self._condition = threading.Condition()

    def wait(self, panel: int, column: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.cancelled or self._panels[column][-1] == panel)
            if self.cancelled:
                raise Cancelled

    def advance(self, panel: int, column: int) -> None:
        with self._condition:
            self._panels[column].remove(panel)
            self.done += 1
            self._condition.notify_all()

    def cancel(self) -> None:
        with self._condition:
            self.cancelled = True
            self._condition.notify_all()


class _Pools(Guarded):
    """Idle worker threads of earlier calls. New threads share a core until the system moves them,
    and that takes longer than a small batch.

    Nothing here ends them: at exit, a hook of concurrent.futures tells its threads to end, and
    waits for them. They are no daemons, which could be inside BLAS when its memory goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: dict[int, list[ThreadPoolExecutor]] = {}  # by their number of threads

    def _in_child(self) -> None:
        super()._in_child()
        self._idle = {}  # a child has no threads of its parent

    @contextmanager
    def borrow(self, threads: int) -> Iterator[ThreadPoolExecutor]:
        """An executor of so many threads, for this call alone."""
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
    order: PanelOrder,
    report: Callable[[], None],
) -> None:
    """Run `work` in each of `threads` threads; a failure in one stops the others."""

    def guarded() -> None:
        try:
            with np.errstate(**SILENT):
                work(lambda: None)
        except BaseException:
            order.cancel()  # else others would wait for this panel for ever
            raise

    with POOLS.borrow(threads) as pool:
        futures: list[Future[None]] = []
        try:
            for _ in range(threads):
                try:
                    futures.append(pool.submit(guarded))
                except RuntimeError as refusal:
                    if "new futures" not in str(refusal):  # but a thread that cannot start
                        raise
                    break  # at exit, concurrent.futures takes no more work
            if not futures:
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
    errors = [f.exception() for f in futures if f.exception() is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, Cancelled)):
        assert error is not None
        raise error


# --- memory ---------------------------------------------------------------------------------------


LEAST_POOLED = 2**16  # bytes; smaller arrays are in memory that is mapped already


class BufferPool(Guarded):
    """Temporary memory of earlier calls, for reuse: the system has mapped its pages already.
    (Mapping fresh pages takes as long as a tenth of the products computed in them.)"""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit  # bytes kept at most
        self._buffers: list[Array] = []

    def take(self, elements: int, dtype: np.dtype[Any]) -> Array:
        """[elements], uninitialised. In one piece, which the system can map in large pages."""
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
        """Return an array of `take` to the pool; the caller must not use it any more."""
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
    """Bytes that can be allocated without swapping (0: unknown)."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def require_memory(problem: Problem, needed: int) -> None:
    """MemoryError where so many bytes are not free."""
    room = available_memory()
    if room and needed > room:
        m, n, _ = problem.shape
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes, of which {room} '
            "are free"
        )
