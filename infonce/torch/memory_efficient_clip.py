"""In the place of MemoryEfficientCLIP's clip_loss and lit_loss: `MemoryEfficientCLIPLoss`,
`MemoryEfficientLiTLoss`.

Rows are normalised unless `normalized_inputs` says that they are, and the temperature is 0.07 by
default, as theirs. What differs: the maximum is online instead of fixed at 1 / temperature, float32
features are computed to float32's accuracy, and widths and batches need not be powers of two. Other
keywords are those of the functions of `infonce.torch`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import functions
from .modules import _Keywords

__all__ = ["MemoryEfficientCLIPLoss", "MemoryEfficientLiTLoss"]


class _MemoryEfficient(_Keywords):
    """What both have in common."""

    def __init__(
        self, temperature: float = 0.07, normalized_inputs: bool = False, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, normalize=not normalized_inputs, **options)


class MemoryEfficientCLIPLoss(_MemoryEfficient):
    """CLIP: ``forward(image_features [N, D], text_features [N, D])``.

    ``loss = -1/(2N) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = image text' / temperature``.

    Parameters
    ----------
    temperature : float, default 0.07
    normalized_inputs : bool, default False
        Whether features have unit norm already.
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

    def forward(self, image_features: Tensor, text_features: Tensor) -> Any:
        return functions.clip_loss(image_features, text_features, **self.options)


class MemoryEfficientLiTLoss(_MemoryEfficient):
    """LiT: ``forward(text_features [N, D], image_features [N, D])``; the image tower is locked.

    ``loss = -1/N sum_i log softmax(text image' / temperature)_ii``

    Parameters
    ----------
    temperature : float, default 0.07
    normalized_inputs : bool, default False
        Whether features have unit norm already.
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

    def forward(self, text_features: Tensor, image_features: Tensor) -> Any:
        return functions.lit_loss(text_features, image_features, **self.options)
