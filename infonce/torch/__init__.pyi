# Written by tools/signatures.py from the table of options in infonce/spec.py
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from ..spec import Method, Precision, Reduction
from .caching import grad_cache as grad_cache
from .functions import distill_loss as distill_loss
from .key_queue import KeyQueue as KeyQueue

__all__ = [
    "CLIPLoss",
    "GTELoss",
    "InfoNCELoss",
    "KeyQueue",
    "LiTLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SupConLoss",
    "clip_loss",
    "distill_loss",
    "grad_cache",
    "gte_loss",
    "info_nce_loss",
    "lit_loss",
    "nt_xent_loss",
    "siglip_loss",
    "sup_con_loss",
]

def clip_loss(
    image: Tensor,
    text: Tensor,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    positive_ids: Any = None,
    key_bias: Tensor | None = None,
    false_negative_margin: float = math.inf,
    guide: Tensor | tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    query_mask: Any = None,
    key_mask: Any = None,
    token_mean: bool = False,
    dims: Any = None,
    dim_weights: Any = None,
    weights: Tensor | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    metrics: bool = False,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Any: ...
def lit_loss(
    text: Tensor,
    image: Tensor,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    positive_ids: Any = None,
    key_bias: Tensor | None = None,
    false_negative_margin: float = math.inf,
    guide: Tensor | tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    query_mask: Any = None,
    key_mask: Any = None,
    token_mean: bool = False,
    dims: Any = None,
    dim_weights: Any = None,
    weights: Tensor | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    metrics: bool = False,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Any: ...
def siglip_loss(
    image: Tensor,
    text: Tensor,
    bias: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    positive_ids: Any = None,
    query_mask: Any = None,
    key_mask: Any = None,
    token_mean: bool = False,
    dims: Any = None,
    dim_weights: Any = None,
    weights: Tensor | None = None,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Tensor: ...
def info_nce_loss(
    query: Tensor,
    key: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    positive_ids: Any = None,
    key_bias: Tensor | None = None,
    false_negative_margin: float = math.inf,
    guide: Tensor | tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    query_mask: Any = None,
    key_mask: Any = None,
    token_mean: bool = False,
    own: Tensor | None = None,
    own_indices: Tensor | None = None,
    own_mask: Tensor | None = None,
    own_bias: Tensor | None = None,
    in_batch: bool = True,
    dims: Any = None,
    dim_weights: Any = None,
    weights: Tensor | None = None,
    label_weights: Tensor | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    metrics: bool = False,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Any: ...
def nt_xent_loss(
    features: Tensor,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    key_bias: Tensor | None = None,
    false_negative_margin: float = math.inf,
    guide: Tensor | tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    dims: Any = None,
    dim_weights: Any = None,
    weights: Tensor | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    metrics: bool = False,
    labels: Tensor | None = None,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Any: ...
def sup_con_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    key_bias: Tensor | None = None,
    weights: Tensor | None = None,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Tensor: ...
def gte_loss(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    ids: Any = None,
    groups: Any = None,
    false_negative_margin: float = math.inf,
    guide: Tensor | tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    weights: Tensor | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    normalize: bool = False,
    reduction: Reduction = "mean",
    method: Method = "auto",
    precision: Precision = "auto",
    workspace: int | str | None = None,
    offload: bool = False,
    check_finite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    group: ProcessGroup | None = None,
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
    exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
    timeout: float | None = 300.0,
    gradient_scale: Literal["global", "ddp"] = "ddp",
) -> Tensor: ...

class CLIPLoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    positive_ids: Any
    key_bias: Tensor | None
    false_negative_margin: float
    guide: Tensor | tuple[Tensor, Tensor] | None
    guide_margin: float
    query_mask: Any
    key_mask: Any
    token_mean: bool
    dims: Any
    dim_weights: Any
    weights: Tensor | None
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    metrics: bool
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        positive_ids: Any = None,
        key_bias: Tensor | None = None,
        false_negative_margin: float = math.inf,
        guide: Tensor | tuple[Tensor, Tensor] | None = None,
        guide_margin: float = 0.0,
        query_mask: Any = None,
        key_mask: Any = None,
        token_mean: bool = False,
        dims: Any = None,
        dim_weights: Any = None,
        weights: Tensor | None = None,
        margin: float = 0.0,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        hardness: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        metrics: bool = False,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        image: Tensor,
        text: Tensor,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        positive_ids: Any = ...,
        key_bias: Tensor | None = ...,
        false_negative_margin: float = ...,
        guide: Tensor | tuple[Tensor, Tensor] | None = ...,
        guide_margin: float = ...,
        query_mask: Any = ...,
        key_mask: Any = ...,
        token_mean: bool = ...,
        dims: Any = ...,
        dim_weights: Any = ...,
        weights: Tensor | None = ...,
        margin: float = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        hardness: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        metrics: bool = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Any: ...
    __call__ = forward

class LiTLoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    positive_ids: Any
    key_bias: Tensor | None
    false_negative_margin: float
    guide: Tensor | tuple[Tensor, Tensor] | None
    guide_margin: float
    query_mask: Any
    key_mask: Any
    token_mean: bool
    dims: Any
    dim_weights: Any
    weights: Tensor | None
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    metrics: bool
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        positive_ids: Any = None,
        key_bias: Tensor | None = None,
        false_negative_margin: float = math.inf,
        guide: Tensor | tuple[Tensor, Tensor] | None = None,
        guide_margin: float = 0.0,
        query_mask: Any = None,
        key_mask: Any = None,
        token_mean: bool = False,
        dims: Any = None,
        dim_weights: Any = None,
        weights: Tensor | None = None,
        margin: float = 0.0,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        hardness: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        metrics: bool = False,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        text: Tensor,
        image: Tensor,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        positive_ids: Any = ...,
        key_bias: Tensor | None = ...,
        false_negative_margin: float = ...,
        guide: Tensor | tuple[Tensor, Tensor] | None = ...,
        guide_margin: float = ...,
        query_mask: Any = ...,
        key_mask: Any = ...,
        token_mean: bool = ...,
        dims: Any = ...,
        dim_weights: Any = ...,
        weights: Tensor | None = ...,
        margin: float = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        hardness: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        metrics: bool = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Any: ...
    __call__ = forward

class SigLIPLoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    bias: Any
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    positive_ids: Any
    query_mask: Any
    key_mask: Any
    token_mean: bool
    dims: Any
    dim_weights: Any
    weights: Tensor | None
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        bias: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        positive_ids: Any = None,
        query_mask: Any = None,
        key_mask: Any = None,
        token_mean: bool = False,
        dims: Any = None,
        dim_weights: Any = None,
        weights: Tensor | None = None,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        image: Tensor,
        text: Tensor,
        bias: float | Tensor | None = None,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        positive_ids: Any = ...,
        query_mask: Any = ...,
        key_mask: Any = ...,
        token_mean: bool = ...,
        dims: Any = ...,
        dim_weights: Any = ...,
        weights: Tensor | None = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Tensor: ...
    __call__ = forward

class InfoNCELoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    positive_ids: Any
    key_bias: Tensor | None
    false_negative_margin: float
    guide: Tensor | tuple[Tensor, Tensor] | None
    guide_margin: float
    query_mask: Any
    key_mask: Any
    token_mean: bool
    own: Tensor | None
    own_indices: Tensor | None
    own_mask: Tensor | None
    own_bias: Tensor | None
    in_batch: bool
    dims: Any
    dim_weights: Any
    weights: Tensor | None
    label_weights: Tensor | None
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    metrics: bool
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        positive_ids: Any = None,
        key_bias: Tensor | None = None,
        false_negative_margin: float = math.inf,
        guide: Tensor | tuple[Tensor, Tensor] | None = None,
        guide_margin: float = 0.0,
        query_mask: Any = None,
        key_mask: Any = None,
        token_mean: bool = False,
        own: Tensor | None = None,
        own_indices: Tensor | None = None,
        own_mask: Tensor | None = None,
        own_bias: Tensor | None = None,
        in_batch: bool = True,
        dims: Any = None,
        dim_weights: Any = None,
        weights: Tensor | None = None,
        label_weights: Tensor | None = None,
        margin: float = 0.0,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        hardness: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        metrics: bool = False,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        labels: Tensor | None = None,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        positive_ids: Any = ...,
        key_bias: Tensor | None = ...,
        false_negative_margin: float = ...,
        guide: Tensor | tuple[Tensor, Tensor] | None = ...,
        guide_margin: float = ...,
        query_mask: Any = ...,
        key_mask: Any = ...,
        token_mean: bool = ...,
        own: Tensor | None = ...,
        own_indices: Tensor | None = ...,
        own_mask: Tensor | None = ...,
        own_bias: Tensor | None = ...,
        in_batch: bool = ...,
        dims: Any = ...,
        dim_weights: Any = ...,
        weights: Tensor | None = ...,
        label_weights: Tensor | None = ...,
        margin: float = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        hardness: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        metrics: bool = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Any: ...
    __call__ = forward

class NTXentLoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    key_bias: Tensor | None
    false_negative_margin: float
    guide: Tensor | tuple[Tensor, Tensor] | None
    guide_margin: float
    dims: Any
    dim_weights: Any
    weights: Tensor | None
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    metrics: bool
    labels: Tensor | None
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        key_bias: Tensor | None = None,
        false_negative_margin: float = math.inf,
        guide: Tensor | tuple[Tensor, Tensor] | None = None,
        guide_margin: float = 0.0,
        dims: Any = None,
        dim_weights: Any = None,
        weights: Tensor | None = None,
        margin: float = 0.0,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        hardness: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        metrics: bool = False,
        labels: Tensor | None = None,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        features: Tensor,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        key_bias: Tensor | None = ...,
        false_negative_margin: float = ...,
        guide: Tensor | tuple[Tensor, Tensor] | None = ...,
        guide_margin: float = ...,
        dims: Any = ...,
        dim_weights: Any = ...,
        weights: Tensor | None = ...,
        margin: float = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        hardness: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        metrics: bool = ...,
        labels: Tensor | None = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Any: ...
    __call__ = forward

class SupConLoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    key_bias: Tensor | None
    weights: Tensor | None
    decoupled: bool
    label_smoothing: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        key_bias: Tensor | None = None,
        weights: Tensor | None = None,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        key_bias: Tensor | None = ...,
        weights: Tensor | None = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Tensor: ...
    __call__ = forward

class GTELoss(Module):
    log_scale: Parameter
    learnable: bool
    max_scale: float
    min_scale: float
    temperature: float | Tensor | None
    scale: float | Tensor | None
    ids: Any
    groups: Any
    false_negative_margin: float
    guide: Tensor | tuple[Tensor, Tensor] | None
    guide_margin: float
    weights: Tensor | None
    margin: float
    decoupled: bool
    label_smoothing: float
    hardness: float
    normalize: bool
    reduction: Reduction
    method: Method
    precision: Precision
    workspace: int | str | None
    offload: bool
    check_finite: bool
    progress: Callable[[str, int, int], None] | None
    group: ProcessGroup | None
    transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"]
    exchange: Literal["auto", "ring", "gather", "hierarchical"]
    timeout: float | None
    gradient_scale: Literal["global", "ddp"]
    def __init__(
        self,
        *,
        learnable: bool = False,
        max_scale: float = 100.0,
        min_scale: float = 0.0,
        temperature: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        ids: Any = None,
        groups: Any = None,
        false_negative_margin: float = math.inf,
        guide: Tensor | tuple[Tensor, Tensor] | None = None,
        guide_margin: float = 0.0,
        weights: Tensor | None = None,
        margin: float = 0.0,
        decoupled: bool = False,
        label_smoothing: float = 0.0,
        hardness: float = 0.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        method: Method = "auto",
        precision: Precision = "auto",
        workspace: int | str | None = None,
        offload: bool = False,
        check_finite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        group: ProcessGroup | None = None,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = "auto",
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = "auto",
        timeout: float | None = 300.0,
        gradient_scale: Literal["global", "ddp"] = "ddp",
    ) -> None: ...
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        temperature: float | Tensor | None = ...,
        scale: float | Tensor | None = ...,
        ids: Any = ...,
        groups: Any = ...,
        false_negative_margin: float = ...,
        guide: Tensor | tuple[Tensor, Tensor] | None = ...,
        guide_margin: float = ...,
        weights: Tensor | None = ...,
        margin: float = ...,
        decoupled: bool = ...,
        label_smoothing: float = ...,
        hardness: float = ...,
        normalize: bool = ...,
        reduction: Reduction = ...,
        method: Method = ...,
        precision: Precision = ...,
        workspace: int | str | None = ...,
        offload: bool = ...,
        check_finite: bool = ...,
        progress: Callable[[str, int, int], None] | None = ...,
        group: ProcessGroup | None = ...,
        transport: Literal["auto", "mpi", "nccl", "cuda-aware", "staged"] = ...,
        exchange: Literal["auto", "ring", "gather", "hierarchical"] = ...,
        timeout: float | None = ...,
        gradient_scale: Literal["global", "ddp"] = ...,
    ) -> Tensor: ...
    __call__ = forward
