"""The specification against closed forms, and against identities between losses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_problems import (
    EPS,
    FEATURES,
    PAIRS,
    SOFTMAX,
    Problem,
    assert_close,
    assert_same_result,
    one_problem,
    problems,
    quick,
)

from infonce import reference

# ---------------------------------------------------------------------------------------------
# Closed forms.


CANDIDATES = {"nt_xent": 2, "sup_con": 2, "gte": 4}  # that each pair adds; one otherwise


def closed_form_problem(name, image, text, scale, **options):
    """Losses of one set of rows get both; of sup_con, each pair is a class."""
    one_set = len(FEATURES[name]) == 1
    features = (np.concatenate([image, text]),) if one_set else (image, text)
    if name == "sup_con":
        options["labels"] = np.tile(np.arange(len(image)), 2)
    return Problem(name, features, scale=scale, **options)


@pytest.mark.parametrize("scale", [0.5, 20.0, 200.0])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("name", SOFTMAX)
def test_identical_rows_give_the_log_of_the_number_of_candidates(name, n, scale):
    """The loss is log n, or log(2n - 1) for nt_xent, whose 2n rows compare with all others."""
    rows = np.tile([0.6, 0.8], (n, 1))
    result = closed_form_problem(name, rows, rows, scale).reference()
    candidates = 1 + CANDIDATES.get(name, 1) * (n - 1)
    assert_close(result.losses, np.log(candidates), rtol=1e-13, atol=1e-13)
    # Every mean of the keys is the positive: no gradient.
    for gradient in result.grads.values():
        if gradient is not None:
            assert_close(gradient, 0.0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.5, 20.0, 200.0])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("name", SOFTMAX)
def test_aligned_orthogonal_pairs(name, n, scale):
    """Positive logit s, all others 0: p = 1 / (1 + m e^-s) with m negatives.

    The loss is log1p(m e^-s) and its slope in the scale -(1 - p), to full relative accuracy.
    """
    negatives = CANDIDATES.get(name, 1) * (n - 1)
    result = closed_form_problem(name, np.eye(n), np.eye(n), scale).reference()
    odds = negatives * np.exp(-scale)
    tight = {"rtol": 4 * EPS * scale + 8 * EPS, "atol": 0}
    assert_close(result.losses, np.log1p(odds), **tight)
    assert_close(result.grads["scale"], -odds / (1 + odds), **tight)
    assert_close(result.lse, scale + np.log1p(odds), **tight)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_siglip_of_aligned_orthogonal_pairs(n):
    """One logit s + b that should be high, n - 1 logits b that should be low."""
    for scale, bias in [(10.0, -10.0), (3.0, 1.0), (200.0, -40.0)]:
        result = reference.siglip(np.eye(n), np.eye(n), scale=scale, bias=bias)
        match, other = np.exp(-scale - bias), np.exp(bias)
        expected = np.log1p(match) + (n - 1) * np.log1p(other)
        tight = {"rtol": 4 * EPS * (scale - bias), "atol": 0}
        assert_close(result.losses, expected, **tight)
        assert_close(result.grads["scale"], -match / (1 + match), **tight)
        pull, push = match / (1 + match), (n - 1) * other / (1 + other)
        assert_close(result.grads["bias"], push - pull, rtol=0, atol=tight["rtol"] * (push + pull))


def test_siglip_starts_at_the_scale_and_bias_of_the_paper():
    problem = one_problem("siglip")
    explicit = problem._replace(scale=10.0, bias=-10.0).reference()
    assert_same_result(reference.siglip(*problem.features), explicit)


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_row_without_negatives_has_no_loss_and_no_gradient(name):
    same = np.zeros(6, int)
    alone = [one_problem(name, rows=2 if name == "nt_xent" else 1)]
    if name != "sup_con":
        alone.append(one_problem(name, ids=same))
    for problem in alone:
        result = problem.reference()
        assert result.loss == 0
        assert not result.losses.any()
        for gradient in result.grads.values():
            assert gradient is None or not np.any(gradient)


def test_siglip_without_negatives_is_one_logistic_loss_a_row():
    problem = one_problem("siglip", ids=np.zeros(6, int))
    image, text = problem.features
    margin = 2.0 * (image * text).sum(axis=1) + problem.bias
    result = problem.reference()
    assert_close(result.losses, np.log1p(np.exp(-margin)))
    slope = -1 / (1 + np.exp(margin)) / 6
    assert_close(result.grads["image"], 2.0 * slope[:, None] * text)
    assert_close(result.grads["bias"], slope.sum())


def test_two_keys_are_a_logistic_regression():
    """One negative at distance d: loss log(1 + e^-d), slope -1 / (1 + e^d)."""
    d = np.linspace(-30, 30, 13)[:, None]
    result = reference.info_nce(d, [[1.0], [0.0]], scale=1.0, labels=np.zeros(13, int))
    assert_close(result.losses, np.log1p(np.exp(-d[:, 0])), rtol=1e-14, atol=0)
    assert_close(13 * result.grads["query"], -1 / (1 + np.exp(d)), rtol=1e-13, atol=0)


# ---------------------------------------------------------------------------------------------
# Identities.


@quick
@given(problems())
def test_features_and_scale_share_their_gradient(problem):
    """Logits depend on scale * q: sum_i <dq_i, q_i> = scale * dscale, for each side. Where rows of
    one side meet each other, only the sum of both sides is known."""
    if problem.normalize:
        features = tuple(z / np.linalg.norm(z, axis=1, keepdims=True) for z in problem.features)
        problem = problem._replace(features=features, normalize=False)
    grads = problem.reference().grads
    expected = problem.scale * grads["scale"]
    inner = [
        np.vdot(grads[argument], z)
        for argument, z in zip(problem.argument_names(), problem.features, strict=True)
        if grads[argument] is not None
    ]
    if problem.name in ("nt_xent", "sup_con", "gte"):
        assert_close(sum(inner), 2 * expected)
    else:
        assert_close(inner, expected)


@quick
@given(
    problems(names=[name for name in SOFTMAX if name != "gte"], normalize=st.just(False)),
    st.floats(-5.0, 5.0),
)
def test_the_same_constant_in_all_logits_of_a_softmax_changes_nothing(problem, constant):
    """A constant feature adds scale * constant to each logit. Slopes of a row sum to 0."""
    ones = [np.ones((len(z), 1)) for z in problem.features]
    last = constant * ones[-1] if problem.name in PAIRS else ones[-1]
    shifted = tuple(
        np.concatenate([z, one], axis=1)
        for z, one in zip(problem.features, [*ones[:-1], last], strict=True)
    )
    plain, result = problem.reference(), problem._replace(features=shifted).reference()
    assert_close(result.losses, plain.losses)
    assert_close(result.grads["scale"], plain.grads["scale"])
    for argument in problem.argument_names():
        if plain.grads[argument] is not None:
            assert_close(result.grads[argument][:, :-1], plain.grads[argument])
            assert_close(result.grads[argument][:, -1].sum(), 0.0)


@pytest.mark.parametrize("name", ["info_nce", "lit", "clip"])
def test_slopes_of_the_logits_sum_to_zero_row_by_row(name):
    """Keys that are the identity matrix make the query gradient scale * dX."""
    problem = one_problem(name, rows=6, width=6, ids=np.array([0, 1, 0, 2, 1, 3]))
    query = problem.features[0]
    dx = (
        problem._replace(features=(query, np.eye(6))).reference().grads[problem.argument_names()[0]]
    )
    assert np.abs(dx).max() > 1e-3
    if name == "clip":  # half of it sums to 0 by rows, half by columns
        assert_close(dx.sum(), 0.0, atol=1e-14)
    else:
        assert_close(dx.sum(axis=1), 0.0, atol=1e-14)
    off_diagonal_duplicates = dx[[0, 2, 1, 4], [2, 0, 4, 1]]
    assert not off_diagonal_duplicates.any()


@quick
@given(problems(), st.randoms(use_true_random=False))
def test_order_of_the_rows_does_not_matter(problem, random):
    rows, columns = len(problem.features[0]), len(problem.features[-1])
    if problem.name == "nt_xent":  # samples change places, or views
        half = random.sample(range(rows // 2), rows // 2)
        swap = [random.choice([0, rows // 2]) for _ in half]
        row = np.array(
            [(i + s) % rows for i, s in zip(half, swap, strict=True)]
            + [(i + s + rows // 2) % rows for i, s in zip(half, swap, strict=True)]
        )
        column = row
    else:
        row = np.array(random.sample(range(rows), rows))
        column = row
        if problem.name == "info_nce":
            column = np.array(random.sample(range(columns), columns))
            labels = np.arange(rows) if problem.labels is None else problem.labels
            problem = problem._replace(labels=labels)
    order = (row, column)[: len(problem.features)]
    ids = problem.ids
    if isinstance(ids, tuple) or problem.name == "info_nce":
        ids = ids if isinstance(ids, tuple) or ids is None else (ids, ids)
        ids = None if ids is None else (ids[0][row], ids[1][column])
    elif ids is not None:
        ids = ids[row]
    moved = problem._replace(
        features=tuple(z[new] for z, new in zip(problem.features, order, strict=True)),
        labels=None if problem.labels is None else np.argsort(column)[problem.labels[row]],
        ids=ids,
        weights=None if problem.weights is None else problem.weights[row],
    )
    plain, result = problem.reference(), moved.reference()
    assert_close(result.losses, plain.losses[row])
    assert_close(result.loss, plain.loss)
    assert_close(result.grads["scale"], plain.grads["scale"])
    for argument, new in zip(problem.argument_names(), order, strict=True):
        if plain.grads[argument] is not None:
            assert_close(result.grads[argument], plain.grads[argument][new])


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_swapping_the_sides(name):
    """CLIP is symmetric. So is SigLIP's sum over pairs, though not its split into rows."""

    @quick
    @given(problems(names=(name,)))
    def check(problem):
        if name == "siglip":
            problem = problem._replace(weights=None)
        ids = problem.ids[::-1] if isinstance(problem.ids, tuple) else problem.ids
        plain = problem.reference()
        swapped = problem._replace(features=problem.features[::-1], ids=ids).reference()
        assert_close(swapped.loss, plain.loss)
        assert_close(swapped.grads["image"], plain.grads["text"])
        assert_close(swapped.grads["text"], plain.grads["image"])
        assert_close(swapped.grads["scale"], plain.grads["scale"])
        if name == "clip":
            assert_close(swapped.losses, plain.losses)
            assert_close(swapped.lse, plain.lse[::-1])

    check()


