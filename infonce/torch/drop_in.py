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


class _OpenClip(nn.Module):
    """What open_clip's losses have in common: over ranks, the ring over torch.distributed."""

    def __init__(
        self, rank: int, world_size: int, options: dict[str, Any], use_horovod: bool = False
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod: expected False, got True: ranks are torch.distributed's")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank, world_size: expected 0 <= rank < world_size, got {rank} and {world_size}"
            )
        self.rank, self.world_size, self.options = rank, world_size, options

    def _options(self, scale: Any) -> dict[str, Any]:
        """Keywords of one call."""
        if self.world_size == 1:
            return {**self.options, "scale": scale}
        from . import process_group

        group = process_group.connect(self.options.get("group"))
        if (group.rank, group.size) != (self.rank, self.world_size):
            raise ValueError(
                f"rank, world_size: expected {group.rank} and {group.size}, those of the process "
                f"group, got {self.rank} and {self.world_size}"
            )
        return {**self.options, "scale": scale, "group": group}


class ClipLoss(_OpenClip):
    """open_clip's ClipLoss: `infonce.torch.clip_loss`, which has the equation.

    ``forward(image_features [N, D], text_features [N, D], logit_scale, logit_bias=None,
    output_dict=False)``. A bias common to all logits changes neither loss nor gradient. With
    ``world_size > 1`` the loss is that of all ranks' rows, whatever `local_loss`, and gradients are
    right under DDP (as open_clip's are with `gather_with_grad`); nothing is gathered.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models, 2021.
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
        super().__init__(rank, world_size, options, use_horovod)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        logit_bias: Any = None,
        output_dict: bool = False,
    ) -> Any:
        loss = functions.clip_loss(image_features, text_features, **self._options(logit_scale))
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(_OpenClip):
    """open_clip's SigLipLoss: `infonce.torch.siglip_loss`, which has the equation.

    ``forward(image_features [N, D], text_features [N, D], logit_scale, logit_bias,
    output_dict=False)``. Over ranks as `ClipLoss`, whatever `dist_impl`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(rank, world_size, options)

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
            image_features, text_features, bias, **self._options(logit_scale)
        )
        return {"contrastive_loss": loss} if output_dict else loss


class MemoryEfficientCLIPLoss(_Settings):
    """MemoryEfficientCLIP's module: ``forward(image_features [N, D], text_features [N, D])``.

    The loss is that of `infonce.torch.clip_loss`, which has the equation, with online maxima.

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
        Naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models, 2021.
    """

    def __init__(
        self, temperature: float = 0.07, normalized_inputs: bool = False, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, normalize=not normalized_inputs, **options)

    def forward(self, image_features: Tensor, text_features: Tensor) -> Any:
        return functions.clip_loss(image_features, text_features, **self.options)


class MemoryEfficientLiTLoss(LiTLoss):
    """MemoryEfficientCLIP's module for LiT.

    ``forward(text_features [N, D], image_features [N, D])``. The same as
    `LiTLoss`, which has equation, parameters, errors and source.
    """


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Any = None, **options: Any
) -> Any:
    """Inf-CL's function: queries against keys, mean over queries; `scale` is 1 if left out.

    ``loss = -1/M sum_i log softmax(scale q k')_i,labels[i]``

    Parameters
    ----------
    q : tensor [M, D]
    k : tensor [N, D]
    labels : integer tensor [M], optional
        The positive key of each query; key i for query i if left out.
    options
        Of `infonce.torch.info_nce_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Cheng et al.: Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive
    Loss, 2024.
    """
    return functions.info_nce_loss(q, k, labels, scale=1.0 if scale is None else scale, **options)
