"""The specification itself, judged by what it is not made of.

Three judges: the definitions of the losses written as loops over pairs, in complex numbers (so
that a complex step yields their gradients to full precision) or in mpmath; closed forms; and
identities between losses.
"""

from typing import NamedTuple

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infonce import reference
from infonce.reference import common

LOSSES = ("info_nce", "nt_xent", "clip", "lit", "siglip")
SOFTMAX = ("info_nce", "nt_xent", "clip", "lit")
TWO_SIDED = {"info_nce": ("query", "key"), "clip": ("image", "text"), "lit": ("text", "image")}
TWO_SIDED["siglip"] = ("image", "text")
DIGITS = 400  # more than the 308 that separate 1 from the smallest double: 1 + loss is exact
EPS = np.finfo(np.float64).eps

EITHER = st.booleans()
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------
# The definitions: loops over pairs, any number type, no shift by a maximum.


def kept_keys(i, positive, columns, query_ids, key_ids, itself_too):
    """Keys that query i is compared with."""
    kept = []
    for j in range(columns):
        if j == i and not itself_too:
            continue
        if j != positive and query_ids is not None and query_ids[i] == key_ids[j]:
            continue
        kept.append(j)
    return kept


def rows_by_definition(x, positives, query_ids, key_ids, itself_too=True):
    """log sum exp over the kept keys, less the positive logit; row by row."""
    losses, lse = [], []
    for i, positive in enumerate(positives):
        kept = kept_keys(i, positive, len(x[i]), query_ids, key_ids, itself_too)
        lse.append(np.log(sum(np.exp(x[i, j]) for j in kept)))
        losses.append(lse[-1] - x[i, positive])
    return np.array(losses), np.array(lse)


class Problem(NamedTuple):
    """One call of one loss."""

    name: str
    features: tuple  # of arrays, in the order of the function's arguments
    scale: complex = 1.0
    bias: complex = -1.5
    labels: np.ndarray | None = None
    ids: object = None
    normalize: bool = False
    weights: np.ndarray | None = None

    def argument_names(self):
        return ("features",) if self.name == "nt_xent" else TWO_SIDED[self.name]

    def options(self):
        options = {"scale": self.scale, "ids": self.ids, "normalize": self.normalize}
        options["weights"] = self.weights
        if self.name == "siglip":
            options["bias"] = self.bias
        if self.name == "info_nce":
            options["labels"] = self.labels
        return options

    def reference(self):
        return getattr(reference, self.name)(*self.features, **self.options())

    def definition(self):
        """Losses, their weighted sum, and the log-sum-exps, by definition."""
        a, b = self.features[0], self.features[-1]
        if self.normalize:
            a = a / np.sqrt((a * a).sum(axis=1, keepdims=True))
            b = b / np.sqrt((b * b).sum(axis=1, keepdims=True))
        x = self.scale * (a @ b.T)
        rows = len(a)
        paired = self.ids if isinstance(self.ids, tuple) else (self.ids, self.ids)
        diagonal = range(rows)
        if self.name == "nt_xent":
            half = rows // 2
            partners = [*range(half, rows), *range(half)]
            losses, lse = rows_by_definition(x, partners, *paired, itself_too=False)
        elif self.name == "clip":
            row, r = rows_by_definition(x, diagonal, *paired)
            column, c = rows_by_definition(x.T, diagonal, *paired[::-1])
            losses, lse = (row + column) / 2, (r, c)
        elif self.name == "siglip":
            losses, lse = [], None
            for i in range(rows):
                kept = kept_keys(i, i, rows, *paired, itself_too=True)
                away = [(1 if i == j else -1) * (x[i, j] + self.bias) for j in kept]
                losses.append(sum(np.log(1 + np.exp(-a)) for a in away))
            losses = np.array(losses)
        else:
            positives = diagonal if self.labels is None else self.labels
            losses, lse = rows_by_definition(x, positives, *paired)
        weights = np.full(rows, 1 / rows) if self.weights is None else self.weights
        return losses, (weights * losses).sum(), lse

    def complex_step(self, **change):
        """d loss along `change`, exact: f(x + ih) = f(x) + ih f'(x) + O(h^2), h = 1e-30."""
        return self._replace(**change).definition()[1].imag / 1e-30

    def scalars(self):
        return ("scale", "bias") if self.name == "siglip" else ("scale",)


