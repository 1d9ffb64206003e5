"""Docstrings and signatures of the losses, completed when their modules are imported.

`documented` adds an example, the keywords of `spec.OPTIONS`, results and errors to a function of
`losses`. `adapted` makes the docstring of a function of torch or JAX from that of the loss. Both
also give a function the error for too many positional arguments (`checks.keywords`).
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from . import spec
from .checks.keywords import Keywords, require_positional, signature
from .checks.teacher import ALL_LOSSES
from .spec import LOSSES, OPTIONS, GradOptions, Loss, LossOptions

# the section "Raises"
ERRORS = """
TypeError, ValueError
    Before any work, naming the argument, what came and what was expected. Masked arrays are
    refused; other subclasses of NumPy's arrays are taken as arrays.
MemoryError
    Free memory is too small for the logits of ``method="naive"`` (use "tiled"), or for the
    workspace (pass a smaller `workspace`).
"""


_F = TypeVar("_F", bound=Callable[..., Any])


@functools.cache
def _paragraph(name: str) -> str:
    """The paragraph of an option in the section "Other Parameters"."""
    option = OPTIONS[name]
    return f"{name} : {option.type}\n{textwrap.indent(inspect.cleandoc(option.doc), '    ')}"


def _find_loss(function: str) -> Loss:
    """The loss of a function, by the function's name."""
    name = function.removesuffix("_and_grad").removesuffix("_loss")
    return ALL_LOSSES[name]


def _example(function: str, with_grad: bool) -> str:
    """A call of a function, and the fields of its result."""
    loss = _find_loss(function)
    arguments = [*loss.arguments, *(["labels"] if loss.classes else [])]
    arguments += ["teacher_query", "teacher_key"] if loss.taught else []
    arguments += [*(["temperature=0.07"] if loss.scale is None else []), "normalize=True"]
    example = f"{'out' if with_grad else 'loss'} = infonce.{function}({', '.join(arguments)})"
    fields = [name for name in loss.grads.__annotations__ if name not in loss.locked]
    shown = ", ".join(["out.loss", *(f"out.grads.{name}" for name in fields)])
    return f">>> {example}" + with_grad * f"\n>>> {shown}"


def documented(function: _F) -> _F:
    """Complete the docstring of a loss, and list its keywords in its signature.

    `losses` applies this decorator to each function. The docstring in the source has a first line,
    the equation, parameters and references.
    """
    with_grad = function.__name__.endswith("_and_grad")
    options = get_type_hints(GradOptions if with_grad else LossOptions)
    loss = _find_loss(function.__name__)
    if loss.taught:
        options = {name: type_ for name, type_ in options.items() if name not in loss.refused}
    sections = [("Other Parameters", "\n".join(_paragraph(name) for name in options))]
    returns = (
        "LossAndGrad"
        if with_grad
        else (
            'array\n    0-d, or [M] with ``reduction="none"``; of the library of the features;\n'
            "    float64 for float64 features, else float32."
        )
    )
    sections += [("Returns", returns), ("Raises", ERRORS)]
    first, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    doc = f"{first}\n\n{_example(function.__name__, with_grad)}\n\n{rest}"
    for title, body in sections:
        body = body.strip("\n")
        doc += f"\n\n{title}\n{'-' * len(title)}\n{body}"
    checked = require_positional(function)
    checked.__doc__ = doc + "\n"
    checked.__signature__ = signature(  # type: ignore[attr-defined]
        function, {name: ("", OPTIONS[name].default) for name in options}
    )
    return checked


def adapted(
    like: Callable[..., Any], call: str, list_keywords: Callable[[Loss], Keywords] | None = None
) -> Callable[[_F], _F]:
    """Document a function of an adapter like the loss `like`: its first line, equation and source.

    `call` is an example, an empty line, and a description of the adapter's call. Placeholders in it
    are replaced: ``{loss}`` by the name of `like`, ``{arguments}`` by its feature arguments,
    ``{call_arguments}`` by these and the labels that it requires, ``{name}`` by the name of the
    adapter's function, ``{options}`` by the options of compiled programs, ``{integers}`` and
    ``{vectors}`` by those that are integers of samples, or floats. The signature gets the keywords
    that `list_keywords` returns for the loss; None leaves it unchanged.
    """
    text, _, rest = inspect.cleandoc(like.__doc__ or "").partition("\n\nParameters\n")
    first, _, equation = text.split("\n\n", 2)  # the part between is the example of `like`
    source = rest.partition("\nReferences\n----------\n")[2].partition("\n\n")[0]
    loss = LOSSES[like.__name__.removesuffix("_loss")]
    call_arguments = ", ".join([*loss.arguments, *(["labels"] if loss.classes else [])])

    def add(function: _F) -> _F:
        usage = inspect.cleandoc(call).format(
            loss=like.__name__, arguments=", ".join(loss.arguments),
            options=", ".join(spec.COMPILED_OPTIONS), name=function.__name__,
            call_arguments=call_arguments, integers=", ".join(spec.INTEGER_OPTIONS),
            vectors=", ".join(spec.VECTOR_OPTIONS),
        )  # fmt: skip
        example, _, usage = usage.partition("\n\n")
        parts = first, example, equation, usage, f"References\n----------\n{source}\n"
        function.__doc__ = "\n\n".join(parts)
        if list_keywords is None:  # a class
            return function
        checked = require_positional(function)
        checked.__signature__ = signature(function, list_keywords(loss))  # type: ignore[attr-defined]
        return checked

    return add
