"""infonce: contrastive losses, arrays in, arrays out, in memory linear in the batch.

>>> import infonce
>>> loss = infonce.clip_loss(image, text, temperature=0.07)
>>> out = infonce.clip_loss_and_grad(image, text, scale=100.0)
>>> out.loss, out.grads.image, out.grads.text, out.grads.scale, out.lse
"""

from pathlib import Path
from typing import TYPE_CHECKING

# An installation has `kernels` and `distributed` in this folder, a checkout beside it
if not Path(__file__).with_name("kernels").exists():
    __path__.append(str(Path(__file__).parents[1]))

from . import schedules
from ._names import make_getattr
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
from .result import LossAndGrad, Metrics
from .scores import maxsim_scores
from .training.capture import Captured, capture
from .training.grad_cache import grad_cache

__version__ = "0.1.0"

__all__ = [
    "Captured",
    "Comparison",
    "Explanation",
    "LossAndGrad",
    "Metrics",
    "__version__",
    "capture",
    "clip_loss",
    "clip_loss_and_grad",
    "compare",
    "distill_loss",
    "distill_loss_and_grad",
    "explain",
    "grad_cache",
    "gte_loss",
    "gte_loss_and_grad",
    "info_nce_loss",
    "info_nce_loss_and_grad",
    "lit_loss",
    "lit_loss_and_grad",
    "maxsim_scores",
    "nt_xent_loss",
    "nt_xent_loss_and_grad",
    "schedules",
    "siglip_loss",
    "siglip_loss_and_grad",
    "sup_con_loss",
    "sup_con_loss_and_grad",
]

if TYPE_CHECKING:
    from .comparison import Comparison, compare
    from .explanation import explain
    from .explanation.result import Explanation
else:  # hidden from type checkers, which would accept any name if there is a `__getattr__`
    __getattr__ = make_getattr(
        __name__, __all__, ("distributed", "jax", "reference", "torch"),
        {"Comparison": "comparison", "compare": "comparison",
         "Explanation": "explanation.result", "explain": "explanation"},
    )  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
