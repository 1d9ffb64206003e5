"""The GPU as the device of `offload.backend`: copies of panels from and to host memory."""

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

COPY_THREADS = 4  # they fill pinned memory: one alone is slower than PCIe
PINNED = 1  # cudaMemoryTypeHost: host memory that the device can read


def backend(problem: Problem, gradients: Gradients | None = None) -> Offload:
    """Folds blocks of host features on the current GPU."""
    return Offload(problem, gradients, Device())


@cache
def _copy_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPY_THREADS, "infonce-offload")


def _copy(target: Array, source: Array) -> None:
    """target[...] = source by several threads: np.copyto releases the GIL."""
    parts = slices(len(source), max(1, -(-len(source) // COPY_THREADS)))
    copies = [_copy_pool().submit(np.copyto, target[part], source[part]) for part in parts]
    for copy in copies:
        copy.result()


def _pinned(array: Array) -> bool:
    """Whether this is pinned memory, which the GPU copies by itself while the host continues."""
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
        """Double buffering: two buffers on the device and, unless the features are pinned, two
        pinned ones on the host. A panel is copied while products with the previous one run."""
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
        used = [current.record(), current.record()]  # the last use of each buffer

        def start(i: int) -> None:
            slot, source = i % 2, features[panels[i]]
            target = buffers[slot][: len(source)]
            if staged is not None:
                if copied[slot] is not None:
                    copied[slot].synchronize()  # the last copy from this staging buffer
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
            copying.synchronize()  # before the pools reuse the buffers
