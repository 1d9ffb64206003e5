"""The checks of a whole call: before any work, its arguments become a `Problem`.

`dispatch` calls `check`. Checks that read no element of an array (`_check_static`) are cached, and
skipped in later calls of the same shapes and options. Checks of single arguments are in
`validation`, `rows`, `softmax`, `outputs` and `norms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import spec
from ..arrays import describe_arrays, namespace, native
from ..kernels.maxsim.tokens import Tokens
from ..kernels.options import count_positives, weigh_positives
from ..kernels.problem import (
    WORKSPACE,
    Array,
    Gradients,
    Problem,
    fast_replace,
    materialize_vectors,
    uses_moments,
)
from ..spec import BOOLEAN_OPTIONS, CHOICES, DEFAULTS, GRAD_ONLY, Loss
from . import norms, outputs, rows, softmax, tokens, validation
from .keywords import unexpected
from .validation import Batch

# The keywords of functions with gradients (True), and without
ALLOWED = {True: frozenset(DEFAULTS), False: frozenset(DEFAULTS) - GRAD_ONLY}
# Keywords of the functions of the same names in other packages
ELSEWHERE = {"axis_name": "infonce.jax", "comm": "infonce.distributed", "group": "infonce.torch"}
SCALARS = frozenset({"scale", "bias"})  # arguments in `wrt` that are no features
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


@dataclass(eq=False)
class Request:
    """A checked call: its problem, and which results of the solution `dispatch` returns."""

    problem: Problem
    gradients: Gradients | None  # destinations for the backend; None: no feature gradients
    # name -> array for the gradient of a feature argument in `wrt`, as NumPy or CuPy array
    feature_grads: dict[str, Array]
    given_out: dict[str, Array]  # name -> array of `out`, in the caller's library
    wrt: frozenset[str]  # arguments whose gradients are returned
    reduction: str
    dtype: np.dtype[Any]  # of the loss
    metrics: bool
    return_logits: bool
    offload: bool  # whether a GPU computes with features in host memory
    on_gpu: bool  # whether the features are on a GPU
    static: _StaticChecks  # the same object for calls with the same key in `_cache`
    # gte: the gradients [2B, D] of queries, then keys, to copy to `feature_grads`; None: no copy
    joined: Array = None


@dataclass(eq=False)
class _StaticChecks:
    """The results of the checks that depend only on shapes, dtypes, devices and plain options.
    They are kept in `_cache`, because a training loop repeats the same call."""

    xp: Any  # numpy or cupy
    batch: Batch
    scale: float | None  # None: the scale is an array, which is checked in every call
    bias: float | None  # None: the bias is an array, or the loss has no bias
    products_may_overflow: bool  # float64 on the host, not normalized: every call checks norms
    check_finite: bool
    wrt: frozenset[str]
    gradient_types: dict[str, tuple[Any, Any]]  # feature argument in `wrt` -> shape, dtype
    grad_dtype: np.dtype[Any] | None  # None: the dtype of the features
    want_query: bool  # the gradient of the first argument is wanted
    want_key: bool  # the keys are an argument of their own, whose gradient is wanted
    reduction: str
    common_share: float  # factor of every row's loss in the reduced loss, if rows have no weights
    dtype: np.dtype[Any]  # of the loss
    return_logits: bool
    offload: bool
    has_tokens: bool  # features are sets of tokens, [rows, tokens, D]
    has_vectors: bool  # a call has labels, own negatives or an option in `PER_CALL`
    template: Problem  # the problem of such calls, without features, scale, bias and vectors
    # whether the template has arrays for the default `positives` and `upstream`: only for small
    # calls on the CPU, without vectors (`has_vectors`) and without a joint loss
    template_has_defaults: bool


PLAIN = frozenset({bool, int, float, str, frozenset, type(None)})  # types of plain options
# Options whose values are checked in every call; also options in `NUMBERS`, if they are arrays
PER_CALL = {"out", "grad_out", "progress", "guide", *spec.INTEGER_OPTIONS, *spec.ARRAY_OPTIONS}
NUMBERS = frozenset({"scale", "temperature"})
MOST_TEMPLATE_LOGITS = 2**20  # M x N for `template_has_defaults`; as many as one block may have
MOST_CACHED = 256  # calls in `_cache`; one more empties it
_cache: dict[tuple[Any, ...], _StaticChecks] = {}  # key of a call (`_cache_key`) -> its checks


def check(
    loss: Loss, arrays: Sequence[Array], labels: Array | None, bias: Any,
    options: Mapping[str, Any], with_grad: bool, batch: Batch | None = None,
    grad_buffers: dict[str, Any] | None = None,
) -> Request:  # fmt: skip
    """Check one call of a loss on `arrays`, its features as NumPy or CuPy arrays.

    `batch` is the batch of all ranks; None: the arrays are the whole batch. `grad_buffers` (name ->
    array) are an adapter's arrays for feature gradients: unlike `out` they are not checked."""
    labelled = labels is not None
    descriptions = describe_arrays(arrays)
    cache_key = None  # no cache for arrays that are neither of NumPy nor of CuPy
    if None not in descriptions:
        cache_key = _cache_key(loss, descriptions, labelled, bias, options, with_grad, batch)
    static = None if cache_key is None else _cache.get(cache_key)
    if static is None:
        static = _check_static(
            loss, arrays, descriptions, labelled, bias, options, with_grad, batch
        )
        if cache_key is not None:
            if len(_cache) >= MOST_CACHED:
                _cache.clear()
            _cache[cache_key] = static
        # At the first call of a kind. Arrays on a GPU are not read: the host would wait for it
        has_masks = "query_mask" in options or "key_mask" in options  # padding may hold anything
        if static.xp is np and "normalize" not in options and not has_masks:
            norms.warn_if_far_from_one(loss, arrays)

    scale = static.scale
    if scale is None:  # an array, whose value may change from call to call
        scale = validation.scale(
            loss, options.get("temperature"), options.get("scale"),
            static.template.compute_precision,
        )  # fmt: skip
    bias_is_array = loss.sigmoid and static.bias is None
    bias = validation.number("bias", bias) if bias_is_array else static.bias
    query, key = arrays[0], arrays[loss.key_argument]
    if static.has_tokens:
        query, key = tokens.make(static.xp, arrays, options)
    if loss.joint:  # one softmax over all rows: queries and keys are the same 2B rows
        query = key = static.xp.concatenate([query, key])
    problem = fast_replace(static.template, query=query, key=key, scale=scale, bias=bias)
    if static.has_vectors:
        _add_vectors(problem, loss, static, arrays, labels, options, batch)
    may_overflow = static.products_may_overflow and isinstance(scale, float)  # not read on a GPU
    if static.check_finite or may_overflow:
        named = dict(zip(loss.arguments, arrays, strict=True))
        read = norms.without_unread(static.xp, named, options)
        if static.check_finite:
            norms.require_finite(static.xp, read)
        if may_overflow:
            norms.require_finite_logits(loss, [*read.values()], scale)
    if problem.retrieval_ranks:
        softmax.require_metrics(problem)
    return _request(loss, static, problem, arrays, options.get("out"), with_grad, grad_buffers)


