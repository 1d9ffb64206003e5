"""The recorder of a plan: the launches of a call, with placeholders for addresses and numbers.

While a call is recorded, its arrays have placeholder addresses, and numbers that may change are
`Placeholder`s. The signatures of kernels tell which words of their parameters are pointers. The
recording lists these words, and the words of numbers (`Words`). A later call replaces such a word
by an address in one of its own arrays, or by one of its own numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from operator import itemgetter
from types import NoneType
from typing import Any, get_args, get_type_hints

import cupy
import numpy as np
from cupy.cuda import runtime

from ...problem import Array
from . import compiler
from .cublas import gemm_ex
from .launches import Queue
from .signatures import POINTER, TENSOR_MAP, Signature
from .tensor_map import SIZE

# The placeholder address of an array, which is no address of real memory, is
# FIRST + SPACING * (array + 1/2)
MAX_ARRAYS, SPACING = 256, 1 << 40
FIRST = 0x7FF5 << 48
MAX_STEPS = 256  # a call with more steps takes longer on the device than its launches in Python
PLAIN = {bool, float, int, str, NoneType}  # types of fields that cannot hold an array
GEMM_POINTERS = (0, 7, 10, 14)  # workspace, A, B and C among the arguments of `_gemm`


class TooLong(Exception):
    """A call has more steps, or more arrays, than a recording may have."""


class Placeholder(float):
    """Number `index` of a call, whose value is not known yet."""

    index: int

    def __new__(cls, index: int) -> Placeholder:
        number = super().__new__(cls, float("nan"))  # results of arithmetic with it are NaN, too
        number.index = index
        return number


@dataclass(frozen=True)
class Pointer:
    """A byte offset in array `array` of a call."""

    array: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel."""

    function: Callable[[], Any]  # waits for the compiler, and returns the kernel
    grid: int  # thread blocks
    block: int  # threads of a block
    shared: int  # bytes of dynamic shared memory
    first: int  # index of the first parameter in `Recorder.parameters`


