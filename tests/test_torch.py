"""infonce.torch against the published formulas, written out in PyTorch."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import infonce  # noqa: E402
import infonce.torch as it  # noqa: E402

LOSSES = ["clip", "info_nce", "lit", "nt_xent", "siglip"]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU"),
        ],
    ),
]


def features(loss: str, rows: int = 12, dim: int = 5, device: str = "cpu", **options: Any) -> Any:
    generator = torch.Generator().manual_seed(rows)
    options = {"dtype": torch.float64, "generator": generator, **options}
    sides = [torch.randn(rows, dim, **options) for _ in range(1 if loss == "nt_xent" else 2)]
    return [F.normalize(z, dim=1).to(device).requires_grad_() for z in sides]


def formula(loss: str, z: Any, scale: Any, bias: Any = -10.0) -> Any:
    x = scale * z[0] @ z[-1].T
    n = len(x)
    y = torch.arange(n, device=x.device)
    if loss == "nt_xent":
        x = x.masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), -torch.inf)
        return F.cross_entropy(x, (y + n // 2) % n)
    if loss == "siglip":
        t = 2 * torch.eye(n, dtype=x.dtype, device=x.device) - 1
        return -F.logsigmoid(t * (x + bias)).sum() / n
    if loss == "clip":
        return (F.cross_entropy(x, y) + F.cross_entropy(x.T, y)) / 2
    return F.cross_entropy(x, y)


def call(loss: str, z: Any, **options: Any) -> Any:
    return getattr(it, f"{loss}_loss")(*z, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients(loss: str, device: str) -> None:
    z = features(loss, device=device)
    scale = torch.tensor(7.0, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.tensor(-3.0, dtype=torch.float64, device=device, requires_grad=True)
    options = {"bias": bias} if loss == "siglip" else {}
    inputs = [*z, scale, *options.values()]
    want = formula(loss, z, scale, bias)
    wanted = torch.autograd.grad(3 * want, inputs)
    got = call(loss, z, scale=scale, **options)
    assert got.dtype == torch.float64
    grads = torch.autograd.grad(3 * got, inputs, allow_unused=True)
    torch.testing.assert_close(got, want)
    for i, (g, w) in enumerate(zip(grads, wanted, strict=True)):
        if loss == "lit" and i == 1:
            assert g is None  # the locked tower
        else:
            torch.testing.assert_close(g, w)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss: str) -> None:
    z = features(loss, 6, 3)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    if loss == "lit":
        z[1] = z[1].detach()
    assert torch.autograd.gradcheck(lambda s, *z: call(loss, z, scale=s), (scale, *z))


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


def test_per_row_losses() -> None:
    z = features("info_nce")
    rows = it.info_nce_loss(*z, scale=4.0, reduction="none")
    weights = torch.arange(12.0, dtype=torch.float64)
    x = 4.0 * z[0] @ z[1].T
    want = F.cross_entropy(x, torch.arange(12), reduction="none")
    torch.testing.assert_close(rows, want)
    for g, w in zip(
        torch.autograd.grad((weights * rows).sum(), z),
        torch.autograd.grad((weights * want).sum(), z),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


def test_labels_and_temperature() -> None:
    z = features("info_nce")
    labels = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    got = it.info_nce_loss(z[0], z[1], labels, temperature=temperature)
    want = F.cross_entropy(z[0] @ z[1].T / temperature, labels)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, [*z, temperature]),
                    torch.autograd.grad(want, [*z, temperature]), strict=True):  # fmt: skip
        torch.testing.assert_close(g, w)


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


def test_double_backward_says_no() -> None:
    z = features("clip")
    with pytest.raises(RuntimeError, match=r"create_graph: expected False.*differentiated again"):
        torch.autograd.grad(it.clip_loss(*z, scale=2.0), z, create_graph=True)


def test_metrics() -> None:
    z = features("clip", 30)
    loss, metrics = it.clip_loss(*z, scale=3.0, metrics=True)
    x = z[0] @ z[1].T
    rows, columns = metrics.top(1)
    assert rows == pytest.approx((x.argmax(1) == torch.arange(30)).double().mean().item())
    assert columns == pytest.approx((x.argmax(0) == torch.arange(30)).double().mean().item())
    loss.backward()
    assert z[0].grad is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_compile_in_one_graph(loss: str, device: str) -> None:
    z = features(loss, device=device)
    scale = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)

    def step(s: Any, *z: Any) -> Any:
        return 2 * call(loss, [1.0 * t for t in z], scale=s.exp())

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = [scale, *(z[:1] if loss == "lit" else z)]
    got, want = compiled(scale, *z), step(scale, *z)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", DEVICES)
def test_operator_check(device: str) -> None:
    from infonce.torch.functions import _operator

    z = [t.detach().requires_grad_() for t in features("clip", device=device)]
    scale = torch.tensor(3.0, dtype=torch.float64, device=device, requires_grad=True)
    torch.library.opcheck(
        _operator,
        ("clip", z[0], z[1], None, scale, None, False, "mean", "auto", "auto", 2**28,
         [True, False, True, True]),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str) -> None:
    z = features("clip", 20, 8, device)
    z = [t.detach().float().requires_grad_() for t in z]
    layer = torch.nn.Linear(8, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        image, text = layer(z[0]), layer(z[1])
        assert image.dtype == torch.bfloat16
        loss = it.clip_loss(image, text, scale=2.0, normalize=True)
    assert loss.dtype == torch.float32
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.isfinite(layer.weight.grad).all()


# --- modules and what they replace ----------------------------------------------------------------


def test_modules() -> None:
    z = features("nt_xent", 16)[0]
    want = formula("nt_xent", [z], 2.0)
    torch.testing.assert_close(it.InfoNCELoss()(z), want)
    torch.testing.assert_close(it.NTXentLoss(0.5)(3 * z[:8], 2 * z[8:]), want)
    image, text = features("clip", 16)
    torch.testing.assert_close(
        it.CLIPLoss()(image, text, torch.tensor(9.0)), formula("clip", [image, text], 9.0)
    )
    torch.testing.assert_close(
        it.LiTLoss(0.1)(5 * text, image), formula("lit", [text, image], 10.0)
    )
    torch.testing.assert_close(
        it.SigLIPLoss()(image, text, 9.0, -4.0), formula("siglip", [image, text], 9.0, -4.0)
    )
    assert "temperature=0.5" in repr(it.InfoNCELoss())


def test_open_clip() -> None:
    image, text = features("clip", 16)
    scale = torch.tensor(2.0, dtype=torch.float64).exp()
    out = it.ClipLoss()(image, text, scale, output_dict=True)
    torch.testing.assert_close(out["contrastive_loss"], formula("clip", [image, text], scale))
    bias = torch.tensor(-10.0, dtype=torch.float64)
    # as published: -sum(logsigmoid(labels * logits)) / N
    torch.testing.assert_close(
        it.SigLipLoss()(image, text, scale, bias), formula("siglip", [image, text], scale, bias)
    )
    with pytest.raises(
        ValueError, match="rank, world_size: expected 0 <= rank < world_size, got 2"
    ):
        it.ClipLoss(rank=2, world_size=2)
    with pytest.raises(ValueError, match="use_horovod: expected False, got True"):
        it.ClipLoss(use_horovod=True)
    with pytest.raises(RuntimeError, match=r"group: expected torch\.distributed to be initialised"):
        it.SigLipLoss(rank=0, world_size=2)(image, text, scale, bias)


def test_memory_efficient_clip_and_inf_cl() -> None:
    image, text = features("clip", 16)
    torch.testing.assert_close(
        it.MemoryEfficientCLIPLoss(temperature=0.1)(3 * image, 2 * text),
        formula("clip", [image, text], 10.0),
    )
    torch.testing.assert_close(
        it.MemoryEfficientLiTLoss(temperature=0.1, normalized_inputs=True)(text, image),
        formula("lit", [text, image], 10.0),
    )
    torch.testing.assert_close(
        it.cal_inf_loss(image, text, scale=6.0), formula("info_nce", [image, text], 6.0)
    )


def test_closed_forms() -> None:
    """2n collinear rows: log(2n - 1). Orthogonal pairs: known by hand."""
    rows = torch.ones(10, 4, dtype=torch.float64) / 2
    assert it.InfoNCELoss()(rows).item() == pytest.approx(torch.log(torch.tensor(9.0)).item())
    eye = torch.eye(6, dtype=torch.float64)
    want = torch.log1p(5 * torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
    torch.testing.assert_close(it.clip_loss(eye, eye.clone(), scale=2.0), want)


# --- errors ---------------------------------------------------------------------------------------


def test_errors() -> None:
    image, text = features("clip")
    with pytest.raises(
        TypeError, match=r"image: expected a floating-point tensor, got torch\.int64"
    ):
        it.clip_loss(torch.ones(3, 2, dtype=torch.int64), text, scale=1.0)
    with pytest.raises(TypeError, match="text: expected a tensor, got ndarray"):
        it.clip_loss(image, text.detach().numpy(), scale=1.0)
    with pytest.raises(ValueError, match=r"text: expected a tensor on cpu like image, got.*meta"):
        it.clip_loss(image, text.to("meta"), scale=1.0)
    with pytest.raises(ValueError, match="temperature, scale: expected one of them, got both"):
        it.clip_loss(image, text, scale=1.0, temperature=1.0)
    with pytest.raises(ValueError, match=r"scale: expected one number, got shape \(2,\)"):
        it.clip_loss(image, text, scale=torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalise'"):
        it.clip_loss(image, text, scale=1.0, normalise=True)


def test_import_alone_needs_no_torch() -> None:
    assert "torch" not in infonce.__all__


def test_training_follows_the_full_matrix() -> None:
    import runpy
    from pathlib import Path

    script = Path(__file__).parent.parent / "benchmarks" / "parity.py"
    for row in runpy.run_path(str(script))["compare"](12, torch.float64):
        assert row["largest_gap"] < 1e-11, row["task"]
        assert row["curve"][-1] < 0.98 * row["curve"][0]  # it learns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no GPU")
@pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream"
)  # torch's warm-up has its own
@pytest.mark.parametrize("method", ["fused", "tiled"])
@pytest.mark.parametrize("loss", LOSSES)
def test_graphed_step(loss: str, method: str) -> None:
    """A loss and its backward pass as CUDA graphs, replayed on new features while others take and
    leave memory."""
    import gc

    import cupy

    gc.collect()  # graphs of other tests: the end of one would be the end of a capture under way
    options: Any = {"scale": 5.0, "method": method}
    if loss == "siglip":
        options["bias"] = -3.0
    z = features(loss, 300, 72, "cuda", dtype=torch.float32)
    step = torch.cuda.make_graphed_callables(
        lambda *sides: call(loss, sides, **options), tuple(z), allow_unused_input=loss == "lit"
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
        found = step(*new)
        torch.testing.assert_close(found, want, rtol=0, atol=0)
        for got, gradient in zip(torch.autograd.grad(found, wanted), grads, strict=True):
            torch.testing.assert_close(got, gradient, rtol=0, atol=0)
        del others, theirs
