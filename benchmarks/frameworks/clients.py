"""The loss of a training step by other projects' own losses, and by those in their place, on a GPU.

    python benchmarks/frameworks/clients.py [--output benchmarks/results/clients.json]

Embeddings are given: only the loss with its gradients is measured. Median milliseconds
between events, peak memory of PyTorch and CuPy beyond embeddings and their gradients, and by how
much the losses differ. Where a project is not installed, its formula in plain PyTorch stands for
it, and is called so.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import infonce.torch
from infonce.cli import machine
from infonce.cli.bench.gpu import Device
from infonce.cli.common import to_json
from infonce.torch import lightly

RESULTS = Path(__file__).resolve().parents[1] / "results"
SCALE = 20.0  # of sentence-transformers
TEMPERATURE = 0.5
Loss = Callable[..., Any]  # of embeddings
REPEATS = 20


# --- formulas, for projects that are not installed ------------------------------------------------


def ranking(query: Any, *documents: Any) -> Any:
    """sentence-transformers' MultipleNegativesRankingLoss."""
    logits = SCALE * F.normalize(query, dim=1) @ F.normalize(torch.cat(documents), dim=1).T
    return F.cross_entropy(logits, torch.arange(len(query), device=query.device))


def all_directions(query: Any, document: Any) -> Any:
    """The same with all four directions, for pairs."""
    query, document = F.normalize(query, dim=1), F.normalize(document, dim=1)
    own = torch.eye(len(query), dtype=torch.bool, device=query.device)
    logits = [query @ document.T, document @ query.T]
    logits += [(z @ z.T).masked_fill(own, -torch.inf) for z in (query, document)]
    log_z = (SCALE * torch.cat(logits, dim=1)).logsumexp(dim=1)
    return (log_z - SCALE * (query * document).sum(dim=1)).mean()


def nt_xent(first: Any, second: Any) -> Any:
    """lightly's NTXentLoss: four products, and logits without the diagonals' elements."""
    first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
    n = len(first)
    other = ~torch.eye(n, dtype=torch.bool, device=first.device)
    rows = []
    for a, b in ((first, second), (second, first)):
        same = (a @ a.T / TEMPERATURE)[other].view(n, -1)
        rows.append(torch.cat([a @ b.T / TEMPERATURE, same], dim=1))
    labels = torch.arange(n, device=first.device).repeat(2)
    return F.cross_entropy(torch.cat(rows), labels)


def metric_nt_xent(z: Any, labels: Any) -> Any:
    """pytorch-metric-learning's NTXentLoss, in less memory: a row of logits for each pair."""
    unit = F.normalize(z, dim=1)
    x = unit @ unit.T / TEMPERATURE
    same = labels[:, None] == labels
    anchor, positive = (same & ~torch.eye(len(z), dtype=torch.bool, device=z.device)).nonzero().T
    negatives = x.masked_fill(same, -torch.inf)[anchor]
    p = x[anchor, positive]
    return (torch.cat([p[:, None], negatives], dim=1).logsumexp(dim=1) - p).mean()


def sup_con(z: Any, labels: Any) -> Any:
    """SupContrast's SupConLoss, and pytorch-metric-learning's."""
    unit = F.normalize(z, dim=1)
    x = unit @ unit.T / TEMPERATURE
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (labels[:, None] == labels) & ~own
    log_p = x - x.masked_fill(own, -torch.inf).logsumexp(dim=1, keepdim=True)
    return -((positive * log_p).sum(dim=1) / positive.sum(dim=1)).mean()


# --- steps ----------------------------------------------------------------------------------------


def contenders(
    project: str, module: str, loss: Callable[[Any], Loss], formula: Loss, function: Loss
) -> list[tuple[str, Loss]]:
    """A project's loss and the one in its place, `loss` of a module, or its formula; and the
    function of this library that means the same."""
    try:
        pair = (importlib.import_module(name) for name in (module, f"infonce.torch.{project}"))
        theirs, ours = map(loss, pair)
    except (ImportError, RuntimeError):  # one of torchvision's, where it does not fit torch
        return [(f"formula of {project}", formula), ("infonce", function)]
    return [(project, theirs), (f"infonce in place of {project}", ours), ("infonce", function)]


