"""Options of the softmax, sup_con and gte on a GPU, against the specification."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import ELEMENT_ROUNDOFF, MISSING, find_dtype, smaller
from host_device import room
from judge import GRAD_BOUND, assert_grad, assert_loss, largest_logit
from reference_problems import Problem, each_once

import infonce
from infonce import spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy

# info_nce also with sets of positives, and with rows that have none
NAMES = ("info_nce", "info_nce sets", "info_nce some", "nt_xent", "clip", "lit", "sup_con", "gte")
REFUSED = {"sup_con": spec.SUP_CON.refused, "gte": spec.GTE.refused}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"margin": 0.2},
    {"hardness": 3.0},
    {"decoupled": True},
    {"margin": -0.1, "hardness": 1.5, "decoupled": True},
    {"label_smoothing": 0.1},
    {"margin": 0.2, "label_smoothing": 0.3},
    {"key_bias": True},
    {"false_negative_margin": True},
    {"key_bias": True, "false_negative_margin": True},
    {"key_bias": True, "false_negative_margin": True, "hardness": 2.0, "margin": 0.1},
    {"key_bias": True, "label_smoothing": 0.1},
]
MARGINS = [options for options in OPTIONS if "margin" in options]
PRECISION = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}
BIASES = np.random.default_rng(3).normal(size=2 * 520) * 3
# tiles of both kinds, narrow rows and wide ones
SHAPES = [(70, 12), (300, 72), (520, 130), (300, 1100)]
MANY = smaller((520, 130), (260, 130))


def make_problem(name: str, rows: int, width: int, dtype: str, **options: Any) -> Problem:
    """Unit rows as the dtype has them, queries near their keys."""
    rng = np.random.default_rng(7)
    z = rng.standard_normal((2, rows, width)) / width**0.5
    z[1] += z[0]
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z = z.astype(find_dtype(dtype))
    name, _, labelled = name.partition(" ")
    one_array = name in ("nt_xent", "sup_con")
    labels = None
    if labelled == "sets":  # of one to five, and of none
        labels = rng.integers(-1, rows, (rows, 6))
        labels[:, 1] = np.arange(rows)
        labels[:, 2:5][rng.random((rows, 3)) < 0.5] = -1
        labels = each_once(labels)
        labels[::9] = -3
    elif labelled == "some":
        labels = np.where(np.arange(rows) % 4 == 1, -2, rng.permutation(rows))
    if name == "sup_con":  # classes of many rows, of two, and rows that are alone
        labels = rng.integers(0, 9, 2 * rows)
        labels[:10] = np.arange(10) // 2 + 100
        labels[10:20] = -1
    softmax = {key: v for key, v in options.items() if key not in REFUSED.get(name, ())}
    features = (z.reshape(-1, width),) if one_array else (z[0], z[1])
    if "key_bias" in softmax:
        softmax["key_bias"] = BIASES[: len(features[-1])]
    if "false_negative_margin" in softmax:
        softmax["false_negative_margin"] = clear_margin(z.astype(np.float64), name, labels)
    return Problem(name, features, scale=20.0, labels=labels, softmax=softmax)


def clear_margin(z: Any, name: str, labels: Any = None, normalize: bool = False) -> float:
    """A margin near 0.1 from which all pairs are far, so that rounding decides about none."""
    if normalize:
        z = z / np.linalg.norm(z, axis=2, keepdims=True)
    query, key = z
    if name in ("nt_xent", "gte"):
        query, key = z.reshape(-1, z.shape[2]), z[::-1].reshape(-1, z.shape[2])
    above = query @ key.T
    top = np.diag(above)
    if labels is not None:
        labels = labels.reshape(len(above), -1)
        label_logits = np.take_along_axis(above, np.maximum(labels, 0), axis=1)
        top = np.where(labels < 0, -np.inf, label_logits).max(axis=1)
    above = above - np.where(np.isneginf(top), np.inf, top)[:, None]
    if name == "clip":
        other = key @ query.T
        above = np.concatenate([above, other - np.diag(other)[:, None]])
    near = np.sort(above[(above > 0.05) & (above < 0.15)])
    near = np.concatenate([[0.05], near, [0.15]])
    widest = np.diff(near).argmax()
    return float(near[widest : widest + 2].mean())


def given_options(problem: Problem) -> dict[str, Any]:
    return {k: v for k, v in problem.options().items() if k != "weights" and v is not None}


def on_gpu(problem: Problem, **options: Any) -> infonce.LossAndGrad:
    keywords = given_options(problem)
    for key in ("labels", "ids", "key_bias"):
        if key in keywords:
            keywords[key] = cupy.asarray(keywords[key])
    function = getattr(infonce, f"{problem.name}_loss_and_grad")
    return function(*map(cupy.asarray, problem.features), **keywords | options)


def compare(
    problem: Problem, got: infonce.LossAndGrad, dtype: str, scale: float = 20.0,
    off_by: float = 1e-5,
) -> None:  # fmt: skip
    """`off_by`: what the gradient of the scale may be off by."""
    wide = tuple(z.astype(np.float64) for z in problem.features)
    want = problem._replace(features=wide).reference()
    hardness = float(problem.softmax.get("hardness", 0.0))  # type: ignore[arg-type]
    logit = largest_logit(scale + hardness, wide[0], wide[-1])
    logit += float(np.abs(problem.softmax.get("key_bias", 0.0)).max())  # type: ignore[arg-type]
    assert_loss(cupy.asnumpy(got.loss), float(want.loss), dtype, logit)
    terms = scale * len(wide[0]) ** -0.5
    for name, gradient in want.grads.items():
        have = getattr(got.grads, name)
        if isinstance(gradient, np.ndarray) and have is not None:
            assert_grad(cupy.asnumpy(have), gradient, dtype, logit, terms=terms)
    np.testing.assert_allclose(float(got.grads.scale), want.grads["scale"], rtol=1e-4, atol=off_by)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_specification(
    name: str, dtype: str, rows: int, width: int, options: dict[str, Any]
) -> None:
    problem = make_problem(name, rows, width, dtype, **options)
    compare(problem, on_gpu(problem), dtype)


@pytest.mark.usefixtures("no_few_logits")
@pytest.mark.parametrize("options", MARGINS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "sup_con"])
def test_a_margin_beside_feature_gradients(
    name: str, dtype: str, options: dict[str, Any]
) -> None:  # fmt: skip
    """The scale's gradient comes from feature gradients, which are rounded and do not see the
    margin."""
    off_by = 1e-5 + 2 * ELEMENT_ROUNDOFF[PRECISION[dtype]]
    problem = make_problem(name, 300, 72, dtype, **options)
    loss = spec.LOSSES[problem.name]
    for side in {*loss.arguments} - {*loss.locked}:
        compare(problem, on_gpu(problem, wrt=(side, "scale"), method="tiled"), dtype, off_by=off_by)
    problem = with_ids(make_problem(name, *MANY, dtype, **options))
    compare(problem, on_gpu(problem, workspace=2**20), dtype, off_by=off_by)


def with_ids(problem: Problem) -> Problem:
    """Normalised; and with pairs that are left out."""
    if "false_negative_margin" in problem.softmax:
        z = np.stack(problem.features).astype(np.float64)
        z = z.reshape(2, -1, z.shape[-1])
        margin = clear_margin(z, problem.name, problem.labels, normalize=True)
        softmax = dict(problem.softmax) | {"false_negative_margin": margin}
        problem = problem._replace(softmax=softmax)
    if problem.name != "sup_con":
        rows = len(problem.features[0])
        problem = problem._replace(ids=np.random.default_rng(1).integers(0, rows, rows))
    return problem._replace(normalize=True)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda options: "-".join(options))
@pytest.mark.parametrize("name", NAMES)
def test_normalised_ids_and_little_workspace(name: str, options: dict[str, Any]) -> None:
    """Several blocks, and gradients of keys by ranges."""
    problem = with_ids(make_problem(name, 300, 72, "float32", **options))
    compare(problem, on_gpu(problem, workspace=2**19), "float32")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_offload(
    name: str, few: bool, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Chunks of both sides, and everything at once; of `few` logits, or as if they were many."""
    if not few:
        request.getfixturevalue("no_few_logits")
    n, chunk = smaller((300, 60), (80, 32))
    plain = make_problem(name, n, 72, "float32", **options)
    for problem in (plain, with_ids(plain)):
        keywords = given_options(problem)
        function = getattr(infonce, f"{problem.name}_loss_and_grad")
        for workspace in (room(chunk, 72, 2 * n, 2 * n, 4, 4), 2**28):
            got = function(*problem.features, **keywords, offload=True, workspace=workspace)
            compare(problem, got, "float32")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_from_run_to_run(name: str, options: dict[str, Any]) -> None:
    problem = make_problem(name, *MANY, "bfloat16", **options)
    first, second = on_gpu(problem), on_gpu(problem)
    assert float(first.loss) == float(second.loss)
    for one, other in zip(first.grads, second.grads, strict=True):
        if one is not None:
            assert (cupy.asnumpy(one) == cupy.asnumpy(other)).all()


