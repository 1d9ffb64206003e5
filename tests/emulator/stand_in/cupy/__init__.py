"""A stand-in for the part of CuPy that the library and its tests use, without a GPU.

NumPy computes on its arrays, in memory of the host; kernels run on the emulator. It is as strict as
CuPy is: arrays of the host are no operands, and what waits for the device cannot be captured. A
function that is missing here is to be added if CuPy has it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import cuda, testing
from ._array import apply, ndarray, on_device, run
from ._kernel import ElementwiseKernel, RawKernel, RawModule
from .cuda.memory import default_pool

__version__ = "0.emulated"
__all__ = [
    "ElementwiseKernel", "RawKernel", "RawModule", "cuda", "ndarray", "testing"
]  # fmt: skip

# Functions that compute what NumPy's do, and types and numbers that are NumPy's
FUNCTIONS = (
    "abs all any argmax argsort broadcast_to concatenate cumsum diag equal exp exp2 expand_dims "
    "fill_diagonal frexp isfinite isnan isneginf ldexp log log1p log2 logaddexp "
    "matmul maximum minimum nextafter searchsorted sort sqrt stack sum take_along_axis "
    "tile where"
)
NAMES = (
    "bool_ dtype float16 float32 float64 inf int32 int64 nan newaxis pi result_type uint32 uint8 "
    "promote_types can_cast integer floating"
)


def _function(name: str) -> Any:
    function = getattr(np, name)
    return lambda *args, **options: apply(function, *args, **options)


globals().update({name: _function(name) for name in FUNCTIONS.split()})
globals().update({name: getattr(np, name) for name in NAMES.split()})


def logaddexp2(x: Any, y: Any) -> Any:
    """CuPy's formula, which rounds a small result to 0, as NumPy's does not."""

    def compute(x: Any, y: Any) -> Any:
        larger = np.fmax(x, y) + np.log2(1 + np.exp2(-np.abs(np.subtract(x, y))))
        return np.where(np.equal(x, y), np.add(x, 1.0), larger)

    return apply(compute, x, y)


def _waiting_function(name: str) -> Any:
    """A function whose result has a shape that the host learns from the device."""
    function = getattr(np, name)

    def waits(*args: Any, **options: Any) -> Any:
        cuda.get_current_stream().note_wait(name)
        return apply(function, *args, **options)

    return waits


unique, flatnonzero = map(_waiting_function, ("unique", "flatnonzero"))


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """NumPy's. CuPy adds weights by atomics: for numbers with a fraction, the order matters."""
    if weights is not None and weights.dtype.kind == "f":
        raise TypeError("bincount: CuPy adds these weights in another order in each call")
    cuda.get_current_stream().note_wait("bincount")
    return apply(np.bincount, x, weights, minlength)


def copyto(to: Any, values: Any, casting: str = "same_kind", where: Any = True) -> None:
    run(lambda to, values, where: np.copyto(to, values, casting, where), to, values, where)


linalg = SimpleNamespace(norm=lambda *args, **options: apply(np.linalg.norm, *args, **options))
lib = SimpleNamespace(
    stride_tricks=SimpleNamespace(
        as_strided=lambda z, shape, strides: ndarray(shape, z.dtype, z.data, strides)
    )
)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"cupy.{name}: the emulator's stand-in has none; CuPy may")


def get_default_memory_pool() -> Any:
    return default_pool


# -- new arrays


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    array = ndarray(shape, np.asarray(value).dtype if dtype is None else dtype, order=order)
    array[...] = value
    return array


def _filled(value: float) -> Any:
    return lambda shape, dtype=float, order="C": full(shape, value, dtype, order)


def _like(make: Any) -> Any:
    return lambda like, dtype=None: make(like.shape, like.dtype if dtype is None else dtype)


def _of_host(function: Any) -> Any:
    return lambda *args, **options: on_device(function(*args, **options), copied=False)


zeros, ones = map(_filled, (0, 1))
empty_like, zeros_like, ones_like = map(_like, (empty, zeros, ones))
arange, linspace = map(_of_host, (np.arange, np.linspace))


# -- to and from the host


def array(values: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    if isinstance(values, ndarray):
        dtype = values.dtype if dtype is None else np.dtype(dtype)
        layout = values.flags
        fits = order in "KA" or getattr(layout, f"{order.lower()}_contiguous")
        if not copy and dtype == values.dtype and fits:
            return values
        return values.astype(dtype, order=order)
    described = getattr(values, "__cuda_array_interface__", None)
    if described is not None:
        return _viewed_by_interface(values, described)
    if isinstance(values, list | tuple) and any(isinstance(z, ndarray) for z in values):
        return apply(lambda *z: np.array(z, dtype), *values)
    return on_device(np.array(values, dtype, order=order))


def _viewed_by_interface(owner: Any, described: dict[str, Any]) -> ndarray:
    """An array on the memory of another library's array."""
    shape, dtype = described["shape"], np.dtype(described["typestr"])
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    memory = cuda.UnownedMemory(described["data"][0], size, owner)
    return ndarray(shape, dtype, cuda.MemoryPointer(memory, 0), described.get("strides"))


def asarray(values: Any, dtype: Any = None, order: str = "K") -> ndarray:
    return array(values, dtype, False, order)


ascontiguousarray, asfortranarray = (partial(asarray, order=order) for order in "CF")


def asnumpy(values: Any) -> np.ndarray:
    return values.get() if isinstance(values, ndarray) else np.asarray(values)


def may_share_memory(a: ndarray, b: ndarray) -> bool:
    return np.may_share_memory(a._host, b._host)


def from_dlpack(values: Any) -> ndarray:
    raise BufferError("the emulated GPU has no arrays of other libraries")
