"""Drop-in replacements for SupContrast's losses.SupConLoss: `SupConLoss`.

As there, features have unit norm already, rows without a positive count as 0 in the mean, and the
loss is multiplied by temperature / base_temperature. What differs: no matrix is kept, the loss is
float32 (float64 for float64), and a `mask` is an error. Other keywords are those of
`infonce.torch.sup_con_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import spec
from ..checks import keywords
from .core.drop_in import SCALE, DropIn, Refused, refuse, require
from .functions import sup_con_loss

__all__ = ["SupConLoss"]


class SupConLoss(DropIn):
    """Supervised contrastive loss: ``forward(features [B, V, D], labels [B]=None)``, V views each.

    With P(i) the other rows of row i's class (of its sample, without labels), over all B V rows:

    ``loss = c/BV sum_i ( log sum_{j != i} exp(x_ij) - mean_{p in P(i)} x_ip )``,
    ``x = z z' / temperature``, ``c = temperature / base_temperature``.

    Parameters
    ----------
    temperature : float, default 0.07
    contrast_mode : {"all", "one"}, default "all"
        "one": the mean is over first views only.
    base_temperature : float, default 0.07
    options
        Of `infonce.torch.sup_con_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Khosla et al.: Supervised Contrastive Learning, 2020.
    """

    kind = spec.SUP_CON

    def __init__(
        self,
        temperature: float = 0.07,
        contrast_mode: str = "all",
        base_temperature: float = 0.07,
        **options: Any,
    ) -> None:
        super().__init__(
            options, temperature=temperature, contrast_mode=contrast_mode,
            base_temperature=base_temperature,
        )  # fmt: skip

    def check_setting(self, name: str, value: Any) -> None:
        if name == "contrast_mode" and value not in ("all", "one"):
            raise ValueError(f'contrast_mode: expected "all" or "one", got {value!r}')

    def refused(self) -> Refused:
        mean = refuse(["reduction", "weights"], "the loss here is a mean over rows")
        return {
            **SCALE,
            **mean,
            **refuse(keywords.GROUP, "labels are those of this process's rows"),
        }

    def forward(self, features: Tensor, labels: Tensor | None = None, mask: Any = None) -> Any:
        require("mask", mask, None, "name the classes by labels")
        if features.ndim < 3:
            raise ValueError(f"features: expected [B, V, D], got {tuple(features.shape)}")
        samples, views = features.shape[:2]
        if labels is None:
            labels = torch.arange(samples, device=features.device)
        elif labels.numel() != samples:
            raise ValueError(f"labels: expected {samples} of them, got {labels.numel()}")
        rows = features.flatten(2).transpose(0, 1).flatten(0, 1)  # views of samples: [V B, D]
        anchors = samples * (views if self.contrast_mode == "all" else 1)
        weights = {}
        if anchors < len(rows):  # "one": rows of later views are keys, but have no loss
            weights["weights"] = (torch.arange(len(rows), device=rows.device) < anchors).float()
        total = sup_con_loss(
            rows,
            _classes(labels.to(rows.device)).repeat(views),
            temperature=self.temperature,
            reduction="sum",
            **weights,
            **self.call_options(),
        )
        return total * (self.temperature / self.base_temperature / anchors)


def _classes(labels: Tensor) -> Tensor:
    """Labels of any values as classes from 0 on."""
    classes: Tensor = labels.reshape(-1).unique(return_inverse=True)[1]
    return classes
