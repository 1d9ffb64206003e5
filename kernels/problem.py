"""A loss as data: the problem, its blocks, and the destinations of its gradients.

Losses differ only in this data (`Problem`). The computation is in `solve`. All exponents are in
base 2 (x2 = x log2 e), because that is what the hardware computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Array = Any  # a NumPy or CuPy array
Progress = Callable[[str, int, int], None]  # (phase, blocks done, blocks in all)

WORKSPACE = 256 * 2**20  # bytes; the default
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# The range of scales in float32 and float64. Above the range, rounding changes the logits of unit
# rows by 1, so that no digit of a probability is right. Below the range, products of the scale with
# probabilities, weights and upstream gradients could underflow: half of all exponents are left to
# these factors
SCALES = {"fp32": (2.0**-63, 2.0**24), "fp64": (2.0**-511, 2.0**53)}
# For np.errstate, in every thread: a value out of range becomes infinity or NaN, without a warning
SILENT: Any = {"all": "ignore"}
FEW_LOGITS = 2**24  # see `uses_moments`
# Fields of `Problem` that decide which pairs count: vectors of numbers of queries, and of keys
QUERY_VECTORS = (
    "query_ids", "query_groups", "query_positive_ids", "query_pair_weights", "query_bias", "limits",
    "guide_limits",
)  # fmt: skip
KEY_VECTORS = (
    "key_ids", "key_groups", "key_positive_ids", "key_pair_weights", "key_bias", "key_limits",
    "guide_key_limits",
)  # fmt: skip


@dataclass(eq=False)  # not frozen: a frozen one takes three times as long to make
class Problem:
    """One loss on one pair of checked feature arrays: all that a backend needs to know.

    `losses_i` is the loss of row i. The result is ``sum_i upstream_i * losses_i``, and gradients
    are those of this sum. `upstream` is the share of a row, the factor of its loss in the reduced
    loss, times the caller's `grad_out`.

    If `upstream` is the same for all rows, it is a number. If `positives` follow from the loss,
    they are None. `materialize_vectors` makes arrays of both; some kernels need none.
    """

    query: Array  # [M, D]
    key: Array  # [N, D]; `query` itself if `symmetric`
    scale: Any  # number, or 0-d array on the device
    upstream: Any  # [M] float64; a number if it is the same for all rows
    # [M] int64: row i's positive key; [M, P]: several, -1 for none; None: the loss's default
    positives: Array = None
    # the share of every row; if there are `row_shares`, their common factor. None: no reduction
    common_share: float | None = None
    row_direction_weight: float = 1.0  # of the losses of the softmax over keys, in `losses_i`
    column_direction_weight: float = 0.0  # of the losses of the softmax over queries; 0: none
    bias: Any = None  # not None: pairwise sigmoid (SigLIP), no softmax
    symmetric: bool = False  # queries are the keys: pairs i = j are excluded, one triangle suffices
    key_shard: bool = False  # `key` is a part of the keys; a positive outside of it is -1
    no_local_positives: bool = False  # no positive is in `key`: all positives are -1
    query_ids: Array = None  # [M] int64, with key_ids [N]: pairs of equal ids are excluded,
    key_ids: Array = None  # except for the positive
    normalize: bool = False
    compute: str = "fp32"  # resolved precision of products and exponentials: no "auto"
    method: str = "auto"
    workspace: int = WORKSPACE  # bytes
    retrieval_ranks: bool = False  # also count the keys that score above the positive
    progress: Progress | None = None
    workspace_given: bool = True  # by the caller, who gets no more than that
    label_nans: Array = None  # [M] float64 added to losses: NaN if the row's label is invalid
    scalar_grads: bool = False  # the gradients of scale and bias are wanted
    moments: bool = False  # the scale's gradient comes from moments (`uses_moments`)
    weights: Array = None  # [M] float64 weights of the rows' losses; None: all 1
    row_shares: Array = None  # [M] float64 shares of rows, from `weights`; None: all are equal
    query_groups: Array = None  # [M] int64, with key_groups [N]: pairs of different groups are
    key_groups: Array = None  # excluded, except for the positive
    # groups of queries and of keys as NumPy arrays, from which blocks without a common group are
    # found. Only for features on a GPU, groups in host memory, and no labels
    host_groups: tuple[Array, Array] | None = None
    # of a sigmoid, [M] and [N] int64: pairs of equal ids are positives, and all `positives` are -1
    query_positive_ids: Array = None
    key_positive_ids: Array = None
    # the weight of a positive pair (i, j) is query_pair_weights[i] + key_pair_weights[j], float64
    query_pair_weights: Array = None  # [M], see `targets`
    key_pair_weights: Array = None  # [N]
    # options of the softmax: see `infonce.spec.OPTIONS`
    margin: float = 0.0
    decoupled: bool = False
    label_smoothing: float = 0.0
    hardness: float = 0.0
    key_bias: Array = None  # [N] float64
    query_bias: Array = None  # [M] bias of queries in the columns' softmax, if queries are the keys
    false_negative_margin: float = math.inf
    limits: Array = None  # [M] float64 limit of each row: see `targets.limits`
    key_limits: Array = None  # [N] float64 limit of each column, if columns have a softmax
    guide_query: Array = None  # [M, E] features of the guide; `guide_limits` are of their products
    guide_key: Array = None  # [N, E]; `guide_query` itself if `symmetric`
    guide_margin: float = 0.0
    guide_limits: Array = None  # [M] limits of the guide's products
    guide_key_limits: Array = None  # [N]
    own: Array = None  # [M, K, D]: K further negatives of each row, see `OwnNegatives`
    own_mask: Array = None  # [M, K] bool: which own negatives count; None: all
    own_rows: Any = None  # reads own negatives that are elsewhere: see `between_passes.OwnRows`
    joint: bool = False  # rows i and i + B of 2B have one softmax (GTE); `upstream` is [B]
    joint_copy_bytes: int = 0  # of the workspace: features and gradients of a joint loss are copied
    # `linear.Segments`: all other rows of a row's class are its positives. `positives` has only the
    # positives of rows with one other row in their class
    classes: Any = None

    # fields with features from a second model, a guide or a teacher, if there is one
    auxiliary_names: ClassVar[tuple[str, str]] = "guide_query", "guide_key"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, D)."""
        m, d = self.query.shape
        return m, len(self.key), d

    @property
    def plain(self) -> bool:
        """Whether all rows have one positive, and no option changes logits or targets."""
        return self.plain_logits and self.plain_targets

    @property
    def plain_logits(self) -> bool:
        """Whether no option but `ids` adds, changes or leaves out a logit."""
        # the chained `is` asks, in little time, whether all three are None
        has_arrays = not (self.query_groups is self.own is self.key_bias is None)
        return not has_arrays and not self.compares_with_limits

    @property
    def plain_targets(self) -> bool:
        """Whether all rows have one positive, no margin or the like, and no linear terms."""
        numbers = self.margin or self.decoupled or self.hardness
        others = numbers or self.linear_terms or self.joint
        one_positive = self.set_size == 1 and not self.has_positive_ids
        return one_positive and self.weights is None and not others

    @property
    def loss_follows_from_sums(self) -> bool:
        """Whether the loss of a row follows only from its sums and the logits of its positives.
        `margin`, `decoupled` and `hardness` change only numbers in that formula."""
        others = self.linear_terms or self.joint or self.has_positive_ids
        return self.plain_logits and not others

    @property
    def set_size(self) -> int:
        """P of `positives` [M, P]."""
        sets = self.positives is not None and self.positives.ndim > 1
        return int(self.positives.shape[1]) if sets else 1

    @property
    def compares_with_limits(self) -> bool:
        """Whether negatives above a limit are left out: see `targets.limits`."""
        return self.has_limits or self.guided

    @property
    def has_limits(self) -> bool:
        return self.false_negative_margin < math.inf

    def without_weights(self) -> Problem:
        """The problem for kernels, which find the weights of rows in `upstream`."""
        return self if self.weights is None else fast_replace(self, weights=None)

    @property
    def guided(self) -> bool:
        return self.guide_query is not None

    @property
    def has_positive_ids(self) -> bool:
        return self.query_positive_ids is not None

    @property
    def auxiliary_query(self) -> Array:
        """The queries' features from the second model; None: there is none."""
        return getattr(self, self.auxiliary_names[0])

    @property
    def auxiliary_key(self) -> Array:
        """The keys' features from the second model."""
        return getattr(self, self.auxiliary_names[1])

    @property
    def auxiliary_width(self) -> int:
        """The width of the second model's features; 0 if there is no such model."""
        return 0 if self.auxiliary_key is None else int(self.auxiliary_key.shape[1])

    @property
    def linear_terms(self) -> bool:
        """Whether the loss has terms that are linear in the logits: see `linear`."""
        return self.label_smoothing != 0.0 or self.classes is not None

    @property
    def exponent_scale(self) -> Any:
        """The scale of the negatives' logits in the sums: `hardness` is added to the scale."""
        return self.scale + self.hardness if self.hardness else self.scale

    @property
    def paired(self) -> bool:
        """Whether each key's query is known without a list: key i is the positive of query i, if
        there is one, or queries and keys are the same views."""
        return not (self.key_shard or self.has_positive_ids) and (
            self.symmetric or self.two_sided or self.bias is not None or self.positives is None
        )

    @property
    def scale_grad_from_dots(self) -> bool:
        """Whether the gradient of the scale comes from feature gradients: `Gradients.dots`."""
        return self.scalar_grads and not self.moments

    @property
    def dots_lack_margin(self) -> bool:
        """Whether `Gradients.dots` lack the margin's part of the scale's gradient: `finalize`."""
        return self.scale_grad_from_dots and self.margin != 0.0

    @property
    def pair_counts(self) -> float:
        """How often `Gradients.dots` contain each pair's dL/dx x: twice if queries are the keys."""
        return 2.0 if self.symmetric and self.scale_grad_from_dots else 1.0

    @property
    def block_column_weight(self) -> float:
        """`column_direction_weight` of a block. If queries are the keys, the columns of a block off
        the diagonal are rows of the same softmax."""
        return self.row_direction_weight if self.symmetric else self.column_direction_weight

    @property
    def two_sided(self) -> bool:
        """Whether columns have a softmax of their own."""
        return self.column_direction_weight != 0.0


