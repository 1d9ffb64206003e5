"""Drop-in replacements for colpali_engine's losses: `ColbertLoss`, `ColbertSigmoidLoss` and
`ColbertNegativeCELoss` of late interaction, `BiEncoderLoss`, `BiPairedEncoderLoss`, `BiSigmoidLoss`
and `BiNegativeCELoss` of single vectors.

Constructors and calls are the same. As in colpali_engine, tokens of zeros are padding: in a query
they add nothing and are not counted, and in a document their products of 0 compete. What differs:
the loss is float32 (float64 for float64 features), products of tokens of the batch are not stored,
and nothing is printed if scores leave [0, 1]. ``use_smooth_max=True`` and
``pos_aware_negative_filtering=True`` are errors. Other keywords are those of the functions of
`infonce.torch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import spec
from . import functions
from .core.drop_in import DEFAULTS, SCALE, DropIn, Refused, refuse, require

__all__ = [
    "BiEncoderLoss",
    "BiNegativeCELoss",
    "BiPairedEncoderLoss",
    "BiSigmoidLoss",
    "ColbertLoss",
    "ColbertNegativeCELoss",
    "ColbertSigmoidLoss",
]
FIXED = {  # setting -> its only value, why
    "use_smooth_max": (False, "a token of a query has its largest product"),
    "pos_aware_negative_filtering": (
        False, "no score is changed: options such as false_negative_margin leave negatives out",
    ),
}  # fmt: skip
ALWAYS_REFUSED = {
    **refuse(["group"], "pass the documents of all processes, and offset"),
    **refuse(["metrics"], "a loss here is one tensor: use infonce.torch.info_nce_loss"),
}
TOKENS = {
    **refuse(["query_mask"], "tokens of zeros are padding"),
    **refuse(["token_mean"], "pass normalize_scores"),
}
POSITIVES = refuse(["positive_ids"], "document i + offset is the positive of query i")
NEGATIVES = refuse(  # all options that change a loss
    DEFAULTS.keys() - {"method", "workspace", "progress"}, "explicit negatives have no such keyword"
)


class _ColpaliEngine(DropIn):
    """Base of all losses here: the settings, and the calls of the functions."""

    _dimensions = 2  # of the embeddings

    def check_setting(self, name: str, value: Any) -> None:
        if name in FIXED:
            require(name, value, *FIXED[name])
        if name == "temperature" and not value > 0:
            raise ValueError(f"temperature: expected a positive number, got {value!r}")
        if name == "in_batch_term_weight" and not 0 <= value <= 1:
            raise ValueError(f"in_batch_term_weight: expected a number in [0, 1], got {value!r}")

    def refused(self) -> Refused:
        return SCALE | ALWAYS_REFUSED

    def _options(self, query: Tensor) -> dict[str, Any]:
        """The keywords of one call of a function of `infonce.torch`."""
        return {"temperature": self.temperature, **self.call_options()}

    def _require_positives(self, query: Tensor, documents: Tensor, offset: int) -> None:
        for name, z in (("query_embeddings", query), ("doc_embeddings", documents)):
            if z.ndim != self._dimensions:
                came = tuple(z.shape)
                raise ValueError(
                    f"{name}: expected {self._dimensions} dimensions, got shape {came}"
                )
        if not 0 <= offset <= len(documents) - len(query):
            raise ValueError(
                "offset: expected a document i + offset for each query i, got offset "
                f"{offset}, {len(query)} queries and {len(documents)} documents"
            )

    def _ranking_loss(self, query: Tensor, documents: Tensor, offset: int) -> Any:
        self._require_positives(query, documents, offset)
        labels = None  # document i is the positive of query i
        if offset:
            labels = torch.arange(offset, offset + len(query), device=query.device)
        return functions.info_nce_loss(query, documents, labels, **self._options(query))

    def _sigmoid_loss(self, query: Tensor, documents: Tensor, offset: int) -> Any:
        self._require_positives(query, documents, offset)
        rows, columns = len(query), len(documents)
        if columns % max(1, rows):
            raise ValueError(
                f"doc_embeddings: expected a multiple of the {rows} queries, got {columns} rows"
            )
        options = self._options(query)
        if columns > rows:
            number = torch.arange(columns, device=query.device)
            options["positive_ids"] = number[offset : offset + rows], number
        loss = functions.siglip_loss(query, documents, 0.0, **options)
        # a mean over queries becomes one over pairs
        return loss if options.get("reduction") == "sum" else loss / columns


class _LateInteraction(_ColpaliEngine):
    """Base of the losses of sets of tokens."""

    _dimensions = 3

    def refused(self) -> Refused:
        return {**super().refused(), **TOKENS}

    def _options(self, query: Tensor) -> dict[str, Any]:
        tokens = {"query_mask": _is_token(query), "token_mean": self.normalize_scores}
        return {**tokens, **super()._options(query)}


class _ExplicitNegatives(_ColpaliEngine):
    """Base of the losses of a batch and of explicit negatives [B, K, ...]."""

    kind = spec.INFO_NCE

    def refused(self) -> Refused:
        return {**super().refused(), **NEGATIVES}

    def forward(
        self,
        query_embeddings: Tensor,
        doc_embeddings: Tensor,
        neg_doc_embeddings: Tensor,
        offset: int = 0,
    ) -> Any:
        query, documents, negatives = query_embeddings, doc_embeddings, neg_doc_embeddings
        self._require_positives(query, documents, offset)
        if negatives.ndim != query.ndim + 1 or len(negatives) != len(query):
            raise ValueError(
                f"neg_doc_embeddings: expected {query.ndim + 1} dimensions, and negatives of each "
                f"of the {len(query)} queries, got shape {tuple(negatives.shape)}"
            )
        positives = documents[offset : offset + len(query), None]
        positive, negative = (self._own_scores(query, z) for z in (positives, negatives))
        loss = nn.functional.softplus((negative - positive) / self.temperature).mean()
        share = self.in_batch_term_weight
        if share:
            loss = (1 - share) * loss + share * self._ranking_loss(query, documents, offset)
        return loss

    def _own_scores(self, query: Tensor, documents: Tensor) -> Tensor:
        """The scores [B, K] of each query and its own documents [B, K, D]."""
        return _products(query[:, None], documents)[:, :, 0]


def _products(query: Tensor, documents: Tensor) -> Tensor:
    """The products [B, N, L] of rows [B, N, D] of documents and [B, L, D] of queries."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        return documents.to(dtype) @ query.to(dtype).mT


