"""A process group of torch.distributed as a communicator of `infonce.distributed`.

infonce's own NCCL transport sends arrays on GPUs, if NCCL is available. Otherwise they go through
pinned host memory. Gloo, which this module connects, sends host arrays and the small values of an
allgather.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from infonce import distributed
from infonce.distributed import Communicator, RankError
from infonce.distributed.communicators.base import (
    LISTEN_INTERVAL,
    Pending,
    Shifts,
    describe_failure,
    gather_values,
)
from infonce.distributed.communicators.processes import Peers, identity

from ...result import LossAndGrad
from ...spec import Loss

Array = Any
# process group -> its communicator, so that one duplicate of the group serves all calls
_communicators: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()


def connect(group: Any = None) -> ProcessGroup:
    """The communicator of a process group; None: of all processes."""
    if isinstance(group, ProcessGroup):
        return group
    if not dist.is_available():
        raise RuntimeError("group: this build of torch has no torch.distributed")
    if not dist.is_initialized():
        raise RuntimeError(
            "group: expected torch.distributed to be initialised: call "
            "torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group, got {type(group).__name__} {group!r}")
    if group not in _communicators:
        _communicators[group] = ProcessGroup(group)
    return _communicators[group]


class ProcessGroup(Communicator):
    """A communicator on a duplicate of a process group, so that the caller's messages and those of
    the losses do not mix.

    The first allgather makes the duplicate, within the timeout of an allgather. A rank that fails
    writes the reason to the store of torch.distributed, where waiting ranks look for it.
    """

    peers: Peers  # the processes of the ranks, of which `listen` asks whether they have ended

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._name = group.group_name
        self._gloo: Any = None  # the duplicate: a gloo backend of the same processes
        self._board: Any = None  # shared memory, if all ranks are on one node
        self._store: Any = None  # what the ranks of the duplicate tell each other by name
        self._failure: str | None = None  # what a rank has written to the store
        self._store_thread = threading.Thread()  # the last use of the store: see `_use_store`
        self.allgather_count = 0  # ranks that wait announce it: see `announce_wait`
        self.broken: str | None = None  # message of the error that ended this communicator
        self.peers = Peers()

    def _duplicate(self) -> None:
        """Connect the same processes once more."""
        # gloo wants a timeout. `until` ends a wait after `Communicator.timeout`
        never = datetime.timedelta(days=7)

        def connect_gloo() -> Any:
            # All ranks of a group know it by one name. `dist.new_group` would name the duplicate by
            # the number of this process's groups, which differs between ranks. A name comes again
            # if the caller destroys a group and makes another, so each rank counts its duplicates
            store = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"infonce/{self._name}", store)
            self._store = dist.PrefixStore(str(store.add(str(self.rank), 1)), store)
            return dist.ProcessGroupGloo(self._store, self.rank, self.size, never)

        self._gloo = self.bounded(connect_gloo, "gloo")
        self.peers = Peers(self.allgather(identity()))
        if sys.platform == "linux":
            from infonce.distributed.communicators import board

            self._board = board.connect(self)

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        if self.broken:
            raise RankError(f"this process group is out of step: {self.broken}")
        if self._gloo is None:
            self._duplicate()
        self.allgather_count += 1
        if self._board is not None:
            messages = self._board.allgather(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            if messages is not None:
                return list(map(pickle.loads, messages))
        return gather_values(value, self._gather)

    def _gather(self, own: Array) -> Array:
        """The bytes [size, room] of all ranks, from this rank's bytes `own` [room]."""
        sizes = [len(own)] * self.size
        messages = torch.from_numpy(own).repeat(self.size)  # the same to each rank
        received = torch.empty_like(messages)
        self.wait_for(self.send_to_all(messages, sizes, received, sizes))
        return received.numpy().reshape(self.size, -1)

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        return self.exchange({distance: (send, receive)})

    def exchange(self, shifts: Shifts) -> Pending:
        # by rank, the arrays that are sent to it and received from it
        send: list[Sequence[Array]] = [()] * self.size
        receive: list[Sequence[Array]] = [()] * self.size
        for distance, (to_send, to_receive) in shifts.items():
            send[(self.rank + distance) % self.size] = to_send
            receive[(self.rank - distance) % self.size] = to_receive
        return _PendingExchange(self, send, receive)

    def send_to_all(
        self, send: Any, send_sizes: list[int], receive: Any, receive_sizes: list[int]
    ) -> Any:  # fmt: skip
        """Start to send bytes to each rank, and to receive bytes from each, one after the other in
        tensors of bytes. Sizes are by rank. Returns what `wait_for` waits for."""
        try:
            return self._gloo.alltoall_base(receive, send, receive_sizes, send_sizes)
        except RuntimeError as error:  # a connection is broken already
            raise self.blame(error, "gloo") from error

    def wait_for(self, work: Any) -> None:
        """Wait for what `send_to_all` has started."""

        def block(seconds: float) -> None:
            with contextlib.suppress(RuntimeError):  # not yet; or an error, which comes below
                work.wait(datetime.timedelta(seconds=seconds))

        self.until(work.is_completed, 0.0, block)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.blame(error, "gloo") from error

    def listen(self) -> None:
        if self._store is None:
            return
        gone = self.peers.gone()
        # a rank that is gone may have written its reason before: read after `gone()`
        self._use_store(self._read_failure, 1.0 if gone else LISTEN_INTERVAL)
        for message in [self._failure, *gone.values()]:
            if message is not None:
                raise RankError(message)

    def _read_failure(self) -> None:
        if self._store.check(["failed"]):
            self._failure = self._store.get("failed").decode()

    def announce_wait(self) -> None:
        # a name for each step, because a step of which a rank has announced its wait may end
        self._use_store(lambda: self._store.set(self._wait_name(self.rank), ""), 1.0)

    def find_waiting_ranks(self) -> set[int] | None:
        waiting: set[int] = set()

        def read() -> None:
            waiting.update(r for r in range(self.size) if self._store.check([self._wait_name(r)]))

        self._use_store(read, 1.0)
        return waiting

    def _wait_name(self, rank: int) -> str:
        """The name in the store by which `rank` tells that it waits in the current step."""
        return f"rank {rank} waits after {self.allgather_count} allgathers"

    def _use_store(self, function: Callable[[], Any], seconds: float) -> None:
        """Run `function`, and wait for it at most so long: the process of the store may hang."""

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process of the store may have ended
                function()

        if self._store_thread.is_alive():
            self._store_thread.join(seconds)
        if self._store is None or self._store_thread.is_alive():
            return
        self._store_thread = threading.Thread(target=run, daemon=True)
        self._store_thread.start()
        self._store_thread.join(seconds)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this rank leaves a call. Later calls of this communicator raise
        a RankError with the message of `error` (`broken`)."""
        if self.broken or self.size == 1:
            return
        self.broken = reason = describe_failure(self.rank, error)
        # the first reason stays: others follow from it
        self._use_store(lambda: self._store.compare_set("failed", "", reason), 1.0)
        # Close the connections, so that abandoned waits of other ranks end. The end of a backend
        # waits for its messages, so a thread drops it: the list has the only reference
        backends, self._gloo = [self._gloo], None
        threading.Thread(target=backends.clear, daemon=True).start()


def loss_and_grad(
    kind: Loss, features: Sequence[Any], labels: Any, bias: Any, group: Any, options: dict[str, Any]
) -> LossAndGrad:
    """Loss and gradients by `infonce.distributed` over a process group.

    By default feature gradients are multiplied by the number of ranks, because DDP averages over
    ranks (``gradient_scale="ddp"``).
    """
    function = getattr(distributed, f"{kind.name}_loss_and_grad")
    arguments: dict[str, Any] = dict(zip(kind.arguments, features, strict=True))
    if labels is not None:
        arguments["labels"] = labels
    if kind.sigmoid:
        arguments["bias"] = bias
    out: LossAndGrad
    out = function(**arguments, **{"gradient_scale": "ddp", **options}, comm=connect(group))
    return out


class _PendingExchange:
    """A started exchange: by rank, the arrays sent to it and received from it."""

    def __init__(
        self, ranks: ProcessGroup, send: list[Sequence[Array]], receive: list[Sequence[Array]]
    ) -> None:
        self.ranks = ranks
        self.arrays = [array for arrays in receive for array in arrays]
        send_sizes, receive_sizes = (
            [sum(array.nbytes for array in arrays) for arrays in each] for each in (send, receive)
        )
        # one message for each rank: arrays one after the other
        sent = [_flat_bytes(array) for arrays in send for array in arrays]
        message = np.concatenate(sent) if sent else np.empty(0, np.uint8)
        self.received = np.empty(sum(receive_sizes), np.uint8)
        self.work = ranks.send_to_all(
            torch.from_numpy(message), send_sizes, torch.from_numpy(self.received), receive_sizes
        )

    def wait(self) -> None:
        self.ranks.wait_for(self.work)
        first = 0
        for array in self.arrays:
            _flat_bytes(array)[:] = self.received[first : first + array.nbytes]
            first += array.nbytes


def _flat_bytes(array: Array) -> Array:
    """The bytes [array.nbytes] of a contiguous array, in the same memory."""
    return array.reshape(-1).view(np.uint8)
