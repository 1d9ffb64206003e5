"""A loss as data: `Problem`, the destinations of its gradients, and the NaN flags of its rows.

`infonce/checks/call.py` makes a `Problem` from the arguments of a call, and `solve` computes it.
Losses differ only in this data. Logits in sums and exponents are in base 2 (x2 = x log2 e), because
the hardware computes powers of 2; only kernels/arrays/ has natural exponents inside a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from .maxsim.tokens import Tokens
from .options import PairFields

T = TypeVar("T")
Array = Any  # a NumPy or CuPy array
Progress = Callable[[str, int, int], None]  # (phase, blocks done, blocks in all)

WORKSPACE = 256 * 2**20  # bytes of the workspace if the caller sets none
LOG2_E = 1.4426950408889634  # natural logits times LOG2_E are logits in base 2
LN_2 = 0.6931471805599453  # base-2 logits and logarithms times LN_2 are natural
# The smallest and the largest scale, if exponents are float32 ("fp32" and all lower precisions) or
# float64 ("fp64"). Above the range, rounding changes the logits of unit rows by 1, so that no digit
# of a probability is right. Below the range, a gradient could underflow: it is the scale times a
# probability, a weight and an upstream gradient. Half of the dtype's exponents are left to these
SCALES = {"fp32": (2.0**-63, 2.0**24), "fp64": (2.0**-511, 2.0**53)}
# Arguments of np.errstate, whose setting holds only in the thread that enters it: a value out of
# range becomes infinity or NaN without a warning
SILENT: Any = {"all": "ignore"}
FEW_LOGITS = 2**24  # M N up to which a GPU takes the scale's gradient from moments (`uses_moments`)


@dataclass(eq=False)  # not frozen: a frozen one takes three times as long to make
class Problem(PairFields):
    """One loss on one pair of checked feature arrays: all that a backend needs to know.

    `losses_i` is the loss of row i. Gradients are derivatives of ``sum_i upstream_i * losses_i``.
    `upstream_i` is the row share (the factor of the row's loss in the reduced loss) times the
    caller's `grad_out`.

    If `upstream` is the same for all rows, it is a number. If `positives` are the default positives
    of the loss, the field is None. `materialize_vectors` replaces both by arrays, for code that
    reads them as arrays; some kernels do not.
    """

    query: Array  # [M, D]
    key: Array  # [N, D]; `query` itself if `symmetric`
    scale: Any  # number, or 0-d array on the device
    upstream: Any  # [M] float64; a number if it is the same for all rows
    # int64, -1 for no key. [M]: the positive key of each row; [M, P]: its up to P positives. None:
    # `default_positives`
    positives: Array = None
    # the reduced loss is common_share sum_i row_shares_i losses_i, with row_shares_i = 1 if
    # `row_shares` is None. If `common_share` is None, the loss is not reduced
    common_share: float | None = None
    row_direction_weight: float = 1.0  # factor, in `losses_i`, of the loss of the softmax over keys
    column_direction_weight: float = 0.0  # the same of the softmax over queries; 0: not computed
    bias: Any = None  # not None: pairwise sigmoid (SigLIP), no softmax
    symmetric: bool = False  # queries are the keys: pairs i = j are excluded, one triangle suffices
    key_shard: bool = False  # `key` is a part of all keys; a positive outside of it is -1
    lacks_positives: bool = False  # no positive is in `key`: all positives are -1
    normalize: bool = False  # rows of `query` and `key` are divided by their norms
    # precision of matrix products, never "auto". Logits and exponentials are float64 for "fp64" and
    # float32 otherwise
    compute_precision: str = "fp32"
    method: str = "auto"  # as the caller chose it: "auto" is not resolved
    workspace: int = WORKSPACE  # bytes
    retrieval_ranks: bool = False  # also count the keys that score above the positive
    progress: Progress | None = None  # called as blocks are done
    workspace_given: bool = True  # False: `workspace` is the default, which a GPU may exceed
    # [M] float64 added to losses: 0, or NaN for a row whose label is invalid, or whose features of
    # the guide (in a GPU's call) are not finite. None: all are 0
    known_row_nans: Array = None
    scalar_grads: bool = False  # the gradients of scale and bias are wanted
    moments: bool = False  # sums have moments, for the gradient of the scale (`uses_moments`)
    weights: Array = None  # [M] float64 weights of the rows' losses, 0 without a positive; None: 1
    row_shares: Array = None  # [M] float64 row shares, from `weights`; None: all are equal
    # the groups of queries and of keys as NumPy arrays, from which a GPU's call finds the blocks
    # without a common group. None if features are on the CPU, groups on a GPU, or labels are given
    host_groups: tuple[Array, Array] | None = None
    # numbers that are options of the softmax; `infonce.spec.OPTIONS` explains each
    margin: float = 0.0  # subtracted from a positive's dot product: scale margin from its logit
    decoupled: bool = False
    label_smoothing: float = 0.0
    hardness: float = 0.0
    own: Array = None  # [M, K, D]: K further negatives of each row (`between_passes.OwnNegatives`)
    # [M, K] int64: `own` is a table [T, D], of which these rows are the negatives of each row. On
    # the host, indices lie in [0, T). On a GPU, the row of an index from T on has the loss NaN, and
    # a negative index stands for none
    own_indices: Array = None
    own_mask: Array = None  # [M, K] bool: True for own negatives that count; None: all count
    own_bias: Array = None  # [M, K] float64, added to the logits of own negatives, natural units
    # a `between_passes.OwnRows` that reads `own` from host memory; None: `own` is read in place
    own_rows: Any = None
    joint: bool = False  # rows i and i + B of 2B have one softmax (GTE); `upstream` is [B]
    # bytes of the workspace that the joined copies of features and gradients of a joint loss take
    joint_copy_bytes: int = 0
    # `linear.Classes`: the positives of a row are all keys of its class, except, if queries are the
    # keys, the row itself. `positives` then has only the positives of rows with one positive
    classes: Any = None
    # [M, P] float64 weights of `positives` [M, P] in the target of their row, at most 1, and 0 for
    # -1. The largest weight of a row with positives is 1. None: all are 1
    label_weights: Array = None

    # names of the two fields with auxiliary features: of a guide here, of a teacher in a subclass
    auxiliary_names: ClassVar[tuple[str, str]] = "guide_query", "guide_key"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, D)."""
        m, d = self.query.shape
        return m, len(self.key), d

    @property
    def own_count(self) -> int:
        """K, the number of own negatives of a row."""
        of_rows = self.own if self.own_indices is None else self.own_indices
        return 0 if of_rows is None else int(of_rows.shape[1])

    @property
    def plain(self) -> bool:
        """Whether no option but `ids` (and `normalize`) changes logits (`plain_logits`) or targets
        (`plain_targets`). Fast paths ask this."""
        return self.plain_logits and self.plain_targets

    @property
    def plain_logits(self) -> bool:
        """Whether the call has no own negatives, no teacher (`TaughtProblem`), and no option of
        pairs that `changes_logits`, and logits are products of rows. Only the option `ids` may then
        leave out pairs."""
        rows = self.own is None and not isinstance(self.query, Tokens)
        return rows and not self.pair_options.change_logits

    @property
    def plain_targets(self) -> bool:
        """Whether each row has one positive, and the loss has no `margin`, `decoupled`, `hardness`,
        weights, linear terms (label smoothing, classes), positive ids, and is not joint."""
        numbers = self.margin or self.decoupled or self.hardness
        others = numbers or self.linear_terms or self.joint
        one_positive = self.set_size == 1 and not self.has_positive_ids
        return one_positive and self.weights is None and not others

    @property
    def loss_follows_from_sums(self) -> bool:
        """Whether the loss of a row follows only from its sums and the logits of its positives: the
        call has plain logits, no linear terms (label smoothing, classes), no positive ids, and no
        joint loss. Weights, sets of positives, `margin`, `decoupled` and `hardness` may be set:
        they are in that formula."""
        others = self.linear_terms or self.joint or self.has_positive_ids
        return self.plain_logits and not others

    @property
    def set_size(self) -> int:
        """P of `positives` [M, P]; 1 for positives [M], or for None."""
        sets = self.positives is not None and self.positives.ndim > 1
        return int(self.positives.shape[1]) if sets else 1

    def without_weights(self) -> Problem:
        """The problem for code that needs no `weights`, because `upstream` contains them."""
        return self if self.weights is None else fast_replace(self, weights=None)

    @property
    def auxiliary_query(self) -> Array:
        """[M, E] auxiliary features of queries; None: there is no guide and no teacher."""
        return getattr(self, self.auxiliary_names[0])

    @property
    def auxiliary_key(self) -> Array:
        """[N, E] auxiliary features of keys; None: there is no guide and no teacher."""
        return getattr(self, self.auxiliary_names[1])

    @property
    def auxiliary_width(self) -> int:
        """E, the number of auxiliary features of a row; 0: there is no guide and no teacher."""
        return 0 if self.auxiliary_key is None else int(self.auxiliary_key.shape[1])

    @property
    def linear_terms(self) -> bool:
        """Whether the loss has linear terms (the module `linear`): label smoothing or classes."""
        return self.label_smoothing != 0.0 or self.classes is not None

    @property
    def exponent_scale(self) -> Any:
        """The scale of negatives in exponents: the scale of the logits plus `hardness`.

        First moments are sums of these exponents, and a GPU's passes also multiply positives by
        this scale. `finalize_with_targets` and `Vectors.finalize` convert both to `scale`.
        """
        return self.scale + self.hardness if self.hardness else self.scale

    @property
    def paired(self) -> bool:
        """Whether a rule tells which query has key j as its positive, so that no list is needed:
        query j, or, if queries are the keys, the positive of row j."""
        return not (self.key_shard or self.has_positive_ids) and (
            self.symmetric or self.two_sided or self.bias is not None or self.positives is None
        )

    @property
    def scale_grad_from_dots(self) -> bool:
        """Whether the scale's gradient is the sum of `Gradients.dots`, from feature gradients."""
        return self.scalar_grads and not self.moments

    @property
    def dots_lack_margin(self) -> bool:
        """Whether `Gradients.dots` lack the margin's part of the scale's gradient, which `finalize`
        then computes. `solve`, on the gradient of the scale, has the formula."""
        return self.scale_grad_from_dots and self.margin != 0.0

    @property
    def pair_repeats(self) -> float:
        """How often the sum of `Gradients.dots` contains the term dL/dx_ij x_ij of a pair: twice if
        queries are the keys, because dQ_i then has terms of row i as a query and as a key."""
        return 2.0 if self.symmetric and self.scale_grad_from_dots else 1.0

    @property
    def block_column_weight(self) -> float:
        """The weight of the losses of a block's columns. If queries are the keys, columns are rows
        of the batch, and have the weight of rows."""
        return self.row_direction_weight if self.symmetric else self.column_direction_weight

    @property
    def two_sided(self) -> bool:
        """Whether the loss also has a softmax over the queries of each column, as CLIP has."""
        return self.column_direction_weight != 0.0


def as_sets(positives: Array) -> Array:
    """Positives, or values at positives, [M] or [M, P], as [M, P] (P = 1 for [M])."""
    return positives[:, None] if positives.ndim == 1 else positives


def uses_moments(logits: int, feature_gradients: bool, on_cpu: bool) -> bool:
    """Whether the gradient of the scale comes from moments of the logits (`Sums.moment`).

    The log-sum-exp pass sums moments. Otherwise the gradient is sum_i <dQ_i, q_i> / scale, from
    feature gradients. `logits` is the number of logits, M N, over all ranks.

        no feature gradients wanted     moments: they save the gradient pass
        a GPU, at most 2^24 logits      moments: dL/dx is rounded there, to 8 bits for bfloat16
        a GPU, more logits              <dQ, q>: roundings average out; moments take 4 to 11% longer
        the CPU, in many blocks         <dQ, q>: dL/dx is not rounded to fewer bits

    A batch in one block on the CPU always has moments: they come with its sums.
    """
    return not feature_gradients or (logits <= FEW_LOGITS and not on_cpu)


def default_positives(m: int, symmetric: bool, xp: Any) -> Array:
    """[m] the positives of a loss without labels: key i for query i; among 2B views (`symmetric`),
    view i + B for view i, and view i for view i + B."""
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
    """`dataclasses.replace` in a tenth of the time, for objects that are made once a block. It does
    not call __init__, and does not check that fields of these names exist."""
    new = object.__new__(instance.__class__)
    new.__dict__ = instance.__dict__.copy()
    new.__dict__.update(values)
    return new


# The fields of own negatives, as blocks have them: own negatives are not in blocks
NO_OWN: dict[str, Any] = dict.fromkeys(("own", "own_indices", "own_mask", "own_bias", "own_rows"))


@dataclass
class Gradients:
    """Destinations of dQ and dK, and which of them a pass computes.

    A gradient that is wanted may have no destination: then it is computed only for `dots`.
    """

    query: Array | None = None  # [M, D] destination of dQ, any float dtype and strides
    key: Array | None = None  # [N, D] destination of dK, likewise
    dots: Array = None  # float64 out: <dQ_i, q_i> [M] (or <dK_j, k_j> [N] if dQ is not wanted)
    want_query: bool = True
    want_key: bool = True
    add_query: bool = False  # True: dQ is added to the contents of `query`; False: overwrites them
    own: Array | None = None  # destination of the gradient of `Problem.own`; None: not wanted


@dataclass
class NotFinite:
    """NaN flags of rows. A flag is NaN if the loss of its row depends on a NaN or infinity, else 0.

    A NaN or infinity in a query sets the flag of its row. A NaN or infinity in a key sets
    `any_key`, which counts for all rows. The blocks of a pass over ranks, or over chunks in host
    memory, add their flags to the same arrays.
    """

    rows: Array  # [M] float64
    any_key: Array  # [1] float64; whoever reads the flags adds it to `rows`
    # True: an earlier block has added the flags of the queries to `rows`, so only keys are checked
    queries_checked: bool = False
