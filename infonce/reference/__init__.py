"""The specification: every loss and its gradients in float64 NumPy, one file for each loss.

Each function states its equation, derives its gradients and computes exactly these, with the whole
M x N matrix of logits. Arguments are not checked. The code shares nothing with the kernels, because
the tests compare the kernels with it.

All functions of losses return a :class:`Reference`: the loss of each row, their weighted sum, the
gradients of that sum and the log-sum-exps. `maxsim` has the scores of late interaction, over which
losses are taken, and `maxsim_gradients` their gradients.
"""

from .clip import clip
from .common import Reference, normalize, normalize_backward
from .distill import distill
from .gte import gte
from .info_nce import info_nce
from .lit import lit
from .maxsim import MaxSim, maxsim, maxsim_gradients
from .nt_xent import nt_xent
from .siglip import siglip
from .sup_con import sup_con

__all__ = [
    "MaxSim",
    "Reference",
    "clip",
    "distill",
    "gte",
    "info_nce",
    "lit",
    "maxsim",
    "maxsim_gradients",
    "normalize",
    "normalize_backward",
    "nt_xent",
    "siglip",
    "sup_con",
]
