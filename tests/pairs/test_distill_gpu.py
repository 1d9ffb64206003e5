"""Distillation on a GPU, by kernels; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import GRAD_BOUND, LOSS_BOUND, MISSING, PRODUCT_ROUNDOFF, fewer, find_dtype
from infonce.kernels.gpu.schedule import Call, tiled_schedule

import infonce
from infonce import reference
from infonce.checks import call

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy
    from infonce.kernels.gpu import select
    from infonce.kernels.gpu.device.launcher import device_properties


def features(m: int, n: int, d: int = 24, e: int = 40, seed: int = 0) -> list[np.ndarray]:
    """Features of a student and a teacher, in rows of about unit length."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rows, w)) / w**0.5 for w in (d, e) for rows in (m, n)]


def placed(args: list[np.ndarray], dtype: str = "float64") -> list[Any]:
    return [cupy.asarray(z.astype(find_dtype(dtype))) for z in args]


def check(got: Any, want: reference.Reference, args: list[np.ndarray], precision: str) -> None:
    """Loss, log-sum-exps and gradients in float32. Where probabilities of student and teacher
    cancel, the error of a gradient is relative to these."""
    sides = [lse if isinstance(lse, tuple) else (lse,) for lse in (got.lse, want.lse)]
    bound, logit = LOSS_BOUND[precision], max(np.abs(lse).max() for lse in sides[1])
    rounding = 8 * PRODUCT_ROUNDOFF[precision] * (1 + logit)  # of logits
    np.testing.assert_allclose(float(got.loss), want.loss, rtol=bound, atol=rounding)
    assert got.loss >= 0
    for have, expected in zip(*sides, strict=True):
        np.testing.assert_allclose(have.get(), expected, rtol=bound, atol=bound)
    terms = 8 * 10.0 * max(float(np.linalg.norm(z, axis=1).max()) for z in args[:2])
    for name, gradient in want.grads.items():
        if (have := getattr(got.grads, name)) is not None:
            error = np.linalg.norm(have.get().astype(np.float64) - gradient)
            limit = (GRAD_BOUND[precision] + 2.0**-23) * np.linalg.norm(gradient)
            limit += rounding * terms / len(want.losses) ** 0.5
            assert error <= limit, (name, error, limit)


# (devices of the stand-in, dtype, precision); device 2 has the portable kernels
KINDS = [(0, "bfloat16", "bf16"), (0, "float32", "fp32"), (2, "bfloat16", "bf16"),
         (2, "float32", "tf32"), (2, "float64", "fp64")]  # fmt: skip


@pytest.mark.parametrize(("two_sided", "normalize"), [(True, False), (False, True)])
@pytest.mark.parametrize(("device", "dtype", "precision"), KINDS)
def test_precisions(
    device: int, dtype: str, precision: str, two_sided: bool, normalize: bool
) -> None:
    """Sizes lie on both sides of tiles, and the teacher has wider rows."""
    m, n = (150, 150) if two_sided else (130, 257)
    args = [z.astype(find_dtype(dtype)).astype(np.float64) for z in features(m, n, 72, 136)]
    options: dict[str, Any] = {"scale": 6.0, "teacher_scale": 8.0, "two_sided": two_sided}
    options["normalize"] = normalize
    want = reference.distill(*args, **options)
    with cupy.cuda.Device(device % cupy.cuda.runtime.getDeviceCount()):
        got = infonce.distill_loss_and_grad(
            *placed(args, dtype), precision=precision, grad_dtype=np.float32, **options
        )
        check(got, want, args, precision)


# Factors log2(e) scale that float32 rounds by -0.97 and by +0.99 of half a unit of its last place
ROUNDED_SCALES = 178.34133533383346, 179.06426606651664