def check_options(loss: Loss, bias: Any, options: Mapping[str, Any]) -> None:
    """The checks of options that a module knows before it is called: those that need no features,
    and read no array. A scale, and options that others need, may come with the call."""
    values = _options(loss, options, with_grad=True)
    validation.workspace(values["workspace"])
    softmax.options(loss, values, complete=False)
    if not values["temperature"] is values["scale"] is None:
        validation.scale(loss, values["temperature"], values["scale"], "fp64")
    if bias is not None:
        validation.number("bias", bias)


def _add_vectors(
    problem: Problem, loss: Loss, static: _StaticChecks, arrays: Sequence[Array],
    labels: Array | None, options: Mapping[str, Any], batch: Batch | None,
) -> None:  # fmt: skip
    """Check the labels and the options in `PER_CALL`, and add them to `problem`."""
    get, xp, reduction = options.get, static.xp, static.reduction
    m, n = len(arrays[0]), len(arrays[loss.key_argument])
    problem.progress = get("progress")
    if problem.progress is not None and not callable(problem.progress):
        raise TypeError(f"progress: expected a callable, got {validation.what(problem.progress)}")
    if (ids := get("ids")) is not None:
        problem.query_ids, problem.key_ids = rows.sample_integers(xp, loss, "ids", ids, m, n)
        if problem.label_smoothing and problem.id_columns > 1:  # means have one id of each key
            raise ValueError(
                f"ids: expected one column with label_smoothing, got {problem.id_columns}"
            )
    positive_ids, has_positive = get("positive_ids"), None
    decoupled, is_whole_batch = bool(get("decoupled")), batch is None  # False over ranks
    if labels is None and get("label_weights") is not None:
        came = validation.what(get("label_weights"))
        raise ValueError(f"label_weights: expected None without labels, got {came}")
    if loss.classes:
        problem.classes, problem.positives, has_positive = rows.classes(
            xp, labels, m, decoupled, static.batch.first, is_whole_batch
        )
    elif positive_ids is not None and not loss.sigmoid:
        problem.classes, problem.positives, has_positive = rows.pair_classes(
            xp, loss, positive_ids, m, n, decoupled, is_whole_batch
        )
    elif labels is not None:  # a row of nt_xent (symmetric) has one positive: its other view
        problem.positives, problem.known_row_nans, has_positive, problem.label_weights = (
            rows.positives(
                xp, labels, m, static.batch.columns, not loss.symmetric, get("label_weights")
            )
        )
    if decoupled and problem.classes is not None:
        # sums leave out the positives: classes serve as ids, which exclude pairs
        problem.query_ids, problem.key_ids = problem.classes.rows, problem.classes.columns
    if (weights := get("weights")) is not None:
        weights = rows.weights(xp, weights, m, batch is None)
    problem.weights = rows.row_weights(xp, weights, has_positive)
    shares: Any = static.common_share
    if problem.weights is not None and batch is None:  # ranks: `distributed.run.apply_weights`
        problem.row_shares = shares = rows.row_shares(xp, problem.weights, reduction)
        if reduction != "none":
            problem.common_share = 1.0
    problem.upstream = validation.upstream(xp, get("grad_out", 1.0), reduction, m, shares)
    if get("groups") is not None or not get("in_batch", True):
        default_positives = batch is None and labels is None and positive_ids is None
        _set_groups(problem, loss, static, arrays, options, default_positives)
    if positive_ids is not None and loss.sigmoid:
        problem.query_positive_ids, problem.key_positive_ids = rows.sample_integers(
            xp, loss, "positive_ids", positive_ids, m, n
        )
        problem.positives = xp.full(m, -1, np.int64)  # none: kernels find them by their ids
        if batch is None:  # over ranks, they are counted later, from all keys
            weigh_positives(xp, problem, *count_positives(xp, problem))
    elif positive_ids is not None and not decoupled and problem.pair_options.by_numbers:
        # so that ids and groups leave out no positives
        problem.query_positive_ids = problem.classes.rows
        problem.key_positive_ids = problem.classes.columns
    if (key_bias := get("key_bias")) is not None:
        problem.key_bias = validation.numbers(xp, "key_bias", key_bias, n)
        problem.query_bias = problem.key_bias if loss.symmetric else None
    if (guide := get("guide")) is not None:
        of_rows = [z[:, 0] for z in arrays[:2]] if static.has_tokens else arrays[:2]
        guides = rows.guide(xp, loss, guide, of_rows, static.check_finite)
        if problem.guide_margin < math.inf:
            problem.guide_query, problem.guide_key = guides
    if loss.has_own:
        _add_own(problem, arrays[2], xp, options)


