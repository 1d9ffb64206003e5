"""infonce for PyTorch: the losses as differentiable functions and modules, on CPU and CUDA tensors.

>>> import infonce.torch
>>> loss = infonce.torch.clip_loss(image, text, scale=logit_scale.exp())
>>> loss.backward()

Nothing is copied: kernels read the tensors' memory and run on PyTorch's current stream, and nothing
waits for the device.

Drop-in replacements for other projects' losses, with the same names and calls: the modules
`open_clip`, `sentence_transformers`, `pylate`, `colpali_engine`, `lightly`,
`pytorch_metric_learning`, `sup_contrast`, `inf_cl`, `memory_efficient_clip`, `siglip_kernel` and
`infonce_cuda` of `infonce.torch`.
"""

from typing import TYPE_CHECKING

from .._names import extra, make_getattr

with extra("torch"):
    from .caching import grad_cache
    from .functions import (
        clip_loss,
        distill_loss,
        gte_loss,
        info_nce_loss,
        lit_loss,
        nt_xent_loss,
        siglip_loss,
        sup_con_loss,
    )
    from .key_queue import KeyQueue
    from .modules import (
        CLIPLoss,
        GTELoss,
        InfoNCELoss,
        LiTLoss,
        NTXentLoss,
        SigLIPLoss,
        SupConLoss,
    )

__all__ = [
    "CLIPLoss",
    "GTELoss",
    "InfoNCELoss",
    "KeyQueue",
    "LiTLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SupConLoss",
    "clip_loss",
    "distill_loss",
    "grad_cache",
    "gte_loss",
    "info_nce_loss",
    "lit_loss",
    "nt_xent_loss",
    "siglip_loss",
    "sup_con_loss",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(
        __name__,
        __all__,
        (
            "colpali_engine",
            "inf_cl",
            "infonce_cuda",
            "lightly",
            "memory_efficient_clip",
            "open_clip",
            "pylate",
            "pytorch_metric_learning",
            "sentence_transformers",
            "siglip_kernel",
            "sup_contrast",
        ),
    )
