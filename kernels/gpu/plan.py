"""What a call asks of the GPU, worked out once for all calls of its kind.

Which kernels run, in what order, on which parts of which arrays depends on shapes, dtypes and
options, not on what arrays hold. So the folds are visited once for arrays at addresses that no
memory has: what they would launch is written down, and every call of the same kind launches that
with the addresses of its own arrays. Nothing else is kept from call to call, no memory of the
device above all. It pays where Python would take longer than the device, for batches of some
thousand rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..problem import Array, Gradients, Poison, Problem, Sigmoid, SoftmaxGradient, Statistics, Sums
from .config import launch as config
from .device.cublas import gemm_ex
from .device.launches import Queue
from .device.tensor_map import SIZE, tensor_map

# Addresses and a scale that stand for those of a call. As numbers they are signalling NaNs: nothing
# else that a kernel gets looks like them, and arithmetic with the scale would show
PLACES, PLACE = 256, 1 << 40  # of so many arrays, and so many bytes apart
FIRST = 0x7FF5 << 48
SCALE_BITS = 0x7FF6 << 48
(SCALE,) = struct.unpack("=d", struct.pack("=Q", SCALE_BITS))
ALIGNMENT = 256  # of arrays that a call makes
LARGE = 2**20  # bytes: such arrays have memory of their own, which pools find again
MOST_PLANS = 128
MOST_ARGUMENTS = 16  # of one plan, about arrays at so many sets of addresses
HOLD_ARRAYS = frozenset({Problem, Gradients, Statistics, SoftmaxGradient, Sigmoid, Sums, Poison})
# what is never an array, told by its type as the classes of `blocks` spell it
PLAIN = frozenset({"bool", "float", "int", "str", "float | None"})

# Takes what a call is about, a Problem, Gradients, an epilogue, and who is told what to do
Build = Callable[..., dict[str, "Array | None"]]


def pays(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether a call is one of a kind that has a plan: few blocks, and no steps but kernels,
    products and copies."""
    m, n, _ = problem.shape
    # else the queries of each key are looked for
    known = problem.square or problem.apart or gradients is None or not gradients.want_key
    return (
        m * n <= problem.workspace
        and known
        and not (problem.ranks or problem.progress)
        and all(
            step % array.dtype.itemsize == 0
            for array in (problem.query, problem.key)
            for step in array.strides
        )
    )


def call(build: Build, device: config.Device, *parts: Any) -> dict[str, Array]:
    """What `build` returns, by the plan for parts like these."""
    arrays: list[Array] = []
    scales: list[float] = []
    like = tuple(_describe(part, arrays, scales) for part in parts)
    key = runtime.getDevice(), device, config.PORTABLE, build, like
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(build, parts, arrays)
    return plan.run(arrays, scales)


_plans: dict[tuple[Any, ...], Plan] = {}


def forget() -> None:
    """All plans."""
    _plans.clear()


def _describe(part: Any, arrays: list[Array], scales: list[float]) -> Any:
    """What plans depend on. Arrays are gathered, and numbers that they do not depend on."""
    cls = part.__class__
    if isinstance(part, cupy.ndarray):
        arrays.append(part)
        return part.shape, part.strides, part.dtype, part.data.ptr % 16
    if cls not in HOLD_ARRAYS:
        return part
    plain, names = _fields(cls)
    values = part.__dict__
    found = [cls, plain and plain(part)]
    for name in names:
        value = values[name]
        if value is None:
            found.append(None)
        elif name == "scale" and not isinstance(value, cupy.ndarray):
            scales.append(float(value))
        else:
            found.append(_describe(value, arrays, scales))
    return tuple(found)


@cache
def _fields(cls: Any) -> tuple[Any, list[str]]:
    """What gets the fields of a part that are no arrays, and the names of those that may be."""
    plain = [f.name for f in fields(cls) if f.type in PLAIN]
    names = [f.name for f in fields(cls) if f.type not in PLAIN]
    return attrgetter(*plain) if plain else None, names


