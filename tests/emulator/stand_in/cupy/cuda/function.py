"""Compiled modules, and their kernels as CuPy launches them."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any
from weakref import WeakValueDictionary

import engine
import numpy as np

from . import runtime
from . import stream as streams

functions: WeakValueDictionary[int, Function] = WeakValueDictionary()  # by address
ALIGNMENT = 128
_addresses = itertools.count(0x100, 0x10)


class Module:
    def load(self, code: bytes) -> None:
        self._code = code

    def get_function(self, name: str) -> Function:
        return Function(engine.Kernel(self._code.decode(), name))


class Function:
    def __init__(self, kernel: Any) -> None:
        self._kernel, self.ptr = kernel, next(_addresses)
        self.max_shared = 48 * 1024  # bytes of dynamic memory, until a kernel asks for more
        functions[self.ptr] = self

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...],
        shared_mem: int = 0, stream: Any = None, enable_cooperative_groups: bool = False,
    ) -> None:  # fmt: skip
        values = [_bytes(value) for value in args]
        stream = stream or streams.get_current_stream()
        self.launch(grid[0], block[0], shared_mem, values, stream.ptr, enable_cooperative_groups)

    def launch(
        self, grid: int, block: int, shared: int, values: list[bytes], stream: int,
        cooperative: bool,
    ) -> None:  # fmt: skip
        """Launch the kernel. `values` has the bytes of each parameter."""
        sizes = self._kernel.sizes
        if shared > self.max_shared:
            raise runtime.CUDARuntimeError(
                runtime.INVALID_VALUE, f"{self._kernel.name}: {shared} bytes of shared memory"
            )
        if [len(value) for value in values] != sizes:
            raise TypeError(
                f"{self._kernel.name}: expected parameters of {sizes} bytes, got "
                f"{[len(value) for value in values]}"
            )
        memory, pointers = _placed(values)

        def run() -> None:
            at = ctypes.addressof(pointers)
            self._kernel.launch(grid, block, shared, at, cooperative=cooperative)
            assert memory.size  # it is there as long as this may run

        streams.submit(stream, run)


def launch_at(
    function: int, grid: int, block: int, shared: int, stream: int, parameters: int
) -> None:
    """cuLaunchKernel: `parameters` are the address of pointers to values."""
    kernel = functions[function]
    sizes = kernel._kernel.sizes
    pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
    values = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
    kernel.launch(grid, block, shared, values, stream, False)


def _bytes(value: Any) -> bytes:
    """A parameter as CuPy passes it."""
    from .._array import ndarray

    if isinstance(value, ndarray):
        value = value.data.ptr
    if isinstance(value, bool):
        return np.bool_(value).tobytes()
    if isinstance(value, int):
        return (value & (2**64 - 1)).to_bytes(8, "little")
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    raise TypeError(f"no parameter of a kernel: {type(value)}")


def _placed(values: list[bytes]) -> tuple[Any, Any]:
    """A copy of all, each at an address that a tensor map may have; and pointers to them."""
    padded = [value + bytes(-len(value) % ALIGNMENT) for value in values]
    packed = b"".join(padded)
    memory = np.empty(len(packed) + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    memory[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
    ends = itertools.accumulate(map(len, padded), initial=memory.ctypes.data + start)
    return memory, (ctypes.c_void_p * len(values))(*itertools.islice(ends, len(values)))
