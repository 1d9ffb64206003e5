"""What `infonce bench` and benchmarks/gpu.py compare: cases, contenders, rounds, sections."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from command_line import close
from gpu_problems import MISSING
from judge import LOSSES, pairs

import infonce
from infonce import reference
from infonce.checks.teacher import ALL_LOSSES
from infonce.cli.bench import contenders_gpu, measure
from infonce.cli.bench.cpu import Host
from infonce.spec import LOSSES as KINDS


@pytest.fixture
def peers(monkeypatch):
    """The contenders of benchmarks/gpu.py: a script, no part of the package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("peers")


def test_what_is_missing_says_what_to_install(peers):
    for module, package in (
        ("torch", "'infonce-kernels[torch]'"), ("open_clip.loss", "open_clip_torch"),
        ("cut_cross_entropy", "cut-cross-entropy"), ("inf_cl", "inf_cl"),
    ):  # fmt: skip
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        assert measure._reason(error) == f"No module named {module!r}: pip install {package}"
    assert measure._reason(ImportError("this torch has no CUDA")) == "this torch has no CUDA"


@pytest.mark.extras
@pytest.mark.parametrize(
    "kind", [*LOSSES, "sup_con", "gte", "more keys", "more keys, one gradient"]
)
def test_panels_and_the_library_judge_like_the_reference(monkeypatch, kind):
    """Labels may point into more keys."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(contenders_gpu, "PANEL", 7)
    more = {"keys": 30, "wrt": ("query",) if "one" in kind else ()} if "more" in kind else {}
    loss = "info_nce" if more else kind
    case = measure.Case(KINDS[loss], 24, 5, "float64", scale=4.0, **more)
    features = pairs("partly aligned", 24, 30, 5, np.float64, 0)[: len(KINDS[loss].arguments)]
    features = [z[:n] for z, (n, _) in zip(features, case.shapes, strict=True)]
    if more:
        assert case.shapes == [(24, 5), (30, 5)]
        assert case.products == (2 if more["wrt"] else 4)
        assert case.operations == case.products * 2 * 24 * 30 * 5
        assert 0 <= case.positives.min() < case.positives.max() < 30
    labels = case.positives if more else case.labels
    options = {} if labels is None else {"labels": labels}
    want = getattr(reference, loss)(*features, scale=4.0, **options)
    expected = case.select_gradients([want.grads[name] for name in case.kind.arguments])
    judged = contenders_gpu.by_panels(case, list(map(torch.as_tensor, features)), torch.float64)
    for found, gradients in (judged, contenders_gpu.library("auto", case, [features])()):
        assert close(float(found), want.loss)
        assert len(gradients) == len(expected)
        for got, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.extras
def test_sections_of_the_benchmark(peers):
    """Their contenders are there, and no more goals than cases."""
    pytest.importorskip("cupy")
    script = importlib.import_module("gpu")
    for section in script.SECTIONS.values():
        assert set(section.methods) <= {"auto", *peers.Device.methods}
        assert len(section.goals) <= len(section.cases)


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("method", ["offload", "offload pinned"])
def test_features_in_host_memory_are_contenders(peers, method):
    place = peers.Device("bfloat16")
    case = peers.Case(KINDS["clip"], 300, 40, "bfloat16", workspace=2**22)
    inputs = place.inputs(case)
    want = place.reference(case, inputs[0])
    run = place.contender(method, case, inputs)
    errors = measure.errors(run(), want)
    assert errors["loss_error"] < 1e-5
    assert errors["gradient_error"] < 1e-2
    place.ahead = True
    assert place.turn(run)["seconds"]
    assert place.memory(method, run)["peak_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_bare_products(dtype):
    import cupy

    rng = np.random.default_rng(0)
    kind = measure.DTYPES[dtype]
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in ((24, 40), (40, 16)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    for turned_a in (False, True):
        for turned_b in (False, True):
            out = cupy.full((24, 16), np.nan, np.float64 if dtype == "float64" else np.float32)
            first, second = a.T if turned_a else a, b.T if turned_b else b
            operands = [cupy.asarray(np.ascontiguousarray(z)) for z in (first, second)]
            contenders_gpu.product(
                contenders_gpu.PRECISION[dtype], out, *operands,
                transpose_a=turned_a, transpose_b=turned_b,
            )  # fmt: skip
            assert np.array_equal(out.get(), want)  # small integers: exact in every arithmetic
    with pytest.raises(ValueError, match="bf16x3"):
        contenders_gpu.product("bf16x3", out, out, out)


NEAR = 2.0**-16  # an error that a contender may have


class Pretended:
    """A place to measure where everything takes as long as it is told to."""

    methods = ("quick", "slow", "missing", "wrong")

    def __init__(self):
        self.rates = [1e9]  # of an earlier comparison

    def inputs(self, case):
        return [[np.full((4, 2), 2.0)]]  # small also for the cases of a GPU's benchmark

    def reference(self, case, features):
        return 4.0, [features[0]]

    def contender(self, method, case, inputs):
        if method == "missing":
            raise ImportError("not\n here")
        loss, factor = {"quick": (4 + NEAR, 1 + NEAR), "wrong": (4.0, 1.5)}.get(method, (4.0, 1))
        return lambda: (loss, [factor * inputs[0][0]])

    def memory(self, method, run):
        return {"peak_bytes": 7}

    def turn(self, run):
        quick = run()[0] == 4 + NEAR
        return {"seconds": [1.0, 3.0, 2.0], "wall": [5.0]} if quick else {"seconds": [8.0]}

    def time_gemm(self):
        self.rates.append(2e-7)

    def skipped_errors(self):
        return ImportError, ValueError


def test_rounds_of_a_comparison():
    case = measure.Case(KINDS["clip"], 4, 2)
    quick, slow, missing, wrong = measure.compare(Pretended(), case, Pretended.methods, 2)
    assert quick["seconds"] == [1.0, 3.0, 2.0] * 2
    assert (quick["median_s"], quick["min_s"], quick["max_s"]) == (2.0, 1.0, 3.0)
    assert quick["wall_s"] == 5.0
    assert "wall_s" not in slow
    assert close(quick["gflops"], 8 * 4 * 4 * 2 / 2.0 / 1e9)
    assert close(quick["gemm_share"], quick["gflops"] / 2e-7)  # of the products of these rounds
    assert close(quick["loss_error"], NEAR / 4)
    assert close(quick["gradient_error"], NEAR)
    assert slow["loss_error"] == slow["gradient_error"] == 0
    assert missing == {"size": 4, "method": "missing", "skipped": "not here"}
    assert wrong["skipped"] == "gradient_error: expected at most 0.0001 in float32, got 0.5"
    assert "median_s" not in wrong


def test_ratios_of_options_are_to_a_call_of_the_same_size(monkeypatch):
    """benchmarks/options.py: a plain call has as many rows of features, and as wide ones."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    options = importlib.import_module("options")

    def size(*arguments, **_):  # of features, without labels and without a teacher's features
        features = [z for z in arguments if z.ndim == 2][:2]
        return sum(map(len, features)), features[0].shape[1]

    for loss in ALL_LOSSES:
        monkeypatch.setattr(infonce, f"{loss}_loss_and_grad", size)
    runs = options.cases(Host("float32"), "float32", rows=64, dim=16)
    without_ratio = []
    for (loss, name), run in runs.items():
        plain = runs.get((options.PLAIN.get(loss, loss), "plain"))
        if plain is None:
            without_ratio.append(loss)
        else:
            assert run() == plain(), (loss, name)
    assert without_ratio == ["siglip of 16 images"]