def _with(part: Any, arrays: Iterator[Array]) -> Any:
    """The same part about other arrays and no scale."""
    if isinstance(part, cupy.ndarray):
        return next(arrays)
    if part.__class__ not in HOLD_ARRAYS:
        return part
    part = copy(part)
    for name in _fields(part.__class__)[1]:  # in the order in which they are described
        value = getattr(part, name)
        scale = name == "scale" and not isinstance(value, cupy.ndarray)
        setattr(part, name, SCALE if scale else _with(value, arrays))
    return part


@dataclass
class _Launch:
    function: int
    grid: int
    block: int
    shared: int
    first: int  # of its parameters


@dataclass
class _Step:
    """What is no kernel: a product, a copy, zeros."""

    do: Callable[..., None]
    numbers: slice  # its arguments


@dataclass
class _Map:
    """A description of a matrix at an address that is not known yet."""

    data: int
    form: tuple[Any, ...]


@dataclass
class _View:
    """A result in memory that a call makes."""

    place: int
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]


@dataclass
class _Arguments:
    """Of all steps, for arrays at some addresses, on one stream. Nobody writes them again."""

    calls: list[tuple[Callable[..., None], tuple[int, ...]]]
    memory: Any  # that the launches' parameters are in


def _product(stream: int, *arguments: int) -> None:
    gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments)


def _copy(stream: int, to: int, source: int, size: int) -> None:
    runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, stream)


def _zeros(stream: int, at: int, size: int) -> None:
    runtime.memsetAsync(at, 0, size, stream)


