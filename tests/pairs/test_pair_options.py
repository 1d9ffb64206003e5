"""The list of options of pairs, `infonce.kernels.options`, and what follows from it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from infonce.kernels.distill.problem import TaughtProblem
from infonce.kernels.options import KEY_VECTORS, PAIR_OPTIONS, QUERY_VECTORS, PairOption
from infonce.kernels.problem import Problem

from infonce import spec

ROWS = np.ones((4, 2))


def given(option: PairOption) -> dict[str, Any]:
    """Fields of a problem that has only this option: two vectors, or one, or a number."""
    sides = {form.format(option.name) for form in ("query_{}", "key_{}", "{}_query", "{}_key")}
    value = 0.1 if isinstance(option.default, float) else ROWS
    return {field.name: value for field in fields(Problem) if field.name in {*sides, option.name}}


@pytest.mark.parametrize("option", PAIR_OPTIONS, ids=str)
def test_a_problem_knows_its_options(option: PairOption) -> None:
    """The flags of `Problem.pair_options` have the order of the list."""
    problem = Problem(ROWS, ROWS, 1.0, 1.0, **given(option))
    assert problem.pair_options == (option,)
    assert problem.plain_logits is not option.changes_logits
    assert problem.compares_with_limits is bool(option.compares)


def test_a_problem_without_options() -> None:
    problem = Problem(ROWS, ROWS, 1.0, 1.0)
    assert problem.pair_options == ()
    assert problem.plain_logits
    assert problem.pair_options is Problem(ROWS, ROWS, 2.0, 1.0).pair_options


def test_vectors_are_fields_of_a_problem() -> None:
    names = {field.name for field in fields(TaughtProblem)}
    assert names.issuperset(QUERY_VECTORS + KEY_VECTORS)
    assert len({*QUERY_VECTORS, *KEY_VECTORS}) == len(QUERY_VECTORS) + len(KEY_VECTORS)


@pytest.mark.parametrize("option", PAIR_OPTIONS, ids=str)
def test_the_keyword_of_an_option(option: PairOption) -> None:
    assert spec.OPTIONS[option.name] is option
    is_integer = option.name in spec.INTEGER_OPTIONS
    assert is_integer is not (option.name in spec.SOFTMAX_OPTIONS)
