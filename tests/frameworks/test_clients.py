"""Trainings with other projects' loops and losses, and with those in their place: the same losses
and parameters, to rounding. Skipped where a project is not installed."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch_problems import STEPS, assert_same_training  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # of the projects
]


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