def as_sets(positives: Array) -> Array:
    """[M, P], of [M] or [M, P]: one positive is a set of one."""
    return positives[:, None] if positives.ndim == 1 else positives


def uses_moments(logits: int, feature_gradients: bool, on_cpu: bool) -> bool:
    """Whether the gradient of the scale is to come from moments of the logits (`Sums.moment`) in
    the pass of the loss. Otherwise it is sum_i <dQ_i, q_i>, from feature gradients.

        no feature gradients wanted     moments: they save the gradient pass
        a GPU, at most FEW_LOGITS       moments: dL/dx is rounded there, to 8 bits for bfloat16
        a GPU, more logits              <dQ, q>: roundings average out; moments take 4 to 11% longer
        the CPU, in many blocks         <dQ, q>: dL/dx is not rounded to fewer bits

    A batch in one block on the CPU (`one_block`) always has moments.
    """
    return not feature_gradients or (logits <= FEW_LOGITS and not on_cpu)


def default_positives(m: int, symmetric: bool, xp: Any) -> Array:
    """[m] key i, the positive of query i; of 2B views (`symmetric`), view i + B."""
    return (xp.arange(m) + m // 2) % m if symmetric else xp.arange(m)


def materialize_vectors(problem: Problem, xp: Any) -> Problem:
    """The same problem with `positives` and `upstream` as arrays."""
    positives, upstream = problem.positives, problem.upstream
    if positives is not None and not isinstance(upstream, float):
        return problem
    m = problem.shape[0]
    if positives is None:
        positives = default_positives(m, problem.symmetric, xp)
    if isinstance(upstream, float):
        upstream = xp.full(m // 2 if problem.joint else m, upstream)
    return fast_replace(problem, positives=positives, upstream=upstream)


def fast_replace(instance: T, /, **values: Any) -> T:
    """`dataclasses.replace` in a tenth of the time, for what is made once a block. It does not call
    __init__ and checks no name."""
    new = object.__new__(instance.__class__)
    new.__dict__ = instance.__dict__.copy()
    new.__dict__.update(values)
    return new


@dataclass
class Gradients:
    """Destinations of dQ and dK, and which of them are wanted."""

    query: Array | None = None  # [M, D] destination, any float dtype and strides
    key: Array | None = None  # [N, D] destination
    dots: Array = None  # float64 out: <dQ_i, q_i> [M] (or <dK_j, k_j> [N] if dQ is not wanted)
    want_query: bool = True
    want_key: bool = True
    add_query: bool = False  # add dQ to the contents of `query`
    own: Array | None = None  # [M, K, D] destination


@dataclass
class NotFinite:
    """NaN flags of rows. A flag is NaN if the loss of its row depends on a NaN or infinity, else 0.

    A NaN or infinity in a query sets the flag of its row. A NaN or infinity in a key sets
    `any_key`, for all rows. Blocks of the same queries share the flags.
    """

    rows: Array  # [M]
    any_key: Array  # [1]: added to every row
    queries_checked: bool = False  # `rows` already has the flags of the queries
