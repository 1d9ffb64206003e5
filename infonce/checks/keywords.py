"""The keywords of the functions of `infonce.torch` and `infonce.jax`, their signatures, and the
errors for an unknown keyword and for too many arguments. The tables follow from `spec.OPTIONS`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from ..spec import (
    ARRAY_OPTIONS,
    COMPILED_OPTIONS,
    INFO_NCE,
    INFO_NCE_OWN,
    INTEGER_OPTIONS,
    OPTIONS,
    PREFIX_OPTIONS,
    VECTOR_OPTIONS,
    GradOptions,
    Loss,
    LossOptions,
)

Keywords = dict[str, tuple[str, Any]]  # name -> type as text, default
# The one array of nt_xent and sup_con, in the errors for two arrays
JOINED_VIEWS = "all views concatenated to one array [2B, D], the second views below the first"
# Other projects' words -> keywords
OTHER_WORDS = {
    "logit_scale": "scale",
    "logit_bias": "bias",
    "tau": "temperature",
    "t": "temperature",
}
_F = TypeVar("_F", bound=Callable[..., Any])

# Types of keywords that are `Any` in `spec.LossOptions`; for JAX, ArrayLike stands for Tensor
TENSORS = {
    "temperature": "float | Tensor | None",
    "scale": "float | Tensor | None",
    **dict.fromkeys(VECTOR_OPTIONS, "Tensor | None"),
    "guide": "Tensor | tuple[Tensor, Tensor] | None",
    "own": "Tensor | None",
    "own_indices": "Tensor | None",
    "own_mask": "Tensor | None",
}
# Further keywords for a loss over a process group of torch.distributed: the keywords of
# infonce.distributed, with `group` instead of `comm`. `timeout` is in seconds. `gradient_scale` is
# "ddp" here, and "global" there
GROUP: Keywords = {
    "group": ("ProcessGroup | None", None),
    "transport": ('Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]', "auto"),
    "exchange": ('Literal["auto", "ring", "gather", "hierarchical"]', "auto"),
    "timeout": ("float | None", 300.0),
    "gradient_scale": ('Literal["global", "ddp"]', "ddp"),
}
# Further keyword of losses of two views in one array: labels[i] is the row of row i's other view
VIEWS: Keywords = {"labels": ("Tensor | None", None)}
# Further keyword for a loss over the devices of JAX
AXIS: Keywords = {"axis_name": ("Any", None)}
MAX_SCALE = 100.0  # default of a module's `max_scale`, the limit of a learned scale


def torch_function(loss: Loss) -> Keywords:
    """The keywords of the function of `infonce.torch` that computes this loss."""
    names = [*LossOptions.__annotations__, "metrics"]
    return _table(names, TENSORS, loss) | (VIEWS if _pairs_views(loss) else {}) | GROUP


def torch_module(loss: Loss) -> Keywords:
    """The keywords of the constructor of the module of `infonce.torch` for this loss."""
    learnable: Keywords = {
        "learnable": ("bool", False), "max_scale": ("float", MAX_SCALE), "min_scale": ("float", 0.0)
    }  # fmt: skip
    bias: Keywords = {"bias": (TENSORS["scale"], None)} if loss.sigmoid else {}
    return learnable | bias | torch_function(loss)


def jax_function(loss: Loss) -> Keywords:
    """The keywords of the function of `infonce.jax` that computes this loss."""
    names = [
        "temperature",
        "scale",
        *INTEGER_OPTIONS,
        "own",
        *PREFIX_OPTIONS,
        *ARRAY_OPTIONS,
        "guide",
        *COMPILED_OPTIONS,
        "metrics",
    ]
    views: Keywords = {"labels": ("ArrayLike | None", None)} if _pairs_views(loss) else {}
    types = {name: text.replace("Tensor", "ArrayLike") for name, text in TENSORS.items()}
    types |= dict.fromkeys(("temperature", "scale"), "ArrayLike | None")
    return _table(names, types, loss) | views | AXIS


def _pairs_views(loss: Loss) -> bool:
    """Whether the positive of a row is the other view of its sample (nt_xent)."""
    return loss.symmetric and not (loss.classes or loss.joint)


def _table(names: list[str], types: dict[str, str], loss: Loss) -> Keywords:
    """The keywords `names`, except those that the loss refuses; `types` replace types of `spec`."""
    in_spec = {name: type_.__forward_arg__ for name, type_ in GradOptions.__annotations__.items()}
    return {
        name: (types.get(name, in_spec[name]), OPTIONS[name].default)
        for name in names
        if name not in loss.refused
    }


def signature(function: Callable[..., Any], keywords: Keywords) -> inspect.Signature:
    """The signature of a function, with these keywords instead of its ``**options``.

    ``*args``, which a function takes only to refuse them, are left out.
    """
    in_source = inspect.signature(function)
    parameters = [
        p for p in in_source.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in keywords
    ]  # fmt: skip
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, (_, default) in keywords.items()
    ]
    return in_source.replace(parameters=parameters)


def unexpected(function: str, name: str, known: Collection[str], hint: str = "") -> TypeError:
    """The error for the keyword `name`, which a function does not have; `known` are those it has.

    It ends with `hint`, or by default with the most similar keyword.
    """
    if not hint:
        words = [OTHER_WORDS[name]] if OTHER_WORDS.get(name) in known else []
        near = words or difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return TypeError(f"{function}: unexpected keyword argument {name!r} ({hint})")


def require_positional(function: _F) -> _F:
    """A decorator: the TypeError for too many positional arguments says which are keywords, and
    that for too few says what they are.

    `function` is a loss or the method `forward` of a module.
    """
    package = function.__module__.rpartition(".")[0]
    name = f"{package}.{function.__qualname__.removesuffix('.forward')}()"
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if len(args) > len(positional):
            raise surplus(name, positional, args)
        if len(args) < len(required):
            require(name, required, args, options)
        return function(*args, **options)

    return cast(_F, checked)


def require(
    function: str, required: Sequence[str], args: Sequence[Any], named: Collection[str]
) -> None:
    """TypeError if one of the arguments `required` is neither in `args` nor in `named`."""
    missing = [name for name in required[len(args) :] if name not in named]
    if missing:
        names = ", ".join(name for name in required if name != "self")
        hint = "" if missing[0] in ("labels", "bias") else "; losses take features, not logits"
        raise TypeError(f"{function}: expected {names}, got no {missing[0]}{hint}")


def surplus(function: str, positional: Sequence[str], args: Sequence[Any]) -> TypeError:
    """The error for more arguments than `positional`, the names of those that need no keyword.

    Of a method both have `self`, which the message leaves out.
    """
    first = 1 if positional[:1] == ["self"] else 0
    names, given = positional[first:], args[first:]
    if names[:1] == ["features"] and getattr(given[1], "ndim", 0) > 1:
        return TypeError(f"{function}: expected {JOINED_VIEWS}, got {len(given)} arguments")
    expected = f"{len(names) or 'no'} positional arguments" + f" ({', '.join(names)})" * bool(names)
    return TypeError(
        f"{function}: expected {expected}, got {len(given)}; temperature and all other options are "
        "keywords, as in temperature=0.07"
    )


def with_own(
    kind: Loss, arrays: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Loss, Sequence[Any], Mapping[str, Any]]:
    """The loss, its feature arrays and its options.

    If the option `own` is given to info_nce, it moves from the options to the feature arrays,
    because it has a gradient, and the loss becomes `INFO_NCE_OWN`.
    """
    own = options.get("own")
    if own is None or kind is not INFO_NCE:
        return kind, arrays, options
    others = {name: value for name, value in options.items() if name != "own"}
    return INFO_NCE_OWN, (*arrays, own), others