def _add_own(problem: Problem, own: Array, xp: Any, options: Mapping[str, Any]) -> None:
    """Check the options of own negatives, and add them to `problem`."""
    get, m, problem.own = options.get, len(problem.query), own
    shape, like = own.shape[:2], "own"
    if (indices := get("own_indices")) is not None:
        indices, like = rows.own_indices(xp, indices, m), "own_indices"
        shape = indices.shape
    problem.own_mask = rows.own_mask(xp, get("own_mask"), shape, like)
    if indices is not None:
        problem.own_indices, problem.own_mask = rows.rows_of_table(
            xp, indices, len(own), problem.own_mask
        )
    if (bias := get("own_bias")) is not None:
        problem.own_bias = validation.numbers(xp, "own_bias", bias, *shape, counts=problem.own_mask)


def _set_groups(
    problem: Problem, loss: Loss, static: _StaticChecks, arrays: Sequence[Array],
    options: Mapping[str, Any], default_positives: bool,
) -> None:  # fmt: skip
    """Set the groups of queries and keys in `problem`. With `in_batch=False`, all queries are in
    one group and all keys in another, so that no key is a negative.

    `default_positives`: the positive of row i follows from the index i. So the host knows which
    blocks have no positive. A GPU may leave out those that have no common group either.
    """
    xp, sizes = static.xp, (len(arrays[0]), len(arrays[loss.key_argument]))

    def make_two_groups(xp: Any) -> tuple[Array, Array]:
        return xp.zeros(sizes[0], np.int64), xp.ones(sizes[1], np.int64)

    if not options.get("in_batch", True):
        # made on the GPU too: a copy from the host could not be captured in a CUDA graph
        problem.query_groups, problem.key_groups = make_two_groups(xp)
        if xp is not np and default_positives:
            problem.host_groups = make_two_groups(np)
        return
    groups = options.get("groups")
    # groups in a GPU's memory are not read on the host: that would wait for the GPU
    host_knows_groups = xp is not np and rows.on_host("groups", groups)
    pair = rows.sample_integers(np if host_knows_groups else xp, loss, "groups", groups, *sizes)
    problem.query_groups, problem.key_groups = map(xp.asarray, pair)
    if host_knows_groups and default_positives:
        problem.host_groups = pair


