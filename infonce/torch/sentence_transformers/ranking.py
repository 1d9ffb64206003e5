"""`MultipleNegativesRankingLoss`, and `ranking_loss`, the loss of the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import losses, util
from torch import Tensor, nn

from ..core.drop_in import first_row, mean_over_ranks, world_group
from ..functions import clip_loss, gte_loss, info_nce_loss

NORMALIZED = {util.cos_sim: True, util.dot_score: False}  # whether rows are divided by their norm
TO_DOC, TO_QUERY = "query_to_doc", "doc_to_query"  # values of `directions`
ALL = {TO_DOC, TO_QUERY, "query_to_query", "doc_to_doc"}


class MultipleNegativesRankingLoss(losses.MultipleNegativesRankingLoss):
    """Each query against the documents of the batch:
    ``forward(sentence_features, labels)``, ``compute_loss_from_embeddings([queries [B, D],
    positives [B, D], negatives [B, D], ...], labels)``.

    ``loss = 1/B sum_i ( log Z_i - x(q_i, d_i) )``, ``x = scale similarity_fct``, where Z_i sums
    exp(x) over the `directions`, in ``partition_mode="joint"``: x(q_i, d_j), negatives too,
    x(q_j, d_i), x(q_i, q_j) for j != i, x(d_i, d_j) for documents of other queries. With
    ``"per_direction"``, log Z_i is the mean of the directions' log-sum-exps.

    Parameters
    ----------
    model : SentenceTransformer
    scale, similarity_fct, gather_across_devices, directions, partition_mode, hardness_mode, \
hardness_strength
        Those of the class that it takes the place of, as far as the installed sentence-transformers
        has them. `similarity_fct` is cos_sim or dot_score.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Henderson et al.: Efficient Natural Language Response Suggestion for Smart Reply, 2017. Li et
    al.: Towards General Text Embeddings with Multi-stage Contrastive Learning, 2023 (all
    directions). Lan et al.: LLaVE, 2025 (hardness).
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        normalized(self.similarity_fct)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any) -> Any:
        return ranking_loss(self, embeddings)


def normalized(similarity_fct: Any) -> bool:
    """Whether a similarity function divides rows by their norm."""
    if similarity_fct not in NORMALIZED:
        name = getattr(similarity_fct, "__name__", type(similarity_fct).__name__)
        raise ValueError(
            f"similarity_fct: expected cos_sim or dot_score of sentence_transformers.util, got "
            f"{name}: logits are dot products here, use sentence_transformers' own loss"
        )
    return NORMALIZED[similarity_fct]


def ranking_loss(settings: Any, embeddings: Sequence[Tensor]) -> Any:
    """The loss of embeddings (queries, positives, negatives, ...), each [B, D], with the settings
    of a loss.

    It is one call for the directions of a loss of infonce: query_to_doc (`info_nce_loss`, if all
    negatives have one hardness), and without negatives and hardness both directions apart
    (`clip_loss`) or all four together (`gte_loss`). Otherwise it has a call for each direction.
    """
    if len(embeddings) < 2:
        raise ValueError(
            f"embeddings: expected queries and documents, got {len(embeddings)} column"
        )
    batch = _Batch(settings, embeddings)
    directions = set(getattr(settings, "directions", (TO_DOC,)))
    joint = getattr(settings, "partition_mode", "joint") == "joint"
    if directions == {TO_DOC} and not batch.apart:
        return batch.row_losses(
            batch.queries, batch.documents, batch.options, hardness=batch.hardness
        )  # fmt: skip
    if batch.plain_pairs and not joint and directions == {TO_DOC, TO_QUERY}:
        return clip_loss(batch.queries, batch.positives, **batch.options)
    if batch.plain_pairs and joint and directions == ALL:
        # The four directions have exp p_i twice in the sum (p_i: logit of the positive), GTE's Z_i
        # once: log(Z_i + exp p_i) - p_i = softplus(log Z_i - p_i). As -logsigmoid, because torch's
        # softplus is the identity above 20.
        rows = gte_loss(batch.queries, batch.positives, **batch.per_row)
        return mean_over_ranks(-nn.functional.logsigmoid(-rows), batch.group)
    # Each term is [B]: a direction's log-sum-exp less the positive's logit
    terms = [batch.to_documents()]
    if TO_QUERY in directions:
        terms.append(batch.row_losses(batch.positives, batch.queries))
    if "query_to_query" in directions:
        terms.append(batch.contrast_rows(batch.queries, batch.queries))
    if "doc_to_doc" in directions:
        terms.append(batch.contrast_rows(batch.positives, batch.documents))
    per_row = torch.stack(terms)
    return mean_over_ranks(per_row.logsumexp(dim=0) if joint else per_row.mean(dim=0), batch.group)


