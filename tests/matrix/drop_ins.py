"""Drop-in replacements beside the losses whose place they take, in calls drawn at random.

    python tests/matrix/drop_ins.py [NAME ...] [--calls 400] [--seed 0]

Prints a table of calls and faults by drop-in, and every fault with its settings. Sizes, settings,
keywords, dtypes, labels with -1 and autocast are drawn. A loss and its gradients are compared with
the published equation in float64 over the whole matrix, or with the project's own loss in float64
where a drop-in is a subclass of it; open_clip's and lightly's own losses too if installed.

The bound of an error is counted, not tuned. A logit is a dot product of D terms, times the scale s,
of rows of norm R: its rounding error is at most e = (D + 4) u s R^2, with u the rounding of the
dtype of the loss, and of features in 16 bits where a drop-in normalises them before. A row's loss
has two sums of logits (SigLIP's one for each key), and a gradient is s R times probabilities, which
err by as much, plus a rounding for each of N terms, over the smallest norm of rows.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infonce.torch import (
    colpali_engine,
    inf_cl,
    infonce_cuda,
    lightly,
    memory_efficient_clip,
    open_clip,
    siglip_kernel,
    sup_contrast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # peers
SIXTEEN = (torch.float16, torch.bfloat16)
DTYPES = (torch.float64, torch.float32, *SIXTEEN)
LARGEST_NORM, LEAST_NORM = 2.0, 0.5  # of rows


@dataclass
class Case:
    """One call: the drop-in's loss and the references', as functions of the inputs."""

    ours: Callable[..., Tensor]
    references: Sequence[Callable[..., Tensor]]  # of the same inputs in float64
    inputs: list[Tensor]  # features and then numbers, which all may have a gradient
    scale: float
    terms: int = 1  # logits of a row whose errors add up, instead of the largest of them
    rounded: bool = False  # whether rows are normalised in the dtype of the features
    settings: dict[str, Any] = field(default_factory=dict)


# --- equations ------------------------------------------------------------------------------------


def unit(z: Tensor) -> Tensor:
    return F.normalize(z, dim=-1)


def row_losses(
    products: Tensor, positives: Tensor, scale: Any, candidates: Tensor | None = None, *,
    margin: float = 0.0, decoupled: bool = False, label_smoothing: float = 0.0,
    hardness: float = 0.0,
) -> Tensor:  # fmt: skip
    """Loss of each row of dot products [M, N]. `positives` and `candidates` [M, N] are masks:
    of its positives, and of all keys of its softmax. A row without a positive has loss 0."""
    candidates = torch.ones_like(positives) if candidates is None else candidates
    negative = scale * products + hardness * products.detach()
    x = torch.where(positives, scale * (products - margin), negative)
    counted = candidates & ~positives if decoupled else candidates
    log_sum = x.masked_fill(~counted, -torch.inf).logsumexp(1)
    target = x.masked_fill(~positives, 0).sum(1) / positives.sum(1).clamp(min=1)
    spread = x.masked_fill(~candidates, 0).sum(1) / candidates.sum(1)
    target = (1 - label_smoothing) * target + label_smoothing * spread
    return torch.where(positives.any(1), log_sum - target, 0.0)


def reduced(losses: Tensor, reduction: str = "mean", weights: Tensor | None = None) -> Tensor:
    if weights is not None:
        losses = losses * weights
    if reduction == "mean":
        return losses.sum() / (len(losses) if weights is None else weights.sum())
    return losses.sum() if reduction == "sum" else losses


def both_ways(products: Tensor, scale: Any, **options: Any) -> Tensor:
    """CLIP's loss of each pair."""
    eye = torch.eye(len(products), dtype=torch.bool)
    ways = [row_losses(p, eye, scale, **options) for p in (products, products.T)]
    return (ways[0] + ways[1]) / 2


