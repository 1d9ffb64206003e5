"""The losses as modules: settings at construction, features at the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import functions


class _Settings(nn.Module):
    """Keeps the options of a function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class InfoNCELoss(_Settings):
    """NT-Xent on ``[2B, D]`` features of unit norm, i and i + B two views of one sample.

    ``loss = -1/2B sum_i log softmax_{j != i}(z z' / temperature)_i,partner(i)``
    (Chen et al., 2020).

    Parameters
    ----------
    temperature : float, default 0.5
    options
        Of `infonce.torch.nt_xent_loss`: ``normalize=True`` for features of any norm.
    """

    def __init__(self, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(temperature=temperature, **options)

    def forward(self, features: Tensor) -> Any:
        return functions.nt_xent_loss(features, **self.options)


class NTXentLoss(InfoNCELoss):
    """`InfoNCELoss` on two batches of views, normalised: ``forward(first [B, D], second [B, D])``,
    or on both in one array."""

    def __init__(self, temperature: float = 0.5, normalize: bool = True, **options: Any) -> None:
        super().__init__(temperature, normalize=normalize, **options)

    def forward(self, first: Tensor, second: Tensor | None = None) -> Any:
        import torch

        return super().forward(first if second is None else torch.cat([first, second]))


class CLIPLoss(_Settings):
    """CLIP's loss of two directions (Radford et al., 2021): see `infonce.torch.clip_loss`.

    ``forward(image [N, D], text [N, D], scale=None)``; `scale` at the call, such as
    ``logit_scale.exp()``, or `temperature` at construction.
    """

    def forward(self, image: Tensor, text: Tensor, scale: Any = None) -> Any:
        options = self.options if scale is None else {**self.options, "scale": scale}
        return functions.clip_loss(image, text, **options)


class LiTLoss(_Settings):
    """LiT's loss (Zhai et al., 2022): see `infonce.torch.lit_loss`.

    Parameters
    ----------
    temperature : float, default 0.07
    normalized_inputs : bool, default False
        Whether features have unit norm already.
    """

    def __init__(
        self, temperature: float = 0.07, normalized_inputs: bool = False, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, normalize=not normalized_inputs, **options)

    def forward(self, text: Tensor, image: Tensor) -> Any:
        return functions.lit_loss(text, image, **self.options)


class SigLIPLoss(_Settings):
    """SigLIP's loss (Zhai et al., 2023): ``forward(image, text, scale=None, bias=None)``; see
    `infonce.torch.siglip_loss`."""

    def forward(self, image: Tensor, text: Tensor, scale: Any = None, bias: Any = None) -> Any:
        options = self.options if scale is None else {**self.options, "scale": scale}
        return functions.siglip_loss(image, text, bias, **options)
