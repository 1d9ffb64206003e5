"""The losses as modules: a function of functions.py, with keywords that the module keeps for all
calls, and a scale and bias that it may learn."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from .. import docstrings, losses, spec
from ..checks import call, keywords, validation
from ..spec import Loss
from . import functions
from .core.autograd import TENSOR_TYPES
from .core.learned_scale import learned_scale

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
        ``reset_parameters()`` gives them their first values again.
    max_scale : float, default 100
    min_scale : float, default 0
        With `learnable`, the limits of the scale. ``math.inf`` and 0: no limit. Where ``log_scale``
        is beyond a limit, the loss is that at the limit, and ``log_scale`` gets the gradient there
        if a step against it leads back, otherwise 0.
    temperature, scale, bias
        An `nn.Parameter` given at construction becomes a parameter of the module.
    options
        Keywords of the function, with its defaults, at construction or at the call; keywords of the
        call take precedence:
        ``{name}(normalize=True)({call_arguments}, scale=logit_scale.exp())``.
        Each keyword is an attribute too, which the next call follows:
        ``criterion.normalize = False``.

    Returns
    -------
    0-d tensor, or [rows] with ``reduction="none"``

    Raises
    ------
    TypeError, ValueError
        At construction, and when an attribute is set: for a keyword that the function does not
        have, a wrong value of an option (arrays are checked at the call), keywords that exclude
        each other, and numbers that are no beginning of a learnable scale. At the call, the errors
        of the function.
"""
NUMBERS = ("temperature", "scale", "bias")  # keywords that users may give as an nn.Parameter
# Attributes that set what a module computes: the names that its class lacks are refused
SETTINGS = frozenset({"log_scale", *spec.GRAD_ONLY}).union(
    *map(keywords.torch_module, spec.LOSSES.values())
)


