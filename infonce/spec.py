"""The data by which losses differ, and the keywords that they take."""

from __future__ import annotations

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
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int
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


DEFAULTS: dict[str, Any] = {
    "temperature": None,
    "scale": None,
    "ids": None,
    "normalize": False,
    "reduction": "mean",
    "method": "auto",
    "precision": "auto",
    "workspace": 256 * 2**20,
    "offload": False,
    "check_finite": False,
    "progress": None,
    "wrt": None,
    "grad_dtype": None,
    "grad_out": 1.0,
    "out": None,
    "metrics": False,
    "return_logits": False,
}
GRAD_ONLY = frozenset(GradOptions.__annotations__) - frozenset(LossOptions.__annotations__)
FLAGS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
CHOICES: dict[str, tuple[str, ...]] = {
    "reduction": get_args(Reduction),
    "method": get_args(Method),
    "precision": get_args(Precision),
}


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


INFO_NCE = Loss("info_nce", ("query", "key"), QueryKeyGrads)
NT_XENT = Loss("nt_xent", ("features",), FeaturesGrads, symmetric=True)
CLIP = Loss(
    "clip", ("image", "text"), ImageTextGrads, row_weight=0.5, column_weight=0.5, square=True
)
LIT = Loss("lit", ("text", "image"), TextImageGrads, square=True, locked=("image",))
SIGLIP = Loss(
    "siglip", ("image", "text"), SigmoidGrads, square=True, sigmoid=True, scale=10.0, bias=-10.0
)
LOSSES = {loss.name: loss for loss in (CLIP, LIT, SIGLIP, INFO_NCE, NT_XENT)}
