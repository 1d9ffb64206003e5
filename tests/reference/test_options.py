"""The specification's options and sets of positives: identities, closed forms, and mpmath."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_problems import (
    EITHER,
    LOSSES,
    SOFTMAX,
    assert_close,
    assert_same_result,
    one_problem,
    problems,
    quick,
)

from infonce import reference

NEUTRAL = {
    "margin": 0.0,
    "decoupled": False,
    "label_smoothing": 0.0,
    "hardness": 0.0,
    "false_negative_margin": np.inf,
    "guide_margin": 0.0,
}

# ---------------------------------------------------------------------------------------------
# Identities.


@pytest.mark.parametrize("name", SOFTMAX)
def test_neutral_values_are_no_options(name):
    problem = one_problem(name)
    for option in NEUTRAL.items():
        result = problem._replace(softmax=dict([option])).reference()
        np.testing.assert_array_equal(result.losses, problem.reference().losses)
        assert_same_result(result, problem.reference())


@pytest.mark.parametrize("name", LOSSES)
def test_equal_weights_are_the_mean(name):
    problem = one_problem(name)
    assert_same_result(problem._replace(weights=np.full(6, 1 / 6)).reference(), problem.reference())


@quick
@given(problems(names=[name for name in SOFTMAX if name != "gte"], options=EITHER))
def test_the_same_bias_of_all_keys_changes_nothing(problem):
    columns = len(problem.features[-1])
    bias = problem.softmax.get("key_bias", np.zeros(columns))
    plain = problem.reference()
    problem = problem._replace(softmax=problem.softmax | {"key_bias": bias + 3.0})
    assert_same_result(problem.reference(), plain)


@quick
@given(problems(names=("info_nce",), several=st.just(False), options=EITHER), EITHER)
def test_a_set_of_one_positive_is_that_positive(problem, padded):
    rows = len(problem.features[0])
    labels = np.arange(rows) if problem.labels is None else problem.labels
    columns = [labels[:, None]] * 2  # a set has no duplicates
    if padded:
        columns.insert(0, np.full((rows, 1), -1))
    several = problem._replace(labels=np.hstack(columns)).reference()
    assert_same_result(several, problem.reference())
    np.testing.assert_array_equal(several.losses, problem.reference().losses)


@quick
@given(problems(names=("nt_xent",), ids=("none",), options=EITHER))
def test_sup_con_of_pairs_is_nt_xent(problem):
    softmax = {name: v for name, v in problem.softmax.items() if not name.startswith("guide")}
    problem = problem._replace(softmax=softmax)  # sup_con has no guide
    labels = np.tile(np.arange(len(problem.features[0]) // 2), 2)
    pairs = problem._replace(name="sup_con", labels=labels).reference()
    assert_same_result(pairs, problem.reference())
    assert_close(pairs.lse, problem.reference().lse)


@quick
@given(problems(names=("sup_con",), options=EITHER))
def test_sup_con_is_info_nce_with_sets_of_positives(problem):
    """One query at a time, against all other rows."""
    (z,) = problem.features
    rows = range(len(z))
    weights = problem.weights
    if weights is None:
        weights = np.array([bool(positives) for positives in problem.positives()])
        weights = weights / max(1, weights.sum())
    losses, dz, dscale = np.zeros(len(z)), np.zeros_like(z), 0.0
    for i, positives in enumerate(problem.positives()):
        others = [j for j in rows if j != i]
        softmax = dict(problem.softmax)
        if "key_bias" in softmax:
            softmax["key_bias"] = softmax["key_bias"][others]
        result = reference.info_nce(
            z[i : i + 1],
            z[others],
            labels=[[others.index(j) for j in positives] or [-1]],
            scale=problem.scale,
            normalize=problem.normalize,
            weights=weights[i : i + 1],
            **softmax,
        )
        losses[i] = result.losses[0]
        dz[i] += result.grads["query"][0]
        dz[others] += result.grads["key"]
        dscale += result.grads["scale"]
    result = problem.reference()
    assert_close(result.losses, losses)
    assert_close(result.grads["features"], dz)
    assert_close(result.grads["scale"], dscale)


@quick
@given(problems(names=("gte",), ids=("none",), normalize=st.just(False)), st.integers(1, 4))
def test_gte_of_orthogonal_towers(problem, width):
    """Queries and keys in orthogonal spaces: logits across the towers are 0, so
    Z_i = 2B - 1 + sum over j != i of exp(q_i.q_j) + exp(k_i.k_j)."""
    query, key = problem.features
    pairs, none = len(query), np.zeros_like(query)
    features = np.hstack([query, none]), np.hstack([none, key])
    off = ~np.eye(pairs, dtype=bool)
    within = [np.exp(problem.scale * (z @ z.T)).sum(axis=1, where=off) for z in (query, key)]
    result = problem._replace(features=features).reference()
    assert_close(result.losses, np.log(2 * pairs - 1 + within[0] + within[1]))


@quick
@given(problems(names=("gte",)))
def test_gte_is_info_nce_over_four_sets_of_keys(problem):
    """Query (q_i, k_i) against keys (k_j, 0), (0, q_j), (q_j, 0) and (0, k_j): the products
    q_i.k_j, k_i.q_j, q_i.q_j and k_i.k_j. Equal ids exclude the pair's own of the last three."""
    query, key = problem.features
    if problem.normalize:
        query, key = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (query, key))
    ids = np.arange(len(query)) if problem.ids is None else problem.ids
    none = np.zeros_like(query)
    blocks = (key, none), (none, query), (query, none), (none, key)
    result = reference.info_nce(
        np.hstack([query, key]),
        np.concatenate([np.hstack(block) for block in blocks]),
        labels=np.arange(len(query)),
        ids=(ids, np.tile(ids, 4)),
        scale=problem.scale,
    )
    assert_close(problem.reference().losses, result.losses)


