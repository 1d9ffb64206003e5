"""NCCL between emulated devices of several processes, by MPI. Whoever does the work of a stream
waits in a transfer for the other ranks.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

from . import stream as streams

available = importlib.util.find_spec("mpi4py") is not None
Transfer = Callable[[Any], list[Any]]  # from a communicator of MPI to the requests that it starts

_group: list[tuple[NcclCommunicator, Transfer, int]] | None = (
    None  # between groupStart and groupEnd
)


def get_version() -> int:
    return 22809


def get_unique_id() -> tuple[int, ...]:
    return (0,)


def groupStart() -> None:
    global _group
    assert _group is None
    _group = []


def groupEnd() -> None:
    global _group
    assert _group is not None
    queued, _group = _group, None
    if not queued:
        return
    (communicator,), (stream,) = ({each[place] for each in queued} for place in (0, 2))
    communicator._queue([transfer for _, transfer, _ in queued], stream)


def _bytes(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


class NcclCommunicator:
    """All ranks of MPI."""

    def __init__(self, size: int, unique_id: tuple[int, ...], rank: int) -> None:
        from mpi4py import MPI

        assert (size, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
        self.ranks = MPI.COMM_WORLD.Dup()

    def _queue(self, transfers: list[Transfer], stream: int) -> None:
        def run() -> None:
            from mpi4py import MPI

            started = [transfer(self.ranks) for transfer in transfers]
            MPI.Request.Waitall([request for requests in started for request in requests])

        streams.submit(stream, run)

    def _add(self, transfer: Transfer, stream: int) -> None:
        if _group is None:
            self._queue([transfer], stream)
        else:
            _group.append((self, transfer, stream))

    def send(self, address: int, count: int, dtype: int, rank: int, stream: int) -> None:
        self._add(lambda ranks: [ranks.Isend(_bytes(address, count), rank)], stream)

    def recv(self, address: int, count: int, dtype: int, rank: int, stream: int) -> None:
        self._add(lambda ranks: [ranks.Irecv(_bytes(address, count), rank)], stream)

    def allGather(self, sent: int, received: int, count: int, dtype: int, stream: int) -> None:
        def gather(ranks: Any) -> list[Any]:
            own = bytes(_bytes(sent, count))  # which may lie where they are received
            return [ranks.Iallgather(own, _bytes(received, count * ranks.size))]

        self._add(gather, stream)

    def abort(self) -> None: ...

    def destroy(self) -> None:
        self.ranks.Free()
