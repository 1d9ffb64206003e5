"""Epilogues: what a pass does with the logits of a block, and the sums that it leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problem import Array, fast_replace


@dataclass
class Sums:
    """Running (max, sum) of 2^x2 of every row, or of every column: the state of the LSE pass.

    If `Problem.moments`, the sums also have the first moment of the logits, for the gradient of the
    scale. The mean of the logits under the softmax is moment / sum.
    """

    max: Array  # [n] float64, identity -inf
    sum: Array  # [n] float64, identity 0: sum_j 2^(x2_j - max)
    moment: Array = None  # [n] float64, identity 0: sum_j 2^(x2_j - max) x2_j; None: not wanted

    def clear(self) -> None:
        """Set to the identity: the sums over no logits."""
        self.max[:], self.sum[:] = -np.inf, 0.0
        if self.moment is not None:
            self.moment[:] = 0.0

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """(max, sum, moment)."""
        return self.max, self.sum, self.moment

    def part(self, rows: slice) -> Sums:
        """Views of some rows."""
        return Sums(
            self.max[rows], self.sum[rows], None if self.moment is None else self.moment[rows]
        )


def list_arrays(sums: Sequence[Sums]) -> list[Array]:
    """The arrays of several sums, without those that are None."""
    return [array for each in sums for array in each.arrays if array is not None]


def make_sums(arrays: Sequence[Array], like: Sequence[Sums]) -> list[Sums]:
    """The inverse of `list_arrays`, for sums that have the same arrays as `like`."""
    rest = iter(arrays)
    return [Sums(*itertools.islice(rest, len(list_arrays([each])))) for each in like]


@dataclass
class Statistics:
    """LSE pass: (max, sum) over the negatives of each row and column, and the positives' logits."""

    rows: Sums
    columns: Sums | None  # `rows` itself in the symmetric case; None if the loss has no column side
    positive_logits: Array  # [M] float64, base 2
    row_rank: Array = None  # [M] int64: keys that score above the positive; None: not asked for
    column_rank: Array = None  # [N] int64

    phase = "log-sum-exp"

    @property
    def row_sums(self) -> list[Sums]:
        """All sums of rows."""
        return [self.rows]

    @property
    def column_sums(self) -> list[Sums]:
        """All sums of columns."""
        return [] if self.columns is None else [self.columns]

    def for_block(self, column_sums: Sequence[Sums]) -> Statistics:
        """The same sums of rows, with `column_sums` (if not empty), and without retrieval ranks."""
        columns = column_sums[0] if column_sums else None
        return fast_replace(self, columns=columns, row_rank=None, column_rank=None)

    @property
    def retrieval_ranks(self) -> RetrievalRanks:
        """The epilogue that counts ranks, once these statistics are complete."""
        ranks = RetrievalRanks(self.positive_logits, self.row_rank)
        if self.column_rank is not None:  # key i is the positive of query i
            ranks.column_positive_logits = self.positive_logits
            ranks.column_rank = self.column_rank
        return ranks


@dataclass
class RetrievalRanks:
    """Counts of logits above the positive's, once the positives' logits are known."""

    positive_logits: Array  # [M] float64, base 2
    row_rank: Array  # [M] int64, added to
    column_positive_logits: Array = None  # [N]; None if only rows are ranked
    column_rank: Array = None  # [N]

    phase = "ranks"


@dataclass
class SoftmaxGradient:
    """Gradient pass: dL/dx_ij = a_i 2^(x2_ij - r_i) + b_j 2^(x2_ij - r'_j) off the positives.

    The reference exponents r and r' are subtracted before exp2. Each is at least the largest logit
    of its row (column), and at most the log-sum-exp. Factors hold the rest of the log-sum-exp.
    """

    row_reference: Array  # r [M], base 2
    row_factor: Array  # a [M], times `scale` and 2^(r - log-sum-exp)
    column_reference: Array | None  # r' [N]
    column_factor: Array | None  # b [N]
    positive_gradient: Array  # [M]: dL/dx at (i, positive of i), times `scale`
    # [N]: dL/dx at key j and its query, if that query is not row j; or another bound of dL/dx in
    # column j
    column_positive_gradient: Array | None = None
    linear: Sequence[Any] = ()  # `linear.LinearTerm`s, added to the complete gradients

    phase = "gradient"


@dataclass
class OnlineSoftmax:
    """LSE pass and gradients in one pass, for a loss with one softmax, over the keys of each row.

    With e_ij = 2^(x2_ij - max_i), dQ_i follows from sum_j e_ij k_j and one factor, which is known
    when row i has met all keys. Then dK_j follows from sum_i e_ij (factor_i q_i). (In place of the
    maximum, any number near it will do.)
    """

    rows: Sums
    positive_logits: Array  # as in Statistics

    phase = "log-sum-exp and gradient"


@dataclass
class Sigmoid:
    """SigLIP's loss and dL/dx in one pass: they need no log-sum-exp."""

    row_factor: Array  # [M] upstream, times `scale`
    losses: Array  # [M] out
    bias_grad: Array  # [M] out: sum_j dL/dx_ij, times `scale`
    log_scale_grad: Array  # [M] out: sum_j dL/dx_ij x_ij; None: not wanted
    positive_logits: Array  # [M] out: scale q_i . k_j at the positive, natural units

    phase = "sigmoid loss"


Epilogue = Statistics | RetrievalRanks | SoftmaxGradient | OnlineSoftmax | Sigmoid
