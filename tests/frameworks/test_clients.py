"""Trainings with other projects' loops and losses, and with those in their place: the same losses
and parameters, to rounding. Skipped where a project is not installed."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch_problems import STEPS, assert_same_training  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # of the projects
]


def load_part(package: str, file: str) -> Any:
    """A module of a project by itself: the project imports much that its losses do not need."""
    package_spec = importlib.util.find_spec(package)
    if package_spec is None or package_spec.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(package_spec.origin).parent / file
    spec = importlib.util.spec_from_file_location(f"part_of_{package}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_towers(loss: Callable[..., Any]) -> list[Any]:
    """Losses and parameters of two encoders with a scale and a bias."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, -3.0))
    parameters = [*model.parameters(), scale, bias]
    optimiser, values = torch.optim.SGD(parameters, lr=0.3), []
    for _ in range(STEPS):
        sides = torch.randn(2, 10, 6, dtype=torch.float64, generator=generator)
        image, text = (F.normalize(m(z), dim=1) for m, z in zip(model, sides, strict=True))
        value = loss(image, text, scale.exp(), bias, output_dict=True)["contrastive_loss"]
        optimiser.zero_grad()
        (value + 0 * bias).backward()  # CLIP's loss does not depend on the bias
        optimiser.step()
        values.append(value.detach())
    return [*values, *(p.detach() for p in parameters)]


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_open_clip_step(name: str) -> None:
    from infonce.torch import open_clip as ours

    theirs = load_part("open_clip", "loss.py")
    assert_same_training(lambda module: two_towers(getattr(module, name)()), theirs, ours)


