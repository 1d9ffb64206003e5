"""Drop-in replacements for pylate's losses `Contrastive` and `CachedContrastive`.

They are subclasses: constructors, settings, encoding and gradient caching are those of the
installed pylate. What differs: products of tokens are not stored; the loss is float32 (float64 for
float64 embeddings); `score_metric` is None or ColBERTScores. As in pylate's scores of PyTorch,
products with padding and with skipped tokens of documents are 0, and compete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pylate import losses
from pylate.losses.contrastive import extract_skiplist_mask
from pylate.scores import ColBERTScores
from pylate.utils import all_gather_with_gradients, get_rank, get_world_size
from torch import Tensor, nn

from .functions import info_nce_loss

__all__ = ["CachedContrastive", "Contrastive"]


class Contrastive(losses.Contrastive):
    """Each query against the documents of the batch, by MaxSim:
    ``forward(sentence_features, labels=None)``.

    ``loss = -1/B sum_i log softmax(s / temperature)_ii``, over positives and negatives of all
    queries. s_ij sums, over the tokens [L, D] of query i, the largest cosine with a token of
    document j.

    Parameters
    ----------
    model : ColBERT
    score_metric, score_mini_batch_size, size_average, gather_across_devices, temperature
        Those of the class that it takes the place of. `score_metric` is None or ColBERTScores.
        `score_mini_batch_size` has no effect: no product is stored.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Khattab, Zaharia: ColBERT, 2020.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _require_maxsim(self.score_metric)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Any:
        features = list(sentence_features)
        tokens = [
            nn.functional.normalize(self.model(each)["token_embeddings"], dim=-1)
            for each in features
        ]
        masks = extract_skiplist_mask(features, skiplist=_encoder(self.model).skiplist)
        return contrastive_loss(self, tokens, masks)


class CachedContrastive(losses.CachedContrastive):
    """`Contrastive` of batches larger than the encoder's memory:
    ``forward(sentence_features, labels=None)``.

    Texts are encoded `mini_batch_size` at a time, twice: once for the tokens [B, L, D], and once
    more for the gradients of the encoder. The loss,
    ``loss = -1/B sum_i log softmax(s / temperature)_ii``, is one call for the whole batch. Its
    gradient is that of this mean, while pylate 1.6 has the gradient of the sum.

    Parameters
    ----------
    model : ColBERT
    score_metric, mini_batch_size, score_mini_batch_size, size_average, gather_across_devices, \
show_progress_bar, temperature
        Those of the class that it takes the place of, as of `Contrastive`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _require_maxsim(self.score_metric)

    def calculate_loss(
        self, reps: list[list[Tensor]], masks: list[Tensor], with_backward: bool = False
    ) -> Any:
        loss = contrastive_loss(self, [torch.cat(chunks) for chunks in reps], masks)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


def contrastive_loss(settings: Any, tokens: Sequence[Tensor], masks: Sequence[Tensor]) -> Any:
    """The loss of unit tokens [B, L, D] and masks [B, L] of the queries, the positives and the
    columns of negatives, with the settings of a loss."""
    _require_maxsim(settings.score_metric)
    query, *documents = tokens
    lengths = [z.shape[1] for z in documents]
    if len(set(lengths)) != 1:
        raise ValueError(
            "sentence_features: expected queries and columns of documents padded to one length, "
            f"got documents of {lengths} tokens"
        )
    columns = [z * mask[:, :, None] for z, mask in zip(documents, masks[1:], strict=True)]
    labels = torch.arange(len(query), device=query.device)
    if settings.gather_across_devices:
        columns = [torch.cat(all_gather_with_gradients(z)) for z in columns]
        labels += get_rank() * len(query)
    loss = info_nce_loss(
        query, torch.cat(columns), labels, temperature=settings.temperature,
        query_mask=None if _encoder(settings.model).do_query_expansion else masks[0],
        reduction="mean" if settings.size_average else "sum",
    )  # fmt: skip
    return loss * get_world_size() if settings.gather_across_devices else loss


def _encoder(model: Any) -> Any:
    """The encoder in a model that DDP may have wrapped."""
    return model if hasattr(model, "skiplist") else model.module


def _require_maxsim(score_metric: Any) -> None:
    """ValueError for other scores than MaxSim."""
    if type(score_metric) is not ColBERTScores:
        name = getattr(score_metric, "__name__", type(score_metric).__name__)
        raise ValueError(f"score_metric: expected None or ColBERTScores, got {name}")
