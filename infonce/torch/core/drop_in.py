"""The base class of drop-in replacements for other projects' losses, and their helper functions.

The functions refuse settings that this library lacks, and share a batch over processes.
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

    Settings are attributes of the same names, which users may change between calls.
    """

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        module = ".".join(type(self).__module__.split(".")[:3])  # infonce.torch.X, as users import
        require_known(f"{module}.{type(self).__name__}()", options, torch_function(CLIP))
        self.options = options
        self._settings: tuple[str, ...] = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        settings = {**{name: getattr(self, name) for name in self._settings}, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def require(name: str, value: Any, expected: Any, instead: str) -> None:
    """ValueError unless the setting `name` has its only supported value, `expected`.

    `instead` ends the message, and says why, or what to do.
    """
    plain = isinstance(value, (bool, int, float, str))
    if value is not expected and not (plain and value == expected):
        came = repr(value) if plain else validation.what(value)
        raise ValueError(f"{name}: expected {expected!r}, got {came}: {instead}")


def world_group(shared: bool = True) -> Any:
    """The group of all processes; None if the batch is not `shared`, or if there is one process."""
    if shared and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


def world_group_option(shared: bool = True) -> dict[str, Any]:
    """The keyword `group` of a loss, with the group of `world_group`; empty if this is None."""
    group = world_group(shared)
    return {} if group is None else {"group": group}


def locate_shard(group: Any, rows: int) -> tuple[int, int, int]:
    """(index of this process's first row in the batch, rows of the batch, number of processes).

    `rows` is the number of this process's rows. None as `group`: this process alone. Otherwise all
    processes have to call this function, which is an allgather.
    """
    if group is None:
        return 0, rows, 1
    ranks = connect_group(group)
    sizes: list[int] = ranks.allgather(rows)
    return sum(sizes[: ranks.rank]), sum(sizes), ranks.size


def first_row(group: Any, rows: int) -> int:
    """The index of this process's first row in the batch of all processes."""
    return locate_shard(group, rows)[0]


def mean_over_ranks(losses: Tensor, group: Any) -> Tensor:
    """The mean of the row losses of all processes.

    DDP's average of its gradients is the gradient of the mean. `losses` that come from a loss with
    `group` need ``gradient_scale="global"``, because the factor of DDP is applied here.
    """
    if group is None:
        return losses.mean()
    ranks = connect_group(group)
    sums, sizes = zip(*ranks.allgather((float(losses.sum()), len(losses))), strict=True)
    # value: sum of all losses / all rows. Gradient: processes * sum of own losses / all rows, which
    # DDP divides by the processes and adds up
    part = losses.sum() * (ranks.size / sum(sizes))
    return part + (sum(sums) / sum(sizes) - part.detach())


@torch.no_grad()
def gather_rows(rows: Tensor, group: Any) -> list[Tensor]:
    """The rows of each process, without a gradient. ValueError if their numbers differ."""
    sizes = connect_group(group).allgather(len(rows))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"rows: expected the same number on all processes that gather them, got {sizes}"
        )
    out = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in sizes]
    dist.all_gather(out, rows.contiguous(), group)
    return out


def connect_group(group: Any) -> Any:
    """The communicator of a process group."""
    from . import process_group

    return process_group.connect(group)
