"""Writes the signatures of infonce.torch and infonce.jax for editors and mypy, `__init__.pyi`, with
every keyword of the table of options: `python tools/signatures.py`. tests/project compares them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from infonce import losses
from infonce.checks import keywords
from infonce.checks.keywords import Keywords
from infonce.spec import LOSSES, Loss

ROOT = Path(__file__).parents[1] / "infonce"
BIAS = {"Tensor": "float | Tensor | None", "ArrayLike": "ArrayLike | None"}
CAMEL = {"clip": "CLIP", "gte": "GTE", "info_nce": "InfoNCE", "lit": "LiT", "nt_xent": "NTXent",
         "siglip": "SigLIP", "sup_con": "SupCon"}  # fmt: skip
TORCH = """\
# Written by tools/signatures.py from the table of options in infonce/spec.py
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from ..spec import Method, Precision, Reduction
"""
JAX = """\
# Written by tools/signatures.py from the table of options in infonce/spec.py
import math
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from ..spec import Method, Precision, Reduction
"""


def written(value: object) -> str:
    """A default as Python writes it."""
    return {"inf": "math.inf", "-inf": "-math.inf"}.get(repr(value), repr(value).replace("'", '"'))


def arguments(loss: Loss, array: str) -> Iterator[str]:
    """The arguments by position: those of the function of arrays."""
    for parameter in inspect.signature(getattr(losses, f"{loss.name}_loss")).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            default = "" if parameter.default is parameter.empty else " = None"
            type_ = parameter.annotation.replace("Array", array)
            yield f"{parameter.name}: {BIAS[array] if type_ == 'Any' else type_}{default}"


def by_keyword(table: Keywords, default: str = "") -> list[str]:
    return ["*", *(f"{n}: {type_} = {default or written(value)}"
                   for n, (type_, value) in table.items())]  # fmt: skip


def function(name: str, parameters: list[str], returns: str, indent: str = "") -> str:
    body = "".join(f"{indent}    {parameter},\n" for parameter in parameters)
    return f"{indent}def {name}(\n{body}{indent}) -> {returns}: ...\n"


def function_stub(loss: Loss, array: str, returned: str, table: Keywords) -> str:
    parameters = [*arguments(loss, array), *by_keyword(table)]
    return function(f"{loss.name}_loss", parameters, result(table, returned))


def result(table: Keywords, array: str) -> str:
    """The type of a loss's result: a tuple if the loss has metrics."""
    return "Any" if "metrics" in table else array


def module_stub(loss: Loss) -> str:
    table = keywords.torch_function(loss)
    # the defaults of a call are those of the construction
    call = [*arguments(loss, "Tensor"), *by_keyword(table, "...")]
    settings = keywords.torch_module(loss)
    # with `learnable` the bias is a Parameter
    types = {name: "Any" if name == "bias" else type_ for name, (type_, _) in settings.items()}
    types = {"log_scale": "Parameter", **types}
    attributes = "".join(f"    {name}: {type_}\n" for name, type_ in types.items())
    init = function("__init__", ["self", *by_keyword(settings)], "None", "    ")
    forward = function("forward", ["self", *call], result(table, "Tensor"), "    ")
    head = f"class {CAMEL[loss.name]}Loss(Module):\n{attributes}"
    return f"{head}{init}{forward}    __call__ = forward\n"


def stub(package: str) -> str:
    """The text of the package's `__init__.pyi`."""
    functions, modules = [], []
    for loss in LOSSES.values():
        if package == "torch":
            functions.append(function_stub(loss, "Tensor", "Tensor", keywords.torch_function(loss)))
            modules.append(module_stub(loss))
        else:
            functions.append(function_stub(loss, "ArrayLike", "Array", keywords.jax_function(loss)))
    definitions = ["".join(functions), *modules]
    defined = {f"{name}_loss" for name in LOSSES} | {f"{name}Loss" for name in CAMEL.values()}
    source = ast.parse((ROOT / package / "__init__.py").read_text())
    others = sorted(
        f"from .{node.module} import {alias.name} as {alias.name}\n"
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if alias.name not in defined
    )
    imports = {"torch": TORCH, "jax": JAX}[package] + "".join(others)
    names = next(
        ast.unparse(node.value) for node in ast.walk(source)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )  # fmt: skip
    listed = "".join(f'    "{name}",\n' for name in ast.literal_eval(names))
    return "\n".join([imports, f"__all__ = [\n{listed}]\n", "\n".join(definitions)])


if __name__ == "__main__":
    for package in ("torch", "jax"):
        (ROOT / package / "__init__.pyi").write_text(stub(package))