def _request(
    loss: Loss, static: _StaticChecks, problem: Problem, arrays: Sequence[Array], out: Any,
    with_grad: bool, grad_buffers: dict[str, Any] | None,
) -> Request:  # fmt: skip
    """The request of a checked problem, with the arrays for its gradients."""
    xp, query = static.xp, problem.query
    outs: dict[str, Array] = {}  # name -> array for the gradient
    given_out: dict[str, Array] = {}
    if grad_buffers is not None:
        outs, given_out = {name: native(z) for name, z in grad_buffers.items()}, grad_buffers
    elif with_grad and not (loss.joint and out is None):  # else `outputs.joined` makes them
        outs, given_out = outputs.gradient_arrays(
            xp, loss, arrays, out, static.gradient_types, static.grad_dtype
        )
    gradients = joined = None
    want_query, want_key = static.want_query, static.want_key
    if loss.joint and static.gradient_types:
        # float64, if products or gradients are float64. Without `normalize`, float32 holds the
        # gradients of float32 products; with it, a division by small norms may leave its range
        wide = problem.compute_precision == "fp64"
        if problem.normalize:
            dtypes = {z.dtype for z in outs.values()}
            dtypes |= {dtype for _, dtype in static.gradient_types.values()}
            wide = wide or DOUBLE in dtypes
        joint_gradient, joined, outs = outputs.joined(
            xp, loss, static.gradient_types, outs, query.shape, DOUBLE if wide else SINGLE
        )
        gradients = Gradients(joint_gradient, want_key=False)
    elif want_query or want_key or "own" in outs:
        query_gradient = outs.get(loss.arguments[0])
        key_gradient = outs.get(loss.arguments[loss.key_argument]) if want_key else None
        gradients = Gradients(
            query_gradient, key_gradient, want_query=want_query, want_key=want_key
        )
        gradients.own = outs.get("own")
    if loss.joint and not static.offload:  # with `offload`, the copies are not in a GPU's workspace
        copies = [z for z in (query, joined, problem.guide_query) if z is not None]
        problem.joint_copy_bytes = sum([z.nbytes for z in copies])
    return Request(
        problem, gradients, outs, given_out, static.wrt, static.reduction, static.dtype,
        problem.retrieval_ranks, static.return_logits, static.offload, xp is not np, static, joined,
    )  # fmt: skip


