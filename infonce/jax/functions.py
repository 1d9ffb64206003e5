"""The losses as functions of JAX arrays. All go one way: `_apply` checks the call while JAX traces
it, and `autodiff.differentiable_loss` (over devices, with `axis`) adds it to the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infonce.distributed.schedule import require_method

from .. import docstrings, losses, spec
from ..arrays import describe_arrays, native
from ..checks import keywords, prefixes, validation
from ..checks.call import check
from ..checks.rows import is_pair
from ..checks.teacher import Teacher, add_teacher
from ..checks.validation import Batch
from ..result import Metrics
from ..spec import Loss
from . import axis
from .autodiff import differentiable_loss
from .callback import TEACHER_INPUTS, Axis, SplitIntegers, TracedCall, stand_in, vary_equally

# Metrics are a pytree, so that transformations of JAX may return them
jax.tree_util.register_dataclass(
    Metrics, data_fields=[field.name for field in fields(Metrics)], meta_fields=[]
)

# Keywords that `_apply` takes beyond the options of a compiled program (`spec.COMPILED_OPTIONS`)
ARGUMENTS = ("scale", "temperature", "guide", "metrics", *spec.INTEGER_OPTIONS, *spec.ARRAY_OPTIONS)

# Arrays of integers that no program may cut to 32 bits, beside `spec.INTEGER_OPTIONS`
EXACT = ("labels", "own_indices")


def _apply(
    kind: Loss,
    features: Sequence[Any],
    labels: Any = None,
    bias: Any = None,
    /,
    *,
    scale: Any = None,
    temperature: Any = None,
    guide: Any = None,
    metrics: bool = False,
    axis_name: Any = None,
    teacher: Teacher | None = None,
    **options: Any,
) -> Any:
    """The loss `kind` of features in the order of its arguments; with metrics, (loss, Metrics)."""
    kind, features, loss_options = keywords.with_own(kind, features, options)
    options = dict(loss_options)

    # `dims`: one call for each prefix of the features
    if prefixes.has_prefixes(kind, options):
        require_known(kind, features, {})
        widths_and_weights, prefix_options = prefixes.read_prefixes(kind, features, options)
        prefix_options |= {
            "scale": scale,
            "temperature": temperature,
            "metrics": metrics,
            "guide": guide,
        }
        # The widest prefix comes first, as in `prefixes.loss`. (XLA may choose another order.)
        outs = [
            _apply(
                kind,
                [z[..., :d] for z in features],
                labels,
                bias,
                axis_name=axis_name,
                **prefix_options,
            )
            for d, _ in reversed(widths_and_weights)
        ][::-1]
        losses = [out[0] for out in outs] if metrics else outs
        total = sum(w * loss for (_, w), loss in zip(widths_and_weights, losses, strict=True))
        return (total, outs[-1][1]) if metrics else total

    # Checks of the arguments
    arrays = {name: options.pop(name, None) for name in spec.ARRAY_OPTIONS}
    sample_integers = {name: options.pop(name, None) for name in spec.INTEGER_OPTIONS}
    others = {"scale": scale, "temperature": temperature, "metrics": metrics, "guide": guide}
    # `dims` get here only for a loss that does not take them: `check_traced` refuses them
    others |= {name: options.pop(name, None) for name in spec.PREFIX_OPTIONS}
    require_known(kind, features, options)
    call_axis = None
    if axis_name is not None:
        rows_of_devices = row_features(kind, features, guide, teacher)
        if arrays["own_indices"] is not None:  # a table may be the same on all devices
            rows_of_devices.pop("own", None)
        call_axis = axis.find_axis(axis_name, rows_of_devices)
        require_method(options)  # refuses "fused": callbacks keep no logits
    elif labels is not None and kind.symmetric and not kind.classes:
        raise ValueError("labels: expected with axis_name, of rows on other devices, got no axis")
    all_options = {**options, **sample_integers, **arrays, **others}
    check_traced(kind, features, labels, bias, all_options, call_axis, teacher)

    # The arrays of the call
    if temperature is not None:  # JAX differentiates this division, for temperature's gradient
        scale = 1.0 / temperature
    scale = kind.scale if scale is None else scale
    bias = kind.bias if bias is None else bias
    features = tuple(jnp.asarray(z) for z in features)
    dtype = jnp.float64 if any(z.dtype == jnp.float64 for z in features) else jnp.float32
    as_input = {name: exact_integers if name in EXACT else jnp.asarray for name in arrays}
    inputs = {
        "features": features,
        "scale": _floating(scale, dtype),
        "bias": None if bias is None else _floating(bias, dtype),
        "labels": None if labels is None else exact_integers(labels),
        **{name: apply_to_each(exact_integers, z) for name, z in sample_integers.items()},
        "guide": jax.tree.map(jnp.asarray, tuple(guide) if isinstance(guide, list) else guide),
        **{name: None if z is None else as_input[name](z) for name, z in arrays.items()},
        "grad_out": None,
        **traced_teacher(teacher, dtype),
    }

    # The loss of this device's rows, or of the rows of all devices of an axis
    call = TracedCall(kind, tuple(sorted(options.items())), metrics, axis=call_axis)
    device_parts = differentiable_loss(call, vary_equally(inputs))
    loss, metric_arrays, _ = device_parts
    if call_axis is not None:
        loss, metric_arrays = axis.sum_over_devices(call, len(features[0]), device_parts)
    return (loss, Metrics(**metric_arrays)) if metrics else loss


def require_known(kind: Loss, features: Sequence[Any], options: dict[str, Any]) -> None:
    """TypeError for features that are no arrays, and for options that no compiled program takes."""
    require_arrays(dict(zip(kind.arguments, features, strict=True)))
    for name in options:
        if name not in spec.COMPILED_OPTIONS:
            known = keywords.jax_function(kind)
            raise keywords.unexpected(f"infonce.jax.{kind.name}_loss()", name, known)


def require_arrays(features: Mapping[str, Any]) -> None:
    """TypeError for features that are no arrays."""
    for name, z in features.items():
        if not isinstance(z, (jax.Array, np.ndarray)):
            validation.refuse_views_apart(name, z)
            raise TypeError(f"{name}: expected a JAX array, got {validation.what(z)}")


def check_traced(
    kind: Loss, features: Sequence[Any], labels: Any, bias: Any, options: dict[str, Any],
    call_axis: Axis | None, teacher: Teacher | None = None,
) -> None:  # fmt: skip
    """Check a call while JAX traces it: shapes, dtypes, options, and values that are known.

    `infonce.checks` gets stand-ins for features and traced arrays. The values of traced arrays are
    checked when the program runs.
    """
    positive = ("scale", "temperature", *spec.ARRAY_OPTIONS)  # their stand-ins are 1, others' are 0
    options = {
        **options,
        "wrt": (),
        **{name: apply_to_each(_known_values, options.get(name)) for name in spec.INTEGER_OPTIONS},
        "guide": jax.tree.map(_known_values, options.get("guide")),
        **{name: _known_values(options.get(name), 1) for name in positive},
    }
    if jax.default_backend() != "cpu" and options.get("precision") in spec.CHOICES["precision"]:
        # The stand-ins are host arrays, for which the checks refuse precisions that only a GPU has
        del options["precision"]
    stand_ins = [np.broadcast_to(np.zeros((), z.dtype), z.shape) for z in features]
    batch = None
    if call_axis is not None:
        has_table = options["own_indices"] is not None
        validation.features(
            kind.arguments, stand_ins, describe_arrays(stand_ins), 1, kind.takes_tokens, has_table
        )
        columns = len(stand_ins[kind.key_argument]) * (1 + kind.joint)
        batch = Batch(len(stand_ins[0]) * call_axis.size, columns * call_axis.size)
    labels, bias = _known_values(labels), _known_values(bias)
    request = check(kind, stand_ins, labels, bias, options, True, batch)
    if teacher is not None:
        query, key = (np.broadcast_to(np.zeros((), z.dtype), z.shape) for z in teacher[:2])
        temperature, scale = _known_values(teacher.temperature, 1), _known_values(teacher.scale, 1)
        known = Teacher(query, key, temperature, scale, teacher.two_sided)
        add_teacher(kind, request, stand_ins, known)


def traced_teacher(teacher: Teacher | None, dtype: Any) -> dict[str, Any]:
    """The arrays of a teacher by the names of TEACHER_INPUTS; None for each without a teacher."""
    if teacher is None:
        return dict.fromkeys(TEACHER_INPUTS)
    scale = teacher.scale
    if teacher.temperature is not None:
        scale = 1.0 / teacher.temperature
    scale = None if scale is None else _floating(scale, dtype)
    arrays = jnp.asarray(teacher.query), jnp.asarray(teacher.key), scale
    return dict(zip(TEACHER_INPUTS, arrays, strict=True))


def row_features(
    kind: Loss, features: Sequence[Any], guide: Any, teacher: Teacher | None
) -> dict[str, Any]:
    """All arrays of features, also auxiliary features of a guide or a teacher, by argument name."""
    arrays = dict(zip(kind.arguments, features, strict=True))
    if isinstance(guide, (tuple, list)):
        arrays |= {f"guide[{i}]": z for i, z in enumerate(guide)}
    else:
        arrays["guide"] = guide
    if teacher is not None:
        arrays |= {"teacher_query": teacher.query, "teacher_key": teacher.key}
    return {name: z for name, z in arrays.items() if isinstance(z, (jax.Array, np.ndarray))}


def _known_values(value: Any, otherwise: int = 0) -> Any:
    """The values of a JAX array, if they can be read without waiting for a device.

    Otherwise a stand-in whose elements are the number `otherwise`. Values that are no JAX arrays
    are returned as they are.
    """
    if isinstance(value, SplitIntegers):
        return stand_in(value, otherwise)
    if not isinstance(value, jax.Array):
        return value
    traced = isinstance(value, jax.core.Tracer)
    if traced or {device.platform for device in value.devices()} != {"cpu"}:
        return stand_in(value, otherwise)
    return np.asarray(value)


def exact_integers(value: Any) -> Any:
    """Integers as a JAX array, or as `SplitIntegers` if JAX would cut them to 32 bits."""
    if isinstance(value, (jax.Array, SplitIntegers)):
        return value
    value = np.asarray(native(value))
    would_cut = jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype
    return SplitIntegers.split(value) if would_cut else jnp.asarray(value)


def apply_to_each(function: Any, value: Any) -> Any:
    """`function` of a value of `spec.INTEGER_OPTIONS`: an array, a pair of arrays, or None."""
    if is_pair(value):
        return tuple(map(function, value))
    return None if value is None else function(value)


def _floating(value: Any, dtype: Any) -> Any:
    """`value` as a JAX array: in its own dtype if it is an array of floats, else in `dtype`."""
    floating = isinstance(value, (jax.Array, np.ndarray)) and jnp.issubdtype(
        value.dtype, jnp.floating
    )
    return jnp.asarray(value) if floating else jnp.asarray(value, dtype)


DOC = """
    >>> loss = infonce.jax.{loss}({call_arguments}, scale=20.0, normalize=True)

    Parameters
    ----------
    {arguments} : arrays [rows, features]
        float64, float32, float16 or bfloat16; the loss is float32 (float64 for float64). The
        gradient of a locked tower is zero.
    scale, temperature : float or 0-d array
        One of them: logits are ``scale * <q, k>``, and scale = 1 / temperature.
    metrics : bool, default False
        Return ``(loss, infonce.Metrics)``; the metrics are a pytree. (In `jit` count
        ``(metrics.row_rank == 0).mean()``.)
    {vectors}, guide : arrays, optional
        As in `infonce.{loss}`, as far as it has them; a pair of arrays for `guide`. They get no
        gradient.
    axis_name : name, or tuple of names, optional
        Axis of `jax.shard_map` or `jax.pmap`: the loss is that of the rows of all its devices, and
        gradients are for the rows of this device, as in `infonce.distributed.{loss}`. An error that
        is found only when the program runs makes the loss NaN, and its message is in the log
        `infonce.jax`.
    labels, bias, {integers}, {options}
        As in `infonce.{loss}`, as far as it has them. Labels, with `axis_name`, as in
        `infonce.distributed.{loss}`.

    Returns
    -------
    0-d array, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        While tracing, naming the argument, what came and what was expected. TypeError also for
        forward mode (`jax.jvp`, `jax.jacfwd`) and for second derivatives: they are not supported.
        ValueError also for these arrays if they are differentiated: {vectors}, guide.
    jax.errors.JaxRuntimeError
        For errors that are found only when the program runs: values of labels, scale and bias that
        are arguments of `jit` (on a CPU), and a workspace that is too small. The error ends with
        the message of the check.