class Plan(Queue):
    """Launches, products and copies in their order, for arrays to come."""

    def __init__(self, build: Build, parts: Sequence[Any], given: Sequence[Array]) -> None:
        self.sizes: list[int] = []  # of arrays by place; those given first
        self.steps: list[_Launch | _Step] = []
        self._words: list[int] = []  # parameters of all launches
        self._parameters: list[int] = []  # where each begins, in bytes
        self._maps: list[tuple[int, _Map]] = []  # and where they go among the words
        self._numbers: list[int] = []  # arguments of all other steps

        stand_ins = iter([self._stand_in(array) for array in given])
        with cupy.cuda.using_allocator(self._malloc):
            found = build(*(_with(part, stand_ins) for part in parts), self)

        # results have memory of their own each, so that none keeps another's; small arrays share
        self.results = {name: self._view(z) for name, z in found.items() if z is not None}
        kept = {view.place for view in self.results.values()}
        self.alone: list[tuple[int, int]] = []
        self.together: list[tuple[int, int]] = []
        self.size = 0
        for place in range(len(given), len(self.sizes)):
            size = self.sizes[place]
            if place in kept or size >= LARGE:
                self.alone.append((place, size))
            else:
                self.together.append((place, self.size))
                self.size += -(-size // ALIGNMENT) * ALIGNMENT

        # where descriptions go, which number tells where the matrix is, and its form
        self.maps = [
            (at, len(self._numbers) + i, described.form)
            for i, (at, described) in enumerate(self._maps)
        ]
        numbers = [*self._numbers, *(described.data for _, described in self._maps)]
        words = np.array(self._words, np.uint64)
        self.first_number = len(words)
        self.words = words = np.concatenate([words, np.array(numbers, np.int64).view(np.uint64)])
        self.parameters = np.array(self._parameters, np.int64)
        self.at = np.flatnonzero((words >= FIRST) & (words < FIRST + PLACES * PLACE))
        addresses = [int(word) for word in words[self.at]]
        self.places = np.array([_place(a) for a in addresses], np.int64)
        self.offsets = np.array([_offset(a) for a in addresses], np.int64).view(np.uint64)
        self.scales = np.flatnonzero(words == SCALE_BITS)
        del self._words, self._parameters, self._maps, self._numbers
        # in a loop, memory mostly comes again; in a ring, that of some buffers in turn
        self.known: dict[tuple[Any, ...], _Arguments] = {}

    # -- what the folds see

    def _stand_in(self, array: Array) -> Array:
        """An array like this one in another place."""
        memory = self._malloc(PLACE // 2).mem
        pointer = cupy.cuda.MemoryPointer(memory, array.data.ptr % 16)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    def _malloc(self, size: int) -> Any:
        place = len(self.sizes)
        assert place < PLACES
        self.sizes.append(size)
        start = FIRST + place * PLACE + PLACE // 2  # strides may be negative
        memory = cupy.cuda.UnownedMemory(start, size, None, runtime.getDevice())
        return cupy.cuda.MemoryPointer(memory, 0)

    def _view(self, array: Array) -> _View:
        at = array.data.ptr
        return _View(_place(at), _offset(at), array.shape, array.dtype, array.strides)

    def kernel(self, function: Any) -> Any:
        def launch(
            grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], shared_mem: int = 0
        ) -> None:
            first = len(self._parameters)
            for argument in arguments:
                self._parameters.append(8 * len(self._words))
                self._words += self._as_words(argument)
            self.steps.append(_Launch(function.ptr, grid[0], block[0], shared_mem, first))

        return launch

    def _as_words(self, argument: Any) -> Sequence[int]:
        if isinstance(argument, _Map):
            self._maps.append((len(self._words), argument))
            return [0] * (SIZE // 8)
        if isinstance(argument, cupy.ndarray):
            return [argument.data.ptr]
        if isinstance(argument, float):
            return [_bits(argument)]
        if isinstance(argument, int):
            return struct.unpack("=Q", struct.pack("=q", argument))
        raw = argument.tobytes()  # a structure
        return struct.unpack(f"={len(raw) // 8}Q", raw)

    def _step(self, do: Callable[..., None], *numbers: int) -> None:
        first = len(self._numbers)
        self._numbers += numbers
        self.steps.append(_Step(do, slice(first, len(self._numbers))))

    def tensor_map(self, data: int, *form: Any) -> Any:
        return _Map(data, form)

    def gemm(self, *arguments: int) -> None:
        self._step(_product, *arguments)

    def copy(self, to: Any, source: Any, size: int) -> None:
        self._step(_copy, to.ptr, source.ptr, size)

    def zeros(self, n: int, dtype: Any) -> Array:
        array = cupy.empty(n, dtype)
        self._step(_zeros, array.data.ptr, array.nbytes)
        return array

    # -- a call

    def run(self, given: Sequence[Array], scales: Sequence[float]) -> dict[str, Array]:
        starts = []
        for array in given:
            start = array.data.ptr
            starts.append(start - start % 16)
        starts += [0] * (len(self.sizes) - len(given))
        malloc = cupy.cuda.alloc
        memory = malloc(self.size)  # held until all is queued
        start = memory.ptr
        for place, offset in self.together:
            starts[place] = start + offset
        alone = {}
        for place, size in self.alone:
            alone[place] = malloc(size)
            starts[place] = alone[place].ptr

        stream = cupy.cuda.get_current_stream().ptr
        key = stream, *starts, *scales
        arguments = self.known.get(key)
        if arguments is None:
            if len(self.known) >= MOST_ARGUMENTS:
                self.known.clear()
            arguments = self.known[key] = self._arguments(starts, scales, stream)
        for do, numbers in arguments.calls:
            do(*numbers)
        return {
            name: cupy.ndarray(v.shape, v.dtype, alone[v.place] + v.offset, v.strides)
            for name, v in self.results.items()
        }

    def _arguments(self, starts: list[int], scales: Sequence[float], stream: int) -> _Arguments:
        words = self.words.copy()
        words[self.at] = np.array(starts, np.uint64)[self.places] + self.offsets
        for scale in scales:
            words[self.scales] = _bits(scale)
        numbers = words[self.first_number :].view(np.int64).tolist()
        for at, number, form in self.maps:
            words[at : at + SIZE // 8] = tensor_map(numbers[number], *form).view(np.uint64)
        parameters = self.parameters + words.__array_interface__["data"][0]
        first = parameters.__array_interface__["data"][0]
        calls: list[Any] = []
        for step in self.steps:
            if isinstance(step, _Launch):
                shape = step.grid, 1, 1, step.block, 1, 1, step.shared
                at = first + 8 * step.first
                calls.append((driver.launchKernel, (step.function, *shape, stream, at, 0)))
            else:
                calls.append((step.do, (stream, *numbers[step.numbers])))
        return _Arguments(calls, (words, parameters))


def _bits(number: float) -> int:
    (bits,) = struct.unpack("=Q", struct.pack("=d", number))
    return int(bits)


def _place(address: int) -> int:
    return (address - FIRST) // PLACE


def _offset(address: int) -> int:
    return (address - FIRST) % PLACE - PLACE // 2
