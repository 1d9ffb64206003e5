"""`__getattr__` of the packages: submodules on first use, and near names in the AttributeError."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import Any


def missing(
    module: str, names: Sequence[str], submodules: Sequence[str] = ()
) -> Callable[[str], Any]:
    """A module's ``__getattr__``: imports a submodule; for any other name AttributeError, with the
    names that are near and all losses."""
    known = [*names, *submodules]

    def plain(name: str) -> str:
        return name.lower().replace("_", "")

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        near = difflib.get_close_matches(plain(name), {plain(n) for n in known})
        meant = [n for close in near for n in known if plain(n) == close]  # the nearest first
        hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
        losses = ", ".join(n for n in names if n.endswith("_loss"))
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}; its losses are {losses}"
        )

    return find
