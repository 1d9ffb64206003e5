"""A process group of torch.distributed as a communicator of `infonce.distributed`.

infonce's own NCCL transport sends arrays on GPUs, if NCCL is available. Otherwise they go through
pinned host memory. A gloo group, which this module makes, sends host arrays and the small values of
an allgather.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from infonce import distributed
from infonce.distributed import Communicator, RankError
from infonce.distributed.communicators.base import Pending, Shifts, gather_values
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

    The first allgather makes the duplicate, within the timeout of an allgather.
    """

    peers: Peers  # the processes of the ranks, of which `listen` asks whether they have ended

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._members = dist.get_process_group_ranks(group)  # global rank of each rank of the group
        self._group: Any = None  # the duplicate
        self.broken: str | None = None  # message of the error that ended this communicator
        self.peers = Peers()

    def _duplicate(self) -> None:
        """Make a gloo group of the same processes."""
        # gloo wants a timeout. `bounded` ends a wait after `Communicator.timeout`
        never = datetime.timedelta(days=7)
        self._group = self.bounded(
            lambda: dist.new_group(self._members, never, "gloo", use_local_synchronization=True),
            "gloo",
        )
        self.peers = Peers(self.allgather(identity()))

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        if self.broken:
            raise RankError(f"this process group is out of step: {self.broken}")
        if self._group is None:
            self._duplicate()
        values: list[Any] = gather_values(value, self._gather)
        return values

    def _gather(self, own: Array) -> Array:
        """The bytes [size, room] of all ranks, from this rank's bytes `own` [room]."""
        gathered_bytes = torch.empty((self.size, len(own)), dtype=torch.uint8)
        work = dist.all_gather(
            list(gathered_bytes), torch.from_numpy(own), self._group, async_op=True
        )  # fmt: skip
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
        works = []
        for distance, (_, receive) in shifts.items():
            source = self._members[(self.rank - distance) % self.size]
            works += [
                dist.irecv(_byte_tensor(array), source, self._group, tag)
                for tag, array in enumerate(receive)
                if array.nbytes
            ]
        for distance, (send, _) in shifts.items():
            target = self._members[(self.rank + distance) % self.size]
            works += [
                dist.isend(_byte_tensor(array), target, self._group, tag)
                for tag, array in enumerate(send)
                if array.nbytes
            ]
        return _PendingExchange(self, works)

    def listen(self) -> None:
        for message in self.peers.gone().values():
            raise RankError(message)

    def fail(self, error: BaseException) -> None:
        """Destroy the group: other ranks see the connection close. Later calls of this communicator
        raise a RankError with the message of `error` (`broken`)."""
        if not self.broken:
            self.broken = str(error)
            if self._group is not None:
                dist.destroy_process_group(self._group)


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
