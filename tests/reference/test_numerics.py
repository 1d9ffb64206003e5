"""The specification's accuracy, against mpmath, and what it takes and hands out."""

import ml_dtypes
import mpmath
import numpy as np
import pytest
from reference_problems import EPS, LOSSES, assert_close, assert_same_result, one_problem

from infonce import reference
from infonce.reference import common

DIGITS = 400  # more than the 308 that separate 1 from the smallest double: 1 + loss is exact


def unit_rows(rng, *shape):
    z = rng.normal(size=shape)
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


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
        result = one_problem(name)._replace(features=tuple(features)).reference()
        assert np.isnan(result.losses[1])
        assert np.isnan(result.loss)
        assert np.isnan(result.grads["scale"])


def test_infinity_at_the_positive_is_no_certainty():
    """Logits inf and -inf: the softmax would put all of its mass on the positive."""
    result = reference.info_nce([[np.inf]], [[1.0], [-1.0]], scale=1.0)
    assert np.isnan(result.loss)
    result = reference.siglip([[np.inf]], [[1.0]])
    assert np.isnan(result.loss)


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
