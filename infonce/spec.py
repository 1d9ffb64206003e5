"""Tables of the losses: the keywords with defaults and help, and the data by which losses differ.

The functions, their signatures and help (`docstrings`), the checks, the command line, PyTorch, JAX
and the losses over ranks follow from these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

from . import result
from .kernels import options as pairs
from .kernels.options import PAIR_OPTIONS, Option
from .kernels.problem import SCALES

Reduction = Literal["mean", "sum", "none"]
Method = Literal["auto", "naive", "fused", "tiled"]
Precision = Literal["auto", "fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16"]


class _Scale(TypedDict, total=False):
    temperature: Any
    scale: Any


class _Softmax(_Scale, pairs.SampleKeywords, total=False):
    query_mask: Any
    key_mask: Any
    token_mean: bool
    own: Any
    own_indices: Any
    own_mask: Any
    own_bias: Any
    in_batch: bool
    dims: Any
    dim_weights: Any
    weights: Any
    label_weights: Any
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float


class LossOptions(_Softmax, pairs.Keywords, total=False):
    """Keywords of the functions without gradients; `Loss.refused` names those that a loss lacks."""

    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None


class GradOptions(LossOptions, total=False):
    """Further keywords of the functions with gradients."""

    wrt: Sequence[str] | None
    grad_dtype: Any
    grad_out: Any
    out: Any
    metrics: bool
    return_logits: bool


# fmt: off
OPTIONS: dict[str, Option] = {
    "temperature": Option(None, "float or array of one number",
        """Divides the dot products: ``scale = 1 / temperature``. Pass `temperature` or `scale`.""",
    ),
    "scale": Option(None, "float or array of one number",
        """Multiplies the dot products. ValueError outside of [2^-511, 2^53] for products in
        float64, and outside of [2^-63, 2^24] for products in float32 or less. At a larger scale (a
        temperature below 1.1e-16, or 6e-8), rounding changes the logits of unit rows by 1. A 0-d
        array on a GPU is not read before the launch: outside of the range the loss is NaN.""",
    ),
    **{name: pairs.OPTIONS[name] for name in pairs.SampleKeywords.__annotations__},
    "query_mask": Option(None, "bool array [M, L], optional",
        """Which tokens of queries count, if features have three dimensions (`maxsim_scores`);
        others are not read. A query without tokens has scores of 0.""",
        cli_help="Which tokens of queries count, bool [rows, tokens], .npy.",
    ),
    "key_mask": Option(None, "bool array [N, L], optional",
        """Which tokens of keys count; others are not read. A key needs one token at least.""",
        cli_help="Which tokens of keys count, bool [rows, tokens], .npy.",
    ),
    "token_mean": Option(False, "bool, default False",
        """Divide MaxSim scores by the number of the query's tokens.""",
        cli_help="Divide MaxSim scores by the number of the query's tokens.",
        compiled=True,
    ),
    "own": Option(None, "array [M, K, features], or [T, features] with own_indices, optional",
        """Negatives of one row each: ``scale * <q_i, own_ik>`` joins the softmax of row i. They
        count as other negatives, without a `key_bias`, and have a gradient, ``grads.own``. A
        `guide` leaves out none of them. Copies of rows, up to 8 MiB (with `offload` up to 16), are
        outside of the workspace. Not with `label_smoothing`.""",
        cli_help="Negatives of one row each, [rows, K, features], .npy (info_nce); with "
        "--own-indices a table [T, features].",
    ),
    "own_indices": Option(None, "integer array [M, K], optional",
        """Rows of the table `own`, T in all: the own negatives of row i are
        ``own[own_indices[i]]``. A negative index is no negative. An index of T or more is an error;
        on a GPU, where indices are not read, it makes the loss of its row NaN. ``grads.own`` is the
        gradient of the table: for each of its rows, the sum over all uses, in a fixed order.""",
        cli_help="Rows of the table --own that are negatives of each row, [rows, K], .npy.",
    ),
    "own_mask": Option(None, "bool array [M, K], optional",
        """Which of `own` count; others are not read, so they may hold anything.""",
        cli_help="Which of --own count, bool [rows, K], .npy.",
    ),
    "own_bias": Option(None, "float array [M, K], optional",
        """Bias of each own negative, added to its logit: pass -log Q for negatives that were
        sampled with probability Q. The bias gets no gradient, and is no part of the logits in the
        gradient of the scale. Not with ``metrics=True``.""",
        cli_help="Added to the logits of own negatives, [rows, K], .npy.",
    ),
    "in_batch": Option(True, "bool, default True",
        """False, with `own`: row i is compared only with its positives and its own negatives. On
        the CPU, blocks without a positive are not computed.""",
        cli_help="Whether other rows' keys are negatives; with --own they need not be.",
        compiled=True,
    ),
    "dims": Option(None, "increasing integers, optional",
        """Widths d of prefixes of the features: the loss is a sum over prefixes, of the loss of the
        first d features times the weight of d in `dim_weights`. With `normalize=True`, each prefix
        is divided by its own norm. Log-sum-exps, metrics and logits are those of the last prefix.
        """,
        cli_help="Widths of prefixes whose losses are summed, as in 64,128,256.",
    ),
    "dim_weights": Option(None, "numbers, optional",
        """Weight of each prefix of `dims`; 1 by default.""",
        cli_help="Weights of the prefixes, as in 0.5,0.5,1.",
    ),
    "weights": Option(None, "float array [M], optional",
        """Weight of each row's loss (of each pair's, in both directions), at least 0. The mean
        divides by the sum of the weights, not by M.""",
        cli_help="Weight of each row's loss, .npy.",
    ),
    "label_weights": Option(None, "float array [M, P], optional",
        """Weights w of `labels` [M, P]: the target of a row has ``w / sum(w)`` at its positives, so
        the loss subtracts the weighted mean of their logits. At least 0; a label of weight 0 is no
        positive. Weights of negative labels are not read.""",
        cli_help="Weight of each of several --labels of a row, .npy.",
    ),
    "margin": Option(0.0, "float, default 0",
        """Additive margin, subtracted from the dot products of positives.""",
        cli_help="Subtracted from the dot products of positives.",
        compiled=True, range=(-pairs.LARGEST, pairs.LARGEST, "a finite number"),
    ),
    "decoupled": Option(False, "bool, default False",
        """Leave the positives out of the denominator: the loss of a row is n - p, with n the
        log-sum-exp of its negatives and p its positive logit. A row without negatives has loss
        -inf.""",
        cli_help="Leave positives out of the denominator.",
        compiled=True,
    ),
    "label_smoothing": Option(0.0, "float in [0, 1), default 0",
        """Share of the targets that is spread over all keys that take part, positives included.
        The rest of the targets, 1 - label_smoothing, is on the positives of a row.""",
        cli_help="Share of the targets that is spread over all keys.",
        compiled=True, range=(0.0, math.nextafter(1, 0), "a number in [0, 1)"),
    ),
    "hardness": Option(0.0, "float, default 0",
        """Weights negatives by their similarity: each counts ``exp(hardness <q, k>)`` times. This
        weight is not differentiated. Exponents of negatives have scale + hardness, not scale.""",
        cli_help="Negatives count exp(hardness * dot product) times.",
        compiled=True, range=(0.0, SCALES["fp64"][1], f"a number in [0, {SCALES['fp64'][1]!r}]"),
    ),
    **{name: pairs.OPTIONS[name] for name in pairs.Keywords.__annotations__},
    "normalize": Option(False, "bool, default False",
        """Divide rows by their L2 norm first, and differentiate through the norm. The norm may be
        any finite number. A row of zeros stays zero and gets a zero gradient. If `normalize` is not
        passed, rows far from unit norm in host memory cause one warning.""",
        cli_help="Divide rows by their L2 norm first.",
        compiled=True,
    ),
    "reduction": Option("mean", '{"mean", "sum", "none"}',
        """Reduction of the losses of rows; "none" returns all M of them.""",
        compiled=True,
    ),
    "method": Option("auto", '{"auto", "naive", "fused", "tiled"}',
        """How many logits stay in memory, apart from inputs, outputs and vectors of length M or N:

        - "naive" keeps the M x N logits, however large, and copies of them
          (``return_logits=True`` returns them).
        - "fused" computes each logit once and keeps all of them within `workspace`; ValueError if
          they do not fit. On the CPU, the loss without gradients keeps no logits, so any size fits.
          On a GPU, "fused" is one launch; with options of the softmax, several positives, sup_con
          or gte it runs the array operations of "naive".
        - "tiled" takes any size within `workspace`; logits that do not fit are computed a second
          time for the gradients.
        - "auto": on the CPU each logit that fits is kept, and the others are computed again; on a
          GPU "fused" up to 2^18 logits, 2048 rows of a side and 2^28 multiply-adds, else "tiled".
        """,
        cli_help="naive keeps all logits in memory, fused and tiled at most the workspace.",
        compiled=True,
    ),
    "precision": Option(
        "auto",
        '{"auto", "fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16"}',
        """Precision of products and exponentials. "auto" follows the features: fp64 for float64,
        the accuracy of fp32 for float32, and exact products with float32 sums for 16 bits. The CPU
        has fp64 and fp32.""",
        cli_help="Precision of the products; the CPU has fp64 and fp32.",
        compiled=True,
    ),
    "workspace": Option(None, "int or str, default 256 MiB",
        """Upper limit of temporary memory, in bytes or as text such as "1.5GiB", for "fused" and
        "tiled". Vectors of length M or N, and cuBLAS's workspace for CUDA graphs on a GPU, are not
        counted. ValueError that names the least sufficient workspace if the M x N logits would need
        more than 4 sqrt(M N) blocks.
        If no workspace is passed, "tiled" on Hopper GPUs takes up to 1 GiB, and for wide rows up to
        1/32 of the GPU's memory, to keep exponentials from the losses to the gradients.""",
        compiled=True,
    ),
    "offload": Option(False, "bool, default False",
        """Keep features and gradients in host memory (NumPy, also memory-mapped or pinned), and
        compute on the current GPU, some rows at a time: for batches larger than its memory.
        `workspace` limits the memory of these rows on the GPU: a larger workspace copies features
        fewer times. Pinned features are copied directly.""",
    ),
    "check_finite": Option(False, "bool, default False",
        """Raise ValueError, naming argument and row, if a feature is NaN or infinite. Otherwise
        such a feature makes the loss NaN.""",
        cli_help="Refuse NaN and infinity, naming the row.",
    ),
    "progress": Option(None, "callable (phase, done, total), optional",
        """Called in the calling thread as blocks complete, and in a first call on a GPU as kernels
        are compiled. On a GPU, a call with `progress` is not recorded, so it launches its kernels
        anew.""",
    ),
    "wrt": Option(None, "sequence of str, optional",
        """Names of the arguments whose gradients to compute, "scale" and "bias" included; all by
        default. An empty sequence computes only the loss.""",
    ),
    "grad_dtype": Option(None, "dtype, optional",
        """Dtype of the feature gradients; by default that of each feature array.""",
    ),
    "grad_out": Option(1.0, "float or array, default 1",
        """Upstream gradient of the loss: a number, or [M] with ``reduction="none"``.""",
    ),
    "out": Option(None, "mapping or sequence of arrays, optional",
        """Preallocated feature gradients, by name or in argument order; any strides without
        overlap.""",
    ),
    "metrics": Option(False, "bool, default False",
        """Also return the retrieval ranks of positives: see `infonce.Metrics`. Not with
        ``method="fused"`` on a GPU.""",
    ),
    "return_logits": Option(False, "bool, default False",
        """Also return the logits; ``method="naive"`` only.""",
    ),
}
# fmt: on
DEFAULTS: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
# Options that are constants of a program of jax.jit or torch.compile
COMPILED_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.compiled)
# Options that are integers of samples: one array, or a pair (of queries [M], of keys [N])
INTEGER_OPTIONS = tuple(option.name for option in PAIR_OPTIONS if option.type == pairs.INTEGERS)
# Options that are floats of rows [M], keys [N], own negatives [M, K] or labels [M, P], without
# gradient
VECTOR_OPTIONS = tuple(name for name, o in OPTIONS.items() if o.type.startswith("float array ["))
# Options that are arrays without gradient, except integers of samples and the features of a guide
ARRAY_OPTIONS = (*VECTOR_OPTIONS, "query_mask", "key_mask", "own_mask", "own_indices")
# Dtype of a feature gradient -> wider dtype, in which PyTorch and JAX keep it until the upstream
# gradient is known. They compute gradients together with the loss. A gradient that underflows to 0
# in float16 would stay 0, even if the upstream gradient has the factor of a GradScaler
DTYPES_UNTIL_UPSTREAM = {"float16": "float32"}
# Keywords that only the functions with gradients have
GRAD_ONLY = frozenset(GradOptions.__annotations__) - frozenset(LossOptions.__annotations__)
BOOLEAN_OPTIONS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
CHOICES: dict[str, tuple[str, ...]] = {  # option -> its possible values
    "reduction": get_args(Reduction),
    "method": get_args(Method),
    "precision": get_args(Precision),
}