def _is_token(query: Tensor) -> Tensor:
    """Which tokens [B, L] of queries [B, L, D] are no padding."""
    return (query != 0).any(2)


class ColbertLoss(_LateInteraction):
    """ColBERT: ``forward(query_embeddings [B, L, D], doc_embeddings [C, L', D], offset=0)``.

    ``loss = -1/B sum_i log softmax(s / temperature)_i,p(i)`` with ``p(i) = i + offset``. s_ij sums,
    over the tokens of query i, the largest product with a token of document j.

    Parameters
    ----------
    temperature : float, default 0.02
    normalize_scores : bool, default True
        Divide scores by the number of the query's tokens.
    use_smooth_max, pos_aware_negative_filtering : bool
        False.
    max_batch_size, tau, norm_tol, filter_threshold, filter_factor
        Without effect.
    options
        Of `infonce.torch.info_nce_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Khattab, Zaharia: ColBERT, 2020. Faysse et al.: ColPali, 2024.
    """

    kind = spec.INFO_NCE

    def __init__(
        self,
        temperature: float = 0.02,
        normalize_scores: bool = True,
        use_smooth_max: bool = False,
        pos_aware_negative_filtering: bool = False,
        max_batch_size: int = 1024,
        tau: float = 0.1,
        norm_tol: float = 1e-3,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(
            options, temperature=temperature, normalize_scores=normalize_scores,
            use_smooth_max=use_smooth_max,
            pos_aware_negative_filtering=pos_aware_negative_filtering,
            max_batch_size=max_batch_size, tau=tau, norm_tol=norm_tol,
            filter_threshold=filter_threshold, filter_factor=filter_factor,
        )  # fmt: skip

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Any:
        return self._ranking_loss(query_embeddings, doc_embeddings, offset)


class ColbertSigmoidLoss(ColbertLoss):
    """A sigmoid of each pair: ``forward(query_embeddings [B, L, D], doc_embeddings [C, L', D],
    offset=0)``.

    ``loss = -1/(BC) sum_ij log sigmoid(t_ij s_ij / temperature)``, t_ij = 1 for j = i + offset,
    else -1, with the scores of `ColbertLoss`. C is a multiple of B.

    Parameters
    ----------
    settings
        Of `ColbertLoss`. Options are those of `infonce.torch.siglip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    kind = spec.SIGLIP

    def refused(self) -> Refused:
        return {**super().refused(), **POSITIVES}

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Any:
        return self._sigmoid_loss(query_embeddings, doc_embeddings, offset)


class ColbertNegativeCELoss(_ExplicitNegatives, _LateInteraction):
    """ColBERT with explicit negatives: ``forward(query_embeddings [B, L, D], doc_embeddings
    [C, L', D], neg_doc_embeddings [B, K, L", D], offset=0)``.

    ``loss = (1 - w)/(BK) sum_ik log(1 + exp((n_ik - s_i,p(i)) / temperature)) + w ColbertLoss``,
    with n_ik the score of query i and its negative k, and w the weight of the batch. The products
    of queries and their own negatives are stored.

    Parameters
    ----------
    in_batch_term_weight : float in [0, 1], default 0.5
    settings
        Of `ColbertLoss`. Options are `method`, `workspace` and `progress`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `ColbertLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.02,
        normalize_scores: bool = True,
        use_smooth_max: bool = False,
        pos_aware_negative_filtering: bool = False,
        in_batch_term_weight: float = 0.5,
        max_batch_size: int = 1024,
        tau: float = 0.1,
        norm_tol: float = 1e-3,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(
            options, temperature=temperature, normalize_scores=normalize_scores,
            use_smooth_max=use_smooth_max,
            pos_aware_negative_filtering=pos_aware_negative_filtering,
            in_batch_term_weight=in_batch_term_weight, max_batch_size=max_batch_size, tau=tau,
            norm_tol=norm_tol, filter_threshold=filter_threshold, filter_factor=filter_factor,
        )  # fmt: skip

    def _own_scores(self, query: Tensor, documents: Tensor) -> Tensor:
        """The scores [B, K] of each query and its own documents [B, K, L, D]."""
        products = _products(query, documents.flatten(1, 2)).unflatten(1, documents.shape[1:3])
        scores = products.amax(2).sum(2)
        if self.normalize_scores:
            scores = scores / _is_token(query).sum(1, keepdim=True).clamp(min=1)
        return scores


class BiEncoderLoss(_ColpaliEngine):
    """InfoNCE: ``forward(query_embeddings [B, D], doc_embeddings [C, D], offset=0)``.

    ``loss = -1/B sum_i log softmax(query doc' / temperature)_i,p(i)``, ``p(i) = i + offset``

    Parameters
    ----------
    temperature : float, default 0.02
    pos_aware_negative_filtering : bool
        False.
    max_batch_size, filter_threshold, filter_factor
        Without effect.
    options
        Of `infonce.torch.info_nce_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    van den Oord et al.: Representation Learning with Contrastive Predictive Coding, 2018.
    """

    kind = spec.INFO_NCE

    def __init__(
        self,
        temperature: float = 0.02,
        pos_aware_negative_filtering: bool = False,
        max_batch_size: int = 1024,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(
            options, temperature=temperature,
            pos_aware_negative_filtering=pos_aware_negative_filtering,
            max_batch_size=max_batch_size, filter_threshold=filter_threshold,
            filter_factor=filter_factor,
        )  # fmt: skip

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Any:
        return self._ranking_loss(query_embeddings, doc_embeddings, offset)


class BiPairedEncoderLoss(BiEncoderLoss):
    """CLIP's loss: ``forward(query_embeddings [B, D], doc_embeddings [B, D], offset=0)``.

    ``loss = -1/(2B) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = query doc' / temperature``. The offset is 0.

    Parameters
    ----------
    settings
        Of `BiEncoderLoss`. Options are those of `infonce.torch.clip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """

    kind = spec.CLIP

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Any:
        require("offset", offset, 0, "documents choose among the queries of all processes")
        self._require_positives(query_embeddings, doc_embeddings, offset)
        return functions.clip_loss(
            query_embeddings, doc_embeddings, **self._options(query_embeddings)
        )


class BiSigmoidLoss(BiEncoderLoss):
    """SigLIP without a bias: ``forward(query_embeddings [B, D], doc_embeddings [C, D], offset=0)``.

    ``loss = -1/(BC) sum_ij log sigmoid(t_ij <query_i, doc_j> / temperature)``, t_ij = 1 for
    j = i + offset, else -1. C is a multiple of B.

    Parameters
    ----------
    settings
        Of `BiEncoderLoss`. Options are those of `infonce.torch.siglip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    kind = spec.SIGLIP

    def refused(self) -> Refused:
        return {**super().refused(), **POSITIVES}

    def forward(self, query_embeddings: Tensor, doc_embeddings: Tensor, offset: int = 0) -> Any:
        return self._sigmoid_loss(query_embeddings, doc_embeddings, offset)


class BiNegativeCELoss(_ExplicitNegatives):
    """InfoNCE and explicit negatives: ``forward(query_embeddings [B, D], doc_embeddings [C, D],
    neg_doc_embeddings [B, K, D], offset=0)``.

    ``loss = (1 - w)/(BK) sum_ik log(1 + exp((n_ik - s_i,p(i)) / temperature)) + w BiEncoderLoss``,
    with s_ij and n_ik the products of query i with document j and with its negative k, and w the
    weight of the batch.

    Parameters
    ----------
    in_batch_term_weight : float in [0, 1], default 0.5
    settings
        Of `BiEncoderLoss`. Options are `method`, `workspace` and `progress`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `BiEncoderLoss`.
    """

    def __init__(
        self,
        temperature: float = 0.02,
        in_batch_term_weight: float = 0.5,
        pos_aware_negative_filtering: bool = False,
        max_batch_size: int = 1024,
        filter_threshold: float = 0.95,
        filter_factor: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(
            options, temperature=temperature, in_batch_term_weight=in_batch_term_weight,
            pos_aware_negative_filtering=pos_aware_negative_filtering,
            max_batch_size=max_batch_size, filter_threshold=filter_threshold,
            filter_factor=filter_factor,
        )  # fmt: skip
