"""`dims`: the sum of a loss over prefixes of the features."""

from typing import Any

import numpy as np
import pytest
from infonce.kernels.cpu import schedule
from infonce.kernels.prefixes import solve as prefix_solve
from judge import DTYPES, assert_grad, peak_memory, unit
from reference_problems import FEATURES, one_problem

import infonce
from infonce import reference

NAMES = ("info_nce", "nt_xent", "clip", "lit", "siglip")


def function(name: str, end: str = "_and_grad", module: Any = infonce) -> Any:
    return getattr(module, f"{name}_loss{end}")


def summed(name: str, features: Any, dims: Any, by: Any, **options: Any) -> tuple[float, dict]:
    """Loss and gradients by the references of all prefixes."""
    total, grads = 0.0, {}
    for d, w in zip(dims, by, strict=True):
        result = getattr(reference, name)(*(z[:, :d] for z in features), **options)
        total += w * result.loss
        for field, gradient in result.grads.items():
            if isinstance(gradient, np.ndarray):
                if field not in grads:
                    grads[field] = np.zeros(
                        features[0 if len(features) == 1 else FEATURES[name].index(field)].shape
                    )
                grads[field][:, :d] += w * gradient
            elif gradient is not None:
                grads[field] = grads.get(field, 0.0) + w * gradient
    return total, grads


@pytest.mark.parametrize("name", NAMES)
def test_all_features_are_no_prefix(name: str) -> None:
    features = one_problem(name, rows=12).features
    width = features[0].shape[1]
    plain, got = (function(name)(*features, scale=2.0, **more) for more in ({}, {"dims": (width,)}))
    for have, want in zip((got.loss, *got.grads), (plain.loss, *plain.grads), strict=True):
        assert (have is None) == (want is None)
        assert want is None or np.array_equal(have, want)


