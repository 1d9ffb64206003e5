"""Bad input: the right exception, before any work, naming argument, expectation and what came."""

from typing import Any

import numpy as np
import pytest
from bad_calls import CASES, K, Q
from judge import LOSSES, arguments, pairs

import infonce
from infonce import dispatch
from infonce.checks import call as checks


def test_lists_say_how_to_make_an_array() -> None:
    with pytest.raises(TypeError, match=r"image: expected an array, .*np.asarray makes one"):
        infonce.clip_loss(Q.tolist(), K, scale=1.0)


@pytest.mark.parametrize(("loss", "args", "options", "error", "words"), CASES)
def test_message(
    loss: str, args: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    options = {"scale": 2.0, **options}
    function = getattr(infonce, f"{loss}_loss_and_grad")
    with pytest.raises(error) as caught:
        function(*args, **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.extras
def test_fused_counts_no_ranks_on_a_gpu() -> None:
    """On the CPU it does: each tile's logits are there to be counted."""
    pytest.importorskip("cupy")
    from infonce.kernels.gpu import fused as gpu_fused
    from infonce.kernels.problem import Problem

    gpu_fused.require(Problem(Q, K, 1.0, 1.0))
    with pytest.raises(ValueError, match=r'^method: "fused" .* expected .*"tiled".* metrics=True'):
        gpu_fused.require(Problem(Q, K, 1.0, 1.0, retrieval_ranks=True))


def test_wrong_input_leaves_outputs_alone() -> None:
    out = {"image": np.full((6, 4), 5.0)}
    with pytest.raises(ValueError, match="reduction"):
        infonce.clip_loss_and_grad(Q, K, scale=1.0, out=out, reduction="max")  # type: ignore[arg-type]
    assert (out["image"] == 5.0).all()


def test_keywords_of_gradients_are_explained_to_the_loss_alone() -> None:
    with pytest.raises(TypeError, match="clip_loss_and_grad"):
        infonce.clip_loss(Q, K, scale=1.0, wrt=["image"])  # type: ignore[call-arg]


def test_check_finite_names_the_first_bad_row() -> None:
    bad = np.random.default_rng(0).standard_normal((9000, 2))
    bad[8123, 1] = np.inf
    with pytest.raises(ValueError, match=r"key: .* row 8123"):
        infonce.info_nce_loss(bad[:5] * 0, bad, scale=1.0, check_finite=True)


def test_naive_that_does_not_fit_names_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from infonce.kernels.cpu import naive

    monkeypatch.setattr(naive, "available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r'6 x 6 logits.*"tiled"'):
        infonce.clip_loss(Q, K, scale=1.0, method="naive")


@pytest.mark.parametrize("loss", LOSSES)
def test_scale_as_any_scalar(loss: str) -> None:
    args = arguments(loss, *pairs("random", 6, 6, 4, np.float64, 0))
    function = getattr(infonce, f"{loss}_loss")
    want = function(*args, scale=4.0)
    for scalar in (4, np.float32(4), np.array(4.0), np.array(4, np.float16)):
        assert function(*args, scale=scalar) == want
    assert function(*args, temperature=0.25) == want


def test_siglip_has_defaults_of_its_own() -> None:
    assert infonce.siglip_loss(Q, K) == infonce.siglip_loss(Q, K, -10.0, scale=10.0)


def test_signatures_spell_out_the_keywords() -> None:
    import inspect

    for loss in LOSSES:
        short = inspect.signature(getattr(infonce, f"{loss}_loss")).parameters
        long = inspect.signature(getattr(infonce, f"{loss}_loss_and_grad")).parameters
        assert short["method"].default == "auto"
        assert "grad_out" in long
        assert "grad_out" not in short
        doc = getattr(infonce, f"{loss}_loss_and_grad").__doc__
        for word in ("Parameters", "workspace", "grad_out", "Returns", "Raises", "References"):
            assert word in doc


def test_a_call_from_the_cache_still_checks_arrays() -> None:
    """The second call of a kind is not checked again; arrays among its options are."""
    z = np.eye(6, dtype=np.float32)
    scale, bias = np.array(2.0), np.array(-1.0)
    first = infonce.siglip_loss(z, z, bias, scale=scale)
    scale[...], bias[...] = 5.0, -3.0
    assert infonce.siglip_loss(z, z, bias, scale=scale) == infonce.siglip_loss(
        z, z, -3.0, scale=5.0
    )
    assert infonce.siglip_loss(z, z, bias, scale=scale) != first
    outs = [(np.empty_like(z), np.empty_like(z)) for _ in range(2)]
    for out in outs:
        got = infonce.clip_loss_and_grad(z, z.copy(), scale=1.0, out=out)
        assert got.grads.image is out[0]
    ids = np.arange(6) // 2
    plain = infonce.clip_loss(z, z, scale=1.0, ids=np.arange(6))
    assert infonce.clip_loss(z, z, scale=1.0, ids=ids) != plain
    with pytest.raises(TypeError, match="progress: expected a callable"):
        infonce.clip_loss(z, z, scale=1.0, ids=ids, progress=3)
    infonce.clip_loss(z, z, scale=1.0, workspace=1 << 20)
    with pytest.raises(TypeError, match="workspace: expected an integer"):
        infonce.clip_loss(z, z, scale=1.0, workspace=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        infonce.clip_loss(z, z, scale=1.0, out=outs[0])
    scale[...] = -1.0
    with pytest.raises(ValueError, match="scale: expected a positive number"):
        infonce.siglip_loss(z, z, bias, scale=scale)


@pytest.mark.parametrize("wrt", [None, "text", ("text", "scale"), ["image"], frozenset({"scale"})])
def test_the_second_call_of_a_kind_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, wrt: Any
) -> None:
    first = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    monkeypatch.setattr(checks, "_check_static", None)
    again = infonce.clip_loss_and_grad(Q, K, scale=1.0, wrt=wrt)
    for got, want in zip(again.grads, first.grads, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_workspace_that_is_given_is_told_from_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who gives one gets no more than that, also if it is as large as the default."""
    problems: list[Any] = []

    def solve(request: Any) -> Any:
        problems.append(request.problem)
        return solved(request)

    solved = dispatch._solve
    monkeypatch.setattr(dispatch, "_solve", solve)
    z = np.eye(4)
    for options in ({}, {"workspace": None}, {"workspace": 2**28}, {"workspace": 2**20}):
        infonce.clip_loss(z, z, scale=1.0, **options)
    assert [p.workspace for p in problems] == [2**28, 2**28, 2**28, 2**20]
    assert [p.workspace_given for p in problems] == [False, False, True, True]