def every_entry(array):
    """The array with 1e-30 i added to one entry, for each entry in turn."""
    for index in np.ndindex(array.shape):
        moved = array.astype(np.complex128)
        moved[index] += 1e-30j
        yield index, moved


@st.composite
def problems(draw, names=LOSSES, ids=("none", "one", "pair"), normalize=EITHER):
    """Small problems of every kind; logits small enough to do without a shift."""
    name = draw(st.sampled_from(names))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    if name == "nt_xent":
        rows *= 2
    columns = rows + (draw(st.integers(0, 3)) if name == "info_nce" else 0)
    labels = None
    if name == "info_nce" and draw(st.booleans()):
        columns = draw(st.integers(1, 7))  # fewer keys than queries, and shared positives
        labels = rng.integers(0, columns, rows)
    features = (rng.normal(size=(rows, width)),)
    if name != "nt_xent":
        features += (rng.normal(size=(columns, width)),)
    kind = draw(st.sampled_from(ids))
    if kind == "pair" and name == "nt_xent":
        kind = "one"
    if kind == "one" and rows != columns:
        kind = "pair"
    some = {
        "none": None,
        "one": rng.integers(0, 3, rows),
        "pair": (rng.integers(0, 3, rows), rng.integers(0, 3, columns)),
    }
    return Problem(
        name,
        features,
        scale=draw(st.floats(0.1, 10.0)),
        bias=draw(st.floats(-10.0, 2.0)),
        labels=labels,
        ids=some[kind],
        normalize=draw(normalize),
        weights=rng.normal(size=rows) if draw(st.booleans()) else None,
    )


def assert_close(actual, expected, rtol=1e-11, atol=1e-11):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_same_result(actual, expected):
    """Losses, loss and every gradient that both have."""
    assert_close(actual.losses, expected.losses)
    assert_close(actual.loss, expected.loss)
    assert actual.grads.keys() == expected.grads.keys()
    for name in actual.grads:
        if expected.grads[name] is None:
            assert actual.grads[name] is None
        else:
            assert_close(actual.grads[name], expected.grads[name])


def unit_rows(rng, *shape):
    z = rng.normal(size=shape)
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


def one_problem(name, seed=0, rows=6, width=4, **options):
    rng = np.random.default_rng(seed)
    count = 1 if name == "nt_xent" else 2
    return Problem(name, tuple(rng.normal(size=(count, rows, width))), scale=2.0, **options)


# ---------------------------------------------------------------------------------------------
# Against the definitions.


@pytest.mark.parametrize("name", LOSSES)
def test_value_is_the_definition(name):
    @quick
    @given(problems(names=(name,)))
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
    @given(problems(names=(name,)))
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
                if name == "nt_xent":
                    changed = [moved]
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
    @given(problems(names=(name,)), st.integers(0, 2**32 - 1))
    def check(problem, seed):
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
    """By linearity: the gradients are the weighted sum of the single rows' gradients."""
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
@given(problems(names=("info_nce",), ids=("one", "pair"), normalize=st.just(False)))
def test_ids_equal_deleting_the_pairs(problem):
    query, key = problem.features
    positives = range(len(query)) if problem.labels is None else problem.labels
    query_ids, key_ids = problem.ids if isinstance(problem.ids, tuple) else (problem.ids,) * 2

    def excluded(i, j):
        return j != positives[i] and query_ids[i] == key_ids[j]

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
        same = problem.ids is not None and problem.ids[i] == problem.ids[j]
        return i == j or (same and j != partners[i])

    result = problem._replace(weights=np.ones(len(z))).reference()
    losses, dq, dk, ds = delete_pairs(z, z, partners, excluded, problem.scale)
    assert_close(result.losses, losses)
    assert_close(result.grads["features"], dq + dk)
    assert_close(result.grads["scale"], ds)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "nt_xent"])
