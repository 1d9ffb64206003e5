"""Drop-in replacements for open_clip's losses: `ClipLoss`, `SigLipLoss`, `CoCaLoss` and
`DistillClipLoss` of open_clip.loss, and `create_loss`.

The constructors and the calls are the same. What differs: the loss is float32 (float64 for float64
features), while open_clip's has the features' dtype. Over ranks the loss is always that of the rows
of all ranks, without regard to `local_loss` and `dist_impl`, and DDP's average of its gradients is
the gradient of this loss. ``use_horovod=True`` is an error. Other keywords are those of the
functions of `infonce.torch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import spec
from ..checks.teacher import DISTILL
from . import functions
from .core.drop_in import (
    SCALE,
    DropIn,
    Refused,
    group_of,
    refuse,
    require,
    require_rank,
    with_zero_gradient,
)
from .functions import distill_loss

__all__ = ["ClipLoss", "CoCaLoss", "DistillClipLoss", "SigLipLoss", "create_loss"]


class _OpenClip(DropIn):
    """Base of open_clip's losses, which share a batch over the ranks of a process group."""

    def __init__(self, options: dict[str, Any], rank: int, world_size: int, **others: Any) -> None:
        super().__init__(options, rank=rank, world_size=world_size, **others)
        require_rank(rank, world_size)

    def refused(self) -> Refused:
        return SCALE | refuse(["metrics"], "a loss here is one tensor: use infonce.torch.clip_loss")

    def _options(self, scale: Any) -> dict[str, Any]:
        """The keywords of one call of a function of `infonce.torch`."""
        options = {**self.call_options(), "scale": scale}
        group = group_of(self.rank, self.world_size, options.pop("group", None))
        return options if group is None else {**options, "group": group}


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
        Without effect: the loss is always that of all ranks' rows, and no labels are made.
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

    kind = spec.CLIP

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
        super().__init__(
            options, rank, world_size, local_loss=local_loss, gather_with_grad=gather_with_grad,
            cache_labels=cache_labels, use_horovod=use_horovod,
        )  # fmt: skip

    def check_setting(self, name: str, value: Any) -> None:
        if name == "use_horovod":
            require(name, value, False, "ranks are torch.distributed's")

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        logit_bias: Any = None,
        output_dict: bool = False,
    ) -> Any:
        loss = functions.clip_loss(image_features, text_features, **self._options(logit_scale))
        loss = with_zero_gradient(loss, logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss


class CoCaLoss(ClipLoss):
    """CoCa: ``forward(image_features [N, D], text_features [N, D], logits [N, T, V], labels [N, T],
    logit_scale, output_dict=False)``, a pair of losses.

    ``contrastive = clip_loss_weight ClipLoss``, and with V logits for each token, over the tokens
    that are not `pad_id`,

    ``caption = -caption_loss_weight mean_nt log softmax(logits_nt)_labels[n, t]``.

    Parameters
    ----------
    caption_loss_weight, clip_loss_weight : float
        With a `clip_loss_weight` of 0 the contrastive loss is not computed.
    pad_id : int, default 0
        The label of positions without a token.
    settings
        Of `ClipLoss`. The caption loss is that of this rank's rows.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Yu et al.: CoCa: Contrastive Captioners are Image-Text Foundation Models, 2022.
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        *settings: Any,
        **options: Any,
    ) -> None:
        super().__init__(*settings, **options)
        self.caption_loss_weight = caption_loss_weight
        self.clip_loss_weight = clip_loss_weight
        self._settings += ("caption_loss_weight", "clip_loss_weight")
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def refused(self) -> Refused:
        instead = "the caption loss has no such keyword"
        return {**super().refused(), **refuse(["reduction", "weights"], instead)}

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Any,
        output_dict: bool = False,
    ) -> Any:
        contrastive: Any = torch.zeros((), device=logits.device)
        if self.clip_loss_weight:
            contrastive = super().forward(image_features, text_features, logit_scale)
            contrastive = self.clip_loss_weight * contrastive
        caption = self.caption_loss_weight * self.caption_loss(logits.transpose(1, 2), labels)
        if output_dict:
            return {"contrastive_loss": contrastive, "caption_loss": caption}
        return contrastive, caption


class DistillClipLoss(ClipLoss):
    """CLIP with a teacher: ``forward(image_features [N, D], text_features [N, D], logit_scale,
    dist_image_features [N, E], dist_text_features [N, E], dist_logit_scale, output_dict=False)``,
    a pair of losses.

    ``contrastive = ClipLoss``, and with the student's logits x and the teacher's t, rows of both
    directions,

    ``distill = -1/(2N) sum_i (softmax_row(t)_i log softmax_row(x)_i' + the same of columns)``.

    No matrix of logits is kept, also over ranks. Teachers get no gradient.

    Parameters
    ----------
    settings
        Of `ClipLoss`. Options are for both losses, so they are those of
        `infonce.torch.distill_loss` that `infonce.torch.clip_loss` has too. ``normalize=True``
        normalises the teacher's features too.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Hinton et al.: Distilling the Knowledge in a Neural Network, 2015.
    """

    def refused(self) -> Refused:
        return {**refuse(DISTILL.refused, "distill_loss has none"), **super().refused()}

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Any,
        output_dict: bool = False,
    ) -> Any:
        contrastive = super().forward(image_features, text_features, logit_scale)
        if isinstance(dist_logit_scale, Tensor):
            dist_logit_scale = dist_logit_scale.detach()
        distill = distill_loss(
            image_features, text_features, dist_image_features, dist_text_features,
            teacher_scale=dist_logit_scale, **self._options(logit_scale),
        )  # fmt: skip
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill


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
        Without effect: `exchange` chooses how keys travel, and no matrix of logits is kept.
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

    kind = spec.SIGLIP

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
        # None is no bias, as in open_clip. `infonce.torch.siglip_loss` takes -10 for None.
        bias = 0.0 if logit_bias is None else logit_bias
        loss = functions.siglip_loss(
            image_features, text_features, bias, **self._options(logit_scale)
        )
        return {"contrastive_loss": loss} if output_dict else loss


def create_loss(args: Any) -> Any:
    """The loss of the arguments of open_clip's training: `create_loss` of open_clip.

    ``args.distill``: `DistillClipLoss`; "coca" in ``args.model``: `CoCaLoss`; ``args.siglip``:
    `SigLipLoss`; else `ClipLoss`. For image and text features [N, D] all of them are losses of the
    logits x = scale image text^T, SigLIP's with a bias.

    Parameters
    ----------
    args : namespace
        `model`, `distill`, `siglip`, `rank`, `world_size`, `local_loss`, `gather_with_grad`, and
        `loss_dist_impl`, `coca_caption_loss_weight`, `coca_contrastive_loss_weight` if they are
        needed.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    ValueError
        For a model that has no contrastive loss (GenLIP, GenLAP).

    References
    ----------
    Those of the classes.
    """
    name = args.model.lower()
    ranks = {"rank": args.rank, "world_size": args.world_size}
    clip = {"local_loss": args.local_loss, "gather_with_grad": args.gather_with_grad, **ranks}
    clip["use_horovod"] = getattr(args, "horovod", False)
    # As in open_clip, labels are not cached if the loss is compiled
    is_compiled = getattr(args, "torchcompile", False)
    compiles_loss = getattr(args, "torchcompile_strategy", "task") in ("task", "step")
    cache = {"cache_labels": not (is_compiled and compiles_loss)}
    if args.distill:
        return DistillClipLoss(**clip, **cache)
    if "coca" in name:
        clip["caption_loss_weight"] = args.coca_caption_loss_weight
        clip["clip_loss_weight"] = args.coca_contrastive_loss_weight
        return CoCaLoss(**clip, **cache)
    if "genlip" in name or "genlap" in name:
        raise ValueError(
            f"args.model: expected one with a contrastive loss, got {args.model!r}: use "
            "open_clip's own create_loss"
        )
    if args.siglip:
        return SigLipLoss(**ranks, **cache, dist_impl=args.loss_dist_impl)
    return ClipLoss(**clip, **cache)
