"""The base of drop-in replacements for other projects' losses.

It keeps settings as attributes, refuses settings that this library lacks, and shares a batch with
all processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ...checks import validation
from ...checks.keywords import torch_function
from ...spec import CLIP
from ..functions import require_known


class DropIn(nn.Module):
    """A loss with the settings of another project's loss, and options of `infonce.torch`.

    Settings are attributes, and may change between calls.
    """

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        module = ".".join(type(self).__module__.split(".")[:3])  # as users import it
        require_known(f"{module}.{type(self).__name__}()", options, torch_function(CLIP))
        self.options = options
        self._settings: tuple[str, ...] = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        settings = {**{name: getattr(self, name) for name in self._settings}, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def require(name: str, value: Any, expected: Any, instead: str) -> None:
    """ValueError if a setting has a value that this library lacks; `instead` says what to do."""
    plain = isinstance(value, (bool, int, float, str))
    if value is not expected and not (plain and value == expected):
        came = repr(value) if plain else validation.what(value)
        raise ValueError(f"{name}: expected {expected!r}, got {came}: {instead}")


def world(wanted: bool = True) -> Any:
    """The group of all processes; None if there is one process, or if it is not `wanted`."""
    if wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


def everywhere(wanted: bool = True) -> dict[str, Any]:
    """The keyword `group` that shares a batch with all processes; empty for a single process."""
    group = world(wanted)
    return {} if group is None else {"group": group}


def shard(group: Any, rows: int) -> tuple[int, int, int]:
    """The index of this process's first row in the batch, the rows and the processes of the batch.

    `rows` is the number of this process's rows. Without a group, there is one process.
    """
    if group is None:
        return 0, rows, 1
    ranks = group_ranks(group)
    sizes: list[int] = ranks.allgather(rows)
    return sum(sizes[: ranks.rank]), sum(sizes), ranks.size


def first_row(group: Any, rows: int) -> int:
    """The index of this process's first row in the batch of all processes."""
    return shard(group, rows)[0]


def mean_over_ranks(losses: Tensor, group: Any) -> Tensor:
    """The mean of all processes' row losses, whose gradients DDP averages to those of the mean.

    `losses` of a function over processes need ``gradient_scale="global"``.
    """
    if group is None:
        return losses.mean()
    ranks = group_ranks(group)
    sums, sizes = zip(*ranks.allgather((float(losses.sum()), len(losses))), strict=True)
    share = losses.sum() * (ranks.size / sum(sizes))
    return share + (sum(sums) / sum(sizes) - share.detach())


@torch.no_grad()
def gather_rows(rows: Tensor, group: Any) -> list[Tensor]:
    """The rows of each process, without a gradient. All processes need the same number of rows."""
    sizes = group_ranks(group).allgather(len(rows))
    if len(set(sizes)) > 1:
        raise ValueError(f"rows: expected as many on all processes that gather them, got {sizes}")
    out = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in sizes]
    dist.all_gather(out, rows.contiguous(), group)
    return out


def group_ranks(group: Any) -> Any:
    """The communicator of a process group."""
    from . import process_group

    return process_group.connect(group)