class _LossModule(nn.Module):
    """Base of the modules. A subclass names its loss (`kind`) and passes arguments in `forward`.

    Settings are attributes. A call reads them by `getattr`: PyTorch's wrappers (replicas of
    DataParallel, FSDP, `parametrize`, `functional_call`) hold a parameter elsewhere than in
    `_parameters`.
    """

    kind: Loss
    _given: tuple[str, ...] = ()  # names of the attributes that a call passes to the function

    def __init_subclass__(cls, kind: Loss | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind is None:  # a user's subclass
            return

        # Each class gets its own __init__, because editors read its signature from the class
        def __init__(self: _LossModule, *args: Any, **options: Any) -> None:
            if args:
                raise keywords.surplus(f"infonce.torch.{cls.__name__}()", [], args)
            _LossModule.__init__(self, **options)

        init_signature = keywords.signature(__init__, keywords.torch_module(kind))
        __init__.__signature__ = init_signature  # type: ignore[attr-defined]
        cls.kind, cls.__init__ = kind, __init__  # type: ignore[method-assign]
        cls.forward = keywords.require_positional(cls.forward)
        cls.forward.__signature__ = keywords.signature(cls.forward, keywords.torch_function(kind))

    def __init__(
        self, *, learnable: bool = False, max_scale: float = keywords.MAX_SCALE,
        min_scale: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        validation.flag("learnable", learnable)
        self._require_known(options)
        self._check(options)
        self.__dict__["learnable"] = learnable
        self.__dict__.update(self._checked_limits(max_scale=max_scale, min_scale=min_scale))
        # Values for `reset_parameters`: parameters may begin on the meta device, without a value
        self._first_values: dict[str, Any] = {
            name: value.detach().clone()
            for name, value in options.items()
            if name in NUMBERS and isinstance(value, nn.Parameter)
        }
        if learnable:
            options |= self._learn({name: options.pop(name, None) for name in NUMBERS})
        self._given = tuple(options)
        for name, value in options.items():
            super().__setattr__(name, value)

    def _learn(self, numbers: dict[str, Any]) -> dict[str, nn.Parameter]:
        """The parameters `log_scale` and, in SigLIP, `bias`, which begin at the given numbers."""
        if self._first_values:
            raise ValueError(
                f"learnable: expected False with a Parameter as {min(self._first_values)}, got True"
            )
        temperature, scale, bias = numbers.values()
        scale = float(validation.scale(self.kind, temperature, scale, "fp32"))
        if self.max_scale < scale:
            raise ValueError(
                f"max_scale: expected at least the scale, {scale!r}, got {self.max_scale!r}"
            )
        if self.min_scale > scale:
            raise ValueError(
                f"min_scale: expected at most the scale, {scale!r}, got {self.min_scale!r}"
            )
        # Vectors of one number: fully_shard takes no 0-d parameter
        self._first_values["log_scale"] = [math.log(scale)]
        if self.kind.sigmoid:
            bias = validation.number("bias", self.kind.bias if bias is None else bias)
            self._first_values["bias"] = [float(bias)]
        return {
            name: nn.Parameter(torch.tensor(value)) for name, value in self._first_values.items()
        }

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the parameters the values that they had at construction.

        PyTorch needs this after ``to_empty``, for a module that was made on the meta device."""
        for name, value in self._first_values.items():
            getattr(self, name).copy_(torch.as_tensor(value, dtype=torch.float64))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Load a number of any shape: other modules keep 0-d parameters."""
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor) and value.numel() == 1:
                state_dict[prefix + name] = value.reshape(parameter.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module checks what replaces a parameter. Wrappers replace parameters by tensors, whose
        # values the call checks
        if name in SETTINGS and not (
            name in self._parameters or (name in self._given and isinstance(value, Tensor))
        ):
            value = self._checked_setting(name, value)
        super().__setattr__(name, value)

    def _checked_setting(self, name: str, value: Any) -> Any:
        """The value of a setting that is an attribute from now on."""
        self._require_known((name,))
        if name in ("max_scale", "min_scale"):
            limits = {"max_scale": self.max_scale, "min_scale": self.min_scale, name: value}
            return self._checked_limits(**limits)[name]
        if name == "learnable":
            raise ValueError(
                f"learnable: expected {self.learnable} as at construction, "
                f"got {validation.what(value)}"
            )
        options = {given: getattr(self, given) for given in self._given}
        is_scale = name in ("temperature", "scale") and value is not None
        if options.pop("log_scale", None) is not None and is_scale:
            raise ValueError(
                f"{name}: expected None beside log_scale, which the module learns, "
                f"got {validation.what(value)}"
            )
        self._check({**options, name: value})
        if name not in self._given:
            self._given = (*self._given, name)
        return value

    def _check(self, options: dict[str, Any]) -> None:
        """Check the keywords that need no features."""
        numbers = {name: _to_checked(options[name]) for name in NUMBERS if name in options}
        plain = {name: value for name, value in options.items() if name in spec.DEFAULTS}
        bias = numbers.pop("bias", None)
        call.check_options(self.kind, bias, {**plain, **numbers})

    def _checked_limits(self, max_scale: Any, min_scale: Any) -> dict[str, float]:
        """The limits of a learned scale as numbers."""
        limits: dict[str, float] = {
            "max_scale": validation.number("max_scale", max_scale, (math.inf,)),
            "min_scale": validation.number("min_scale", min_scale),
        }
        for name, default in (("max_scale", keywords.MAX_SCALE), ("min_scale", 0.0)):
            if not self.learnable and limits[name] != default:
                raise ValueError(f"{name}: expected learnable=True with it, got False")
        if limits["min_scale"] < 0:
            raise ValueError(f"min_scale: expected at least 0, got {limits['min_scale']!r}")
        if not 0 < limits["max_scale"] >= limits["min_scale"]:
            raise ValueError(
                "max_scale: expected a positive number, at least min_scale, "
                f"{limits['min_scale']!r}, got {limits['max_scale']!r}"
            )
        return limits

    def _call_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The keywords of one call of the function.

        `options` of the call take precedence over the module's keywords and parameters.
        """
        if not functions.ONE_PROCESS_OPTIONS.issuperset(options):
            self._require_known(options)
        call_options = {name: getattr(self, name) for name in self._given}
        if "temperature" in options or "scale" in options:
            for name in ("log_scale", "temperature", "scale"):
                call_options.pop(name, None)
        log_scale = call_options.pop("log_scale", None)
        if log_scale is not None:
            call_options["scale"] = learned_scale(log_scale, self.min_scale, self.max_scale)
        return {**call_options, **options}

    def _require_known(self, options: Collection[str]) -> None:
        function = f"infonce.torch.{type(self).__name__}()"
        functions.require_known(function, options, keywords.torch_module(self.kind))

    def extra_repr(self) -> str:
        names = [name for name in self._given if name not in self._parameters]
        if self.learnable:
            names = ["learnable", "max_scale", "min_scale", *names]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _to_checked(value: Any) -> Any:
    """A number that `_check` can check. Only plain tensors of the CPU are read; for others stands a
    number that passes."""
    if not isinstance(value, Tensor):
        return value
    return value.detach() if type(value) in TENSOR_TYPES and value.is_cpu else 1.0


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
