"""infonce over many ranks: one batch, spread over processes or GPUs, and the loss of all of it.

>>> from infonce import distributed
>>> out = distributed.clip_loss_and_grad(image, text, temperature=0.07)  # this rank's rows
"""

from typing import TYPE_CHECKING

from infonce._names import make_getattr

from .communicators.base import Communicator, RankError
from .losses import (
    clip_loss,
    clip_loss_and_grad,
    distill_loss,
    distill_loss_and_grad,
    gte_loss,
    gte_loss_and_grad,
    info_nce_loss,
    info_nce_loss_and_grad,
    lit_loss,
    lit_loss_and_grad,
    nt_xent_loss,
    nt_xent_loss_and_grad,
    siglip_loss,
    siglip_loss_and_grad,
    sup_con_loss,
    sup_con_loss_and_grad,
)

__all__ = [
    "Communicator",
    "RankError",
    "clip_loss",
    "clip_loss_and_grad",
    "distill_loss",
    "distill_loss_and_grad",
    "gte_loss",
    "gte_loss_and_grad",
    "info_nce_loss",
    "info_nce_loss_and_grad",
    "lit_loss",
    "lit_loss_and_grad",
    "nt_xent_loss",
    "nt_xent_loss_and_grad",
    "siglip_loss",
    "siglip_loss_and_grad",
    "sup_con_loss",
    "sup_con_loss_and_grad",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(__name__, __all__)
