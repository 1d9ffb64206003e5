"""infonce.torch against the published formulas, written out in PyTorch."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch_problems import (  # noqa: E402
    DEVICES,
    FORMS,
    LOSSES,
    arguments,
    call,
    features,
    formula,
    with_options,
)

import infonce  # noqa: E402
import infonce.torch as it  # noqa: E402
from infonce import spec  # noqa: E402

pytestmark = pytest.mark.extras


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients(form: str, loss: str, device: str) -> None:
    z = features(loss, device=device)
    scale = torch.tensor(7.0, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.tensor(-3.0, dtype=torch.float64, device=device, requires_grad=True)
    options = {"bias": bias} if loss == "siglip" else {}
    inputs = [*z, scale, *options.values()]
    want = formula(loss, z, scale, bias)
    wanted = torch.autograd.grad(3 * want, inputs)
    got = with_options(form, loss, scale=scale, **options)(*arguments(loss, z))
    assert got.dtype == torch.float64
    grads = torch.autograd.grad(3 * got, inputs, allow_unused=True)
    torch.testing.assert_close(got, want)
    for i, (g, w) in enumerate(zip(grads, wanted, strict=True)):
        if loss == "lit" and i == 1:
            assert g is None  # the locked tower
        else:
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: Any, device: str) -> None:
    z = [t.detach().to(dtype).requires_grad_() for t in features("clip", 40, 16, device)]
    loss = it.clip_loss(*z, scale=5.0)
    assert loss.dtype == torch.float32
    assert loss.device == z[0].device
    loss.backward()
    wide = [t.detach().double().requires_grad_() for t in z]
    want = formula("clip", wide, 5.0)
    want.backward()
    assert abs(loss.item() - want.item()) < 1e-5
    for a, b in zip(z, wide, strict=True):
        assert a.grad.dtype == dtype
        error = (a.grad.double() - b.grad).norm() / b.grad.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_backward_twice_with_retain_graph(device: str) -> None:
    z = features("clip", device=device)
    loss = it.clip_loss(*z, scale=4.0)
    first = torch.autograd.grad(2 * loss, z, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(5 * loss, z)
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 2.5 * a)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_func_grad(form: str, loss: str, reduction: str, device: str) -> None:
    """torch.func.grad and vjp, of features, scale and bias, as backward() has them."""
    z = [side.detach() for side in features(loss, device=device)]
    scale, bias = (torch.tensor(x, dtype=torch.float64, device=device) for x in (3.0, -2.0))
    upstream = (
        torch.arange(12.0, dtype=torch.float64, device=device) if reduction == "none" else 2.0
    )
    inputs = [*z, scale] + [bias] * (loss == "siglip")
    run = with_options(form, loss, reduction=reduction)

    def step(*args: Any) -> Any:
        rest = {"scale": args[len(z)].exp()}
        rest |= {"bias": args[-1]} if loss == "siglip" else {}
        return (upstream * run(*arguments(loss, args[: len(z)]), **rest)).sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(step(*leaves), leaves, allow_unused=True)
    got = torch.func.grad(step, tuple(range(len(inputs))))(*inputs)
    value, vjp = torch.func.vjp(step, *inputs)
    torch.testing.assert_close(value, step(*inputs))
    for g, v, w in zip(got, vjp(torch.ones_like(value)), wanted, strict=True):
        w = torch.zeros_like(g) if w is None else w  # the locked tower
        torch.testing.assert_close(g, w)
        torch.testing.assert_close(v, w)


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


def test_metrics() -> None:
    z = features("clip", 30)
    loss, metrics = it.clip_loss(*z, scale=3.0, metrics=True)
    x = z[0] @ z[1].T
    rows, columns = metrics.top(1)
    assert rows == pytest.approx((x.argmax(1) == torch.arange(30)).double().mean().item())
    assert columns == pytest.approx((x.argmax(0) == torch.arange(30)).double().mean().item())
    loss.backward()
    assert z[0].grad is not None
    hard, same = it.clip_loss(*z, scale=3.0, hardness=2.0, margin=0.1, metrics=True)
    assert hard > loss
    assert torch.equal(same.row_rank, metrics.row_rank)
    torch.testing.assert_close(same.hardest_negative, metrics.hardest_negative)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_compile_in_one_graph(form: str, loss: str, device: str) -> None:
    torch.compiler.reset()  # it gives up where one function is compiled many times
    z = features(loss, device=device)
    scale = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)

    def step(s: Any, *z: Any) -> Any:
        sides = [1.0 * t for t in z]
        own = {"own": sides.pop()} if loss == "info_nce" else {}
        return 2 * run(*arguments(loss, sides), scale=s.exp(), **own)

    rows, rng = len(z[0]), torch.Generator().manual_seed(0)
    integers = torch.arange(rows, device=device) % 5
    options: dict[str, Any] = {}
    if loss == "siglip":
        options = {"positive_ids": (integers, integers.flip(0))}
    elif loss == "info_nce":
        own = torch.randn(rows, 3, 5, dtype=torch.float64, generator=rng).to(device)
        z.append(own.requires_grad_())
        options = {"own_mask": own.detach()[:, :, 0] < 1.0, "groups": integers % 2}
    elif loss != "sup_con":
        guide = [torch.randn(rows, 3, generator=rng).to(device) for _ in z]
        options = {"guide": tuple(guide) if len(z) > 1 else guide[0], "ids": integers}

    run = with_options(form, loss, **options)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = [scale, *(z[:1] if loss == "lit" else z)]
    got, want = compiled(scale, *z), step(scale, *z)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(g, w)


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
                           ({"wrt": None}, "unexpected keyword argument 'wrt'")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            torch.compile(lambda z, o=options: loss(z, **o), backend="eager")(image)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_a_device(loss: str, device: str) -> None:
    """Tensors on the features' device, and arrays of the host."""
    z = features(loss, device=device)
    weights = np.linspace(0.0, 2.0, 12)
    own = {name: 0.1 for name in ("margin", "hardness") if name not in spec.LOSSES[loss].refused}
    options = {"scale": 3.0, "reduction": "none", **own}
    rows = call(loss, z, **options)
    for row_weights in (torch.tensor(weights, device=device), weights):
        torch.testing.assert_close(call(loss, z, weights=row_weights, **options).cpu(),
                                   torch.tensor(weights) * rows.cpu())  # fmt: skip


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
         True, 0.1, False, 0.0, 0.5, math.inf, 0.0, False, "mean", "auto", "auto", 2**28),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_autocast(form: str, device: str) -> None:
    z = features("clip", 20, 8, device)
    z = [t.detach().float().requires_grad_() for t in z]
    layer = torch.nn.Linear(8, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        image, text = layer(z[0]), layer(z[1])
        assert image.dtype == torch.bfloat16
        loss = with_options(form, "clip", scale=2.0, normalize=True)(image, text)
    assert loss.dtype == torch.float32
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.isfinite(layer.weight.grad).all()


def test_closed_forms() -> None:
    """2n collinear rows: log(2n - 1). Orthogonal pairs: known by hand."""
    rows = torch.ones(10, 4, dtype=torch.float64) / 2
    got = it.nt_xent_loss(rows, temperature=0.5)
    assert got.item() == pytest.approx(torch.log(torch.tensor(9.0)).item())
    eye = torch.eye(6, dtype=torch.float64)
    want = torch.log1p(5 * torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
    torch.testing.assert_close(it.clip_loss(eye, eye.clone(), scale=2.0), want)


def test_import_alone_needs_no_torch() -> None:
    assert "torch" not in infonce.__all__


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
