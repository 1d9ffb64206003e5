"""An allgather among processes of one node, through memory that they share.

Each process posts its bytes in its own part of the memory, and reads those of the others. No other
thread takes part, so a message takes microseconds. Each part has two slots for bytes, which
allgathers use in turns: a process that posts its next bytes has read all bytes of the allgather
before, and others may still read those of this one.

A process that waits asks for the bytes again and again, as long as no other process wants its core.
On a crowded machine it sleeps. Each process has a pipe, by which the others wake it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import threading
import time
import weakref

import numpy as np

from .base import BUSY_WAIT, Communicator

SLOTS = 2
SLOT_BYTES = 2**18  # of one value; longer ones do not fit
LINE_BYTES = 64  # of the numbers of one process, so that no two processes write to one cache line
CROWDED = 1.0  # seconds without busy waits after the system has taken the core from this thread


class Board:
    """The shared memory of all ranks, which are processes of one node.

    `pipes` are files: by rank, the end of its pipe where the others write; of this rank, where it
    reads.
    """

    def __init__(self, ranks: Communicator, memory: mmap.mmap, pipes: list[int]) -> None:
        self.ranks, self.pipes = ranks, pipes
        size = ranks.size
        shared = np.frombuffer(memory, np.uint8)
        parts = shared[LINE_BYTES * size :].reshape(size, SLOTS, SLOT_BYTES)
        self.slots = [[memoryview(slot) for slot in part] for part in parts]
        numbers = shared[: LINE_BYTES * size].view(np.int64).reshape(size, -1)
        # by rank: the number of its allgathers so far, whether it sleeps, the lengths of its values
        self.counts, self.sleeps, self.lengths = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        self.count = 0
        self.poll = select.poll()
        self.poll.register(pipes[ranks.rank], select.POLLIN)
        self.switches = 0  # how often the system has taken the core from this thread
        self.crowded_until = 0.0  # `time.monotonic`
        self._lock = threading.Lock()

    def allgather(self, own: bytes) -> list[memoryview] | None:
        """The bytes of all ranks; None if some rank has more than a slot holds.

        The bytes stay until this rank begins the next allgather.
        """
        count = self.count = self.count + 1
        rank, slot = self.ranks.rank, count % SLOTS
        if len(own) <= SLOT_BYTES:
            self.slots[rank][slot][: len(own)] = own
        self.lengths[rank, slot] = len(own)
        self._order_memory()
        self.counts[rank] = count
        self._order_memory()
        for other, sleeps in enumerate(self.sleeps.tolist()):
            if sleeps and other != rank:
                with contextlib.suppress(OSError):  # it has ended, or has not read earlier words
                    os.write(self.pipes[other], b"!")
        if not self._is_complete():
            busy_wait = 0.0 if self._is_crowded() else BUSY_WAIT
            self.ranks.until(self._is_complete, busy_wait, self._sleep)
        self._order_memory()
        lengths = self.lengths[:, slot].tolist()
        if max(lengths) > SLOT_BYTES:
            return None
        return [part[slot][:n] for part, n in zip(self.slots, lengths, strict=True)]

    def _is_complete(self) -> bool:
        """Whether all ranks have posted their bytes of this rank's last allgather."""
        return bool(min(self.counts.tolist()) >= self.count)

    def _is_crowded(self) -> bool:
        """Whether other processes want the core of this thread."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        now = time.monotonic()
        if switches != self.switches:
            self.switches, self.crowded_until = switches, now + CROWDED
        return now < self.crowded_until

    def _sleep(self, seconds: float) -> None:
        """Sleep until another rank posts bytes, or for so many seconds."""
        self.sleeps[self.ranks.rank] = 1
        self._order_memory()
        if not self._is_complete() and self.poll.poll(1e3 * seconds):
            os.read(self.pipes[self.ranks.rank], 2**12)
        self.sleeps[self.ranks.rank] = 0

    def _order_memory(self) -> None:
        """Let no processor move accesses to memory from one side of this call to the other.

        A lock orders what comes after it is taken and what comes before it is released. So two
        locks in turn order all.
        """
        for _ in range(2):
            with self._lock:
                pass


def connect(ranks: Communicator) -> Board | None:
    """A board of all ranks, which call this together; None if they cannot share memory.

    The memory and the pipes have no names. Ranks open them as files of other ranks in /proc, which
    takes processes of one machine, process namespace and user.
    """
    assert ranks.peers is not None
    processes, watched = ranks.peers.processes, ranks.peers.watched
    board, files = None, contextlib.ExitStack()

    def keep(file: int) -> int:
        files.callback(os.close, file)
        return file

    memory_file, (pipe_out, pipe_in) = keep(os.memfd_create("infonce")), map(keep, os.pipe())
    size = ranks.size * (LINE_BYTES + SLOTS * SLOT_BYTES)
    os.ftruncate(memory_file, size)
    files_by_rank = ranks.allgather((memory_file, pipe_in))

    def open_file(rank: int, number: int, flags: int) -> int:
        """A file of another rank; `number`: its place in `files_by_rank`."""
        path = f"/proc/{processes[rank].pid}/fd/{files_by_rank[rank][number]}"
        return keep(os.open(path, flags))

    if len(watched) == ranks.size - 1:
        with contextlib.suppress(OSError):
            shared_file = memory_file if ranks.rank == 0 else open_file(0, 0, os.O_RDWR)
            pipes = [
                pipe_out if r == ranks.rank else open_file(r, 1, os.O_WRONLY | os.O_NONBLOCK)
                for r in range(ranks.size)
            ]
            board = Board(ranks, mmap.mmap(shared_file, size), pipes)
            weakref.finalize(board, files.close)
    if not all(ranks.allgather(board is not None)):
        files.close()
        return None
    return board
