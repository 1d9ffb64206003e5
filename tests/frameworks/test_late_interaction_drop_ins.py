"""The losses of colpali_engine and pylate, and those in their place: the same losses and gradients.

tests/matrix/drop_ins.py has the equations. Tests beside a project are skipped without it.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
import torch_problems  # noqa: E402
from torch_problems import run_ranks  # noqa: E402

from infonce.torch import colpali_engine as colpali  # noqa: E402

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),  # of the projects
]
B, D = 5, 8
DOUBLE = {"rtol": 1e-12, "atol": 1e-14}


def draw(generator: Any, *shape: int) -> Any:
    """Tokens of unit norm; those of the last axes after a length are zeros."""
    z = F.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)
    if len(shape) > 2:
        lengths = torch.randint(1, shape[-2] + 1, (*shape[:-2], 1), generator=generator)
        z *= (torch.arange(shape[-2]) < lengths)[..., None]
    return z


# --- colpali_engine -------------------------------------------------------------------------------


def with_gradients(loss: Callable[..., Any], features: list[Any]) -> list[Any]:
    """The loss and the gradients of the features before padding becomes zeros."""
    leaves = [z.clone().requires_grad_() for z in features]
    is_token = [(z != 0).any(-1, keepdim=True) for z in features]
    value = loss(*(z * mask for z, mask in zip(leaves, is_token, strict=True)))
    return [value.detach(), *torch.autograd.grad(value, leaves)]


LATE = [{"temperature": 0.1}, {"temperature": 1.3, "normalize_scores": False}]
WEIGHTS = [{"temperature": 0.5, "in_batch_term_weight": weight} for weight in (0.2, 0)]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ColbertLoss": LATE, "ColbertSigmoidLoss": LATE, "ColbertNegativeCELoss": [*LATE, *WEIGHTS],
    "BiEncoderLoss": LATE[:1], "BiPairedEncoderLoss": LATE[:1], "BiSigmoidLoss": LATE[:1],
    "BiNegativeCELoss": [*LATE[:1], *WEIGHTS],
}  # fmt: skip


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_colpali_engine(name: str, processes: int) -> None:
    """Documents of one process, and those of three, of which it is the second."""
    late, pairs = (
        pytest.importorskip(f"colpali_engine.loss.{module}_losses")
        for module in ("late_interaction", "bi_encoder")
    )
    if processes > 1 and name in ("BiPairedEncoderLoss", "ColbertSigmoidLoss"):
        pytest.skip("theirs is of one process")
    theirs = getattr(late if "Colbert" in name else pairs, name)
    known = inspect.signature(getattr(colpali, name)).parameters
    for parameter in inspect.signature(theirs).parameters.values():
        assert known[parameter.name].default == parameter.default
    assert [*known][:-1] == [*inspect.signature(theirs).parameters]
    generator = torch.Generator().manual_seed(len(name))
    lengths = (4, 9, 6) if name.startswith("Colbert") else (None, None, None)
    shapes = [(B,), (processes * B,), (B, 3)][: 3 if "Negative" in name else 2]
    features = [
        draw(generator, *rows, *([length] if length else []), D)
        for rows, length in zip(shapes, lengths, strict=False)
    ]
    for settings in SETTINGS[name]:
        got, want = (
            with_gradients(
                lambda *z, kind=kind: kind(**settings)(*z, offset=B * (processes // 2)), features  # noqa: B023
            )
            for kind in (getattr(colpali, name), theirs)
        )  # fmt: skip
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, **DOUBLE)


ROWS, TOKENS = torch.ones(B, D), torch.ones(B, 4, D)
# a loss, the arguments of a call, the error
ALONE: list[tuple[str, tuple[Any, ...], str]] = [
    ("ColbertNegativeCELoss", (TOKENS, TOKENS, TOKENS),
     r"neg_doc_embeddings: expected 4 .*\(5, 4, 8\)"),
    ("ColbertSigmoidLoss", (TOKENS, torch.ones(7, 4, D)),
     "doc_embeddings: expected a multiple of the 5 queries, got"),
    *((name, (TOKENS, TOKENS, *more, offset), f"got offset {offset}, 5 queries and 5 documents")
      for name, more in (("ColbertLoss", ()), ("ColbertSigmoidLoss", ()),
                         ("ColbertNegativeCELoss", (TOKENS[:, None],))) for offset in (-1, 1)),
    ("BiPairedEncoderLoss", (ROWS, torch.ones(2 * B, D), B), "offset: expected 0, got 5"),
    ("ColbertLoss", (ROWS, TOKENS), "query_embeddings: expected 3 dimensions, got shape"),
    ("BiEncoderLoss", (ROWS, TOKENS), "doc_embeddings: expected 2 dimensions, got shape"),
    ("BiPairedEncoderLoss", (TOKENS, TOKENS), "query_embeddings: expected 2 dimensions, got"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "match"), ALONE)
def test_what_colpali_engine_has_alone(name: str, call: tuple[Any, ...], match: str) -> None:
    """Settings: test_drop_in_options.py."""
    with pytest.raises(ValueError, match=match):
        getattr(colpali, name)()(*call)


def test_a_token_without_a_first_feature_counts() -> None:
    """Padding is a token whose features are all 0."""
    query = torch.zeros(1, 3, D)
    query[0, 0, 0] = query[0, 1, 1] = 1
    documents = torch.stack([query[0], query[0, :1].expand(3, D)])
    loss = colpali.ColbertLoss(temperature=1.0)(query, documents)
    torch.testing.assert_close(loss, F.cross_entropy(torch.tensor([[1.0, 0.5]]), torch.tensor([0])))


# --- pylate ---------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """Tokens of a table, with the attributes of a ColBERT."""

    skiplist = (3, 7)

    def __init__(self, do_query_expansion: bool = True) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(30, D, dtype=torch.float64)
        self.do_query_expansion = do_query_expansion

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {"token_embeddings": self.table(features["input_ids"])}


def texts(generator: Any, tokens: int) -> dict[str, Any]:
    lengths = torch.randint(1, tokens + 1, (B, 1), generator=generator)
    ids = torch.randint(0, 30, (B, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths).long()}


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.1, "size_average": False}])
@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_pylate(name: str, settings: dict[str, Any], expanded: bool) -> None:
    """Queries with and without expansion, skipped tokens, one column of negatives and three."""
    losses = pytest.importorskip("pylate.losses")
    from infonce.torch import pylate as ours

    cached = {"mini_batch_size": 2} if name.startswith("Cached") else {}
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 3):
        features = [texts(generator, tokens) for tokens in (4, *columns * [9])]
        results = []
        # the gradients of pylate 1.6's CachedContrastive are not those of its mean, but of the sum
        for kind, more in (
            (getattr(ours, name), cached),
            (losses.Contrastive, {}),
            (getattr(losses, name), cached),
        ):
            torch.manual_seed(0)
            model = Encoder(expanded)
            loss = kind(model, **settings, **more)(features)
            loss.backward()
            results.append((loss.detach(), model.table.weight.grad))
        torch.testing.assert_close(results[0], results[1], **DOUBLE)
        torch.testing.assert_close(results[0][0], results[2][0], **DOUBLE)
        with torch.no_grad():
            torch.testing.assert_close(
                getattr(ours, name)(model, **settings)(features), loss.detach()
            )


def test_what_pylate_has_alone() -> None:
    pytest.importorskip("pylate.losses")
    from pylate.scores import XTRScores, colbert_scores

    from infonce.torch import pylate as ours

    for name in ("Contrastive", "CachedContrastive"):
        kind = getattr(ours, name)
        for metric, came in ((XTRScores(), "XTRScores"), (colbert_scores, "colbert_scores")):
            with pytest.raises(ValueError, match=f"None or ColBERTScores, got {came}"):
                kind(Encoder(), score_metric=metric)
        generator = torch.Generator().manual_seed(0)
        features = [texts(generator, tokens) for tokens in (4, 9, 7)]
        with pytest.raises(ValueError, match=r"padded to one length, got documents of \[9, 7\]"):
            kind(Encoder())(features)


RANKS = """
import sys
sys.path += sys.argv[3:]
import torch
import torch.distributed as dist
from pylate import losses
from torch.nn.parallel import DistributedDataParallel
from infonce.torch import pylate as ours
from test_late_interaction_drop_ins import Encoder, texts

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
out = []
for module in (losses, ours):
    for name in ("Contrastive", "CachedContrastive"):
        torch.manual_seed(0)
        model = Encoder()
        model = DistributedDataParallel(model) if name == "Contrastive" else model
        loss = getattr(module, name)(
            model, gather_across_devices=True, temperature=0.5, size_average=name == "Contrastive"
        )
        generator = torch.Generator().manual_seed(rank)
        value = loss([texts(generator, tokens) for tokens in (4, 9, 9)])
        value.backward()
        out.append([value.detach(), *(p.grad for p in model.parameters())])
torch.save(out, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_pylate_over_ranks(tmp_path: Path) -> None:
    """Documents of both processes are negatives."""
    pytest.importorskip("pylate.losses")
    folders = Path(__file__).parent, Path(torch_problems.__file__).parent
    run_ranks(["-c", RANKS], 2, str(tmp_path), *map(str, folders))
    for rank in range(2):
        theirs, theirs_cached, plain, cached = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(plain, theirs, **DOUBLE)
        torch.testing.assert_close(cached, theirs_cached, **DOUBLE)
