"""Names of a package that are imported on first use, and errors for names and libraries that are
missing. `infonce`, `infonce.torch`, `infonce.jax` and `infonce.distributed` share these functions.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("infonce", "infonce.torch", "infonce.jax", "infonce.distributed")


def make_getattr(
    module: str, names: Sequence[str], submodules: Sequence[str] = (),
    lazy_names: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:  # fmt: skip
    """The function ``__getattr__`` of `module`, which Python calls for a name that it lacks.

    It imports one of `submodules`, or a name of `lazy_names` (name -> submodule that defines it).
    For other names it raises an AttributeError. It has the same name, but for case and underscores,
    here and in the other `PACKAGES`; if no package has it, the similar names among `names`. It ends
    with all losses. If the library of a submodule is not installed, that is an AttributeError too.
    """
    known = [*names, *submodules]

    def find(name: str) -> Any:
        if lazy_names is not None and name in lazy_names:
            return getattr(importlib.import_module(f"{module}.{lazy_names[name]}"), name)
        if name in submodules:
            try:
                return importlib.import_module(f"{module}.{name}")
            except ImportError as error:  # `hasattr` is False only after an AttributeError
                raise AttributeError(f"{module}.{name} cannot be imported: {error}") from error
        similar = [n for n in known if _simplified(n) == _simplified(name)]
        similar = _names_elsewhere(module, name, similar)
        if not similar:
            matches = difflib.get_close_matches(_simplified(name), {_simplified(n) for n in known})
            similar = [n for match in matches for n in known if _simplified(n) == match]
        hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
        losses = ", ".join(n for n in names if n.endswith("_loss"))
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}"
            + f"; its losses are {losses}" * bool(losses)
        )

    return find


def _simplified(name: str) -> str:
    return name.lower().replace("_", "")


def _names_elsewhere(module: str, name: str, here: Sequence[str]) -> list[str]:
    """Names that are `name`, but for case and underscores: those of `module`, which are `here`, and
    those that only the other `PACKAGES` have. The same name comes first.

    The packages' files are read and not imported: their libraries may be missing.
    """
    found = {n: n for n in here}  # name -> name with its package
    for package in PACKAGES if not name.startswith("_") else ():
        spec = importlib.util.find_spec(package)
        if package == module or spec is None or spec.origin is None:
            continue
        file = Path(spec.origin)
        public = next(
            ast.literal_eval(node.value)
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        submodules = [path.stem for path in file.parent.iterdir() if path.stem == name]
        for n in (*public, *submodules):
            if _simplified(n) == _simplified(name):
                found.setdefault(n, f"{package}.{n}")
    return [found[n] for n in sorted(found, key=lambda n: n != name)]


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
