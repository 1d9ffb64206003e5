"""What a loss is made of, as data: the problem, its blocks, what becomes of their logits.

Losses differ by this alone (`Problem`); what is done about it is in `solve`. Exponents are in base
2 throughout (x2 = x log2 e): that is what the hardware computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Array = Any  # a NumPy or CuPy array
Progress = Callable[[str, int, int], None]  # (phase, blocks done, blocks in all)

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# Scales in float32 and float64. From the largest on, rounding alone changes the logits of unit rows
# by 1, and no digit of a probability is right. The least leave half of all exponents to what they
# are multiplied by: probabilities, weights of rows, upstream gradients.
SCALES = {"fp32": (2.0**-63, 2.0**24), "fp64": (2.0**-511, 2.0**53)}
# For np.errstate, in every thread: what is out of range comes out as infinity or NaN, not a warning
SILENT: Any = {"all": "ignore"}


@dataclass(eq=False)  # not frozen: that triples the time to make one, which small batches notice
class Problem:
    """One loss on one pair of checked feature arrays: all that a backend needs to know.

    `losses_i` is the loss of row i; the result is ``sum_i upstream_i * losses_i`` and gradients are
    of that. `upstream` carries the reduction and the caller's `grad_out`.

    `upstream` and `positives` are mostly the same for every call of a loss; `spelled_out` makes the
    vectors that the folds index. (A kernel that knows the rule saves the time to write them.)
    """

    query: Array  # [M, D]
    key: Array  # [N, D]; `query` itself where `symmetric`
    scale: Any  # number, or 0-d array on the device
    upstream: Any  # [M] float64; a number where it is the same for all rows
    positives: Array = None  # [M] int64: the key that is row i's positive; None for the loss's rule
    row_share: float | None = None  # weight of a row in the reduced loss; None: not reduced
    row_weight: float = 1.0  # weight of the softmax over keys
    column_weight: float = 0.0  # weight of the softmax over queries
    bias: Any = None  # not None: pairwise sigmoid (SigLIP), no softmax
    symmetric: bool = False  # one set of rows on both sides: i = j excluded, one triangle suffices
    part: bool = False  # keys are some of all keys: a row whose positive is not among them has -1
    apart: bool = False  # as no row's positive is
    query_ids: Array = None  # [M] int64, with key_ids [N]: equal ids are excluded,
    key_ids: Array = None  # except for the positive
    normalize: bool = False
    compute: str = "fp32"  # precision of products and exponentials
    method: str = "auto"
    workspace: int = 256 * 2**20  # bytes
    ranks: bool = False  # also count the keys that score above the positive
    progress: Progress | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, D)."""
        m, d = self.query.shape
        return m, len(self.key), d

    @property
    def square(self) -> bool:
        """Whether key i belongs to query i, or is one of the same views."""
        m, n, _ = self.shape
        by_rule = self.positives is None and m == n
        return not self.part and (
            self.symmetric or self.two_sided or self.bias is not None or by_rule
        )

    @property
    def two_sided(self) -> bool:
        """Whether columns have statistics of their own."""
        return self.column_weight != 0.0