@dataclass(frozen=True)
class Step:
    """A step that launches no kernel of this library: a product of cuBLAS, a copy, or zeros."""

    do: Callable[..., None]  # called with the stream and the arguments
    arguments: slice  # the words in `Recorder.other_arguments`
    capturable: bool  # whether the step may be part of a CUDA graph


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of data at an address that is not known yet."""

    data: int
    form: tuple[Any, ...]


@dataclass
class Words:
    """8-byte words, and the positions of the words that each call replaces."""

    values: list[int] = field(default_factory=list)
    pointers: list[tuple[int, Pointer]] = field(default_factory=list)  # (position, address)
    numbers: list[tuple[int, int]] = field(default_factory=list)  # (position, number of the call)

    def add(self, word: int) -> None:
        self.values.append(word)

    def add_pointer(self, address: int) -> None:
        if address:
            self.pointers.append((len(self.values), resolve_placeholder(address)))
        self.values.append(0)

    def add_number(self, value: float) -> None:
        if isinstance(value, Placeholder):
            self.numbers.append((len(self.values), value.index))
        self.values.append(bits(value))


class Recorder(Queue):
    """A queue that records the operations of a call instead of running them.

    `graphs`: the plan may become CUDA graphs, so that cuBLAS needs a workspace of its own.
    """

    def __init__(self, graphs: bool = False) -> None:
        self.graphs = graphs
        self.sizes: list[int] = []  # bytes of each array of the call
        self.shared: Any = None  # memory of `scratch`
        self.product_memory: Any = None  # workspace of cuBLAS, which the call does not allocate
        # functions that wait for the compiler, one for each file and its -D options
        self.compiling: list[Callable[[], Any]] = []
        self.steps: list[Launch | Step] = []
        self.words = Words()  # parameters of all launches
        self.parameters: list[int] = []  # byte offset of each parameter in `words`
        self.other_arguments = Words()  # arguments of `Step`s, and addresses of tensor maps
        self.maps: list[tuple[int, int, tuple[Any, ...]]] = []  # (word, argument, form)

    # -- arrays at placeholder addresses

    def malloc(self, size: int) -> Any:
        """Placeholder memory for a new array, in the form of an allocator of CuPy."""
        if len(self.sizes) == MAX_ARRAYS:
            raise TooLong
        start = FIRST + len(self.sizes) * SPACING + SPACING // 2  # strides may be negative
        self.sizes.append(size)
        memory = cupy.cuda.UnownedMemory(start, size, None, runtime.getDevice())
        return cupy.cuda.MemoryPointer(memory, 0)

    def stand_in(self, array: Array) -> Array:
        """An array like `array` at a placeholder address, as the next array of the call."""
        memory = self.malloc(SPACING // 2).mem
        pointer = cupy.cuda.MemoryPointer(memory, array.data.ptr % 16)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    # -- what is recorded

    def function(self, device: Any, file: str, name: str, shared: int, **defines: Any) -> Any:
        """A function that waits for the kernel. The compiler runs while the call is recorded."""
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
            self.maps.append((len(self.words.values), len(self.other_arguments.values), value.form))
            self.other_arguments.add_pointer(value.data)
            self.words.values += [0] * (SIZE // 8)
        else:  # a tensor map of data at a real address
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

    def zeroed_array(self, n: int, dtype: Any) -> Array:
        array = cupy.empty(n, dtype)
        self.clear(array.data, array.nbytes)
        return array

    def clear(self, at: Any, size: int) -> None:
        self._step(_zeros, (at.ptr, size), (0,))

    def scratch(self, size: int) -> Array:
        """The workspace. All blocks of a call share it, because they run one after another."""
        if self.shared is None:
            self.shared = self.malloc(0)
        index = resolve_placeholder(self.shared.ptr).array
        self.sizes[index] = max(self.sizes[index], size)
        return cupy.ndarray(size, np.uint8, self.shared)

    def do(self, function: Callable[..., None], *pointers: int, capturable: bool = False) -> None:
        self._step(function, pointers, tuple(range(len(pointers))), capturable)

    def _step(
        self, do: Callable[..., None], arguments: tuple[int, ...], pointers: tuple[int, ...],
        capturable: bool = True,
    ) -> None:  # fmt: skip
        first = len(self.other_arguments.values)
        for i, argument in enumerate(arguments):
            if i in pointers:
                self.other_arguments.add_pointer(argument)
            else:
                self.other_arguments.add(argument & (2**64 - 1))
        self._append(Step(do, slice(first, len(self.other_arguments.values)), capturable))

    def _append(self, step: Launch | Step) -> None:
        if len(self.steps) == MAX_STEPS:
            raise TooLong
        self.steps.append(step)


# --- inputs of a call: dataclasses with arrays  -----------------------------------------------


def describe(part: Any, arrays: list[Array], numbers: list[float]) -> Any:
    """The properties of `part` on which a plan depends.

    Arrays are added to `arrays`. Floats in fields that may hold an array, such as `scale`, are
    added to `numbers`: no plan depends on their values.
    """
    if isinstance(part, cupy.ndarray):
        arrays.append(part)
        return part.shape, part.strides, part.dtype, part.data.ptr % 16
    cls = part.__class__
    field_names = _fields(cls)
    if field_names is None:
        return part
    get_plain, names = field_names
    values = part.__dict__
    description = [cls, get_plain and get_plain(values)]
    for name in names:
        value = values[name]
        if value is None:
            continue
        description.append(name)
        if isinstance(value, float):
            numbers.append(value)
            description.append(float)
        else:
            description.append(describe(value, arrays, numbers))
    return tuple(description)


@cache
def _fields(cls: Any) -> tuple[Any, list[str]] | None:
    """For a dataclass: a getter of its plain fields, and the names of the others; else None.

    The getter reads the fields of an instance from the dictionary of the instance.
    """
    if not is_dataclass(cls):
        return None
    hints = get_type_hints(cls)
    plain = [
        f.name for f in fields(cls) if {*(get_args(hints[f.name]) or [hints[f.name]])} <= PLAIN
    ]
    others = [f.name for f in fields(cls) if f.name not in plain]
    return itemgetter(*plain) if plain else None, others


def insert_placeholders(part: Any, arrays: Iterator[Array], numbers: Iterator[Placeholder]) -> Any:
    """A copy of `part` with other arrays and numbers, in the order of `describe`."""
    if isinstance(part, cupy.ndarray):
        return next(arrays)
    field_names = _fields(part.__class__)
    if field_names is None:
        return part
    part = copy(part)
    for name in field_names[1]:
        value = getattr(part, name)
        number = isinstance(value, float)
        new = next(numbers) if number else insert_placeholders(value, arrays, numbers)
        setattr(part, name, new)
    return part


# --- words and steps ------------------------------------------------------------------------------


def resolve_placeholder(address: int) -> Pointer:
    """The array and offset for which a placeholder address stands."""
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
