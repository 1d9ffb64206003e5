"""An allgather among processes of one node, through memory that they share.

Each process posts its bytes in its own part of the memory, and reads those of the others. No thread
and no library takes part, so a message takes microseconds. Each part has two slots for bytes, which
allgathers use in turns: a process that posts its next bytes has read all bytes of the allgather
before, and others may still read those of this one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from .base import Communicator

SLOTS = 2
SLOT_BYTES = 2**18  # of one value; longer ones do not fit
LINE_BYTES = 64  # of the numbers of one process, so that no two processes write to one cache line


class Board:
    """The shared memory of `size` processes, seen by the process `rank` of them."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap) -> None:
        self.rank = rank
        bytes_ = np.frombuffer(memory, np.uint8)
        parts = bytes_[LINE_BYTES * size :].reshape(size, SLOTS, SLOT_BYTES)
        self.slots = [[memoryview(slot) for slot in part] for part in parts]
        numbers = bytes_[: LINE_BYTES * size].view(np.int64).reshape(size, -1)
        # for each process, the number of its allgathers so far, and the lengths of its two values
        self.counts, self.lengths = numbers[:, 0], numbers[:, 1 : 1 + SLOTS]
        self.count = 0
        self._lock = threading.Lock()

    def allgather(
        self, own: bytes, until: Callable[[Callable[[], bool]], None]
    ) -> list[bytes] | None:
        """The bytes of all processes; None if some process has more than a slot holds.

        `until` waits for a condition: see `Communicator.until`.
        """
        count = self.count = self.count + 1
        slot = count % SLOTS
        if len(own) <= SLOT_BYTES:
            self.slots[self.rank][slot][: len(own)] = own
        self.lengths[self.rank, slot] = len(own)
        self._order_memory()
        self.counts[self.rank] = count
        until(lambda: min(self.counts.tolist()) >= count)
        self._order_memory()
        lengths = self.lengths[:, slot].tolist()
        if max(lengths) > SLOT_BYTES:
            return None
        return [bytes(part[slot][:n]) for part, n in zip(self.slots, lengths, strict=True)]

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

    The memory belongs to no file: it ends with the processes. Each process opens it as an open file
    of rank 0, which takes processes of one machine and process namespace (`Peers.watched`).
    """
    memory: mmap.mmap | None = None
    size = ranks.size * (LINE_BYTES + SLOTS * SLOT_BYTES)
    with contextlib.ExitStack() as files:
        file = None
        if ranks.rank == 0 and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                file = os.memfd_create("infonce")
                files.callback(os.close, file)
                os.ftruncate(file, size)
        root_file = ranks.allgather(file)[0]
        assert ranks.peers is not None
        if root_file is not None and len(ranks.peers.watched) == ranks.size - 1:
            with contextlib.suppress(OSError, ValueError):
                if file is None:
                    path = f"/proc/{ranks.peers.processes[0].pid}/fd/{root_file}"
                    file = os.open(path, os.O_RDWR)
                    files.callback(os.close, file)
                memory = mmap.mmap(file, size)
        all_share = all(ranks.allgather(memory is not None))
    return Board(ranks.rank, ranks.size, memory) if all_share and memory is not None else None
