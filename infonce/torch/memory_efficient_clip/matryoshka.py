"""Matryoshka losses: a loss of each of several prefixes of the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..core.drop_in import require
from .pairs import (
    DistributedMemoryEfficientCLIPLoss,
    DistributedMemoryEfficientLiTLoss,
    MemoryEfficient,
    MemoryEfficientCLIPLoss,
    MemoryEfficientLiTLoss,
)
from .qwen3 import (
    DistributedMemoryEfficientLiTQwen3Loss,
    DistributedMemoryEfficientQwen3Loss,
    MemoryEfficientLiTQwen3Loss,
    MemoryEfficientQwen3Loss,
)


class MatryoshkaLoss(nn.Module):
    """Matryoshka representation learning around a loss: ``forward(*features [..., D], **options)``.

    ``loss = sum_k weights[k] base_loss(first dims[k] columns of the features)``

    Parameters
    ----------
    base_loss : module
        One of the losses here, with ``normalized_inputs=False``.
    dims : sequence of int
        Increasing.
    weights : sequence of float, optional
        1 for each if left out.

    Raises
    ------
    ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Kusupati et al.: Matryoshka Representation Learning, 2022.
    """

    def __init__(
        self, base_loss: Any, dims: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        _require_not_normalized(base_loss)
        self.base_loss = base_loss
        self.dims, self.weights = _read_prefixes(dims, weights)

    def forward(self, *features: Any, **options: Any) -> Any:
        _require_not_normalized(self.base_loss)
        return _over_prefixes(self.base_loss, self.dims, self.weights, features, options)


def _require_not_normalized(base_loss: Any) -> None:
    normalized = getattr(base_loss, "normalized_inputs", False)
    instead = "a prefix of a unit row is no unit row"
    require("base_loss.normalized_inputs", normalized, False, instead)


def _read_prefixes(dims: Any, weights: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Check `dims` and `weights`, and return the widths of the prefixes and their weights."""
    dims = tuple(map(int, dims))
    if not dims or list(dims) != sorted(set(dims)) or dims[0] < 1:
        raise ValueError(f"dims: expected increasing positive numbers, got {dims}")
    weights = (1.0,) * len(dims) if weights is None else tuple(map(float, weights))
    if len(weights) != len(dims):
        raise ValueError(
            f"weights: expected {len(dims)} of them, one for each of dims, got {len(weights)}"
        )
    return dims, weights


def _over_prefixes(
    loss: Callable[..., Any], dims: Any, weights: Any, features: Any, options: dict[str, Any]
) -> Any:
    """Weighted sum of the losses of the prefixes of `features`."""

    def cut(value: Any, width: int) -> Any:
        return value[..., :width] if isinstance(value, Tensor) else value

    if dims[-1] > (width := features[0].shape[-1]):
        raise ValueError(f"dims: expected at most the features' width {width}, got {dims[-1]}")
    return sum(
        weight * loss(*(cut(z, width) for z in features), **options)
        for width, weight in zip(dims, weights, strict=True)
    )


class _Matryoshka(MemoryEfficient):
    """Base of the losses of prefixes: the other base class has the loss of one prefix."""

    def __init__(
        self,
        dims: Sequence[int],
        weights: Sequence[float] | None = None,
        *settings: Any,
        **options: Any,
    ) -> None:
        super().__init__(*settings, **options)
        self.dims, self.weights = _read_prefixes(dims, weights)
        self._settings += ("dims", "weights")
        self.normalized_inputs = False  # each prefix is divided by its own norm

    def forward(self, *features: Any, **options: Any) -> Any:
        return _over_prefixes(super().forward, self.dims, self.weights, features, options)


class MemoryEfficientMatryoshkaCLIPLoss(_Matryoshka, MemoryEfficientCLIPLoss):
    """`MemoryEfficientCLIPLoss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `MemoryEfficientCLIPLoss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientCLIPLoss`.
    """


class MemoryEfficientMatryoshkaLiTLoss(_Matryoshka, MemoryEfficientLiTLoss):
    """`MemoryEfficientLiTLoss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `MemoryEfficientLiTLoss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientLiTLoss`.
    """


class MemoryEfficientMatryoshkaQwen3Loss(_Matryoshka, MemoryEfficientQwen3Loss):
    """`MemoryEfficientQwen3Loss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `MemoryEfficientQwen3Loss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientQwen3Loss`.
    """


class MemoryEfficientMatryoshkaLiTQwen3Loss(_Matryoshka, MemoryEfficientLiTQwen3Loss):
    """`MemoryEfficientLiTQwen3Loss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `MemoryEfficientLiTQwen3Loss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientLiTQwen3Loss`.
    """


class DistributedMemoryEfficientMatryoshkaCLIPLoss(_Matryoshka, DistributedMemoryEfficientCLIPLoss):
    """`DistributedMemoryEfficientCLIPLoss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `DistributedMemoryEfficientCLIPLoss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientCLIPLoss`.
    """


class DistributedMemoryEfficientMatryoshkaLiTLoss(_Matryoshka, DistributedMemoryEfficientLiTLoss):
    """`DistributedMemoryEfficientLiTLoss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `DistributedMemoryEfficientLiTLoss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientLiTLoss`.
    """


class DistributedMemoryEfficientMatryoshkaQwen3Loss(
    _Matryoshka, DistributedMemoryEfficientQwen3Loss
):
    """`DistributedMemoryEfficientQwen3Loss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `DistributedMemoryEfficientQwen3Loss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientQwen3Loss`.
    """


class DistributedMemoryEfficientMatryoshkaLiTQwen3Loss(
    _Matryoshka, DistributedMemoryEfficientLiTQwen3Loss
):
    """`DistributedMemoryEfficientLiTQwen3Loss` of prefixes of the features [N, D]:
    ``loss = sum_k weights[k] loss(first dims[k] columns)``.

    Parameters
    ----------
    dims, weights
        Of `MatryoshkaLoss`.
    settings
        Of `DistributedMemoryEfficientLiTQwen3Loss`. Prefixes are normalised in any case.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Those of `MatryoshkaLoss` and `MemoryEfficientLiTQwen3Loss`.
    """
