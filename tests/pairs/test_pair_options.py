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
# name of an option -> fields of a problem that has only this option
GIVEN: dict[str, dict[str, Any]] = {
    "ids": {"query_ids": ROWS, "key_ids": ROWS},
    "groups": {"query_groups": ROWS, "key_groups": ROWS},
    "positive_ids": {"query_positive_ids": ROWS, "key_positive_ids": ROWS},
    "false_negative_margin": {"false_negative_margin": 0.1},
    "guide": {"guide_query": ROWS, "guide_key": ROWS},
    "key_bias": {"key_bias": ROWS},
}


@pytest.mark.parametrize("option", PAIR_OPTIONS, ids=str)
def test_a_problem_knows_its_options(option: PairOption) -> None:
    """The flags of `Problem.pair_options` have the order of the list."""
    problem = Problem(ROWS, ROWS, 1.0, 1.0, **GIVEN[option.name])
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
