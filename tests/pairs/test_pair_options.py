"""The list of options of pairs, `infonce.kernels.options`, and what follows from it."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from infonce.kernels.distill.problem import TaughtProblem
from infonce.kernels.options import GIVEN, KEY_VECTORS, PAIR_OPTIONS, QUERY_VECTORS, PairOption
from infonce.kernels.problem import Problem

import infonce
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


@pytest.mark.parametrize("option", [o for o in PAIR_OPTIONS if o.equal is not None], ids=str)
def test_masks_serve_where_tiles_have_no_loop(
    option: PairOption, monkeypatch: pytest.MonkeyPatch, tile_sides: Any
) -> None:
    tile_sides(8, 12)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2, 20, 3))
    options: dict[str, Any] = {option.name: rng.integers(0, 4, 20), "scale": 2.0, "method": "tiled"}
    want = infonce.clip_loss_and_grad(*features, **options)
    assert want.loss != infonce.clip_loss(*features, scale=2.0)
    given_options = GIVEN[tuple(each is option for each in PAIR_OPTIONS)]
    monkeypatch.setattr(given_options, "by_numbers", [])
    monkeypatch.setattr(given_options, "by_masks", [option])
    got = infonce.clip_loss_and_grad(*features, **options)
    for one, other in zip((want.loss, *want.grads), (got.loss, *got.grads), strict=True):
        np.testing.assert_array_equal(one, other)
