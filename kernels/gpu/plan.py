"""What a call asks of the GPU, worked out once for all calls of its kind.

Which kernels run, in what order, on which parts of which arrays depends on shapes, dtypes and
options, not on what arrays hold. So a call is recorded once, with placeholders for the addresses of
its arrays and for its numbers (device/recorder.py), and every call of the same kind replays the
recording with its own. Where calls come at the same addresses with the same numbers again, as in a
training loop, their steps may be captured in CUDA graphs: a launch in the place of many. Of
the device's memory, only that of graphs and of their products stays from call to call. A plan pays
where Python would take longer than the device, for batches of some thousand rows: a call of many
steps (recorder.MAX_STEPS) is not recorded.

The arguments of a call are dataclasses that hold arrays. A plan depends on the arrays' shapes,
strides and dtypes and on fields that cannot hold an array; a number in a field that can (a scale,
say) varies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain, count, groupby
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, get_args, get_type_hints
from weakref import WeakValueDictionary

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..problem import Array, Progress
from .config import precision
from .device.cublas import workspace
from .device.launcher import device_properties
from .device.launches import Queue
from .device.recorder import Launch, Placeholder, Pointer, Recorder, TooLong, placeholder_of
from .device.streams import capture_under_way, identity, note_capture
from .device.tensor_map import SIZE, tensor_map

ALIGNMENT = 256  # of arrays that a call makes
LARGE = 2**20  # bytes: such arrays have memory of their own, which pools find again
MAX_PLANS = 128
MAX_ARGUMENTS = 32  # of one plan: sets of addresses and numbers whose arguments it keeps
MAX_GRAPH_BYTES = 64 * 2**20  # of the device's memory, for the graphs of all plans
NODE_BYTES = 10 * 2**10  # of it, about, for one launch in a graph
PLAIN = {bool, float, int, str, NoneType}  # types of fields that cannot hold an array

# Takes what a call is about and the queue for its launches; returns the arrays that it makes
Build = Callable[..., dict[str, "Array | None"]]


def call(
    build: Build, *parts: Any, graphs: bool = False, plans: dict[Any, Any] | None = None
) -> dict[str, Array]:
    """What `build(*parts, queue)` returns, by the plan for parts like these, if they have one.
    `graphs`: what is asked for again at the same addresses is captured in CUDA graphs. `plans`:
    where they are stored, if not until `forget`."""
    plans = _plans if plans is None else plans
    arrays: list[Array] = []
    numbers: list[float] = []
    like = tuple(_describe(part, arrays, numbers) for part in parts)
    device = runtime.getDevice()
    key = device, device_properties(device), precision.PORTABLE, build, like
    plan = plans.get(key)
    if plan is None:
        try:
            plan = Plan(build, parts, arrays, graphs)
        except TooLong:
            plan = Queue()
        _store(plans, MAX_PLANS, key, plan)
    if isinstance(plan, Plan):
        return plan.run(arrays, numbers)
    return {name: array for name, array in build(*parts, plan).items() if array is not None}


def compile_kernels(build: Build, progress: Progress | None, *parts: Any) -> None:
    """All kernels that `build(*parts, queue)` launches, side by side."""
    recorder = rehearse(build, *parts)
    for done, kernel in enumerate(recorder.compiling, 1):
        kernel()
        if progress is not None:
            progress("compiling kernels", done, len(recorder.compiling))


def rehearse(build: Build, *parts: Any) -> Recorder:
    """What `build(*parts, queue)` asks for, up to `MAX_STEPS`. Nothing runs."""
    arrays: list[Array] = []
    for part in parts:
        _describe(part, arrays, [])
    recorder = Recorder()
    with suppress(TooLong):
        _record(recorder, build, parts, arrays)
    return recorder


# A queue: for calls that take too long to be recorded
_plans: dict[tuple[Any, ...], Plan | Queue] = {}
_captures = count()  # in the order of which graphs go
_lock = threading.RLock()  # No thread frees a graph, and so ends a capture, while another captures
_owned: WeakValueDictionary[int, OwnedPlans] = WeakValueDictionary()


class OwnedPlans(dict[Any, Any]):
    """Plans that hold an object, which has these: they end with it."""

    def __init__(self) -> None:
        _owned[id(self)] = self

    def clear(self) -> None:
        with _lock:
            super().clear()


def forget() -> None:
    """All plans."""
    with _lock:
        _plans.clear()


def _store(stored: dict[Any, Any], most: int, key: Any, new: Any) -> None:
    """A plan, or the arguments of one, in the place of the oldest. While a capture is under way, no
    graph is freed: those with graphs stay, and `new` is not stored if all have some."""
    with _lock:
        while len(stored) >= most and key not in stored:
            stay = capture_under_way()
            old = (
                k for k, of in stored.items() if not stay or not getattr(of, "graph_bytes", None)
            )
            oldest = next(old, None)
            if oldest is None:
                return
            del stored[oldest]
        stored[key] = new


def _free_graphs(size: int) -> None:
    """The oldest of all plans, until there is room for so many bytes."""
    everyone = chain.from_iterable(of.values() for of in (_plans, *_owned.values()))
    plans = [plan for plan in everyone if isinstance(plan, Plan)]
    captured = [(of.number, plan.known, key) for plan in plans for key, of in plan.known.items()]
    size += sum(plan.graph_bytes for plan in plans)
    for _, known, key in sorted(captured, key=itemgetter(0)):
        if size <= MAX_GRAPH_BYTES:
            break
        if known[key].graph_bytes:
            size -= known.pop(key).graph_bytes


def _describe(part: Any, arrays: list[Array], numbers: list[float]) -> Any:
    """What plans depend on. Arrays and numbers that they do not depend on are collected."""
    if isinstance(part, cupy.ndarray):
        arrays.append(part)
        return part.shape, part.strides, part.dtype, part.data.ptr % 16
    cls = part.__class__
    known = _fields(cls)
    if known is None:
        return part
    plain, names = known
    values = part.__dict__
    found = [cls, plain and plain(part)]
    for name in names:
        value = values[name]
        if value is None:
            found.append(None)
        elif isinstance(value, float):
            numbers.append(value)
            found.append(float)
        else:
            found.append(_describe(value, arrays, numbers))
    return tuple(found)


@cache
def _fields(cls: Any) -> tuple[Any, list[str]] | None:
    """Of a dataclass: what gets its plain fields, and the names of the others."""
    if not is_dataclass(cls):
        return None
    hints = get_type_hints(cls)
    plain = [
        f.name for f in fields(cls) if {*(get_args(hints[f.name]) or [hints[f.name]])} <= PLAIN
    ]
    others = [f.name for f in fields(cls) if f.name not in plain]
    return attrgetter(*plain) if plain else None, others


def _with_placeholders(part: Any, arrays: Iterator[Array], numbers: Iterator[Placeholder]) -> Any:
    """The same part with these arrays and numbers, in the order of `_describe`."""
    if isinstance(part, cupy.ndarray):
        return next(arrays)
    known = _fields(part.__class__)
    if known is None:
        return part
    part = copy(part)
    for name in known[1]:
        value = getattr(part, name)
        number = isinstance(value, float)
        new = next(numbers) if number else _with_placeholders(value, arrays, numbers)
        setattr(part, name, new)
    return part


def _record(
    recorder: Recorder, build: Build, parts: Sequence[Any], given: Sequence[Array]
) -> dict[str, Array | None]:
    """What `build` makes, all at placeholder addresses; `given` are the arrays of its parts."""
    stand_ins = iter([recorder.stand_in(array) for array in given])
    numbers = (Placeholder(i) for i in range(2**30))
    with cupy.cuda.using_allocator(recorder.malloc):
        return build(*(_with_placeholders(p, stand_ins, numbers) for p in parts), recorder)


@dataclass(frozen=True)
class _Result:
    """An array that a call returns, in memory that it makes."""

    at: Pointer
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]


Step = tuple[Callable[..., None], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class _Arguments:
    """Of all steps, for one set of addresses and numbers on one stream. Never written again."""

    calls: list[Step]
    memory: tuple[Any, ...]  # that parameters of launches are in, and graphs
    final: bool  # nothing more is captured
    graph_bytes: int = 0
    number: int = 0  # among the captures of all plans


class Plan:
    """A recording, and what it takes to replay it."""

    def __init__(
        self, build: Build, parts: Sequence[Any], given: Sequence[Array], graphs: bool = False
    ) -> None:  # fmt: skip
        self.graphs = graphs
        recorder = Recorder(graphs)
        made = _record(recorder, build, parts, given)
        self.results = {
            name: _Result(placeholder_of(z.data.ptr), z.shape, z.dtype, z.strides)
            for name, z in made.items()
            if z is not None
        }
        products = recorder.product_memory
        self.product_memory = None if products is None else placeholder_of(products.ptr).array
        self._place_memory(recorder.sizes, len(given))

        self.functions = [
            step.function().kernel.ptr if isinstance(step, Launch) else None
            for step in recorder.steps
        ]
        self.steps, self.arrays = recorder.steps, len(recorder.sizes)
        self.parameters = np.array(recorder.parameters, np.int64)
        launches, others = recorder.words, recorder.arguments
        first = self.first_argument = len(launches.values)
        self.words = np.array([*launches.values, *others.values], np.uint64)
        pointers = [*launches.pointers, *((first + at, to) for at, to in others.pointers)]
        self.pointers = np.array([at for at, _ in pointers], np.int64)
        self.pointer_arrays = np.array([to.array for _, to in pointers], np.int64)
        self.pointer_offsets = np.array([to.offset for _, to in pointers], np.int64).view(np.uint64)
        self.numbers = np.array([at for at, _ in launches.numbers], np.int64)
        self.number_indices = np.array([index for _, index in launches.numbers], np.int64)
        self.maps = recorder.maps
        # A loop mostly gets the same memory again; a ring uses some buffers in turn
        self.known: dict[tuple[Any, ...], _Arguments] = {}

    @property
    def graph_bytes(self) -> int:
        return sum(of.graph_bytes for of in self.known.values())

    def _place_memory(self, sizes: Sequence[int], given: int) -> None:
        """Where the arrays that a call makes lie. Each result has memory of its own, so that none
        keeps another's alive; small arrays share. cuBLAS has its own."""
        results = {result.at.array for result in self.results.values()}
        self.alone: list[tuple[int, int]] = []  # array, bytes
        self.together: list[tuple[int, int]] = []  # array, offset in the shared memory
        self.shared_bytes = 0
        for array, size in enumerate(sizes[given:], given):
            if array in results or size >= LARGE:
                self.alone.append((array, size))
            elif array != self.product_memory:
                self.together.append((array, self.shared_bytes))
                self.shared_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def run(self, given: Sequence[Array], numbers: Sequence[float]) -> dict[str, Array]:
        malloc = cupy.cuda.alloc
        shared = malloc(self.shared_bytes)  # held until all is queued
        alone = {array: malloc(size) for array, size in self.alone}
        addresses = [array.data.ptr for array in given]
        addresses += shared.ptr, *[memory.ptr for memory in alone.values()]

        current = cupy.cuda.get_current_stream()
        capturing = current.is_capturing()  # by the caller, whose graph is to hold all steps
        if capturing:
            note_capture(current)
        stream = current.ptr
        key = capturing, identity(stream), *addresses, *numbers
        arguments = self.known.get(key)
        if arguments is None:
            starts = self._starts(given, shared.ptr, alone)
            arguments = self._arguments(starts, numbers, stream)
            _store(self.known, MAX_ARGUMENTS, key, arguments)
        elif not (arguments.final or capturing):
            with _lock:
                if not capture_under_way():
                    starts = self._starts(given, shared.ptr, alone)
                    arguments = self._captured(starts, numbers, stream, arguments)
                    _free_graphs(arguments.graph_bytes)
                    _store(self.known, MAX_ARGUMENTS, key, arguments)
        for do, values in arguments.calls:
            do(*values)
        return {
            name: cupy.ndarray(r.shape, r.dtype, alone[r.at.array] + r.at.offset, r.strides)
            for name, r in self.results.items()
        }

    def _starts(
        self, given: Sequence[Array], shared: int, alone: Mapping[int, Any]
    ) -> list[int]:  # fmt: skip
        """Where each of the call's arrays begins; those given, at a multiple of 16 bytes."""
        starts = [array.data.ptr // 16 * 16 for array in given]
        starts += [0] * (self.arrays - len(given))
        for array, offset in self.together:
            starts[array] = shared + offset
        for array, memory in alone.items():
            starts[array] = memory.ptr
        return starts

    def _arguments(self, starts: list[int], numbers: Sequence[float], stream: int) -> _Arguments:
        words = self.words.copy()
        words[self.pointers] = (
            np.array(starts, np.uint64)[self.pointer_arrays] + self.pointer_offsets
        )
        words[self.numbers] = np.array(numbers, np.float64).view(np.uint64)[self.number_indices]
        others = words[self.first_argument :].view(np.int64).tolist()
        for at, argument, form in self.maps:
            words[at : at + SIZE // 8] = tensor_map(others[argument], *form).view(np.uint64)
        parameters = self.parameters + words.__array_interface__["data"][0]
        first = parameters.__array_interface__["data"][0]
        calls: list[Any] = []
        for step, function in zip(self.steps, self.functions, strict=True):
            if isinstance(step, Launch):
                shape = step.grid, 1, 1, step.block, 1, 1, step.shared
                at = first + 8 * step.first
                calls.append((driver.launchKernel, (function, *shape, stream, at, 0)))
            else:
                calls.append((step.do, (stream, *others[step.arguments])))
        return _Arguments(calls, (words, parameters), not self.graphs)

    def _captured(
        self, starts: list[int], numbers: Sequence[float], stream: int, plain: _Arguments
    ) -> _Arguments:
        """The arguments, with CUDA graphs of the steps that may be captured. Two threads never
        launch one graph at once: its memory is one call's until all steps are queued."""
        if self.product_memory is not None:
            starts[self.product_memory] = workspace(identity(stream))
            if not starts[self.product_memory]:
                return replace(plain, final=True)
        aside = cupy.cuda.Stream(non_blocking=True)
        onto = self._arguments(starts, numbers, aside.ptr)
        calls: list[Step] = []
        graphs, nodes = [], 0
        steps = zip(self.steps, plain.calls, onto.calls, strict=True)
        for capturable, of in groupby(steps, lambda step: getattr(step[0], "capturable", True)):
            _, direct, captured = zip(*of, strict=True)
            if not capturable or len(direct) == 1:
                calls += direct
                continue
            try:
                graphs.append(_graph(captured, aside))
            except RuntimeError:  # another thread has ended it, as the end of any graph may do
                return replace(plain, final=True)
            nodes += len(captured)
            calls.append((runtime.graphLaunch, (graphs[-1].graphExec, stream)))
        memory = *plain.memory, graphs  # launches outside of graphs read `plain.memory`
        return _Arguments(calls, memory, True, nodes * NODE_BYTES, next(_captures))


def _graph(calls: Sequence[Step], stream: Any) -> Any:
    """The CUDA graph of calls on the stream."""
    with stream:
        stream.begin_capture()
        try:
            for do, values in calls:
                do(*values)
        finally:
            graph = stream.end_capture()
    return graph
