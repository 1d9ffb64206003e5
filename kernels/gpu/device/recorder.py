"""Records what a call asks of the GPU, for other arrays and numbers than those of the recording.

While it records, arrays lie at placeholder addresses and numbers that vary are `Placeholder`s. A
relocation says what a word of the recording will be: the address of one of the call's arrays and an
offset, or one of its numbers. Kernels' signatures tell which words are pointers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ...problem import Array
from . import compiler
from .cublas import gemm_ex
from .launches import Queue
from .signatures import POINTER, TENSOR_MAP, Signature
from .tensor_map import SIZE

# Placeholder addresses, which no memory has: of so many arrays, and so many bytes apart
MAX_ARRAYS, SPACING = 256, 1 << 40
MAX_STEPS = 256  # of more, the device takes longer than Python takes to ask for them
FIRST = 0x7FF5 << 48
GEMM_POINTERS = (0, 7, 10, 14)  # workspace, A, B and C among the arguments of `_gemm`


class TooLong(Exception):
    """A call takes more steps, or more arrays, than a recording holds."""


class Placeholder(float):
    """Number `index` of a call, whose value is not known yet."""

    index: int

    def __new__(cls, index: int) -> Placeholder:
        number = super().__new__(cls, float("nan"))  # arithmetic with it would show
        number.index = index
        return number


@dataclass(frozen=True)
class Pointer:
    """A byte offset in array `array` of a call."""

    array: int
    offset: int


@dataclass(frozen=True)
class Launch:
    function: Callable[[], Any]  # the kernel, once it is compiled
    grid: int
    block: int
    shared: int
    first: int  # of its parameters


@dataclass(frozen=True)
class Step:
    """What is no kernel: a product, a copy, zeros."""

    do: Callable[..., None]  # with the stream and these arguments
    arguments: slice
    capturable: bool  # part of a CUDA graph


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of data at an address that is not known yet."""

    data: int
    form: tuple[Any, ...]


@dataclass
class Words:
    """8-byte words, and which of them are filled in for each call."""

    values: list[int] = field(default_factory=list)
    pointers: list[tuple[int, Pointer]] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)

    def add(self, word: int) -> None:
        self.values.append(word)

    def add_pointer(self, address: int) -> None:
        if address:
            self.pointers.append((len(self.values), placeholder_of(address)))
        self.values.append(0)

    def add_number(self, value: float) -> None:
        if isinstance(value, Placeholder):
            self.numbers.append((len(self.values), value.index))
        self.values.append(bits(value))


