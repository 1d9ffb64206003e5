"""The gradient of the scale: which passes compute it. (tests/matrix has its numbers.)"""

from typing import Any

import numpy as np
import pytest
from gpu_problems import MISSING
from infonce.kernels import problem as problems
from infonce.kernels.epilogues import Sums
from infonce.kernels.solve import Solution, Vectors
from judge import (
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