def test_one_array_of_ids_serves_both_sides(name):
    ids = np.array([3, 1, 3, 3, 2, 1])
    one = one_problem(name, ids=ids).reference()
    pair = one_problem(name, ids=(ids, ids)).reference()
    assert_same_result(one, pair)
    assert not np.allclose(one.losses, one_problem(name).reference().losses)


@pytest.mark.parametrize("name", LOSSES)
def test_ids_that_differ_beyond_float64_differ(name):
    """2^60 + i are different integers and the same float64."""
    distinct = one_problem(name, ids=2**60 + np.arange(6)).reference()
    assert_same_result(distinct, one_problem(name).reference())


@pytest.mark.parametrize("name", LOSSES)
def test_ids_may_be_strings(name):
    numbers = one_problem(name, ids=np.array([0, 1, 0, 2, 1, 0])).reference()
    words = one_problem(name, ids=np.array(["a", "b", "a", "cc", "b", "a"])).reference()
    assert_same_result(words, numbers)


# ---------------------------------------------------------------------------------------------
# Closed forms.


def closed_form_problem(name, image, text, scale, **options):
    features = (np.concatenate([image, text]),) if name == "nt_xent" else (image, text)
    return Problem(name, features, scale=scale, **options)


@pytest.mark.parametrize("scale", [0.5, 20.0, 200.0])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("name", SOFTMAX)
def test_identical_rows_give_the_log_of_the_number_of_candidates(name, n, scale):
    """Nothing to choose by: log n; log(2n - 1) for nt_xent, where 2n rows compare with others."""
    rows = np.tile([0.6, 0.8], (n, 1))
    result = closed_form_problem(name, rows, rows, scale).reference()
    candidates = 2 * n - 1 if name == "nt_xent" else n
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
    negatives = 2 * n - 2 if name == "nt_xent" else n - 1
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
    alone = [one_problem(name, ids=same), one_problem(name, rows=2 if name == "nt_xent" else 1)]
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
    """Logits depend on scale * q: sum_i <dq_i, q_i> = scale * dscale, for each side."""
    if problem.normalize:
        features = tuple(z / np.linalg.norm(z, axis=1, keepdims=True) for z in problem.features)
        problem = problem._replace(features=features, normalize=False)
    grads = problem.reference().grads
    sides = 2 if problem.name == "nt_xent" else 1
    for argument, z in zip(problem.argument_names(), problem.features, strict=True):
        if grads[argument] is not None:
            inner = np.vdot(grads[argument], z)
            assert_close(inner, sides * problem.scale * grads["scale"])


@quick
@given(problems(names=SOFTMAX, normalize=st.just(False)), st.floats(-5.0, 5.0))
def test_the_same_constant_in_all_logits_of_a_softmax_changes_nothing(problem, constant):
    """A constant feature adds scale * constant to each logit. Slopes of a row sum to 0."""
    ones = [np.ones((len(z), 1)) for z in problem.features]
    last = constant * ones[-1] if problem.name != "nt_xent" else ones[0]
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


# ---------------------------------------------------------------------------------------------
# Accuracy at the edges, against mpmath.


def to_float64(matrix):
    return np.array(matrix.tolist(), np.float64)


def exact_info_nce(query, key, scale):
    """Losses and weighted gradients (weights 1) of the very same float64 numbers, in mpmath."""
    with mpmath.workdps(DIGITS):
        q, k = mpmath.matrix(query.tolist()), mpmath.matrix(key.tolist())
        x = scale * (q * k.T)
        losses, dx = [], mpmath.zeros(x.rows, x.cols)
        for i in range(x.rows):
            terms = [mpmath.exp(x[i, j]) for j in range(x.cols)]
            total = mpmath.fsum(terms)
            losses.append(mpmath.log(total) - x[i, i])
            for j in range(x.cols):
                dx[i, j] = terms[j] / total - (i == j)
        dq, dk = scale * dx * k, scale * dx.T * q
        ds = mpmath.fsum(dx[i, j] * (q * k.T)[i, j] for i in range(x.rows) for j in range(x.cols))
    return to_float64(mpmath.matrix(losses))[:, 0], to_float64(dq), to_float64(dk), float(ds)


