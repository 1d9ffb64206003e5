"""The specification against the definitions of the losses, closed forms and numbers that others
published."""

import numpy as np
import pytest
from hypothesis import given
from reference_problems import (
    EPS,
    FEATURES,
    LOSSES,
    SEEDS,
    SOFTMAX,
    Problem,
    assert_close,
    assert_same_result,
    every_entry,
    one_problem,
    quick,
    small_problem,
)

import infonce
from infonce import reference


@pytest.mark.parametrize("name", LOSSES)
def test_the_definition(name):
    """Losses and log-sum-exps are those of loops over pairs, gradients their complex steps."""

    @quick
    @given(SEEDS)
    def check(seed):
        problem = small_problem(name, seed)
        result = problem.reference()
        losses, loss, lse = problem.definition()
        assert_close(result.losses, losses)
        assert_close(result.loss, loss)
        assert (result.lse is None) == (lse is None)
        if lse is not None:
            assert_close(result.lse, lse)
        assert set(result.grads) == {*problem.argument_names(), *problem.scalars()}
        for position, argument in enumerate(problem.argument_names()):
            if name == "lit" and argument == "image":
                assert result.grads[argument] is None
                continue
            expected = np.zeros_like(problem.features[position])
            for index, moved in every_entry(problem.features[position]):
                changed = list(problem.features)
                changed[position] = moved
                expected[index] = problem.complex_step(features=tuple(changed))
            assert_close(result.grads[argument], expected)
        for argument in problem.scalars():
            moved = complex(getattr(problem, argument), 1e-30)
            assert_close(result.grads[argument], problem.complex_step(**{argument: moved}))

    check()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sup_con"])
def test_ids_of_other_types(name):
    """2^60 + i are different integers and the same float64. Ids may be strings."""
    distinct = one_problem(name, ids=2**60 + np.arange(6)).reference()
    assert_same_result(distinct, one_problem(name).reference())
    numbers = one_problem(name, ids=np.array([0, 1, 0, 2, 1, 0])).reference()
    words = one_problem(name, ids=np.array(["a", "b", "a", "cc", "b", "a"])).reference()
    assert_same_result(words, numbers)


# --- closed forms ---------------------------------------------------------------------------------

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


@pytest.mark.parametrize("scale", [0.5, 20.0])
@pytest.mark.parametrize("n", [2, 7])
def test_options_of_aligned_orthogonal_pairs(n, scale):
    """Positive logit s, m negatives of logit 0."""
    m = n - 1

    def loss(**options):
        return reference.clip(np.eye(n), np.eye(n), scale=scale, **options).loss

    assert_close(loss(margin=0.3), np.log1p(m * np.exp(-0.7 * scale)), rtol=1e-14, atol=0)
    assert_close(loss(decoupled=True), np.log(m) - scale, rtol=1e-14, atol=0)
    lse = scale + np.log1p(m * np.exp(-scale))
    assert_close(loss(label_smoothing=0.2), lse - (0.8 + 0.2 / n) * scale, rtol=1e-12, atol=0)
    # Products of negatives are 0: hardness has nothing to weight, and no margin drops them
    assert_close(loss(hardness=3.0), np.log1p(m * np.exp(-scale)), rtol=1e-14, atol=0)
    assert loss(false_negative_margin=-1.5) == 0  # negatives exceed 1 - 1.5
    assert loss(false_negative_margin=-0.5) == loss()


def test_without_negatives_a_decoupled_loss_has_no_bound():
    """The loss is -inf, and its gradient is that of -x."""
    result = reference.info_nce([[1.0, 2.0]], [[3.0, 4.0]], scale=2.0, decoupled=True)
    assert result.loss == -np.inf
    assert result.lse[0] == -np.inf
    np.testing.assert_array_equal(result.grads["query"], [[-6.0, -8.0]])


# --- numbers that others published ---------------------------------------------------------------


def test_numbers_of_public_tests():
    """Of two queries with logits (3, 0) and (4, 0): softplus(-3) + softplus(4). Of two with logits
    (6, 3) and (9, 5), weighted. Of classes by angle, where the row alone in its class is left
    out."""
    two = [[3.0], [4.0]], [[1.0], [0.0]]
    weighted = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    angles = np.radians([0, 10, 20, 50, 60, 80])
    directions = (np.stack([np.cos(angles), np.sin(angles)], axis=1),)
    for name, features, options, want in (
        ("info_nce", two, {"weights": [1.0, 1.0]}, 4.066737 / 2),
        ("info_nce", weighted, {"weights": [0.7, 0.3]}, 1.239456),
        ("sup_con", directions, {"scale": 10.0, "labels": [0, 0, 0, 1, 1, 2]}, 0.720060),
    ):
        arrays, options = list(map(np.array, features)), {"scale": 1.0, **options}
        options |= {key: np.array(value) for key, value in options.items() if key != "scale"}
        got = getattr(infonce, f"{name}_loss")(*arrays, normalize=False, **options)
        assert_close(got, want, rtol=0, atol=5e-7)
        if "weights" in options:
            options["weights"] /= options["weights"].sum()
        got = getattr(reference, name)(*arrays, **options).loss
        assert_close(got, want, rtol=0, atol=5e-7)


@pytest.mark.extras
def test_clip_of_torch_normal_features():
    """The inputs of a public test of CLIP's loss in PyTorch, which gives the two numbers."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1234)
    image, text = (torch.randn(3, 5, generator=generator).numpy() for _ in range(2))
    plain = reference.clip(image, text, scale=1 / 0.07)
    smooth = reference.clip(image, text, scale=1 / 0.07, label_smoothing=0.1)
    assert_close(plain.loss, 9.8753, rtol=0, atol=5e-5)
    assert_close(smooth.loss, 10.2524, rtol=0, atol=5e-5)


@pytest.mark.extras
def test_clip_of_two_linear_encoders():
    """The inputs of a public test of the same loss with encoders, which gives the number."""
    torch = pytest.importorskip("torch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image, text = torch.randn(4, 8), torch.randn(4, 5)
        encoders = torch.nn.Linear(8, 3), torch.nn.Linear(5, 3)
    with torch.no_grad():
        image, text = (m(z).numpy() for m, z in zip(encoders, (image, text), strict=True))
    assert_close(reference.clip(image, text, scale=1 / 0.07).loss, 3.8848, rtol=0, atol=1e-4)
