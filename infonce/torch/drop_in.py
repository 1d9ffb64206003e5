"""Losses with the constructor and the call of those they replace: change the import, nothing else.

from open_clip.loss import ClipLoss, SigLipLoss   ->  from infonce.torch import ClipLoss, ...
from clip_loss import MemoryEfficientCLIPLoss     ->  from infonce.torch import ...
from inf_cl import cal_inf_loss                   ->  from infonce.torch import cal_inf_loss
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import functions
from .modules import LiTLoss, _Settings


def _one_rank(world_size: int) -> None:
    if world_size != 1:
        raise ValueError(
            f"world_size: expected 1, got {world_size}: these modules see one process's batch; "
            "infonce.distributed computes the loss of all ranks' batches"
        )


class ClipLoss(nn.Module):
    """open_clip's ClipLoss on one process.

    ``forward(image_features, text_features, logit_scale, logit_bias=None, output_dict=False)``.
    A bias common to all logits changes neither loss nor gradient.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        _one_rank(world_size)
        self.options = options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        logit_bias: Any = None,
        output_dict: bool = False,
    ) -> Any:
        loss = functions.clip_loss(image_features, text_features, scale=logit_scale, **self.options)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """open_clip's SigLipLoss on one process: ``forward(image_features, text_features, logit_scale,
    logit_bias, output_dict=False)``."""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _one_rank(world_size)
        self.options = options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        logit_bias: Any = None,
        output_dict: bool = False,
    ) -> Any:
        bias = 0.0 if logit_bias is None else logit_bias
        loss = functions.siglip_loss(
            image_features, text_features, bias, scale=logit_scale, **self.options
        )
        return {"contrastive_loss": loss} if output_dict else loss


class MemoryEfficientCLIPLoss(_Settings):
    """MemoryEfficientCLIP's module: ``MemoryEfficientCLIPLoss(temperature=0.07,
    normalized_inputs=False)(image_features, text_features)``."""

    def __init__(
        self, temperature: float = 0.07, normalized_inputs: bool = False, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, normalize=not normalized_inputs, **options)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Any:
        return functions.clip_loss(image_features, text_features, **self.options)


class MemoryEfficientLiTLoss(LiTLoss):
    """MemoryEfficientCLIP's module for LiT: ``forward(text_features, image_features)``."""


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Any = None, **options: Any
) -> Any:
    """Inf-CL's function: queries against keys, mean over queries; `scale` is 1 if left out."""
    return functions.info_nce_loss(q, k, labels, scale=1.0 if scale is None else scale, **options)
