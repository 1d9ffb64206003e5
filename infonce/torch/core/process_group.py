"""A process group of torch.distributed as a communicator of `infonce.distributed`.

infonce's own NCCL transport sends arrays on GPUs, if NCCL is available. Otherwise they go through
pinned host memory. Gloo, which this module connects, sends host arrays and the small values of an
allgather.
"""

from __future__ import annotations

import contextlib
import datetime
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
        self._store: Any = None  # what the ranks of the duplicate tell each other by name
        self._failure: str | None = None  # what a rank has written to the store
        self._store_thread = threading.Thread()  # the last use of the store: see `_use_store`
        self.broken: str | None = None  # message of the error that ended this communicator
        self.peers = Peers()

    def _duplicate(self) -> None:
        """Connect the same processes once more."""
        # gloo wants a timeout. `bounded` ends a wait after `Communicator.timeout`
        never = datetime.timedelta(days=7)

        def connect_gloo() -> tuple[Any, Any]:
            # All ranks of a group know it by one name. `dist.new_group` would name the duplicate by
            # the number of this process's groups, which differs between ranks. A name comes again
            # if the caller destroys a group and makes another, so each rank counts its duplicates
            store = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"infonce/{self._name}", store)
            store = dist.PrefixStore(str(store.add(str(self.rank), 1)), store)
            return store, dist.ProcessGroupGloo(store, self.rank, self.size, never)

        self._store, self._gloo = self.bounded(connect_gloo, "gloo")
        self.peers = Peers(self.allgather(identity()))

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        if self.broken:
            raise RankError(f"this process group is out of step: {self.broken}")
        if self._gloo is None:
            self._duplicate()
        values: list[Any] = gather_values(value, self._gather)
        return values

    def _gather(self, own: Array) -> Array:
        """The bytes [size, room] of all ranks, from this rank's bytes `own` [room]."""
        gathered_bytes = torch.empty((self.size, len(own)), dtype=torch.uint8)
        work = self._gloo.allgather([list(gathered_bytes)], [torch.from_numpy(own)])
        self.until(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.blame(error, "gloo") from error
        return gathered_bytes.numpy()

    def shift(
        self, send: Sequence[Array], receive: Sequence[Array], distance: int = 1
    ) -> Pending:  # fmt: skip
        return self.exchange({distance: (send, receive)})

    def exchange(self, shifts: Shifts) -> Pending:
        gloo, works = self._gloo, []
        try:
            for distance, (_, receive) in shifts.items():
                source = (self.rank - distance) % self.size
                works += [
                    gloo.recv([_byte_tensor(array)], source, tag)
                    for tag, array in enumerate(receive)
                    if array.nbytes
                ]
            for distance, (send, _) in shifts.items():
                target = (self.rank + distance) % self.size
                works += [
                    gloo.send([_byte_tensor(array)], target, tag)
                    for tag, array in enumerate(send)
                    if array.nbytes
                ]
        except RuntimeError as error:  # a connection is broken already
            raise self.blame(error, "gloo") from error
        return _PendingExchange(self, works)

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

    def _use_store(self, function: Callable[[], Any], seconds: float) -> None:
        """Run `function`, and wait for it at most so long: the process of the store may hang."""

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process of the store may have ended
                function()

        if not self._store_thread.is_alive():
            self._store_thread = threading.Thread(target=run, daemon=True)
            self._store_thread.start()
        self._store_thread.join(seconds)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this rank leaves a call. Later calls of this communicator raise
        a RankError with the message of `error` (`broken`)."""
        if self.broken or self.size == 1:
            return
        self.broken = reason = describe_failure(self.rank, error)
        if self._store is not None:
            # the first reason stays: others follow from it
            self._use_store(lambda: self._store.compare_set("failed", "", reason), 1.0)
        # Close the connections, so that abandoned waits of other ranks end. The end of a backend
        # waits for its allgathers: a thread waits for it
        gloo, self._gloo = self._gloo, None
        threading.Thread(target=id, args=[gloo], daemon=True).start()


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
    """The started sends and receives of one `ProcessGroup.exchange`."""

    def __init__(self, ranks: ProcessGroup, works: list[Any]) -> None:
        self.ranks, self.works = ranks, works  # torch.distributed.Work: waits for one transfer

    def wait(self) -> None:
        self.ranks.bounded(lambda: [work.wait() for work in self.works], "gloo")


def _byte_tensor(array: Array) -> Any:
    """The bytes of an array as a tensor on the same memory; a copy if the array is read-only."""
    flat = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
