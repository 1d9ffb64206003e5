"""From a call to a result: array type -> backend -> solution -> arrays of the caller's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from . import arrays
from .checks.call import Request, check
from .kernels.problem import LN_2, SILENT, Array, Problem
from .kernels.solve import Solution, solve
from .result import LossAndGrad, Metrics
from .spec import Loss


def loss(
    kind: Loss, given: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any]
) -> Array:
    """The loss alone."""
    with arrays.on_stream_of(given[0]), np.errstate(**SILENT):
        features = [arrays.native(z, name) for z, name in zip(given, kind.arguments, strict=True)]
        with _device(features[0]):
            request = check(kind, features, labels, bias, options, with_grad=False)
            arrays.warn_of_lost_gradients(kind, given, bias, options)
            return arrays.back(given[0])(_reduce(request, _solve(request)))


def loss_and_grad(
    kind: Loss,
    given: Sequence[Array],
    labels: Any,
    bias: Any,
    options: Mapping[str, Any],
    made: dict[str, Any] | None = None,
) -> LossAndGrad:
    """The loss and whatever gradients were asked for; in `made`, where an adapter brings it."""
    with arrays.on_stream_of(given[0]), np.errstate(**SILENT):
        features = [arrays.native(z, name) for z, name in zip(given, kind.arguments, strict=True)]
        with _device(features[0]):
            request = check(kind, features, labels, bias, options, with_grad=True, made=made)
            return _result(kind, request, _solve(request), arrays.back(given[0]))


def _result(
    kind: Loss, request: Request, solution: Solution, back: Callable[[Array], Array]
) -> LossAndGrad:
    """What was asked for, as the caller's kind of arrays."""

    wrt, given_out, feature_grads = request.wrt, request.given_out, request.feature_grads
    grads: dict[str, Any] = {}
    for name in kind.arguments:
        mine, gradient = given_out.get(name), feature_grads.get(name)
        grads[name] = mine if mine is not None or gradient is None else back(gradient)
    grads["scale"] = back(_zero_d(request, solution.scale_grad)) if "scale" in wrt else None
    if kind.sigmoid:
        grads["bias"] = back(_zero_d(request, solution.bias_grad)) if "bias" in wrt else None
    return LossAndGrad(
        back(_reduce(request, solution)),
        kind.grads(**grads),
        _lse(request, solution, back),
        _metrics(solution, back) if request.metrics else None,
        back(solution.logits) if request.return_logits else None,
    )


def _lse(
    request: Request, solution: Solution, back: Callable[[Array], Array]
) -> Callable[[], Any] | None:
    """What hands the log-sum-exps out; few ask for them, and small batches notice the time."""
    rows, columns = solution.row_lse, solution.column_lse
    if rows is not None and rows.dtype != request.dtype:
        rows = rows.astype(request.dtype)
    if columns is not None and columns.dtype != request.dtype:
        columns = columns.astype(request.dtype)
    if rows is None:
        return None
    return lambda: back(rows) if columns is None else (back(rows), back(columns))


def _device(array: Array) -> Any:
    """Context in which the device that `array` is on is the current one."""
    if not arrays.on_gpu(array) or array.device.id == arrays.current_device():
        return arrays.NOTHING
    return array.device


def _solve(request: Request) -> Solution:
    try:
        return _backends_solution(request)
    except MemoryError as error:
        raise_with_advice(error, request.problem)


def raise_with_advice(error: MemoryError, problem: Problem) -> NoReturn:
    """MemoryError with the words of `error`, and what to use instead."""
    naive = problem.method == "naive"
    advice = 'method="tiled"' if naive else f"a workspace below {problem.workspace} bytes"
    told = f"{str(error).rstrip('.')}; use {advice}"
    raise MemoryError(told) from error  # NumPy's and CuPy's kinds have their own words


def _backends_solution(request: Request) -> Solution:
    # imported here: `import infonce` waits for no compiler
    problem, gradients = request.problem, request.gradients
    if request.offload:
        from .kernels.offload import copies as offload_gpu

        return solve(problem, offload_gpu.backend(problem, gradients), gradients)
    if arrays.on_gpu(problem.query):
        from .kernels.gpu import select

        return select.solve(problem, gradients)
    if problem.method == "naive":
        from .kernels.cpu import naive

        return naive.solve(problem, gradients)
    from .kernels.cpu.backend import CPU

    return solve(problem, CPU(problem, gradients), gradients)


def _reduce(request: Request, solution: Solution) -> Array:
    """Per-row losses to the result the caller asked for."""
    if solution.loss is not None:
        return _zero_d(request, solution.loss)
    losses = solution.losses
    xp = arrays.namespace(losses)
    if request.without_positive is not None:
        losses = xp.where(request.without_positive, xp.nan, losses)
    if request.reduction == "none":
        return losses.astype(request.dtype, copy=False)
    return _zero_d(request, losses.sum() if request.reduction == "sum" else losses.mean())


def _zero_d(request: Request, value: Array) -> Array:
    if arrays.on_gpu(value) and value.dtype == request.dtype:
        return value
    return arrays.namespace(request.problem.query).asarray(value, dtype=request.dtype)


def _metrics(solution: Solution, back: Callable[[Array], Array]) -> Metrics:
    stats = solution.statistics
    assert stats is not None
    symmetric = stats.column_rank is stats.row_rank
    assert solution.directions is not None
    row_loss, column_loss = solution.means or (
        None if losses is None else losses.mean() for losses in solution.directions
    )
    xp = arrays.namespace(solution.directions[0])
    return Metrics(
        row_loss=back(xp.asarray(row_loss)),
        column_loss=None if column_loss is None else back(xp.asarray(column_loss)),
        row_rank=back(stats.row_rank),
        column_rank=None if symmetric or stats.column_rank is None else back(stats.column_rank),
        positive=back(LN_2 * stats.positive),
        hardest_negative=back(LN_2 * stats.rows.max),
    )