# Options of the softmax, most of them fields of the same name in `kernels.problem.Problem`; the
# guide becomes the fields `guide_query` and `guide_key`
SOFTMAX_OPTIONS = (
    "margin", "decoupled", "label_smoothing", "hardness",
    *(option.name for option in PAIR_OPTIONS if option.name not in INTEGER_OPTIONS), "guide_margin",
)  # fmt: skip
# Options of own negatives, which info_nce has
OWN_OPTIONS = ("own", "own_indices", "own_mask", "own_bias", "in_batch")
LABEL_OPTIONS = ("label_weights",)  # options of labels [M, P], which info_nce has
PREFIX_OPTIONS = ("dims", "dim_weights")
TOKEN_OPTIONS = ("query_mask", "key_mask", "token_mean")  # of features that are sets of tokens
# Options for which dot products decide which negatives are likely positives
LIKELY_POSITIVES = tuple(option.name for option in PAIR_OPTIONS if option.compares)
# Options that change the logits that compete: a rank has no meaning with them
NOT_WITH_METRICS = (*(o.name for o in PAIR_OPTIONS if o.compares or o.shifts), "own_bias")
# Label smoothing spreads targets over all keys of the denominator, each of which has to count once
NOT_WITH_LABEL_SMOOTHING = ("decoupled", "hardness", *LIKELY_POSITIVES)
# The positives of a softmax with `positive_ids` are in the sums of its passes, which do not tell
# them from negatives
NOT_WITH_POSITIVE_IDS = ("margin", "hardness", *LIKELY_POSITIVES, "metrics")
# Combinations that raise an error: all options of one of these tuples in one call
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    *(("label_smoothing", other) for other in NOT_WITH_LABEL_SMOOTHING),
    *((other, "positive_ids") for other in NOT_WITH_POSITIVE_IDS),
    # need a sum of features for each (group, id)
    ("groups", "label_smoothing", "ids"),
    *((name, "label_smoothing", "positive_ids") for name in ("ids", "groups")),
    ("ids", "decoupled", "positive_ids"),  # each leaves out pairs of equal numbers
    ("own", "label_smoothing"),  # sums of the keys' features lack own negatives
)


