"""The recorder of a plan: the steps of a call, with placeholders for addresses and numbers.

While a call is recorded, its arrays have placeholder addresses, and numbers that may change are
`Placeholder`s. The signatures of kernels tell which words of their parameters are pointers. The
recording lists the words of pointers, and the words of numbers (`Words`). A later call replaces
such a word by an address in one of its own arrays, or by one of its own numbers (../plan.py).
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

# Array number i of a call has the placeholder address FIRST + SPACING * (i + 1/2), in bytes. No
# real memory has such an address
MAX_ARRAYS, SPACING = 256, 1 << 40
FIRST = 0x7FF5 << 48
# Kernels, and so plans, may depend on the address of a caller's array modulo ADDRESS_MODULUS
ADDRESS_MODULUS = 16  # bytes
# With more steps, a call takes longer on the device than Python takes to launch them
MAX_STEPS = 256
PLAIN = {bool, float, int, str, NoneType}  # types of fields that cannot hold an array
GEMM_POINTERS = (0, 7, 10, 14)  # workspace, A, B and C among the arguments of `_gemm`


class TooLong(Exception):
    """A call has more steps, or more arrays, than a recording may have."""


class Placeholder(float):
    """A number of a call, such as the scale, whose value is not known while it is recorded."""

    index: int  # among the numbers of the call, in the order of `describe`

    def __new__(cls, index: int) -> Placeholder:
        # NaN: if a recording computed with this number, the results of all calls would be NaN
        number = super().__new__(cls, float("nan"))
        number.index = index
        return number


@dataclass(frozen=True)
class Pointer:
    """An address in an array of a call."""

    array: int  # the number of the array
    offset: int  # bytes


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel."""

    function: Callable[[], Any]  # waits for the compiler, and returns the kernel
    grid: int  # thread blocks
    block: int  # threads of a block
    shared: int  # bytes of dynamic shared memory
    first: int  # index of the kernel's first parameter in `Recorder.parameters`


