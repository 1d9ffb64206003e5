"""Trainings with sentence-transformers' trainer and losses, and with those in their place: the same
losses and parameters, to rounding. Skipped where it is not installed."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch_problems import STEPS, assert_same_training, run_ranks, sentence_model  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # of the project
]


def sentences(columns: int) -> dict[str, list[str]]:
    """Sentences with the same words in another order; negatives of other words."""
    names = ["anchor", "positive", "negative"][:columns]
    return {
        name: [f"{name[:2]} {chr(97 + i % 26) * (3 + i % 4)} {i}" for i in range(24)]
        for name in names
    }


def load_losses() -> tuple[Any, Any]:
    """The modules of the project's losses, and of those in their place."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    from infonce.torch import sentence_transformers as ours

    return losses, ours


def tokens(model: Any, columns: int) -> list[dict[str, Any]]:
    read = getattr(model, "preprocess", model.tokenize)
    return [read(texts[:9]) for texts in sentences(columns).values()]


def differentiate(model: Any, loss: Any, columns: int) -> list[Any]:
    """The loss, and the gradients of the model's parameters."""
    model.zero_grad()
    value = loss(tokens(model, columns), None)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


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
    losses, ours = load_losses()
    import sentence_transformers as st

    datasets = pytest.importorskip("datasets")
    pytest.importorskip("accelerate")

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


