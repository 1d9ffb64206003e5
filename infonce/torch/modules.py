"""The losses as modules: a function of `infonce.torch`, and some of its keywords."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import docstrings, losses
from . import functions

DOC = """
    >>> criterion = infonce.torch.{name}(normalize=True)
    >>> loss = criterion({call_arguments}, scale=20.0)

    The function `infonce.torch.{loss}` as a module: it is called with the same arguments,
    ``forward({call_arguments}, **options)``.

    Parameters
    ----------
    {arguments} : tensors [rows, features]
        At the call, with `labels` and `bias` if the function has them.
    options
        Keywords of the function, with its defaults, at construction or at the call; those of the
        call take precedence:
        ``{name}(normalize=True)({call_arguments}, scale=logit_scale.exp())``.

    Returns
    -------
    0-d tensor, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        At the call, those of the function.
"""


class _Keywords(nn.Module):
    """A module that keeps keywords of a function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


@docstrings.adapted(losses.info_nce_loss, DOC)
class InfoNCELoss(_Keywords):
    def forward(
        self, query: Tensor, key: Tensor, labels: Tensor | None = None, **options: Any
    ) -> Any:
        return functions.info_nce_loss(query, key, labels, **{**self.options, **options})


@docstrings.adapted(losses.nt_xent_loss, DOC)
class NTXentLoss(_Keywords):
    def forward(self, features: Tensor, **options: Any) -> Any:
        return functions.nt_xent_loss(features, **{**self.options, **options})


@docstrings.adapted(losses.clip_loss, DOC)
class CLIPLoss(_Keywords):
    def forward(self, image: Tensor, text: Tensor, **options: Any) -> Any:
        return functions.clip_loss(image, text, **{**self.options, **options})


@docstrings.adapted(losses.lit_loss, DOC)
class LiTLoss(_Keywords):
    def forward(self, text: Tensor, image: Tensor, **options: Any) -> Any:
        return functions.lit_loss(text, image, **{**self.options, **options})


@docstrings.adapted(losses.siglip_loss, DOC)
class SigLIPLoss(_Keywords):
    def forward(self, image: Tensor, text: Tensor, bias: Any = None, **options: Any) -> Any:
        return functions.siglip_loss(image, text, bias, **{**self.options, **options})


@docstrings.adapted(losses.sup_con_loss, DOC)
class SupConLoss(_Keywords):
    def forward(self, features: Tensor, labels: Tensor, **options: Any) -> Any:
        return functions.sup_con_loss(features, labels, **{**self.options, **options})


@docstrings.adapted(losses.gte_loss, DOC)
class GTELoss(_Keywords):
    def forward(self, query: Tensor, key: Tensor, **options: Any) -> Any:
        return functions.gte_loss(query, key, **{**self.options, **options})
