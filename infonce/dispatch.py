"""From a call to a result: array type -> backend -> solution -> arrays of the caller's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import DEFAULTS, Request, check
from .kernels.blocks import LN_2, Array, Solution, solve
from .result import LossAndGrad, Metrics

if TYPE_CHECKING:
    from .losses import Loss

__all__ = ["DEFAULTS", "loss", "loss_and_grad"]


def loss(
    kind: Loss, arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any]
) -> Array:
    """The loss alone."""
    request = check(kind, arrays, labels, bias, options, with_grad=False)
    return _reduce(request, _solve(request).losses)


def loss_and_grad(
    kind: Loss, arrays: Sequence[Array], labels: Any, bias: Any, options: Mapping[str, Any]
) -> LossAndGrad:
    """The loss and whatever gradients were asked for."""
    request = check(kind, arrays, labels, bias, options, with_grad=True)
    solution = _solve(request)

    def scalar(name: str, value: Any) -> Any:
        return np.asarray(value, request.dtype) if name in request.wrt else None

    grads: dict[str, Any] = {name: request.feature_grads.get(name) for name in kind.arguments}
    grads["scale"] = scalar("scale", solution.scale_grad)
    if kind.sigmoid:
        grads["bias"] = scalar("bias", solution.bias_grad)
    lse: Any = None
    if solution.row_lse is not None:
        lse = solution.row_lse.astype(request.dtype)
        if solution.column_lse is not None:
            lse = lse, solution.column_lse.astype(request.dtype)
    return LossAndGrad(
        loss=_reduce(request, solution.losses),
        grads=kind.grads(**grads),
        lse=lse,
        metrics=_metrics(solution) if request.metrics else None,
        logits=solution.logits if request.return_logits else None,
    )


def _solve(request: Request) -> Solution:
    # imported here: `import infonce` waits for no compiler
    problem, gradients = request.problem, request.gradients
    if problem.method == "naive":
        from .kernels import naive

        return naive.solve(problem, gradients)
    from .kernels.cpu import CPU

    return solve(problem, CPU(problem, gradients), gradients)


def _reduce(request: Request, losses: Array) -> Array:
    """Per-row losses to the result the caller asked for."""
    if request.reduction == "none":
        return losses.astype(request.dtype)
    total = losses.sum() if request.reduction == "sum" else losses.mean()
    return np.asarray(total, request.dtype)


def _metrics(solution: Solution) -> Metrics:
    stats = solution.statistics
    assert stats is not None
    symmetric = stats.column_rank is stats.row_rank
    return Metrics(
        row_rank=stats.row_rank,
        column_rank=None if symmetric else stats.column_rank,
        positive=LN_2 * stats.positive,
        hardest_negative=LN_2 * stats.rows.max,
    )
