"""The arrays of keys that travel between ranks in a pass, with one row for each key.

passes.py sends `key_arrays` in both passes and `gradient_arrays` after them in the gradient pass. A
rank that receives the arrays makes its block with `key_fields` and `with_arrays`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infonce.kernels.distill.problem import TaughtGradient
from infonce.kernels.epilogues import SoftmaxGradient
from infonce.kernels.linear import LinearTerm
from infonce.kernels.maxsim.tokens import Tokens
from infonce.kernels.options import KEY_VECTORS
from infonce.kernels.problem import Array, Problem, fast_replace

# Fields of `Problem` and `TaughtProblem`: the features of keys, their vectors of options, and their
# features from a guide or a teacher
PER_KEY = "key", *KEY_VECTORS, "guide_key", "teacher_key"


def _key_names(problem: Problem) -> list[str]:
    """The fields of `PER_KEY` that are not None, except the features."""
    return [name for name in PER_KEY[1:] if getattr(problem, name, None) is not None]


def key_arrays(problem: Problem) -> list[Array]:
    """This rank's arrays of keys that travel in every pass: features, then other fields."""
    key = problem.key
    features = [key]
    if isinstance(key, Tokens):
        features = [key.values] if key.mask is None else [key.values, key.mask]
    return features + [getattr(problem, name) for name in _key_names(problem)]


def key_fields(problem: Problem, arrays: list[Array]) -> dict[str, Any]:
    """The fields of `PER_KEY` of the block of keys whose `key_arrays` come first in `arrays`."""
    rest, key = iter(arrays), next(iter(arrays))
    next(rest)
    if isinstance(problem.key, Tokens):
        key = Tokens(key, None if problem.key.mask is None else next(rest))
    return {"key": key, **dict(zip(_key_names(problem), rest, strict=False))}


def make_contiguous(xp: Any, problem: Problem) -> None:
    """Replace arrays of keys by contiguous ones, because exchanges send their bytes."""
    arrays = [xp.ascontiguousarray(array) for array in key_arrays(problem)]
    for name, value in key_fields(problem, arrays).items():
        setattr(problem, name, value)


def row_shape(features: Any) -> tuple[int, ...]:
    """The shape of a row of features, and of its gradient: (D,), or (L, D) of tokens."""
    return features.row_shape if isinstance(features, Tokens) else features.shape[1:]


def empty_rows(xp: Any, features: Any, n: int) -> Any:
    """`n` rows like those of `features`, whose memory is not set."""
    values = xp.empty((n, *row_shape(features)), features.dtype)
    if not isinstance(features, Tokens):
        return values
    mask = features.mask
    return Tokens(values, None if mask is None else xp.empty((n, values.shape[1]), bool))


def gradient_arrays(xp: Any, problem: Problem, epilogue: SoftmaxGradient) -> list[Array]:
    """This rank's arrays of keys that travel only in the gradient pass, after `key_arrays`."""
    travelling = []
    column_factor = epilogue.column_factor
    if column_factor is not None:  # columns have a softmax
        # a bound of dL/dx in a column (`SoftmaxGradient.column_positive_gradient`): dL/dx at its
        # positive. Linear terms change dL/dx at the positive, so they need the factor as well
        bound = epilogue.positive_gradient
        if epilogue.linear:
            bound = xp.maximum(abs(bound), abs(column_factor))
        travelling = [epilogue.column_reference, column_factor, bound]
        if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
            travelling += [epilogue.teacher.column_reference, epilogue.teacher.column_factor]
    for term in epilogue.linear:
        travelling.append(term.segments.columns)
        # if queries are the keys, a key's factor is the factor of its row
        factor = term.row_factor if problem.symmetric else term.column_factor
        travelling += [] if factor is None else [factor]
    return travelling


def with_arrays(
    problem: Problem, epilogue: SoftmaxGradient, arrays: list[Array]
) -> SoftmaxGradient:
    """The epilogue of a block: `epilogue` with the `gradient_arrays` of the keys of the block."""
    rest = iter(arrays)
    changes: dict[str, Any] = {}
    if epilogue.column_reference is not None:
        names = "column_reference", "column_factor", "column_positive_gradient"
        changes = {name: next(rest) for name in names}
        if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
            teacher = {name: next(rest) for name in names[:2]}
            changes["teacher"] = fast_replace(epilogue.teacher, **teacher)
    linear = []
    for term in epilogue.linear:
        segments = replace(term.segments, columns=next(rest))
        has_factor = problem.symmetric or term.column_factor is not None
        linear.append(LinearTerm(segments, term.row_factor, next(rest) if has_factor else None))
    return fast_replace(epilogue, **changes, linear=tuple(linear))


def numbers_per_key(problem: Problem) -> int:
    """The largest number of 8-byte numbers that travel in a pass with the features of a key.

    They are three numbers of the column (reference, factor, bound); the vectors of options of
    pairs; the segment and the factor of each linear term; and the features from a guide or a
    teacher. `schedule.choose_exchange` reserves room for them.
    """
    ids = problem.id_columns
    linear_terms = 0
    if problem.label_smoothing != 0:
        linear_terms = 2 if ids else 1  # means over all keys, and over the keys of an id
    if problem.classes is not None:
        linear_terms += 1
    count = 3 + len(problem.pair_options.vectors) + max(0, ids - 1) + 2 * linear_terms
    if problem.auxiliary_key is not None:  # a teacher has two factors; the division rounds down
        count += 1 + (not problem.guided) + auxiliary_bytes(problem) // 8
    if isinstance(problem.key, Tokens) and problem.key.mask is not None:
        count += 1 + problem.key.length // 8
    return count


def auxiliary_bytes(problem: Problem) -> int:
    """Bytes of the features of one key from a guide or a teacher."""
    key = problem.auxiliary_key
    return 0 if key is None else problem.auxiliary_width * int(key.dtype.itemsize)