@dataclass(frozen=True, eq=False)
class Loss:
    """What tells one loss from the others. Functions that compute a `loss` call it `kind`."""

    name: str  # of its functions, without "_loss"
    # feature arguments: queries, keys, own negatives; one array if the queries are the keys
    arguments: tuple[str, ...]
    grads: type  # of the field `LossAndGrad.grads`
    # factors of the softmax over the keys of each query, and over the queries of each key (0: none)
    row_direction_weight: float = 1.0
    column_direction_weight: float = 0.0
    # queries are the keys (gte: all rows of both), and no row is compared with itself
    symmetric: bool = False
    # as many keys as queries are required, except with `positive_ids` of a loss without columns
    square: bool = False
    locked: tuple[str, ...] = ()  # arguments that never get a gradient
    sigmoid: bool = False  # a sigmoid of each pair, and no softmax
    # defaults of the loss; all other options have the defaults of `OPTIONS`, for all losses
    scale: float | None = None  # None: the caller has to pass scale or temperature
    bias: float | None = None  # None: the loss has no bias
    refused: tuple[str, ...] = ()  # options that mean nothing for the loss, and raise a ValueError
    classes: bool = False  # labels are classes: the positives of a row are all others of its class
    joint: bool = False  # query i and key i share one softmax, over all queries and keys
    taught: bool = False  # targets are the probabilities of a teacher, and no positives

    @cached_property
    def key_argument(self) -> int:
        """The index of the keys in `arguments`: 1, or 0 for a loss of one array."""
        return min(1, len(self.arguments) - 1)

    def is_square(self, positive_ids: bool) -> bool:
        """Whether a call, with or without `positive_ids`, requires as many keys as queries."""
        return self.square and not (positive_ids and self.column_direction_weight == 0.0)

    @cached_property
    def takes_tokens(self) -> bool:
        """Whether a row of features may be a set of tokens: then logits are MaxSim scores."""
        return not (self.symmetric or self.taught)

    @cached_property
    def has_own(self) -> bool:
        """Whether the call has own negatives: `checks.keywords.with_own` adds them."""
        return len(self.arguments) > 2