def roundoff(query, key, scale):
    """Bound on what rounding the logits does to exp(logit), relative.

    A product of width D is off by at most (D + 1) EPS / 2 of the sum of its absolute terms, and
    both the positive and the negative logit are. Exponents and sums add a few EPS more.
    """
    largest = scale * (np.abs(query) @ np.abs(key).T).max()
    return EPS * ((query.shape[1] + 4) * largest + 4 * len(key) + 16)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("temperature", [0.005, 0.02])
def test_a_loss_near_zero_keeps_its_digits(temperature, noise):
    """Aligned pairs at low temperature: losses down to 1e-60, and r - x would leave none."""
    rng = np.random.default_rng(3)
    query = unit_rows(rng, 6, 8)
    key = query + noise * unit_rows(rng, 6, 8)
    scale = 1 / temperature
    losses, dq, dk, ds = exact_info_nce(query, key, scale)
    assert losses.min() < 1e-15
    rtol = roundoff(query, key, scale)
    assert rtol < 1e-11
    result = reference.info_nce(query, key, scale=scale, weights=np.ones(6))
    assert_close(result.losses, losses, rtol=rtol, atol=0)
    assert_close(result.loss, losses.sum(), rtol=rtol, atol=0)
    # Row i of dQ is scale * (1 - p) * (mean of the negatives - positive): small, but to scale.
    for gradient, exact in ((result.grads["query"], dq), (result.grads["key"], dk)):
        error = np.linalg.norm(gradient - exact, axis=1)
        assert (error <= 10 * rtol * np.linalg.norm(exact, axis=1)).all()
    assert_close(result.grads["scale"], ds, rtol=10 * rtol, atol=0)
    both = reference.clip(query, key, scale=scale, weights=np.ones(6))
    back = exact_info_nce(key, query, scale)[0]
    assert_close(both.losses, (losses + back) / 2, rtol=rtol, atol=0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("scale", [200.0, 1e4, 1e6])
def test_large_logits_do_not_overflow(scale, sign):
    """Opposed pairs (sign -1) and aligned ones, at scales where exp(x) is inf or 0."""
    rng = np.random.default_rng(4)
    query = unit_rows(rng, 5, 3)
    key = sign * query
    losses, dq, dk, ds = exact_info_nce(query, key, scale)
    rtol = roundoff(query, key, scale)
    result = reference.info_nce(query, key, scale=scale, weights=np.ones(5))
    assert_close(result.losses, losses, rtol=rtol, atol=0)
    for actual, exact in ((result.grads["query"], dq), (result.grads["key"], dk)):
        assert np.linalg.norm(actual - exact) <= 10 * rtol * np.linalg.norm(exact)
    assert_close(result.grads["scale"], ds, rtol=10 * rtol, atol=0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (200.0, -100.0), (1e5, 0.0)])
def test_siglip_is_accurate_at_any_logit(scale, bias, sign):
    rng = np.random.default_rng(5)
    image = unit_rows(rng, 5, 3)
    text = sign * image
    result = reference.siglip(image, text, scale=scale, bias=bias, weights=np.ones(5))
    with mpmath.workdps(DIGITS):
        u, v = mpmath.matrix(image.tolist()), mpmath.matrix(text.tolist())
        x = scale * (u * v.T)
        signed = [[(2 * (i == j) - 1) * (x[i, j] + bias) for j in range(5)] for i in range(5)]
        losses = [mpmath.fsum(mpmath.log(1 + mpmath.exp(-a)) for a in row) for row in signed]
        slopes = [
            [-(2 * (i == j) - 1) / (1 + mpmath.exp(signed[i][j])) for j in range(5)]
            for i in range(5)
        ]
        exact = scale * mpmath.matrix(slopes) * v
    rtol = roundoff(image, text, scale) + 2 * EPS * abs(bias)
    assert_close(result.losses, to_float64(mpmath.matrix(losses))[:, 0], rtol=rtol, atol=0)
    error = np.linalg.norm(result.grads["image"] - to_float64(exact))
    assert error <= 10 * rtol * float(mpmath.norm(exact))