@pytest.mark.parametrize("scale", fewer([5.0, *ROUNDED_SCALES, 20.0, 50.0, 77.7, 100.0, 200.0], 4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", [0, 2])
@pytest.mark.parametrize("model", ["student", "teacher"])
def test_probabilities_add_up_to_1_at_high_scales(
    model: str, device: int, dtype: str, scale: float
) -> None:
    """The passes of log-sum-exps and of losses have the same products and the same rounded scale.

    A loss is a mean of logs of probabilities, weighted by probabilities. If these add up to 1 + d,
    the loss changes by d of itself. With log-sum-exps of another scale, or of another kernel's
    products, d is 2^-24 times the largest logit and more: 1e-5.
    """
    rng = np.random.default_rng(1)
    args = []
    for width in (64, 64, 40, 40):
        z = rng.normal(size=(150, width))
        args.append((z / np.linalg.norm(z, axis=1, keepdims=True)).astype(find_dtype(dtype)))
    options = {"scale": scale if model == "student" else 10.0}
    options["teacher_scale"] = scale if model == "teacher" else 10.0
    want = reference.distill(*(z.astype(np.float64) for z in args), **options)
    with cupy.cuda.Device(device % cupy.cuda.runtime.getDeviceCount()):
        got = infonce.distill_loss_and_grad(*placed(args, dtype), grad_dtype=np.float32, **options)
        # the bound of fp32; products of 16-bit numbers are exact, so their bound is the same
        assert abs(float(got.loss) / want.loss - 1) <= LOSS_BOUND["fp32"]
        largest = np.abs(want.grads["query"]).max()
        error = np.abs(got.grads.query.get() - want.grads["query"]).max()
        assert error <= (GRAD_BOUND["fp32"] if dtype == "float32" else GRAD_BOUND["bf16"]) * largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_equal_to_the_student_gives_no_gradient(dtype: str) -> None:
    query, key = placed(features(140, 140)[:2], dtype)
    for two_sided in (True, False):
        got = infonce.distill_loss_and_grad(query, key, query, key, scale=20.0, two_sided=two_sided)
        for gradient in got.grads:
            assert not gradient.get().any()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_makes_losses_nan(at: int, bad: float) -> None:
    args = features(6, 6, 4, 3)
    args[at][2, 1] = bad
    options: dict[str, Any] = {"scale": 2.0}
    assert np.isnan(infonce.distill_loss(*placed(args), **options).get())
    got = infonce.distill_loss_and_grad(*placed(args), reduction="none", two_sided=False, **options)
    spoiled = (np.arange(6) == 2) | (at % 2 == 1)
    np.testing.assert_array_equal(np.isnan(got.loss.get()), spoiled)
    assert np.isnan(got.grads.query.get()[spoiled]).all()


@pytest.mark.parametrize(
    ("width", "dtype", "kernel", "workspace"),
    [
        (40, "bfloat16", "sweep_distill", 160_000),
        (40, "float32", "distill", 2**19),
        (1600, "bfloat16", "distill", 2**19),
    ],
)
def test_kernels_and_workspaces(
    width: int, dtype: str, kernel: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks on a GPU of any size, with gradient blocks and sums of tiles within the
    workspace. On Hopper, a sweep takes 16-bit rows that its shared memory holds. The gradient of
    the scale comes from those of the features, as in large batches."""
    monkeypatch.setattr(call, "uses_moments", lambda *_: False)
    args = [z.astype(find_dtype(dtype)).astype(np.float64) for z in features(301, 301, 24, width)]
    calls = []
    solve = select.solve_distillation_by_kernels
    monkeypatch.setattr(
        select, "solve_distillation_by_kernels", lambda *args: calls.append(args) or solve(*args)
    )
    got = infonce.distill_loss_and_grad(
        *placed(args, dtype), scale=60.0, teacher_scale=3.0, workspace=workspace,
        grad_dtype=np.float32,
    )  # fmt: skip
    want = reference.distill(*args, scale=60.0, teacher_scale=3.0)
    check(got, want, args, "bf16" if dtype == "bfloat16" else "fp32")
    assert got.grads.scale is not None
    properties = device_properties(cupy.cuda.Device().id)
    schedule = tiled_schedule(Call.from_problem(*calls[0]), properties)
    assert schedule.workspace <= workspace
    scheduled = schedule.passes[0]
    assert len(scheduled.grid) > 1 or width == 1600
    assert scheduled.kernel.name == (kernel if properties.capability == "90" else "distill")


def test_a_teacher_elsewhere_is_refused() -> None:
    z = np.eye(4)
    there = cupy.asarray(z)
    with pytest.raises(ValueError, match="teacher_query: expected an array on GPU 0 like query"):
        infonce.distill_loss(there, there, z, z, scale=1.0)
