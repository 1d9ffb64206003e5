"""The base class of drop-in replacements for other projects' losses, and their helper functions.

The functions refuse settings that this library lacks, and share a batch over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ... import spec
from ...checks import keywords, validation
from ..functions import require_known

Refused = Mapping[str, tuple[Any, str]]  # keyword -> (its only value, what to do instead)
DEFAULTS = {**spec.DEFAULTS, **{name: value for name, (_, value) in keywords.GROUP.items()}}


def refuse(names: Iterable[str], instead: str) -> dict[str, tuple[Any, str]]:
    """Keywords that may only have their defaults. `instead` ends the message of the error."""
    return {name: (DEFAULTS.get(name), instead) for name in names}


SCALE = refuse(("temperature", "scale"), "a setting or an argument of this loss scales its logits")


class DropIn(nn.Module):
    """A loss with the settings of another project's loss, and options of `infonce.torch`.

    Settings are attributes of the same names, which users may change between calls. Options that
    would be right for a part of the loss only are refused, at construction and at the call.
    """

    kind: spec.Loss  # the loss whose function takes the options

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        module = ".".join(type(self).__module__.split(".")[:3])  # infonce.torch.X, as users import
        known = keywords.torch_function(self.kind)
        require_known(f"{module}.{type(self).__name__}()", options, known)
        self.options = options
        self._settings: tuple[str, ...] = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)
        without = f"{self.kind.name}_loss has none"
        self.call_options(refuse(options.keys() & {*self.kind.refused}, without))

    def __setattr__(self, name: str, value: Any) -> None:
        self.check_setting(name, value)
        super().__setattr__(name, value)

    def check_setting(self, name: str, value: Any) -> None:
        """ValueError for a value that the setting `name` cannot have."""

    def refused(self) -> Refused:
        """Options that would not be right for the whole loss."""
        return SCALE

    def call_options(self, refused: Refused | None = None) -> dict[str, Any]:
        """The options of a call of the function. ValueError for those in `refused`."""
        options = dict(self.options)
        if not options:
            return options
        for name, (expected, instead) in {**self.refused(), **(refused or {})}.items():
            if name in options:
                require(name, options.pop(name), expected, instead)
        return options

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


def require_shape(name: str, z: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless the tensor has this shape: PyTorch would broadcast some others."""
    if tuple(z.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(z.shape)}")


def with_zero_gradient(loss: Tensor, value: Any) -> Tensor:
    """The loss, whose gradient with regard to the number `value` is 0 instead of missing.

    DDP waits for the gradient of each parameter that the model's output depends on.
    """
    if not getattr(value, "requires_grad", False):
        return loss
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor
    return loss + 0.0 * value.sum().to(loss.dtype)


def require_rank(rank: int, world_size: int) -> None:
    """ValueError for settings that no process group can have."""
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank, world_size: expected 0 <= rank < world_size, got {rank} and {world_size}"
        )


def group_of(rank: int, world_size: int, group: Any = None) -> Any:
    """The process group of a loss with the settings `rank` and `world_size`; None: one process.

    ValueError if they are not those of `group`, or of all processes if this is None.
    """
    require_rank(rank, world_size)
    if world_size == 1 and group is None:
        return None
    ranks = connect_group(group)
    if (ranks.rank, ranks.size) != (rank, world_size):
        raise ValueError(
            f"rank, world_size: expected {ranks.rank} and {ranks.size}, those of the process "
            f"group, got {rank} and {world_size}"
        )
    return dist.group.WORLD if group is None else group


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
    sums, sizes = zip(*ranks.allgather((float(losses.detach().sum()), len(losses))), strict=True)
    # value: sum of all losses / all rows. Gradient: processes * sum of own losses / all rows, which
    # DDP divides by the processes and adds up
    part = losses.sum() * (ranks.size / sum(sizes))
    return part + (sum(sums) / sum(sizes) - part.detach())


@torch.no_grad()
def gather_rows(rows: Tensor, group: Any) -> Tensor:
    """The rows of all processes, in the order of their ranks, without a gradient.

    Their numbers may differ. A compiled graph cannot ask for them: there they have to be equal.
    """
    if torch.compiler.is_compiling():
        sizes = [len(rows)] * dist.get_world_size(group)
    else:
        sizes = connect_group(group).allgather(len(rows))
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group)
    return torch.cat([z[:size] for z, size in zip(gathered, sizes, strict=True)])


def connect_group(group: Any) -> Any:
    """The communicator of a process group."""
    from . import process_group

    return process_group.connect(group)