def spelled_out(problem: Problem, xp: Any) -> Problem:
    """The same problem with its vectors as arrays: key i is positive for query i; of 2B views,
    i + B for i."""
    m = problem.shape[0]
    positives, upstream = problem.positives, problem.upstream
    if positives is None:
        positives = (xp.arange(m) + m // 2) % m if problem.symmetric else xp.arange(m)
    if isinstance(upstream, float):
        upstream = xp.full(m, upstream)
    return replace(problem, positives=positives, upstream=upstream)


@dataclass(frozen=True)
class Grid:
    """How a fold cuts the logit matrix: row panels by column blocks, or one triangle of them."""

    rows: Sequence[slice]
    columns: Sequence[slice]
    triangle: bool = False  # rows == columns, and only blocks with b >= a are visited

    def visits(self, a: int) -> range:
        """Column blocks of panel `a`, in the order in which they are folded."""
        return range(a if self.triangle else 0, len(self.columns))

    def __len__(self) -> int:
        return sum(len(self.visits(a)) for a in range(len(self.rows)))


def cut(end: int, step: int, start: int = 0) -> list[slice]:
    """Slices of at most `step` that cover range(start, end)."""
    return [slice(i, min(i + step, end)) for i in range(start, end, step)]


def few(m: int, n: int, rows: int, columns: int) -> bool:
    """Whether there are at most two blocks of rows x columns for each row and column of a square
    matrix of as many logits: what a block costs beside its logits then grows as vectors do."""
    blocks = -(-m // rows) * -(-n // columns)
    return blocks * blocks <= 16 * max(1, m * n)


def least_side(m: int, n: int) -> int:
    """The least side of square blocks that are `few`."""
    side = max(1, math.isqrt(math.isqrt(m * n)) // 2)
    while not few(m, n, side, side):
        side += 1
    return side


def too_small(shape: tuple[int, int, int], least: int, workspace: int) -> str:
    """What to tell of a workspace in which blocks are not `few`."""
    m, n, d = shape
    return (
        f"workspace: expected at least {least} bytes for {m} x {n} logits and features of width "
        f"{d}, got {workspace}"
    )


def changed(part: T, /, **values: Any) -> T:
    """`dataclasses.replace` in a tenth of the time: for what every block makes anew."""
    new = object.__new__(part.__class__)
    new.__dict__.update(part.__dict__, **values)
    return new


@dataclass
class Sums:
    """Running (max, sum) of 2^x2 for every row or column of one side: the LSE fold's state."""

    max: Array  # [n] float64, identity -inf
    sum: Array  # [n] float64, identity 0: sum_j 2^(x2_j - max)

    def clear(self) -> None:
        """Nothing is folded in yet."""
        self.max[:], self.sum[:] = -np.inf, 0.0


# --- epilogues: what becomes of a block's logits --------------------------------------------------


@dataclass
class Statistics:
    """LSE fold. Row and column (max, sum) over the negatives, and the positives' logits."""

    rows: Sums
    columns: Sums | None  # `rows` itself in the symmetric case; None where columns do not count
    positive: Array  # [M] float64, base-2 logit of the positive
    row_rank: Array = None  # [M] int64: keys scoring above the positive (where asked for)
    column_rank: Array = None  # [N] int64

    phase = "log-sum-exp"


@dataclass
class Ranks:
    """Counts of what scores above the positives, whose logits are known."""

    positive: Array  # [M] float64, base 2
    row_rank: Array  # [M] int64, added to
    column_positive: Array = None  # [N]; None where only rows count
    column_rank: Array = None  # [N]

    phase = "ranks"


@dataclass
class SoftmaxGradient:
    """Gradient fold: dL/dx_ij = a_i 2^(x2_ij - h_i) + b_j 2^(x2_ij - h'_j) off the positives.

    A height is at least the largest logit of its row or column, and no more than what the
    log-sum-exp is above it; factors hold the rest of the log-sum-exp."""

    row_height: Array  # h [M], base 2
    row_factor: Array  # a [M], with `scale` and 2^(h - log-sum-exp) folded in
    column_height: Array | None  # h' [N]
    column_factor: Array | None  # b [N]
    positive: Array  # [M]: dL/dx at (i, positive of i), with `scale` folded in
    column_positive: Array | None = None  # [N]: the same by column, where it is no row of these

    phase = "gradient"


@dataclass
class OnlineSoftmax:
    """LSE fold and sum_j 2^(x2_ij - max_i) k_j together: one pass where only dQ is wanted. (Any
    number near the maximum will do in its place.)"""

    rows: Sums
    positive: Array  # as in Statistics

    phase = "log-sum-exp and gradient"


@dataclass
class Sigmoid:
    """SigLIP's loss and dL/dx in one pass; there is no log-sum-exp to wait for."""

    row_factor: Array  # [M] upstream, with `scale` folded in
    losses: Array  # [M] out
    bias_grad: Array  # [M] out: sum_j dL/dx_ij, `scale` folded in
    positive: Array  # [M] out: scale q_i . k_j at the positive, natural units

    phase = "sigmoid loss"


Epilogue = Statistics | Ranks | SoftmaxGradient | OnlineSoftmax | Sigmoid


@dataclass
class Gradients:
    """Accumulators of dQ and dK, and where they go when they are complete."""

    query: Array | None = None  # [M, D] destination, any float dtype and strides
    key: Array | None = None  # [N, D] destination
    dots: Array = None  # float64 out: <dQ_i, q_i> [M] (or <dK_j, k_j> [N] if dQ is not wanted)
    want_query: bool = True
    want_key: bool = True
    add_query: bool = False  # to what is in `query` already


@dataclass
class Poison:
    """NaN where losses depend on a feature that is not finite, else 0: from blocks that share
    their queries."""

    rows: Array  # [M]
    all: Array  # [1]: added to every row
    known: bool = False  # as far as it comes from queries
