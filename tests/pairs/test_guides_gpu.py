"""Guides on a GPU, which operations on arrays take block by block; also on CuPy's stand-in."""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING
from reference_problems import one_problem, taken

import infonce
from infonce import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.emulated, pytest.mark.skipif(bool(MISSING), reason=MISSING),
]  # fmt: skip
if not MISSING:
    import cupy

NAMES = ("info_nce", "nt_xent", "clip", "lit", "gte")


def placed(value: Any) -> Any:
    """Arrays, or a tuple of them, on the GPU."""
    return tuple(map(cupy.asarray, value)) if isinstance(value, tuple) else cupy.asarray(value)


@pytest.mark.parametrize("method", ["auto", "fused", "naive"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_guides(name: str, normalize: bool, method: str) -> None:
    """In several blocks, with other options, float64 and float32."""
    problem = one_problem(name, rows=40)._replace(normalize=normalize)
    guide = tuple(np.random.default_rng(3).normal(size=(len(problem.features), 40, 5)))
    softmax = {"guide": guide if len(guide) > 1 else guide[0], "guide_margin": 0.2}
    softmax |= taken(name, {"hardness": 0.5, "false_negative_margin": 0.4, "margin": 0.1})
    problem = problem._replace(softmax=softmax)
    want = problem.reference()
    options = {k: v for k, v in problem.options().items() if k not in ("weights", "guide")}
    function = getattr(infonce, f"{name}_loss_and_grad")
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        features = [placed(z.astype(dtype)) for z in problem.features]
        given = options | {"guide": placed(softmax["guide"]), "method": method}
        given["workspace"] = 2**16 if method == "auto" else None
        got = function(*features, **given)
        np.testing.assert_allclose(got.loss.get(), want.loss, rtol=tolerance)
        for argument, gradient in want.grads.items():
            if gradient is not None:
                have = getattr(got.grads, argument).get()
                np.testing.assert_allclose(have, gradient, rtol=tolerance, atol=tolerance)


def test_a_guide_elsewhere_is_refused() -> None:
    z = np.eye(4)
    with pytest.raises(ValueError, match=r"guide\[0\]: expected an array on GPU 0 like image"):
        infonce.clip_loss(placed(z), placed(z), scale=1.0, guide=(z, z))


def test_a_guide_below_all_margins_has_the_bits_of_none() -> None:
    z = np.random.default_rng(0).standard_normal((4, 30, 8)).astype(np.float32)
    pair, guide = [placed(a) for a in z[:2]], placed(tuple(z[2:]))
    got = infonce.clip_loss_and_grad(*pair, scale=3.0, guide=guide, guide_margin=np.inf)
    want = infonce.clip_loss_and_grad(*pair, scale=3.0)
    assert got.loss.get() == want.loss.get()
    np.testing.assert_array_equal(got.grads.image.get(), want.grads.image.get())
    expected = reference.clip(*z[:2], scale=3.0).loss
    np.testing.assert_allclose(want.loss.get(), expected, rtol=1e-5)
