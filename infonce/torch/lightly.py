"""Drop-in replacements for lightly's losses: `NTXentLoss` with its memory bank, `DCLLoss` and
`DCLWLoss` of lightly.loss.

The constructors, the calls and the random numbers that fill a memory bank are the same. What
differs: the loss is float32 (float64 for float64). A temperature has to be positive. With
`gather_distributed` and no memory bank, the loss is that of all processes' rows, and their shards
may differ in size. Other keywords are those of `infonce.torch.nt_xent_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from .. import spec
from .core.drop_in import (
    SCALE,
    DropIn,
    Refused,
    gather_rows,
    mean_over_ranks,
    refuse,
    require_shape,
    world_group,
    world_group_option,
)
from .functions import info_nce_loss, nt_xent_loss

__all__ = ["DCLLoss", "DCLWLoss", "NTXentLoss", "negative_mises_fisher_weights"]


class _TwoViews(DropIn):
    """A loss of two views of each sample, over the rows of this process or of all processes."""

    kind = spec.NT_XENT

    def check_setting(self, name: str, value: Any) -> None:
        if name == "gather_distributed" and value and not dist.is_available():
            raise ValueError(
                "gather_distributed: expected False, got True: this build of torch has no "
                "torch.distributed"
            )

    def refused(self) -> Refused:
        views = refuse(["labels"], "the views of a sample are a row of out0 and of out1")
        return {**SCALE, **views, "normalize": (True, "logits are cosines")}

    def nt_xent_loss(self, out0: Tensor, out1: Tensor, **options: Any) -> Any:
        require_shape("out1", out1, tuple(out0.shape))
        return nt_xent_loss(
            torch.cat([out0, out1]),
            temperature=self.temperature,
            normalize=True,
            **options,
            **{**world_group_option(self.gather_distributed), **self.call_options()},
        )


class NTXentLoss(_TwoViews):
    """NT-Xent, or MoCo's loss with a memory bank: ``forward(out0 [B, D], out1 [B, D])``, two views.

    With cosines over `temperature` as logits, each row against all others:

    ``loss = -1/2B sum_i log softmax_{j != i}(z z' / temperature)_i,partner(i)``, z = [out0; out1].

    With a memory bank, rows of out0 against their own row of out1 and the rows of the bank:

    ``loss = -1/B sum_i log softmax([out0_i out1_i', out0_i bank'] / temperature)_0``. Then the rows
    of out1 take the place of the oldest in the bank, if out0 requires a gradient.

    Parameters
    ----------
    temperature : float, default 0.5
    memory_bank_size : int or (rows, width), default 0
        Rows of the bank; 0: none. Its width is that of the first batch if it is not given.
    gather_distributed : bool, default False
        The loss of all processes' rows. With a bank the loss is that of this process's rows, and
        the rows of all processes enter the bank, which each process has.
    options
        Of `infonce.torch.nt_xent_loss` (`info_nce_loss` with a bank).

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations, 2020. He et
    al.: Momentum Contrast for Unsupervised Visual Representation Learning, 2019.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        **options: Any,
    ) -> None:
        size = memory_bank_size if isinstance(memory_bank_size, int) else memory_bank_size[0]
        self.kind = spec.INFO_NCE if size else spec.NT_XENT
        super().__init__(
            options, gather_distributed=gather_distributed, temperature=temperature
        )  # fmt: skip
        self.memory_bank = MemoryBank(memory_bank_size)

    def refused(self) -> Refused:
        if self.kind is spec.NT_XENT:
            return super().refused()
        bank = refuse(
            ["ids", "group", "guide"], "the negatives are the rows of this process's memory bank"
        )
        return {**super().refused(), **bank}

    def forward(self, out0: Tensor, out1: Tensor) -> Any:
        if not self.memory_bank.size[0]:
            return self.nt_xent_loss(out0, out1)
        require_shape("out1", out1, tuple(out0.shape))
        options = self.call_options()
        bank = self.memory_bank.rows(out1)
        if out0.requires_grad:
            keys = nn.functional.normalize(out1.detach(), dim=1)
            group = world_group(self.gather_distributed)
            self.memory_bank.push(keys if group is None else gather_rows(keys, group))
        # Only rows of the bank are negatives. Queries and keys have the id 0, so the key of another
        # query is no negative; rows of the bank have the id 1.
        key_ids = torch.zeros(len(out0) + len(bank), dtype=torch.long, device=out0.device)
        key_ids[len(out0) :] = 1
        return info_nce_loss(
            out0,
            torch.cat([out1, bank]),
            temperature=self.temperature,
            normalize=True,
            ids=(key_ids[: len(out0)], key_ids),
            **options,
        )


class MemoryBank(nn.Module):
    """Keys of earlier batches, the oldest of which are replaced; at first, random unit rows."""

    bank: Tensor  # [rows, width]

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__()
        # (rows,) until the first batch gives the width, then (rows, width)
        self.size = (size,) if isinstance(size, int) else tuple(size)
        if any(n < 0 for n in self.size):
            raise ValueError(f"memory_bank_size: expected at least 0, got {size}")
        self.next_row = 0  # the row that is replaced next
        self.register_buffer("bank", torch.empty(self.size), persistent=False)
        if len(self.size) > 1:
            self._fill()

    def _fill(self) -> None:
        self.bank = nn.functional.normalize(torch.randn(self.size).type_as(self.bank), dim=-1)

    def rows(self, like: Tensor) -> Tensor:
        """A copy of the bank, in the dtype and on the device of the features `like`: `push`
        changes the bank itself before the loss of the batch is computed."""
        if len(self.size) == 1:
            self.size = (*self.size, like.shape[1])
            self._fill()
        return self.bank.clone().to(like)

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        """Replace the oldest rows by `keys`. As in lightly, keys that do not fit before the end of
        the bank are dropped, and the next batch begins at row 0."""
        room = self.size[0] - self.next_row
        self.bank[self.next_row : self.next_row + len(keys)] = keys[:room]
        self.next_row = self.next_row + len(keys) if len(keys) < room else 0


class DCLLoss(_TwoViews):
    """Decoupled contrastive loss: ``forward(out0 [B, D], out1 [B, D])``, two views.

    With cosines over `temperature` as logits x of the 2B rows, and weights w:

    ``loss = 1/2B sum_i ( log sum_{j != i, partner(i)} exp(x_ij) - w_i x_i,partner(i) )``

    Parameters
    ----------
    temperature : float, default 0.1
    weight_fn : callable (out0, out1) -> tensor [B], optional
        Weights of the positives of out0's unit rows; for out1's it is called with both exchanged.
        1 if left out.
    gather_distributed : bool, default False
        The loss of all processes' rows.
    options
        Of `infonce.torch.nt_xent_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Yeh et al.: Decoupled Contrastive Learning, 2021 (equation 6).
    """

    def __init__(
        self,
        temperature: float = 0.1,
        weight_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        gather_distributed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            options, gather_distributed=gather_distributed, temperature=temperature,
            weight_fn=weight_fn,
        )  # fmt: skip

    def refused(self) -> Refused:
        decoupled = {"decoupled": (True, "this loss leaves positives out of the denominator")}
        refused = {**super().refused(), **decoupled}
        if self.weight_fn is None:
            return refused
        instead = "weight_fn weighs the positives apart, which this keyword does not reach"
        names = ("reduction", "weights", "dims", "dim_weights", "margin", "key_bias", "metrics",
                 "group", "gradient_scale")  # fmt: skip
        return {**refused, **refuse(names, instead)}

    def forward(self, out0: Tensor, out1: Tensor) -> Any:
        loss = self.nt_xent_loss(out0, out1, decoupled=True)
        if self.weight_fn is None:
            return loss
        # in the dtype of the loss: features may have 16 bits, also by autocast
        out0, out1 = (nn.functional.normalize(z.to(loss.dtype), dim=1) for z in (out0, out1))
        weights = torch.stack([self.weight_fn(out0, out1), self.weight_fn(out1, out0)])
        # `loss` has the positives with weight 1. Add (1 - w) times the positive to each row's loss.
        positives = (out0 * out1).sum(dim=1) / self.temperature
        difference = ((1 - weights) * positives).mean(dim=0)
        return loss + mean_over_ranks(difference, world_group(self.gather_distributed))


class DCLWLoss(DCLLoss):
    """Decoupled contrastive loss weighted by `negative_mises_fisher_weights`.

    ``forward(out0 [B, D], out1 [B, D])``: `DCLLoss` with ``w_i = 2 - B softmax(cos / sigma)_i``.

    Parameters
    ----------
    temperature : float, default 0.1
    sigma : float, default 0.5
    gather_distributed : bool, default False
        The loss of all processes' rows; weights are those among one process's rows.
    options
        Of `infonce.torch.nt_xent_loss`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.

    References
    ----------
    Yeh et al.: Decoupled Contrastive Learning, 2021.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        sigma: float = 0.5,
        gather_distributed: bool = False,
        **options: Any,
    ) -> None:
        weight_fn = partial(negative_mises_fisher_weights, sigma=sigma)
        super().__init__(temperature, weight_fn, gather_distributed, **options)


def negative_mises_fisher_weights(out0: Tensor, out1: Tensor, sigma: float = 0.5) -> Tensor:
    """Weights of `DCLWLoss` for unit rows: ``2 - B softmax(<out0_i, out1_i> / sigma)``, without a
    gradient."""
    similarity = (out0.detach() * out1.detach()).sum(dim=1) / sigma
    return 2 - len(out0) * similarity.softmax(dim=0)
