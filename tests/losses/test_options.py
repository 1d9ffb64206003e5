"""Options of the softmax on the CPU, by every method, against the specification."""

from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import backend, schedule
from infonce.kernels.problem import LN_2
from infonce.kernels.solve import Vectors
from reference_problems import Problem, each_once, one_problem, taken

import infonce
from infonce import reference, spec

NAMES = ("info_nce", "nt_xent", "clip", "lit", "sup_con", "gte")
METHODS = ("naive", "fused", "tiled")
# Each with the options that it may not be combined with left out
TOGETHER: list[dict[str, Any]] = [
    {"margin": 0.2, "hardness": 1.5, "decoupled": True},
    {"margin": 0.2, "label_smoothing": 0.1},
    {"hardness": 3.0},
]
LIMIT = {"false_negative_margin": 0.1}
BIASES = np.random.default_rng(3).normal(size=150) * 3
# Those that metrics are not of
OF_LOGITS: list[dict[str, Any]] = [
    {"key_bias": BIASES, "label_smoothing": 0.1},
    {"key_bias": BIASES, "hardness": 1.5, **LIMIT},
]


class VectorsOfGPU(Vectors):
    """Reference exponents are log-sum-exps, as kernels have them: their probability is a number."""

    def direction(self, *args: Any) -> Any:
        end = super().direction(*args)
        end.reference = np.where(np.isneginf(end.lse), 0.0, end.lse / LN_2)
        end.reference_probability = 1.0
        return end


@pytest.mark.parametrize("options", [{}, *TOGETHER], ids=lambda options: "-".join(options))
@pytest.mark.parametrize("name", NAMES)
def test_array_operations_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(backend.CPU, "vectors", VectorsOfGPU(np))
    problem = unit_problem(name, 20, 6, 5)._replace(softmax=taken(name, options))
    keywords = {key: v for key, v in problem.options().items() if key != "weights"}
    compare(problem, keywords, "naive")


@pytest.mark.parametrize("grad_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent", "gte"])
def test_both_passes_leave_out_the_same_pairs(
    monkeypatch: pytest.MonkeyPatch, name: str, grad_dtype: Any
) -> None:
    """Rows that differ by rounding, so that digits beyond float32 decide which pairs take part. The
    slopes of a row add up to 0 if those in its sum are those in its gradient."""
    monkeypatch.setattr(schedule, "TILE", (16, 24))
    monkeypatch.setattr(schedule, "TRIANGLE_SIDE", 16)
    rng = np.random.default_rng(2)
    z = rng.standard_normal(37) / 6 + 6e-8 * rng.standard_normal((2, 150, 37))
    features = z.astype(np.float32)[: 1 if name == "nt_xent" else 2]
    for workspace in (None, 40_000):  # logits are kept, and computed once more
        got = getattr(infonce, f"{name}_loss_and_grad")(
            *features, scale=1.0, reduction="sum", grad_dtype=grad_dtype, method="tiled",
            workspace=workspace, false_negative_margin=0.0,
        )  # fmt: skip
        lse = np.concatenate(got.lse) if name == "clip" else got.lse
        assert len(np.unique(lse.round(2))) > 20  # rows have different numbers of keys
        total = sum(gradient.sum(axis=0) for gradient in got.grads[:-1])
        assert np.abs(total).max() < 1e-3


def test_limits_need_room_for_whole_gradients() -> None:
    z = np.random.default_rng(0).standard_normal((64, 32))
    options: dict[str, Any] = {"scale": 1.0, "grad_dtype": np.float32, "method": "tiled", **LIMIT}
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        infonce.clip_loss_and_grad(z, z[::-1], workspace=8 * 64 * 32, **options)
    least = int(str(error.value).split()[4])
    assert least > 8 * 64 * 32
    got = infonce.clip_loss_and_grad(z, z[::-1], workspace=least, **options)
    want = reference.clip(z, z[::-1], scale=1.0, **LIMIT)
    np.testing.assert_allclose(got.grads.text, want.grads["text"], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        infonce.clip_loss_and_grad(z, z[::-1], workspace=least - 1, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "lit", "sup_con"])
def test_the_same_bias_of_all_keys_changes_nothing(name: str, method: str) -> None:
    """The bias changes only the log-sum-exps of losses of rows."""
    for options in TOGETHER:
        problem = one_problem(name)._replace(softmax=taken(name, options))
        keywords = {key: v for key, v in problem.options().items() if key != "weights"}
        for wrt in (None, ("scale",)):
            plain, got = (
                getattr(infonce, f"{name}_loss_and_grad")(
                    *problem.features, method=method, wrt=wrt, **keywords, **bias
                )
                for bias in ({}, {"key_bias": np.full(6, 3.0)})
            )
            assert_near(got.loss, plain.loss)
            assert_near(got.lse, plain.lse + 3.0)
            for have, want in zip(got.grads, plain.grads, strict=True):
                if want is not None:
                    assert_near(have, want)


