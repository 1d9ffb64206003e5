"""What a call asks of the GPU: kernels, products, copies and zeros, in the order asked for.

A `Queue` runs them on the current stream; a `Recorder` (recorder.py) writes them down.
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
    """Launches on the current stream at once. `Recorder` has the same methods, and records."""

    function: Callable[..., Any] = staticmethod(compiler.function)

    def launch(
        self, function: Any, signature: Signature, grid: int, block: int, shared: int,
        arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """A kernel of `grid` blocks of `block` threads with `shared` bytes of dynamic memory."""
        function((grid,), (block,), tuple(signature.arguments(arguments)), shared_mem=shared)

    def tensor_map(self, data: int, *form: Any) -> Any:
        """`tensor_map.tensor_map` as an argument of a kernel."""
        return tensor_map(data, *form)

    def gemm(self, *arguments: int) -> None:
        """One product or a batch of them: `cublas.gemm_ex`, from its second argument on."""
        gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments)

    def copy(self, to: Any, source: Any, size: int) -> None:
        """Bytes from one pointer to another."""
        to.copy_from_device_async(source, size)

    def zeroed_array(self, n: int, dtype: Any) -> Array:
        return cupy.zeros(n, dtype)

    def clear(self, at: Any, size: int) -> None:
        """Zero bytes from a pointer on."""
        at.memset_async(0, size)

    def scratch(self, size: int) -> Array:
        """So many bytes for the folds of one block."""
        return cupy.empty(size, np.uint8)

    def do(self, function: Callable[..., None], *pointers: int, capturable: bool = False) -> None:
        """Whatever else works on a stream: `function(stream, *pointers)`. `capturable`: it may be
        part of a CUDA graph."""
        function(cupy.cuda.get_current_stream().ptr, *pointers)
