"""Distillation on a GPU, by operations on arrays; also on CuPy's stand-in."""

import numpy as np
import pytest
from gpu_problems import MISSING

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy


@pytest.mark.parametrize("method", ["auto", "fused", "naive", "tiled"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("m", "n"), [(40, 40), (40, 23)])
def test_distillation(m: int, n: int, normalize: bool, method: str) -> None:
    rng = np.random.default_rng(0)
    args = [rng.normal(size=size) for size in ((m, 5), (n, 5), (m, 3), (n, 3))]
    options = {"scale": 2.0, "teacher_scale": 3.0, "normalize": normalize, "two_sided": m == n}
    want = reference.distill(*args, **options)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        given = [cupy.asarray(z.astype(dtype)) for z in args]
        workspace = 2**16 if method == "auto" else None
        got = infonce.distill_loss_and_grad(*given, method=method, workspace=workspace, **options)
        np.testing.assert_allclose(got.loss.get(), want.loss, rtol=tolerance)
        for name, gradient in want.grads.items():
            have = getattr(got.grads, name).get()
            np.testing.assert_allclose(have, gradient, rtol=tolerance, atol=tolerance)


def test_a_teacher_equal_to_the_student_gives_no_gradient() -> None:
    z = np.random.default_rng(0).normal(size=(2, 30, 8)).astype(np.float32)
    query, key = map(cupy.asarray, z)
    got = infonce.distill_loss_and_grad(query, key, query, key, scale=20.0)
    assert not got.grads.query.get().any()
    assert not got.grads.key.get().any()


def test_a_teacher_elsewhere_is_refused() -> None:
    z = np.eye(4)
    there = cupy.asarray(z)
    with pytest.raises(ValueError, match="teacher_query: expected an array on GPU 0 like query"):
        infonce.distill_loss(there, there, z, z, scale=1.0)
