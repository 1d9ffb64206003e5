"""The gradient of the scale: which passes compute it. (tests/matrix has its numbers.)"""

from typing import Any

import numpy as np
import pytest
from gpu_problems import ELEMENT_ROUNDOFF, MISSING, PRODUCT_ROUNDOFF
from infonce.kernels import problem as problems
from infonce.kernels.epilogues import Sums
from infonce.kernels.solve import Solution, Vectors
from judge import (
    BFLOAT16,
    LOSSES,
    arguments,
    assert_grad,
    cancelling,
    judged,
    largest_logit,
    pairs,
    scale_size,
)
from reference_problems import one_problem

import infonce
from infonce import dispatch, spec

GPU = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
if not MISSING:
    import cupy
CASES = [  # dtype of the features, precision of the products
    (np.float64, "fp64"), (np.float32, "fp32"), (BFLOAT16, "bf16"), (np.float16, "fp16"),
    (np.float32, "bf16x3"), (np.float32, "tf32"),
]  # fmt: skip
MARGIN = [name for name, loss in spec.LOSSES.items() if "margin" not in loss.refused]


@pytest.mark.parametrize("place", ["host", pytest.param("gpu", marks=GPU)])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_scale_alone_takes_one_pass(loss: str, place: str, tile_sides: Any) -> None:
    """Of moments, which are right."""
    tile_sides(64, 96)
    args = arguments(loss, *pairs("random", 200, 200, 64, np.float64, 200))
    phases: set[str] = set()
    ref = judged(loss, args, scale=9.0)
    logit, cancels = largest_logit(9.0, args[0], args[-1]), cancelling(ref, args, 9.0)
    size = max(scale_size(ref, args), abs(ref.grads["scale"]))
    for wrt in [("scale",)] + [("scale", "bias"), ("bias",)] * (loss == "siglip"):
        out = getattr(infonce, f"{loss}_loss_and_grad")(
            *(map(cupy.asarray, args) if place == "gpu" else args), scale=9.0, method="tiled",
            wrt=wrt, progress=lambda phase, *_: phases.add(phase),
        )  # fmt: skip
        if "scale" in wrt:
            terms = cancels * len(args[0]) ** 0.5 / 9.0
            got = float(out.grads.scale)
            assert_grad(got, ref.grads["scale"], "float64", logit, size, terms)
    assert phases - {"compiling kernels"} == {"sigmoid loss" if loss == "siglip" else "log-sum-exp"}