TINY: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16},
    "text_cfg": {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("kind", ["clip", "siglip", "coca", "distill"])
def test_open_clip_train_one_epoch(kind: str, accumulated: int, monkeypatch: Any) -> None:
    """open_clip's own epoch with the loss of its `create_loss`: image and text transformers, in
    steps of one batch and of two whose features are cached."""
    train = pytest.importorskip("open_clip_train.train", exc_type=ImportError)
    if "loss" not in inspect.signature(train.train_one_epoch).parameters:
        pytest.skip("this open_clip passes a task to train_one_epoch, not a loss")
    if kind == "distill" and accumulated > 1:
        pytest.skip("open_clip's distillation has no accumulation")
    import open_clip

    from infonce.torch import open_clip as ours

    monkeypatch.setattr(train, "is_master", lambda args: False)  # no log
    args = SimpleNamespace(
        device="cpu", precision="fp32", distill=kind == "distill", siglip=kind == "siglip",
        model=kind, accum_freq=accumulated, skip_scheduler=True, grad_clip_norm=1.0,
        horovod=False, rank=0, world_size=1, local_loss=False, gather_with_grad=False,
        loss_dist_impl=None, coca_caption_loss_weight=2.0, coca_contrastive_loss_weight=1.0,
    )  # fmt: skip

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        if kind == "coca":
            sides = {
                "vision_cfg": {
                    **TINY["vision_cfg"],
                    "attentional_pool": True,
                    "attn_pooler_queries": 4,
                    "attn_pooler_heads": 2,
                },
                "text_cfg": {**TINY["text_cfg"], "embed_cls": True},
            }
            for side in sides.values():
                side["output_tokens"] = True
            decoder = {**TINY["text_cfg"], "attn_pooler_heads": 2}
            model = open_clip.CoCa(16, decoder, **sides).double()
            for p in model.parameters():  # some of which are torch.empty
                if p.ndim:
                    torch.nn.init.normal_(p, std=0.3)
            return model
        bias = -10.0 if kind == "siglip" else None
        return open_clip.CLIP(**TINY, init_logit_bias=bias, output_dict=True).double()

    def run(module: Any) -> list[Any]:
        model, teacher, loss = make(0), make(1), module.create_loss(args)
        generator = torch.Generator().manual_seed(0)
        batch = (
            torch.randn(5, 3, 16, 16, dtype=torch.float64, generator=generator),
            torch.randint(1, 20, (5, 6), generator=generator),
        )
        batches = Batches([tuple(z.flip(0) for z in batch) if i % accumulated else batch
                           for i in range(STEPS * accumulated)])  # fmt: skip
        values: list[Any] = []
        loss.register_forward_hook(
            lambda module, inputs, out: values.append(sum(out.values()).detach())
        )  # fmt: skip
        optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
        data = {"train": SimpleNamespace(dataloader=batches, set_epoch=lambda epoch: None)}
        train.train_one_epoch(model, data, loss, 0, optimiser, None, None, teacher, args)
        assert len(values) == STEPS * accumulated
        return [*values[::accumulated], *(p.detach() for p in model.parameters())]

    assert_same_training(run, open_clip, ours)


class Batches(list[Any]):
    """The part of a loader that `train_one_epoch` needs."""

    num_batches = property(len)
    num_samples = property(lambda self: sum(len(texts) for _, texts in self))


def test_grad_cache_package() -> None:
    """GradCache around the loss: the gradients of one pass over the batch, and of its own loss."""
    pytest.importorskip("grad_cache")
    from grad_cache import GradCache
    from grad_cache.loss import SimpleContrastiveLoss

    import infonce.torch as it

    torch.manual_seed(0)
    encoders = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
        for _ in range(2)
    ]
    parameters = [p for encoder in encoders for p in encoder.double().parameters()]
    queries = torch.randn(12, 6, dtype=torch.float64)
    documents = torch.randn(24, 6, dtype=torch.float64)  # a hard negative after each positive
    labels = torch.arange(0, 24, 2)

    def grads(compute: Callable[[], Any]) -> list[Any]:
        for p in parameters:
            p.grad = None
        torch.manual_seed(1)
        return [compute(), *(p.grad.clone() for p in parameters)]

    def cached(loss_fn: Any, **options: Any) -> list[Any]:
        return grads(
            lambda: GradCache(encoders, [5, 10], loss_fn)(queries, documents, **options)
        )  # fmt: skip

    loss_fn = functools.partial(it.info_nce_loss, scale=1.0)
    ours = cached(loss_fn, labels=labels)
    torch.testing.assert_close(ours, cached(SimpleContrastiveLoss(1)), rtol=1e-9, atol=1e-12)

    def at_once() -> Any:
        loss = loss_fn(encoders[0](queries), encoders[1](documents), labels)
        loss.backward()
        return loss.detach()

    for encoder in encoders:
        encoder.eval()  # dropout draws other numbers in one pass
    torch.testing.assert_close(
        cached(loss_fn, labels=labels), grads(at_once), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss", "DCLWLoss"])
@pytest.mark.parametrize("bank", [0, (32, 4)])
def test_lightly_simclr(name: str, bank: Any) -> None:
    theirs = pytest.importorskip("lightly.loss", exc_type=ImportError)
    from infonce.torch import lightly as ours

    if bank and name != "NTXentLoss":
        pytest.skip("only NTXentLoss has a memory bank")

    def run(module: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        encoder = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        encoder = encoder.double()
        settings = {"memory_bank_size": bank} if bank else {}
        loss = getattr(module, name)(temperature=0.2, **settings).double()
        optimiser, values = torch.optim.SGD(encoder.parameters(), lr=0.1), []
        for _ in range(STEPS):
            samples = torch.randn(10, 6, dtype=torch.float64, generator=generator)
            noise = torch.randn(2, 10, 6, dtype=torch.float64, generator=generator)
            first, second = (encoder(samples + 0.1 * z) for z in noise)
            value = loss(first, second)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            values.append(value.detach())
        return [*values, *(p.detach() for p in encoder.parameters())]

    assert_same_training(run, theirs, ours)


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
def test_pytorch_metric_learning_step(name: str) -> None:
    theirs = pytest.importorskip("pytorch_metric_learning.losses")
    from infonce.torch import pytorch_metric_learning as ours

    def run(module: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        encoder = torch.nn.Linear(6, 4, dtype=torch.float64)
        loss = getattr(module, name)(temperature=0.2)
        optimiser, values = torch.optim.SGD(encoder.parameters(), lr=0.1), []
        for step in range(STEPS):
            labels = torch.randint(4, (14,), generator=generator)
            rows = torch.randn(14, 6, dtype=torch.float64, generator=generator)
            rows += labels[:, None]
            reference = {}
            if step % 2:  # anchors against references
                reference = {"ref_emb": encoder(rows.flip(0)), "ref_labels": labels.flip(0)}
            value = loss(encoder(rows), labels, **reference)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            values.append(value.detach())
        return [*values, *(p.detach() for p in encoder.parameters())]

    assert_same_training(run, theirs, ours)


@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
@pytest.mark.parametrize(
    ("labels", "ref_labels"),
    [([0, 1, 2], None), ([4, 4, 4], None), ([1], None), ([0, 1, 0], None), ([0, 1], [2, 3]),
     ([0, 0], [0, 0, 0]), ([0, 1], [0, 5, 5]), ([0, 1], [0, 0])],
)  # fmt: skip
def test_pytorch_metric_learning_with_few_pairs(name: str, labels: Any, ref_labels: Any) -> None:
    """Rows without positives, rows without negatives, or some."""
    theirs = pytest.importorskip("pytorch_metric_learning.losses")
    from infonce.torch import pytorch_metric_learning as ours

    torch.manual_seed(0)
    z = torch.randn(len(labels), 5, dtype=torch.float64, requires_grad=True)
    references = []
    if ref_labels is not None:
        reference_features = torch.randn(len(ref_labels), 5, dtype=torch.float64)
        references = [None, reference_features, torch.tensor(ref_labels)]
    want, got = (
        getattr(module, name)(temperature=0.2)(z, torch.tensor(labels), *references)
        for module in (theirs, ours)
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    gradients = (torch.autograd.grad(loss, z)[0] for loss in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["NTXentLoss", "SupConLoss"])
def test_pytorch_metric_learning_memory_step(name: str, masked: bool) -> None:
    """`CrossBatchMemory` of 20 rows, which the second batch fills. `masked`: half of the rows are
    stored, and the others are compared."""
    theirs = pytest.importorskip("pytorch_metric_learning.losses")
    from infonce.torch import pytorch_metric_learning as ours

    def run(module: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        encoder = torch.nn.Linear(6, 4, dtype=torch.float64)
        memory = module.CrossBatchMemory(getattr(module, name)(temperature=0.2), 4, 20)
        optimiser, values = torch.optim.SGD(encoder.parameters(), lr=0.1), []
        for _ in range(STEPS):
            labels = torch.randint(4, (14,), generator=generator)
            rows = torch.randn(14, 6, dtype=torch.float64, generator=generator)
            rows += labels[:, None]
            mask = {"enqueue_mask": torch.arange(14) % 2 == 0} if masked else {}
            value = memory(encoder(rows), labels, **mask)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            values.append(value.detach())
        kept = [memory.embedding_memory, memory.label_memory]
        return [*values, *(p.detach() for p in encoder.parameters()), *kept]

    assert_same_training(run, theirs, ours)


def test_what_pytorch_metric_learning_has_alone() -> None:
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    miners = pytest.importorskip("pytorch_metric_learning.miners")
    from infonce.torch.pytorch_metric_learning import CrossBatchMemory, NTXentLoss, SupConLoss

    z, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    for kind in (NTXentLoss, SupConLoss):
        with pytest.raises(ValueError, match=r"distance: expected Cosine.* got LpDistance"):
            kind(distance=distances.LpDistance())
        with pytest.raises(ValueError, match=r"distance\.power: expected 1, got 2"):
            kind(distance=distances.DotProductSimilarity(power=2))
        with pytest.raises(ValueError, match="indices_tuple: expected None, got tuple: all pairs"):
            kind()(z, labels, indices_tuple=(labels, labels, labels))
        with pytest.raises(ValueError, match="labels: expected a tensor, got None"):
            kind()(z)
        memory = CrossBatchMemory(kind(), 3, 6)
        calls: dict[str, Any] = {
            "indices_tuple: expected None, got tuple: all": (z, labels, (labels, labels, labels)),
            "labels: expected a tensor, got None": (z, None),
            r"embeddings: expected shape \(M, 3\), got \(4, 2\)": (z[:, :2], labels),
            r"embeddings: expected at most 6 rows, memory_size, got 8": (z.repeat(2, 1), labels),
        }
        for message, arguments in calls.items():
            with pytest.raises(ValueError, match=message):
                memory(*arguments)
        memory.miner = miners.PairMarginMiner()
        with pytest.raises(ValueError, match="miner: expected None, got PairMarginMiner: all"):
            memory(z, labels)
        assert memory.queue_idx == 0  # nothing has been stored
        with pytest.raises(ValueError, match="miner: expected None, got PairMarginMiner: all"):
            CrossBatchMemory(kind(), 3, miner=miners.PairMarginMiner())
        theirs = losses.CrossBatchMemory(kind(), 3)  # which lists all pairs
        with pytest.raises(ValueError, match=r"indices_tuple: .* the CrossBatchMemory of infonce"):
            theirs(z, labels)
    with pytest.raises(TypeError, match=r"loss: expected .* got pytorch_metric.*\.NTXentLoss"):
        CrossBatchMemory(losses.NTXentLoss(), 3)
