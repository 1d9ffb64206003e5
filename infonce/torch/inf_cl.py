"""Drop-in replacements for Inf-CL's inf_cl: its functions `cal_flash_loss`, `cal_ring_loss` and
`cal_inf_loss`.

As in inf_cl, the last two functions share a batch over all processes if torch.distributed is
initialised. What differs:

- The number of rows and the width may be any, so `head_dim` has no effect. Processes may have
  different numbers of rows.
- `cal_ring_loss` and `cal_inf_loss` are the same: the loss of the rows of all processes. DDP's
  average of the gradients is the gradient of this loss.

Other keywords are those of `infonce.torch.info_nce_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .core.drop_in import locate_shard, world_group_option
from .functions import info_nce_loss

__all__ = ["cal_flash_loss", "cal_inf_loss", "cal_ring_loss"]

DOC = """
    Parameters
    ----------
    q : tensor [M, D]
    k : tensor [N, D]
    labels : integer tensor [M], optional
        The positive of each query among this process's keys; key i for query i if left out. A query
        with a negative label has no positive and no loss.
    scale : float or 0-d tensor, optional
        1 if left out.
    head_dim : int
        Without effect.
    options
        Of `infonce.torch.info_nce_loss`.

    Returns
    -------
    {returns}

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Cheng et al.: Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive
    Loss, 2024.
"""


def cal_flash_loss(
    q: Tensor,
    k: Tensor,
    labels: Tensor | None = None,
    scale: Any = None,
    head_dim: int = 256,
    **options: Any,
) -> Any:
    """Queries against the keys of this process, a loss for each query.

    ``loss_i = -log softmax(scale q k')_i,labels[i]``
    """
    if scale is None and options.get("temperature") is None:
        scale = 1.0
    if labels is not None and options.get("group") is not None:
        labels = _among_all_keys(labels, len(k), options["group"])
    return info_nce_loss(q, k, labels, scale=scale, **{"reduction": "none", **options})


def _among_all_keys(labels: Tensor, keys: int, group: Any) -> Tensor:
    """Indices among this process's `keys` as indices among the keys of all processes.

    A negative label stays negative, and one that is too large stays too large: it is an error of
    all processes, which `info_nce_loss` raises.
    """
    first, total, _ = locate_shard(group, keys)
    labels = labels if labels.is_floating_point() else labels.long()
    return torch.where(labels < 0, labels, labels + torch.where(labels < keys, first, total))


def cal_ring_loss(
    q: Tensor,
    k: Tensor,
    labels: Tensor | None = None,
    scale: Any = None,
    head_dim: int = 256,
    **options: Any,
) -> Any:
    """Queries against the keys of all processes, mean over the queries of all.

    ``loss = -1/M sum_i log softmax(scale q k')_i,labels[i]``
    """
    options = {**world_group_option(), "reduction": "mean", **options}
    return cal_flash_loss(q, k, labels, scale, **options)


def cal_inf_loss(
    q: Tensor,
    k: Tensor,
    labels: Tensor | None = None,
    scale: Any = None,
    head_dim: int = 256,
    **options: Any,
) -> Any:
    """Queries against the keys of all processes, mean over the queries of all: `cal_ring_loss`.

    ``loss = -1/M sum_i log softmax(scale q k')_i,labels[i]``
    """
    return cal_ring_loss(q, k, labels, scale, **options)


for _function, _returns in (
    (cal_flash_loss, "tensor [M]"), (cal_ring_loss, "0-d tensor"), (cal_inf_loss, "0-d tensor"),
):  # fmt: skip
    _function.__doc__ = f"{_function.__doc__}{DOC.format(returns=_returns)}"
