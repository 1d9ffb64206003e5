"""`infonce.compare`: its truth and its roundings beside mpmath, and the bounds of precisions."""

import tracemalloc
from typing import Any

import ml_dtypes
import mpmath as mp
import numpy as np
import pytest
from infonce.kernels.arrays.formats import round_to_format
from infonce.kernels.cpu.emulated import LARGEST_ELEMENT, gradient_divisor
from infonce.kernels.epilogues import SoftmaxGradient

import infonce
from infonce import comparison
from infonce.checks.teacher import ALL_LOSSES

N, D = 7, 5
EPSILON = 2.0**-24
# docs/methods.md: bounds on a GPU, of a loss and of its gradient as it is written, for features in
# the dtype of the precision
BOUNDS = {"fp32": (1e-6, 5e-6), "bf16x3": (1e-5, 1e-4), "tf32": (1e-4, 2e-3),
          "fp16": (1e-5, 6e-4), "bf16": (1e-5, 4e-3)}  # fmt: skip
# Largest relative error of an operand of a product
ROUNDOFF = {"fp32": 2.0**-24, "bf16x3": 2.0**-17, "tf32": 2.0**-11, "fp16": 2.0**-11,
            "bf16": 2.0**-8}  # fmt: skip
PARTS = ("tf32", "bf16x3")  # round features in products; 16-bit features are rounded before


def matrix(z: Any) -> Any:
    return mp.matrix(np.asarray(z, np.float64).tolist())


def numbers(z: Any) -> np.ndarray:
    return np.array(z.tolist(), float).reshape(z.rows, z.cols)


