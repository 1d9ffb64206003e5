"""The choice of a call's method on a GPU: naive, fused or tiled.

`select.solve` asks with the `Problem` of a call, and `decisions.schedule` asks with its `Call`.
"""

from __future__ import annotations

from ...arrays.naive import MATRICES_WITH_OPTIONS
from ...problem import Problem
from .call import Call

# Bounds of small calls, for which one launch takes less time than a graph of several launches
MAX_FUSED_MULTIPLY_ADDS = 2**28  # for all logits
MAX_FUSED_LOGITS = 2**18
# Most queries, and most keys. For a tile of dQ, one thread block visits all keys one after another,
# and for a tile of dK all queries: the launch waits for that block
MAX_FUSED_ROWS = 2048


def choose_method(call: Problem | Call) -> str:
    """The method of a call:

    "fused"   one launch, for a small batch or if the caller asks for it
    "tiled"   passes over blocks, for other batches or if the caller asks for it
    "naive"   the whole matrix, if the caller asks for it, or asks for "fused" with an option that
              the fused kernel lacks: it has `normalize`, `ids`, and no other option (`plain`)

    ValueError for "fused" if the logits do not fit the workspace, or if `metrics` asks for ranks.
    """
    method = call.method
    if method == "fused":
        _require_one_launch(call)
        # "naive" keeps the logits, as "fused" does, and takes all options
        return "fused" if call.plain else "naive"
    if method in ("naive", "tiled"):
        return method
    m, n, d = call.shape
    is_small = (
        m * n <= MAX_FUSED_LOGITS and max(m, n) <= MAX_FUSED_ROWS
        and m * n * d <= MAX_FUSED_MULTIPLY_ADDS
    )  # fmt: skip
    if not is_small or not call.plain or call.retrieval_ranks:
        return "tiled"
    return "fused" if logit_bytes(call, plain=True) <= call.workspace else "tiled"


def logit_bytes(call: Problem | Call, *, plain: bool) -> int:
    """Bytes of the logits and dL/dx of a call that is or is not `plain` (`Call.plain`).

    Options of the softmax need more matrices of this size.
    """
    m, n, _ = call.shape
    matrices = 2 if plain else MATRICES_WITH_OPTIONS
    return matrices * m * n * (8 if call.compute_precision == "fp64" else 4)


def _require_one_launch(call: Problem | Call) -> None:
    """ValueError if a call that asks for "fused" cannot have it."""
    if call.retrieval_ranks:
        raise ValueError(
            'method: "fused" counts no ranks on a GPU; expected method="auto", "tiled" or "naive" '
            "with metrics=True"
        )
    lacking = logit_bytes(call, plain=call.plain) - call.workspace
    if lacking > 0:
        m, n, _ = call.shape
        raise ValueError(
            f'method: "fused" keeps the {m} x {n} logits within workspace = {call.workspace} '
            f'bytes, which lacks {lacking}; expected method="tiled" or a larger workspace'
        )


def is_computed_by_kernels_only(problem: Problem) -> bool:
    """Whether kernels compute all of a call, so that no step needs operations on arrays.

    Operations on arrays are needed for:

    - positive ids, whose weights must be converted to the precision of sums;
    - label smoothing with ids, because the ids must be numbered, or with weights of labels;
    - classes whose features are not summed (`Classes.in_sums`);
    - options of pairs but ids, together with linear terms or a joint loss.
    """
    has_class_sums = problem.classes is None or problem.classes.in_sums is not None
    has_ids_or_weights = problem.query_ids is not None or problem.label_weights is not None
    smoothed = problem.label_smoothing != 0 and has_ids_or_weights
    separable = not (problem.linear_terms or problem.joint) or problem.plain_logits
    return has_class_sums and separable and not (smoothed or problem.has_positive_ids)


def has_plan(problem: Problem, by_kernels: bool) -> bool:
    """Whether a tiled call may have a plan. `by_kernels`: see `is_computed_by_kernels_only`.

    Tiled calls without a plan are launched step by step: calls with operations on arrays, calls
    whose blocks follow from the values of groups, and calls that report progress. Distillation and
    the method naive have no plan either, nor have calls of too many steps (`plan.TooLong`).
    """
    return by_kernels and problem.progress is None and problem.host_groups is None
