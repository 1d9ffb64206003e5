"""Trainings with other projects' trainers and losses, and with those in their place: the same
losses and parameters, to rounding. Skipped where a project is not installed."""

import functools
import importlib.util
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # of the projects
]
STEPS = 6


def assert_same_training(run: Callable[[Any], list[Any]], theirs: Any, ours: Any) -> None:
    """`run` returns losses and then parameters, all float64, of a training that gets somewhere."""
    got, want = run(ours), run(theirs)
    assert abs(want[0] - want[STEPS - 1]) > 1e-3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# --- sentence-transformers ------------------------------------------------------------------------


def sentences(columns: int) -> dict[str, list[str]]:
    """Sentences with the same words in another order; negatives of other words."""
    names = ["anchor", "positive", "negative"][:columns]
    return {
        name: [f"{name[:2]} {chr(97 + i % 26) * (3 + i % 4)} {i}" for i in range(24)]
        for name in names
    }


ALL_WAYS = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}


@pytest.mark.parametrize(
    ("name", "columns", "settings"),
    [
        ("MultipleNegativesRankingLoss", 3, {}),
        ("MultipleNegativesRankingLoss", 2, ALL_WAYS),
        ("CachedMultipleNegativesRankingLoss", 3, {"mini_batch_size": 3}),
    ],
)
def test_sentence_transformer_trainer(
    name: str, columns: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    st = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    from sentence_transformers.sentence_transformer import losses
    from torch_problems import sentence_model

    from infonce.torch import sentence_transformers as ours

    def run(module: Any) -> list[Any]:
        model = sentence_model(width=16).double()
        options = st.SentenceTransformerTrainingArguments(
            output_dir=tmp_path, max_steps=STEPS, per_device_train_batch_size=8, logging_steps=1,
            learning_rate=1e-2, seed=1, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = st.SentenceTransformerTrainer(
            model, options, datasets.Dataset.from_dict(sentences(columns)),
            loss=getattr(module, name)(model, **settings),
        )  # fmt: skip
        seen = []  # the trainer's log rounds them
        compute = trainer.compute_loss

        def spied(*args: Any, **kwargs: Any) -> Any:
            value = compute(*args, **kwargs)
            seen.append((value[0] if isinstance(value, tuple) else value).detach().clone())
            return value

        trainer.compute_loss = spied
        trainer.train()
        assert len(seen) == STEPS
        return [*seen, *(p.detach().clone() for p in model.parameters())]

    assert_same_training(run, losses, ours)


@pytest.mark.parametrize("negatives", [0, 1, 2])
@pytest.mark.parametrize("part", ["joint", "per_direction"])
def test_ranking_of_embeddings(negatives: int, part: str) -> None:
    """Values and gradients with all directions, hardness modes and similarities."""
    util = pytest.importorskip("sentence_transformers.util")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from infonce.torch import sentence_transformers as ours

    generator = torch.Generator().manual_seed(0)
    rows = {"dtype": torch.float64, "generator": generator}
    first, *more = ALL_WAYS["directions"]
    added = [names for n in range(4) for names in itertools.combinations(more, n)]
    modes = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
    similarities = ((util.cos_sim, 20.0), (util.dot_score, 1.0))
    for batch, names, mode, (similarity, scale) in itertools.product(
        (1, 5), added, modes, similarities
    ):
        if part == "per_direction" and set(names) - {"doc_to_query"}:
            continue  # refused by both
        settings = {
            "scale": scale, "similarity_fct": similarity, "directions": (first, *names),
            "partition_mode": part, "hardness_mode": mode,
            "hardness_strength": 3.0 if mode else 0.0,
        }  # fmt: skip
        columns = [torch.randn(batch, 6, **rows).requires_grad_() for _ in range(2 + negatives)]
        found = []
        for kind in (ours.MultipleNegativesRankingLoss, MultipleNegativesRankingLoss):
            loss = kind(None, **settings).compute_loss_from_embeddings(columns, None)
            found.append((loss.detach(), *torch.autograd.grad(loss, columns)))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=str(settings))


OVER_RANKS = [  # columns and settings
    (2, {}),
    (3, {}),
    (2, ALL_WAYS),
    (3, {**ALL_WAYS, "hardness_mode": "hard_negatives", "hardness_strength": 3.0}),
]
RANKS = """
import sys
import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer import losses
from torch.nn.parallel import DistributedDataParallel
from infonce.torch import sentence_transformers as ours

rank, folder, cases = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
out = {}
for name, module in (("theirs", losses), ("ours", ours)):
    for case, (columns, settings) in enumerate(cases):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(6, 4, dtype=torch.float64))
        settings = {"gather_across_devices": True, **settings}
        loss = module.MultipleNegativesRankingLoss(None, **settings)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        values = []
        for step in range(3):
            rows = torch.randn(columns, 2, 5, 6, dtype=torch.float64)[:, rank]
            embeddings = list(model(rows.flatten(0, 1)).split(5))
            value = loss.compute_loss_from_embeddings(embeddings, None)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            mean = value.detach().clone()
            dist.all_reduce(mean)  # theirs is that of a process's own rows
            values.append(mean / 2)
        out[name, case] = [*values, *(p.detach() for p in model.parameters())]
torch.save(out, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_sentence_transformers_over_ranks(tmp_path: Path) -> None:
    """With DDP and `gather_across_devices`: negatives of both processes, the same training."""
    pytest.importorskip("sentence_transformers")
    environment = {**os.environ, "INFONCE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path), repr(OVER_RANKS)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    for rank in range(2):
        out = torch.load(tmp_path / f"{rank}.pt")
        for case in range(len(OVER_RANKS)):
            for got, want in zip(out["ours", case], out["theirs", case], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


# --- plain loops ----------------------------------------------------------------------------------


def part_of(package: str, file: str) -> Any:
    """A module of a project by itself: the project imports much that its losses do not need."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(found.origin).parent / file
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

    theirs = part_of("open_clip", "loss.py")
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
            lambda module, given, out: values.append(sum(out.values()).detach())
        )  # fmt: skip
        optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
        data = {"train": SimpleNamespace(dataloader=batches, set_epoch=lambda epoch: None)}
        train.train_one_epoch(model, data, loss, 0, optimiser, None, None, teacher, args)
        assert len(values) == STEPS * accumulated
        return [*values[::accumulated], *(p.detach() for p in model.parameters())]

    assert_same_training(run, open_clip, ours)