def split(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two bfloat16 parts of float32 numbers, in float64."""
    high = z.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (z - high).astype(ml_dtypes.bfloat16)
    return high.astype(np.float64), low.astype(np.float64)


def rounded(z: np.ndarray, precision: str) -> np.ndarray:
    """float32 numbers as operands, independently of the code that is tested."""
    if precision == "tf32":
        _, exponent = np.frexp(z.astype(np.float64))
        ulp = np.ldexp(1.0, exponent - 11)
        return np.sign(z) * np.floor(np.abs(z) / ulp + 0.5) * ulp
    dtype = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}[precision]
    return z.astype(dtype).astype(np.float64)


def product(a: np.ndarray, b: np.ndarray, precision: str) -> Any:
    """The exact product a b' of operands."""
    if precision != "bf16x3":
        return matrix(rounded(a, precision)) * matrix(rounded(b, precision)).T
    (a1, a2), (b1, b2) = (tuple(map(matrix, split(z))) for z in (a, b))
    return a1 * b1.T + a1 * b2.T + a2 * b1.T


def clip_by_definition(x: Any, scale: float) -> tuple[Any, np.ndarray, np.ndarray]:
    """The loss, dL/dx [N, N] at negatives, and dL/dx at positives, of logits x."""
    n = x.rows
    e = x.apply(mp.exp)
    rows = [mp.fsum(e[i, j] for j in range(n)) for i in range(n)]
    columns = [mp.fsum(e[i, j] for i in range(n)) for j in range(n)]
    terms = [mp.log(rows[i]) + mp.log(columns[i]) - 2 * x[i, i] for i in range(n)]
    dx = mp.matrix(n, n)
    for i in range(n):
        for j in range(n):
            dx[i, j] = (e[i, j] / rows[i] + e[i, j] / columns[j] - 2 * (i == j)) / (2 * n)
    dx = numbers(dx)
    return mp.fsum(terms) / (2 * n), dx - np.diag(np.diag(dx)), np.diag(dx)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
@pytest.mark.parametrize("precision", [*BOUNDS])
def test_errors_are_those_of_mpmath(precision: str, temperature: float) -> None:
    """The loss, the gradient and their errors are those of exact arithmetic with the same operands,
    within the rounding of float32.

    A logit x has an error of (D + 2) EPSILON |x|, and so has its exponential, relative to it; the
    exponential itself and the sums of N terms add N + 4 roundings. Products add N more. Elements of
    dL/dx so near the middle of two numbers of the format that this error decides are allowed both.
    """
    scale = 1 / temperature
    image, text = comparison.random_inputs(ALL_LOSSES["clip"], N, D).values()
    found = infonce.compare("clip", image, text, temperature=temperature)
    got = next(e for e in found.errors if (e.precision, e.grad_dtype) == (precision, "float32"))
    with mp.workprec(200):
        exact_loss, negatives, positives = clip_by_definition(
            matrix(image) * matrix(text).T * scale, scale
        )
        truth = scale * (negatives + np.diag(positives)) @ text.astype(np.float64)
        u, v = image, text
        if precision not in PARTS:
            u, v = (rounded(z, precision).astype(np.float32) for z in (image, text))
        x = product(u, v, precision) * scale
        loss, negatives, positives = clip_by_definition(x, scale)
    assert abs(found.losses[temperature] / float(exact_loss) - 1) < 1e-14

    relative = ((D + 2) * float(np.abs(numbers(x)).max()) + N + 4) * EPSILON
    assert abs(got.loss - float(loss)) <= (relative + EPSILON) * (1 + float(loss))
    # the gradient block: as it is, a little larger and smaller
    block = (scale * negatives).astype(np.float64)
    bound = 2 * scale * max(np.abs(positives).max(), 2.0**-60)
    divisor = bound / LARGEST_ELEMENT.get(precision, 1)
    blocks = [block * (1 + step) / divisor for step in (0, -relative, relative)]
    if precision == "bf16x3":
        parts = [sum(split(b.astype(np.float32))) for b in blocks]
        lost = 2.0**-16 * np.abs(block) @ np.abs(v).astype(float)  # of the product of low parts
        operands = [part * divisor for part in parts]
        features = sum(split(v))
    else:
        operands = [rounded(b.astype(np.float32), precision) * divisor for b in blocks]
        lost, features = 0.0, rounded(v, precision)
    want = operands[0] @ features + scale * positives[:, None] * v.astype(np.float64)
    spread = np.abs(operands[1] - operands[0]) + np.abs(operands[2] - operands[0])
    sizes = np.abs(block) @ np.abs(v) + scale * np.abs(positives)[:, None] * np.abs(v)
    tolerance = spread @ np.abs(v) + lost + (relative + (N + 3) * EPSILON) * sizes
    error = np.linalg.norm(want - truth) / np.linalg.norm(truth)
    slack = np.linalg.norm(tolerance) / np.linalg.norm(truth)
    assert abs(got.gradients["image"].norm - error) <= slack
    if precision not in ("fp32", "bf16x3"):  # else roundings of float32 are as large
        assert slack < error / 2
    largest = np.abs(truth).max()
    assert abs(got.gradients["image"].element - np.abs(want - truth).max() / largest) <= (
        tolerance.max() / largest
    )
    # the elements themselves
    dtype = comparison.PRECISIONS[precision]
    options = {"temperature": temperature, "grad_dtype": np.float32}
    result = comparison.emulated_loss_and_grad(
        ALL_LOSSES["clip"], [z.astype(dtype) for z in (image, text)], precision, options=options
    )
    assert (np.abs(result.grads.image - want) <= tolerance).all()


@pytest.mark.parametrize("name", [*ALL_LOSSES])
@pytest.mark.parametrize("normalize", [False, True])
def test_errors_of_features_in_the_dtype_of_a_precision(name: str, normalize: bool) -> None:
    """They are within the bounds of docs/methods.md, and above a thousandth of one rounding."""
    inputs = comparison.random_inputs(ALL_LOSSES[name], 64, 48, cosine=0.5)
    others = {n: z for n, z in inputs.items() if n not in ALL_LOSSES[name].arguments}
    for precision, dtype in comparison.PRECISIONS.items():
        features = [(1.7 * inputs[n] if normalize else inputs[n]).astype(dtype)
                    for n in ALL_LOSSES[name].arguments]  # fmt: skip
        given = {n: z.astype(dtype) if z.dtype.kind == "f" else z for n, z in others.items()}
        found = infonce.compare(name, *features, temperature=0.1, normalize=normalize, **given)
        loss_bound, bound = BOUNDS[precision]
        error = next(e for e in found.errors if e.precision == precision)
        assert error.loss_error < loss_bound
        assert ROUNDOFF[precision] / 1000 < error.worst("norm") < bound
        wide = [e for e in found.errors if e.precision == precision][-1]
        assert wide.grad_dtype == "float32"
        assert wide.worst("norm") <= error.worst("norm")
        assert error.gradients["scale"].norm < bound


def test_underflow_of_float16() -> None:
    """Aligned pairs at a low temperature: gradients are below the range of float16, and a larger
    upstream gradient brings them back."""
    inputs = {"rows": 64, "dim": 32, "cosine": 0.95, "temperature": 0.02}

    def errors(**options: Any) -> dict[Any, Any]:
        found = infonce.compare("clip", **inputs, **options)
        return {(e.precision, e.grad_dtype): e for e in found.errors}

    plain, scaled = errors(), errors(grad_out=2.0**24)
    assert plain["fp16", "float16"].worst("lost") > 0.9
    assert plain["fp16", "float16"].worst("norm") > 0.3
    assert plain["fp16", "float32"].worst("lost") == 0
    assert plain["bf16", "bfloat16"].worst("lost") == 0
    assert scaled["fp16", "float16"].worst("norm") < 2 * plain["fp16", "float32"].worst("norm")
    assert scaled["fp16", "float16"].worst("lost") < 0.1
    only = errors(grad_dtype="float16")
    assert {dtype for _, dtype in only} == {"float16"}
    assert only["fp32", "float16"].worst("lost") > 0.9


def test_float16_features_that_overflow() -> None:
    image, text = np.random.default_rng(0).standard_normal((2, 8, 4), np.float32)
    image *= np.float32(1e6)
    found = infonce.compare("clip", image, text, temperature=1e6)
    by_precision = {e.precision: e for e in found.errors}
    assert np.isnan(by_precision["fp16"].loss)
    assert np.isnan(by_precision["fp16"].worst("norm"))
    assert by_precision["bf16"].worst("norm") < 0.1


def test_a_gradient_block_neither_overflows_nor_underflows() -> None:
    """float16 blocks are divided: gradients of 1e-30 or 1e30 have the digits of others."""
    errors = [
        infonce.compare("clip", rows=32, dim=16, temperature=0.1, grad_out=size).errors[4]
        for size in (1.0, 2.0**100, 2.0**-100)
    ]
    assert [(e.precision, e.grad_dtype) for e in errors] == [("fp16", "float32")] * 3
    assert errors[0].worst("norm") == errors[1].worst("norm") == errors[2].worst("norm")
    found = infonce.compare("clip", rows=32, dim=64, temperature=0.015, cosine=0.9)
    assert found.losses[0.015] < 1e-15
    assert all(e.worst("norm") < 0.1 for e in found.errors if e.grad_dtype == "float32")


def test_gradient_divisor() -> None:
    """As the kernel `ranges` in kernels/cuda/vectors/factors.cuh has it."""
    vectors = np.array([1.0, 4.0]), np.array([3.0, -2.0]), np.array([5.0, 6.0]), np.array([0.5, -7])
    row, positive, column, by_column = vectors
    epilogue = SoftmaxGradient(row, row, column, column, positive)
    assert gradient_divisor(epilogue, False, 8.0) == 2 * 3 / 8
    assert gradient_divisor(epilogue, True, 1.0) == 2 * 6
    epilogue.column_positive_gradient = by_column
    assert gradient_divisor(epilogue, True, 1.0) == 2 * 7
    epilogue = SoftmaxGradient(row, 2.0**70 * row, None, None, positive)
    assert gradient_divisor(epilogue, False, 1.0) == 4 * 2.0**10
    epilogue = SoftmaxGradient(row, 0 * row, None, None, 0 * positive)
    assert gradient_divisor(epilogue, False, 1.0) == 1


@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip"])
def test_blocks_change_only_the_order_of_sums(name: str) -> None:
    inputs: dict[str, Any] = {"rows": 96, "dim": 16, "temperature": 0.2}
    whole = infonce.compare(name, **inputs)
    blocks = infonce.compare(name, **inputs, workspace=60_000)
    for one, other in zip(whole.errors, blocks.errors, strict=True):
        assert one.worst("norm") == pytest.approx(other.worst("norm"), rel=0.05, abs=1e-6)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)


