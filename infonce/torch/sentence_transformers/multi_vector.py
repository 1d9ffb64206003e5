"""`MultiVectorMultipleNegativesRankingLoss`, and the same with gradient caching: late interaction.

They take the places of the classes of `sentence_transformers.multi_vector_encoder.losses`
(sentence-transformers 6 and later).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from sentence_transformers import util
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores, mean_colbert_scores
from torch import Tensor

from ..functions import info_nce_loss

__all__ = [
    "CachedMultiVectorMultipleNegativesRankingLoss",
    "MultiVectorMultipleNegativesRankingLoss",
]
TOKEN_MEAN = {colbert_scores: False, mean_colbert_scores: True}


class MultiVectorMultipleNegativesRankingLoss(losses.MultiVectorMultipleNegativesRankingLoss):
    """Each query against the documents of the batch, by MaxSim:
    ``forward(sentence_features, labels)``.

    ``loss = 1/B sum_i ( log sum_j exp(scale s(q_i, d_j)) - scale s(q_i, d_i) )``, over positives
    and negatives d_j of all queries. s sums, over the query's tokens, the largest dot product with
    a token of the document; with mean_colbert_scores it is divided by the number of tokens.

    Parameters
    ----------
    model : MultiVectorEncoder
    scale, similarity_fct, mini_batch_size, score_mini_batch_size, gather_across_devices
        Those of the class that it takes the place of. `similarity_fct` is colbert_scores,
        mean_colbert_scores or a partial of them. `score_mini_batch_size` has no effect: no product
        is stored.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Khattab, Zaharia: ColBERT, 2020. Henderson et al.: Efficient Natural Language Response
    Suggestion for Smart Reply, 2017.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _find_token_mean(self.similarity_fct)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Any:
        query_features, *documents = sentence_features
        query = self.model(query_features, task=query_features.get("task", "query"))
        columns, masks = embed_columns_padded(
            self.model, documents, self.mini_batch_size, task_default="document"
        )
        query_mask = query["attention_mask"].bool()
        return late_ranking_loss(self, query["token_embeddings"], query_mask, columns, masks)


class CachedMultiVectorMultipleNegativesRankingLoss(
    losses.CachedMultiVectorMultipleNegativesRankingLoss
):
    """`MultiVectorMultipleNegativesRankingLoss` of batches larger than the encoder's memory:
    ``forward(sentence_features, labels)``.

    Texts are encoded `mini_batch_size` at a time, twice: once for the tokens, and once more for the
    gradients of the encoder. The loss is one call for the whole batch.

    Parameters
    ----------
    model : MultiVectorEncoder
    scale, similarity_fct, mini_batch_size, mini_batch_num_tokens, score_mini_batch_size, \
gather_across_devices, show_progress_bar
        Those of the class that it takes the place of, as of
        `MultiVectorMultipleNegativesRankingLoss`.

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
        _find_token_mean(self.similarity_fct)

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *,
        with_backward: bool = False,
    ) -> Any:  # fmt: skip
        sides = [
            util.cat_padded_token_embeddings(z, [mask.bool() for mask in masks])
            for z, masks in zip(reps, masks_chunks, strict=True)
        ]
        (query, query_mask), *documents = sides
        columns, masks = zip(*documents, strict=True)
        loss = late_ranking_loss(self, query, query_mask, columns, masks)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


def late_ranking_loss(
    settings: Any, query: Tensor, query_mask: Tensor, columns: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> Any:  # fmt: skip
    """The loss of the tokens [B, L, D] of queries and of the columns of documents (positives,
    negatives, ...), and of the masks [B, L], with the settings of a loss."""
    labels = torch.arange(len(query), device=query.device)
    if settings.gather_across_devices:
        gathered = [
            util.all_gather_padded(z, mask, with_grad=True)
            for z, mask in zip(columns, masks, strict=True)
        ]
        columns, masks = zip(*gathered, strict=True)
        labels += util.get_rank() * len(query)
    key, key_mask = util.cat_padded_token_embeddings(list(columns), list(masks))
    return info_nce_loss(
        query, key, labels=labels, scale=settings.scale, query_mask=query_mask, key_mask=key_mask,
        token_mean=_find_token_mean(settings.similarity_fct),
    )  # fmt: skip


def _find_token_mean(similarity_fct: Any) -> bool:
    """Whether scores are divided by the number of tokens. ValueError for another similarity than
    MaxSim. Of a partial's keywords, chunk_elements has no effect: no product is stored."""
    function, keywords = similarity_fct, dict[str, Any]()
    if isinstance(function, partial) and not function.args:
        keywords, function = function.keywords, function.func
    if function not in TOKEN_MEAN or keywords.keys() - {"length_normalize", "chunk_elements"}:
        name = util.similarity_fct_name(similarity_fct)
        raise ValueError(
            "similarity_fct: expected colbert_scores or mean_colbert_scores of "
            f"sentence_transformers.multi_vector_encoder.scoring, or a partial, got {name}"
        )
    return bool(keywords.get("length_normalize", TOKEN_MEAN[function]))
