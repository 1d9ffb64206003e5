"""In the place of the InfoNCE CUDA report's extension: its module `InfoNCELoss`.

The name is theirs: the loss is NT-Xent, on one array with two views of each sample. What differs:
features stay on their device and keep their dtype, where theirs become float32 on a GPU, and no
matrix of logits is kept. Other keywords are those of `infonce.torch.nt_xent_loss`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .core.drop_in import DropIn
from .functions import nt_xent_loss

__all__ = ["InfoNCELoss"]


class InfoNCELoss(DropIn):
    """NT-Xent: ``forward(features [2B, D])`` of unit norm, i and i + B two views of one sample.

    ``loss = -1/2B sum_i log softmax_{j != i}(z z' / temperature)_i,partner(i)``

    Parameters
    ----------
    temperature : float, default 0.5
    options
        Of `infonce.torch.nt_xent_loss`: ``normalize=True`` for features of any norm.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """

    def __init__(self, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(options, temperature=temperature)

    def forward(self, features: Tensor) -> Any:
        return nt_xent_loss(features, temperature=self.temperature, **self.options)
