"""From a call of a loss to its result: checks, backend, and the result in the caller's arrays.

The functions of `losses` come here. The checks (`checks.call`) make a `Request`, which has a
`Problem`; a backend of `kernels` makes a `Solution` of it; and `make_result` makes the result.
Adapters (torch, JAX, ranks) enter at `loss_and_grad` or call the later steps themselves.
"""

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
from .kernels.maxsim.tokens import Tokens
from .kernels.problem import LN_2, Array, Gradients, Problem
from .kernels.solve import Solution
from .result import LossAndGrad, Metrics, QueryKeyGrads
from .spec import Loss


def loss(
    kind: Loss, caller_arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any],
    teacher: Any = None,
) -> Array:  # fmt: skip
    """The loss of the caller's arrays, without gradients: 0-d, or [M] with `reduction="none"`.

    `bias` is of SigLIP, `teacher` of distillation; `options` are the keywords that were passed.
    """
    if prefixes.has_prefixes(kind, options):
        options = prefixes.listed(options)
        arrays.warn_of_lost_gradients(kind, caller_arrays, bias, options)
        result = _in_one_pass(kind, caller_arrays, labels, bias, options, with_grad=False)
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
            result = make_loss(request, _solve(request), caller_arrays[0])
            arrays.keep_until_read(features[0], caller_arrays, labels, bias, teacher, options)
            return result


def loss_and_grad(
    kind: Loss,
    caller_arrays: Sequence[Array],
    labels: Any,
    bias: Any,
    options: Mapping[str, Any],
    grad_buffers: dict[str, Any] | None = None,
    teacher: Any = None,
) -> LossAndGrad:
    """The loss, and the gradients of the arguments in `options["wrt"]` (default: of all).

    `grad_buffers` (argument -> array) are arrays of an adapter, into which feature gradients go.
    They are not checked. The arrays `options["out"]`, which are the caller's, are checked.
    """
    if prefixes.has_prefixes(kind, options):
        options = prefixes.listed(options)
        result = _in_one_pass(kind, caller_arrays, labels, bias, options, with_grad=True)
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
            out = make_result(kind, request, _solve(request), caller_arrays[0])
            arrays.keep_until_read(features[0], caller_arrays, labels, bias, teacher, options)
            return out


def _in_one_pass(
    kind: Loss, caller_arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any],
    with_grad: bool,
) -> Any:  # fmt: skip
    """The result of a call with `dims` whose prefixes share their matrix products, on the CPU.

    None if the prefixes cannot share products: then `prefixes` makes each prefix a call of its own.
    Such calls are: calls on a GPU or with `offload`; calls that the conditions below exclude; and
    calls that `solve_prefixes` refuses, because of their options or small batches (`fits`), or
    because of too little workspace.
    """
    features = arrays.natives(caller_arrays, kind.arguments)
    if not all(isinstance(z, np.ndarray) for z in features):
        return None
    widths_and_weights, others = prefixes.check_and_read(kind, features, options)
    widest = widths_and_weights[-1][0]
    # These calls are excluded: calls with one prefix, which has no products to share; calls whose
    # widest prefix lacks the last features, because `solve_prefixes` computes its last prefix from
    # all features; losses whose queries are the keys; LiT; and sets of tokens
    if len(widths_and_weights) == 1 or widest < features[0].shape[-1]:
        return None
    if kind.symmetric or kind.locked or features[0].ndim == 3:
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


def make_loss(request: Request, solution: Solution, caller_array: Array) -> Array:
    """The loss, as an array of the library of `caller_array`."""
    return arrays.converter_to(caller_array)(_reduced(request, solution))


