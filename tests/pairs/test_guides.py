"""Guides: which negatives they leave out, by every method of the CPU and by array operations."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu.resources import BUFFER_POOL
from reference_problems import Problem, one_problem

import infonce

NAMES = ("info_nce", "nt_xent", "clip", "lit", "gte")


def guided(name: str, rows: int = 6, seed: int = 0, **options: Any) -> Problem:
    """A problem with a guide of another width."""
    problem = one_problem(name, seed, rows)
    guide = tuple(np.random.default_rng(seed + 9).normal(size=(len(problem.features), rows, 5)))
    guide = guide if len(guide) > 1 else guide[0]
    return problem._replace(softmax={"guide": guide, **options})


def given_options(problem: Problem) -> dict[str, Any]:
    return {key: v for key, v in problem.options().items() if key != "weights"}


def called(problem: Problem, **options: Any) -> infonce.LossAndGrad:
    function = getattr(infonce, f"{problem.name}_loss_and_grad")
    result: infonce.LossAndGrad = function(*problem.features, **given_options(problem), **options)
    return result


def near(got: infonce.LossAndGrad, want: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(got.loss, want.loss, rtol=tolerance, atol=tolerance)
    for field, gradient in want.grads.items():
        if gradient is not None:
            have = getattr(got.grads, field)
            np.testing.assert_allclose(have, gradient, rtol=tolerance, atol=tolerance)


def bits(result: infonce.LossAndGrad) -> list[bytes]:
    return [np.asarray(z).tobytes() for z in (result.loss, *result.grads) if z is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_guide_below_all_margins_has_the_bits_of_none(name: str, method: dict[str, Any]) -> None:
    problem = guided(name, guide_margin=np.inf)
    assert bits(called(problem, **method)) == bits(called(problem._replace(softmax={}), **method))


@pytest.mark.parametrize("name", ["nt_xent", "clip"])
def test_a_guide_that_is_not_finite_is_named(name: str, method: dict[str, Any]) -> None:
    problem = guided(name)
    guide = problem.softmax["guide"]
    (guide if isinstance(guide, np.ndarray) else guide[0])[2, 1] = np.nan
    side = "guide: " if name == "nt_xent" else r"guide\[0\]: "
    with pytest.raises(ValueError, match=side + "expected finite values, got .* in row 2"):
        called(problem, check_finite=True, **method)


def test_a_product_of_the_guide_that_overflows_makes_losses_nan(method: dict[str, Any]) -> None:
    problem = guided("clip", 20, guide_margin=1e3)
    problem.softmax["guide"] = tuple(z.copy() for z in problem.softmax["guide"])
    for z, row in zip(problem.softmax["guide"], (2, 9), strict=True):
        z[:, 0] = 0.0
        z[row, 0] = 1e200
    options = given_options(problem) | method
    losses = infonce.clip_loss(*problem.features, reduction="none", **options)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [2, 9]


def test_a_product_that_overflows_is_seen_if_all_other_pairs_are_excluded(
    method: dict[str, Any],
) -> None:
    z = np.random.default_rng(0).standard_normal((2, 12, 8))
    guide = np.zeros((2, 12, 4))
    guide[0, 2, 0] = guide[1, 9, 0] = 1e200
    groups = np.where(np.arange(12) == 2, 9, np.arange(12)), np.arange(12)
    losses = infonce.clip_loss(
        *z, scale=1.0, reduction="none", groups=groups, guide=tuple(guide), **method
    )
    assert np.flatnonzero(np.isnan(losses)).tolist() == [2, 9]


def test_peak_memory_is_within_the_workspace() -> None:
    m, d, e, workspace = 3000, 32, 48, 8 * 2**20
    rng = np.random.default_rng(0)
    z = rng.standard_normal((2, m, d), np.float32)
    guide = tuple(rng.standard_normal((2, m, e), np.float32))
    out = {name: np.empty((m, d), np.float32) for name in ("image", "text")}
    options: dict[str, Any] = {"scale": 0.1, "normalize": True, "guide": guide}
    infonce.clip_loss_and_grad(*z, workspace=workspace, **options)
    BUFFER_POOL.clear()
    tracemalloc.start()
    infonce.clip_loss_and_grad(*z, workspace=workspace, out=out, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert workspace / 2 < peak < workspace + 60 * 8 * m


def test_too_small_a_workspace_says_what_is_enough() -> None:
    problem = guided("clip", 64)
    options: dict[str, Any] = {"grad_dtype": np.float32, "method": "tiled"}
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        called(problem, workspace=1000, **options)
    least = int(str(error.value).split()[4])
    near(called(problem, workspace=least, **options), problem.reference(), 1e-6)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        called(problem, workspace=least - 1, **options)


Z = np.random.default_rng(0).standard_normal((4, 3))


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("clip", {"guide": Z}, TypeError, r"guide: expected a pair \(of image, of text\), got nd"),
        ("clip", {"guide": (Z,)}, TypeError, "guide: expected a pair"),
        ("nt_xent", {"guide": (Z, Z)}, TypeError, "guide: expected an array, got tuple"),
        ("clip", {"guide": (Z, [1.0])}, TypeError, r"guide\[1\]: expected an array, got list"),
        ("clip", {"guide": (Z, Z[:3])}, ValueError, r"guide\[1\]: expected shape \(4, 3\), got"),
        ("clip", {"guide": (Z, Z[:, :2])}, ValueError, r"guide\[1\]: expected shape \(4, 3\), got"),
        ("clip", {"guide": (Z[0], Z)}, ValueError, r"guide\[0\]: expected 2 dimensions"),
        ("clip", {"guide": (Z[:, :0],) * 2}, ValueError, r"guide\[0\]: expected at least one"),
        ("clip", {"guide": (Z.astype(int), Z)}, TypeError, r"guide\[0\]: expected dtype float64"),
        ("clip", {"guide_margin": 0.1}, ValueError, "guide_margin: expected 0.0 without guide"),
        ("clip", {"guide": (Z, Z), "guide_margin": np.nan}, ValueError, "guide_margin: expected"),
        ("clip", {"guide": (Z, Z), "guide_margin": "1"}, TypeError, "guide_margin: expected a num"),
        ("clip", {"guide": (Z, Z), "metrics": True}, ValueError, "metrics: expected False with g"),
        ("clip", {"guide": (Z, Z), "label_smoothing": 0.1}, ValueError, "label_smoothing: exp"),
        ("siglip", {"guide": (Z, Z)}, ValueError, "guide: expected None for siglip, which"),
        ("siglip", {"guide_margin": 1.0}, ValueError, "guide_margin: expected 0.0 for siglip"),
    ],
)  # fmt: skip
def test_bad_guides(name: str, options: dict[str, Any], error: Any, words: str) -> None:
    features = (Z,) if name == "nt_xent" else (Z, Z)
    for end in ("", "_and_grad"):
        if not end and "metrics" in options:
            continue
        function = getattr(infonce, f"{name}_loss{end}")
        with pytest.raises(error, match=words):
            function(*features, scale=1.0, **options)


def test_sup_con_has_no_guide() -> None:
    with pytest.raises(ValueError, match="guide: expected None for sup_con, which has none"):
        infonce.sup_con_loss(Z, np.arange(4) % 2, scale=1.0, guide=Z)
