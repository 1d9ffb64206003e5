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
    Chen et al.: A Simple Framework for Contrastive Learning, 2020.
    """

    def __init__(self, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(temperature=temperature, **options)

    def forward(self, features: Tensor) -> Any:
        return functions.nt_xent_loss(features, **self.options)


class NTXentLoss(InfoNCELoss):
    """NT-Xent on two batches of views: ``forward(first [B, D], second [B, D])``, or on both in one
    array [2B, D]. `InfoNCELoss` of their concatenation, which has equation, errors and source.

    Parameters
    ----------
    temperature : float, default 0.5
    normalize : bool, default True
        Divide rows by their norms first.
    options
        Of `infonce.torch.nt_xent_loss`.
    """

    def __init__(self, temperature: float = 0.5, normalize: bool = True, **options: Any) -> None:
        super().__init__(temperature, normalize=normalize, **options)

    def forward(self, first: Tensor, second: Tensor | None = None) -> Any:
        import torch

        return super().forward(first if second is None else torch.cat([first, second]))


class CLIPLoss(_Settings):
    """CLIP's loss of two directions: ``forward(image [N, D], text [N, D], scale=None)``.

    ``loss = -1/(2N) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = scale image text'``.

    Parameters
    ----------
    options
        Of `infonce.torch.clip_loss`; `temperature` or `scale` here, or `scale` at the call, such as
        ``logit_scale.exp()``.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models, 2021.
    """

    def forward(self, image: Tensor, text: Tensor, scale: Any = None) -> Any:
        options = self.options if scale is None else {**self.options, "scale": scale}
        return functions.clip_loss(image, text, **options)


class LiTLoss(_Settings):
    """LiT's loss: ``forward(text [N, D], image [N, D])``; the image tower is locked.

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

    def __init__(
        self, temperature: float = 0.07, normalized_inputs: bool = False, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, normalize=not normalized_inputs, **options)

    def forward(self, text: Tensor, image: Tensor) -> Any:
        return functions.lit_loss(text, image, **self.options)


class SigLIPLoss(_Settings):
    """SigLIP's loss: ``forward(image [N, D], text [N, D], scale=None, bias=None)``.

    ``loss = -1/N sum_ij log sigmoid(t_ij (scale <image_i, text_j> + bias))``, t_ij = 1 for i = j,
    else -1.

    Parameters
    ----------
    options
        Of `infonce.torch.siglip_loss`; scale and bias are 10 and -10 where they are not given.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    def forward(self, image: Tensor, text: Tensor, scale: Any = None, bias: Any = None) -> Any:
        options = self.options if scale is None else {**self.options, "scale": scale}
        return functions.siglip_loss(image, text, bias, **options)