def _cache_key(
    loss: Loss, descriptions: Sequence[Any], labelled: bool, bias: Any, options: Mapping[str, Any],
    with_grad: bool, batch: Batch | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """The key of a call in `_cache`. It has the types of all options, and values of options.

    If all types are in `PLAIN`, the key has all values. Otherwise it lacks values of `PER_CALL` and
    arrays of `NUMBERS`. It is None if another value is not plain (for `wrt`, a list of names is).
    """
    plain = options  # options whose values are part of the key
    types = tuple(map(type, options.values()))  # part of the key too, because True == 1
    if not PLAIN.issuperset(types):
        plain = {
            name: value
            for name, value in options.items()
            if name not in PER_CALL and not (name in NUMBERS and type(value) not in PLAIN)
        }
        wrt = plain.get("wrt")
        if isinstance(wrt, (tuple, list)) and all([type(name) is str for name in wrt]):
            plain["wrt"] = frozenset(wrt)
        if not PLAIN.issuperset(map(type, plain.values())):
            return None
    bias_type = type(bias)
    if bias_type not in PLAIN:
        bias = None
    names = (*options,)
    return (
        loss, with_grad, labelled, batch, bias, bias_type, names, types, *descriptions,
        *plain.items(),
    )  # fmt: skip


def _check_static(
    loss: Loss, arrays: Sequence[Array], descriptions: Sequence[Any], labelled: bool, bias: Any,
    options: Mapping[str, Any], with_grad: bool, batch: Batch | None,
) -> _StaticChecks:  # fmt: skip
    """The checks that read no element of an array, only shapes, dtypes, devices and options."""
    values = _options(loss, options, with_grad)
    # a rank may have no rows
    least, has_table = 1 if batch is None else 0, values["own_indices"] is not None
    validation.features(loss.arguments, arrays, descriptions, least, loss.takes_tokens, has_table)
    query, key, is_whole_batch = arrays[0], arrays[loss.key_argument], batch is None
    has_tokens = query.ndim == 3
    if has_tokens:
        tokens.require_options(values)
        query, key = Tokens(query), Tokens(key)
    else:
        tokens.refuse_without_tokens(values)
    on_host = descriptions[0][2] is None
    on_cpu = on_host and not values["offload"]
    batch = batch or Batch(len(query), len(key))
    has_positive_ids = values["positive_ids"] is not None
    square = loss.is_square(has_positive_ids)
    validation.shapes(loss, query, key, labelled or has_positive_ids, batch, square)
    if loss.sigmoid:
        plain_bias = bias.__class__ in PLAIN
        bias = validation.number("bias", loss.bias if bias is None else bias)
    dtypes = {z.dtype.name for z in arrays}
    if values["offload"]:
        validation.offload(loss, values["method"], query)
    compute_precision = validation.precision(values["precision"], dtypes, on_cpu, has_tokens)
    scale = validation.scale(loss, values["temperature"], values["scale"], compute_precision)
    if values["return_logits"] and values["method"] != "naive":
        got = f'got method="{values["method"]}"'
        raise ValueError(f'return_logits: expected method="naive", the one that keeps them, {got}')
    softmax_options = softmax.options(loss, values)
    if labelled and has_positive_ids:
        got = validation.what(values["positive_ids"])
        raise ValueError(f"positive_ids: expected None with labels, got {got}")
    wrt = validation.wrt(loss, values["wrt"]) if with_grad else frozenset()
    want_query = loss.arguments[0] in wrt
    want_key = not loss.symmetric and loss.arguments[loss.key_argument] in wrt
    scalar_grads = not wrt.isdisjoint(SCALARS)
    logits = batch.rows * batch.columns
    grad_dtype = validation.grad_dtype(values["grad_dtype"])
    workspace = validation.workspace(values["workspace"])
    common_share = 1.0 / batch.rows if values["reduction"] == "mean" else 1.0
    wide_on_host = on_host and "float64" in dtypes and compute_precision == "fp64"
    template = Problem(
        query=query, key=key, scale=None, upstream=common_share,
        common_share=None if values["reduction"] == "none" else common_share,
        row_direction_weight=loss.row_direction_weight,
        column_direction_weight=loss.column_direction_weight,
        symmetric=loss.symmetric, joint=loss.joint, normalize=bool(values["normalize"]),
        compute_precision=compute_precision, method=values["method"],
        workspace=workspace or WORKSPACE, workspace_given=workspace is not None,
        retrieval_ranks=bool(values["metrics"]), scalar_grads=scalar_grads,
        # a score has no row whose product with its gradient is the scale's
        moments=scalar_grads
        and (has_tokens or uses_moments(logits, want_query or want_key, on_cpu)),
        **dict(softmax_options),
    )  # fmt: skip
    has_vectors = labelled or loss.classes or loss.has_own or not PER_CALL.isdisjoint(options)
    template_has_defaults = on_cpu and is_whole_batch and not (has_vectors or loss.joint)
    template_has_defaults = template_has_defaults and logits <= MOST_TEMPLATE_LOGITS
    if template_has_defaults:
        template = materialize_vectors(template, np)
    return _StaticChecks(
        xp=namespace(arrays[0]),
        batch=batch,
        scale=scale if all(values[name].__class__ in PLAIN for name in NUMBERS) else None,
        bias=bias if loss.sigmoid and plain_bias else None,
        products_may_overflow=wide_on_host and not values["normalize"],
        check_finite=bool(values["check_finite"]),
        wrt=wrt,
        gradient_types={
            name: (z.shape, grad_dtype or validation.native_order(z.dtype))
            for name, z in zip(loss.arguments, arrays, strict=True)
            if name in wrt
        },
        grad_dtype=grad_dtype,
        want_query=want_query,
        want_key=want_key,
        reduction=values["reduction"],
        common_share=common_share,
        dtype=DOUBLE if "float64" in dtypes else SINGLE,
        return_logits=bool(values["return_logits"]),
        offload=bool(values["offload"]),
        has_tokens=has_tokens,
        has_vectors=has_vectors,
        template=fast_replace(template, query=None, key=None),
        template_has_defaults=template_has_defaults,
    )


def _options(loss: Loss, options: Mapping[str, Any], with_grad: bool) -> dict[str, Any]:
    """The value of every option: the caller's or the default. Unknown names raise a TypeError."""
    allowed = ALLOWED[with_grad]
    for name in options:
        if name not in allowed:
            function = f"{loss.name}_loss{'_and_grad' if with_grad else ''}()"
            hint = f"it is one of {loss.name}_loss_and_grad()" if name in GRAD_ONLY else ""
            if name in ELSEWHERE:
                hint = f"it is one of {ELSEWHERE[name]}.{loss.name}_loss()"
            known = [n for n in DEFAULTS if n in allowed and n not in loss.refused]
            raise unexpected(function, name, known, hint)
    values = {**DEFAULTS, **options}
    for name, choices in CHOICES.items():
        validation.choice(name, values[name], choices)
    for name in BOOLEAN_OPTIONS:
        validation.flag(name, values[name])
        values[name] = bool(values[name])  # of NumPy's
    return values
