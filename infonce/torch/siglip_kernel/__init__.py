"""Drop-in replacements for siglip-kernel's losses: `fused_siglip_loss`, `fused_siglip_plus_loss`,
`SigLIPPlusLoss`, `DistributedSigLIPLoss` and `DistributedSigLIPPlusLoss`.

The calls and the parameters are the same. What differs: the loss is float32 (float64 for float64
features), they run on CPU tensors too, and over processes the loss is that of the rows of all
processes, which may have different numbers of rows. `use_fp8`, ``symmetric=False`` and
``soft_label=True`` are errors. `backend`, `chunk_size`, `num_groups` and `overlap` have no effect.
Other keywords are those of `infonce.torch.siglip_loss`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import spec
from .. import functions
from ..core.drop_in import (
    SCALE,
    DropIn,
    Refused,
    gather_rows,
    group_of,
    locate_shard,
    refuse,
    require,
    require_rank,
)

__all__ = [
    "DistributedSigLIPLoss",
    "DistributedSigLIPPlusLoss",
    "SigLIPPlusLoss",
    "fused_siglip_loss",
    "fused_siglip_plus_loss",
]
WEIGHT_SETTINGS = {"symmetric": True, "soft_label": False, "soft_weighting": True}
LEAST_SCALE, LARGEST_SCALE = 0.01, 100.0  # limits of the learned scale, as in siglip-kernel


def fused_siglip_loss(
    img_features: Tensor,
    txt_features: Tensor,
    log_temperature: Tensor,
    bias: Any,
    use_fp8: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """SigLIP's loss of unit rows, whose scale is ``exp(log_temperature)``.

    ``loss = -1/B sum_ij log sigmoid(t_ij (scale <image_i, text_j> + bias))``, t_ij = 1 for i = j,
    else -1.

    Parameters
    ----------
    img_features, txt_features : tensor [B, D]
    log_temperature, bias : 0-d tensor
    use_fp8 : bool
        False.
    backend : str
        Without effect.
    options
        Of `infonce.torch.siglip_loss`.

    Returns
    -------
    0-d tensor

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    require("use_fp8", use_fp8, False, "products are in the precision of the features")
    scale = log_temperature.exp()
    return functions.siglip_loss(img_features, txt_features, bias, scale=scale, **options)


def fused_siglip_plus_loss(
    img_features: Tensor,
    txt_features: Tensor,
    log_temperature: Tensor,
    bias: Any,
    img_gid: Tensor | None = None,
    txt_gid: Tensor | None = None,
    symmetric: bool = True,
    soft_label: bool = False,
    chunk_size: int = 0,
    num_groups: int | None = None,
    **options: Any,
) -> Any:
    """SigLIP's loss of images and several captions of each, the mean over all pairs.

    Pairs of equal group ids are positives, t_ij = 1; for others t_ij = -1.

    ``loss = -1/(N M) sum_ij v_ij log sigmoid(t_ij (scale <image_i, text_j> + bias))``

    v_ij = (1 / k_i + 1 / k'_j) / 2 for positives, with k_i positives of image i and k'_j of caption
    j, else 1: the weights of `positive_ids` of `infonce.torch.siglip_loss`.

    Parameters
    ----------
    img_features : tensor [N, D]
    txt_features : tensor [M, D]
    log_temperature, bias : 0-d tensor
    img_gid : integer tensor [N], optional
    txt_gid : integer tensor [M], optional
        Group ids; by default image i belongs to caption i.
    symmetric : bool
        True.
    soft_label : bool
        False.
    chunk_size, num_groups : int
        Without effect.
    options
        Of `infonce.torch.siglip_loss`.

    Returns
    -------
    0-d tensor

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """
    _require_weight("symmetric", symmetric)
    _require_weight("soft_label", soft_label)
    ids = _ids(img_features, txt_features, img_gid, txt_gid)
    scale = log_temperature.exp()
    loss = functions.siglip_loss(
        img_features, txt_features, bias, scale=scale, positive_ids=ids, **options
    )
    if options.get("reduction") == "sum":
        return loss
    # `loss` is a mean over images, of all processes; divided by the captions, a mean over pairs
    _, captions, _ = locate_shard(options.get("group"), len(txt_features))
    return loss / captions


