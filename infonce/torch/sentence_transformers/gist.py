"""`GISTEmbedLoss` and `CachedGISTEmbedLoss`: a guide leaves out likely positives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sentence_transformers import losses
from torch import Tensor

from ..core.drop_in import first_row, mean_over_ranks, world_group
from ..functions import info_nce_loss


class GISTEmbedLoss(losses.GISTEmbedLoss):
    """Anchors against candidates, without those that a guide finds more similar than the positive:
    ``forward(sentence_features, labels)``.

    ``loss = 1/B sum_i ( log Z_i - x(a_i, p_i) )``, ``x = cos_sim / temperature``, where Z_i sums
    exp(x) over (a_i, p_j), (a_i, n_j), (a_i, a_j) and (p_i, p_j), without pairs whose cosine by the
    guide exceeds the guide's cosine of (a_i, p_i) - `margin`. Anchors a, positives p and negatives
    n are [B, D], the guide's embeddings of them [B, E].

    Parameters
    ----------
    model, guide : SentenceTransformer
    temperature, margin_strategy, margin, contrast_anchors, contrast_positives, \
gather_across_devices
        Those of the class that it takes the place of. A `margin` is "absolute".

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Solatorio: GISTEmbed, 2024.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        require_absolute(self)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Any) -> Any:
        features = list(sentence_features)
        # Copies, because a model adds its outputs to the dictionary of its features
        guide_features = [dict(column) for column in features]
        columns = [self.model(column)["sentence_embedding"] for column in features]
        with torch.no_grad():
            if self.must_retokenize:
                guide_features = [self._retokenize(column) for column in features]
            guides = [self.guide(column)["sentence_embedding"] for column in guide_features]
        return guided_loss(self, columns, guides)

    def _retokenize(self, column: dict[str, Any]) -> dict[str, Any]:
        """The texts of a column, decoded and tokenized again by the guide's tokenizer."""
        rows = column["input_ids"]
        if "cu_seq_lens_q" in column:  # all texts are in one row, cut at these positions
            rows = rows[0].tensor_split(column["cu_seq_lens_q"][1:-1].cpu())
        texts = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)
        tokenize = getattr(self.guide, "preprocess", self.guide.tokenize)
        return {
            name: value.to(self.guide.device) if isinstance(value, Tensor) else value
            for name, value in tokenize(texts).items()
        }


class CachedGISTEmbedLoss(losses.CachedGISTEmbedLoss):
    """`GISTEmbedLoss` of batches larger than the encoders' memory:
    ``forward(sentence_features, labels)``.

    Texts are encoded `mini_batch_size` at a time, twice by the model. The loss of the embeddings
    [B, D], ``loss = 1/B sum_i ( log Z_i - x(a_i, p_i) )``, is one call for the whole batch.

    Parameters
    ----------
    model, guide : SentenceTransformer
    temperature, mini_batch_size, mini_batch_num_tokens, show_progress_bar, margin_strategy, \
margin, contrast_anchors, contrast_positives, gather_across_devices
        Those of the class that it takes the place of, as far as the installed sentence-transformers
        has them. A `margin` is "absolute".

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Solatorio: GISTEmbed, 2024. Gao et al.: Scaling Deep Contrastive Learning Batch Size under
    Memory Limited Setup, 2021.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        require_absolute(self)

    def calculate_loss(
        self, reps: list[list[Tensor]], reps_guided: list[list[Tensor]], *,
        with_backward: bool = False,
    ) -> Any:  # fmt: skip
        columns, guides = (
            [torch.cat(chunks) for chunks in embeddings] for embeddings in (reps, reps_guided)
        )
        loss = guided_loss(self, columns, guides)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss


def require_absolute(settings: Any) -> None:
    """ValueError for a margin that is a share of the positive's similarity."""
    if getattr(settings, "margin_strategy", "absolute") != "absolute" and settings.margin:
        raise ValueError(
            f'margin_strategy: expected "absolute" with a margin, got '
            f'"{settings.margin_strategy}" and {settings.margin}: use sentence-transformers\' loss'
        )


def guided_loss(settings: Any, columns: Sequence[Tensor], guides: Sequence[Tensor]) -> Any:
    """The loss of embeddings, with the settings of a loss.

    `columns` are (anchors [B, D], positives [B, D], negatives [B, D], ...), and `guides` the
    guide's embeddings [B, E] of the same texts.
    """
    require_absolute(settings)
    if len(columns) < 2:
        raise ValueError(f"embeddings: expected anchors and positives, got {len(columns)} column")
    batch = _Batch(settings, [guide.detach().to(columns[0].device) for guide in guides])
    anchors, positives = columns[:2]
    anchor_guide, positive_guide = batch.guides[:2]
    contrast_anchors, contrast_positives = (
        getattr(settings, f"contrast_{side}", True) for side in ("anchors", "positives")
    )
    group = world_group(getattr(settings, "gather_across_devices", False))
    candidates, candidate_guides = torch.cat(list(columns[1:])), torch.cat(batch.guides[1:])
    # Each term is [B]: a log-sum-exp less the positive's logit. Their log-sum-exp is the loss.
    terms = [batch.row_losses(anchors, candidates, (anchor_guide, candidate_guides), group)]
    if contrast_anchors:  # as in sentence-transformers, only with anchors of the same process
        guide = anchor_guide, torch.cat([positive_guide, anchor_guide])
        terms.append(batch.contrast_rows(anchors, positives, guide, None))
    if contrast_positives:
        guide = positive_guide, torch.cat([anchor_guide, positive_guide])
        terms.append(batch.contrast_rows(positives, anchors, guide, group))
    return mean_over_ranks(torch.stack(terms).logsumexp(dim=0), group)


class _Batch:
    """The guide's embeddings of a batch, and losses of its rows: for each row, the log-sum-exp of
    logits less the logit of its positive."""

    def __init__(self, settings: Any, guides: list[Tensor]) -> None:
        self.guides = guides
        # A guide's cosine may exceed the positive's by `guide_margin`. `margin` is a distance below
        # the positive's cosine, so its sign is the opposite.
        self.options = {
            "temperature": settings.temperature, "normalize": True, "reduction": "none",
            "guide_margin": -float(getattr(settings, "margin", 0.0)),
        }  # fmt: skip

    def row_losses(
        self, rows: Tensor, keys: Tensor, guide: tuple[Tensor, Tensor], group: Any, **options: Any
    ) -> Any:
        """Losses [B] of rows against keys. Key i is the positive of row i."""
        labels = torch.arange(len(rows), device=rows.device)
        if group is not None:  # labels are indices among the keys of all processes
            labels += first_row(group, len(keys))
            options |= {"group": group, "gradient_scale": "global"}  # for `mean_over_ranks`
        return info_nce_loss(rows, keys, labels, guide=guide, **self.options, **options)

    def contrast_rows(
        self, rows: Tensor, positives: Tensor, guide: tuple[Tensor, Tensor], group: Any
    ) -> Any:
        """Losses [B] of rows against the rows of other samples, as negatives only.

        The keys are positives and rows. Positives are in group 1, all rows in group 0, so positives
        are no negatives. They are keys because the guide's limit is that of row and positive. The
        loss is decoupled, because the term of anchors and candidates has the positive already.
        """
        samples = torch.arange(len(rows), device=rows.device) + first_row(group, len(rows))
        row_groups = torch.zeros_like(samples)
        return self.row_losses(
            rows, torch.cat([positives, rows]), guide, group, decoupled=True,
            ids=(samples, samples.repeat(2)),
            groups=(row_groups, torch.cat([row_groups + 1, row_groups])),
        )  # fmt: skip
