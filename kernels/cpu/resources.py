"""Products and their threads, and temporary memory, which later calls reuse."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..problem import Array, Problem

# --- products and their threads -------------------------------------------------------------------


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


# A product of at most SINGLE multiply-adds has one thread: a thread of BLAS waits busily for its
# part, and on a busy machine a second thread may wait for milliseconds. A larger product has a
# thread for each SHARE: more take longer than fewer (benchmarks/NOTES.md)
SINGLE, SHARE = 2**22, 2**19
ALWAYS_SINGLE = 2**18  # OpenBLAS computes products of at most that many in one thread by itself


class _Blas(Guarded):
    """NumPy's BLAS, whose threads compute the products of a call.

    The number of threads of a product follows from its size alone, and from the number that the
    caller lets BLAS use: so the bits of a call do not change from run to run. For a product that
    gets fewer threads, the number is set in the library, and then set back. Other products of this
    library wait meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._functions: tuple[Callable[[], int], Callable[[int], Any]] | None = None
        self._limit: int | None = None  # of the caller, while a product has fewer threads

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """np.matmul of two matrices, in the number of threads that its size is worth."""
        multiply_adds = left.size * right.shape[1]
        if multiply_adds <= ALWAYS_SINGLE:
            return np.matmul(left, right, out=out)
        get, set_to = self._functions or self._find()
        with self._lock:
            limit = get()
            wanted = 1 if multiply_adds <= SINGLE else multiply_adds // SHARE
            most = thread_limit()
            wanted = min(wanted, limit if most is None else most)
            if wanted == limit:
                return np.matmul(left, right, out=out)
            self._limit = limit
            set_to(wanted)
            try:
                return np.matmul(left, right, out=out)
            finally:
                set_to(limit)
                self._limit = None

    def threads(self) -> int:
        """The number of threads that the caller lets BLAS use."""
        with self._lock:
            return (self._functions or self._find())[0]()

    def _find(self) -> tuple[Callable[[], int], Callable[[int], Any]]:
        """The functions that get and set the number of threads of NumPy's BLAS.

        They are OpenBLAS's own functions, if these are found: those of threadpoolctl take longer,
        which small batches notice. Of several libraries, such as SciPy's, NumPy's is in its wheel.
        """
        libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        if not libraries:  # one that threadpoolctl does not know
            self._functions = (lambda: os.cpu_count() or 1), lambda threads: None
            return self._functions
        own = [b for b in libraries if "numpy" in (b.filepath or "")]
        library = (own or libraries)[0]
        self._functions = partial(getattr, library, "num_threads"), library.set_num_threads
        symbol = getattr(library, "_get_symbol", lambda name: None)
        if library.internal_api == "openblas" and library.threading_layer == "pthreads":
            get, set_to = symbol("openblas_get_num_threads"), symbol("openblas_set_num_threads")
            if get is not None and set_to is not None:
                self._functions = get, set_to
        return self._functions

    def _in_child(self) -> None:
        super()._in_child()
        # a product of another thread of the parent, which the child does not go on with
        if self._limit is not None and self._functions is not None:
            self._functions[1](self._limit)
            self._limit = None


BLAS = _Blas()


def thread_limit() -> int | None:
    """INFONCE_NUM_THREADS, the largest number of threads of a product; None if it is not set."""
    value = os.environ.get("INFONCE_NUM_THREADS", "")
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"INFONCE_NUM_THREADS: expected a positive integer, got {value!r}")
    return int(value)


def thread_count() -> int:
    """The largest number of threads of a product: INFONCE_NUM_THREADS if set, else BLAS's own."""
    return thread_limit() or BLAS.threads()


# --- threads of loops -----------------------------------------------------------------------------

# A loop over at least THREADED logits runs in half of the threads of BLAS, and in MOST_LOOPS at
# most: after a product, threads of BLAS wait busily on their cores (benchmarks/NOTES.md)
THREADED, MOST_LOOPS = 2**20, 4


class _Threads(Guarded):
    """Idle threads that help the threads of callers with loops."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: ThreadPoolExecutor | None = None

    def _in_child(self) -> None:
        super()._in_child()
        self._pool = None  # a child has no threads of its parent

    def submit(self, count: int, loop: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Futures of `count` calls of a loop; fewer at the exit of the process, which refuses."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST_LOOPS - 1, "infonce")
            pool = self._pool
        futures: list[Any] = []
        with contextlib.suppress(RuntimeError):
            futures.extend(pool.submit(loop, *arguments) for _ in range(count))
        return futures


THREADS = _Threads()


def run_loop(loop: Callable[..., Any], x: Array, *arguments: Any) -> None:
    """Run a compiled loop with a `counter` on the tile x, in several threads if that is faster.

    Each thread takes the next rows when it is done with earlier ones. So a thread that shares its
    core with another program takes fewer rows, and nobody waits for a thread that has not begun.
    """
    arguments = (x, *arguments, np.zeros(1, np.int64))
    threads = min(MOST_LOOPS, thread_count() // 2) if x.size >= THREADED else 1
    if threads <= 1:
        loop(*arguments)
        return
    futures = THREADS.submit(threads - 1, loop, arguments)
    try:
        loop(*arguments)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


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