def near_each_other(
    name: str, rows: int, width: int, dtype: str, precision: str, small: float = 3e-3
) -> tuple[Any, ...]:
    """Rows whose products differ by some units of float32's rounding: half of the features are the
    same in all rows, the others `small`."""
    rng = np.random.default_rng(2)
    z = np.empty((2, rows, width))
    z[..., ::2] = rng.choice([-1, 1], (width + 1) // 2) * width**-0.5
    z[..., 1::2] = small * rng.standard_normal((2, rows, width // 2)) * width**-0.25
    if precision == "tf32":
        z = z.astype(np.float16)
    z = z.astype(find_dtype(dtype))
    return (z.reshape(-1, width),) if name == "nt_xent" else (z[0], z[1])


# rows in shared memory, beside the keys, wider than that; with a gradient in registers
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (150, 37),
        (300, 128),
        (300, 512),
        (300, 1200),
        *smaller([(2200, 128), (4200, 72)], [(600, 128)]),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float64", "auto"), ("float32", "auto"), ("float32", "bf16x3"), ("float32", "tf32"),
     ("bfloat16", "auto"), ("float16", "auto")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent", "gte"])
def test_both_passes_leave_out_the_same_pairs(
    name: str, dtype: str, precision: str, rows: int, width: int
) -> None:
    """The slopes of a softmax add up to 0 if the pairs in its sum are those in its gradient. So,
    where all products are nearly the same, does the gradient of the scale: in large batches it
    comes from the gradient pass."""
    normalize = rows > 4096
    # Products that differ by d add d to the gradient of the scale: less than the bound
    small = 1e-3 if normalize else 3e-3
    z = tuple(map(cupy.asarray, near_each_other(name, rows, width, dtype, precision, small)))
    for options in ({}, {"key_bias": cupy.linspace(-1, 1, len(z[-1]))}):
        if name == "gte" and options:
            continue
        got = getattr(infonce, f"{name}_loss_and_grad")(
            *z, scale=1.0, reduction="sum", grad_dtype=np.float32, precision=precision,
            normalize=normalize, false_negative_margin=0.0, method="tiled",
            workspace=2**20 if rows == 300 else None, **options,
        )  # fmt: skip
        lse = cupy.concatenate(got.lse) if name == "clip" else got.lse
        kept = np.exp(lse.get() - lse.get().max())
        assert kept.std() > 0.01  # rows have different numbers of keys
        total = sum(gradient.astype(np.float64).sum(axis=0) for gradient in got.grads[:-1])
        slope = float(cupy.abs(total[::2]).max()) * width**0.5  # of one pair: 1
        if normalize:
            slope = abs(float(got.grads.scale))
        # A row's elements of dL/dx are nearly one number, and share its rounding: up to 2^-8 of it
        # in bfloat16, 2^-11 in float16 and tf32, for rows and for columns. From one row to the next
        # it varies. Of two parts, less is rounded than tensor cores cut off from long sums.
        bounds = {"bfloat16": 4e-3, "float16": 1e-3, "tf32": 1e-3, "bf16x3": 1e-4}
        rounding = bounds.get(dtype if precision == "auto" else precision, 1e-5)
        assert slope < rounding * sum(len(gradient) for gradient in got.grads[:-1])
        if name == "info_nce" and not normalize:
            row_norms = cupy.abs(got.grads.query[:, ::2]).max(axis=1) * width**0.5
            assert float(row_norms.max()) < rounding


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["info_nce", "clip", "nt_xent"])
def test_limits_far_apart(name: str, dtype: str) -> None:
    """Positives of all similarities at a high scale: what one row leaves out exceeds by 2^100 what
    it keeps, and rows are left without negatives."""
    rng = np.random.default_rng(5)
    z = rng.standard_normal((2, 300, 64))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z[1] = np.linspace(-1, 1, 300)[:, None] * z[0] + 0.3 * z[1]
    z[1, :150] += 2 * z[0, 7]
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z = z.astype(find_dtype(dtype))
    margin = clear_margin(z.astype(np.float64), name)
    features = (z.reshape(-1, 64),) if name == "nt_xent" else (z[0], z[1])
    problem = Problem(name, features, scale=100.0, softmax={"false_negative_margin": margin})
    compare(problem, on_gpu(problem), dtype, 100.0)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "clip", "lit", "siglip"])
