"""What losses in the place of other projects' have in common: settings that are attributes,
refusals of what this library has not, and the batch of all processes.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch import nn

from ...checks import validation


class DropIn(nn.Module):
    """A loss with the settings of another project's, as attributes that may change between calls,
    and with options of a function of `infonce.torch`."""

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        self.options, self._settings = options, tuple(settings)
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


def everywhere(wanted: bool = True) -> dict[str, Any]:
    """The keyword that shares a batch with all processes; nothing where there is one process."""
    if wanted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return {"group": dist.group.WORLD}
    return {}


def first_row(group: Any, rows: int) -> int:
    """Where this process's rows begin among those of all; 0 without a group."""
    if group is None:
        return 0
    from . import process_group

    ranks = process_group.connect(group)
    sizes: list[int] = ranks.allgather(rows)
    return sum(sizes[: ranks.rank])
