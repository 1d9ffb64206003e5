"""What drop-in replacements have beside the equations of tests/matrix/drop_ins.py: results by name,
defaults, buffers, errors, GPUs."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch_problems import DEVICES, features, formula  # noqa: E402

pytestmark = pytest.mark.extras


def assert_same(got: Any, want: Any, *inputs: Any) -> None:
    """The value and the gradients of inputs that require one."""
    torch.testing.assert_close(got, want)
    wanted = [z for z in inputs if z.requires_grad]
    grads = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in (got, want)]
    torch.testing.assert_close(*grads)


def views() -> tuple[Any, Any]:
    """Two views of 8 samples, of any norm, and unit rows of the same."""
    out = [3 * z.detach() for z in features("clip", 8)]
    out = [z.requires_grad_() for z in out]
    return out, [F.normalize(z, dim=1) for z in out]


def test_losses_of_open_clip_by_name() -> None:
    from infonce.torch.open_clip import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss

    image, text = features("clip", 16)
    scale = torch.tensor(6.0, dtype=torch.float64)
    clip = formula("clip", [image, text], scale)
    logits = torch.randn(16, 7, 11, dtype=torch.float64)
    labels = torch.arange(112).reshape(16, 7) % 11
    caption = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
    out = CoCaLoss(2.0, 0.5, pad_id=3)(image, text, logits, labels, scale, output_dict=True)
    torch.testing.assert_close(out, {"contrastive_loss": clip / 2, "caption_loss": 2 * caption})
    assert CoCaLoss(2.0, 0.0)(image, text, logits, labels, scale)[0] == 0
    out = DistillClipLoss()(image, text, scale, image, text, 5.0, output_dict=True)
    assert [*out] == ["contrastive_loss", "distill_loss"]
    for loss in (out, ClipLoss()(image, text, scale, output_dict=True)):
        torch.testing.assert_close(loss["contrastive_loss"], clip)
    assert "chunk_size=8" in repr(SigLipLoss(chunk_size=8))


def test_open_clip_create_loss() -> None:
    from infonce.torch import open_clip

    settings = {"rank": 0, "world_size": 1, "local_loss": True, "gather_with_grad": True,
                "distill": False, "siglip": False, "loss_dist_impl": "gather", "model": "ViT-B-32",
                "coca_caption_loss_weight": 2.0, "coca_contrastive_loss_weight": 0.5}  # fmt: skip
    for arguments, kind, words in (
        ({}, open_clip.ClipLoss, "local_loss=True, gather_with_grad=True, cache_labels=True"),
        ({"siglip": True}, open_clip.SigLipLoss, "dist_impl='gather'"),
        ({"model": "coca_ViT-B-32"}, open_clip.CoCaLoss, "caption_loss_weight=2.0, clip_loss_w"),
        ({"distill": True}, open_clip.DistillClipLoss, "cache_labels=True"),
        ({"torchcompile": True}, open_clip.ClipLoss, "cache_labels=False"),
    ):
        loss = open_clip.create_loss(SimpleNamespace(**{**settings, **arguments}))
        assert type(loss) is kind
        assert words in repr(loss)
    for arguments, match in (
        ({"model": "genlip_1"}, r"args\.model: expected one with a contrastive .* 'genlip_1'"),
        ({"horovod": True}, "use_horovod: expected False, got True"),
    ):
        with pytest.raises(ValueError, match=match):
            open_clip.create_loss(SimpleNamespace(**{**settings, **arguments}))


@pytest.mark.parametrize("kind", ["CLIP", "LiT", "Qwen3"])
def test_memory_efficient_names(kind: str) -> None:
    """Other names of the losses that tests/matrix draws, and rows that are unit rows already."""
    from infonce.torch import memory_efficient_clip as theirs

    (image, text), _ = views()
    rows = [image, text.detach() if kind == "LiT" else text]
    if kind == "Qwen3":
        own = torch.stack([text.detach().flip(0), text.detach().roll(1, 0)], dim=1)
        rows.append(own.requires_grad_())
    unit = [F.normalize(z, dim=-1) for z in rows]
    for stable in (False, True):
        loss = partial(getattr(theirs, f"MemoryEfficient{kind}Loss"), stable=stable)
        same = [loss(temperature=0.1, normalized_inputs=True)(*unit)]
        if kind != "Qwen3":
            name = f"{'Stable' * stable}MemoryEfficient{kind}Loss"
            same.append(getattr(theirs, f"{name}Normed").apply(*unit, 0.1))
            same += [getattr(theirs, name)(0.1)(*rows)] * stable
        for got in same:
            assert_same(got, loss(temperature=0.1)(*rows), *rows)
    if kind != "Qwen3":
        torch.testing.assert_close(loss()(*rows), loss(0.07)(*rows))
    with pytest.raises(ValueError, match=r"tau_plus: expected 0.0, got 0.1: use false_negative"):
        loss()(*rows, tau_plus=0.1)


def test_memory_efficient_options() -> None:
    """Gradients that a locked tower gets none of, and options that have no values."""
    from infonce.torch import memory_efficient_clip as theirs

    (query, documents), _ = views()
    own = torch.stack([documents.detach().flip(0), documents.detach().roll(1, 0)], dim=1)
    inputs = [query, documents, own.requires_grad_()]
    locked = theirs.MemoryEfficientLiTQwen3Loss(0.1, 0.1, True)(*inputs)
    rest = torch.autograd.grad(locked, inputs[1:], allow_unused=True)
    assert all(gradient is None for gradient in rest)
    smooth = theirs.MemoryEfficientQwen3Loss(0.1, 2.0, label_smoothing=0.2)
    with pytest.raises(ValueError, match=r"label_smoothing: expected 0.0, got 0.2: it is there wi"):
        smooth(*inputs)
    plain, fused = (
        theirs.MemoryEfficientCLIPLoss(0.1, stable=False),
        theirs.MemoryEfficientMatryoshkaCLIPLoss,
    )
    want = 0.5 * plain(query[:, :2], documents[:, :2]) + 2 * plain(query, documents)
    for loss in (
        theirs.MatryoshkaLoss(plain, [2, 5], [0.5, 2]),
        fused((2, 5), (0.5, 2), 0.1, normalized_inputs=True, stable=False),
    ):
        assert_same(loss(query, documents), want, query, documents)
    for dims, weights, match in (
        ((3, 2), None, r"dims: expected increasing positive numbers, got \(3, 2\)"),
        ((), None, r"dims: expected increasing positive numbers, got \(\)"),
        ((2, 3), (1,), "weights: expected 2 of them, one for each of dims, got 1"),
    ):
        with pytest.raises(ValueError, match=match):
            fused(dims, weights)
    with pytest.raises(ValueError, match="dims: expected at most the features' width 5, got 6"):
        fused([2, 6])(query, documents)
    plain.normalized_inputs = True
    with pytest.raises(ValueError, match=r"base_loss\.normalized_inputs: expected False, got True"):
        theirs.MatryoshkaLoss(plain, [2])
    with pytest.raises(ValueError, match=r"group: expected None, got .*: the Distributed classes"):
        fused([2], group=object())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pairs", "width"), [(7, 300), (128, 2048)])
def test_infonce_cuda_functions(pairs: int, width: int, device: str) -> None:
    """Errors stay within the report's bounds over its sizes: 1e-5 of the loss, 1e-4 of
    gradients."""
    from infonce.torch import infonce_cuda
    from infonce.torch.infonce_cuda import InfoNCEFunction, infonce_backward, infonce_forward

    module = infonce_cuda.InfoNCELoss()
    assert "temperature=0.5" in repr(module)
    (z,) = features("nt_xent", 2 * pairs, width, device, dtype=torch.float32)
    for temperature in (0.5, 0.1):
        module.temperature = temperature  # by a schedule
        wide = z.detach().double().requires_grad_()
        want = formula("nt_xent", [wide], 1 / temperature)
        (wanted,) = torch.autograd.grad(3 * want, wide)
        assert abs(module(z).item() - want.item()) < 1e-5
        loss = infonce_forward(z, temperature)
        applied = InfoNCEFunction.apply(z, temperature)
        for value, recorded in ((loss, False), (applied, True)):
            assert (value.shape, value.dtype, value.device) == ((1,), torch.float32, z.device)
            assert value.requires_grad == recorded
            assert abs(value.item() - want.item()) < 1e-5
        upstream = torch.full((1,), 3.0, device=device)
        for gradient in (
            infonce_backward(z, temperature, upstream),
            infonce_backward(z, temperature, upstream[0]),
            infonce_backward(z, temperature, 3.0),
            torch.autograd.grad(applied, z, upstream)[0],
        ):
            assert (gradient.shape, gradient.dtype) == (z.shape, torch.float32)
            assert not gradient.requires_grad
            assert (gradient - wanted).abs().max() < 1e-4
    with pytest.raises(ValueError, match="features: expected an even number of rows"):
        infonce_forward(z[1:], 0.5)


def test_lightly_alone() -> None:
    """One process is all of them."""
    from infonce.torch.lightly import NTXentLoss

    out, _ = views()
    gathered, alone = (NTXentLoss(0.2, gather_distributed=each)(*out) for each in (True, False))
    assert gathered == alone
    with pytest.raises(ValueError, match="temperature: expected a positive number, got -1"):
        NTXentLoss(-1.0)(*out)


@pytest.mark.parametrize("size", [20, (20, 5)])
def test_lightly_memory_bank(size: Any) -> None:
    """Rows of the second view enter it, from its begin on; what is too much at its end is lost."""
    from infonce.torch.lightly import NTXentLoss

    out, unit = views()
    torch.manual_seed(0)
    bank = F.normalize(torch.randn(20, 5), dim=1).to(unit[0])
    torch.manual_seed(0)
    loss = NTXentLoss(0.2, memory_bank_size=size)
    for step, begin in enumerate((0, 8, 16, 0, 8)):
        second = (out[1] + step).detach().requires_grad_()
        key = F.normalize(second, dim=1)
        positive = (unit[0] * key).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, unit[0] @ bank.T], dim=1) / 0.2
        want = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        with torch.no_grad():  # as an evaluation: the bank stays
            torch.testing.assert_close(loss(out[0].detach(), second), want.detach())
        assert_same(loss(out[0], second), want, out[0], second)
        rows = slice(begin, min(begin + 8, 20))
        # the bank is float32, as lightly's is
        bank[rows] = key.detach()[: rows.stop - rows.start].float().double()
    with pytest.raises(ValueError, match=r"memory_bank_size: expected at least 0, got \(4, -1\)"):
        NTXentLoss(memory_bank_size=(4, -1))


def test_what_sup_contrast_refuses() -> None:
    from infonce.torch.sup_contrast import SupConLoss

    z, labels = torch.ones(6, 2, 6), torch.arange(6)
    with pytest.raises(ValueError, match="mask: expected None, got ndarray of shape"):
        SupConLoss()(z, mask=np.eye(6))
    with pytest.raises(ValueError, match="labels: expected 6 of them, got 5"):
        SupConLoss()(z, labels[1:])
    with pytest.raises(ValueError, match=r"features: expected \[B, V, D\], got \(6, 3\)"):
        SupConLoss()(torch.zeros(6, 3))
    with pytest.raises(ValueError, match='contrast_mode: expected "all" or "one", got \'two\''):
        SupConLoss(contrast_mode="two")


def calls(image: Any, text: Any) -> dict[str, Any]:
    """Losses by name, of 8 rows on any device."""
    from infonce.torch import (
        colpali_engine,
        inf_cl,
        lightly,
        memory_efficient_clip,
        open_clip,
        siglip_kernel,
        sup_contrast,
    )

    number, device = torch.arange(8, device=image.device), image.device
    own = torch.stack([text.flip(0), text.roll(1, 0)], dim=1)
    tokens, documents = image[:, None].repeat(1, 3, 1), text[:, None].repeat(1, 2, 1)
    qwen3 = {"use_qq_negatives": True, "use_dd_negatives": True}
    prefixes = memory_efficient_clip.MemoryEfficientMatryoshkaCLIPLoss((2, 5), (0.5, 2), 0.1)
    return {
        "clip": open_clip.ClipLoss()(image, text, 2.0),
        "siglip": open_clip.SigLipLoss()(image, text, 2.0, -1.0),
        "distill": sum(open_clip.DistillClipLoss()(image, text, 2.0, text, image, 3.0)),
        "nt_xent": lightly.NTXentLoss(0.2)(image, text),
        "bank": lightly.NTXentLoss(0.2, (20, 5)).to(device)(image, text),
        "dclw": lightly.DCLWLoss(0.2, sigma=0.7)(image, text),
        "sup_con": sup_contrast.SupConLoss(0.2)(torch.stack([image, text], 1), number % 3),
        "views": sup_contrast.SupConLoss(0.2, "one")(torch.stack([image, text], 1)),
        "inf_cl": inf_cl.cal_inf_loss(image, text, number.flip(0), 2.0),
        "several": siglip_kernel.fused_siglip_plus_loss(
            image, text, torch.tensor(1.0, device=device), torch.tensor(-2.0, device=device),
            number % 3, number % 4,
        ),
        "qwen3": memory_efficient_clip.MemoryEfficientQwen3Loss(0.1, 0.1, **qwen3)(
            image, text, own
        ),
        "lit": memory_efficient_clip.MemoryEfficientLiTLoss(0.1)(image, text),
        "prefixes": prefixes(image, text),
        "colbert": colpali_engine.ColbertNegativeCELoss(0.2)(tokens, documents, documents[:, None]),
        "colbert sigmoid": colpali_engine.ColbertSigmoidLoss(0.2)(tokens, documents),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_each_is_the_same_on_a_gpu(device: str) -> None:
    """Also of features that are no leaves, and masks and labels that a drop-in makes."""
    results = []
    for place in ("cpu", device):
        torch.manual_seed(0)  # of the bank
        image, text = (z.detach().to(place).requires_grad_() for z in features("clip", 8))
        losses = calls(image, text)
        grads = {
            name: torch.autograd.grad(z, image, retain_graph=True)[0] for name, z in losses.items()
        }
        results.append([{name: z.cpu() for name, z in each.items()} for each in (losses, grads)])
    torch.testing.assert_close(results[1], results[0])
    assert all(gradient.any() for gradient in results[0][1].values())
