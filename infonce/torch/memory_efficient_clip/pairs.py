"""CLIP and LiT of MemoryEfficientCLIP, and `MemoryEfficient`, the base of all its losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import spec
from .. import functions
from ..core.drop_in import SCALE, DropIn, Refused, locate_shard, refuse, require, world_group


class MemoryEfficient(DropIn):
    """Base of all losses here: the settings, and the processes that share a batch."""

    _shared = False  # whether processes share a batch: in the Distributed classes

    def __init__(
        self,
        temperature: float = 0.07,
        normalized_inputs: bool = False,
        stable: bool = True,
        tau_plus: float = 0.0,
        label_smoothing: float = 0.0,
        group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            options,
            temperature=temperature,
            normalized_inputs=normalized_inputs,
            stable=stable,
            tau_plus=tau_plus,
            label_smoothing=label_smoothing,
        )
        self.group = group

    def check_setting(self, name: str, value: Any) -> None:
        if name == "group" and not self._shared:
            require(name, value, None, "the Distributed classes share a batch")
        if name == "tau_plus":
            require(name, value, 0.0, "use false_negative_margin, which drops likely positives")

    def refused(self) -> Refused:
        return {
            **SCALE,
            **refuse(["metrics"], "a loss here is one tensor: use infonce.torch.clip_loss"),
            "normalize": (None, "rows are normalised unless normalized_inputs is True"),
        }

    def _call_options(self, tau_plus: Any) -> dict[str, Any]:
        """The keywords of one call of a function of `infonce.torch`."""
        if tau_plus is not None:
            self.check_setting("tau_plus", tau_plus)
        group = world_group() if self._shared and self.group is None else self.group
        # "global": as in memeff, gradients are not multiplied by the number of processes
        shares = {} if group is None else {"group": group, "gradient_scale": "global"}
        return {
            "temperature": self.temperature, "normalize": not self.normalized_inputs,
            **shares, **self.call_options(),
        }  # fmt: skip

    def _scaled(self, loss: Tensor, rows: int, group: Any) -> Tensor:
        """The loss with the value and the gradient that memeff's loss has.

        Over processes the value is a part, whose sum over processes is the loss of all rows; with
        ``reduction="none"`` it is the losses of this process's rows. If `stable`, the gradient is
        multiplied by ``sqrt(N temperature)``. `rows` is the number of this process's rows.
        """
        if group is None and not self.stable:
            return loss
        _, total, processes = locate_shard(group, rows)
        value = loss.detach() if loss.ndim else loss.detach() / processes
        factor = math.sqrt(total * self.temperature) if self.stable else 1.0
        return value + factor * (loss - loss.detach())


class Pairs(MemoryEfficient):
    """A loss of pairs of rows: CLIP or LiT, by the function `_loss` of `infonce.torch`."""

    _loss: Callable[..., Any]

    def forward(self, first: Tensor, second: Tensor, tau_plus: Any = None) -> Any:
        call_options = {"label_smoothing": self.label_smoothing, **self._call_options(tau_plus)}
        loss = type(self)._loss(first, second, **call_options)
        return self._scaled(loss, len(first), call_options.get("group"))


class MemoryEfficientCLIPLoss(Pairs):
    """CLIP: ``forward(image_features [N, D], text_features [N, D])``.

    ``loss = -1/(2N) sum_i (log softmax_row(x)_ii + log softmax_column(x)_ii)``,
    ``x = image text' / temperature``.

    Parameters
    ----------
    temperature : float, default 0.07
    normalized_inputs : bool, default False
        Whether features have unit norm already.
    stable : bool, default True
        Gradients are multiplied by ``sqrt(N temperature)``.
    tau_plus : float
        0.
    label_smoothing : float in [0, 1), default 0
        Share of the targets that is spread over all keys.
    options
        Of `infonce.torch.clip_loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """

    kind = spec.CLIP
    _loss = staticmethod(functions.clip_loss)


class MemoryEfficientLiTLoss(Pairs):
    """LiT: ``forward(text_features [N, D], image_features [N, D])``; the image tower is locked.

    ``loss = -1/N sum_i log softmax(text image' / temperature)_ii``

    Parameters
    ----------
    temperature, normalized_inputs, stable, tau_plus, label_smoothing
        As of `MemoryEfficientCLIPLoss`.
    options
        Of `infonce.torch.lit_loss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Zhai et al.: LiT: Zero-Shot Transfer with Locked-image text Tuning, 2022.
    """

    kind = spec.LIT
    _loss = staticmethod(functions.lit_loss)


class DistributedMemoryEfficientCLIPLoss(MemoryEfficientCLIPLoss):
    """`MemoryEfficientCLIPLoss` over processes: ``forward(image_features, text_features)`` of this
    process's rows [rows, D].

    ``loss = loss of the N rows of all / processes``: the sum over processes is the loss. Gradients
    are of the loss of all rows, not multiplied by the number of processes.

    Parameters
    ----------
    group : torch.distributed process group, optional
        All processes if left out.
    settings
        Of `MemoryEfficientCLIPLoss`, and of `infonce.torch.clip_loss` over processes.

    Raises
    ------
    TypeError, ValueError, RankError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientCLIPLoss`.
    """

    _shared = True


class DistributedMemoryEfficientLiTLoss(MemoryEfficientLiTLoss):
    """`MemoryEfficientLiTLoss` over processes: ``forward(text_features, image_features)`` of this
    process's rows [rows, D].

    ``loss = loss of the N rows of all / processes``: the sum over processes is the loss. Gradients
    are of the loss of all rows, not multiplied by the number of processes.

    Parameters
    ----------
    group : torch.distributed process group, optional
        All processes if left out.
    settings
        Of `MemoryEfficientLiTLoss`, and of `infonce.torch.lit_loss` over processes.

    Raises
    ------
    TypeError, ValueError, RankError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientLiTLoss`.
    """

    _shared = True


class StableMemoryEfficientCLIPLoss(MemoryEfficientCLIPLoss):
    """`MemoryEfficientCLIPLoss`, which is stable by default: ``dloss = sqrt(N temperature) dloss``
    of the one with ``stable=False``, for features [N, D].

    Parameters
    ----------
    options
        Of `MemoryEfficientCLIPLoss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientCLIPLoss`.
    """


class StableMemoryEfficientLiTLoss(MemoryEfficientLiTLoss):
    """`MemoryEfficientLiTLoss`, which is stable by default: ``dloss = sqrt(N temperature) dloss``
    of the one with ``stable=False``, for features [N, D].

    Parameters
    ----------
    options
        Of `MemoryEfficientLiTLoss`.

    Raises
    ------
    TypeError, ValueError
        At the call, naming the argument, what came and what was expected.

    References
    ----------
    Those of `MemoryEfficientLiTLoss`.
    """


class _Normed:
    """A loss of unit rows, with the `apply` of an autograd function."""

    _module: type[Pairs]
    _stable = False

    @classmethod
    def apply(cls, first: Tensor, second: Tensor, temperature: float = 0.07) -> Any:
        return cls._module(temperature, normalized_inputs=True, stable=cls._stable)(first, second)


class MemoryEfficientCLIPLossNormed(_Normed):
    """`MemoryEfficientCLIPLoss` of unit rows: ``apply(image, text, temperature=0.07)``."""

    _module = MemoryEfficientCLIPLoss


class MemoryEfficientLiTLossNormed(_Normed):
    """`MemoryEfficientLiTLoss` of unit rows: ``apply(text, image, temperature=0.07)``."""

    _module = MemoryEfficientLiTLoss


class StableMemoryEfficientCLIPLossNormed(_Normed):
    """`StableMemoryEfficientCLIPLoss` of unit rows: ``apply(image, text, temperature=0.07)``."""

    _module = StableMemoryEfficientCLIPLoss
    _stable = True


class StableMemoryEfficientLiTLossNormed(_Normed):
    """`StableMemoryEfficientLiTLoss` of unit rows: ``apply(text, image, temperature=0.07)``."""

    _module = StableMemoryEfficientLiTLoss
    _stable = True
