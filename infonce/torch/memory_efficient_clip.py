"""In the place of MemoryEfficientCLIP's losses for one GPU: `MemoryEfficientCLIPLoss` and
`MemoryEfficientLiTLoss`, their Stable variants, and the functions for unit rows under them.

Rows are normalised unless `normalized_inputs` says that they are, and the temperature is 0.07 by
default, as theirs. What differs: the maximum is online instead of fixed at 1 / temperature, float32
features are computed to float32's accuracy, and widths and batches need not be powers of two.
`tau_plus` is an error. Other keywords are those of the functions of `infonce.torch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import functions
from .core.drop_in import DropIn, require

__all__ = [
    "MemoryEfficientCLIPLoss",
    "MemoryEfficientCLIPLossNormed",
    "MemoryEfficientLiTLoss",
    "MemoryEfficientLiTLossNormed",
    "StableMemoryEfficientCLIPLoss",
    "StableMemoryEfficientCLIPLossNormed",
    "StableMemoryEfficientLiTLoss",
    "StableMemoryEfficientLiTLossNormed",
]


class _MemoryEfficient(DropIn):
    """What both losses have in common."""

    _loss: Callable[..., Any]
    _stable = False

    def __init__(
        self,
        temperature: float = 0.07,
        normalized_inputs: bool = False,
        stable: bool | None = None,
        tau_plus: float = 0.0,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(
            options,
            temperature=temperature,
            normalized_inputs=normalized_inputs,
            stable=self._stable if stable is None else stable,
            tau_plus=tau_plus,
            label_smoothing=label_smoothing,
        )

    def forward(self, first: Tensor, second: Tensor, tau_plus: Any = None) -> Any:
        given = self.tau_plus if tau_plus is None else tau_plus
        require("tau_plus", given, 0.0, "use false_negative_margin, which drops likely positives")
        loss = type(self)._loss(
            first,
            second,
            temperature=self.temperature,
            normalize=not self.normalized_inputs,
            label_smoothing=self.label_smoothing,
            **self.options,
        )
        if not self.stable:
            return loss
        # The same value, with sqrt(N temperature) times the gradient
        return loss.detach() + math.sqrt(len(first) * self.temperature) * (loss - loss.detach())


class MemoryEfficientCLIPLoss(_MemoryEfficient):
    """CLIP: ``forward(image_features [N, D], text_features [N, D])``.

    ``loss = -1/(2N) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = image text' / temperature``.

    Parameters
    ----------
    temperature : float, default 0.07
    normalized_inputs : bool, default False
        Whether features have unit norm already.
    stable : bool, default False
        Gradients are those of the loss times ``sqrt(N temperature)``.
    tau_plus : float
        0.
    label_smoothing : float in [0, 1), default 0
        Share of the targets that is spread over all keys.
    options
        Of `infonce.torch.clip_loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """

    _loss = staticmethod(functions.clip_loss)


class MemoryEfficientLiTLoss(_MemoryEfficient):
    """LiT: ``forward(text_features [N, D], image_features [N, D])``; the image tower is locked.

    ``loss = -1/N sum_i log softmax(text image' / temperature)_ii``

    Parameters
    ----------
    temperature, normalized_inputs, stable, tau_plus, label_smoothing
        As of `MemoryEfficientCLIPLoss`.
    options
        Of `infonce.torch.lit_loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """

    _loss = staticmethod(functions.lit_loss)


class StableMemoryEfficientCLIPLoss(MemoryEfficientCLIPLoss):
    """`MemoryEfficientCLIPLoss` with ``stable=True``: ``dloss = sqrt(N temperature) dloss`` of that
    one, for features [N, D].

    Parameters
    ----------
    options
        Of `MemoryEfficientCLIPLoss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """

    _stable = True


class StableMemoryEfficientLiTLoss(MemoryEfficientLiTLoss):
    """`MemoryEfficientLiTLoss` with ``stable=True``: ``dloss = sqrt(N temperature) dloss`` of that
    one, for features [N, D].

    Parameters
    ----------
    options
        Of `MemoryEfficientLiTLoss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """

    _stable = True


class _Normed:
    """A loss of unit rows, with the `apply` of an autograd function."""

    _module: type[_MemoryEfficient]

    @classmethod
    def apply(cls, first: Tensor, second: Tensor, temperature: float = 0.07) -> Any:
        return cls._module(temperature, normalized_inputs=True)(first, second)


class MemoryEfficientCLIPLossNormed(_Normed):
    """`MemoryEfficientCLIPLoss` of unit rows: ``apply(image, text, temperature=0.07)``."""

    _module = MemoryEfficientCLIPLoss


class MemoryEfficientLiTLossNormed(_Normed):
    """`MemoryEfficientLiTLoss` of unit rows: ``apply(text, image, temperature=0.07)``."""

    _module = MemoryEfficientLiTLoss


class StableMemoryEfficientCLIPLossNormed(_Normed):
    """`StableMemoryEfficientCLIPLoss` of unit rows: ``apply(image, text, temperature=0.07)``."""

    _module = StableMemoryEfficientCLIPLoss


class StableMemoryEfficientLiTLossNormed(_Normed):
    """`StableMemoryEfficientLiTLoss` of unit rows: ``apply(text, image, temperature=0.07)``."""

    _module = StableMemoryEfficientLiTLoss
