"""In the place of Inf-CL's inf_cl: its function `cal_inf_loss`.

What differs: neither the batch nor the width has to be a multiple of anything, so there is no
`head_dim`; and rows are shared with other ranks where `group` says so, not wherever
torch.distributed is initialised. Other keywords are those of `infonce.torch.info_nce_loss`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import functions

__all__ = ["cal_inf_loss"]


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Any = None, **options: Any
) -> Any:
    """Inf-CL's function: queries against keys, mean over queries.

    ``loss = -1/M sum_i log softmax(scale q k')_i,labels[i]``

    Parameters
    ----------
    q : tensor [M, D]
    k : tensor [N, D]
    labels : integer tensor [M], optional
        The positive key of each query; key i for query i if left out.
    scale : float or 0-d tensor, optional
        1 if left out.
    options
        Of `infonce.torch.info_nce_loss`.

    Returns
    -------
    0-d tensor

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
