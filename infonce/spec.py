"""The data by which losses differ, and the keywords that they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from .result import FeaturesGrads, ImageTextGrads, QueryKeyGrads, SigmoidGrads, TextImageGrads

Reduction = Literal["mean", "sum", "none"]
Method = Literal["auto", "naive", "fused", "tiled"]
Precision = Literal["auto", "fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16"]


class LossOptions(TypedDict, total=False):
    """Keywords that every loss takes."""

    temperature: Any
    scale: Any
    ids: Any
    weights: Any
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    key_bias: Any
    false_negative_margin: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None


class GradOptions(LossOptions, total=False):
    """Keywords that the functions with gradients take besides."""

    wrt: Sequence[str] | None
    grad_dtype: Any
    grad_out: Any
    out: Any
    metrics: bool
    return_logits: bool


@dataclass(frozen=True)
class Option:
    """A keyword of the losses: what its help and the adapters need to know of it."""

    default: Any
    type: str  # in the functions' docstrings, with `doc`
    doc: str
    flag: str = ""  # help of the same option of the command `infonce loss`; "": it has none
    compiled: bool = False  # taken by jax.jit and torch.compile: a plain value, fixed in a program


OPTIONS: dict[str, Option] = {
    "temperature": Option(
        None,
        "float or 0-d array",
        """Divides the dot products: ``scale = 1 / temperature``. One of the two is given.""",
    ),
    "scale": Option(
        None,
        "float or 0-d array",
        """Multiplies the dot products. ValueError outside of [2^-511, 2^53] where float64 computes,
        [2^-63, 2^24] where float32 or less does (a temperature below 1.1e-16, 6e-8): there rounding
        alone changes the logits of unit rows by 1. A 0-d array on a GPU is not looked at: its loss
        is NaN instead.""",
    ),
    "ids": Option(
        None,
        "integer array [N], or pair of them ([M] for rows, [N] for columns), optional",
        """Pairs of equal ids that are not positives are left out: duplicates are no negatives.""",
    ),
    "weights": Option(
        None,
        "float array [M], optional",
        """Weight of each row's loss (of each pair's, in both directions), at least 0. The mean
        divides by their sum, not by M.""",
        flag="Weight of each row's loss, .npy.",
    ),
    "margin": Option(
        0.0,
        "float, default 0",
        """Additive margin: subtracted from the dot products of positives.""",
        flag="Subtracted from the dot products of positives.",
        compiled=True,
    ),
    "decoupled": Option(
        False,
        "bool, default False",
        """Leave the positives out of the denominator: the loss of a row is n - p, with n the
        log-sum-exp of its negatives and p its positive logit. Without negatives it is -inf.""",
        flag="Leave positives out of the denominator.",
        compiled=True,
    ),
    "label_smoothing": Option(
        0.0,
        "float in [0, 1), default 0",
        """Of the targets, 1 - label_smoothing is on the positives of a row, and label_smoothing is
        spread over all keys that take part, the positives too.""",
        flag="Share of the targets that is spread over all keys.",
        compiled=True,
    ),
    "hardness": Option(
        0.0,
        "float, default 0",
        """Negatives count ``exp(hardness <q, k>)`` times, a weight that is not differentiated: the
        more similar, the more. Their exponents have scale + hardness in place of scale.""",
        flag="Negatives count exp(hardness * dot product) times.",
        compiled=True,
    ),
    "key_bias": Option(
        None,
        "float array [N], optional",
        """Added to the logits of each key, positives too, in the rows' softmax: -log Q_j for keys
        that were sampled with probability Q_j. It gets no gradient. (It has no metrics.)""",
        flag="Added to the logits of each key, .npy.",
    ),
    "false_negative_margin": Option(
        math.inf,
        "float, default inf",
        """Negatives whose dot product exceeds that of the row's positive (of several, the largest)
        by more than this are left out: likely they are positives. In CLIP each direction goes by
        its own positive. Gradients of another dtype than the products accumulate whole in the
        workspace: ValueError where they have no room. (It has no metrics.)""",
        flag="Leave out negatives this much more similar than the positive.",
        compiled=True,
    ),
    "normalize": Option(
        False,
        "bool, default False",
        """Divide rows by their L2 norm first, and differentiate through it. A row of zeros stays
        zero and gets a zero gradient.""",
        flag="Divide rows by their L2 norm first.",
        compiled=True,
    ),
    "reduction": Option(
        "mean",
        '{"mean", "sum", "none"}',
        """Over the per-row losses; "none" returns all M of them.""",
        compiled=True,
    ),
    "method": Option(
        "auto",
        '{"auto", "naive", "fused", "tiled"}',
        """What may be kept in memory, beyond inputs, outputs and vectors of length M or N:

        - "naive" keeps the M x N logits, however large (``return_logits=True`` hands them out).
        - "fused" does loss and gradient in one go, each logit computed once, within `workspace`;
          ValueError for what does not fit. (The loss alone keeps no logits: any size fits.)
        - "tiled" takes any size within `workspace`; logits that had no room are computed again for
          the gradient.
        - "auto" is "fused" where it fits, else "tiled".""",
        flag="naive keeps all logits in memory, fused and tiled at most the workspace.",
        compiled=True,
    ),
    "precision": Option(
        "auto",
        '{"auto", "fp64", "fp32", "tf32", "bf16x3", "bf16", "fp16"}',
        """Of products and exponentials. "auto" follows the inputs: fp64 for float64, else fp32
        accuracy for float32, and float32 accumulation of exact 16-bit products. The CPU has fp64
        and fp32.""",
        flag="Of the products; the CPU has fp64 and fp32.",
        compiled=True,
    ),
    "workspace": Option(
        None,
        "int, default 256 MiB",
        """Ceiling on temporary memory in bytes, for "fused" and "tiled". ValueError, with the least
        that will do, where it would cut the M x N logits into more than 4 sqrt(M N) blocks. By
        default "tiled" on a GPU takes up to a 32nd of its memory if that saves products: of wide
        rows, exponentials of the logits are kept from fold to fold.""",
        compiled=True,
    ),
    "offload": Option(
        False,
        "bool, default False",
        """Features and gradients stay in host memory (NumPy, also memory-mapped or pinned), and are
        computed on the current GPU, a panel of rows at a time: for batches larger than its memory.
        `workspace` bounds all that panels take there: the more, the fewer times features are
        copied. Pinned features are copied without staging.""",
    ),
    "check_finite": Option(
        False,
        "bool, default False",
        """Raise ValueError, naming argument and row, if a feature is NaN or infinite. Without it
        such a feature makes the loss NaN.""",
        flag="Refuse NaN and infinity, naming the row.",
    ),
    "progress": Option(
        None,
        "callable (phase, done, total), optional",
        """Called from the calling thread as blocks complete, and in a first call on a GPU as
        kernels are compiled.""",
    ),
    "wrt": Option(
        None,
        "sequence of str, optional",
        """Which gradients are wanted, by argument name ("scale", "bias" too); all by default. What
        is not asked for costs nothing; an empty sequence computes the loss alone.""",
    ),
    "grad_dtype": Option(
        None,
        "dtype, optional",
        """Of the feature gradients; default that of each feature array.""",
    ),
    "grad_out": Option(
        1.0,
        "float or array, default 1",
        """Upstream gradient of the loss: a number, or [M] with ``reduction="none"``.""",
    ),
    "out": Option(
        None,
        "mapping or sequence of arrays, optional",
        """Preallocated feature gradients, by name or in argument order; any strides without
        overlap.""",
    ),
    "metrics": Option(
        False,
        "bool, default False",
        """Also count how positives rank: see `infonce.Metrics`. (On a GPU "fused" does not.)""",
    ),
    "return_logits": Option(
        False,
        "bool, default False",
        """Also return the logits; ``method="naive"`` only.""",
    ),
}
DEFAULTS: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
COMPILED = tuple(name for name, option in OPTIONS.items() if option.compiled)
VECTORS = ("weights", "key_bias")  # arguments of compiled programs; they get no gradient
GRAD_ONLY = frozenset(GradOptions.__annotations__) - frozenset(LossOptions.__annotations__)
FLAGS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
CHOICES: dict[str, tuple[str, ...]] = {
    "reduction": get_args(Reduction),
    "method": get_args(Method),
    "precision": get_args(Precision),
}


# Options of the softmax: `kernels.problem.Problem` has fields of the same names
SOFTMAX = (
    "margin",
    "decoupled",
    "label_smoothing",
    "hardness",
    "key_bias",
    "false_negative_margin",
)
# Pairs of options that mean nothing together: the smoothed targets are those of a softmax over the
# keys that take part, all of which the denominator has, once
EXCLUSIVE = tuple(
    ("label_smoothing", other) for other in ("decoupled", "hardness", "false_negative_margin")
)


@dataclass(frozen=True, eq=False)
class Loss:
    """The data by which losses differ."""

    name: str
    arguments: tuple[str, ...]  # feature arrays, rows of the logit matrix first
    grads: type
    row_weight: float = 1.0
    column_weight: float = 0.0
    symmetric: bool = False
    square: bool = False  # as many keys as queries
    locked: tuple[str, ...] = ()  # arguments that never get a gradient
    sigmoid: bool = False
    scale: float | None = None  # default
    bias: float | None = None
    refused: tuple[str, ...] = ()  # options that mean nothing for it
    classes: bool = False  # labels are classes: the positives of a row are all others of its class
    joint: bool = False  # rows i of both arguments have one softmax, over all rows of both


INFO_NCE = Loss("info_nce", ("query", "key"), QueryKeyGrads)
NT_XENT = Loss("nt_xent", ("features",), FeaturesGrads, symmetric=True)
CLIP = Loss(
    "clip", ("image", "text"), ImageTextGrads, row_weight=0.5, column_weight=0.5, square=True
)
LIT = Loss("lit", ("text", "image"), TextImageGrads, square=True, locked=("image",))
SIGLIP = Loss(
    "siglip", ("image", "text"), SigmoidGrads, square=True, sigmoid=True, scale=10.0, bias=-10.0,
    refused=(*SOFTMAX, "metrics"),
)  # fmt: skip
SUP_CON = Loss(
    "sup_con", ("features",), FeaturesGrads, symmetric=True, classes=True,
    refused=("ids", "margin", "hardness", "false_negative_margin", "metrics"),
)  # fmt: skip
GTE = Loss(
    "gte", ("query", "key"), QueryKeyGrads, symmetric=True, square=True, joint=True,
    refused=("key_bias", "metrics", "return_logits"),
)  # fmt: skip
LOSSES = {loss.name: loss for loss in (CLIP, LIT, SIGLIP, INFO_NCE, NT_XENT, SUP_CON, GTE)}