@quick
@given(problems(names=("clip",)))
def test_clip_is_the_mean_of_info_nce_both_ways(problem):
    image, text = problem.features
    options = {"scale": problem.scale, "normalize": problem.normalize, "weights": problem.weights}
    back_ids = problem.ids[::-1] if isinstance(problem.ids, tuple) else problem.ids
    there = reference.info_nce(image, text, ids=problem.ids, **options)
    back = reference.info_nce(text, image, ids=back_ids, **options)
    result = problem.reference()
    assert_close(result.losses, (there.losses + back.losses) / 2)
    assert_close(result.grads["image"], (there.grads["query"] + back.grads["key"]) / 2)
    assert_close(result.grads["text"], (there.grads["key"] + back.grads["query"]) / 2)
    assert_close(result.grads["scale"], (there.grads["scale"] + back.grads["scale"]) / 2)
    assert_close(result.lse, (there.lse, back.lse))


@quick
@given(problems(names=("lit",)))
def test_lit_is_info_nce_with_locked_keys(problem):
    result = problem.reference()
    same = problem._replace(name="info_nce").reference()
    assert_close(result.losses, same.losses)
    assert_close(result.lse, same.lse)
    assert_close(result.grads["text"], same.grads["query"])
    assert_close(result.grads["scale"], same.grads["scale"])
    assert result.grads["image"] is None