"""


@docstrings.adapted(losses.clip_loss, DOC, keywords.jax_function)
def clip_loss(image: Any, text: Any, **options: Any) -> Any:
    return _apply(spec.CLIP, (image, text), **options)


@docstrings.adapted(losses.info_nce_loss, DOC, keywords.jax_function)
def info_nce_loss(query: Any, key: Any, labels: Any = None, **options: Any) -> Any:
    return _apply(spec.INFO_NCE, (query, key), labels, **options)


@docstrings.adapted(losses.nt_xent_loss, DOC, keywords.jax_function)
def nt_xent_loss(features: Any, *, labels: Any = None, **options: Any) -> Any:
    return _apply(spec.NT_XENT, (features,), labels, **options)


@docstrings.adapted(losses.lit_loss, DOC, keywords.jax_function)
def lit_loss(text: Any, image: Any, **options: Any) -> Any:
    return _apply(spec.LIT, (text, image), **options)


@docstrings.adapted(losses.siglip_loss, DOC, keywords.jax_function)
def siglip_loss(image: Any, text: Any, bias: Any = None, **options: Any) -> Any:
    return _apply(spec.SIGLIP, (image, text), None, bias, **options)


@docstrings.adapted(losses.sup_con_loss, DOC, keywords.jax_function)
def sup_con_loss(features: Any, labels: Any, **options: Any) -> Any:
    return _apply(spec.SUP_CON, (features,), labels, **options)


@keywords.require_positional
def distill_loss(
    query: Any, key: Any, teacher_query: Any, teacher_key: Any, *, teacher_temperature: Any = None,
    teacher_scale: Any = None, two_sided: bool = True, axis_name: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Distillation loss of `infonce.distill_loss`, inside and outside of `jit`.

    >>> loss = infonce.jax.distill_loss(query, key, teacher_query, teacher_key, scale=20.0)

    ``loss = - mean_i sum_j p^T_ij log p_ij``, of queries and, by default, of keys as well.

    Parameters
    ----------
    query, key : arrays [M, D], [N, D]
        float64, float32, float16 or bfloat16.
    teacher_query, teacher_key : arrays [M, E], [N, E]
    teacher_temperature, teacher_scale : float or 0-d array, optional
        Of the teacher, whose arguments get no gradient.
    two_sided : bool, default True
    scale, temperature : float or 0-d array
        One of them.
    axis_name : name, or tuple of names, optional
        As in `infonce.jax.clip_loss`: all four arrays have the rows of this device.
    options
        As in `infonce.distill_loss`.

    Returns
    -------
    0-d array, or [M] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        While tracing, naming the argument, what came and what was expected; also for a teacher that
        is differentiated.

    References
    ----------
    Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015.
    """
    require_arrays({"teacher_query": teacher_query, "teacher_key": teacher_key})
    teacher = Teacher(teacher_query, teacher_key, teacher_temperature, teacher_scale, two_sided)
    return _apply(
        teacher.loss, (query, key), teacher=teacher, axis_name=axis_name, **options
    )  # fmt: skip


@docstrings.adapted(losses.gte_loss, DOC, keywords.jax_function)
def gte_loss(query: Any, key: Any, **options: Any) -> Any:
    return _apply(spec.GTE, (query, key), **options)