# ---------------------------------------------------------------------------------------------
# What comes in and what goes out.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_everything_is_float64_and_the_inputs_stay(name, dtype):
    problem = one_problem(name, normalize=True)
    narrow = tuple(z.astype(dtype) for z in problem.features)
    before = [z.copy() for z in narrow]
    for z in narrow:
        z.flags.writeable = False
    result = problem._replace(features=narrow).reference()
    wide = problem._replace(features=tuple(z.astype(np.float64) for z in narrow)).reference()
    assert_same_result(result, wide)
    assert isinstance(result.loss, float)
    assert result.losses.dtype == np.float64
    for argument, gradient in result.grads.items():
        if argument in ("scale", "bias"):
            assert isinstance(gradient, float)
        elif gradient is not None:
            assert gradient.dtype == np.float64
            assert gradient.shape == narrow[0].shape
    for z, old in zip(narrow, before, strict=True):
        np.testing.assert_array_equal(z, old)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, -1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_value_that_is_not_finite_makes_the_loss_nan(name, side, bad):
    """Row 1 is to lose badly or win by far, depending on the sign; neither is a number."""
    for column in (0.0, 1.0):
        features = [z.copy() for z in one_problem(name).features]
        for z in features:
            z[:, 2] = column + np.arange(len(z)) * column
        features[side][1, 2] = bad
        result = Problem(name, tuple(features), scale=2.0).reference()
        assert np.isnan(result.losses[1])
        assert np.isnan(result.loss)
        assert np.isnan(result.grads["scale"])


def test_infinity_at_the_positive_is_no_certainty():
    """Logits inf and -inf: the softmax would put all of its mass on the positive."""
    result = reference.info_nce([[np.inf]], [[1.0], [-1.0]], scale=1.0)
    assert np.isnan(result.loss)
    result = reference.siglip([[np.inf]], [[1.0]])
    assert np.isnan(result.loss)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 5))
def test_normalize(seed, rows, width):
    rng = np.random.default_rng(seed)
    z, g = rng.normal(size=(2, rows, width))
    u, norm = reference.normalize(z)
    dz = reference.normalize_backward(g, u, norm)
    assert_close(norm[:, 0], [np.sqrt(sum(v * v for v in row)) for row in z])
    assert_close(u * norm, z)
    expected = np.zeros_like(z)
    for index, moved in every_entry(z):
        unit = moved / np.sqrt((moved * moved).sum(axis=1, keepdims=True))
        expected[index] = (g * unit).sum().imag / 1e-30
    assert_close(dz, expected)


def test_normalize_has_no_direction_for_a_row_of_zeros():
    u, norm = reference.normalize(np.array([[0.0, 0.0], [3.0, 4.0]]))
    assert np.isnan(u[0]).all()
    np.testing.assert_array_equal(norm, [[0.0], [5.0]])
    assert_close(u[1], [0.6, 0.8], rtol=EPS, atol=0)


def test_log_sum_exp():
    nothing = -np.inf
    x = np.array([[nothing, nothing], [nothing, 3.0], [1e4, 1e4], [-1e4, -1e4], [0.0, np.nan]])
    expected = [nothing, 3.0, 1e4 + np.log(2), -1e4 + np.log(2), np.nan]
    np.testing.assert_allclose(common.log_sum_exp(x, axis=1), expected, rtol=EPS)
    np.testing.assert_allclose(common.log_sum_exp(x.T, axis=0), expected, rtol=EPS)
    np.testing.assert_array_equal(common.log_sum_exp(np.empty((2, 0)), axis=1), [nothing] * 2)
