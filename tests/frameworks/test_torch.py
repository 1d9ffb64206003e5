"""infonce.torch: dtypes of numbers, transforms, compiled graphs, a training. (tests/matrix has its
numbers)"""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch_problems import DEVICES, FORMS, call, features, formula, with_options  # noqa: E402

import infonce.torch as it  # noqa: E402

pytestmark = pytest.mark.extras


def test_what_needs_no_gradient_costs_none(monkeypatch: Any) -> None:
    from infonce import dispatch

    asked = []
    real = dispatch.loss_and_grad
    monkeypatch.setattr(
        dispatch, "loss_and_grad", lambda *a: asked.append(set(a[4]["wrt"])) or real(*a)
    )
    image, text = features("clip")
    it.clip_loss(image, text.detach(), scale=2.0).backward()
    with torch.no_grad():
        it.clip_loss(image, text, scale=2.0)
    it.clip_loss(image.detach(), text.detach(), scale=torch.tensor(2.0, requires_grad=True))
    assert asked == [{"image"}, set(), {"scale"}]
    assert text.grad is None


def test_scale_has_a_dtype_of_its_own() -> None:
    image, text = features("siglip")
    scale = torch.tensor([2.0], dtype=torch.bfloat16, requires_grad=True)
    bias = torch.tensor(-1.0, dtype=torch.float32, requires_grad=True)
    got = it.siglip_loss(image, text, bias, scale=scale)
    want = formula("siglip", [image, text], scale.double(), bias.double())
    for g, w in zip(torch.autograd.grad(got, [scale, bias]),
                    torch.autograd.grad(want, [scale, bias]), strict=True):  # fmt: skip
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w)


def test_func_grad_of_labels_and_metrics() -> None:
    """Labels that are computed inside of the transform, and auxiliary output."""
    query, key = (z.detach() for z in features("info_nce"))

    def step(query: Any) -> Any:
        labels = (query.detach() @ key.T).argmax(1)
        loss, metrics = it.info_nce_loss(query, key, labels, temperature=0.3, metrics=True)
        return loss, metrics.row_rank

    got, rank = torch.func.grad(step, has_aux=True)(query)
    assert not rank.any()
    leaf = query.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(step(leaf)[0], leaf)[0])


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")  # the compiler does
@pytest.mark.parametrize("form", FORMS)
def test_compiled_calls_that_are_no_operator(form: str) -> None:
    """Arguments that the operator does not take break the graph, and the result is right."""
    torch.compiler.reset()
    image, text = (z.detach() for z in features("clip"))
    run = with_options(form, "clip")

    def loss(image: Any, **options: Any) -> Any:
        return run(image, text, **{"temperature": 0.3, **options})

    rows = torch.compile(lambda z: loss(z, reduction="none"), backend="eager")
    torch.testing.assert_close(rows(image), loss(image, reduction="none"))
    for options in ({"weights": [0.5] * 11 + [2]}, {"margin": np.float64(0.1)}):
        torch.compiler.reset()  # it gives up where one function is compiled many times
        compiled_loss = torch.compile(lambda z, o=options: loss(z, **o), backend="eager")
        torch.testing.assert_close(compiled_loss(image), loss(image, **options))
    compiled = torch.compile(torch.func.grad(loss), backend="eager")
    torch.testing.assert_close(compiled(image), torch.func.grad(loss)(image))
    for options, match in (({"temperature": -1.0}, "^temperature: expected a positive number"),
                           ({"weights": "all"}, "^weights: expected numbers, got dtype <U3"),
                           ({"scale": 1.0}, "^temperature, scale: expected one of them, got both"),
                           ({"wrt": None}, "unexpected keyword argument 'wrt'"),
                           )[:: 1 if form == "function" else 3]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            torch.compile(lambda z, o=options: loss(z, **o), backend="eager")(image)


@pytest.mark.parametrize("device", DEVICES)
def test_operator_check(device: str) -> None:
    from infonce.torch.core.compiled import UNTRACKED_NAMES, operator

    z = [t.detach().requires_grad_() for t in features("clip", device=device)]
    scale = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.arange(12.0, dtype=torch.float64, device=device)
    guide = [t.detach().flip(0) for t in z]
    tensors = {"weights": weights, "row_guide": guide[0], "column_guide": guide[1]}
    constants = [tensors.get(name) for name in UNTRACKED_NAMES]
    torch.library.opcheck(
        operator,
        ("clip", z[0], z[1], None, scale, None, *constants, [True, False, True, True],
         False, True, 0.1, False, 0.0, 0.5, math.inf, 0.0, False, "mean", "auto", "auto", 2**28),
    )  # fmt: skip


def test_training_follows_the_full_matrix() -> None:
    import runpy
    from pathlib import Path

    script = Path(__file__).parents[2] / "benchmarks" / "frameworks" / "parity.py"
    for row in runpy.run_path(str(script))["compare"](12, torch.float64):
        assert row["largest_gap"] < 1e-11, row["task"]
        assert row["curve"][-1] < 0.98 * row["curve"][0]  # it learns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU")
@pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream"
)  # torch's warm-up has its own
@pytest.mark.parametrize("method", ["fused", "tiled"])
@pytest.mark.parametrize("loss", ["clip", "info_nce", "lit", "nt_xent", "siglip"])
@pytest.mark.parametrize("form", FORMS)
def test_graphed_step(form: str, loss: str, method: str) -> None:
    """A loss and its backward pass as CUDA graphs, replayed on new features while others take and
    leave memory."""
    import gc

    import cupy

    gc.collect()  # graphs of other tests: the end of one would be the end of a capture under way
    options: Any = {"scale": 5.0, "method": method}
    if loss == "siglip":
        options["bias"] = -3.0
    run = with_options(form, loss, **options)
    z = features(loss, 300, 72, "cuda", dtype=torch.float32)
    step = torch.cuda.make_graphed_callables(
        lambda *sides: run(*sides), tuple(z), allow_unused_input=loss == "lit"
    )
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        new = [torch.randn(q.shape, generator=generator).to("cuda") for q in z]
        new = [F.normalize(q, dim=1).requires_grad_() for q in new]
        want = call(loss, new, **options)
        wanted = new[: 1 if loss == "lit" else 2]
        grads = torch.autograd.grad(want, wanted)
        others = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(9)]
        theirs = [cupy.full(2**20, cupy.nan, cupy.float32) for _ in range(9)]
        value = step(*new)
        torch.testing.assert_close(value, want, rtol=0, atol=0)
        for got, gradient in zip(torch.autograd.grad(value, wanted), grads, strict=True):
            torch.testing.assert_close(got, gradient, rtol=0, atol=0)
        del others, theirs
