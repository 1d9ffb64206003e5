"""infonce for PyTorch: the losses as differentiable functions and modules, on CPU and CUDA tensors.

>>> import infonce.torch
>>> loss = infonce.torch.clip_loss(image, text, scale=logit_scale.exp())
>>> loss.backward()

Without copies: kernels read the tensors' memory and run on PyTorch's current stream, and nothing
waits for the device.
"""

from typing import TYPE_CHECKING

from .._names import missing
from .drop_in import (
    ClipLoss,
    MemoryEfficientCLIPLoss,
    MemoryEfficientLiTLoss,
    SigLipLoss,
    cal_inf_loss,
)
from .functions import clip_loss, info_nce_loss, lit_loss, nt_xent_loss, siglip_loss
from .modules import CLIPLoss, InfoNCELoss, LiTLoss, NTXentLoss, SigLIPLoss

__all__ = [
    "CLIPLoss",
    "ClipLoss",
    "InfoNCELoss",
    "LiTLoss",
    "MemoryEfficientCLIPLoss",
    "MemoryEfficientLiTLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SigLipLoss",
    "cal_inf_loss",
    "clip_loss",
    "info_nce_loss",
    "lit_loss",
    "nt_xent_loss",
    "siglip_loss",
]

if not TYPE_CHECKING:
    __getattr__ = missing(__name__, __all__)
