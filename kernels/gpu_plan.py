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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from . import launch_config as config
from .blocks import Array, Gradients, Problem, Solution
from .cublas import gemm_ex
from .gpu_queue import Queue
from .tensor_map import SIZE, tensor_map

# Addresses and a scale that stand for those of a call. As numbers they are signalling NaNs: nothing
# else that a kernel gets looks like them, and arithmetic with the scale would show
PLACES, PLACE = 256, 1 << 40  # of so many arrays, and so many bytes apart
FIRST = 0x7FF5 << 48
SCALE_BITS = 0x7FF6 << 48
(SCALE,) = struct.unpack("=d", struct.pack("=Q", SCALE_BITS))
ALIGNMENT = 256  # of arrays that a call makes
MOST_PLANS = 128

Build = Callable[[Problem, "Gradients | None", Queue], Solution]


def pays(problem: Problem, gradients: Gradients | None) -> bool:
    """Whether a call is one of a kind that has a plan: few blocks, and no steps but kernels,
    products and copies."""
    m, n, _ = problem.shape
    return (
        m * n <= problem.workspace
        and problem.positives is None
        and (m == n or gradients is None or not gradients.want_key)
        and not (problem.ranks or problem.progress or problem.part)
        and (gradients is None or (gradients.dots is None and not gradients.add_query))
        and all(
            step % array.dtype.itemsize == 0
            for array in (problem.query, problem.key)
            for step in array.strides
        )
    )


def solve(
    problem: Problem, gradients: Gradients | None, properties: config.Device, build: Build
) -> Solution:
    """What `build` would find, by the plan for problems like this one."""
    given = _given(problem, gradients)
    key = (
        runtime.getDevice(), properties, config.PORTABLE,
        *(None if z is None else (z.shape, z.strides, z.dtype, z.data.ptr % 16) for z in given),
        _number(problem.bias), _number(problem.upstream), problem.row_share, problem.row_weight,
        problem.column_weight, problem.symmetric, problem.normalize, problem.compute,
        problem.workspace,
        gradients is not None and (gradients.want_query, gradients.want_key),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(problem, gradients, given, build)
    return plan.run(given, _number(problem.scale))


_plans: dict[tuple[Any, ...], Plan] = {}


def forget() -> None:
    """All plans."""
    _plans.clear()


def _number(value: Any) -> float | None:
    """What is no array and not left out."""
    return None if value is None or isinstance(value, cupy.ndarray) else float(value)


def _array(value: Any) -> Array | None:
    return value.astype(np.float64, copy=False) if isinstance(value, cupy.ndarray) else None


def _given(problem: Problem, gradients: Gradients | None) -> list[Array | None]:
    """The arrays that a call brings."""
    return [
        problem.query,
        None if problem.symmetric else problem.key,
        _array(problem.scale),
        _array(problem.bias),
        _array(problem.upstream),
        problem.query_ids,
        problem.key_ids,
        None if gradients is None else gradients.query,
        None if gradients is None else gradients.key,
    ]


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


def _product(stream: int, *arguments: int) -> None:
    gemm_ex(cupy.cuda.device.get_cublas_handle(), *arguments)


def _copy(stream: int, to: int, source: int, size: int) -> None:
    runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, stream)


def _zeros(stream: int, at: int, size: int) -> None:
    runtime.memsetAsync(at, 0, size, stream)


class Plan(Queue):
    """Launches, products and copies in their order, for arrays to come."""

    def __init__(
        self, problem: Problem, gradients: Gradients | None, given: Sequence[Array | None],
        build: Build,
    ) -> None:  # fmt: skip
        self.sizes: list[int] = []  # of arrays by place; those given first
        self.steps: list[_Launch | _Step] = []
        self._words: list[int] = []  # parameters of all launches
        self._parameters: list[int] = []  # where each begins, in bytes
        self._maps: list[tuple[int, _Map]] = []  # and where they go among the words
        self._numbers: list[int] = []  # arguments of all other steps

        query, key, scale, bias, upstream, query_ids, key_ids, dq, dk = map(self._stand_in, given)
        if gradients is not None:
            gradients = replace(gradients, query=dq, key=dk)
        problem = replace(
            problem, query=query, key=query if key is None else key,
            scale=SCALE if scale is None else scale, bias=problem.bias if bias is None else bias,
            upstream=problem.upstream if upstream is None else upstream,
            query_ids=query_ids, key_ids=key_ids,
        )  # fmt: skip
        with cupy.cuda.using_allocator(self._malloc):
            solution = build(problem, gradients, self)

        # results have memory of their own each, all else goes in one piece
        found = {
            name: getattr(solution, name)
            for name in ("losses", "row_lse", "column_lse", "loss", "scale_grad", "bias_grad")
        }
        if found["loss"] is not None:
            del found["losses"]
        self.results = {name: self._view(z) for name, z in found.items() if z is not None}
        self.kept = sorted({view.place for view in self.results.values()})
        self.temporary: list[tuple[int, int]] = []
        self.size = 0
        for place in range(len(given), len(self.sizes)):
            if place not in self.kept:
                self.temporary.append((place, self.size))
                self.size += -(-self.sizes[place] // ALIGNMENT) * ALIGNMENT

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
        stand_ins = [int(word) for word in words[self.at]]
        self.places = np.array([_place(a) for a in stand_ins], np.int64)
        self.offsets = np.array([_offset(a) for a in stand_ins], np.int64).view(np.uint64)
        self.scales = np.flatnonzero(words == SCALE_BITS)
        del self._words, self._parameters, self._maps, self._numbers

    # -- what the folds see

    def _stand_in(self, array: Array | None) -> Array | None:
        """An array like this one in another place."""
        if array is None:
            self.sizes.append(0)
            return None
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

    def run(self, given: Sequence[Array | None], scale: float | None) -> Solution:
        starts = [0 if z is None else z.data.ptr - z.data.ptr % 16 for z in given]
        starts += [0] * (len(self.sizes) - len(given))
        memory = cupy.empty(self.size, np.uint8).data
        for place, offset in self.temporary:
            starts[place] = memory.ptr + offset
        kept = {}
        for place in self.kept:
            kept[place] = cupy.empty(self.sizes[place], np.uint8).data
            starts[place] = kept[place].ptr

        words = self.words.copy()
        words[self.at] = np.array(starts, np.uint64)[self.places] + self.offsets
        if scale is not None:
            words[self.scales] = _bits(scale)
        numbers = words[self.first_number :].view(np.int64).tolist()
        for at, number, form in self.maps:
            words[at : at + SIZE // 8] = tensor_map(numbers[number], *form).view(np.uint64)
        parameters = self.parameters + words.__array_interface__["data"][0]
        first = parameters.__array_interface__["data"][0]
        stream = cupy.cuda.get_current_stream().ptr
        for step in self.steps:
            if isinstance(step, _Launch):
                driver.launchKernel(
                    step.function, step.grid, 1, 1, step.block, 1, 1, step.shared, stream,
                    first + 8 * step.first, 0,
                )  # fmt: skip
            else:
                step.do(stream, *numbers[step.numbers])
        results = {
            name: cupy.ndarray(v.shape, v.dtype, kept[v.place] + v.offset, v.strides)
            for name, v in self.results.items()
        }
        return Solution(results.pop("losses", None), **results)


def _bits(number: float) -> int:
    (bits,) = struct.unpack("=Q", struct.pack("=d", number))
    return int(bits)


def _place(address: int) -> int:
    return (address - FIRST) // PLACE


def _offset(address: int) -> int:
    return (address - FIRST) % PLACE - PLACE // 2