def make_result(
    kind: Loss, request: Request, solution: Solution, caller_array: Array
) -> LossAndGrad:
    """The result of a call, in arrays of the library of `caller_array`.

    The backend has written the feature gradients to `request.feature_grads`. A gradient in an array
    of `out` is returned as that array itself.
    """
    convert = arrays.converter_to(caller_array)
    wrt, given_out, feature_grads = request.wrt, request.given_out, request.feature_grads
    if request.joined is not None:  # gte: gradients of all queries, then of all keys
        for name, half in zip(QueryKeyGrads._fields, np.split(request.joined, 2), strict=False):
            if name in feature_grads:
                feature_grads[name][...] = half
    grads: dict[str, Any] = {}
    for name in kind.arguments:
        out_of_caller, gradient = given_out.get(name), feature_grads.get(name)
        grads[name] = (
            out_of_caller if out_of_caller is not None or gradient is None else convert(gradient)
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
    """A function that returns the log-sum-exps, or None: SigLIP has none.

    `LossAndGrad.lse` calls the function when the caller first reads `lse`, because a conversion to
    the caller's library takes a noticeable part of the time of a small call.
    """
    row_lse, column_lse = solution.row_lse, solution.column_lse
    if row_lse is not None and row_lse.dtype != request.dtype:
        row_lse = row_lse.astype(request.dtype)
    if column_lse is not None and column_lse.dtype != request.dtype:
        column_lse = column_lse.astype(request.dtype)
    if row_lse is None:
        return None
    if column_lse is None:
        return lambda: convert(row_lse)
    return lambda: (convert(row_lse), convert(column_lse))


def _solve(request: Request) -> Solution:
    return solve(request.problem, request.gradients, request.offload, request.on_gpu)


def solve(
    problem: Problem, gradients: Gradients | None, offload: bool = False, on_gpu: bool = False
) -> Solution:
    """The solution of a checked problem. `gradients` are the destinations of feature gradients."""
    try:
        of_tokens = problem.query.__class__ is Tokens
        solution: Solution = backend(offload, on_gpu, of_tokens).solve(problem, gradients)
    except MemoryError as error:
        raise_with_advice(error, problem)
    return solution


def raise_with_advice(error: MemoryError, problem: Problem) -> NoReturn:
    """Raise a MemoryError with the message of `error`, and the method or workspace to use.

    Memory was too small for the logits with `method="naive"`, or for the workspace with another
    method.
    """
    naive = problem.method == "naive"
    advice = 'method="tiled"' if naive else f"a workspace below {problem.workspace} bytes"
    message = f"{str(error).rstrip('.')}; use {advice}"
    # a plain MemoryError, because subclasses of NumPy and CuPy format their own message
    raise MemoryError(message) from error


@cache
def backend(offload: bool, on_gpu: bool, of_tokens: bool) -> Any:
    """The module whose function `solve` solves a problem.

    `offload`: a GPU computes with features in host memory. `on_gpu`: features are on a GPU.
    `of_tokens`: features are sets of tokens. The imports are inside the function, so that `import
    infonce` does not wait for Numba. The result is cached, because an import statement takes time
    that small batches notice.
    """
    if of_tokens and on_gpu:
        from .kernels.maxsim import gpu

        return gpu
    if of_tokens:
        from .kernels.maxsim import cpu

        return cpu
    if offload:
        from .kernels.offload import copies

        return copies
    if on_gpu:
        from .kernels.gpu import select

        return select
    from .kernels.cpu import backend

    return backend


def _reduced(request: Request, solution: Solution) -> Array:
    """The losses of rows [M] with `reduction="none"`, otherwise their mean or sum, 0-d."""
    # reduced already: by kernels of a GPU, by the CPU's code for one block, or over ranks
    if solution.loss is not None:
        return _scalar_array(request, solution.loss)
    row_shares = request.problem.row_shares
    losses = weigh_losses(request.static.xp, solution.losses, row_shares)
    if request.reduction == "none":
        return losses.astype(request.dtype, copy=False)
    # row shares already contain the division of a mean: they add up to 1
    divide = request.reduction == "mean" and row_shares is None
    return _scalar_array(request, losses.mean() if divide else losses.sum())


def _scalar_array(request: Request, value: Array) -> Array:
    """A single number as a 0-d array in the dtype of the loss."""
    assert value is not None  # np.asarray(None, float) would silently be NaN
    if request.on_gpu and value.dtype == request.dtype:  # on the CPU it may be a NumPy scalar
        return value
    return request.static.xp.asarray(value, dtype=request.dtype)


def _metrics(request: Request, solution: Solution, convert: Callable[[Array], Array]) -> Metrics:
    """The metrics of a call with `metrics=True`, in arrays of the caller's library."""
    stats, problem, xp = solution.statistics, request.problem, request.static.xp
    assert stats is not None
    queries_are_keys = stats.column_rank is stats.row_rank
    assert solution.direction_losses is not None
    # over ranks, means over the whole batch are already known
    row_loss, column_loss = solution.mean_losses or (
        None if losses is None else losses.mean() for losses in solution.direction_losses
    )
    # Statistics are exponents in base 2. With `hardness`, the exponents of negatives have the scale
    # scale + hardness (`exponent_scale`), and logits have the scale alone
    exponent_to_logit = LN_2
    if problem.hardness:
        exponent_to_logit = LN_2 * problem.scale / problem.exponent_scale
    has_column_rank = not queries_are_keys and stats.column_rank is not None
    return Metrics(
        row_loss=convert(xp.asarray(row_loss)),
        column_loss=None if column_loss is None else convert(xp.asarray(column_loss)),
        row_rank=convert(stats.row_rank),
        column_rank=convert(stats.column_rank) if has_column_rank else None,
        positive=convert(LN_2 * stats.positive_logits),
        hardest_negative=convert(exponent_to_logit * stats.rows.max),
    )