@pytest.mark.parametrize("method", ["naive", "tiled", "auto"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_dtypes_of_gradients(dtype: Any, name: str, method: str) -> None:
    """Gradients have the range and precision of the dtype that is asked for, and not less."""
    rows, scale, weights = 12, 2.0, (0.5, 2.0, -1.0)
    features = [unit(z).astype(dtype) for z in one_problem(name, rows=rows, width=6).features]
    wrt = FEATURES[name][: 1 if name == "lit" else 2]
    # a row of dL/dx adds up to at most 2 / rows in size
    terms = sum(map(abs, weights)) * scale * 2 / rows**0.5
    for widest in (4, 6):  # the last features in no prefix; and all prefixes in one pass, if `fits`
        dims = (1, 2, widest)
        _, wanted = summed(name, features, dims, weights, scale=scale)
        for dtypes in (*((each, each) for each in DTYPES), (np.float64, np.float16)):
            upstream = 1.0 if np.float16 in dtypes else 2.0**-30  # gradients that underflow
            out = {
                field: np.full(z.shape, np.nan, each)
                for field, z, each in zip(wrt, features, dtypes, strict=False)
            }
            for way in (
                {"out": out}, {"out": {wrt[0]: out[wrt[0]]}}, {"grad_dtype": dtypes[0]}, {}
            ):  # fmt: skip
                asked_for_all = "grad_dtype" in way or len(way.get("out", {})) == len(wrt)
                if dtype is np.float16 and upstream != 1.0 and not asked_for_all:
                    continue
                grads = function(name)(
                    *features, scale=scale, method=method, dims=dims, dim_weights=weights,
                    normalize=False, grad_out=upstream, wrt=wrt, **way,
                ).grads  # fmt: skip
                for field in wrt:
                    got = getattr(grads, field)
                    asked = way.get("out", {}).get(field)
                    assert asked is None or got is asked
                    want_dtype = way.get("grad_dtype", dtype) if asked is None else asked.dtype
                    assert got.dtype == want_dtype
                    precision = got.dtype.name
                    if got.dtype == np.float64 and dtype is not np.float64:
                        precision = "float32"  # of the products
                    got = got.astype(np.float64) / upstream
                    assert_grad(got, wanted[field], precision, scale, terms=terms)


@pytest.mark.parametrize("method", ["naive", "tiled", "auto"])
def test_upstream_gradients_of_any_dtype(method: str) -> None:
    """The products with the weights of prefixes are not rounded to their dtype, and do not
    overflow."""
    features = [z.astype(np.float32) for z in one_problem("clip", rows=12, width=6).features]
    options: dict[str, Any] = {"scale": 2.0, "dims": (2, 6), "dim_weights": (1000.0, 0.1)}
    options |= {"method": method, "normalize": True}
    for reduction, shape in (("mean", ()), ("none", (12,))):
        want, *others = (
            infonce.clip_loss_and_grad(
                *features, reduction=reduction, grad_out=np.full(shape, 100, dtype), **options
            ).grads
            for dtype in (np.float64, np.float32, np.float16, np.int8)
        )
        for got in others:
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
    for dims in ((2, 6), (6,)):
        for bad in (True, None, "1", 1j, np.ones(12, bool), np.ones(11)):
            with pytest.raises((TypeError, ValueError), match=r"^grad_out: expected "):
                infonce.clip_loss_and_grad(
                    *features, grad_out=bad, reduction="none", scale=2.0, dims=dims, method=method
                )


def test_sums_over_prefixes_are_silent() -> None:
    """Sums that overflow, or are no numbers."""
    features = [z.astype(np.float16) for z in one_problem("clip", rows=12, width=6).features]
    for size, upstream in ((1.0, 1e30), (1.0, np.inf), (np.float16(np.inf), 1.0)):
        for reduction in ("mean", "none"):
            options: dict[str, Any] = {"scale": 2.0, "dims": (2, 4), "reduction": reduction}
            scaled = [z * size for z in features]
            infonce.clip_loss_and_grad(
                *scaled, grad_out=upstream, dim_weights=(1, -1), normalize=False, **options
            )
            infonce.clip_loss(*scaled, dim_weights=(1, -1), normalize=False, **options)


# --- all prefixes in one pass ---------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets, for each call of several prefixes, whether one pass computed it."""
    one_pass_used: list[bool] = []

    def solve(*args: Any) -> Any:
        solution = one_pass(*args)
        one_pass_used.append(solution is not None)
        return solution

    one_pass = prefix_solve.solve_prefixes
    monkeypatch.setattr(prefix_solve, "solve_prefixes", solve)
    monkeypatch.setattr(schedule, "PREFIX_TILE", (16, 11))
    monkeypatch.setenv("INFONCE_NUM_THREADS", "3")
    return one_pass_used


@pytest.mark.parametrize(("method", "dims"), [("naive", (2, 4)), ("tiled", (2, 6))])
def test_some_gradients(method: str, dims: tuple[int, int], passes: list[bool]) -> None:
    """Destinations, upstream gradients of rows and a callback, by each prefix and by one pass."""
    features = one_problem("clip", rows=40, width=6).features
    options: dict[str, Any] = {"scale": 2.0, "normalize": True}
    upstream = np.linspace(-1, 1, 40)
    out = {"text": np.full(features[1].shape, np.nan)}
    steps: list[tuple[str, int, int]] = []
    got = infonce.clip_loss_and_grad(
        *features, dims=dims, reduction="none", grad_out=upstream, wrt=("text", "scale"), out=out,
        method=method, progress=lambda *step: steps.append(step), **options,
    )  # fmt: skip
    _, grads = summed("clip", features, dims, (1.0, 1.0), weights=upstream, **options)
    assert any(passes) == (method == "tiled")
    assert got.grads.text is out["text"]
    assert got.grads.image is None
    np.testing.assert_allclose(out["text"], grads["text"], rtol=1e-11, atol=1e-13)
    assert not out["text"][:, dims[-1] :].any()
    np.testing.assert_allclose(got.grads.scale, grads["scale"], rtol=1e-11)
    assert got.loss.shape == (40,)
    if method == "tiled":
        assert {phase for phase, _, _ in steps} == {"log-sum-exp", "gradient"}
    no_features = infonce.clip_loss_and_grad(
        *features, dims=dims, wrt=("scale",), method=method, **options
    )
    _, grads = summed("clip", features, dims, (1.0, 1.0), **options)
    np.testing.assert_allclose(no_features.grads.scale, grads["scale"], rtol=1e-11)


@pytest.mark.parametrize(
    "options", [{"workspace": 2500}, {"margin": 0.1}, {"normalize": True}, {"ids": np.arange(400)}]
)
def test_calls_of_each_prefix(options: dict[str, Any], passes: list[bool]) -> None:
    """One pass is not used if tiles have no room, with some options, or for a prefix near 0."""
    image, text = one_problem("clip", rows=400, width=6).features
    image = np.array(image)
    if "normalize" in options:
        image[3, :2] *= 2.0**-50
    options = {"scale": 2.0, **options}
    got = infonce.clip_loss_and_grad(image, text, dims=(2, 6), method="tiled", **options)
    assert passes == [False]
    options.pop("workspace", None)
    total, grads = summed("clip", (image, text), (2, 6), (1.0, 1.0), **options)
    np.testing.assert_allclose(got.loss, total, rtol=1e-12)
    np.testing.assert_allclose(got.grads.text, grads["text"], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dims", [(4, 16), (4, 8, 12)])
@pytest.mark.parametrize("end", ["", "_and_grad"])
@pytest.mark.parametrize("name", NAMES)
def test_an_error_names_the_workspace_that_works(name: str, end: str, dims: Any) -> None:
    """The least of the widest prefix, which is the largest."""
    features = one_problem(name, rows=800, width=16).features
    options: dict[str, Any] = {"scale": 2.0, "dims": dims, "normalize": True}
    with pytest.raises(ValueError, match="workspace: expected at least") as error:
        function(name, end)(*features, workspace=1, **options)
    function(name, end)(*features, workspace=int(str(error.value).split()[4]), **options)


@pytest.mark.parametrize("normalize", [False, True])
def test_memory_of_one_pass(normalize: bool) -> None:
    """One pass takes at most the workspace, the gradients and vectors."""
    rng = np.random.default_rng(0)
    image, text = rng.standard_normal((2, 3000, 16), np.float32) / 4
    options = {"scale": 2.0, "dims": (4, 8, 16), "workspace": 2**23, "normalize": normalize}
    infonce.clip_loss_and_grad(image, text, method="tiled", **options)  # compiles
    peak = peak_memory(lambda: infonce.clip_loss_and_grad(image, text, method="tiled", **options))
    gradients, vectors = image.nbytes + text.nbytes, 100 * 3000 * 8
    assert peak <= 2**23 + gradients + vectors
