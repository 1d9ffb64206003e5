"""From a call to its result: its checks, its backend, its result as the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from . import arrays
from .checks import prefixes
from .checks.call import Request, check
from .checks.teacher import add_teacher
from .kernels.direction_losses import weigh_losses
from .kernels.problem import LN_2, Array, Gradients, Problem
from .kernels.solve import Solution
from .result import LossAndGrad, Metrics, QueryKeyGrads
from .spec import Loss


def loss(
    kind: Loss, caller_arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any],
    teacher: Any = None,
) -> Array:  # fmt: skip
    """The loss of the caller's arrays, without gradients."""
    if prefixes.has_prefixes(kind, options):
        result = _in_one_pass(kind, caller_arrays, labels, bias, options, False)
        if result is not None:
            return result
        return prefixes.loss(
            kind, caller_arrays, options, lambda z, others: loss(kind, z, labels, bias, others)
        )
    with arrays.use_caller_stream(caller_arrays[0]):
        features = arrays.natives(caller_arrays, kind.arguments)
        with arrays.compute_context(features[0]):
            request = check(kind, features, labels, bias, options, with_grad=False)
            if teacher is not None:
                add_teacher(kind, request, features, teacher)
            arrays.warn_of_lost_gradients(kind, caller_arrays, bias, options)
            return make_loss(request, _solve(request), caller_arrays[0])


def loss_and_grad(
    kind: Loss,
    caller_arrays: Sequence[Array],
    labels: Any,
    bias: Any,
    options: Mapping[str, Any],
    grad_buffers: dict[str, Any] | None = None,
    teacher: Any = None,
) -> LossAndGrad:
    """The loss and the gradients in `wrt`. An adapter may pass `grad_buffers` for the gradients."""
    if prefixes.has_prefixes(kind, options):
        result = _in_one_pass(kind, caller_arrays, labels, bias, options, True)
        if result is not None:
            return result  # type: ignore[no-any-return]
        return prefixes.loss_and_grad(
            kind,
            caller_arrays,
            options,
            lambda z, others: loss_and_grad(kind, z, labels, bias, others),
        )
    with arrays.use_caller_stream(caller_arrays[0]):
        features = arrays.natives(caller_arrays, kind.arguments)
        with arrays.compute_context(features[0]):
            request = check(
                kind, features, labels, bias, options, with_grad=True, grad_buffers=grad_buffers
            )
            if teacher is not None:
                add_teacher(kind, request, features, teacher)
            return make_result(kind, request, _solve(request), caller_arrays[0])


def _in_one_pass(
    kind: Loss, caller_arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any],
    with_grad: bool,
) -> Any:  # fmt: skip
    """The result of a call with `dims`, computed in one pass.

    None if the call needs a pass for each prefix.
    """
    features = arrays.natives(caller_arrays, kind.arguments)
    if not all(isinstance(z, np.ndarray) for z in features):
        return None
    widths_and_weights, others = prefixes.check_and_read(kind, features, options)
    widest = widths_and_weights[-1][0]
    # one pass: two prefixes or more, the last of all features, of two arrays that get gradients
    if len(widths_and_weights) == 1 or widest < features[0].shape[1]:
        return None
    if kind.symmetric or kind.locked:
        return None
    with arrays.compute_context(features[0]):
        request = check(kind, features, labels, bias, others, with_grad=with_grad)
        if request.offload:
            return None
        from .kernels.prefixes.solve import solve_prefixes

        try:
            solution = solve_prefixes(request.problem, request.gradients, widths_and_weights)
        except MemoryError as error:
            raise_with_advice(error, request.problem)
        if solution is None:
            return None
        if with_grad:
            return make_result(kind, request, solution, caller_arrays[0])
        return make_loss(request, solution, caller_arrays[0])


def make_loss(request: Request, solution: Solution, caller: Array) -> Array:
    """The loss, as an array of the library of `caller`."""
    return arrays.converter_to(caller)(_reduced(request, solution))


def make_result(kind: Loss, request: Request, solution: Solution, caller: Array) -> LossAndGrad:
    """The result of a call, in arrays of the library of `caller`."""
    convert = arrays.converter_to(caller)
    wrt, given_out, feature_grads = request.wrt, request.given_out, request.feature_grads
    if request.joined is not None:
        for name, part in zip(QueryKeyGrads._fields, np.split(request.joined, 2), strict=False):
            if name in feature_grads:
                feature_grads[name][...] = part
    grads: dict[str, Any] = {}
    for name in kind.arguments:
        caller_out, gradient = given_out.get(name), feature_grads.get(name)
        grads[name] = (
            caller_out if caller_out is not None or gradient is None else convert(gradient)
        )
    grads["scale"] = (
        convert(_scalar_array(request, solution.scale_grad)) if "scale" in wrt else None
    )
    if kind.sigmoid:
        grads["bias"] = (
            convert(_scalar_array(request, solution.bias_grad)) if "bias" in wrt else None
        )
    return LossAndGrad(
        convert(_reduced(request, solution)),
        kind.grads(**grads),
        _lse(request, solution, convert),
        _metrics(request, solution, convert) if request.metrics else None,
        convert(solution.logits) if request.return_logits else None,
    )


