"""The losses of Qwen3 Embedding: queries against documents and, as negatives, other queries, the
documents of others and hard negatives of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import spec
from ...checks import validation
from ...kernels.options import OPTIONS
from ..core.drop_in import Refused, first_row, refuse, require, require_shape
from ..functions import info_nce_loss
from .pairs import MemoryEfficient


class MemoryEfficientQwen3Loss(MemoryEfficient):
    """Qwen3 Embedding: ``forward(query_features [N, D], doc_features [N, D],
    hard_negative_features=None [N, K, D])``.

    With cosines over `temperature` as logits x,

    ``loss = 1/N sum_i ( log Z_i - x(q_i, d_i) )``,
    ``Z_i = sum_j exp x(q_i, d_j) + sum_k exp x(q_i, h_ik)``, and for j != i ``exp x(q_i, q_j)`` and
    ``exp x(d_i, d_j)`` if they are asked for, without the negatives that `margin` leaves out.

    Parameters
    ----------
    temperature : float, default 0.07
    margin : float, default 0.1
        A negative whose cosine exceeds the positive's by more than this is left out; from 2 on,
        none is, because cosines differ by at most 2.
    use_qq_negatives, use_dd_negatives : bool, default False
        Whether the other queries are negatives of a query, and the other documents of its document.
        With the documents, rows are twice as wide.
    normalized_inputs, stable, tau_plus
        As of `MemoryEfficientCLIPLoss`.
    label_smoothing : float in [0, 1), default 0
        Share of the targets that is spread over all keys. It needs a margin of 2 and more, and no
        hard negatives.
    options
        Of `infonce.torch.info_nce_loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Zhang et al.: Qwen3 Embedding, 2025 (equation 1).
    """

    kind = spec.INFO_NCE
    _locked = False  # whether documents get no gradient

    def __init__(
        self,
        temperature: float = 0.07,
        margin: float = 0.1,
        use_qq_negatives: bool = False,
        use_dd_negatives: bool = False,
        normalized_inputs: bool = False,
        stable: bool = True,
        tau_plus: float = 0.0,
        label_smoothing: float = 0.0,
        group: Any = None,
        **options: Any,
    ) -> None:
        # before the constructor, because these decide which options it refuses
        self.margin = margin
        self.use_qq_negatives, self.use_dd_negatives = use_qq_negatives, use_dd_negatives
        super().__init__(
            temperature, normalized_inputs, stable, tau_plus, label_smoothing, group, **options
        )  # fmt: skip
        self._settings += ("margin", "use_qq_negatives", "use_dd_negatives")

    def check_setting(self, name: str, value: Any) -> None:
        super().check_setting(name, value)
        if name == "margin":
            validation.number(name, value, (math.inf,))

    def refused(self) -> Refused:
        refused = {**super().refused()}
        refused |= refuse(["own", "own_indices"], "pass hard_negative_features")
        if self.use_qq_negatives or self.use_dd_negatives:
            names = [*OPTIONS, "in_batch"]
            refused |= refuse(names, "it has no values for queries and documents as negatives")
        refused |= refuse(["false_negative_margin"], "margin leaves out likely positives")
        if self.use_dd_negatives:
            refused |= refuse(["dims", "dim_weights"], "rows are queries beside documents")
        return refused

    def forward(
        self,
        query_features: Tensor,
        doc_features: Tensor,
        hard_negative_features: Tensor | None = None,
        tau_plus: Any = None,
    ) -> Any:
        call_options, own = self._call_options(tau_plus), hard_negative_features
        group = call_options.get("group")
        if self.margin < 2 or own is not None:
            require(
                "label_smoothing", self.label_smoothing, 0.0,
                "it is there with a margin of 2 and without hard negatives",
            )  # fmt: skip
        call_options["label_smoothing"] = self.label_smoothing
        call_options["false_negative_margin"] = self.margin if self.margin < 2 else math.inf
        query, documents = query_features, doc_features
        require_shape("doc_features", documents, tuple(query.shape))
        if own is not None:
            expected = (len(query), *own.shape[1:2], query.shape[-1])
            require_shape("hard_negative_features", own, expected)
            own = own if own.shape[1] else None
        if self._locked:
            documents, own = documents.detach(), None if own is None else own.detach()

        # All sums of a row as one InfoNCE loss: the keys are the documents, then (if asked for) the
        # queries and the documents again. With the last, rows (q, d) are twice as wide, and keys
        # are (d, 0), (q, 0) and (0, d): their dot products are q d', q q' and d d'.
        if self.use_dd_negatives and call_options["normalize"]:
            call_options["normalize"] = False  # each half of a row is divided by its own norm
            query, documents = (nn.functional.normalize(z, dim=-1) for z in (query, documents))
            own = None if own is None else nn.functional.normalize(own, dim=-1)
        rows, key_sets = query, [documents]
        if self.use_qq_negatives:
            key_sets.append(query)
        if self.use_dd_negatives:
            width = query.shape[1]
            rows = torch.cat([query, documents], dim=1)
            key_sets = [nn.functional.pad(keys, (0, width)) for keys in key_sets]
            key_sets.append(nn.functional.pad(documents, (width, 0)))
            own = None if own is None else nn.functional.pad(own, (0, width))
        keys = torch.cat(key_sets)
        labels = torch.arange(len(rows), device=rows.device)
        if len(key_sets) > 1:  # a row's own query and document are no negatives of the row
            ids = labels + first_row(group, len(rows))
            call_options["ids"] = (ids, ids.repeat(len(key_sets)))
        if own is not None:
            call_options["own"] = own
        labels = labels + first_row(group, len(keys))
        loss = info_nce_loss(rows, keys, labels, **call_options)
        return self._scaled(loss, len(rows), group)


class MemoryEfficientLiTQwen3Loss(MemoryEfficientQwen3Loss):
    """`MemoryEfficientQwen3Loss` with locked documents: ``forward(query_features [N, D],
    doc_features [N, D], hard_negative_features=None [N, K, D])``; only queries get a gradient.

    ``loss = 1/N sum_i ( log Z_i - x(q_i, d_i) )``, as there, without other documents of a document.

    Parameters
    ----------
    temperature, margin, use_qq_negatives, normalized_inputs, stable, tau_plus, label_smoothing, \
options
        Of `MemoryEfficientQwen3Loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientQwen3Loss`.
    """

    _locked = True

    def __init__(
        self,
        temperature: float = 0.07,
        margin: float = 0.1,
        use_qq_negatives: bool = False,
        *settings: Any,
        **options: Any,
    ) -> None:
        super().__init__(temperature, margin, use_qq_negatives, False, *settings, **options)


class DistributedMemoryEfficientQwen3Loss(MemoryEfficientQwen3Loss):
    """`MemoryEfficientQwen3Loss` over processes: ``forward(query_features, doc_features,
    hard_negative_features=None)`` of this process's rows [rows, D], [rows, D], [rows, K, D].

    The sum over processes is ``loss`` of all rows. Gradients are of the loss of all rows, not
    multiplied by the number of processes.

    Parameters
    ----------
    group : torch.distributed process group, optional
        All processes if left out.
    settings
        Of `MemoryEfficientQwen3Loss`, and of `infonce.torch.info_nce_loss` over processes.

    Raises
    ------
    TypeError, ValueError, RankError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientQwen3Loss`.
    """

    _shared = True


class DistributedMemoryEfficientLiTQwen3Loss(MemoryEfficientLiTQwen3Loss):
    """`MemoryEfficientLiTQwen3Loss` over processes, as `DistributedMemoryEfficientQwen3Loss`:
    the sum over processes is ``loss`` of all rows.

    Parameters
    ----------
    group : torch.distributed process group, optional
        All processes if left out.
    settings
        Of `MemoryEfficientLiTQwen3Loss`, for this process's rows [rows, D].

    Raises
    ------
    TypeError, ValueError, RankError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientQwen3Loss`.
    """

    _shared = True
