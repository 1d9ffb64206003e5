"""In the place of open_clip's losses: `ClipLoss` and `SigLipLoss` of open_clip.loss.

The constructors and the calls are the same. What differs: the loss is float32 (float64 for float64)
where open_clip's has the features' dtype; over ranks nothing is gathered, the loss is that of all
ranks' rows whatever `local_loss` and `dist_impl`, and gradients are right under DDP; `use_horovod`
is an error. Other keywords are those of the functions of `infonce.torch`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import functions
from .core.drop_in import DropIn, require

__all__ = ["ClipLoss", "SigLipLoss"]


class _OpenClip(DropIn):
    """What open_clip's losses have in common: over ranks, the ring over torch.distributed."""

    def __init__(self, options: dict[str, Any], rank: int, world_size: int, **others: Any) -> None:
        super().__init__(options, rank=rank, world_size=world_size, **others)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank, world_size: expected 0 <= rank < world_size, got {rank} and {world_size}"
            )

    def _options(self, scale: Any) -> dict[str, Any]:
        """Keywords of one call."""
        if self.world_size == 1:
            return {**self.options, "scale": scale}
        from .core import process_group

        group = process_group.connect(self.options.get("group"))
        if (group.rank, group.size) != (self.rank, self.world_size):
            raise ValueError(
                f"rank, world_size: expected {group.rank} and {group.size}, those of the process "
                f"group, got {self.rank} and {self.world_size}"
            )
        return {**self.options, "scale": scale, "group": group}


class ClipLoss(_OpenClip):
    """CLIP: ``forward(image_features [N, D], text_features [N, D], logit_scale, logit_bias=None,
    output_dict=False)``.

    ``loss = -1/(2N) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = logit_scale image text'``. A bias common to all logits changes neither loss nor gradient.

    Parameters
    ----------
    rank, world_size : int
        Those of torch.distributed. With ``world_size > 1`` the loss is that of all ranks' rows, and
        gradients are those that open_clip's loss has with `gather_with_grad`.
    local_loss, gather_with_grad, cache_labels : bool
        Of no use here: nothing is gathered, and no labels are made.
    use_horovod : bool
        False.
    options
        Of `infonce.torch.clip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
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
        require("use_horovod", use_horovod, False, "ranks are torch.distributed's")
        super().__init__(
            options, rank, world_size,
            local_loss=local_loss, gather_with_grad=gather_with_grad, cache_labels=cache_labels,
        )  # fmt: skip

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
    """SigLIP: ``forward(image_features [N, D], text_features [N, D], logit_scale, logit_bias,
    output_dict=False)``.

    ``loss = -1/N sum_ij log sigmoid(t_ij (logit_scale <image_i, text_j> + logit_bias))``, t_ij = 1
    for i = j, else -1.

    Parameters
    ----------
    rank, world_size : int
        As of `ClipLoss`.
    cache_labels : bool
    dist_impl : str
    chunk_size : int
        Of no use here: ranks are a ring, and no matrix of logits is kept.
    options
        Of `infonce.torch.siglip_loss`.

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
        chunk_size: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(
            options, rank, world_size,
            cache_labels=cache_labels, dist_impl=dist_impl, chunk_size=chunk_size,
        )  # fmt: skip

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
