"""Drop-in replacements for the InfoNCE CUDA report's extension: its module `InfoNCELoss`, its
autograd function `InfoNCEFunction`, and the extension's `infonce_forward` and `infonce_backward`.

In spite of the names, which are the report's, the loss is NT-Xent, on one array with two views of
each sample. What differs: features stay on their device and keep their dtype, while the extension
converts them to float32 on a GPU; no matrix of logits is kept; nothing waits for the device; the
module's loss is 0-d. Other keywords of the module are those of `infonce.torch.nt_xent_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, spec
from .core.drop_in import DropIn
from .functions import nt_xent_loss

__all__ = ["InfoNCEFunction", "InfoNCELoss", "infonce_backward", "infonce_forward"]


class InfoNCELoss(DropIn):
    """NT-Xent: ``forward(features [2B, D])`` of unit norm, i and i + B two views of one sample.

    ``loss = -1/2B sum_i log softmax_{j != i}(z z' / temperature)_i,partner(i)``

    Parameters
    ----------
    temperature : float, default 0.5
    options
        Of `infonce.torch.nt_xent_loss`: ``normalize=True`` for features of any norm.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """

    kind = spec.NT_XENT

    def __init__(self, temperature: float = 0.5, **options: Any) -> None:
        super().__init__(options, temperature=temperature)

    def forward(self, features: Tensor) -> Any:
        return nt_xent_loss(features, temperature=self.temperature, **self.call_options())


class InfoNCEFunction:
    """The loss of `InfoNCELoss` as autograd differentiates it: ``apply(features [2B, D],
    temperature)`` returns it as a tensor of shape [1], as the report's."""

    @staticmethod
    def apply(features: Tensor, temperature: float) -> Tensor:
        loss: Tensor = nt_xent_loss(features, temperature=temperature)
        return loss.reshape(1)


def infonce_forward(features: Tensor, temperature: float) -> Tensor:
    """The loss of `InfoNCELoss` without gradients, which autograd does not record.

    ``loss = -1/2B sum_i log softmax_{j != i}(z z' / temperature)_i,partner(i)``

    Parameters
    ----------
    features : tensor [2B, D]
        CPU or CUDA, of unit norm.
    temperature : float

    Returns
    -------
    tensor [1]

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """
    with torch.no_grad():
        return InfoNCEFunction.apply(features, temperature)


def infonce_backward(features: Tensor, temperature: float, grad_output: Any) -> Tensor:
    """The gradient of `infonce_forward`, times the upstream gradient.

    With P the softmax over j != i, Y the one-hot partners and ``G = (P - Y) / 2B``,
    ``dfeatures = grad_output (G + G') features / temperature``.

    Parameters
    ----------
    features : tensor [2B, D]
        Those of the forward pass.
    temperature : float
    grad_output : float or tensor of one number
        The upstream gradient. A tensor may be on the CPU, or on the device of the features; then
        nothing waits for the device.

    Returns
    -------
    tensor [2B, D]

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020.
    """
    if isinstance(grad_output, Tensor):
        grad_output = grad_output.detach().reshape(())
    options = {"temperature": temperature, "grad_out": grad_output, "wrt": "features"}
    gradient: Tensor
    gradient = dispatch.loss_and_grad(spec.NT_XENT, (features,), None, None, options).grads.features
    return gradient