class Recorder(Queue):
    """`graphs`: products are to be captured in CUDA graphs, and get memory for cuBLAS."""

    def __init__(self, graphs: bool = False) -> None:
        self.graphs = graphs
        self.sizes: list[int] = []  # bytes of the call's arrays
        self.shared: Any = None  # memory of `scratch`
        self.product_memory: Any = None  # memory for cuBLAS, which the call does not make
        self.compiling: list[Callable[[], Any]] = []  # one kernel of each file
        self.steps: list[Launch | Step] = []
        self.words = Words()  # parameters of all launches
        self.parameters: list[int] = []  # where each begins, in bytes
        self.arguments = Words()  # of all other steps, and the data of tensor maps
        self.maps: list[tuple[int, int, tuple[Any, ...]]] = []  # word, argument, form

    # -- arrays at placeholder addresses

    def malloc(self, size: int) -> Any:
        """Memory of a new array: an allocator for CuPy."""
        if len(self.sizes) == MAX_ARRAYS:
            raise TooLong
        start = FIRST + len(self.sizes) * SPACING + SPACING // 2  # strides may be negative
        self.sizes.append(size)
        memory = cupy.cuda.UnownedMemory(start, size, None, runtime.getDevice())
        return cupy.cuda.MemoryPointer(memory, 0)

    def stand_in(self, array: Array) -> Array:
        """An array like this one, as the next of the call's arrays."""
        memory = self.malloc(SPACING // 2).mem
        pointer = cupy.cuda.MemoryPointer(memory, array.data.ptr % 16)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    # -- what is recorded

    def function(self, device: Any, file: str, name: str, shared: int, **defines: Any) -> Any:
        """What waits for the kernel, which is compiled while more is recorded."""
        kernel = partial(compiler.function, device, file, name, shared, **defines)
        if compiler.start(device, file, **defines):
            self.compiling.append(kernel)
        return kernel

    def launch(
        self, function: Any, signature: Signature, grid: int, block: int, shared: int,
        arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        first = len(self.parameters)
        for leaves in signature.words(arguments):
            self.parameters.append(8 * len(self.words.values))
            for letter, value in leaves:
                self._add(letter, value)
        self._append(Launch(function, grid, block, shared, first))

    def _add(self, letter: str, value: Any) -> None:
        if letter == POINTER:
            self.words.add_pointer(value)
        elif isinstance(value, float):
            self.words.add_number(value)
        elif letter != TENSOR_MAP:
            self.words.add(value & (2**64 - 1))
        elif isinstance(value, TensorMap):
            self.maps.append((len(self.words.values), len(self.arguments.values), value.form))
            self.arguments.add_pointer(value.data)
            self.words.values += [0] * (SIZE // 8)
        else:  # known already
            self.words.values += struct.unpack(f"={SIZE // 8}Q", value.tobytes())

    def tensor_map(self, data: int, *form: Any) -> Any:
        return TensorMap(data, form)

    def gemm(self, *arguments: int) -> None:
        if self.graphs and self.product_memory is None:
            self.product_memory = self.malloc(0)
        workspace = self.product_memory.ptr if self.graphs else 0
        self._step(_gemm, (workspace, *arguments), GEMM_POINTERS)

    def copy(self, to: Any, source: Any, size: int) -> None:
        self._step(_copy, (to.ptr, source.ptr, size), (0, 1))

    def zeros(self, n: int, dtype: Any) -> Array:
        array = cupy.empty(n, dtype)
        self.clear(array.data, array.nbytes)
        return array

    def clear(self, at: Any, size: int) -> None:
        self._step(_zeros, (at.ptr, size), (0,))

    def scratch(self, size: int) -> Array:
        """All blocks share one: they come one after another."""
        if self.shared is None:
            self.shared = self.malloc(0)
        index = placeholder_of(self.shared.ptr).array
        self.sizes[index] = max(self.sizes[index], size)
        return cupy.ndarray(size, np.uint8, self.shared)

    def do(self, function: Callable[..., None], *pointers: int, capturable: bool = False) -> None:
        self._step(function, pointers, tuple(range(len(pointers))), capturable)

    def _step(
        self, do: Callable[..., None], arguments: tuple[int, ...], pointers: tuple[int, ...],
        capturable: bool = True,
    ) -> None:  # fmt: skip
        first = len(self.arguments.values)
        for i, argument in enumerate(arguments):
            if i in pointers:
                self.arguments.add_pointer(argument)
            else:
                self.arguments.add(argument & (2**64 - 1))
        self._append(Step(do, slice(first, len(self.arguments.values)), capturable))

    def _append(self, step: Launch | Step) -> None:
        if len(self.steps) == MAX_STEPS:
            raise TooLong
        self.steps.append(step)


def placeholder_of(address: int) -> Pointer:
    """What a placeholder address stands for."""
    array, offset = divmod(address - FIRST, SPACING)
    if not 0 <= array < MAX_ARRAYS:
        raise ValueError(f"expected an address in one of the call's arrays, got {address:#x}")
    return Pointer(array, offset - SPACING // 2)


def bits(number: float) -> int:
    (word,) = struct.unpack("=Q", struct.pack("=d", number))
    return int(word)


def _gemm(stream: int, workspace: int, *arguments: int) -> None:
    gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments, workspace=workspace)


def _copy(stream: int, to: int, source: int, size: int) -> None:
    runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, stream)


def _zeros(stream: int, at: int, size: int) -> None:
    runtime.memsetAsync(at, 0, size, stream)