def _require_weight(name: str, value: Any) -> None:
    """ValueError for a setting that asks for other weights of positives than `positive_ids` has."""
    if name in WEIGHT_SETTINGS:
        instead = "positives have the weights of positive_ids"
        require(name, value, WEIGHT_SETTINGS[name], instead)


def _ids(
    image: Tensor, text: Tensor, img_gid: Tensor | None, txt_gid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The `positive_ids` of images and texts: the group ids, or row numbers if these are None."""
    sides = (image, img_gid), (text, txt_gid)
    rows, columns = (
        torch.arange(len(z), device=z.device) if ids is None else ids for z, ids in sides
    )
    return rows, columns


GROUP = refuse(["group"], "pass process_group")


class DistributedSigLIPLoss(DropIn):
    """SigLIP over processes: ``forward(image_features [N, D], text_features [N, D], logit_scale,
    logit_bias=None)``.

    ``loss = -1/N sum_ij log sigmoid(t_ij (logit_scale <image_i, text_j> + logit_bias))``, over the
    rows of all processes; t_ij = 1 for i = j, else -1.

    Parameters
    ----------
    chunk_size : int
        Without effect.
    strategy : {"ring", "gather", "local"}
        The keyword `exchange`; "local": the loss of the rows of this process.
    rank, world_size : int
        Those of the process group. With ``world_size > 1`` the batch is that of all its processes.
    process_group : torch.distributed.ProcessGroup, optional
        The processes that share the batch; all by default.
    overlap : bool
        Without effect.
    options
        Of `infonce.torch.siglip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    kind = spec.SIGLIP

    def __init__(
        self,
        chunk_size: int = 0,
        strategy: str = "ring",
        rank: int = 0,
        world_size: int = 1,
        process_group: Any = None,
        overlap: bool = True,
        **options: Any,
    ) -> None:
        require_rank(rank, world_size)
        super().__init__(
            options, chunk_size=chunk_size, strategy=strategy, rank=rank, world_size=world_size,
            process_group=process_group, overlap=overlap,
        )  # fmt: skip

    def check_setting(self, name: str, value: Any) -> None:
        if name == "strategy" and value not in ("ring", "gather", "local"):
            raise ValueError(f'strategy: expected "ring", "gather" or "local", got {value!r}')

    def refused(self) -> Refused:
        return {**SCALE, **GROUP, **refuse(["exchange"], "pass strategy")}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Any,
        logit_bias: Any = None,
    ) -> Any:
        options = {**self.call_options(), "scale": logit_scale}
        if self.strategy != "local":
            group = group_of(self.rank, self.world_size, self.process_group)
            if group is not None:
                options |= {"group": group, "exchange": self.strategy}
        # None is no bias. `infonce.torch.siglip_loss` takes -10 for None.
        bias = 0.0 if logit_bias is None else logit_bias
        return functions.siglip_loss(image_features, text_features, bias, **options)


class SigLIPPlusLoss(DropIn):
    """SigLIP of several captions an image: ``forward((images [N, D], captions [M, D]),
    img_gid=None, txt_gid=None)``, a dictionary.

    ``total_loss`` is that of `fused_siglip_plus_loss` of rows that are normalised here, with the
    parameters `logit_scale`, a logarithm, and `logit_bias`. ``logit_scale`` is the scale, between
    0.01 and 100, and ``n_positives`` the number of positive pairs.

    Parameters
    ----------
    temperature : float
        1 / the first scale.
    symmetric, soft_weighting : bool
        True.
    use_bias : bool
        Whether `logit_bias` is trained; otherwise it is 0.
    bias_init : float
    soft_label : bool
        False.
    chunk_size : int
        Without effect.
    options
        Of `infonce.torch.siglip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    kind = spec.SIGLIP

    def __init__(
        self,
        temperature: float = 0.07,
        symmetric: bool = True,
        use_bias: bool = True,
        bias_init: float = 0.0,
        soft_weighting: bool = True,
        soft_label: bool = False,
        chunk_size: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(
            options, symmetric=symmetric, soft_weighting=soft_weighting, soft_label=soft_label,
            chunk_size=chunk_size,
        )  # fmt: skip
        self.logit_scale = nn.Parameter(torch.log(torch.tensor(1.0 / temperature)))
        if use_bias:
            self.logit_bias = nn.Parameter(torch.tensor(float(bias_init)))
        else:
            self.register_buffer("logit_bias", torch.tensor(0.0))

    def check_setting(self, name: str, value: Any) -> None:
        _require_weight(name, value)

    def refused(self) -> Refused:
        return {**SCALE, **refuse(["positive_ids"], "pass img_gid and txt_gid")}

    def _group(self) -> Any:
        """The process group that shares the batch; None for one process."""
        return self.options.get("group")

    def forward(
        self,
        embeddings: tuple[Tensor, Tensor],
        img_gid: Tensor | None = None,
        txt_gid: Tensor | None = None,
    ) -> dict[str, Any]:
        image, text = embeddings
        log_scale = self.logit_scale.clamp(math.log(LEAST_SCALE), math.log(LARGEST_SCALE))
        options = self.call_options()
        if (group := self._group()) is not None:
            options["group"] = group
        ids = _ids(image, text, img_gid, txt_gid)
        loss = fused_siglip_plus_loss(
            image, text, log_scale, self.logit_bias, *ids, **{"normalize": True, **options}
        )
        return {
            "total_loss": loss,
            "logit_scale": log_scale.exp().detach(),
            "n_positives": _count_positive_pairs(*ids, group),
        }


class DistributedSigLIPPlusLoss(SigLIPPlusLoss):
    """`SigLIPPlusLoss` of the rows of all processes: ``forward((images [N, D], captions [M, D]),
    img_gid, txt_gid)``, a dictionary.

    Images and captions of equal group ids are positives, on the same process or not, and positives
    are counted over all processes.

    Parameters
    ----------
    temperature, symmetric, use_bias, bias_init, soft_label, chunk_size
        Of `SigLIPPlusLoss`.
    num_groups : int
        Without effect.
    rank, world_size, process_group, overlap
        Of `DistributedSigLIPLoss`.
    options
        Of `infonce.torch.siglip_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Zhai, Mustafa, Kolesnikov, Beyer: Sigmoid Loss for Language Image Pre-Training, 2023.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        symmetric: bool = True,
        use_bias: bool = True,
        bias_init: float = 0.0,
        soft_label: bool = False,
        chunk_size: int = 0,
        num_groups: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        process_group: Any = None,
        overlap: bool = True,
        **options: Any,
    ) -> None:
        require_rank(rank, world_size)
        super().__init__(
            temperature, symmetric, use_bias, bias_init, True, soft_label, chunk_size, **options
        )
        self.num_groups, self.rank, self.world_size = num_groups, rank, world_size
        self.process_group, self.overlap = process_group, overlap
        self._settings += ("num_groups", "rank", "world_size", "process_group", "overlap")

    def refused(self) -> Refused:
        return {**super().refused(), **GROUP}

    def _group(self) -> Any:
        return group_of(self.rank, self.world_size, self.process_group)


@torch.no_grad()
def _count_positive_pairs(rows: Tensor, columns: Tensor, group: Any) -> Tensor:
    """The number of pairs of a row id and an equal column id, over all processes of `group`."""
    if group is not None:
        rows, columns = (gather_rows(ids, group) for ids in (rows, columns))
    ordered = columns.sort().values
    counts = torch.searchsorted(ordered, rows, right=True) - torch.searchsorted(ordered, rows)
    return counts.sum()