class Batches(list[Any]):
    """What `train_one_epoch` asks of a loader."""

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


def test_what_pytorch_metric_learning_has_alone() -> None:
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    from infonce.torch.pytorch_metric_learning import NTXentLoss, SupConLoss

    z, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    for kind in (NTXentLoss, SupConLoss):
        with pytest.raises(ValueError, match=r"distance: expected Cosine.* got LpDistance"):
            kind(distance=distances.LpDistance())
        with pytest.raises(ValueError, match=r"distance\.power: expected 1, got 2"):
            kind(distance=distances.DotProductSimilarity(power=2))
        with pytest.raises(ValueError, match="indices_tuple: expected None, got pairs: all pairs"):
            kind()(z, labels, indices_tuple=(labels, labels, labels))
        with pytest.raises(ValueError, match="labels: expected a tensor, got None"):
            kind()(z)


def test_what_sentence_transformers_has_alone() -> None:
    util = pytest.importorskip("sentence_transformers.util")
    from infonce.torch.sentence_transformers import MultipleNegativesRankingLoss

    with pytest.raises(ValueError, match=r"similarity_fct: expected cos_sim or .* euclid"):
        MultipleNegativesRankingLoss(None, similarity_fct=util.euclidean_sim)
    with pytest.raises(ValueError, match="embeddings: expected queries and documents, got 1 col"):
        MultipleNegativesRankingLoss(None).compute_loss_from_embeddings([torch.ones(2, 3)], None)
