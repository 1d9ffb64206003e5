"""The GPU for `infonce.kernels.offload.backend`: panels of host memory on their way to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import cupy
import cupyx
import numpy as np

from ..gpu.tiled.backend import GPU
from ..problem import Array, Gradients, Problem, slices
from .backend import Offload

COPIERS = 4  # threads that fill pinned memory: one alone is slower than the bus
PINNED = 1  # CUDA's name for host memory that the device can read


def backend(problem: Problem, gradients: Gradients | None = None) -> Offload:
    """Blocks of host features on the current GPU."""
    return Offload(problem, gradients, Device())


@cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPIERS, "infonce-offload")


def _copy(target: Array, source: Array) -> None:
    """target[...] = source, by several threads: NumPy copies without Python's lock."""
    parts = slices(len(source), max(1, -(-len(source) // COPIERS)))
    copies = [_copiers().submit(np.copyto, target[part], source[part]) for part in parts]
    for copy in copies:
        copy.result()


def _pinned(array: Array) -> bool:
    """Whether the device reads this memory itself, at full speed and while the host goes on."""
    if not array.flags.c_contiguous or not array.nbytes or not array.dtype.isnative:
        return False
    attributes = cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data)
    return bool(attributes.type == PINNED)


class Device:
    """The current GPU: see `infonce.kernels.offload.backend.Device`."""

    xp = cupy
    backend = GPU

    @staticmethod
    def put(array: Array) -> Array:
        return cupy.asarray(np.asarray(array, array.dtype.newbyteorder("=")))

    @staticmethod
    def get(array: Array) -> Array:
        return cupy.asnumpy(array)

    def stream(self, features: Array, panels: Sequence[slice]) -> Iterator[tuple[slice, Array]]:
        """Two buffers on the device and, unless the features are pinned themselves, two pinned ones
        on the host. A panel is copied while the products with the one before it run."""
        if not panels:
            return
        current, copying = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        shape = max(p.stop - p.start for p in panels), features.shape[1]
        dtype = features.dtype.newbyteorder("=")
        buffers = [cupy.empty(shape, dtype) for _ in panels[:2]]
        staged = None
        if not _pinned(features):
            staged = [cupyx.empty_pinned(shape, dtype) for _ in panels[:2]]
        copied: list[Any] = [None, None]
        used = [current.record(), current.record()]  # who had this memory before

        def start(i: int) -> None:
            slot, source = i % 2, features[panels[i]]
            target = buffers[slot][: len(source)]
            if staged is not None:
                if copied[slot] is not None:
                    copied[slot].synchronize()  # the copy from this staging buffer
                _copy(staged[slot][: len(source)], source)
                source = staged[slot][: len(source)]
            copying.wait_event(used[slot])
            target.set(source, stream=copying)
            copied[slot] = copying.record()

        try:
            start(0)
            for i, panel in enumerate(panels):
                slot = i % 2
                current.wait_event(copied[slot])
                yield panel, buffers[slot][: panel.stop - panel.start]
                used[slot] = current.record()
                if i + 1 < len(panels):
                    start(i + 1)
        finally:
            copying.synchronize()  # before the buffers go back to their pools