INFO_NCE = Loss("info_nce", ("query", "key"), result.QueryKeyGrads)
INFO_NCE_OWN = replace(INFO_NCE, arguments=("query", "key", "own"), grads=result.QueryKeyOwnGrads)
NT_XENT = Loss(
    "nt_xent",
    ("features",),
    result.FeaturesGrads,
    symmetric=True,
    refused=("positive_ids", *OWN_OPTIONS, *LABEL_OPTIONS, *TOKEN_OPTIONS),
)
CLIP = Loss(
    "clip", ("image", "text"), result.ImageTextGrads, row_direction_weight=0.5,
    column_direction_weight=0.5, square=True, refused=(*OWN_OPTIONS, *LABEL_OPTIONS),
)  # fmt: skip
LIT = Loss(
    "lit", ("text", "image"), result.TextImageGrads, square=True, locked=("image",),
    refused=(*OWN_OPTIONS, *LABEL_OPTIONS),
)  # fmt: skip
SIGLIP = Loss(
    "siglip", ("image", "text"), result.SigmoidGrads, square=True, sigmoid=True, scale=10.0,
    bias=-10.0,
    refused=(
        *SOFTMAX_OPTIONS, *OWN_OPTIONS, *LABEL_OPTIONS, "metrics",  # no pass counts ranks
    ),
)  # fmt: skip
SUP_CON = Loss(
    "sup_con", ("features",), result.FeaturesGrads, symmetric=True, classes=True,
    refused=(
        *INTEGER_OPTIONS, *OWN_OPTIONS, *LABEL_OPTIONS, *PREFIX_OPTIONS, "margin", "hardness",
        *LIKELY_POSITIVES, "guide_margin", "metrics", *TOKEN_OPTIONS,
    ),
)  # fmt: skip
GTE = Loss(
    "gte", ("query", "key"), result.QueryKeyGrads, symmetric=True, square=True, joint=True,
    refused=(
        "positive_ids", "key_bias", *OWN_OPTIONS, *LABEL_OPTIONS, *PREFIX_OPTIONS, "metrics",
        "return_logits", *TOKEN_OPTIONS,
    ),
)  # fmt: skip
LOSSES = {loss.name: loss for loss in (CLIP, LIT, SIGLIP, INFO_NCE, NT_XENT, SUP_CON, GTE)}