@dataclass(frozen=True)
class Step:
    """A step that launches no kernel of this library: a product of cuBLAS, a copy, or zeros."""

    do: Callable[..., None]  # called with the stream and the arguments
    arguments: slice  # the words in `Recorder.other_arguments`
    capturable: bool  # whether the step may be part of a CUDA graph


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of data at a placeholder address."""

    data: int
    form: tuple[Any, ...]  # the other arguments of `tensor_map.tensor_map`


@dataclass
class Words:
    """8-byte words, and the positions of the words that each call replaces."""

    values: list[int] = field(default_factory=list)
    pointers: list[tuple[int, Pointer]] = field(default_factory=list)  # (position, address)
    numbers: list[tuple[int, int]] = field(default_factory=list)  # (position, `Placeholder.index`)

    def add(self, word: int) -> None:
        """Add a word that is the same in each call."""
        self.values.append(word)

    def add_pointer(self, address: int) -> None:
        """Add a placeholder address, which each call replaces, or 0, which stays."""
        if address:
            self.pointers.append((len(self.values), resolve_placeholder(address)))
        self.values.append(0)

    def add_number(self, value: float) -> None:
        """Add a float64 number, which each call replaces if it is a `Placeholder`."""
        if isinstance(value, Placeholder):
            self.numbers.append((len(self.values), value.index))
        self.values.append(bits(value))


class Recorder(Queue):
    """A queue that records the operations of a call instead of running them.

    `graphs`: the plan may become CUDA graphs, so its products need a workspace for cuBLAS.
    """

    def __init__(self, graphs: bool = False) -> None:
        self.graphs = graphs
        self.sizes: list[int] = []  # bytes of each array of the call
        self.scratch_memory: Any = None  # of `scratch`, once it is called
        # workspace of cuBLAS, if `graphs`; each call gets it from `cublas.workspace`
        self.product_memory: Any = None
        # functions that wait for the compiler, one for each file and its -D options
        self.compiling: list[Callable[[], Any]] = []
        self.steps: list[Launch | Step] = []
        self.words = Words()  # parameters of all launches
        self.parameters: list[int] = []  # byte offset of each parameter in `words`
        self.other_arguments = Words()  # arguments of `Step`s, and addresses of tensor maps' data
        # tensor maps: (position in `words`, position of the address in `other_arguments`, form)
        self.maps: list[tuple[int, int, tuple[Any, ...]]] = []

    # -- arrays at placeholder addresses

    def malloc(self, size: int) -> Any:
        """Placeholder memory for a new array: CuPy's allocator while a call is recorded."""
        if len(self.sizes) == MAX_ARRAYS:
            raise TooLong
        # in the middle of SPACING bytes, because negative strides lead to addresses before `start`
        start = FIRST + len(self.sizes) * SPACING + SPACING // 2
        self.sizes.append(size)
        memory = cupy.cuda.UnownedMemory(start, size, None, runtime.getDevice())
        return cupy.cuda.MemoryPointer(memory, 0)

    def stand_in(self, array: Array) -> Array:
        """An array like `array`, a caller's, at a placeholder address: the call's next array.

        The placeholder address equals the address of `array` modulo `ADDRESS_MODULUS`. So recorded
        offsets contain this remainder, and `Plan._starts` leaves it off.
        """
        memory = self.malloc(SPACING // 2).mem
        pointer = cupy.cuda.MemoryPointer(memory, array.data.ptr % ADDRESS_MODULUS)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    # -- the operations of `Queue`, recorded

    def function(self, device: Any, file: str, name: str, shared: int, **defines: Any) -> Any:
        """A function that waits for the kernel, which another thread compiles meanwhile."""
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
        """Add the words of a field of a launch, whose type is `letter`."""
        if letter == POINTER:
            self.words.add_pointer(value)
        elif isinstance(value, float):
            self.words.add_number(value)
        elif letter != TENSOR_MAP:
            self.words.add(value & (2**64 - 1))  # negative integers in two's complement
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
        if self.scratch_memory is None:
            self.scratch_memory = self.malloc(0)
        index = resolve_placeholder(self.scratch_memory.ptr).array
        self.sizes[index] = max(self.sizes[index], size)
        return cupy.ndarray(size, np.uint8, self.scratch_memory)

    def do(self, function: Callable[..., None], *pointers: int, capturable: bool = False) -> None:
        self._step(function, pointers, tuple(range(len(pointers))), capturable)

    def _step(
        self, do: Callable[..., None], arguments: tuple[int, ...], pointers: tuple[int, ...],
        capturable: bool = True,
    ) -> None:  # fmt: skip
        """Record a `Step`. `pointers` are the indices of the arguments that are addresses."""
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


# --- inputs of a call: dataclasses with arrays ----------------------------------------------------


def describe(part: Any, arrays: list[Array], numbers: list[float]) -> Any:
    """The properties of `part`, an input of a call, on which a plan depends: part of its key.

    A plan depends on the shapes, strides and dtypes of the arrays in `part`, on their addresses
    modulo `ADDRESS_MODULUS`, and on all fields that cannot hold an array. No plan depends on the
    value of a float in a field that may hold an array, such as `scale`. The arrays are added to
    `arrays`, and these floats to `numbers`.
    """
    if isinstance(part, cupy.ndarray):
        arrays.append(part)
        return part.shape, part.strides, part.dtype, part.data.ptr % ADDRESS_MODULUS
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
    """For a dataclass: a getter of its `PLAIN` fields, and the names of its other fields.

    The getter takes the `__dict__` of an instance; None: there are no plain fields. Returns None
    for other classes.
    """
    if not is_dataclass(cls):
        return None
    hints = get_type_hints(cls)
    # A plain field has a type of `PLAIN`, or a union of such types (`float | None`). `get_args`
    # returns the members of a union, and nothing for a type such as `float`
    plain = [
        f.name for f in fields(cls) if {*(get_args(hints[f.name]) or [hints[f.name]])} <= PLAIN
    ]
    others = [f.name for f in fields(cls) if f.name not in plain]
    return itemgetter(*plain) if plain else None, others


def insert_placeholders(part: Any, arrays: Iterator[Array], numbers: Iterator[Placeholder]) -> Any:
    """A copy of `part` for a recording: with other arrays and numbers, in `describe`'s order."""
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
    """The array and offset of a placeholder address. A ValueError if it is a real address."""
    array, offset = divmod(address - FIRST, SPACING)
    if not 0 <= array < MAX_ARRAYS:
        raise ValueError(f"expected an address in one of the call's arrays, got {address:#x}")
    return Pointer(array, offset - SPACING // 2)


def bits(number: float) -> int:
    """The bits of a float64 number as an integer."""
    (word,) = struct.unpack("=Q", struct.pack("=d", number))
    return int(word)


def _gemm(stream: int, workspace: int, *arguments: int) -> None:
    gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments, workspace=workspace)


def _copy(stream: int, to: int, source: int, size: int) -> None:
    runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, stream)


def _zeros(stream: int, at: int, size: int) -> None:
    runtime.memsetAsync(at, 0, size, stream)