@pytest.mark.parametrize("scalar", ["scale", "bias"])
def test_what_a_backend_leaves_out_is_no_nan(scalar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy makes NaN of None."""
    solution = Solution(np.zeros(2), scale_grad=np.zeros(()), bias_grad=np.zeros(()))
    setattr(solution, f"{scalar}_grad", None)
    monkeypatch.setattr(dispatch, "_solve", lambda _: solution)
    z = np.eye(2)
    other = "bias" if scalar == "scale" else "scale"
    assert getattr(infonce.siglip_loss_and_grad(z, z, wrt=other).grads, other) == 0
    with pytest.raises(AssertionError):
        infonce.siglip_loss_and_grad(z, z, wrt=scalar)


def test_where_moments_pay() -> None:
    """Without feature gradients, and for few logits on a GPU."""
    few = problems.FEW_LOGITS
    for logits, features_too, on_cpu, pay in (
        (few, True, False, True), (few + 1, True, False, False), (few + 1, False, False, True),
        (few, True, True, False), (few + 1, False, True, True),
    ):  # fmt: skip
        assert problems.uses_moments(logits, features_too, on_cpu) == pay


@pytest.mark.parametrize("name", MARGIN)
def test_a_margin_beside_feature_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin alone takes no moments, also with one gradient."""
    moments: list[bool] = []
    identity = Vectors.identity

    def recorded(self: Vectors, n: int, wanted: bool) -> Sums:
        moments.append(wanted)
        return identity(self, n, wanted)

    monkeypatch.setattr(Vectors, "identity", recorded)
    problem, loss = one_problem(name, rows=10), spec.LOSSES[name]
    sides = [side for side in loss.arguments if side not in loss.locked]
    sides = sides[:1] if loss.joint else sides  # which has both gradients in one array
    labels = {} if problem.labels is None else {"labels": problem.labels}
    options: dict[str, Any] = {"scale": 2.0, "margin": 0.1, **labels}
    for wrt in (None, *((side, "scale") for side in sides)):
        for method in ("tiled", "fused"):
            call = getattr(infonce, f"{name}_loss_and_grad")
            call(*problem.features, wrt=wrt, method=method, **options)
    assert moments
    assert not any(moments)


def terms(loss: str, args: tuple[np.ndarray, ...], scale: float, bias: float = -10.0) -> float:
    """sum_ij |dL/dx_ij| |q_i| |k_j|: at least the size of what is added up."""
    query, key = (np.asarray(z, np.float64) for z in (args[0], args[-1]))
    length = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(key, axis=1)
    m, index = len(query), np.arange(len(query))
    x = scale * query @ key.T
    positive = (index + m // 2) % m if loss == "nt_xent" else index
    if loss == "siglip":
        z = x + bias
        z[index, positive] *= -1
        share = np.exp(z - np.logaddexp(0, z)) / m
    else:
        if loss == "nt_xent":
            np.fill_diagonal(x, -np.inf)
        share = np.abs(_softmax(x, 1) - np.eye(len(key))[positive]) / m
        if loss == "clip":
            share = (share + np.abs(_softmax(x, 0) - np.eye(m)) / m) / 2
    return float(np.sum(share * length))


def bound(loss: str, args: tuple[np.ndarray, ...], scale: float, precision: str) -> float:
    """The largest effect of rounded logits on the scale's gradient. A logit is off by u of its
    largest terms. The logarithm of a probability is off twice by that: in the exponential and in
    the sum. A few roundings of float32 come on top. All of this is relative to the terms."""
    lengths = [np.linalg.norm(np.asarray(z, np.float64), axis=1).max() for z in args]
    roundoff = 2.0**-53 if precision == "fp64" else 2.0**-24
    relative = (
        4 * PRODUCT_ROUNDOFF[precision] * (1 + scale * lengths[0] * lengths[-1]) + 16 * roundoff
    )
    tiny = 0.0 if precision == "fp64" else 2.0**-126  # below: no normal numbers
    return float(relative * terms(loss, args, scale)) + tiny


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    p = np.exp(x - x.max(axis=axis, keepdims=True))
    return p / p.sum(axis=axis, keepdims=True)


def evaluate(loss: str, args: Any, precision: str, **options: Any) -> float:
    """d scale on the GPU."""
    function = getattr(infonce, f"{loss}_loss_and_grad")
    arrays = map(cupy.asarray, args)
    return float(function(*arrays, precision=precision, method="tiled", **options).grads.scale)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(("dtype", "precision"), CASES[1:4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("n", "d"), [(126, 16), (128, 64), (130, 128), (258, 512), (514, 1040)])
def test_both_sides_of_tile_boundaries(
    n: int, d: int, loss: str, dtype: Any, precision: str
) -> None:
    """Blocks of the whole and of parts; the scale alone, and with features."""
    args = arguments(loss, *pairs("random", n, n, d, dtype, n))
    want = judged(loss, args, scale=14.0).grads["scale"]
    limit = bound(loss, args, 14.0, precision)
    one_side = {"info_nce": "query", "nt_xent": "features", "clip": "text", "lit": "text"}
    for options in (
        {}, {"wrt": ("scale",)}, {"wrt": (one_side.get(loss, "image"), "scale")},
        {"metrics": loss != "siglip"}, {"workspace": 2**21},
    ):  # fmt: skip
        got = evaluate(loss, args, precision, scale=14.0, **options)
        assert abs(got - want) <= limit, (options, got, want, abs(got - want) / limit)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("scale", [200.0, 1e5, 2.0**24])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_rows_far_apart(dtype: Any, scale: float) -> None:
    """Logits of a tile that no one reference exponent serves."""
    rng = np.random.default_rng(5)
    z = rng.standard_normal((2, 150, 64))
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    z[:, ::3] *= 2.0**-6
    for loss in ("clip", "nt_xent", "info_nce"):
        args = arguments(loss, *z.astype(dtype))
        precision = "fp32" if dtype is np.float32 else "bf16"
        want = judged(loss, args, scale=scale).grads["scale"]
        got = evaluate(loss, args, precision, scale=scale)
        limit = bound(loss, args, scale, precision)
        assert abs(got - want) <= limit, (loss, got, want, limit)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.usefixtures("no_few_logits")
@pytest.mark.parametrize(("dtype", "precision"), CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_from_feature_gradients(loss: str, dtype: Any, precision: str) -> None:
    """Off by what dL/dx is rounded by; the scale alone is not."""
    for kind in ("random", "aligned"):
        args = arguments(loss, *pairs(kind, 300, 300, 64, dtype, 300))
        want = judged(loss, args, scale=14.0).grads["scale"]
        limit = bound(loss, args, 14.0, precision)
        rounding = ELEMENT_ROUNDOFF[precision] * terms(loss, args, 14.0)
        for wrt, most in ((None, 4 * limit + rounding), (("scale",), limit)):
            got = evaluate(loss, args, precision, scale=14.0, wrt=wrt)
            assert abs(got - want) <= most, (kind, wrt, got, want)