@quick
@given(problems(names=("info_nce", "sup_con"), options=EITHER))
def test_a_row_without_a_positive_is_left_out(problem):
    """The row has no loss and no gradient, and the mean is that of the other rows."""
    result = problem._replace(weights=None).reference()
    with_positive = np.array([bool(positives) for positives in problem.positives()])
    assert not result.losses[~with_positive].any()
    assert_close(result.loss, result.losses[with_positive].mean() if with_positive.any() else 0.0)
    if problem.name == "info_nce":
        assert not result.grads["query"][~with_positive].any()


# ---------------------------------------------------------------------------------------------
# Closed forms.


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


def test_a_negative_is_dropped_above_its_margin_over_the_best_positive():
    """Positives 0.2 and 0.5; of a margin 0.1, negatives above 0.6 are dropped."""
    keys = np.array([0.2, 0.5, 0.59, 0.61, 0.9])[:, None]
    labels = [[0, 1]]
    result = reference.info_nce([[1.0]], keys, scale=2.0, labels=labels, false_negative_margin=0.1)
    left = reference.info_nce([[1.0]], keys[:3], scale=2.0, labels=labels)
    assert_close(result.loss, left.loss)
    assert_close(result.lse, left.lse)
    assert_close(result.grads["key"][:3], left.grads["key"])
    assert not result.grads["key"][3:].any()


def test_hardness_is_a_lower_temperature_of_the_negatives():
    """A positive of product 0, negatives d: log(1 + sum exp((s + h) d)), of slope d in s."""
    d = np.array([0.5, -0.2, 0.1])
    keys = np.append([0.0], d)[:, None]
    result = reference.info_nce([[1.0]], keys, scale=2.0, hardness=3.0, labels=[0])
    terms = np.exp(5.0 * d)
    assert_close(result.loss, np.log1p(terms.sum()), rtol=1e-14, atol=0)
    assert_close(result.grads["scale"], (terms * d).sum() / (1 + terms.sum()), rtol=1e-13, atol=0)


