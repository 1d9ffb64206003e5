"""What losses in the place of other projects' have in common: settings that are attributes,
refusals of what this library has not, and the batch of all processes.
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
    """A loss with the settings of another project's, as attributes that may change between calls,
    and with options of a function of `infonce.torch`."""

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        module = ".".join(type(self).__module__.split(".")[:3])  # as users import it
        require_known(f"{module}.{type(self).__name__}()", options, torch_function(CLIP))
        self.options = options
        self._settings: tuple[str, ...] = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        given = {**{name: getattr(self, name) for name in self._settings}, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


def require(name: str, value: Any, expected: Any, instead: str) -> None:
    """ValueError for a setting that only another project has, which says what to do instead."""
    plain = isinstance(value, (bool, int, float, str))
    if value is not expected and not (plain and value == expected):
        came = repr(value) if plain else validation.what(value)
        raise ValueError(f"{name}: expected {expected!r}, got {came}: {instead}")


def world(wanted: bool = True) -> Any:
    """The group of all processes; None where there is one process, or they are not wanted."""
    if wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


def everywhere(wanted: bool = True) -> dict[str, Any]:
    """The keyword that shares a batch with all processes; nothing where there is one process."""
    group = world(wanted)
    return {} if group is None else {"group": group}


def shard(group: Any, rows: int) -> tuple[int, int, int]:
    """Where this process's rows begin among those of all, how many rows and processes there are.
    Without a group there is one process."""
    if group is None:
        return 0, rows, 1
    ranks = ranks_of(group)
    sizes: list[int] = ranks.allgather(rows)
    return sum(sizes[: ranks.rank]), sum(sizes), ranks.size


def first_row(group: Any, rows: int) -> int:
    """Where this process's rows begin among those of all."""
    return shard(group, rows)[0]


def mean_of_all(losses: Tensor, group: Any) -> Tensor:
    """Mean of the rows' losses of all processes, with the gradient that DDP, which averages, makes
    that of this mean. Losses of a function over processes have ``gradient_scale="global"``."""
    if group is None:
        return losses.mean()
    ranks = ranks_of(group)
    sums, sizes = zip(*ranks.allgather((float(losses.sum()), len(losses))), strict=True)
    share = losses.sum() * (ranks.size / sum(sizes))
    return share + (sum(sums) / sum(sizes) - share.detach())


@torch.no_grad()
def gathered(rows: Tensor, group: Any) -> list[Tensor]:
    """The rows of each process, which have as many each, without a gradient."""
    sizes = ranks_of(group).allgather(len(rows))
    if len(set(sizes)) > 1:
        raise ValueError(f"rows: expected as many on all processes that gather them, got {sizes}")
    out = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in sizes]
    dist.all_gather(out, rows.contiguous(), group)
    return out


def ranks_of(group: Any) -> Any:
    """The communicator of a process group."""
    from . import process_group

    return process_group.connect(group)
