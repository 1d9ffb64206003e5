"""Names of a package that are imported on first use, and errors for names and libraries that are
missing. `infonce`, `infonce.torch`, `infonce.jax` and `infonce.distributed` share these functions.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def make_getattr(
    module: str, names: Sequence[str], submodules: Sequence[str] = (),
    lazy_names: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:  # fmt: skip
    """The function ``__getattr__`` of `module`, which Python calls for a name that it lacks.

    It imports one of `submodules`, or a name of `lazy_names` (name -> submodule that defines it).
    For other names it raises an AttributeError with the similar names among `names`, and all
    losses. If the library of a submodule is not installed, that is an AttributeError too.
    """
    known = [*names, *submodules]

    def simplified(name: str) -> str:
        return name.lower().replace("_", "")

    def find(name: str) -> Any:
        if lazy_names is not None and name in lazy_names:
            return getattr(importlib.import_module(f"{module}.{lazy_names[name]}"), name)
        if name in submodules:
            try:
                return importlib.import_module(f"{module}.{name}")
            except ImportError as error:  # `hasattr` is False only after an AttributeError
                raise AttributeError(f"{module}.{name} cannot be imported: {error}") from error
        matches = difflib.get_close_matches(simplified(name), {simplified(n) for n in known})
        similar = [n for match in matches for n in known if simplified(n) == match]
        hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
        losses = ", ".join(n for n in names if n.endswith("_loss"))
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}; its losses are {losses}"
        )

    return find


@contextmanager
def extra(library: str) -> Iterator[None]:
    """Context for imports that need `library`, which is also the name of the extra.

    If the library is not installed, the ModuleNotFoundError says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is installed, but a module that it needs is not
            raise
        raise ModuleNotFoundError(
            f"infonce.{library} needs {library}, which is not installed: "
            f"pip install 'infonce-kernels[{library}]'",
            name=library,
        ) from error