def test_two_queries_whose_logits_are_known():
    """Logits (3, 0) and (4, 0), the diagonal positive: softplus(-3) + softplus(4)."""
    result = reference.info_nce([[3.0], [4.0]], [[1.0], [0.0]], scale=1.0, weights=[1.0, 1.0])
    assert_close(result.loss, 4.066737, rtol=0, atol=5e-7)


def test_sup_con_of_six_directions():
    """The inputs of a public test, by angle; the row alone in its class is left out."""
    angles = np.radians([0, 10, 20, 50, 60, 80])
    z = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    result = reference.sup_con(z, [0, 0, 0, 1, 1, 2], scale=10.0)
    assert_close(result.loss, 0.720060, rtol=0, atol=5e-7)


def test_weights_of_two_queries_whose_logits_are_known():
    """Logits (6, 3) and (9, 5), of weights 0.7 and 0.3."""
    query, key = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    result = reference.info_nce(query, key, scale=1.0, weights=[0.7, 0.3])
    assert_close(result.loss, 1.239456, rtol=0, atol=5e-7)


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


def test_without_negatives_a_decoupled_loss_has_no_bound():
    """The loss is -inf, and its gradient is that of -x."""
    result = reference.info_nce([[1.0, 2.0]], [[3.0, 4.0]], scale=2.0, decoupled=True)
    assert result.loss == -np.inf
    assert result.lse[0] == -np.inf
    np.testing.assert_array_equal(result.grads["query"], [[-6.0, -8.0]])


def test_no_positive_at_all():
    result = reference.info_nce(np.eye(3), np.eye(3), scale=1.0, labels=[-1, -1, -1])
    assert result.loss == 0
    assert not any(np.any(gradient) for gradient in result.grads.values())
    assert_close(result.lse, np.log(np.e + 2))


# ---------------------------------------------------------------------------------------------
# Accuracy, against mpmath.


@pytest.mark.parametrize(
    "options",
    [{}, {"margin": 0.2}, {"decoupled": True}, {"label_smoothing": 0.3}, {"hardness": 4.0}],
    ids=str,
)
@pytest.mark.parametrize("several", [False, True], ids=["one positive", "three positives"])
def test_losses_and_slopes_have_all_their_digits(several, options):
    """Products between -1 and 1, at a temperature where logits are 200: slopes by keys that are the
    identity matrix."""
    rng = np.random.default_rng(7)
    scale, n = 200.0, 6
    dot = rng.uniform(-1, 1, n)
    dot[0] = 1.0
    positives = {0, 2, 5} if several else {0}
    result = reference.info_nce(
        dot[None], np.eye(n), scale=scale, labels=[sorted(positives)], **options
    )
    margin, smoothing = options.get("margin", 0), options.get("label_smoothing", 0)
    with mpmath.workdps(200):
        x = [scale * (mpmath.mpf(dot[j]) - mpmath.mpf(margin) * (j in positives)) for j in range(n)]
        weight = [
            1 if j in positives else mpmath.exp(mpmath.mpf(options.get("hardness", 0)) * dot[j])
            for j in range(n)
        ]
        if options.get("decoupled"):
            weight = [0 if j in positives else w for j, w in enumerate(weight)]
        total = mpmath.fsum(w * mpmath.exp(v) for w, v in zip(weight, x, strict=True))
        e = mpmath.mpf(smoothing)
        target = [(1 - e) * (j in positives) / len(positives) + e / n for j in range(n)]
        loss = mpmath.log(total) - mpmath.fsum(t * v for t, v in zip(target, x, strict=True))
        slope = [weight[j] * mpmath.exp(x[j]) / total - target[j] for j in range(n)]
    # Rounding of a logit of 200, and of the sums of a loss that size
    rtol = 8 * np.finfo(float).eps * scale
    assert_close(result.loss, float(loss), rtol=rtol, atol=0)
    assert_close(result.grads["query"][0] / scale, np.array(slope, float), rtol=rtol, atol=1e-16)
