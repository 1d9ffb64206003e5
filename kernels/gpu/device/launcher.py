"""Launches the kernels of one call, for products of one precision, at once or into a plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy

from ..config import launch as config
from . import compiler
from .launches import Queue

PRECISIONS = {p: p.upper() for p in config.OPERAND_BYTES}


@cache
def device_properties(index: int) -> config.Device:
    device = cupy.cuda.Device(index)
    attributes = device.attributes
    return config.Device(
        device.compute_capability,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
    )


class Launcher:
    """`queue` runs what is launched on the current stream, or records it."""

    def __init__(self, device: Any, precision: str, queue: Queue) -> None:
        self.device, self.precision, self.queue = device, precision, queue

    def kernel(self, file: str, name: str, shared: int = 0, **defines: int | str) -> Any:
        function = compiler.function(
            self.device, file, name, shared, PRECISION=PRECISIONS[self.precision], **defines
        )
        return self.queue.kernel(function)

    def rows_kernel(self, name: str, n: int, *arguments: Any) -> None:
        """One warp a row."""
        self.kernel("rows.cu", name)((-(-n // 8),), (256,), arguments)

    def vector_kernel(self, name: str, n: int, *arguments: Any, threads: int = 1) -> None:
        """So many threads an element."""
        self.kernel("vectors.cu", name)((-(-n * threads // 128),), (128,), arguments)
