"""A communicator whose ranks are threads of one process: `infonce.distributed` without MPI."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infonce.distributed import Communicator, RankError

Array = Any


@dataclass
class Shift:
    """One message: its sender, the times of sending and receiving, its bytes."""

    rank: int
    posted: float
    bytes: int
    received: float = 0.0


@dataclass
class World:
    """State that the ranks share."""

    size: int
    values: list[Any] = field(init=False)
    # by sender and receiver; made before the threads start, which would each make their own
    inboxes: dict[tuple[int, int], queue.Queue[tuple[Shift, list[Array]]]] = field(init=False)
    barrier: threading.Barrier = field(init=False)
    shifts: list[Shift] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [None] * self.size
        pairs = itertools.product(range(self.size), range(self.size))
        self.inboxes = {pair: queue.Queue() for pair in pairs}
        self.barrier = threading.Barrier(self.size)


class Rank(Communicator):
    """One rank, on one thread."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def allgather(self, value: Any) -> list[Any]:
        self._meet()  # until all ranks have read the values of the last allgather
        self.world.values[self.rank] = value
        self._meet()
        return list(self.world.values)

    def _meet(self) -> None:
        try:
            self.world.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise RankError(f"rank {self.rank}: another rank failed") from None

    def shift(self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1) -> Arrival:
        shift = Shift(self.rank, time.perf_counter(), sum(array.nbytes for array in send))
        self.world.shifts.append(shift)
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        self.world.inboxes[self.rank, to].put((shift, [np.array(array) for array in send]))
        return Arrival(self, source, receive)

    def fail(self, error: BaseException) -> None:
        """A call that raises on this rank calls it: ranks that wait in `_meet` raise, too."""
        self.world.barrier.abort()


@dataclass
class Arrival:
    """A pending receive."""

    rank: Rank
    source: int
    receive: Sequence[Array]

    def wait(self) -> None:
        try:
            inbox = self.rank.world.inboxes[self.source, self.rank.rank]
            shift, arrays = inbox.get(timeout=self.rank.timeout)
        except queue.Empty:
            raise RankError(f"rank {self.rank.rank}: nothing arrived") from None
        shift.received = time.perf_counter()
        for into, array in zip(self.receive, arrays, strict=True):
            into[...] = array


def run(size: int, function: Callable[[Rank], Any]) -> tuple[list[Any], World]:
    """`function(rank)` on `size` threads: (results in the order of the ranks, the shared state)."""
    world = World(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, [Rank(world, r) for r in range(size)])), world
