"""The results of the losses: a loss with gradients, and metrics. `dispatch` makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

Array = Any  # of the library of the caller's arrays


# The types of `LossAndGrad.grads`: `spec.Loss.grads` names the type of each loss. Arrays have the
# shapes of the arguments; None: the gradient is not wanted (`wrt`)


class QueryKeyGrads(NamedTuple):
    """Gradients of `info_nce` and `gte`."""

    query: Array | None
    key: Array | None
    scale: Array | None


class QueryKeyOwnGrads(NamedTuple):
    """Gradients of `info_nce` with `own` negatives."""

    query: Array | None
    key: Array | None
    own: Array | None
    scale: Array | None


class FeaturesGrads(NamedTuple):
    """Gradients of `nt_xent` and `sup_con`."""

    features: Array | None
    scale: Array | None


class ImageTextGrads(NamedTuple):
    """Gradients of `clip`."""

    image: Array | None
    text: Array | None
    scale: Array | None


class TextImageGrads(NamedTuple):
    """Gradients of `lit`. The image encoder is frozen, so `image` is always None."""

    text: Array | None
    image: None
    scale: Array | None


class SigmoidGrads(NamedTuple):
    """Gradients of `siglip`."""

    image: Array | None
    text: Array | None
    scale: Array | None
    bias: Array | None


@dataclass(frozen=True)
class Metrics:
    """Retrieval metrics (`metrics=True`), without a matrix of logits.

    In `infonce.distributed`, losses are of the whole batch; vectors are of this rank's rows,
    compared with the keys of all ranks.

    Attributes
    ----------
    row_loss, column_loss : 0-d float64 arrays
        Mean loss of queries, and of keys, without `weights`; column_loss is None if keys have no
        softmax (all losses except `clip`).
    row_rank : integer array [M]
        Retrieval rank of each query's positive: the number of keys with a higher logit, without
        excluded pairs; 0 is best. A key that equals the positive has the same logit up to rounding.
        The CPU's tiles do not count such keys; on a GPU and over ranks, they may count.
    column_rank : integer array [N] or None
        Retrieval rank of each key's positive among the queries (`clip`); otherwise None.
    positive : float64 array [M]
        Logit of each query's positive, scale times dot product.
    hardest_negative : float64 array [M]
        Largest logit among each query's negatives; -inf if there are none.
    """

    row_loss: Array
    column_loss: Array | None
    row_rank: Array
    column_rank: Array | None
    positive: Array
    hardest_negative: Array

    def top(self, k: int) -> tuple[float, float | None]:
        """Shares (0 to 1) of rows, and of columns or None, whose positive is among the best `k`;
        NaN for a rank without rows."""

        def fraction(rank: Array) -> float:
            return float((rank < k).sum()) / len(rank) if len(rank) else math.nan

        columns = self.column_rank
        return fraction(self.row_rank), None if columns is None else fraction(columns)


class LossAndGrad:
    """Result of the functions `X_loss_and_grad`.

    Attributes
    ----------
    loss : 0-d array, or [M] with ``reduction="none"``
        float64 for float64 features, else float32.
    grads : NamedTuple
        One field for each feature argument, with its name; `scale`: dL/dscale, also if a
        temperature was passed (dL/dtemperature is -scale^2 dL/dscale); `bias` for `siglip`. None
        for names that are not in `wrt`.
    lse : array [M], pair of arrays ([M], [N]) for `clip`, None for `siglip`
        Log-sum-exp of every row (and column): the logarithm of its softmax's denominator.
    metrics : Metrics or None
    logits : array [M, N] or None
        The scaled logits, with ``method="naive", return_logits=True``; excluded pairs are -inf.
    """

    def __init__(
        self,
        loss: Array,
        grads: Any,
        lse: Any = None,
        metrics: Metrics | None = None,
        logits: Array | None = None,
    ) -> None:
        self.loss, self.grads, self.metrics, self.logits = loss, grads, metrics, logits
        self._lse = lse

    @property
    def lse(self) -> Any:
        if callable(self._lse):  # a function that converts the log-sum-exps: see `dispatch._lse`
            self._lse = self._lse()
        return self._lse

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which cannot have the function that `_lse` may be."""
        return {**vars(self), "_lse": self.lse}

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)!r}" for name in ("loss", "grads", "lse", "metrics"))
        return f"LossAndGrad({', '.join(fields)})"