def test_memory_is_linear_in_the_rows() -> None:
    """Beside the workspace: features and gradients, some in float64, and no matrix of logits."""
    n, d, workspace = 1600, 8, 2**21
    tracemalloc.start()
    infonce.compare("clip", rows=n, dim=d, temperature=0.1, workspace=workspace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = 2 * n * d * 8
    assert peak < 1.5 * workspace + 12 * arrays
    assert 1.5 * workspace + 12 * arrays < 4 * n * n


def test_options_and_teachers_are_those_of_the_losses() -> None:
    query, key, *teacher = np.random.default_rng(0).standard_normal((4, 12, 6), np.float32)
    options: dict[str, Any] = {"normalize": True, "margin": 0.1, "ids": np.arange(12) % 9}
    found = infonce.compare("info_nce", query, key, temperature=[0.1, 1], **options)
    wide = query.astype(np.float64), key.astype(np.float64)
    for temperature in (0.1, 1.0):
        want = float(infonce.info_nce_loss(*wide, temperature=temperature, **options))
        assert found.losses[temperature] == pytest.approx(want, rel=1e-12)
    own = np.random.default_rng(1).standard_normal((12, 3, 6), np.float32)
    found = infonce.compare("info_nce", query, key, temperature=0.5, own=own)
    assert set(found.errors[0].gradients) == {"query", "key", "own", "scale"}
    assert 1e-5 < found.errors[-1].gradients["own"].norm < 0.05
    found = infonce.compare("clip", query, key, temperature=1.0, dims=[2, 6])
    want = sum(float(infonce.clip_loss(*(z[:, :d] for z in wide), scale=1)) for d in (2, 6))
    assert found.losses[1.0] == pytest.approx(want, rel=1e-12)
    taught = {"teacher_query": teacher[0], "teacher_key": teacher[1], "two_sided": False}
    found = infonce.compare("distill", query, key, temperature=1.0, teacher_scale=2.0, **taught)
    taught = {n: z if isinstance(z, bool) else z.astype(np.float64) for n, z in taught.items()}
    want = float(infonce.distill_loss(*wide, temperature=1.0, teacher_scale=2.0, **taught))
    assert found.losses[1.0] == pytest.approx(want, rel=1e-12)
    found = infonce.compare("lit", query, key, temperature=1.0)
    assert set(found.errors[0].gradients) == {"text", "scale"}
    assert [*infonce.compare("siglip", query, key).losses] == [0.1]


def test_random_pairs_have_unit_norm_and_their_cosine() -> None:
    first, second = comparison.random_pairs(50, 9, -0.4, seed=3)
    for z in (first, second):
        np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose((first * second).sum(1), -0.4, rtol=1e-13)
    assert not np.array_equal(first, comparison.random_pairs(50, 9, -0.4, seed=4)[0])


def test_progress_ends_at_its_total() -> None:
    calls: list[tuple[str, int, int]] = []
    infonce.compare("clip", rows=4, dim=4, temperature=(0.1, 1.0),
                    progress=lambda *call: calls.append(call))  # fmt: skip
    assert [done for _, done, _ in calls] == list(range(13))
    assert {(phase, total) for phase, _, total in calls} == {("comparing", 12)}


@pytest.mark.parametrize(("message", "options"), [
    ('loss: expected one of .*got "?.?clop', {"loss": "clop"}),
    ("rows, dim: expected both, or arrays of features", {"dim": None}),
    ("rows: expected an integer of at least 2, got int 1", {"rows": 1}),
    ("rows: expected an even number", {"rows": 5, "loss": "nt_xent"}),
    ("dim: expected an integer of at least 2, got float 2.5", {"dim": 2.5}),
    (r"cosine: expected a number in \[-1, 1\], got 1.5", {"cosine": 1.5}),
    ("seed: expected an integer of at least 0, got int -1", {"seed": -1}),
    ("temperature: expected different numbers", {"temperature": (1.0, 1.0)}),
    ("temperature: expected different numbers", {"temperature": ()}),
    ("temperature: expected a positive number, got 0.0", {"temperature": (1.0, 0.0)}),
    ("temperature, scale: expected one of them, got neither", {"temperature": None}),
    ("scale: compare does not take it", {"scale": 1.0}),
    ("wrt: compare does not take it", {"wrt": ()}),
    ("margn", {"margn": 1.0}),
])  # fmt: skip
def test_what_is_refused(message: str, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"loss": "clip", "rows": 4, "dim": 4, "temperature": 1.0}
    with pytest.raises((TypeError, ValueError), match=message):
        infonce.compare(**(arguments | options))


def test_features_that_do_not_fit_the_loss() -> None:
    z = np.ones((4, 3), np.float32)
    with pytest.raises(TypeError, match=r"clip: expected 2 arrays of features \(image, text\)"):
        infonce.compare("clip", z, temperature=1.0)
    with pytest.raises(ValueError, match="rows, dim: expected both, or arrays"):
        infonce.compare("clip", z, z, rows=4, temperature=1.0)
    with pytest.raises(ValueError, match="text: expected width 3"):
        infonce.compare("clip", z, z[:, :2], temperature=1.0)


def test_formats() -> None:
    x = np.float32([1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11, np.inf])
    assert round_to_format(x, "tf32").tolist() == [1 + 2.0**-10, 1, -1 - 2.0**-10, np.inf]
    assert round_to_format(x, "fp16").tolist() == [1, 1, -1, np.inf]
