"""The operations of a call on a GPU: launches of kernels, matrix products, copies and zeros.

A `Queue` puts them on the current stream. A `Recorder` (recorder.py) records them for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cupy
import numpy as np

from ...problem import Array
from . import compiler
from .cublas import gemm_ex
from .signatures import Signature
from .tensor_map import tensor_map


class Queue:
    """Puts operations on the current stream, and returns before the GPU has run them.

    `Recorder` has the same methods, which record the operations.
    """

    # the compiled kernel of a file, for `launch`
    function: Callable[..., Any] = staticmethod(compiler.function)

    def launch(
        self, function: Any, signature: Signature, grid: int, block: int, shared: int,
        arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Launch a kernel: `grid` thread blocks of `block` threads, with `shared` bytes each."""
        function((grid,), (block,), tuple(signature.arguments(arguments)), shared_mem=shared)

    def tensor_map(self, data: int, *form: Any) -> Any:
        """The argument of a kernel for a tensor map; see the parameters of `tensor_map`."""
        return tensor_map(data, *form)

    def gemm(self, *arguments: int) -> None:
        """Compute a matrix product, or a batch of products, by `cublas.gemm_ex`.

        `arguments` are the arguments of `gemm_ex` after the handle.
        """
        gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments)

    def copy(self, to: Any, source: Any, size: int) -> None:
        """Copy `size` bytes on the device from pointer `source` to pointer `to`."""
        to.copy_from_device_async(source, size)

    def zeroed_array(self, n: int, dtype: Any) -> Array:
        """A new array of n zeros, which each replay of a recording zeroes again."""
        return cupy.zeros(n, dtype)

    def clear(self, at: Any, size: int) -> None:
        """Set `size` bytes from pointer `at` on to 0."""
        at.memset_async(0, size)

    def scratch(self, size: int) -> Array:
        """New memory of `size` bytes, for the workspace of a call or of a block over ranks."""
        return cupy.empty(size, np.uint8)

    def do(self, function: Callable[..., None], *pointers: int, capturable: bool = False) -> None:
        """Call `function(stream, *pointers)`, which puts an operation of its own on the stream.

        `pointers` are addresses. `capturable`: the operation may be part of a CUDA graph.
        """
        function(cupy.cuda.get_current_stream().ptr, *pointers)