@pytest.mark.parametrize("method", METHODS)
def test_the_limit_is_that_of_the_best_positive(method: str) -> None:
    """Positives 0.2 and 0.5; of a margin 0.1, negatives above 0.6 are left out."""
    keys = np.array([0.2, 0.5, 0.59, 0.61, 0.9])[:, None]
    options: dict[str, Any] = {"scale": 2.0, "labels": [[1, 0]], "method": method}
    got = infonce.info_nce_loss_and_grad(np.ones((1, 1)), keys, **options, **LIMIT)
    left = infonce.info_nce_loss_and_grad(np.ones((1, 1)), keys[:3], **options)
    assert_near(got.loss, left.loss)
    assert_near(got.grads.key, np.concatenate([left.grads.key, np.zeros((2, 1))]))


@pytest.mark.parametrize("method", METHODS)
def test_a_pair_of_views_is_left_out_of_one_row_alone(method: str) -> None:
    """Products of rows 0 and 1 with their positives are 1 and 5, with each other 3: above the limit
    of row 0 and below that of row 1."""
    z = np.array([[1.0, 0.0], [3.0, 1.0], [1.0, 0.0], [1.0, 2.0]])
    losses = infonce.nt_xent_loss(
        z, scale=1.0, false_negative_margin=0.5, reduction="none", method=method
    )
    np.testing.assert_allclose(losses[0], np.log1p(np.exp(1.0 - 1.0)))  # row 3
    np.testing.assert_allclose(losses[1], np.log1p(2 * np.exp(3.0 - 5.0)))  # rows 0 and 2


def compare(problem: Problem, options: dict[str, Any], method: str) -> None:
    want = problem.reference()
    got = getattr(infonce, f"{problem.name}_loss_and_grad")(
        *problem.features, method=method, **options
    )
    assert_near(got.loss, want.loss)
    for name, gradient in want.grads.items():
        if gradient is not None:
            assert_near(getattr(got.grads, name), gradient)
    for have, expected in zip(np.atleast_2d(got.lse), np.atleast_2d(want.lse), strict=True):
        assert_near(have, expected)
    alone = getattr(infonce, f"{problem.name}_loss")(*problem.features, method=method, **options)
    assert_near(alone, want.loss)
    scale_only = getattr(infonce, f"{problem.name}_loss_and_grad")(
        *problem.features, method=method, wrt="scale", **options
    )
    assert_near(scale_only.grads.scale, want.grads["scale"])


