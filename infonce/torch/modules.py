"""The losses as modules: a function of functions.py, with keywords that the module keeps for all
calls, and a scale and bias that it may learn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import docstrings, losses, spec
from ..checks import keywords, validation
from ..spec import Loss
from . import functions

DOC = """
    >>> criterion = infonce.torch.{name}(normalize=True)
    >>> loss = criterion({call_arguments}, scale=20.0)

    The function `infonce.torch.{loss}` as a module: it is called with the same arguments,
    ``forward({call_arguments}, **options)``. With ``learnable=True`` it learns the scale: give the
    optimizer its ``parameters()`` too.

    Parameters
    ----------
    {arguments} : tensors [rows, features]
        At the call, with `labels` and `bias` if the function has them.
    learnable : bool, default False
        Make a parameter of the logarithm of the scale, ``log_scale`` [1], which begins at the given
        `temperature` or `scale`; and in SigLIP of the bias, ``bias`` [1].
    max_scale : float, default 100
        With `learnable`, the largest scale: each call first clamps ``log_scale`` to its logarithm.
        ``math.inf``: no limit.
    temperature, scale, bias
        An `nn.Parameter` given at construction becomes a parameter of the module.
    options
        Keywords of the function, with its defaults, at construction or at the call; keywords of the
        call take precedence:
        ``{name}(normalize=True)({call_arguments}, scale=logit_scale.exp())``.

    Returns
    -------
    0-d tensor, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        At construction, for a keyword that the function does not have, and for numbers that are no
        beginning of a learnable scale. At the call, the errors of the function.
"""
NUMBERS = ("temperature", "scale", "bias")  # keywords that users may give as an nn.Parameter
LEARNED = ("log_scale", *NUMBERS)  # names of parameters that a module may have


class _LossModule(nn.Module):
    """Base of the modules. A subclass names its loss (`kind`) and passes arguments in `forward`."""

    kind: Loss

    def __init_subclass__(cls, kind: Loss | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind is None:  # a user's subclass
            return

        # Each class gets its own __init__, because editors read its signature from the class
        def __init__(self: _LossModule, **options: Any) -> None:
            _LossModule.__init__(self, **options)

        init_signature = keywords.signature(__init__, keywords.torch_module(kind))
        __init__.__signature__ = init_signature  # type: ignore[attr-defined]
        cls.kind, cls.__init__ = kind, __init__  # type: ignore[method-assign]
        cls.forward.__signature__ = keywords.signature(cls.forward, keywords.torch_function(kind))

    def __init__(
        self, *, learnable: bool = False, max_scale: float = keywords.MAX_SCALE, **options: Any
    ) -> None:
        super().__init__()
        self._require_known(options)
        validation.flag("learnable", learnable)
        self.learnable, self.max_scale, self.options = learnable, max_scale, options
        for name in NUMBERS:
            if isinstance(options.get(name), nn.Parameter):
                self.register_parameter(name, options.pop(name))
        if learnable:
            self._learn()
        elif max_scale != keywords.MAX_SCALE:
            raise ValueError("max_scale: expected learnable=True with it, got False")

    def _learn(self) -> None:
        """Make the parameters `log_scale` and, in SigLIP, `bias`, with their first values."""
        if self._parameters:
            raise ValueError(
                f"learnable: expected False with a Parameter as {min(self._parameters)}, got True"
            )
        temperature, scale, bias = (self.options.pop(name, None) for name in NUMBERS)
        scale = float(validation.scale(self.kind, temperature, scale, "fp32"))
        limit = validation.number("max_scale", self.max_scale, infinite=True)
        if limit < scale:
            raise ValueError(f"max_scale: expected at least the scale, {scale!r}, got {limit!r}")
        # Vectors of one number: fully_shard takes no 0-d parameter
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]))
        if self.kind.sigmoid:
            bias = validation.number("bias", self.kind.bias if bias is None else bias)
            self.bias = nn.Parameter(torch.tensor([float(bias)]))

    def _call_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The keywords of one call of the function.

        `options` of the call take precedence over the module's keywords and parameters. A learned
        scale is clamped to `max_scale` first.
        """
        if not functions.ONE_PROCESS_OPTIONS.issuperset(options):
            self._require_known(options)
        learned = {name: self._parameters[name] for name in LEARNED if name in self._parameters}
        call_options = {**self.options, **learned}
        if not options.keys().isdisjoint(("temperature", "scale")):
            for name in ("log_scale", "temperature", "scale"):
                call_options.pop(name, None)
        if "log_scale" in call_options:
            log_scale = call_options.pop("log_scale")
            # In place, so that a scale at the limit has a gradient, and can become smaller again.
            # A clamp that autograd records has no gradient beyond the limit.
            with torch.no_grad():
                log_scale.clamp_(max=math.log(self.max_scale))
            call_options["scale"] = log_scale.exp()
        return {**call_options, **options}

    def _require_known(self, options: dict[str, Any]) -> None:
        function = f"infonce.torch.{type(self).__name__}()"
        functions.require_known(function, options, keywords.torch_module(self.kind))

    def extra_repr(self) -> str:
        learned = {"learnable": True, "max_scale": self.max_scale} if self.learnable else {}
        return ", ".join(f"{name}={value!r}" for name, value in {**learned, **self.options}.items())


@docstrings.adapted(losses.info_nce_loss, DOC)
class InfoNCELoss(_LossModule, kind=spec.INFO_NCE):
    def forward(
        self, query: Tensor, key: Tensor, labels: Tensor | None = None, **options: Any
    ) -> Any:
        return functions.info_nce_loss(query, key, labels, **self._call_options(options))


@docstrings.adapted(losses.nt_xent_loss, DOC)
class NTXentLoss(_LossModule, kind=spec.NT_XENT):
    def forward(self, features: Tensor, **options: Any) -> Any:
        return functions.nt_xent_loss(features, **self._call_options(options))


@docstrings.adapted(losses.clip_loss, DOC)
class CLIPLoss(_LossModule, kind=spec.CLIP):
    def forward(self, image: Tensor, text: Tensor, **options: Any) -> Any:
        return functions.clip_loss(image, text, **self._call_options(options))


@docstrings.adapted(losses.lit_loss, DOC)
class LiTLoss(_LossModule, kind=spec.LIT):
    def forward(self, text: Tensor, image: Tensor, **options: Any) -> Any:
        return functions.lit_loss(text, image, **self._call_options(options))


@docstrings.adapted(losses.siglip_loss, DOC)
class SigLIPLoss(_LossModule, kind=spec.SIGLIP):
    def forward(self, image: Tensor, text: Tensor, bias: Any = None, **options: Any) -> Any:
        call_options = self._call_options(options if bias is None else {**options, "bias": bias})
        return functions.siglip_loss(image, text, **call_options)


@docstrings.adapted(losses.sup_con_loss, DOC)
class SupConLoss(_LossModule, kind=spec.SUP_CON):
    def forward(self, features: Tensor, labels: Tensor, **options: Any) -> Any:
        return functions.sup_con_loss(features, labels, **self._call_options(options))


@docstrings.adapted(losses.gte_loss, DOC)
class GTELoss(_LossModule, kind=spec.GTE):
    def forward(self, query: Tensor, key: Tensor, **options: Any) -> Any:
        return functions.gte_loss(query, key, **self._call_options(options))
