"""The keywords of the losses of `infonce.torch` and `infonce.jax`: types, defaults, a wrong one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..spec import (
    ARRAYS,
    COMPILED,
    DIMS,
    INFO_NCE,
    INFO_NCE_OWN,
    NAMES,
    OPTIONS,
    GradOptions,
    Loss,
    LossOptions,
)

Keywords = dict[str, tuple[str, Any]]  # name -> type as it is written, default

# Arrays of PyTorch and JAX in the place of `Any`
TENSORS = {
    "temperature": "float | Tensor | None",
    "scale": "float | Tensor | None",
    "weights": "Tensor | None",
    "key_bias": "Tensor | None",
    "guide": "Tensor | tuple[Tensor, Tensor] | None",
    "own": "Tensor | None",
    "own_mask": "Tensor | None",
}
# Keywords of a loss over a process group: those of infonce.distributed, with `group` for `comm`
GROUP: Keywords = {
    "group": ("ProcessGroup | None", None),
    "transport": ('Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]', "auto"),
    "exchange": ('Literal["auto", "ring", "gather", "hierarchical"]', "auto"),
    "timeout": ("float | None", 300.0),
    "gradient_scale": ('Literal["global", "ddp"]', "ddp"),
}
# Keywords of losses that pair views: the labels are the rows of the other views
VIEWS: Keywords = {"labels": ("Tensor | None", None)}
# Keywords of a loss over the devices of JAX
AXIS: Keywords = {"axis_name": ("Any", None)}
MAX_SCALE = 100.0


def torch_function(loss: Loss) -> Keywords:
    """The keywords of the function of `infonce.torch` that computes this loss."""
    names = [*LossOptions.__annotations__, "metrics"]
    return _table(names, TENSORS, loss) | (VIEWS if _has_views(loss) else {}) | GROUP


def torch_module(loss: Loss) -> Keywords:
    """The keywords of a module of `infonce.torch` at construction."""
    learnable: Keywords = {"learnable": ("bool", False), "max_scale": ("float", MAX_SCALE)}
    bias: Keywords = {"bias": (TENSORS["scale"], None)} if loss.sigmoid else {}
    return learnable | bias | torch_function(loss)


def jax_function(loss: Loss) -> Keywords:
    """The keywords of the function of `infonce.jax` that computes this loss."""
    names = ["temperature", "scale", *NAMES, "own", *DIMS, *ARRAYS, "guide", *COMPILED, "metrics"]
    views: Keywords = {"labels": ("ArrayLike | None", None)} if _has_views(loss) else {}
    types = {name: written.replace("Tensor", "ArrayLike") for name, written in TENSORS.items()}
    types |= dict.fromkeys(("temperature", "scale"), "ArrayLike | None")
    return _table(names, types, loss) | views | AXIS


def _has_views(loss: Loss) -> bool:
    return loss.symmetric and not (loss.classes or loss.joint)


def _table(names: list[str], types: dict[str, str], loss: Loss) -> Keywords:
    written = {name: type_.__forward_arg__ for name, type_ in GradOptions.__annotations__.items()}
    return {
        name: (types.get(name, written[name]), OPTIONS[name].default)
        for name in names
        if name not in loss.refused
    }


def signature(function: Callable[..., Any], keywords: Keywords) -> inspect.Signature:
    """The signature of a function, with these keywords instead of its ``**options``."""
    written = inspect.signature(function)
    parameters = [
        p for p in written.parameters.values()
        if p.kind is not p.VAR_KEYWORD and p.name not in keywords
    ]  # fmt: skip
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, (_, default) in keywords.items()
    ]
    return written.replace(parameters=parameters)


def unexpected(function: str, name: str, known: Collection[str], hint: str = "") -> TypeError:
    """The error for a keyword that a function does not have.

    Its hint is `hint`, or the most similar keyword of the function.
    """
    if not hint:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return TypeError(f"{function}: unexpected keyword argument {name!r} ({hint})")


def with_own(
    kind: Loss, arrays: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Loss, Sequence[Any], Mapping[str, Any]]:
    """The loss, its arrays and its options. If `own` is given, it becomes an array of the loss."""
    own = options.get("own")
    if own is None or kind is not INFO_NCE:
        return kind, arrays, options
    others = {name: value for name, value in options.items() if name != "own"}
    return INFO_NCE_OWN, (*arrays, own), others
