"""The specification against the definitions of the losses: values, gradients, excluded pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_problems import (
    EITHER,
    LOSSES,
    PAIRS,
    assert_close,
    assert_same_result,
    every_entry,
    one_problem,
    problems,
    quick,
)

from infonce import reference

# ---------------------------------------------------------------------------------------------
# Against the definitions.


@pytest.mark.parametrize("name", LOSSES)
def test_value_is_the_definition(name):
    @quick
    @given(problems(names=(name,), options=EITHER, groups=EITHER, positive_ids=EITHER))
    def check(problem):
        result = problem.reference()
        losses, loss, lse = problem.definition()
        assert_close(result.losses, losses)
        assert_close(result.loss, loss)
        if lse is None:
            assert result.lse is None
        else:
            assert_close(result.lse, lse)

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_complex_step_of_the_definition(name):
    @quick
    @given(problems(names=(name,), options=EITHER, groups=EITHER, positive_ids=EITHER))
    def check(problem):
        grads = problem.reference().grads
        assert set(grads) == {*problem.argument_names(), *problem.scalars()}
        for position, argument in enumerate(problem.argument_names()):
            if name == "lit" and argument == "image":
                assert grads[argument] is None
                continue
            expected = np.zeros_like(problem.features[position])
            for index, moved in every_entry(problem.features[position]):
                changed = list(problem.features)
                changed[position] = moved
                expected[index] = problem.complex_step(features=tuple(changed))
            assert_close(grads[argument], expected)
        for argument in problem.scalars():
            moved = complex(getattr(problem, argument), 1e-30)
            assert_close(grads[argument], problem.complex_step(**{argument: moved}))

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_central_differences_of_the_value(name):
    """The value's own differences, along a random direction through all arguments at once."""

    @quick
    @given(
        problems(names=(name,), options=EITHER, groups=EITHER, positive_ids=EITHER),
        st.integers(0, 2**32 - 1),
    )
    def check(problem, seed):
        # The one is not differentiated, the other jumps.
        for option in ("hardness", "false_negative_margin", "guide", "guide_margin"):
            problem.softmax.pop(option, None)
        rng = np.random.default_rng(seed)
        # A row close to the origin turns so fast that a difference over 1e-4 says little.
        features = tuple(z + 2 * np.sign(z) for z in problem.features)
        problem = problem._replace(features=features)
        moves = [rng.normal(size=z.shape) for z in features]
        if name == "lit":
            moves[1] *= 0  # locked
        scale_move, bias_move = rng.normal(size=2)

        def value(step):
            moved = problem._replace(
                features=tuple(z + step * move for z, move in zip(features, moves, strict=True)),
                scale=problem.scale + step * scale_move,
                bias=problem.bias + step * bias_move,
            )
            return moved.reference().loss

        grads = problem.reference().grads
        slope = scale_move * grads["scale"] + bias_move * grads.get("bias", 0.0)
        for argument, move in zip(problem.argument_names(), moves, strict=True):
            if grads[argument] is not None:
                slope += np.vdot(grads[argument], move)
        # Two central differences, combined so that the third derivative drops out: what is left
        # is h^4 / 30 of the fifth, and rounding, 1e-16 |loss| / h. Both are near 1e-10.
        h = 1e-4
        near, far = value(h) - value(-h), value(2 * h) - value(-2 * h)
        assert_close((8 * near - far) / (12 * h), slope, rtol=1e-8, atol=1e-8)

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_weights_are_the_upstream_gradient_of_each_row(name):
    """Gradients are the weighted sum of the single rows' gradients."""
    problem = one_problem(name, normalize=True)
    weights = np.random.default_rng(1).normal(size=6)
    result = problem._replace(weights=weights).reference()
    assert_close(result.loss, sum(weights * result.losses))
    for argument, gradient in result.grads.items():
        if gradient is None:
            continue
        single = [problem._replace(weights=row).reference().grads[argument] for row in np.eye(6)]
        total = sum(weight * one for weight, one in zip(weights, single, strict=True))
        assert_close(gradient, total)
    mean = problem._replace(weights=np.full(6, 1 / 6)).reference()
    assert_same_result(problem.reference(), mean)
    assert_close(problem.reference().loss, problem.reference().losses.mean())


