"""The sum of the losses of several prefixes, sum_p w_p loss(first d_p features), on the CPU.

All prefixes share their matrix products, which take the time of the products of one call:

- The logits of a prefix are the logits of the next shorter prefix plus the products of the further
  features.
- The gradient of a feature is one product with the sum of dL/dx over the prefixes that have the
  feature.

Exponentials, and memory for a tile of logits, are taken once for each prefix. Calls that `fits`
refuses, and calls on a GPU, become one call for each prefix: `infonce/checks/prefixes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..cpu.backend import CPU
from ..cpu.factors import SoftmaxFactors
from ..cpu.operands import Side
from ..cpu.schedule import fits_one_block
from ..problem import LOG2_E, Array, Gradients, Problem, fast_replace
from ..solve import (
    Solution,
    allows_online_softmax,
    make_solution,
    run_gradient_pass,
)  # fmt: skip
from .prefix_pass import PrefixPass
from .problem import PrefixGradient, PrefixStatistics, prefix_problems
from .sides import PrefixSide


class PrefixCPU(CPU):
    """The backend of a problem with prefixes: a tile has the logits of each prefix."""

    pass_class = PrefixPass

    def __init__(
        self, problem: Problem, gradients: Gradients | None, widths: Sequence[int]
    ) -> None:
        self.sides: list[PrefixSide] = []
        self.ranges = [slice(*ends) for ends in pairwise((0, *widths))]
        # one tile for each prefix but the last, and one for the products of unit vectors
        super().__init__(problem, gradients, further_tiles=len(widths) - 1 + problem.normalize)

    def make_side(self, problem: Problem, features: Array) -> Side:
        side = PrefixSide(**super().make_side(problem, features).__dict__, ranges=self.ranges)
        self.sides.append(side)
        return side


def fits(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether `solve_prefixes` has all options of the call, and is faster than separate calls.

    It refuses
    - losses that are not a softmax over keys or over both sides: SigLIP, queries that are the keys;
    - options: a margin, `decoupled`, `hardness`, retrieval ranks, ids, sets of positives,
      `known_row_nans`, and those that `loss_follows_from_sums` excludes;
    - the methods "naive" and "fused";
    - a batch that fits one block, and a call that one pass may compute (`allows_online_softmax`:
      one softmax, no dK): separate calls are faster.
    """
    refused_options = problem.margin or problem.decoupled or problem.hardness
    refused_fields = problem.query_ids, problem.known_row_nans, problem.bias
    supported = problem.loss_follows_from_sums and problem.set_size == 1 and not refused_options
    supported = supported and not (problem.symmetric or problem.retrieval_ranks)
    supported = supported and all(field is None for field in refused_fields)
    tiled = problem.method in ("auto", "tiled") and not fits_one_block(problem)
    return bool(supported and tiled and not allows_online_softmax(problem, gradients))


def solve_prefixes(
    problem: Problem, gradients: Gradients | None, prefixes: Sequence[tuple[int, float]]
) -> Solution | None:
    """The loss and gradients, and the log-sum-exps of the widest prefix.

    `prefixes` has (width, weight) of each prefix; the last prefix has all features. Returns None if
    `fits` refuses, if the workspace is too small, or if norms are not moderate
    (`PrefixSide.is_moderate`): the norm of a row is then extreme, or so much larger than the norm
    of a prefix of the row that products of prefixes could underflow. If the result is None, the
    caller, `infonce/dispatch.py`, computes each prefix by a call of its own.
    """
    if not fits(problem, gradients):
        return None
    try:
        backend = PrefixCPU(problem, gradients, [width for width, _ in prefixes])
    except ValueError:  # the workspace has no room for so many tiles
        return None
    if not all(side.is_moderate for side in backend.sides):
        return None
    vectors = backend.vectors
    gradients = vectors.with_dots(problem, gradients)
    problems, stats = zip(
        *(vectors.statistics(each) for each in prefix_problems(problem, prefixes)), strict=True
    )
    problem = problems[-1]
    sums = PrefixStatistics(**stats[-1].__dict__, prefixes=stats)
    backend.run_pass(problem, backend.grid(problem, False), sums, None)

    finalized = [
        vectors.finalize(*each, triangle=False, gradient=gradients is not None, backend=backend)
        for each in zip(problems, stats, strict=True)
    ]
    if gradients is not None:
        scale, dtype = float(problem.scale) * LOG2_E, backend.dtype
        epilogues = [each.softmax_gradient(problem.symmetric) for each in finalized]
        parts = [
            (
                SoftmaxFactors(each, scale, dtype, same_logits=True),
                each.positive_gradient.astype(dtype),
            )
            for each in epilogues
        ]
        epilogue = PrefixGradient(**epilogues[-1].__dict__, prefixes=parts)
        run_gradient_pass(problem, backend, False, epilogue, gradients)
    # Weights of prefixes are in `upstream` of each problem, so in all gradients, but not in losses
    losses = sum(w * each.losses for (_, w), each in zip(prefixes, finalized, strict=True))
    slopes: list[Any] = [each.log_scale_grad for each in finalized]
    dots = None if gradients is None else gradients.dots
    loss, scale_grad, _ = vectors.totals(
        problem, losses, sum(slopes) if problem.moments else None, dots, None
    )
    return fast_replace(make_solution(finalized[-1], stats[-1], loss, scale_grad), losses=losses)
