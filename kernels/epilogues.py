"""Epilogues: what a pass does with the logits of a block, and the vectors that it reads and writes.

`solve` gives an epilogue to each pass; a backend applies it to each block. x2 is a logit in base 2.
Vectors are float64, [M] with a number for each query, [N] for each key.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problem import Array, fast_replace


@dataclass
class Sums:
    """Running sums of the exponentials of every row, or of every column, in the log-sum-exp pass.

    The sum over j of 2^x2_j is `sum` 2^`max`. If `Problem.moments`, the sums also have the first
    moment of the logits, for the gradient of the scale: moment / sum is the mean of the logits
    under their softmax. The identity is the value before any logit is added.
    """

    # [n] largest x2, or an upper bound if rows and columns share exponentials; identity -inf
    max: Array
    sum: Array  # [n] sum_j 2^(x2_j - max); identity 0
    moment: Array = None  # [n] sum_j 2^(x2_j - max) x2_j; identity 0; None: not wanted

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
        """Views of the sums of some rows (or columns): adding to them changes these sums."""
        return Sums(
            self.max[rows], self.sum[rows], None if self.moment is None else self.moment[rows]
        )


def list_arrays(sums: Sequence[Sums]) -> list[Array]:
    """The arrays of several sums in one list, without None, so that ranks can exchange them."""
    return [array for each in sums for array in each.arrays if array is not None]


def make_sums(arrays: Sequence[Array], like: Sequence[Sums]) -> list[Sums]:
    """The sums with these arrays, the inverse of `list_arrays`. `like` tells which have moments."""
    rest = iter(arrays)
    return [Sums(*itertools.islice(rest, len(list_arrays([each])))) for each in like]


@dataclass
class Statistics:
    """Log-sum-exp pass: sums over the negatives of rows and columns, and the positives' logits."""

    rows: Sums
    # `rows` itself if queries are the keys and a triangle is visited; None: columns have no sums
    columns: Sums | None
    positive_logits: Array  # [M] or [M, P], base 2; NaN until its block is visited
    row_rank: Array = None  # [M] int64: how many keys score above the positive; None: not wanted
    column_rank: Array = None  # [N] int64: how many queries score above the query of key j

    phase = "log-sum-exp"  # name of the pass for `Problem.progress`

    @property
    def row_sums(self) -> list[Sums]:
        """The sums of rows of all models: of the loss, and of a teacher if there is one."""
        return [self.rows]

    @property
    def column_sums(self) -> list[Sums]:
        """The sums of columns of all models; empty if columns have no sums."""
        return [] if self.columns is None else [self.columns]

    def for_block(self, column_sums: Sequence[Sums]) -> Statistics:
        """The epilogue of a block over ranks: the same sums of rows, `column_sums` (empty: none) in
        place of the sums of columns, and no retrieval ranks."""
        columns = column_sums[0] if column_sums else None
        return fast_replace(self, columns=columns, row_rank=None, column_rank=None)

    @property
    def retrieval_ranks(self) -> RetrievalRanks:
        """The epilogue of the pass that counts retrieval ranks. A backend with such a pass asks for
        it after the log-sum-exp pass: the pass compares logits with the positives' logits."""
        ranks = RetrievalRanks(self.positive_logits, self.row_rank)
        if self.column_rank is not None:  # key i is the positive of query i
            ranks.column_positive_logits = self.positive_logits
            ranks.column_rank = self.column_rank
        return ranks


@dataclass
class RetrievalRanks:
    """Pass after the log-sum-exp pass: counts the logits above the positive's logit.

    A call of one process on the CPU needs no such pass. It computes the dot products of positives
    before the log-sum-exp pass (`TiledPass.rank_threshold_logits`), which then counts the logits.
    Other backends know the positives' logits only after the log-sum-exp pass.
    """

    positive_logits: Array  # [M] base 2
    row_rank: Array  # [M] int64 counts of keys, to which a block adds
    column_positive_logits: Array = None  # [N] base 2; None: only rows are ranked
    column_rank: Array = None  # [N] int64 counts of queries; None: only rows are ranked

    phase = "ranks"


@dataclass
class SoftmaxGradient:
    """Gradient pass: scale dL/dx_ij = a_i 2^(x2_ij - r_i) + b_j 2^(x2_ij - r'_j) at negatives.

    The reference exponents r and r' are subtracted before exp2. Each is at least the largest logit
    of its row (column), and at most the log-sum-exp. The factors have the rest of the division by
    the sum: a_i = upstream_i row_direction_weight scale 2^(r_i - log-sum-exp_i), with the
    log-sum-exp in base 2, and b_j likewise.
    """

    row_reference: Array  # r [M], base 2
    row_factor: Array  # a [M]
    column_reference: Array | None  # r' [N], base 2; None: columns have no softmax
    column_factor: Array | None  # b [N]; None: columns have no softmax
    positive_gradient: Array  # [M] or [M, P]: scale dL/dx at the positives of row i
    # [N]: bounds of the size of scale dL/dx at the positive in column j, from which the gradient
    # divisors of float16 follow. None: `positive_gradient`, because query j has the positive j
    column_positive_gradient: Array | None = None
    linear: Sequence[Any] = ()  # `linear.LinearTerm`s, added to the complete gradients
    # whether the size of dL/dx at the positive of a row (column) bounds that at its other pairs.
    # False with linear terms, also if others than this pass add them
    bounded_by_positives: bool = True

    phase = "gradient"


@dataclass
class OnlineSoftmax:
    """Both passes in one, for a loss with one softmax, over the keys of each row.

    With e_ij = 2^(x2_ij - max_i), dQ_i is sum_j e_ij k_j times a factor, minus the positive's part.
    The factor is known when row i has met all keys. Then dK_j follows from sum_i e_ij factor_i q_i,
    which only a GPU computes. A GPU replaces max_i by a number near the maximum, because it has to
    choose one before the row's logits are known.
    """

    rows: Sums
    positive_logits: Array  # as in Statistics

    phase = "log-sum-exp and gradient"


@dataclass
class Sigmoid:
    """SigLIP's losses and gradients in one pass: dL/dx needs no log-sum-exp.

    With z = x + bias, and t = 1 at positives and -1 at negatives,

        loss_i = sum_j softplus(-t_ij z_ij),    dL/dx_ij = -upstream_i t_ij sigmoid(-t_ij z_ij).

    With positive ids, the terms of positives have weights (`targets`, above `PositivePairs`).
    Blocks add to the outputs, which begin at 0; they set `positive_logits`, which begin as NaN.
    """

    row_factor: Array  # [M] upstream_i times the scale
    losses: Array  # [M] output
    bias_grad: Array  # [M] output: sum_j dL/dx_ij, times the scale
    log_scale_grad: Array  # [M] output: sum_j dL/dx_ij x_ij (x without the bias); None: not wanted
    positive_logits: Array  # [M] output: scale q_i . k_j at the positive, natural units, no bias

    phase = "sigmoid loss"


Epilogue = Statistics | RetrievalRanks | SoftmaxGradient | OnlineSoftmax | Sigmoid