OVER_RANKS = [  # columns and settings
    (2, {}),
    (3, {}),
    (2, ALL_WAYS),
    (3, {**ALL_WAYS, "hardness_mode": "hard_negatives", "hardness_strength": 3.0}),
    (3, {"temperature": 0.2}),
]
RANKS = """
import sys
import types
import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer import losses
from torch.nn.parallel import DistributedDataParallel
from infonce.torch import sentence_transformers as ours

def guided(module, settings, embeddings, rows):
    # the rows themselves are a guide
    loss = types.SimpleNamespace(
        **{"margin": 0.0, "contrast_anchors": True, "contrast_positives": True}, **settings,
        margin_strategy="absolute", mini_batch_size=8, show_progress_bar=False,
        cross_entropy_loss=torch.nn.CrossEntropyLoss(),
        sim_matrix=lambda a, b: torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=-1),
    )
    columns = [[each] for each in embeddings], [[each] for each in rows]
    return module.CachedGISTEmbedLoss.calculate_loss(loss, *columns)

rank, folder, cases = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
out = {}
for name, module in (("theirs", losses), ("ours", ours)):
    for case, (columns, settings) in enumerate(cases):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(6, 4, dtype=torch.float64))
        settings = {"gather_across_devices": True, **settings}
        if "temperature" not in settings:
            loss = module.MultipleNegativesRankingLoss(None, **settings)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        values = []
        for step in range(3):
            rows = torch.randn(columns, 2, 5, 6, dtype=torch.float64)[:, rank]
            embeddings = list(model(rows.flatten(0, 1)).split(5))
            if "temperature" in settings:
                value = guided(module, settings, embeddings, rows)
            else:
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
    """DDP with `gather_across_devices` has the negatives of both processes, and the same
    training."""
    pytest.importorskip("sentence_transformers")
    run_ranks(["-c", RANKS], 2, str(tmp_path), repr(OVER_RANKS))
    for rank in range(2):
        out = torch.load(tmp_path / f"{rank}.pt")
        for case in range(len(OVER_RANKS)):
            for got, want in zip(out["ours", case], out["theirs", case], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


GUIDED = [
    {},
    {"margin": 0.05, "temperature": 0.05},
    {"margin": 0.002, "contrast_anchors": False},
    {"contrast_positives": False, "margin_strategy": "relative"},
]


@pytest.mark.parametrize("columns", [2, 3])
def test_guided_losses(columns: int) -> None:
    """Values and gradients of the model, by a guide that reads the same tokens, or other ones."""
    losses, ours = load_losses()
    model, guide = (sentence_model(width=width, dropout=0.0).double() for width in (16, 8))
    plain = [("GISTEmbedLoss", *step) for step in enumerate(GUIDED)]
    for name, step, settings in [*plain, ("CachedGISTEmbedLoss", 1, GUIDED[1])]:
        guide.max_seq_length = 128 if step % 2 else 20  # of fewer tokens, the texts are read anew
        cached = {"mini_batch_size": 4} if name.startswith("Cached") else {}
        kinds = [getattr(m, name)(model, guide, **settings, **cached) for m in (ours, losses)]
        assert {kind.must_retokenize for kind in kinds} == {step % 2 == 0}
        got, want = (differentiate(model, kind, columns) for kind in kinds)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["MultipleNegativesRankingLoss", "GISTEmbedLoss", "CachedGISTEmbedLoss"]
)
def test_prefixes_by_their_own_matryoshka_loss(name: str) -> None:
    losses, ours = load_losses()
    models = [sentence_model(width=width, dropout=0.0).double() for width in (16, 8)]
    results = []
    for module in (ours, losses):
        plain = getattr(module, name)(*models[: 1 if name.startswith("Multiple") else 2])
        loss = losses.MatryoshkaLoss(models[0], plain, [16, 8, 4], [1, 2, 0.5])
        results.append(differentiate(models[0], loss, 2))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


def test_what_is_refused() -> None:
    _, ours = load_losses()
    from sentence_transformers import util

    column = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"similarity_fct: expected cos_sim or .* euclid"):
        ours.MultipleNegativesRankingLoss(None, similarity_fct=util.euclidean_sim)
    with pytest.raises(ValueError, match="embeddings: expected queries and documents, got 1 col"):
        ours.MultipleNegativesRankingLoss(None).compute_loss_from_embeddings([column], None)
    model = sentence_model(width=8)
    with pytest.raises(ValueError, match='margin_strategy: expected "absolute" with a margin'):
        ours.GISTEmbedLoss(model, model, margin_strategy="relative", margin=0.1)
    with pytest.raises(ValueError, match="embeddings: expected anchors and positives, got 1 col"):
        ours.GISTEmbedLoss(model, model)(tokens(model, 1), None)


@pytest.mark.parametrize(
    "base", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"]
)
def test_the_class_with_own_negatives(base: str) -> None:
    """The class of docs/migrating.md, also with gradient caching."""
    load_losses()
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    (example,) = re.findall(r"^```python\n([^`]*class OwnNegativesLoss.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(example.replace("MultipleNegativesRankingLoss", base), names)
    model = sentence_model(width=16, dropout=0.0).double()
    loss = names["OwnNegativesLoss"](model, **({"mini_batch_size": 3} if "Cached" in base else {}))
    columns = [*sentences(3).values(), [f"other {i}" for i in range(24)]]
    features = [model.preprocess(column[:8]) for column in columns]
    loss(features, None).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    anchors, positives, *negatives = (
        torch.nn.functional.normalize(model(dict(each))["sentence_embedding"]) for each in features
    )
    own = [(anchors * negative).sum(dim=1, keepdim=True) for negative in negatives]
    logits = 20.0 * torch.cat([anchors @ positives.T, *own], dim=1)
    want = torch.nn.functional.cross_entropy(logits, torch.arange(8))
    want.backward()
    torch.testing.assert_close(loss(features, None).detach(), want.detach())
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    assert max(g.abs().max() for g in wanted) > 1e-3
    torch.testing.assert_close(gradients, wanted)


class TokenModel(torch.nn.Module):
    """Tokens of unit norm from a table, as a MultiVectorEncoder returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:  # the first module of an encoder
        return self.table

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        tokens = torch.nn.functional.normalize(self.table(features["input_ids"]), dim=-1)
        return {"token_embeddings": tokens, "attention_mask": features["attention_mask"]}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_multi_vector(columns: int, mean: bool, cached: bool) -> None:
    """Documents of other lengths in each column, and negatives of all queries."""
    pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
    from sentence_transformers.multi_vector_encoder import losses, scoring

    from infonce.torch.sentence_transformers import multi_vector as ours

    name = "Cached" * cached + "MultiVectorMultipleNegativesRankingLoss"
    settings: dict[str, Any] = {"scale": 1.7, "mini_batch_size": 3}
    if mean:
        settings["similarity_fct"] = partial(scoring.colbert_scores, length_normalize=True)
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> dict[str, Any]:
        lengths = torch.randint(1, tokens + 1, (7, 1), generator=generator)
        ids = torch.randint(0, 50, (7, tokens), generator=generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths).long()}

    features = [draw(tokens) for tokens in (4, 9, 12, 6)[: 1 + columns]]
    results = []
    for module in (losses, ours):
        torch.manual_seed(0)
        model = TokenModel()
        loss = getattr(module, name)(model, **settings)(features, None)
        loss.backward()
        results.append((loss.detach().double(), model.table.weight.grad))
    # their scores are float32
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=0)
    largest = results[0][1].abs().max()
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=float(2e-6 * largest))
    with pytest.raises(ValueError, match=r"similarity_fct: expected .* got XTRScores"):
        getattr(ours, name)(model, similarity_fct=scoring.XTRScores())