class _Batch:
    """The embeddings of a batch, and losses of its rows: for each row, the log-sum-exp of logits
    less the logit of its positive."""

    def __init__(self, settings: Any, embeddings: Sequence[Tensor]) -> None:
        self.queries, self.positives, *self.negatives = embeddings
        self.documents = torch.cat(list(embeddings[1:]))
        self.scale, self.normalize = settings.scale, normalized(settings.similarity_fct)
        self.options = {"scale": self.scale, "normalize": self.normalize}
        self.per_row = {**self.options, "reduction": "none"}
        self.group = world_group(settings.gather_across_devices)
        if self.group is not None:
            self.options["group"] = self.group
            self.per_row |= {
                "group": self.group,
                "gradient_scale": "global",
            }  # for `mean_over_ranks`
        # Hardness of the documents of other queries, and of the query's own negatives
        mode, strength = getattr(settings, "hardness_mode", None), 0.0
        if mode is not None:
            strength = settings.hardness_strength
        self.hardness = strength if mode != "hard_negatives" else 0.0
        self.own_hardness = strength if mode != "in_batch_negatives" else 0.0
        # Whether a query's own negatives need a sum apart, because their hardness differs
        self.apart = bool(self.negatives) and self.hardness != self.own_hardness
        self.plain_pairs = not self.negatives and not self.hardness

    def to_documents(self) -> Any:
        """Losses [B] of queries against all documents.

        If a query's own negatives k have a hardness h of their own (`apart`), with similarities s
        and the positive p: ``log( exp loss_i + sum_k exp(scale (s_ik - s_ip) + h s_ik) )``, where
        loss_i has no own negatives, and the weight exp(h s_ik) has no gradient.
        """
        if not self.apart:
            return self.row_losses(self.queries, self.documents, hardness=self.hardness)
        others = self.row_losses(
            self.queries, self.documents, hardness=self.hardness, ids=self.ids()
        )  # fmt: skip
        positives = self.similarity(self.queries, self.positives)
        terms = [others]
        for negatives in self.negatives:
            own = self.similarity(self.queries, negatives)
            terms.append(self.scale * (own - positives) + self.own_hardness * own.detach())
        return torch.stack(terms).logsumexp(dim=0)

    def contrast_rows(self, rows: Tensor, keys: Tensor) -> Any:
        """Losses [B] of rows against keys of their own kind, queries or documents.

        `rows` are the first of `keys`. Keys of the row's own sample are left out. `row_losses`
        takes the row itself, key i, as the positive: log-sum-exp - x(r_i, r_i). The real positive
        is the pair of query and document, so x(r_i, r_i) is added, and x(q_i, d_i) subtracted.
        """
        others = self.row_losses(rows, keys, decoupled=True, ids=self.ids(len(keys) // len(rows)))
        positives = self.similarity(self.queries, self.positives)
        return others + self.scale * (self.similarity(rows, rows) - positives)

    def row_losses(
        self, rows: Tensor, keys: Tensor, other_keywords: Any = None, **options: Any
    ) -> Any:
        """Losses [B] of rows against keys. Key i is the positive of row i.

        `other_keywords` take the place of those for a loss per row: then the mean is returned.
        """
        labels = None  # or indices among the keys of all processes
        if len(keys) > len(rows) and self.group is not None:
            labels = torch.arange(len(rows), device=rows.device)
            labels += first_row(self.group, len(keys))
        return info_nce_loss(rows, keys, labels, **(other_keywords or self.per_row), **options)

    def ids(self, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """`ids` of queries and of `columns` columns of documents (None: all): a query and its own
        documents have one id, so the latter are no negatives."""
        samples = torch.arange(len(self.queries), device=self.queries.device)
        samples += first_row(self.group, len(samples))
        return samples, samples.repeat(columns or 1 + len(self.negatives))

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """The similarity [B] of each row of `a` with the same row of `b`, in the loss's dtype."""
        a, b = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (a, b))
        if self.normalize:
            a, b = nn.functional.normalize(a, dim=-1), nn.functional.normalize(b, dim=-1)
        return (a * b).sum(dim=-1)
