"""GPUs by name: the properties on which a schedule depends, and the peak rates.

The numbers are from the vendor's data sheets; rates are for dense products, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.gpu.config import DeviceProperties
from ..kernels.gpu.config.precision import PORTABLE

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class DeviceModel:
    """A GPU: its properties and its peak rates."""

    model: str  # the name that CUDA reports, as in benchmark records
    properties: DeviceProperties
    # precision of operands -> floating-point operations per second. The key "16 bits" is for all
    # precisions that are no key of their own
    flops: dict[str, float]
    bandwidth: float  # bytes per second, to and from the GPU's memory


def _gpu(
    model: str, capability: str, multiprocessors: int, shared: tuple[int, int], memory: int,
    teraflops: tuple[float, float, float, float], bandwidth: float,
) -> DeviceModel:  # fmt: skip
    """The model of a GPU, from these numbers:

    - `capability`: compute capability without the point, "90" for 9.0;
    - `shared`: KiB of shared memory that a thread block, and a multiprocessor, can have;
    - `memory`: MiB;
    - `teraflops`: with operands of 16 bits, and in tf32, fp32 and fp64;
    - `bandwidth`: bytes per second.
    """
    block_bytes, multiprocessor_bytes = (KIB * size for size in shared)
    # PORTABLE: INFONCE_KERNELS=portable in the environment limits all GPUs to portable kernels
    properties = DeviceProperties(
        capability,
        multiprocessors,
        block_bytes,
        multiprocessor_bytes,
        memory * MIB,
        portable=PORTABLE,
    )
    precisions = ("16 bits", "tf32", "fp32", "fp64")
    flops = {name: 1e12 * rate for name, rate in zip(precisions, teraflops, strict=True)}
    return DeviceModel(model, properties, flops, bandwidth)


HOPPER = (989.0, 494.0, 67.0, 67.0)  # teraflops of H100 and H200
GPUS = {
    "b200": _gpu("NVIDIA B200", "100", 148, (227, 228), 183359, (2250, 1125, 75, 37), 7.7e12),
    "h200": _gpu("NVIDIA H200", "90", 132, (227, 228), 143155, HOPPER, 4.8e12),
    "h100": _gpu("NVIDIA H100", "90", 132, (227, 228), 81079, HOPPER, 3.35e12),
    "a100": _gpu("NVIDIA A100", "80", 108, (163, 164), 81079, (312, 156, 19.5, 19.5), 2.0e12),
    "l40s": _gpu("NVIDIA L40S", "89", 142, (99, 100), 45469, (362, 183, 91.6, 1.4), 0.86e12),
    "l4": _gpu("NVIDIA L4", "89", 58, (99, 100), 22563, (121, 60, 30, 0.47), 0.3e12),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", "89", 128, (99, 100), 24078, (165, 83, 83, 1.3), 1.0e12
    ),
    "t4": _gpu("Tesla T4", "75", 40, (64, 64), 14914, (65, 8.1, 8.1, 0.25), 0.32e12),
}
