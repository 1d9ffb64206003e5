"""`CachedMultipleNegativesRankingLoss`: gradient caching of sentence-transformers around the loss
of ranking.py."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import losses
from torch import Tensor

from .ranking import normalized, ranking_loss


class CachedMultipleNegativesRankingLoss(losses.CachedMultipleNegativesRankingLoss):
    """`MultipleNegativesRankingLoss` of batches larger than the encoder's memory:
    ``forward(sentence_features, labels)``.

    Texts are encoded `mini_batch_size` at a time, twice: once for the embeddings [B, D], and once
    more for the gradients of the encoder. The loss,
    ``loss = 1/B sum_i ( log Z_i - x(q_i, d_i) )``, is one call for the whole batch.

    Parameters
    ----------
    model : SentenceTransformer
    scale, similarity_fct, mini_batch_size, mini_batch_num_tokens, gather_across_devices, \
directions, partition_mode, show_progress_bar, hardness_mode, hardness_strength
        Those of the class that it takes the place of, as far as the installed sentence-transformers
        has them. `similarity_fct` is cos_sim or dot_score.

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
        normalized(self.similarity_fct)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any) -> Any:
        """As of `MultipleNegativesRankingLoss`: a subclass may compute another loss here."""
        return ranking_loss(self, embeddings)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False
    ) -> Any:
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss
