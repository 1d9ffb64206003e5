"""`KeyQueue`: keys of earlier batches, which are negatives, or positives, of the next ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import validation
from .core.drop_in import gather_rows
from .functions import FEATURE_DTYPES

# Integers that int64 holds
INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
            torch.uint32}  # fmt: skip


class KeyQueue(nn.Module):
    """Keeps the keys of earlier batches, with which the next batches are compared, too.

    >>> queue = infonce.torch.KeyQueue(65536, 128)
    >>> keys, ids = queue(key, ids)
    >>> loss = infonce.torch.info_nce_loss(query, keys, scale=20.0, ids=(ids[: len(key)], ids))

    A call returns the batch's keys before the keys in the queue, and then stores the batch's keys.
    So key i belongs to query i, and the loss of the example is, with ``x_ij = scale <q_i, k_j>``,

    ``loss = mean_i( log sum_{j in batch and queue} exp x_ij - x_ii )``,

    without pairs i != j of equal ids. The queue begins empty and grows to `size`: it returns no row
    that is no key, and the loss is right from the first call on. In evaluation mode,
    ``queue.eval()``, calls store nothing.

    Parameters
    ----------
    size : int
        The most keys that the queue holds. 0: calls return the batch alone.
    features : int
        The width of a key.
    group : torch.distributed process group, optional
        Each process stores the keys of all processes, so all have the same queue. Pass no `group`
        to the loss then: its keys would be those of all queues. In a compiled graph the processes
        need the same number of rows. Without a group, `DistributedDataParallel` would give each
        process the queue of the first: pass it ``broadcast_buffers=False``.
    key : tensor [B, features]
        At the call: the keys of the batch.
    ids : integer tensor [B], optional
        At the call: the samples' ids, or their classes. In each call, or in none.

    Returns
    -------
    keys : tensor [B + filled, features]
        The batch's keys, with their gradient, and then the queue's, without a gradient, newest
        first; of the dtype of `key`.
    ids : int64 tensor [B + filled]
        The ids of these keys; None if the call has none.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what was expected.
    RuntimeError
        In replicas of `nn.DataParallel`, which cannot store keys; and in a backward pass, as inside
        of `torch.utils.checkpoint`, which would store keys twice.

    Notes
    -----
    `filled` is the number of keys in the queue. The buffers are `keys` [size, features], `ids`
    [size] and `counts` [2], the numbers of keys and of ids. They follow ``queue.to(...)`` and are
    in the ``state_dict()``.

    Calls do not wait for the device, except to read `counts` after something other than the queue
    wrote it: `load_state_dict`, a copy of the buffers, or `DistributedDataParallel` before each
    call, unless it has ``broadcast_buffers=False``. A compiled graph does not see these writes,
    except those of `load_state_dict`, until the program reads `filled`. `torch.compile` makes a
    graph for the empty queue, one for a queue that grows, and one for a full queue.

    References
    ----------
    He et al.: Momentum Contrast for Unsupervised Visual Representation Learning, 2020. Wang et al.:
    Cross-Batch Memory for Embedding Learning, 2020.
    """

    keys: Tensor  # [size, features]; keys are in the first `filled` rows, newest first
    ids: Tensor  # [size] int64
    counts: Tensor  # [2] int64: the numbers of keys and of ids in the queue

    def __init__(self, size: int, features: int, group: Any = None) -> None:
        super().__init__()
        for name, value, least in (("size", size, 0), ("features", features, 1)):
            if not validation.is_integer(value) or value < least:
                raise ValueError(
                    f"{name}: expected an integer of at least {least}, got {validation.what(value)}"
                )
        self.size, self.features, self.group = size, features, group
        self.register_buffer("keys", torch.zeros(size, features))
        self.register_buffer("ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self._remember(0, has_ids=False)

    @property
    def filled(self) -> int:
        """The number of keys in the queue."""
        if not torch.compiler.is_compiling():
            self._read_counts()
        return len(self._rows)

    def _remember(self, filled: int, has_ids: bool) -> None:
        """Keep the numbers of `counts` on the host, so that calls need not wait for a GPU."""
        # The length of a tensor without elements: torch.compile makes a graph of its own for each
        # value of an integer of a module, and one for all lengths of a tensor.
        self._rows = torch.empty(filled, 0, device="cpu")
        self._has_ids = has_ids
        # A compiled graph does not know versions: the next call outside of it reads `counts`.
        if not torch.compiler.is_compiling():
            self._counts_read = self.counts, _find_version(self.counts)

    def _read_counts(self) -> None:
        """Read `counts` if others have written it, as `load_state_dict` and DDP's broadcast do."""
        counts, version = self._counts_read
        if counts is self.counts and version is not None and version == _find_version(counts):
            return
        if not self.counts.is_meta:
            filled, with_ids = self.counts.tolist()
            self._remember(filled, with_ids > 0)

    def _write_counts(self, filled: int, has_ids: bool) -> None:
        self.counts[0].fill_(filled)  # `fill_` does not wait for a GPU, as a copy would
        self.counts[1].fill_(filled if has_ids else 0)
        self._remember(filled, has_ids)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Move the buffers. `to_empty` does not copy them, so `counts` is written again."""
        filled, has_ids = self.filled, self._has_ids
        super()._apply(function, recurse)
        self._write_counts(filled, has_ids)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies and pickles, whose `counts` has versions of its own."""
        super().__setstate__(state)
        self._counts_read = self.counts, None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        # Of earlier checkpoints, which have a dict of numbers instead of `counts`
        numbers = state_dict.pop(f"{prefix}_extra_state", None)
        if numbers is not None:
            filled, has_ids = numbers["filled"], numbers["has_ids"]
            state_dict[f"{prefix}counts"] = torch.tensor([filled, filled if has_ids else 0])
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._read_counts()

    def forward(self, key: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self._check(key, ids)
        keys = torch.cat([key, self.keys[: self.filled].to(key.dtype)])
        batch_and_queue_ids = None
        if ids is not None:
            batch_and_queue_ids = torch.cat([ids.long(), self.ids[: self.filled]])
        if self.training:
            self._store(key, ids)
        return keys, batch_and_queue_ids

    @torch.no_grad()
    def _store(self, key: Tensor, ids: Tensor | None) -> None:
        """Put the keys of a batch before those in the queue, of which the oldest may leave it."""
        filled = new_filled = self.filled
        for buffer, rows in ((self.keys, key), (self.ids, ids)):
            if rows is None:
                continue
            if self.group is not None:
                rows = gather_rows(rows, self.group)
            rows = torch.cat([rows.to(buffer.dtype), buffer[:filled]])[: self.size]
            buffer[: len(rows)] = rows
            new_filled = len(rows)
        self._write_counts(new_filled, ids is not None)

    def _check(self, key: Any, ids: Any) -> None:
        """TypeError or ValueError for arguments of a call that do not fit.

        RuntimeError in a replica of nn.DataParallel, which would forget what it stores, and in a
        backward pass, which computes a call again.
        """
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "KeyQueue: expected a call outside of nn.DataParallel, whose replicas store "
                "nothing: call the queue with the keys of all replicas"
            )
        is_compiling = torch.compiler.is_compiling()
        if self.training and not is_compiling and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "KeyQueue: expected a call outside of torch.utils.checkpoint, which computes the "
                "call again in the backward pass and would store keys twice"
            )
        if not isinstance(key, Tensor) or key.dtype not in FEATURE_DTYPES:
            raise TypeError(f"key: expected a tensor of floats, got {validation.what(key)}")
        if key.ndim != 2 or key.shape[1] != self.features:
            expected = f"shape (B, {self.features})"
            raise ValueError(f"key: expected {expected}, got {tuple(key.shape)}")
        if key.device != self.keys.device:
            raise ValueError(
                f"key: expected a tensor on {self.keys.device}, as the queue is, got {key.device}"
            )
        if self.filled and self._has_ids != (ids is not None):
            expected = (
                "ids as in the calls before" if self._has_ids else "None as in the calls before"
            )
            raise ValueError(f"ids: expected {expected}, got {validation.what(ids)}")
        if ids is None:
            return
        if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
            raise TypeError(
                f"ids: expected a tensor of integers, not of uint64, got {validation.what(ids)}"
            )
        if ids.shape != key.shape[:1] or ids.device != key.device:
            expected = f"shape ({len(key)},) on {key.device}"
            raise ValueError(
                f"ids: expected {expected}, as key has, got {tuple(ids.shape)} on {ids.device}"
            )

    def extra_repr(self) -> str:
        return f"{self.size}, {self.features}, filled={self.filled}"


def _find_version(tensor: Tensor) -> int | None:
    """How often the tensor has been written to; None if PyTorch does not count, in inference
    mode."""
    return None if tensor.is_inference() else tensor._version