# ---------------------------------------------------------------------------------------------
# Excluded pairs, row by row: delete them for real.


def delete_pairs(query, key, positives, excluded, scale):
    """InfoNCE one query at a time, over the keys that are left after deleting the excluded."""
    losses, dq, dk, ds = [], np.zeros_like(query), np.zeros_like(key), 0.0
    for i, positive in enumerate(positives):
        kept = [j for j in range(len(key)) if not excluded(i, j)]
        result = reference.info_nce(
            query[i : i + 1], key[kept], scale=scale, labels=[kept.index(positive)], weights=[1.0]
        )
        losses.append(result.loss)
        dq[i] = result.grads["query"][0]
        dk[kept] += result.grads["key"]
        ds += result.grads["scale"]
    return np.array(losses), dq, dk, ds


@quick
@given(
    problems(
        names=("info_nce",),
        ids=("one", "pair", "columns"),
        normalize=st.just(False),
        several=st.just(False),
    )
)
def test_ids_equal_deleting_the_pairs(problem):
    query, key = problem.features
    positives = range(len(query)) if problem.labels is None else problem.labels
    query_ids, key_ids = problem.ids if isinstance(problem.ids, tuple) else (problem.ids,) * 2

    def excluded(i, j):
        return j != positives[i] and np.any(query_ids[i] == key_ids[j])

    result = problem._replace(weights=np.ones(len(query))).reference()
    losses, dq, dk, ds = delete_pairs(query, key, positives, excluded, problem.scale)
    assert_close(result.losses, losses)
    assert_close(result.grads["query"], dq)
    assert_close(result.grads["key"], dk)
    assert_close(result.grads["scale"], ds)


@quick
@given(problems(names=("nt_xent",), normalize=st.just(False)))
def test_nt_xent_is_info_nce_over_the_other_rows(problem):
    (z,) = problem.features
    half = len(z) // 2
    partners = [*range(half, 2 * half), *range(half)]

    def excluded(i, j):
        same = problem.ids is not None and np.any(problem.ids[i] == problem.ids[j])
        return i == j or (same and j != partners[i])

    result = problem._replace(weights=np.ones(len(z))).reference()
    losses, dq, dk, ds = delete_pairs(z, z, partners, excluded, problem.scale)
    assert_close(result.losses, losses)
    assert_close(result.grads["features"], dq + dk)
    assert_close(result.grads["scale"], ds)


@pytest.mark.parametrize("name", [*PAIRS, "siglip"])
def test_one_array_of_ids_serves_both_sides(name):
    ids = np.array([3, 1, 3, 3, 2, 1])
    one = one_problem(name, ids=ids).reference()
    pair = one_problem(name, ids=(ids, ids)).reference()
    assert_same_result(one, pair)
    assert not np.allclose(one.losses, one_problem(name).reference().losses)


WITH_IDS = [name for name in LOSSES if name != "sup_con"]


@pytest.mark.parametrize("name", WITH_IDS)
def test_ids_that_differ_beyond_float64_differ(name):
    """2^60 + i are different integers and the same float64."""
    distinct = one_problem(name, ids=2**60 + np.arange(6)).reference()
    assert_same_result(distinct, one_problem(name).reference())


@pytest.mark.parametrize("name", WITH_IDS)
def test_ids_may_be_strings(name):
    numbers = one_problem(name, ids=np.array([0, 1, 0, 2, 1, 0])).reference()
    words = one_problem(name, ids=np.array(["a", "b", "a", "cc", "b", "a"])).reference()
    assert_same_result(words, numbers)