def steps(device: str = "cuda", part: int = 1) -> Iterator[tuple[str, list[Any], Any]]:
    """(name, embeddings, contenders), of a part of the rows if that is wanted."""

    def embeddings(*sizes: int, width: int, dtype: Any = torch.float32) -> list[Any]:
        torch.manual_seed(0)
        rows = [F.normalize(torch.randn(n // part, width, device=device), dim=1) for n in sizes]
        return [z.to(dtype).requires_grad_() for z in rows]

    def make_ranking(**settings: Any) -> Callable[[Any], Loss]:
        def loss(module: Any) -> Loss:
            criterion = module.MultipleNegativesRankingLoss(None, scale=SCALE, **settings)
            return lambda *columns: criterion.compute_loss_from_embeddings(list(columns), None)

        return loss

    for dtype in (torch.float32, torch.bfloat16):
        yield (
            f"retrieval: 1024 queries, 8192 documents x 1024, {str(dtype).removeprefix('torch.')}",
            embeddings(*[1024] * 9, width=1024, dtype=dtype),
            contenders(
                "sentence_transformers", "sentence_transformers.losses", make_ranking(), ranking,
                lambda query, *documents: infonce.torch.info_nce_loss(
                    query, torch.cat(documents), scale=SCALE, normalize=True
                ),
            ),
        )  # fmt: skip
    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    yield (
        "retrieval, all directions: 4096 pairs x 1024, float32",
        embeddings(4096, 4096, width=1024),
        contenders(
            "sentence_transformers", "sentence_transformers.losses",
            make_ranking(directions=directions), all_directions,
            lambda query, document: F.softplus(
                infonce.torch.gte_loss(
                    query, document, scale=SCALE, normalize=True, reduction="none"
                )
            ).mean(),
        ),
    )  # fmt: skip
    yield (
        "SimCLR: 2 x 2048 views x 128, float32",
        embeddings(2048, 2048, width=128),
        contenders(
            "lightly", "lightly.loss", lambda module: module.NTXentLoss(TEMPERATURE), nt_xent,
            lightly.NTXentLoss(TEMPERATURE),
        ),
    )  # fmt: skip
    rows = torch.arange(4096 // part, device=device)
    options = {"temperature": TEMPERATURE, "normalize": True}
    samples = rows % (len(rows) // 2)

    def labelled(kind: str, labels: Any) -> Callable[[Any], Loss]:
        return lambda module: lambda z: getattr(module, kind)(TEMPERATURE)(z, labels)

    yield (
        "NTXentLoss of 2048 labels: 4096 rows x 128, float32",
        embeddings(4096, width=128),
        contenders(
            "pytorch_metric_learning", "pytorch_metric_learning.losses",
            labelled("NTXentLoss", samples), lambda z: metric_nt_xent(z, samples),
            lambda z: infonce.torch.nt_xent_loss(z, **options),
        ),
    )  # fmt: skip
    for n, width in ((4096, 128), (8192, 512)):
        classes = torch.arange(n // part, device=device) % 1000
        yield (
            f"SupConLoss of 1000 classes: {n} rows x {width}, float32",
            embeddings(n, width=width),
            contenders(
                "pytorch_metric_learning", "pytorch_metric_learning.losses",
                labelled("SupConLoss", classes), lambda z, labels=classes: sup_con(z, labels),
                lambda z, labels=classes: infonce.torch.sup_con_loss(z, labels, **options),
            ),
        )  # fmt: skip


# --- measurement ----------------------------------------------------------------------------------


def measured(bench: Device, embeddings: Sequence[Any], loss: Loss) -> dict[str, Any]:
    def step() -> Any:
        for z in embeddings:
            z.grad = None
        value = loss(*embeddings)
        value.backward()
        return value.detach(), [z.grad for z in embeddings]

    times = [bench.elapsed(step, 1)[0] for _ in range(REPEATS + 3)]
    value = float(step()[0])
    for z in embeddings:
        z.grad = None
    return {"loss": value, "median_s": statistics.median(times[3:]), **bench.memory("", step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "clients.json")
    arguments = parser.parse_args()
    bench = Device("float32")
    described = bench.describe()
    report = {
        "date": machine.now(),
        "commit": machine.commit(),
        "device": described["device"],
        "versions": described["versions"]
        | machine.versions("sentence-transformers", "lightly", "pytorch-metric-learning"),
        "settings": {"scale": SCALE, "temperature": TEMPERATURE},
        "results": [],
    }
    for name, embeddings, losses in steps():
        for contender, loss in losses:
            row = {"step": name, "loss by": contender}
            try:
                row |= measured(bench, embeddings, loss)
            except Exception as error:  # other projects' code fails in many ways
                row["skipped"] = ". ".join(f"{type(error).__name__}: {error}".split(". ")[:2])[:200]
            print(row, flush=True)
            report["results"].append(row)
            arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
