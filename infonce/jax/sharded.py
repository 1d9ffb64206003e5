"""`sharded`: losses of global arrays, whose rows are spread over the devices of a mesh.

It wraps a loss of functions.py with `axis_name` in a `jax.shard_map`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .. import spec
from ..checks import keywords, prefixes, validation
from ..checks.teacher import ALL_LOSSES, Teacher
from ..result import Metrics
from ..spec import Loss
from . import functions
from .callback import reshard

# Arguments with rows, which are split over the devices, beyond features and `spec.INTEGER_OPTIONS`
ROW_ARGUMENTS = ("labels", *spec.ARRAY_OPTIONS, "guide", "teacher_query", "teacher_key")
# Arguments that are one number, the same on all devices
NUMBERS = ("scale", "temperature", "bias", "teacher_scale", "teacher_temperature")
TEACHER_ARGUMENTS = (
    "teacher_query",
    "teacher_key",
    "teacher_temperature",
    "teacher_scale",
    "two_sided",
)


def sharded(loss: Callable[..., Any], mesh: Mesh, axis_name: Any) -> Callable[..., Any]:
    """Make a loss of global arrays whose rows are split over a mesh of devices.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> clip_loss = infonce.jax.sharded(infonce.jax.clip_loss, mesh, "data")
    >>> step = jax.jit(jax.value_and_grad(lambda z: clip_loss(z, text, scale=20.0)))
    >>> value, gradient = step(image)

    Call the new function inside or outside of `jax.jit`, but not inside of a `jax.shard_map`: the
    function makes a `jax.shard_map` itself. Its arguments and result are those of `loss` on one
    device: ``labels`` are rows of the whole batch, and the views of `nt_xent_loss` are rows i and
    i + B of 2B. Each device computes the logits of its rows with all keys, and gets the gradients
    of its rows. A table `own` of `own_indices` is on all devices, and its gradient is the sum over
    the devices.

    Parameters
    ----------
    loss : function
        A loss of `infonce.jax`.
    mesh : jax.sharding.Mesh
    axis_name : str or tuple of str
        The axis of the mesh, or several, over which all arguments with rows are split.

    Returns
    -------
    function
        The loss of global arrays; TypeError and ValueError as `loss`, and ValueError if the devices
        do not divide the rows.

    Raises
    ------
    TypeError, ValueError
        `loss` is none of infonce.jax, `mesh` is no mesh, or `mesh` has no axis `axis_name`.
    """
    kinds = {getattr(functions, f"{name}_loss"): kind for name, kind in ALL_LOSSES.items()}
    if not callable(loss) or loss not in kinds:
        raise TypeError(
            f"loss: expected a loss of infonce.jax, as infonce.jax.clip_loss, got {loss!r}"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {validation.what(mesh)}")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name: expected one of the mesh's axes {mesh.axis_names}, or a tuple of them, "
            f"got {axis_name!r}"
        )
    kind, parameters = kinds[loss], inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    signature = inspect.Signature([*positional, others])

    @functools.wraps(loss)
    def over_devices(*args: Any, **options: Any) -> Any:
        arguments = dict(signature.bind(*args, **options).arguments)
        arguments |= arguments.pop("options", {})
        call_kind, _, _ = keywords.with_own(kind, (), arguments)
        _require_valid(call_kind, arguments, mesh, names)
        # The two views of a sample may be on different devices, so labels name the other view
        if kind is spec.NT_XENT and arguments.get("labels") is None:
            rows = len(arguments["features"])
            arguments["labels"] = (jnp.arange(rows) + rows // 2) % rows
        for name in spec.PREFIX_OPTIONS:
            if arguments.get(name) is not None:
                # a tuple, because the cache of `_compile` needs hashable values
                arguments[name] = tuple(np.asarray(arguments[name]).tolist())
        return _run(loss, call_kind, arguments, mesh, names)

    return over_devices


def _require_valid(
    kind: Loss, arguments: dict[str, Any], mesh: Mesh, names: tuple[Any, ...]
) -> None:
    """Check the call as a call on one device, and that the devices divide the rows."""
    features = [arguments[name] for name in kind.arguments]
    options = {name: value for name, value in arguments.items() if name not in kind.arguments}
    if "axis_name" in options:
        raise TypeError("axis_name: expected as an argument of infonce.jax.sharded")
    labels, bias = options.pop("labels", None), options.pop("bias", None)
    teacher = None
    if kind.taught:
        settings = {name: options.pop(name) for name in TEACHER_ARGUMENTS if name in options}
        arrays = {name: settings[name] for name in ("teacher_query", "teacher_key")}
        functions.require_arrays(arrays)
        fields = {name.removeprefix("teacher_"): value for name, value in settings.items()}
        teacher = Teacher(**fields)
        kind = teacher.loss
    if prefixes.has_prefixes(kind, options):
        _, options = prefixes.read_prefixes(kind, features, options)
    plain = {name: value for name, value in options.items() if name not in functions.ARGUMENTS}
    functions.require_known(kind, features, plain)
    functions.check_traced(kind, features, labels, bias, options, None, teacher)
    devices = math.prod(mesh.shape[name] for name in names)
    for name, z in zip(kind.arguments, features, strict=True):
        if len(z) % devices and not _is_table(name, arguments):
            raise ValueError(
                f"{name}: expected a number of rows that the {devices} devices of axis "
                f"{', '.join(map(repr, names))} divide, got shape {tuple(z.shape)}"
            )


def _is_table(name: str, arguments: dict[str, Any]) -> bool:
    """Whether an argument is the table of `own_indices`, whose rows are not split."""
    return name == "own" and arguments.get("own_indices") is not None


def _run(
    loss: Callable[..., Any],
    kind: Loss,
    arguments: dict[str, Any],
    mesh: Mesh,
    names: tuple[Any, ...],
) -> Any:
    """The loss of checked arguments, by the compiled function of `_compile`."""
    rows, replicated = PartitionSpec(names), PartitionSpec()
    tables = {name: arguments[name] for name in kind.arguments if _is_table(name, arguments)}
    row_arrays = {name: arguments.pop(name) for name in kind.arguments}
    row_arrays = {name: z for name, z in row_arrays.items() if name not in tables}
    for name in spec.INTEGER_OPTIONS:
        if (integers := arguments.pop(name, None)) is not None:
            row_arrays[name] = functions.apply_to_each(functions.exact_integers, integers)
    for name in ROW_ARGUMENTS:
        if (value := arguments.pop(name, None)) is not None:
            row_arrays[name] = (
                functions.exact_integers(value)
                if name in functions.EXACT
                else jax.tree.map(jnp.asarray, value)
            )
    numbers = {name: arguments.pop(name) for name in NUMBERS if arguments.get(name) is not None}
    if AxisType.Explicit in mesh.axis_types:  # for such axes, `jax.shard_map` splits no arrays
        row_arrays = jax.tree.map(lambda z: reshard(z, NamedSharding(mesh, rows)), row_arrays)
        tables = jax.tree.map(lambda z: reshard(z, NamedSharding(mesh, replicated)), tables)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    compiled = _compile(loss, kind, tuple(sorted(arguments.items())), mesh, names)
    return compiled(row_arrays, {**numbers, **tables})


@functools.lru_cache(256)
def _compile(
    loss: Callable[..., Any], kind: Loss, options: tuple[tuple[str, Any], ...], mesh: Mesh,
    names: tuple[Any, ...],
) -> Callable[..., Any]:  # fmt: skip
    """The compiled function (arrays with rows, numbers and tables) -> loss, or (loss, metrics)."""
    rows, replicated, settings = PartitionSpec(names), PartitionSpec(), dict(options)

    def device_loss(row_arrays: dict[str, Any], same_on_all: dict[str, Any]) -> Any:
        return loss(**row_arrays, **same_on_all, **settings, axis_name=names)

    specs: Any = rows if settings.get("reduction") == "none" else replicated
    if settings.get("metrics"):
        has_columns = kind.column_direction_weight != 0
        metrics_specs = Metrics(
            row_loss=replicated,
            column_loss=replicated if has_columns else None,
            row_rank=rows,
            column_rank=rows if has_columns else None,
            positive=rows,
            hardest_negative=rows,
        )
        specs = specs, metrics_specs
    evaluate_shards = jax.shard_map(
        device_loss, mesh=mesh, in_specs=(rows, replicated), out_specs=specs
    )
    compiled: Callable[..., Any] = jax.jit(evaluate_shards)
    return compiled