@quick
@given(problems(names=("info_nce",), ids=("none",), normalize=st.just(False)))
def test_a_query_given_twice_counts_twice_and_an_excluded_key_not_at_all(problem):
    query, key = problem.features
    problem = problem._replace(weights=np.ones(len(query)))
    labels = np.arange(len(query)) if problem.labels is None else problem.labels
    plain = problem.reference()
    one_more = np.append(key, np.ones((1, key.shape[1])), axis=0)
    ids = (np.zeros(len(query)), np.append(np.ones(len(key)), 0.0))  # every query's duplicate
    extra = problem._replace(features=(query, one_more), ids=ids, labels=labels).reference()
    assert_close(extra.losses, plain.losses)
    assert_close(extra.grads["key"][:-1], plain.grads["key"])
    assert not extra.grads["key"][-1].any()
    twice = problem._replace(
        features=(np.append(query, query, axis=0), key),
        labels=np.append(labels, labels),
        weights=np.ones(2 * len(query)),
    ).reference()
    assert_close(twice.loss, 2 * plain.loss)
    assert_close(twice.grads["key"], 2 * plain.grads["key"])


@quick
@given(problems(normalize=st.just(True)), st.integers(0, 2**32 - 1))
def test_normalized_losses_do_not_see_the_length_of_a_row(problem, seed):
    rng = np.random.default_rng(seed)
    lengths = [np.exp(rng.normal(size=(len(z), 1))) for z in problem.features]
    longer = tuple(z * length for z, length in zip(problem.features, lengths, strict=True))
    plain, result = problem.reference(), problem._replace(features=longer).reference()
    assert_close(result.losses, plain.losses)
    for argument, z, length in zip(
        problem.argument_names(), problem.features, lengths, strict=True
    ):
        if plain.grads[argument] is not None:
            assert_close(result.grads[argument] * length, plain.grads[argument], atol=1e-10)
            assert_close((plain.grads[argument] * z).sum(axis=1), 0.0, atol=1e-10)