def assert_near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def unit_problem(name: str, rows: int, width: int, seed: int) -> Problem:
    """Unit rows, partly aligned with their positives."""
    problem = one_problem(name, seed=seed, rows=rows, width=width)
    features = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in problem.features]
    half = rows // 2
    pair = (features[0][:half], features[0][half:]) if len(features) == 1 else features
    pair[1][:] += pair[0]
    pair[1][:] /= np.linalg.norm(pair[1], axis=1, keepdims=True)
    if name == "sup_con":
        problem = problem._replace(labels=np.arange(rows) % 7 % 5)
    if name == "info_nce":
        labels = np.random.default_rng(seed).integers(-1, rows, (rows, 3))
        problem = problem._replace(labels=each_once(np.c_[labels, np.arange(rows)]))
    return problem._replace(features=tuple(features))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_neutral_values_have_the_bits_of_none(name: str, method: str) -> None:
    problem = one_problem(name)
    options = {key: v for key, v in problem.options().items() if key != "weights"}
    function = getattr(infonce, f"{name}_loss_and_grad")
    plain = function(*problem.features, method=method, **options)
    neutral = {key: spec.DEFAULTS[key] for key in (*spec.SOFTMAX_OPTIONS, "weights")}
    if name == "info_nce":
        neutral["labels"] = np.arange(6)[:, None]
    got = function(*problem.features, method=method, **options | neutral)
    assert got.loss == plain.loss
    for have, want in zip(got.grads, plain.grads, strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("wrt", [(), ("query",), ("key",), ("scale",), ("key", "scale")])
@pytest.mark.parametrize("name", ["info_nce", "gte"])
def test_gradients_that_are_asked_for(name: str, wrt: tuple[str, ...]) -> None:
    problem = one_problem(name)._replace(softmax={"margin": 0.3, "label_smoothing": 0.2})
    options = {key: v for key, v in problem.options().items() if key != "weights"}
    out = {key: np.full((6, 4), np.nan, np.float32) for key in wrt if key != "scale"}
    got = getattr(infonce, f"{name}_loss_and_grad")(*problem.features, wrt=wrt, out=out, **options)
    want = problem.reference()
    assert_near(got.loss, want.loss)
    for argument in ("query", "key", "scale"):
        gradient = getattr(got.grads, argument)
        if argument not in wrt:
            assert gradient is None
            continue
        assert gradient is out.get(argument, gradient)
        np.testing.assert_allclose(gradient, want.grads[argument], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [32, 33])
def test_joint_gradients_in_one_array(rows: int) -> None:
    """Gradients are halves of one array if both halves are aligned, else arrays of their own."""
    z = np.random.default_rng(0).standard_normal((2, rows, 4), np.float32)
    got = infonce.gte_loss_and_grad(*z, scale=3.0)
    one = got.grads.query.base is not None and got.grads.query.base is got.grads.key.base
    assert one == (rows == 32)
    out = {name: np.empty((rows, 4), np.float32) for name in ("query", "key")}
    infonce.gte_loss_and_grad(*z, scale=3.0, out=out)
    wide = infonce.gte_loss_and_grad(*z, scale=3.0, grad_dtype=np.float64).grads
    for name, gradient in out.items():
        np.testing.assert_array_equal(getattr(got.grads, name), gradient)
        np.testing.assert_array_equal(getattr(wide, name), gradient)


@pytest.mark.parametrize("method", METHODS)
def test_small_losses_keep_their_digits(method: str) -> None:
    """Aligned pairs at a low temperature: with one positive a row, losses of 1e-80 are right."""
    z = np.eye(6)
    tight = {"rtol": 1e-12, "atol": 0}
    for options in ({}, {"margin": 0.1}, {"hardness": 2.0}):
        got = infonce.info_nce_loss(z, z, scale=200.0, method=method, **options)
        margin = options.get("margin", 0.0)
        np.testing.assert_allclose(got, 5 * np.exp(-200.0 * (1 - margin)), **tight)
    pairs = np.concatenate([z, z])
    got = infonce.sup_con_loss(pairs, np.tile(np.arange(6), 2), scale=200.0, method=method)
    np.testing.assert_allclose(got, 10 * np.exp(-200.0), **tight)
    got = infonce.gte_loss(z, z, scale=200.0, method=method)
    np.testing.assert_allclose(got, 20 * np.exp(-200.0), **tight)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_makes_the_loss_nan(name: str) -> None:
    for options in (*TOGETHER, LIMIT):
        problem = one_problem(name)._replace(softmax=taken(name, options))
        problem.features[-1][2, 1] = np.inf
        keywords = {key: v for key, v in problem.options().items() if key != "weights"}
        for method in METHODS:
            loss = getattr(infonce, f"{name}_loss")(*problem.features, method=method, **keywords)
            assert np.isnan(loss)


def test_sup_con_of_six_directions() -> None:
    """The inputs of a public test, by angle; the row alone in its class is left out."""
    angles = np.radians([0, 10, 20, 50, 60, 80])
    z = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    loss = infonce.sup_con_loss(z, np.array([0, 0, 0, 1, 1, 2]), temperature=0.1)
    np.testing.assert_allclose(loss, 0.720060, rtol=0, atol=5e-7)


def test_two_queries_whose_logits_are_known() -> None:
    """Logits (3, 0) and (4, 0), the diagonal positive: softplus(-3) + softplus(4)."""
    query, key = np.array([[3.0], [4.0]]), np.array([[1.0], [0.0]])
    loss = infonce.info_nce_loss(query, key, scale=1.0, reduction="sum")
    np.testing.assert_allclose(loss, 4.066737, rtol=0, atol=5e-7)
    for weights in ([0.7, 0.3], [1.4, 0.6]):  # the mean divides by their sum
        loss = infonce.info_nce_loss(query, key, temperature=1.0, weights=np.array(weights))
        np.testing.assert_allclose(loss, 1.239456, rtol=0, atol=5e-7)
    want = reference.info_nce(query, key, scale=1.0, decoupled=True, weights=[1.0, 1.0])
    got = infonce.info_nce_loss(query, key, scale=1.0, decoupled=True, reduction="sum")
    assert_near(got, want.loss)
    assert_near(got, -3.0 + 4.0)
