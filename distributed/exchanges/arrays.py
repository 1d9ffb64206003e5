"""The arrays of keys that folds send, one row a key: what a block of others' keys needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infonce.kernels.linear import LinearTerm
from infonce.kernels.problem import KEY_VECTORS, Array, Problem, SoftmaxGradient, fast_replace
from infonce.kernels.targets import guide_width

PER_KEY = "key", *KEY_VECTORS, "guide_key"  # fields of `Problem`


def names(problem: Problem) -> list[str]:
    """Those of `PER_KEY` that the problem has."""
    return [name for name in PER_KEY if getattr(problem, name) is not None]


def key_arrays(problem: Problem) -> list[Array]:
    """This rank's arrays of keys that all folds send."""
    return [getattr(problem, name) for name in names(problem)]


def gradient_arrays(xp: Any, problem: Problem, epilogue: SoftmaxGradient) -> list[Array]:
    """This rank's arrays of keys that the gradient fold sends besides."""
    own = []
    if epilogue.column_reference is not None:
        bound = epilogue.positive_gradient
        if epilogue.linear:  # which dL/dx at a positive has a share of: it is no bound by itself
            bound = xp.maximum(abs(bound), abs(epilogue.column_factor))
        own = [epilogue.column_reference, epilogue.column_factor, bound]
    for term in epilogue.linear:
        own.append(term.segments.columns)
        factor = term.row_factor if problem.symmetric else term.column_factor
        own += [] if factor is None else [factor]
    return own


def with_arrays(
    problem: Problem, epilogue: SoftmaxGradient, arrays: list[Array]
) -> SoftmaxGradient:
    """The epilogue of a block, whose keys have these arrays of `gradient_arrays`."""
    rest = iter(arrays)
    changes: dict[str, Any] = {}
    if epilogue.column_reference is not None:
        names = "column_reference", "column_factor", "column_positive_gradient"
        changes = {name: next(rest) for name in names}
    linear = []
    for term in epilogue.linear:
        segments = replace(term.segments, columns=next(rest))
        has_factor = problem.symmetric or term.column_factor is not None
        linear.append(LinearTerm(segments, term.row_factor, next(rest) if has_factor else None))
    return fast_replace(epilogue, **changes, linear=tuple(linear))


def vectors_of(problem: Problem) -> int:
    """Numbers of a key that a fold sends with its features, at most: factors, ids, groups, biases,
    limits, the features of a guide, and the segment and factor of each linear term."""
    with_ids = problem.key_ids is not None
    names = with_ids + (problem.key_groups is not None)
    terms = (1 + with_ids) * (problem.label_smoothing != 0) + (problem.classes is not None)
    vectors: int = 3 + names + (problem.key_bias is not None) + problem.has_limits + 2 * terms
    if problem.guided:
        vectors += 2 + guide_bytes(problem) // 8
    return vectors


def guide_bytes(problem: Problem) -> int:
    """Bytes of the guide's features of a key."""
    item = problem.guide_key.dtype.itemsize if problem.guided else 0
    return int(guide_width(problem) * item)
