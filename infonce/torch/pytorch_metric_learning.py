"""Drop-in replacements for pytorch_metric_learning's losses `NTXentLoss` and `SupConLoss`, and for
`CrossBatchMemory` around them.

They are subclasses: constructors, reducers, regularizers, records and the memory are those of the
installed pytorch-metric-learning. The losses of pairs and rows are computed here, without a matrix.
What differs: losses are float32 (float64 for float64 features); small probabilities are not
clamped; `distance` is CosineSimilarity or DotProductSimilarity; all pairs count, so a miner and an
`indices_tuple` are errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pytorch_metric_learning import distances, losses
from torch import Tensor

from .core.drop_in import require
from .functions import info_nce_loss, sup_con_loss

__all__ = ["CrossBatchMemory", "NTXentLoss", "SupConLoss"]


class NTXentLoss(losses.NTXentLoss):
    """NT-Xent of classes: ``forward(embeddings [M, D], labels [M], ref_emb=None [N, D],
    ref_labels=None [N])``.

    With ``x_ij = <embeddings_i, ref_j> / temperature`` of unit rows, for each pair (i, p) of one
    class, N(i) the rows of other classes, and by default the mean over pairs:

    ``loss_ip = log( exp x_ip + sum_{j in N(i)} exp x_ij ) - x_ip``

    Parameters
    ----------
    temperature : float, default 0.07
    kwargs
        Those of the class that it takes the place of: `distance`, `reducer`,
        `embedding_regularizer`, ...

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """

    def __init__(self, temperature: float = 0.07, **kwargs: Any) -> None:
        super().__init__(temperature=temperature, **kwargs)
        _normalized(self.distance)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        pairs = _Pairs(labels, indices_tuple, ref_labels)
        if pairs.degenerate:
            return self.zero_losses()
        anchors, positives = pairs.indices
        per_pair = info_nce_loss(
            embeddings[anchors],
            ref_emb,
            positives,
            ids=(pairs.classes[anchors], pairs.ref_classes),
            temperature=self.temperature,
            normalize=_normalized(self.distance),
            reduction="none",
        )
        return _reducer_input(per_pair, (anchors, positives), "pos_pair")


class SupConLoss(losses.SupConLoss):
    """Supervised contrastive loss: ``forward(embeddings [M, D], labels [M], ref_emb=None [N, D],
    ref_labels=None [N])``.

    With ``x_ij = <embeddings_i, ref_j> / temperature`` of unit rows and P(i) the rows of i's class,
    i itself left out of both sums, and by default the mean over rows that have a positive:

    ``loss_i = log sum_j exp x_ij - mean_{p in P(i)} x_ip``

    Parameters
    ----------
    temperature : float, default 0.1
    kwargs
        Those of the class that it takes the place of: `distance`, `reducer`,
        `embedding_regularizer`, ...

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020.
    """

    def __init__(self, temperature: float = 0.1, **kwargs: Any) -> None:
        super().__init__(temperature=temperature, **kwargs)
        _normalized(self.distance)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        pairs = _Pairs(labels, indices_tuple, ref_labels)
        if pairs.degenerate:
            return self.zero_losses()
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "normalize": _normalized(self.distance),
            "reduction": "none",
        }
        if pairs.own is not None and ref_emb is embeddings:
            per_row = sup_con_loss(embeddings, pairs.classes, **options)
        else:
            if pairs.own is not None:  # a row is not compared with its own reference
                options["ids"] = pairs.own, torch.arange(len(ref_emb), device=pairs.own.device)
            per_row = info_nce_loss(embeddings, ref_emb, pairs.positive_sets(), **options)
        return _reducer_input(per_row, torch.arange(len(per_row), device=per_row.device), "element")


class CrossBatchMemory(losses.CrossBatchMemory):
    """A loss against the embeddings of earlier batches: ``forward(embeddings [M, D], labels [M],
    indices_tuple=None, enqueue_mask=None)``.

    Stores the batch in the memory [N, D], without its gradient, and returns
    ``loss = loss(embeddings, labels, ref_emb=memory, ref_labels=labels of the memory)``, in which a
    row is not compared with its own copy. Rows of `enqueue_mask` [M] are only stored, the others
    are only compared.

    Parameters
    ----------
    loss : NTXentLoss or SupConLoss
        Of this module.
    embedding_size, memory_size : int
        The width D, and the most rows of the memory (default 1024).
    miner : None

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Wang et al.: Cross-Batch Memory for Embedding Learning, 2020.
    """

    def __init__(
        self, loss: Any, embedding_size: int, memory_size: int = 1024, miner: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if not isinstance(loss, (NTXentLoss, SupConLoss)):
            raise TypeError(
                f"loss: expected NTXentLoss or SupConLoss of {__name__}, got "
                f"{type(loss).__module__}.{type(loss).__name__}"
            )
        _require_all_pairs("miner", miner)
        super().__init__(loss, embedding_size, memory_size, miner, **kwargs)

    def forward(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any = None, enqueue_mask: Any = None
    ) -> Any:
        _require_all_pairs("miner", self.miner)
        _require_all_pairs("indices_tuple", indices_tuple)
        _require_labels("labels", labels)
        rows = len(embeddings)
        if embeddings.shape != (rows, self.embedding_size):
            raise ValueError(
                f"embeddings: expected shape (M, {self.embedding_size}), got "
                f"{tuple(embeddings.shape)}"
            )
        if enqueue_mask is None and rows > self.memory_size:
            raise ValueError(
                f"embeddings: expected at most {self.memory_size} rows, memory_size, got {rows}"
            )
        return super().forward(embeddings, labels, None, enqueue_mask)

    def create_indices_tuple(
        self, embeddings: Any, labels: Any, E_mem: Any, L_mem: Any, input_indices_tuple: Any,
        do_remove_self_comparisons: bool,
    ) -> Any:  # fmt: skip
        """What `loss` gets as `indices_tuple`: all pairs, without lists of them."""
        return _OwnReferences(self.curr_batch_idx) if do_remove_self_comparisons else None


@dataclass(frozen=True)
class _OwnReferences:
    """As an `indices_tuple`: all pairs of rows and references, but none of a row and its own."""

    indices: Tensor  # [M] of each row's own reference


def _require_all_pairs(name: str, value: Any) -> None:
    if value is not None:
        raise ValueError(
            f"{name}: expected None, got {type(value).__name__}: all pairs count here. Use "
            "pytorch-metric-learning's own loss with a miner, and the CrossBatchMemory of "
            f"{__name__} with a memory"
        )


def _require_labels(name: str, labels: Any) -> None:
    if labels is None:
        raise ValueError(f"{name}: expected a tensor, got None")


def _normalized(distance: Any) -> bool:
    """Whether a distance divides rows by their norm. ValueError for other distances than the two
    that are dot products."""
    if type(distance) not in (distances.CosineSimilarity, distances.DotProductSimilarity):
        raise ValueError(
            f"distance: expected CosineSimilarity or DotProductSimilarity, got "
            f"{type(distance).__name__}: logits are dot products here, use "
            "pytorch-metric-learning's own loss"
        )
    require("distance.p", distance.p, 2, "rows are divided by their L2 norm")
    require("distance.power", distance.power, 1, "logits are dot products here")
    return bool(distance.normalize_embeddings)


def _reducer_input(losses: Tensor, indices: Any, kind: str) -> dict[str, dict[str, Any]]:
    """Losses in the form that reducers take. `kind`: "pos_pair", a loss for each pair of `indices`,
    or "element", a loss for each row of `indices`."""
    return {"loss": {"losses": losses, "indices": indices, "reduction_type": kind}}


class _Pairs:
    """The pairs (anchor, positive) of one class, as indices, without an M x N matrix.

    Anchors are the M embeddings, positives the N reference embeddings.
    """

    def __init__(self, labels: Any, indices_tuple: Any, ref_labels: Any) -> None:
        if not isinstance(indices_tuple, _OwnReferences):
            _require_all_pairs("indices_tuple", indices_tuple)
        _require_labels("labels", labels)
        _require_labels("ref_labels", ref_labels)
        rows = len(labels), len(ref_labels)
        # `own`: index of the reference that is the row itself, which is no pair; None: all are
        # pairs. As in pytorch-metric-learning: if both labels are one object, row i and reference i
        # are one sample. Their embeddings may differ, as two views do.
        self.own: Tensor | None = None
        if indices_tuple is not None:
            self.own = indices_tuple.indices
        elif ref_labels is labels:
            self.own = torch.arange(rows[0], device=labels.device)
        # `classes` and `ref_classes` are labels numbered from 0, `sizes` the references of a class.
        # `degenerate`: no row has a positive, or no row has a negative. Then the loss is 0
        # (`zero_losses` of pytorch-metric-learning)
        both = torch.cat([labels, ref_labels.to(labels.device)])
        self.classes, self.ref_classes = both.unique(return_inverse=True)[1].split(rows)
        self.sizes = self.ref_classes.bincount(minlength=sum(rows))
        counts = self.sizes[self.classes]
        alone = 0 if self.own is None else 1
        self.degenerate = bool((counts == alone).all() | (counts == rows[1]).all())

    @cached_property
    def indices(self) -> tuple[Tensor, Tensor]:
        """Indices of the anchor [pairs] and of the positive [pairs] of each pair."""
        # The references of a class are neighbours in `order`, from `first` on
        order = self.ref_classes.argsort(stable=True)
        first = self.sizes.cumsum(0) - self.sizes
        counts = self.sizes[self.classes]  # pairs of each anchor
        anchors = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        positives = order[first[self.classes[anchors]] + _number_pairs(anchors, counts)]
        if self.own is not None:  # an embedding is no positive of itself
            others = positives != self.own[anchors]
            anchors, positives = anchors[others], positives[others]
        return anchors, positives

    def positive_sets(self) -> Tensor:
        """The positives of each anchor [M, P], filled up with -1."""
        anchors, positives = self.indices
        counts = anchors.bincount(minlength=len(self.classes))
        sets = torch.full((len(counts), int(counts.max())), -1, device=counts.device)
        sets[anchors, _number_pairs(anchors, counts)] = positives
        return sets


def _number_pairs(anchors: Tensor, counts: Tensor) -> Tensor:
    """The number of each pair among the pairs of its anchor: 0, 1, ...

    `anchors` is sorted, and `counts` has the number of pairs of each anchor.
    """
    before = (counts.cumsum(0) - counts)[anchors]
    return torch.arange(len(anchors), device=counts.device) - before
