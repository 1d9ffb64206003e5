"""Drop-in replacements for MemoryEfficientCLIP's losses (its package memeff): CLIP, LiT, the losses
of Qwen3 Embedding, `MatryoshkaLoss`, and the Distributed, Matryoshka and Stable variants of these.

As in memeff, rows are normalised unless `normalized_inputs` is True, and by default the temperature
is 0.07 and gradients are multiplied by ``sqrt(N temperature)``. What differs: the maximum of an
exponential sum is computed online instead of fixed at 1 / temperature; float32 features are
computed to float32's accuracy; widths, batches and the dims of Matryoshka may be any numbers. A
`tau_plus` other than 0 is an error. Other keywords are those of the functions of `infonce.torch`.
"""

from .matryoshka import (
    DistributedMemoryEfficientMatryoshkaCLIPLoss,
    DistributedMemoryEfficientMatryoshkaLiTLoss,
    DistributedMemoryEfficientMatryoshkaLiTQwen3Loss,
    DistributedMemoryEfficientMatryoshkaQwen3Loss,
    MatryoshkaLoss,
    MemoryEfficientMatryoshkaCLIPLoss,
    MemoryEfficientMatryoshkaLiTLoss,
    MemoryEfficientMatryoshkaLiTQwen3Loss,
    MemoryEfficientMatryoshkaQwen3Loss,
)
from .pairs import (
    DistributedMemoryEfficientCLIPLoss,
    DistributedMemoryEfficientLiTLoss,
    MemoryEfficientCLIPLoss,
    MemoryEfficientCLIPLossNormed,
    MemoryEfficientLiTLoss,
    MemoryEfficientLiTLossNormed,
    StableMemoryEfficientCLIPLoss,
    StableMemoryEfficientCLIPLossNormed,
    StableMemoryEfficientLiTLoss,
    StableMemoryEfficientLiTLossNormed,
)
from .qwen3 import (
    DistributedMemoryEfficientLiTQwen3Loss,
    DistributedMemoryEfficientQwen3Loss,
    MemoryEfficientLiTQwen3Loss,
    MemoryEfficientQwen3Loss,
)

__all__ = [
    "DistributedMemoryEfficientCLIPLoss",
    "DistributedMemoryEfficientLiTLoss",
    "DistributedMemoryEfficientLiTQwen3Loss",
    "DistributedMemoryEfficientMatryoshkaCLIPLoss",
    "DistributedMemoryEfficientMatryoshkaLiTLoss",
    "DistributedMemoryEfficientMatryoshkaLiTQwen3Loss",
    "DistributedMemoryEfficientMatryoshkaQwen3Loss",
    "DistributedMemoryEfficientQwen3Loss",
    "MatryoshkaLoss",
    "MemoryEfficientCLIPLoss",
    "MemoryEfficientCLIPLossNormed",
    "MemoryEfficientLiTLoss",
    "MemoryEfficientLiTLossNormed",
    "MemoryEfficientLiTQwen3Loss",
    "MemoryEfficientMatryoshkaCLIPLoss",
    "MemoryEfficientMatryoshkaLiTLoss",
    "MemoryEfficientMatryoshkaLiTQwen3Loss",
    "MemoryEfficientMatryoshkaQwen3Loss",
    "MemoryEfficientQwen3Loss",
    "StableMemoryEfficientCLIPLoss",
    "StableMemoryEfficientCLIPLossNormed",
    "StableMemoryEfficientLiTLoss",
    "StableMemoryEfficientLiTLossNormed",
]