def test_gradients_of_prefixes_are_as_precise_as_asked(name: str, place: str) -> None:
    """Those of all prefixes (`dims`), in arrays of several dtypes; in 16 bits they underflow."""
    rng = np.random.default_rng(0)
    sides = [rng.standard_normal((60, 24)) / 5 for _ in spec.LOSSES[name].arguments]
    features = [z.astype(np.float16) for z in sides]
    options: dict[str, Any] = {
        "scale": 2.0, "dims": (3, 8, 20), "dim_weights": (1.0, -2.0, 0.5), "precision": "fp64",
        "grad_out": 2.0**-30,
    }  # fmt: skip
    function = getattr(infonce, f"{name}_loss_and_grad")
    want = function(*(z.astype(np.float64) for z in features), normalize=False, **options)
    there = [cupy.asarray(z) for z in features] if place == "device" else features
    xp = cupy if place == "device" else np
    argument = spec.LOSSES[name].arguments[0]
    for way in (
        {"grad_dtype": np.float32}, {"grad_dtype": np.float64},
        {"out": {argument: xp.empty((60, 24), np.float32)}},
    ):  # fmt: skip
        got = function(*there, normalize=False, offload=place == "host", **options, **way)
        for field in spec.LOSSES[name].arguments if "grad_dtype" in way else (argument,):
            gradient, exact = getattr(got.grads, field), getattr(want.grads, field)
            if exact is None:
                continue
            assert gradient.dtype == way.get("grad_dtype", np.float32)
            error = abs(cupy.asnumpy(gradient).astype(np.float64) - exact).max()
            assert error <= GRAD_BOUND[gradient.dtype.name] * abs(exact).max()
