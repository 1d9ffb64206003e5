"""From a call to its result: its checks, its backend, its result as the caller's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from . import arrays
from .checks.call import Request, check
from .kernels.conclude import weighted
from .kernels.problem import LN_2, SILENT, Array, Problem
from .kernels.solve import Solution
from .result import LossAndGrad, Metrics, QueryKeyGrads
from .spec import Loss


def loss(
    kind: Loss, given: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any]
) -> Array:
    """The loss alone."""
    with arrays.on_stream_of(given[0]):
        features = list(map(arrays.native, given, kind.arguments))
        with compute_context(features[0]):
            request = check(kind, features, labels, bias, options, with_grad=False)
            arrays.warn_of_lost_gradients(kind, given, bias, options)
            return arrays.converter_to(given[0])(_reduce(request, _solve(request)))


def loss_and_grad(
    kind: Loss,
    given: Sequence[Array],
    labels: Any,
    bias: Any,
    options: Mapping[str, Any],
    grad_buffers: dict[str, Any] | None = None,
) -> LossAndGrad:
    """The loss and the gradients in `wrt`: in `grad_buffers`, where an adapter passes them."""
    with arrays.on_stream_of(given[0]):
        features = list(map(arrays.native, given, kind.arguments))
        with compute_context(features[0]):
            request = check(
                kind, features, labels, bias, options, with_grad=True, grad_buffers=grad_buffers
            )
            return _result(kind, request, _solve(request), arrays.converter_to(given[0]))


def _result(
    kind: Loss, request: Request, solution: Solution, convert: Callable[[Array], Array]
) -> LossAndGrad:
    """The result of a call; `convert` makes arrays of the caller's library."""
    wrt, given_out, feature_grads = request.wrt, request.given_out, request.feature_grads
    if request.joined is not None:
        for name, part in zip(QueryKeyGrads._fields, np.split(request.joined, 2), strict=False):
            if name in feature_grads:
                feature_grads[name][...] = part
    grads: dict[str, Any] = {}
    for name in kind.arguments:
        given, gradient = given_out.get(name), feature_grads.get(name)
        grads[name] = given if given is not None or gradient is None else convert(gradient)
    grads["scale"] = convert(_zero_d(request, solution.scale_grad)) if "scale" in wrt else None
    if kind.sigmoid:
        grads["bias"] = convert(_zero_d(request, solution.bias_grad)) if "bias" in wrt else None
    return LossAndGrad(
        convert(_reduce(request, solution)),
        kind.grads(**grads),
        _lse(request, solution, convert),
        _metrics(solution, request.problem, convert) if request.metrics else None,
        convert(solution.logits) if request.return_logits else None,
    )


def _lse(
    request: Request, solution: Solution, convert: Callable[[Array], Array]
) -> Callable[[], Any] | None:
    """A function that returns the log-sum-exps: converted on demand, as small batches notice the
    time."""
    rows, columns = solution.row_lse, solution.column_lse
    if rows is not None and rows.dtype != request.dtype:
        rows = rows.astype(request.dtype)
    if columns is not None and columns.dtype != request.dtype:
        columns = columns.astype(request.dtype)
    if rows is None:
        return None
    return lambda: convert(rows) if columns is None else (convert(rows), convert(columns))


def compute_context(array: Array) -> Any:
    """Context for the computation on `array`: its device is the current one, or NumPy does not warn
    of overflow."""
    if not arrays.on_gpu(array):
        return np.errstate(**SILENT)
    return arrays.NO_CONTEXT if array.device.id == arrays.current_device() else array.device


def _solve(request: Request) -> Solution:
    try:
        solution = _backends_solution(request)
    except MemoryError as error:
        raise_with_advice(error, request.problem)
    return solution


def raise_with_advice(error: MemoryError, problem: Problem) -> NoReturn:
    """MemoryError with the message of `error`, and what to use instead."""
    naive = problem.method == "naive"
    advice = 'method="tiled"' if naive else f"a workspace below {problem.workspace} bytes"
    message = f"{str(error).rstrip('.')}; use {advice}"
    raise MemoryError(message) from error  # not of its class: NumPy's and CuPy's format their own


@cache
def _backend(on_gpu: bool) -> Any:
    """The module that solves on a GPU, or on the CPU. `import infonce` does not wait for Numba; and
    an import statement takes time that small batches notice."""
    if on_gpu:
        from .kernels.gpu import select

        return select
    from .kernels.cpu import backend

    return backend


def _backends_solution(request: Request) -> Solution:
    problem, gradients = request.problem, request.gradients
    if request.offload:
        from .kernels.offload import copies as offload_gpu

        return offload_gpu.solve(problem, gradients)
    solution: Solution = _backend(arrays.on_gpu(problem.query)).solve(problem, gradients)
    return solution


def _reduce(request: Request, solution: Solution) -> Array:
    """The loss by `reduction`."""
    if solution.loss is not None:
        return _zero_d(request, solution.loss)
    shares = request.problem.row_shares
    losses = weighted(arrays.namespace(solution.losses), solution.losses, shares)
    if request.reduction == "none":
        return losses.astype(request.dtype, copy=False)
    mean = request.reduction == "mean" and shares is None
    return _zero_d(request, losses.mean() if mean else losses.sum())


def _zero_d(request: Request, value: Array) -> Array:
    assert value is not None  # of which NumPy makes NaN
    if arrays.on_gpu(value) and value.dtype == request.dtype:
        return value
    return arrays.namespace(request.problem.query).asarray(value, dtype=request.dtype)


def _metrics(solution: Solution, problem: Problem, convert: Callable[[Array], Array]) -> Metrics:
    stats = solution.statistics
    assert stats is not None
    symmetric = stats.column_rank is stats.row_rank
    assert solution.direction_losses is not None
    row_loss, column_loss = solution.mean_losses or (
        None if losses is None else losses.mean() for losses in solution.direction_losses
    )
    xp = arrays.namespace(solution.direction_losses[0])
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
