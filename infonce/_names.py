"""`__getattr__` of the packages: submodules on first use, and near names in the AttributeError;
and which extra brings a library that is missing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def missing(
    module: str, names: Sequence[str], submodules: Sequence[str] = (),
    home: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:  # fmt: skip
    """A module's ``__getattr__``: imports a submodule, or a name from the submodule that is its
    `home`; for any other name AttributeError, with the names that are near and all losses. A
    submodule whose library is missing is no attribute."""
    known = [*names, *submodules]

    def plain(name: str) -> str:
        return name.lower().replace("_", "")

    def find(name: str) -> Any:
        if home is not None and name in home:
            return getattr(importlib.import_module(f"{module}.{home[name]}"), name)
        if name in submodules:
            try:
                return importlib.import_module(f"{module}.{name}")
            except ImportError as error:  # `hasattr` asks for an AttributeError
                raise AttributeError(f"{module}.{name} cannot be imported: {error}") from error
        near = difflib.get_close_matches(plain(name), {plain(n) for n in known})
        meant = [n for close in near for n in known if plain(n) == close]  # the nearest first
        hint = f" (did you mean {' or '.join(meant)}?)" if meant else ""
        losses = ", ".join(n for n in names if n.endswith("_loss"))
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}; its losses are {losses}"
        )

    return find


@contextmanager
def extra(library: str) -> Iterator[None]:
    """Context for imports that need a library: if it is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is installed, and lacks one of its own
            raise
        raise ModuleNotFoundError(
            f"infonce.{library} needs {library}, which is not installed: "
            f"pip install 'infonce-kernels[{library}]'",
            name=library,
        ) from error
