"""What a GPU is told to do: here at once, on the current stream."""

from __future__ import annotations

from typing import Any

import cupy

from ...problem import Array
from .cublas import gemm_ex
from .tensor_map import tensor_map


class Queue:
    """Kernels, products, copies and zeros, in the order in which they are asked for."""

    def kernel(self, function: Any) -> Any:
        """What launches `function`, called as that is."""
        return function

    def tensor_map(self, data: int, *form: Any) -> Any:
        """`kernels.tensor_map.tensor_map` as an argument of a kernel."""
        return tensor_map(data, *form)

    def gemm(self, *arguments: int) -> None:
        """cublasGemmEx, from its third argument on."""
        gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments)

    def copy(self, to: Any, source: Any, size: int) -> None:
        """Bytes from one pointer to another."""
        to.copy_from_device_async(source, size)

    def zeros(self, n: int, dtype: Any) -> Array:
        return cupy.zeros(n, dtype)