def two_views(z: Tensor, scale: Any, **options: Any) -> Tensor:
    """NT-Xent's loss of each row."""
    number = torch.arange(len(z))
    partner = (number + len(z) // 2) % len(z)
    positives, others = number == partner[:, None], number != number[:, None]
    return row_losses(z @ z.T, positives, scale, others, **options)


def siglip(products: Tensor, scale: Any, bias: Any) -> Tensor:
    """SigLIP's loss of each image."""
    signs = 2 * torch.eye(len(products), dtype=products.dtype) - 1
    return -F.logsigmoid(signs * (scale * products + bias)).sum(1)


def qwen3(
    query: Tensor, documents: Tensor, own: Tensor | None, scale: Any, limit: float, sets: str,
    ids: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Qwen3's loss of each row of unit rows; `sets`: whether queries and documents are negatives.
    Negatives whose cosine is `limit` above the positive's are left out, with a limit below 2."""
    number = torch.arange(len(query)) if ids is None else ids
    eye = torch.eye(len(query), dtype=torch.bool)
    other = number != number[:, None]
    blocks = [query @ documents.T]
    masks = [other | eye if ids is not None else torch.ones_like(eye)]
    for name, z in (("q", query), ("d", documents)):
        if name in sets:
            blocks.append(z @ z.T)
            masks.append(other)
    if own is not None:
        blocks.append(torch.einsum("nd,nkd->nk", query, own))
        masks.append(torch.ones(own.shape[:2], dtype=torch.bool))
    products, candidates = torch.cat(blocks, 1), torch.cat(masks, 1)
    positives = torch.zeros_like(candidates)
    positives[:, : len(query)] = eye
    if limit < 2:
        near = products > (query * documents).sum(1, keepdim=True) + limit
        candidates = candidates & (positives | ~near)
    return row_losses(products, positives, scale, candidates, **options)


def maxsim(query: Tensor, documents: Tensor) -> Tensor:
    """MaxSim of queries [M, L, D] and documents [N, L', D], or own ones of each [M, N, L', D]."""
    own = documents.ndim == 4
    products = torch.einsum("mad,mncd->mnac" if own else "mad,ncd->mnac", query, documents)
    return products.amax(3).sum(2)


# --- draws ----------------------------------------------------------------------------------------


class Draw(random.Random):
    """Random numbers of a call. Each drop-in has a method, which returns a `Case`."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(self.getrandbits(31))
        self.dtype = self.choice(DTYPES)
        self.rows, self.width = self.randint(2, 24), self.choice((1, 2, 5, 16, 33))
        self.temperature = self.choice((0.05, 0.1, 0.5, 1.0))

    def features(self, rows: int | None = None, normed: bool = False, width: int = 0) -> Tensor:
        """Features of the call's dtype, whose rows have unit norm or norms of 0.5 to 2."""
        shape = self.rows if rows is None else rows, width or self.width
        z = unit(torch.randn(shape, dtype=torch.float64, generator=self.generator))
        if not normed:
            z = z * torch.empty(len(z), 1).uniform_(
                LEAST_NORM, LARGEST_NORM, generator=self.generator
            )
        return z.to(self.dtype)

    def tokens(self, *rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Sets of tokens, and which of them are no padding."""
        lengths = torch.randint(1, length + 1, (*rows, 1), generator=self.generator)
        z = self.features(math.prod(rows) * length).unflatten(0, (*rows, length))
        return z, torch.arange(length) < lengths

    def number(self, value: float) -> Tensor:
        """A number as a tensor: 0-d or [1], float64 with features of float64."""
        dtype = self.choice((torch.float32, torch.float64))
        dtype = torch.float64 if self.dtype == torch.float64 else dtype
        return torch.tensor(self.choice((value, [value])), dtype=dtype)

    def integers(self, rows: int, low: int, high: int) -> Tensor:
        out = torch.randint(low, high, (rows,), generator=self.generator)
        return out.to(self.choice((torch.int64, torch.int32)))

    def some(self, **options: Any) -> dict[str, Any]:
        """One of these keywords, or none."""
        names = self.sample(list(options), self.randint(0, 1))
        return {name: options[name] for name in names}

    def plain(self) -> dict[str, Any]:
        """A keyword that changes no loss."""
        return self.some(
            method=self.choice(("naive", "fused", "tiled")), check_finite=True, precision="auto",
            workspace=self.choice(("1MiB", 1 << 20)),
        )  # fmt: skip

    def softmax(self) -> dict[str, Any]:
        """A keyword of the softmax."""
        return self.some(margin=0.2, hardness=self.choice((0.5, 2.0)), label_smoothing=0.1)

    def reducing(self, rows: int, *refused: str) -> dict[str, Any]:
        weights = torch.rand(rows, generator=self.generator, dtype=torch.float64) + 0.1
        out = self.some(reduction=self.choice(("sum", "none")), weights=weights)
        return {name: value for name, value in out.items() if name not in refused}

    # open_clip ------------------------------------------------------------------------------------

    def clip(self) -> Case:
        softmax, reducing, plain = self.softmax(), self.reducing(self.rows), self.plain()
        loss = open_clip.ClipLoss(**softmax, **reducing, **plain)
        # a bias that all logits share changes nothing; it is an input, whose gradient is 0
        inputs = [self.features(normed=True), self.features(normed=True), self.number(10.0)]
        inputs += [self.number(-3.0)] if self.random() < 0.5 else []

        def equation(image: Tensor, text: Tensor, scale: Tensor, bias: Any = None) -> Any:
            loss = reduced(both_ways(image @ text.T, scale, **softmax), **reducing)
            return loss if bias is None else loss + 0 * bias.sum()

        references = [equation]
        if not (softmax or reducing) and (theirs := peer("open_clip.loss", "ClipLoss")):
            references.append(
                lambda image, text, scale, *bias: theirs()(image, text, scale) + 0 * sum(bias)
            )
        return Case(loss, references, inputs, 10.0, settings={**softmax, **reducing, **plain})

    def open_clip_siglip(self) -> Case:
        reducing, plain = self.reducing(self.rows), self.plain()
        inputs = [self.features(normed=True), self.features(normed=True), self.number(10.0)]
        inputs += [self.number(-5.0)] if self.random() < 0.7 else []

        def equation(image: Tensor, text: Tensor, scale: Tensor, bias: Any = 0.0) -> Tensor:
            return reduced(siglip(image @ text.T, scale, bias), **reducing)

        references = [equation]
        if len(inputs) > 3 and not reducing and (theirs := peer("open_clip.loss", "SigLipLoss")):
            references.append(lambda *inputs: theirs()(*inputs))
        settings = {**reducing, **plain}
        loss = open_clip.SigLipLoss(**settings)
        return Case(loss, references, inputs, 10.0, self.rows, settings=settings)

    def coca(self) -> Case:
        softmax = self.softmax()
        logits = torch.randn(self.rows, 3, 7, generator=self.generator, dtype=torch.float64)
        labels = torch.randint(7, (self.rows, 3), generator=self.generator)
        labels[0, 0] = 1
        loss = open_clip.CoCaLoss(2.0, 0.5, **softmax)
        inputs = [self.features(normed=True), self.features(normed=True), self.number(10.0)]

        def ours(image: Tensor, text: Tensor, scale: Tensor) -> Any:
            return sum(loss(image, text, logits, labels, scale))

        def equation(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
            caption = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
            return reduced(both_ways(image @ text.T, scale, **softmax)) / 2 + 2 * caption

        return Case(ours, [equation], inputs, 10.0, settings=softmax)

    def distill(self) -> Case:
        settings = {**self.reducing(self.rows), **self.some(normalize=True)}
        normalize = bool(settings.get("normalize"))
        reducing = {n: value for n, value in settings.items() if n != "normalize"}
        teacher = [self.features(normed=True, width=4) for _ in range(2)]
        inputs = [self.features(normed=not normalize) for _ in range(2)] + [self.number(10.0)]

        def equation(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
            wide = [z.double() for z in teacher]
            if normalize:
                image, text, *wide = (unit(z) for z in (image, text, *wide))
            x, t = image @ text.T, 5.0 * wide[0] @ wide[1].T
            ways = [
                -(b.softmax(1) * (scale * a).log_softmax(1)).sum(1) for a, b in ((x, t), (x.T, t.T))
            ]
            return reduced(both_ways(x, scale), **reducing) + reduced(sum(ways) / 2, **reducing)

        def ours(*inputs: Tensor) -> Any:
            return sum(open_clip.DistillClipLoss(**settings)(*inputs, *teacher, 5.0))

        return Case(ours, [equation], inputs, 10.0, 2, settings=settings)

    # lightly --------------------------------------------------------------------------------------

    def lightly_nt_xent(self) -> Case:
        softmax, reducing = self.softmax(), self.reducing(2 * self.rows)
        bank = self.choice((0, 0, (9, self.width)))
        if bank and "weights" in reducing:
            reducing["weights"] = reducing["weights"][: self.rows]
        settings = {**softmax, **reducing, **self.plain()}
        torch.manual_seed(0)
        loss = lightly.NTXentLoss(self.temperature, bank, **settings)
        scale = 1 / self.temperature
        keys = loss.memory_bank.bank.clone().to(self.dtype) if bank else None

        def equation(a: Tensor, b: Tensor) -> Tensor:
            a, b = unit(a), unit(b)
            if keys is None:
                return reduced(two_views(torch.cat([a, b]), scale, **softmax), **reducing)
            products = torch.cat([(a * b).sum(1, keepdim=True), a @ unit(keys.double()).T], 1)
            positives = torch.arange(products.shape[1]).expand_as(products) == 0
            return reduced(row_losses(products, positives, scale, **softmax), **reducing)

        references = [equation]
        if not (softmax or reducing or bank) and (theirs := peer("lightly.loss", "NTXentLoss")):
            references.append(theirs(self.temperature))

        def ours(a: Tensor, b: Tensor) -> Tensor:
            if keys is not None:
                loss.memory_bank.bank.copy_(keys)
            return loss(a, b)  # type: ignore[no-any-return]

        inputs = [self.features(), self.features()]
        return Case(ours, references, inputs, scale, settings={"bank": bank, **settings})

    def dcl(self) -> Case:
        weighted = self.choice(("", "function", "DCLW"))
        hard = self.some(hardness=1.0)
        reducing = {} if weighted else self.reducing(2 * self.rows)
        settings, scale = {**hard, **reducing, **self.plain()}, 1 / self.temperature
        weight: Any = None
        if weighted == "DCLW":
            loss: Any = lightly.DCLWLoss(self.temperature, 0.7, **settings)
            weight = lambda a, b: 2 - len(a) * ((a * b).detach().sum(1) / 0.7).softmax(0)  # noqa: E731
        elif weighted:
            weight = lambda a, b: (a[:, 0] - b[:, -1]) ** 2  # noqa: E731
            loss = lightly.DCLLoss(self.temperature, weight, **settings)
        else:
            loss = lightly.DCLLoss(self.temperature, **settings)

        def equation(a: Tensor, b: Tensor) -> Tensor:
            a, b = unit(a), unit(b)
            losses = two_views(torch.cat([a, b]), scale, decoupled=True, **hard)
            if weight is not None:
                weights = torch.cat([weight(a, b), weight(b, a)])
                losses = losses + (1 - weights) * scale * (a * b).sum(1).repeat(2)
            return reduced(losses, **reducing)

        references = [equation]
        name = "DCLWLoss" if weighted == "DCLW" else "DCLLoss"
        if not settings and weighted != "function" and (theirs := peer("lightly.loss", name)):
            references.append(theirs(self.temperature, *([0.7] if weighted else [])))
        inputs, terms = [self.features(), self.features()], self.rows if weighted else 1
        settings = {"weighted": weighted, **settings}
        return Case(loss, references, inputs, scale, terms, settings=settings)

    # pytorch-metric-learning ----------------------------------------------------------------------

    def metric_learning(self, name: str, pairs: bool) -> Case:
        from pytorch_metric_learning import distances, losses

        from infonce.torch import pytorch_metric_learning as ours

        labels = self.integers(self.rows, -1, self.choice((0, 1, 3, 9)))
        arguments: dict[str, Any] = {}
        inputs, kind = [self.features()], self.choice(("alone", "labels", "same", "equal", "other"))
        if kind != "alone":
            rows = self.randint(2, 20) if kind == "other" else self.rows
            inputs.append(self.features(rows))
            other = self.integers(rows, -1, 4)
            arguments["ref_labels"] = {"same": labels, "equal": labels.clone()}.get(kind, other)
            if kind == "labels":  # the embeddings themselves, with labels of their own
                inputs.pop()
        cosine = self.random() < 0.7
        settings: dict[str, Any] = {} if cosine else {
            "distance": distances.DotProductSimilarity(normalize_embeddings=False)
        }  # fmt: skip

        def run(module: Any) -> Callable[..., Tensor]:
            def call(z: Tensor, other: Tensor | None = None) -> Tensor:
                if kind != "alone":
                    arguments["ref_emb"] = z if other is None else other
                return getattr(module, name)(self.temperature, **settings)(z, labels, **arguments)  # type: ignore[no-any-return]

            return call

        terms = self.rows if pairs else 1
        return Case(run(ours), [run(losses)], inputs, 1 / self.temperature, terms,
                    settings={"refs": kind, "labels": labels.tolist(), **arguments})  # fmt: skip

    def metric_sup_con(self) -> Case:
        return self.metric_learning("SupConLoss", False)

    def metric_nt_xent(self) -> Case:
        self.rows = min(self.rows, 12)  # theirs takes the third power of rows
        # theirs adds the least number of the dtype, so that a loss ends at 708 in float64
        return self.metric_learning("NTXentLoss", True)

    def metric_memory(self) -> Case:
        from pytorch_metric_learning import losses

        from infonce.torch import pytorch_metric_learning as ours

        self.rows = max(2, min(self.rows, 12))
        name = self.choice(("SupConLoss", "NTXentLoss"))
        size, calls = self.randint(self.rows, 30), self.randint(1, 4)
        labels = [self.integers(self.rows, -1, self.choice((0, 1, 3, 9))) for _ in range(calls)]
        mask = self.integers(self.rows, 0, 2).bool() if self.random() < 0.4 else None
        earlier = [self.features() for _ in labels[1:]]

        def run(module: Any) -> Callable[..., Tensor]:
            def call(z: Tensor) -> Tensor:
                loss = getattr(module, name)(self.temperature)
                memory = module.CrossBatchMemory(loss, self.width, size)
                batches = zip([*earlier, z], labels, strict=True)
                *_, last = (memory(rows.to(z.dtype), y, enqueue_mask=mask) for rows, y in batches)
                return last + 0 * z.sum()  # with no pair at all, a number without a gradient

            return call

        settings = {"name": name, "size": size, "labels": labels, "mask": mask}
        return Case(run(ours), [run(losses)], [self.features()], 1 / self.temperature,
                    self.rows if name == "NTXentLoss" else 1, settings=settings)  # fmt: skip

    # SupContrast, Inf-CL, siglip-kernel, the CUDA report ------------------------------------------

    def sup_contrast(self) -> Case:
        views, samples = self.randint(1, 3), self.rows
        labels = self.choice((None, self.integers(samples, -1, 4))) if views > 1 else (
            self.integers(samples, -1, 4))  # fmt: skip
        if labels is not None:
            labels[0] = 9  # two classes at least: a decoupled loss without a negative is -inf
        settings = {"contrast_mode": self.choice(("all", "one")), **self.some(decoupled=True)}
        settings |= self.plain()
        loss = sup_contrast.SupConLoss(self.temperature, **settings)
        inputs, scale = [self.features(samples * views, normed=True)], 1 / self.temperature

        def equation(z: Tensor) -> Tensor:
            rows = torch.cat(list(z.unflatten(0, (samples, views)).unbind(1)))
            classes = (torch.arange(samples) if labels is None else labels).repeat(views)
            others = ~torch.eye(len(rows), dtype=torch.bool)
            positives = (classes[:, None] == classes) & others
            decoupled = bool(settings.get("decoupled"))
            losses = row_losses(rows @ rows.T, positives, scale, others, decoupled=decoupled)
            anchors = samples * (views if settings["contrast_mode"] == "all" else 1)
            return self.temperature / 0.07 * losses[:anchors].mean()

        return Case(
            lambda z: loss(z.unflatten(0, (samples, views)), labels), [equation], inputs, scale,
            settings={"labels": labels, **settings},
        )  # fmt: skip

    def inf_cl(self) -> Case:
        name = self.choice(("cal_flash_loss", "cal_ring_loss", "cal_inf_loss"))
        softmax, reducing = self.softmax(), self.reducing(self.rows)
        keys = self.randint(self.rows, 30)
        labels = self.choice((None, self.integers(self.rows, -1, keys)))
        if labels is not None:
            labels[0] = 0  # a row with a positive
        arguments = {"labels": labels, **softmax, **reducing, **self.plain()}
        inputs = [self.features(normed=True), self.features(keys, normed=True), self.number(10.0)]

        def equation(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
            of = torch.arange(len(q)) if labels is None else labels
            positives = torch.arange(len(k)) == of[:, None]
            losses = row_losses(q @ k.T, positives, scale, **softmax)
            options = {"reduction": "none" if name == "cal_flash_loss" else "mean", **reducing}
            if options["reduction"] == "mean":  # rows without a positive have no weight
                has = positives.any(1).double()
                options["weights"] = options.get("weights", torch.ones(len(q))) * has
            return reduced(losses, **options)

        return Case(
            lambda q, k, scale: getattr(inf_cl, name)(q, k, scale=scale, **arguments), [equation],
            inputs, 10.0, settings={"name": name, **arguments},
        )  # fmt: skip

    def siglip_kernel(self) -> Case:
        inputs = [self.features(normed=True) for _ in range(2)]
        inputs += [self.number(2.0), self.number(-4.0)]
        reducing, name = self.reducing(self.rows), self.choice(("fused", "Distributed"))
        settings = {**reducing, **self.plain()}

        def ours(image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor) -> Any:
            if name == "fused":
                return siglip_kernel.fused_siglip_loss(image, text, log_scale, bias, **settings)
            loss = siglip_kernel.DistributedSigLIPLoss(strategy="local", **settings)
            return loss(image, text, log_scale.exp(), bias)

        def equation(image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
            return reduced(siglip(image @ text.T, log_scale.exp(), bias), **reducing)

        return Case(ours, [equation], inputs, 8.0, self.rows, settings={"name": name, **settings})

    def siglip_plus(self) -> Case:
        captions, settings = self.randint(1, 30), self.some(reduction="sum")
        groups = [self.integers(n, 0, 5) for n in (self.rows, captions)]
        inputs = [self.features(normed=True), self.features(captions, normed=True)]
        inputs += [self.number(2.0), self.number(-4.0)]

        def equation(image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
            t = (groups[0][:, None] == groups[1]).double()
            weights = (1 / t.sum(1, keepdim=True).clamp(min=1) + 1 / t.sum(0).clamp(min=1)) / 2
            x = log_scale.exp() * image @ text.T + bias
            terms = -F.logsigmoid((2 * t - 1) * x) * torch.where(t > 0, weights, 1.0)
            return terms.sum() if settings else terms.mean()

        return Case(
            lambda *inputs: siglip_kernel.fused_siglip_plus_loss(*inputs, *groups, **settings),
            [equation], inputs, 8.0, captions, settings=settings,
        )  # fmt: skip

    def infonce_cuda(self) -> Case:
        softmax, reducing = self.softmax(), self.reducing(2 * self.rows)
        settings, scale = {**softmax, **reducing}, 1 / self.temperature
        loss = infonce_cuda.InfoNCELoss(self.temperature, **settings)
        return Case(
            loss, [lambda z: reduced(two_views(z, scale, **softmax), **reducing)],
            [self.features(2 * self.rows, normed=True)], scale, settings=settings,
        )  # fmt: skip

    # MemoryEfficientCLIP --------------------------------------------------------------------------

    def memory_efficient(
        self, name: str, run: Callable[..., Tensor], inputs: list[Tensor],
        settings: dict[str, Any], prefixes: bool, **more: Any,
    ) -> Case:  # fmt: skip
        """A loss of MemoryEfficientCLIP, or of prefixes. `run(inputs)`: each row's loss."""
        reducing = self.reducing(self.rows, *(["weights"] if prefixes else []))
        stable = self.random() < 0.5
        factor = (self.rows * self.temperature) ** 0.5 if stable else 1.0
        widths: tuple[int, ...] = (self.width,)
        settings = {"temperature": self.temperature, "stable": stable, **settings, **reducing}
        if prefixes:
            settings["dims"] = widths = tuple(sorted({self.randint(1, self.width), self.width}))
        settings |= self.plain()
        kind = f"MemoryEfficient{'Matryoshka' if prefixes else ''}{name}Loss"
        loss = getattr(memory_efficient_clip, kind)(**settings)

        def equation(*inputs: Tensor) -> Tensor:
            total: Any = 0.0
            for width in widths:
                total = total + reduced(run(*(unit(z[..., :width]) for z in inputs)), **reducing)
            return total.detach() + factor * (total - total.detach())  # type: ignore[no-any-return]

        terms = max(1, round(len(widths) * factor + 0.5))
        return Case(loss, [equation], inputs, 1 / self.temperature, terms,
                    settings={"kind": kind, **settings}, **more)  # fmt: skip

    def memory_efficient_pairs(self) -> Case:
        lit, smooth = self.random() < 0.5, self.choice((0.0, 0.0, 0.1))

        def run(a: Tensor, b: Tensor) -> Tensor:
            scale, options = 1 / self.temperature, {"label_smoothing": smooth}
            if not lit:
                return both_ways(a @ b.T, scale, **options)
            eye = torch.eye(len(a), dtype=torch.bool)
            return row_losses(a @ b.detach().T, eye, scale, **options)

        inputs, prefixes = [self.features(), self.features()], self.random() < 0.3
        settings = {"label_smoothing": smooth}
        return self.memory_efficient("LiT" if lit else "CLIP", run, inputs, settings, prefixes)

    def memory_efficient_qwen3(self) -> Case:
        lit, limit = self.random() < 0.3, self.choice((-0.3, 0.1, 2.0, float("inf")))
        sets = self.choice(("", "q")) if lit else self.choice(("", "q", "d", "qd"))
        hard = self.randint(0, 3)
        settings: dict[str, Any] = {"margin": limit, "use_qq_negatives": "q" in sets}
        if not lit:
            settings["use_dd_negatives"] = "d" in sets
        options = self.some(hardness=0.5, decoupled=True, label_smoothing=0.1)
        if "label_smoothing" in options and (hard or limit < 2):
            options = {}
        if "decoupled" in options and limit < 2:  # a row may have no negative, and the loss -inf
            options = {}
        ids = self.integers(self.rows, 0, 6) if not sets and self.random() < 0.3 else None
        if ids is not None and "label_smoothing" not in options:
            settings["ids"] = ids
        prefixes = "d" not in sets and self.random() < 0.3
        inputs = [self.features(), self.features()]
        if hard or self.random() < 0.5:  # also none of each query
            inputs.append(self.features(self.rows * hard).unflatten(0, (self.rows, hard)))

        def run(q: Tensor, d: Tensor, own: Tensor | None = None) -> Tensor:
            if lit:
                d, own = d.detach(), None if own is None else own.detach()
            named = {"ids": settings["ids"].long()} if "ids" in settings else {}
            return qwen3(q, d, own, 1 / self.temperature, limit, sets, **named, **options)

        settings |= options
        return self.memory_efficient(
            "LiTQwen3" if lit else "Qwen3", run, inputs, settings, prefixes, rounded="d" in sets
        )

    # sentence-transformers ------------------------------------------------------------------------

    def ranking(self) -> Case:
        from sentence_transformers import losses, util

        from infonce.torch import sentence_transformers as ours

        columns = self.randint(2, 4)
        self.rows = self.choice((1, *[self.rows] * 4))
        joint = self.random() < 0.6
        others = ["doc_to_query"] + (["query_to_query", "doc_to_doc"] if joint else [])
        directions = self.sample(others, self.choice((len(others), self.randint(0, len(others)))))
        dot = self.random() < 0.3
        settings: dict[str, Any] = {
            "scale": 1 / self.temperature, "directions": ("query_to_doc", *directions),
            "partition_mode": "joint" if joint else "per_direction",
            "similarity_fct": util.dot_score if dot else util.cos_sim,
        }  # fmt: skip
        if self.random() < 0.4:
            modes = ["in_batch_negatives"] + (
                ["hard_negatives", "all_negatives"] if columns > 2 else []
            )
            settings |= {"hardness_mode": self.choice(modes), "hardness_strength": 2.0}

        def run(module: Any) -> Callable[..., Tensor]:
            loss = module.MultipleNegativesRankingLoss(torch.nn.Identity(), **settings)
            return lambda *columns: loss.compute_loss_from_embeddings(list(columns), None)  # type: ignore[no-any-return]

        inputs = [self.features() for _ in range(columns)]
        scale = 1 / self.temperature + settings.get("hardness_strength", 0.0)
        return Case(run(ours), [run(losses)], inputs, scale, 2, settings=settings)

    # late interaction -----------------------------------------------------------------------------

    def late_interaction(
        self, ours: Any, query_mask: Tensor, masks: Sequence[Tensor], mean: bool, padded: bool,
        settings: dict[str, Any], inputs: list[Tensor],
    ) -> Case:  # fmt: skip
        """A loss of queries and columns of documents. `padded`: padding of documents has products
        of 0, and without it is left out. `ours` takes tokens of unit norm."""
        scale = settings["scale"]

        def equation(query: Tensor, *columns: Tensor) -> Tensor:
            query = unit(query) * query_mask[..., None]
            scores = []
            for z, mask in zip(columns, masks, strict=True):
                z = unit(z) * mask[..., None]
                # of a token that is left out, the first one takes the place
                if not padded:
                    z = torch.where(mask[..., None], z, z[:, :1])
                scores.append(maxsim(query, z))
            s = torch.cat(scores, 1)
            s = s / query_mask.sum(1, keepdim=True) if mean else s
            positives = torch.arange(s.shape[1]) == torch.arange(len(s))[:, None]
            return reduced(row_losses(s, positives, scale), settings.get("reduction", "mean"))

        return Case(ours, [equation], inputs, scale * query_mask.shape[1], rounded=True,
                    settings=settings)  # fmt: skip

    def columns(self) -> tuple[list[Tensor], list[Tensor]]:
        """Queries and one to three columns of documents of one length, and their masks."""
        self.width = max(self.width, 5)  # of fewer features, tokens are equal, and either may win
        length = self.randint(1, 9)
        pairs = [self.tokens(self.rows, length=self.randint(1, 5))]
        pairs += [self.tokens(self.rows, length=length) for _ in range(self.randint(1, 3))]
        tokens, masks = zip(*pairs, strict=True)
        return list(tokens), list(masks)

    def multi_vector(self) -> Case:
        from sentence_transformers.multi_vector_encoder import scoring

        from infonce.torch.sentence_transformers import multi_vector

        (query, *columns), (query_mask, *masks) = self.columns()
        mean, scale = self.random() < 0.5, 1 / self.temperature
        loss = multi_vector.MultiVectorMultipleNegativesRankingLoss(
            torch.nn.Identity(), scale=scale,
            similarity_fct=scoring.mean_colbert_scores if mean else scoring.colbert_scores,
        )  # fmt: skip

        def ours(query: Tensor, *columns: Tensor) -> Any:
            units = [unit(z) for z in columns]
            return multi_vector.late_ranking_loss(loss, unit(query), query_mask, units, masks)

        settings = {"scale": scale, "mean": mean}
        return self.late_interaction(
            ours, query_mask, masks, mean, False, settings, [query, *columns]
        )

    def pylate(self) -> Case:
        from infonce.torch import pylate

        (query, *columns), masks = self.columns()
        expanded, reduction = self.random() < 0.5, self.choice(("mean", "sum"))
        encoder = torch.nn.Identity()
        encoder.skiplist, encoder.do_query_expansion = (), expanded  # type: ignore[assignment]
        loss = pylate.Contrastive(
            encoder, temperature=self.temperature, size_average=reduction == "mean"
        )

        def ours(*tokens: Tensor) -> Any:
            return pylate.contrastive_loss(loss, [unit(z) for z in tokens], masks)

        query_mask = torch.ones_like(masks[0]) if expanded else masks[0]
        settings = {"scale": 1 / self.temperature, "reduction": reduction}
        return self.late_interaction(
            ours, query_mask, masks[1:], False, True, settings, [query, *columns]
        )

    def colpali(self) -> Case:
        self.width = max(self.width, 5)
        late = self.random() < 0.6
        name = self.choice(("SigmoidLoss", "NegativeCELoss", "Loss" if late else "EncoderLoss"))
        several = self.randint(1, 3)
        offset = self.rows * self.randint(0, several - 1)
        shapes = [(self.rows,), (self.rows * several,), (self.rows, self.randint(1, 3))]
        shapes = shapes if name == "NegativeCELoss" else shapes[:2]
        if late:
            pairs = [self.tokens(*rows, length=self.randint(1, 6)) for rows in shapes]
        else:
            wide = [self.features(math.prod(rows)).unflatten(0, rows) for rows in shapes]
            pairs = [(z, torch.ones(z.shape[:-1], dtype=torch.bool)) for z in wide]
        inputs, masks = (list(side) for side in zip(*pairs, strict=True))
        settings: dict[str, Any] = {"temperature": self.temperature}
        mean = late and self.random() < 0.5
        if late:
            settings["normalize_scores"] = mean
        weight = self.choice((0.0, 0.3, 1.0))
        if name == "NegativeCELoss":
            settings["in_batch_term_weight"] = weight
        loss = getattr(colpali_engine, ("Colbert" if late else "Bi") + name)(**settings)

        def padded(features: Sequence[Tensor]) -> list[Tensor]:
            return [z * mask[..., None] for z, mask in zip(features, masks, strict=True)]

        def ours(*features: Tensor) -> Any:
            return loss(*padded(features), offset=offset)

        def equation(*features: Tensor) -> Tensor:
            query, documents, *negatives = [
                z if late else z[..., None, :] for z in padded(features)
            ]
            size = masks[0].sum(1, keepdim=True) if mean else 1
            products, scale = maxsim(query, documents) / size, 1 / self.temperature
            positives = torch.arange(len(documents)) == offset + torch.arange(len(query))[:, None]
            if name == "SigmoidLoss":
                return -F.logsigmoid(torch.where(positives, scale, -scale) * products).mean()
            batch = row_losses(products, positives, scale).mean()
            if not negatives:
                return batch
            own = scale * maxsim(query, negatives[0]) / size
            pairs = F.softplus(own - scale * products[positives][:, None], threshold=1000)
            return (1 - weight) * pairs.mean() + weight * batch

        scale = 1 / self.temperature * (inputs[0].shape[1] if late else 1)
        settings = {"name": name, "late": late, "offset": offset, **settings}
        return Case(ours, [equation], inputs, scale, self.rows * several, settings=settings)


DRAWS = {
    # first, because it looks at the packages for which `peer` has stand-ins
    "sentence_transformers: ranking": Draw.ranking,
    "sentence_transformers: tokens": Draw.multi_vector,
    "pylate": Draw.pylate,
    "colpali_engine": Draw.colpali,
    "open_clip.ClipLoss": Draw.clip, "open_clip.SigLipLoss": Draw.open_clip_siglip,
    "open_clip.CoCaLoss": Draw.coca, "open_clip.DistillClipLoss": Draw.distill,
    "lightly.NTXentLoss": Draw.lightly_nt_xent, "lightly.DCLLoss, DCLWLoss": Draw.dcl,
    "pytorch_metric_learning.SupConLoss": Draw.metric_sup_con,
    "pytorch_metric_learning.NTXentLoss": Draw.metric_nt_xent,
    "pytorch_metric_learning.CrossBatchMemory": Draw.metric_memory,
    "sup_contrast.SupConLoss": Draw.sup_contrast, "inf_cl": Draw.inf_cl,
    "siglip_kernel: SigLIP": Draw.siglip_kernel,
    "siglip_kernel: several captions": Draw.siglip_plus,
    "infonce_cuda.InfoNCELoss": Draw.infonce_cuda,
    "memory_efficient_clip: CLIP, LiT": Draw.memory_efficient_pairs,
    "memory_efficient_clip: Qwen3": Draw.memory_efficient_qwen3,
}  # fmt: skip


# --- comparison -----------------------------------------------------------------------------------


def peer(module: str, name: str) -> Any:
    """A class of a project that is installed; None if it is not. Its own needs may be missing."""
    if module not in sys.modules:
        from peers import StandIns

        missing = [n for n in ("torchvision", "timm", "ftfy") if not importlib.util.find_spec(n)]
        sys.meta_path.append(finder := StandIns(missing))
        try:
            importlib.import_module(module)
        except ImportError:
            return None
        finally:  # other projects ask whether these are installed
            sys.meta_path.remove(finder)
            for imported in [n for n in sys.modules if n.partition(".")[0] in missing]:
                del sys.modules[imported]
    return getattr(sys.modules[module], name)


def evaluate(
    loss: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """A loss and its gradients. A loss for each row is multiplied by different numbers first."""
    inputs = [z.detach().clone().requires_grad_() for z in inputs]
    out = loss(*inputs)
    total = (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return out.detach().double(), [
        None if gradient is None else gradient.double() for gradient in grads
    ]


def fault(case: Case, dtype: torch.dtype, autocast: bool) -> str:
    """What is wrong with the call; "" if nothing is."""
    features = [z for z in case.inputs if z.ndim > 1]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, grads = evaluate(case.ours, case.inputs)
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    own = torch.finfo(dtype).eps
    rows = sum(z[..., 0].numel() for z in features)
    error = (features[0].shape[-1] + 4) * case.scale * LARGEST_NORM**2
    error *= own if case.rounded else u
    for reference in case.references:
        want, wanted = evaluate(reference, [z.double() for z in case.inputs])
        if loss.numel() != want.numel():
            return f"shape {tuple(loss.shape)} is not {tuple(want.shape)}"
        # sums of losses have as many errors as rows
        many = case.terms * (1 if loss.ndim else rows)
        bound = 2 * many * error + 16 * u * (1 + want.abs().max())
        if not (loss.flatten() - want.flatten()).abs().max() <= bound:
            return f"loss {loss.flatten()[:4].tolist()} is not {want.flatten()[:4].tolist()}"
        for i, (g, w, z) in enumerate(zip(grads, wanted, case.inputs, strict=True)):
            if g is None or w is None:  # DDP waits for a gradient of 0, and for None it does not
                if g is not w:
                    return f"gradient {i} is {g}, not {w}"
                continue
            bound = many * case.scale * LARGEST_NORM / LEAST_NORM * (4 * error + 16 * rows * u)
            bound += 4 * max(torch.finfo(z.dtype).eps, u) * w.abs().max()
            bound += torch.finfo(z.dtype).tiny
            if not (g - w).abs().max() <= bound:
                return f"gradient {i} differs by {(g - w).abs().max():.3g} > {bound:.3g}"
    return ""


def faults(name: str, calls: int, seed: int) -> list[str]:
    """The faults of a number of calls of a drop-in."""
    out = []
    for number in range(calls):
        draw = Draw(f"{name} {seed} {number}")
        # autocast of a CPU has no float16: PyTorch's cat raises an error
        autocast = draw.random() < 0.3 and draw.dtype != torch.float16
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = None
            try:
                case = DRAWS[name](draw)
                settings = case.settings
                found = fault(case, draw.dtype, autocast)
            except ImportError:
                raise
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        if found:
            about = f"{number}: {draw.dtype}, [{draw.rows}, {draw.width}], autocast={autocast}"
            out.append(f"{name} {about}, {settings}: {found}"[:1500])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWS)}; all")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total = 0
    print(f"{'drop-in':40}{'calls':>7}{'faults':>8}")
    for name in arguments.names or DRAWS:
        try:
            found = faults(name, arguments.calls, arguments.seed)
        except ImportError as error:
            print(f"{name:40}{0:7}{0:8}  not installed: {error}")
            continue
        print(f"{name:40}{arguments.calls:7}{len(found):8}", *found, sep="\n  ", flush=True)
        total += len(found)
    sys.exit(bool(total))


if __name__ == "__main__":
    main()