def _lse(
    request: Request, solution: Solution, convert: Callable[[Array], Array]
) -> Callable[[], Any] | None:
    """A function that returns the log-sum-exps. It converts them on demand, because a conversion
    takes a noticeable part of a small call."""
    rows, columns = solution.row_lse, solution.column_lse
    if rows is not None and rows.dtype != request.dtype:
        rows = rows.astype(request.dtype)
    if columns is not None and columns.dtype != request.dtype:
        columns = columns.astype(request.dtype)
    if rows is None:
        return None
    return lambda: convert(rows) if columns is None else (convert(rows), convert(columns))


def _solve(request: Request) -> Solution:
    return solve(request.problem, request.gradients, request.offload, request.on_gpu)


def solve(
    problem: Problem, gradients: Gradients | None, offload: bool = False, on_gpu: bool = False
) -> Solution:
    """The solution of a checked problem."""
    try:
        solution: Solution = _backend(offload, on_gpu).solve(problem, gradients)
    except MemoryError as error:
        raise_with_advice(error, problem)
    return solution


def raise_with_advice(error: MemoryError, problem: Problem) -> NoReturn:
    """MemoryError with the message of `error`, and what to use instead."""
    naive = problem.method == "naive"
    advice = 'method="tiled"' if naive else f"a workspace below {problem.workspace} bytes"
    message = f"{str(error).rstrip('.')}; use {advice}"
    # a plain MemoryError, because subclasses of NumPy and CuPy format their own message
    raise MemoryError(message) from error


@cache
def _backend(offload: bool, on_gpu: bool) -> Any:
    """The module that solves a problem: with features in host memory (`offload`), with features on
    a GPU, or on the CPU.

    The import is here, so that `import infonce` does not wait for Numba. The cache is here, because
    an import statement takes time that small batches notice.
    """
    if offload:
        from .kernels.offload import copies

        return copies
    if on_gpu:
        from .kernels.gpu import select

        return select
    from .kernels.cpu import backend

    return backend


def _reduced(request: Request, solution: Solution) -> Array:
    """The losses of rows [M] with `reduction="none"`, otherwise their mean or sum.

    If GPU kernels have reduced the losses, the result is `solution.loss`.
    """
    if solution.loss is not None:
        return _scalar_array(request, solution.loss)
    row_shares = request.problem.row_shares
    losses = weigh_losses(request.static.xp, solution.losses, row_shares)
    if request.reduction == "none":
        return losses.astype(request.dtype, copy=False)
    # row shares of a mean add up to 1, so the sum of the weighed losses is their mean
    mean = request.reduction == "mean" and row_shares is None
    return _scalar_array(request, losses.mean() if mean else losses.sum())


def _scalar_array(request: Request, value: Array) -> Array:
    """`value` as an array without dimensions, in the dtype of the loss."""
    assert value is not None  # np.asarray(None, float) would be NaN
    if request.on_gpu and value.dtype == request.dtype:
        return value
    return request.static.xp.asarray(value, dtype=request.dtype)


def _metrics(request: Request, solution: Solution, convert: Callable[[Array], Array]) -> Metrics:
    stats, problem, xp = solution.statistics, request.problem, request.static.xp
    assert stats is not None
    symmetric = stats.column_rank is stats.row_rank
    assert solution.direction_losses is not None
    row_loss, column_loss = solution.mean_losses or (
        None if losses is None else losses.mean() for losses in solution.direction_losses
    )
    to_logits = LN_2
    if problem.hardness:  # exponents have another scale
        to_logits = LN_2 * problem.scale / problem.exponent_scale
    return Metrics(
        row_loss=convert(xp.asarray(row_loss)),
        column_loss=None if column_loss is None else convert(xp.asarray(column_loss)),
        row_rank=convert(stats.row_rank),
        column_rank=None if symmetric or stats.column_rank is None else convert(stats.column_rank),
        positive=convert(LN_2 * stats.positive_logits),
        hardest_negative=convert(to_logits * stats.rows.max),
    )
