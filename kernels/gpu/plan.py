"""Plans: the recorded launches of a call, which later calls of the same kind replay.

Shapes, dtypes and options decide which kernels run, in which order, on which parts of which
arrays. The contents of arrays do not. So a call is recorded once, with placeholders for the
addresses of its arrays and for its numbers (device/recorder.py). A later call of the same kind
replays the recording with its own addresses and numbers.

If a call comes again with the same addresses, numbers and stream, as in a training loop, its steps
are captured in CUDA graphs: one launch replaces many. The caller of `run_by_plan` asks for this by
`graphs=True`, as `select.py` does for calls on one GPU. Between calls, a plan keeps only the memory
of graphs and of their products. A plan saves time if Python takes longer than the device, for
batches of a few thousand rows. A call of more than `recorder.MAX_STEPS` steps gets no plan.

The inputs of a call are dataclasses that hold arrays. A plan depends on shapes, strides and dtypes
of the arrays, on their addresses modulo 16 bytes, and on fields that cannot hold an array. A number
in a field that can hold an array, such as the scale, may change from call to call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count, groupby
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..problem import Array, Progress
from .device.cublas import workspace
from .device.launcher import device_properties
from .device.launches import Queue
from .device.recorder import (
    ADDRESS_MODULUS,
    Launch,
    Placeholder,
    Pointer,
    Recorder,
    TooLong,
    describe,
    insert_placeholders,
    resolve_placeholder,
)
from .device.streams import capture_under_way, identity, note_capture
from .device.tensor_map import SIZE, tensor_map

ALIGNMENT = 256  # bytes; arrays that a call makes begin at multiples of it
LARGE = 2**20  # bytes; arrays of this size get separate memory, so that memory pools reuse it
MAX_PLANS = 128
MAX_BOUND_STEPS = 32  # sets of addresses and numbers for which one plan keeps its `BoundSteps`
MAX_GRAPH_BYTES = 64 * 2**20  # of the device's memory, for the graphs of all plans
NODE_BYTES = 10 * 2**10  # about, of the device's memory, for one launch in a graph

# A function of the inputs of a call and of a queue, to which it adds launches. It returns the
# arrays of the result by name
Build = Callable[..., dict[str, "Array | None"]]


def run_by_plan(
    build: Build, *inputs: Any, graphs: bool = False, plans: dict[Any, Any] | None = None
) -> dict[str, Array]:
    """What `build(*inputs, queue)` returns, computed by the plan for calls of this kind.

    The first call of a kind records the plan. `graphs`: calls that come again with the same
    addresses are captured in CUDA graphs. `plans` stores the plans; None: a dictionary of this
    module, which `forget` clears.
    """
    plans = _plans if plans is None else plans
    arrays: list[Array] = []
    numbers: list[float] = []
    kind = tuple(describe(part, arrays, numbers) for part in inputs)
    device = runtime.getDevice()
    # `kind` has all properties of the inputs on which a plan depends: see `describe`
    plan_key = device, device_properties(device), build, kind
    plan_or_queue = plans.get(plan_key)
    if plan_or_queue is None:
        try:
            plan_or_queue = Plan(build, inputs, arrays, graphs)
        except TooLong:
            plan_or_queue = Queue()  # each call of this kind is launched step by step
        _store(plans, MAX_PLANS, plan_key, plan_or_queue)
    if isinstance(plan_or_queue, Plan):
        return plan_or_queue.run(arrays, numbers)
    outputs = build(*inputs, plan_or_queue)
    return {name: array for name, array in outputs.items() if array is not None}


def compile_kernels(build: Build, progress: Progress | None, *inputs: Any) -> None:
    """Compile the kernels of `build(*inputs, queue)`, all at the same time. The rehearsal starts a
    thread for each file and its -D options (`Recorder.function`). The loop waits for them."""
    recorder = rehearse(build, *inputs)
    for done, wait_for_kernel in enumerate(recorder.compiling, 1):
        wait_for_kernel()
        if progress is not None:
            progress("compiling kernels", done, len(recorder.compiling))


def rehearse(build: Build, *inputs: Any) -> Recorder:
    """Record what `build(*inputs, queue)` launches, up to `MAX_STEPS` steps. Nothing runs."""
    arrays: list[Array] = []
    for part in inputs:
        describe(part, arrays, [])
    recorder = Recorder()
    with suppress(TooLong):
        _record(recorder, build, inputs, arrays)
    return recorder


# Plans by kind of call. A queue stands for a kind whose calls have too many steps for a plan
_plans: dict[tuple[Any, ...], Plan | Queue] = {}
_captures = count()  # numbers of captures: graphs that were captured first are freed first
# A thread that frees a graph ends the capture of another thread, so threads take turns
_lock = threading.RLock()
_owned: WeakValueDictionary[int, OwnedPlans] = WeakValueDictionary()


class OwnedPlans(dict[Any, Any]):
    """Plans that refer to an object, such as a transport. The plans are freed with the object."""

    def __init__(self) -> None:
        _owned[id(self)] = self

    def clear(self) -> None:
        """Free all plans. Only while no stream is under capture: a freed graph ends a capture."""
        with _lock:
            super().clear()


def forget() -> None:
    """Free all plans of this module. Only while no stream is under capture, as `clear`."""
    with _lock:
        _plans.clear()


def _store(stored: dict[Any, Any], max_count: int, new_key: Any, new_value: Any) -> None:
    """Store a plan, or `BoundSteps` of a plan.

    If there are `max_count` already, the one that was stored first is removed. While a capture is
    under way, no graph is freed: values with graphs stay. If all have graphs, nothing is stored.
    """
    with _lock:
        while len(stored) >= max_count and new_key not in stored:
            keep_graphs = capture_under_way()
            removable = (
                stored_key
                for stored_key, value in stored.items()
                if not keep_graphs or not getattr(value, "graph_bytes", None)
            )
            first_key = next(removable, None)
            if first_key is None:
                return
            del stored[first_key]
        stored[new_key] = new_value


def _free_graphs(new_bytes: int) -> None:
    """Free the graphs of all plans that were captured first, until `new_bytes` have room."""
    stored = chain.from_iterable(store.values() for store in (_plans, *_owned.values()))
    plans = [plan for plan in stored if isinstance(plan, Plan)]
    with_graphs = [
        (steps.capture_number, plan.bound_steps, steps_key)
        for plan in plans
        for steps_key, steps in plan.bound_steps.items()
        if steps.graph_bytes
    ]
    all_bytes = new_bytes + sum(plan.graph_bytes for plan in plans)
    for _, bound_steps, steps_key in sorted(with_graphs, key=itemgetter(0)):
        if all_bytes <= MAX_GRAPH_BYTES:
            break
        all_bytes -= bound_steps.pop(steps_key).graph_bytes


def _record(
    recorder: Recorder, build: Build, inputs: Sequence[Any], caller_arrays: Sequence[Array]
) -> dict[str, Array | None]:
    """The results of `build`, whose inputs hold `caller_arrays`, recorded at placeholders."""
    stand_ins = iter([recorder.stand_in(array) for array in caller_arrays])
    numbers = (Placeholder(i) for i in range(2**30))
    with cupy.cuda.using_allocator(recorder.malloc):
        return build(*(insert_placeholders(part, stand_ins, numbers) for part in inputs), recorder)


@dataclass(frozen=True)
class _Result:
    """An array that a call returns, in memory that the call allocates."""

    start: Pointer
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None  # None: contiguous, which CuPy makes in half the time


BoundStep = tuple[Callable[..., None], tuple[int, ...]]  # a function and its arguments


@dataclass(frozen=True, eq=False)
class BoundSteps:
    """All steps of a plan, bound to one set of addresses and numbers on one stream.

    No field or array of bound steps changes after they are made.
    """

    steps: list[BoundStep]
    memory: tuple[Any, ...]  # the graphs, and the arrays with the parameters of launches
    final: bool  # False: the next call replaces these steps by graphs
    graph_bytes: int = 0
    capture_number: int = 0  # captures of all plans are numbered from 0 on, in their order


class Plan:
    """The recording of a call, in the form in which later calls replay it."""

    def __init__(
        self, build: Build, inputs: Sequence[Any], caller_arrays: Sequence[Array],
        graphs: bool = False,
    ) -> None:  # fmt: skip
        self.may_use_graphs = graphs
        recorder = Recorder(graphs)
        outputs = _record(recorder, build, inputs, caller_arrays)
        self.results = {
            name: _Result(
                resolve_placeholder(array.data.ptr),
                array.shape,
                array.dtype,
                None if array.flags.c_contiguous else array.strides,
            )
            for name, array in outputs.items()
            if array is not None
        }
        products = recorder.product_memory
        self.product_memory = None if products is None else resolve_placeholder(products.ptr).array
        self._place_memory(recorder.sizes, len(caller_arrays))

        self.functions = [  # `function` waits for a kernel, whose compilation `_record` has begun
            step.function().kernel.ptr if isinstance(step, Launch) else None
            for step in recorder.steps
        ]
        self.steps, self.array_count = recorder.steps, len(recorder.sizes)
        # the index in `words` of each parameter of the launches, in their order
        self.parameters = np.array(recorder.parameters, np.int64)
        # 8-byte words: parameters of launches first, then arguments of other steps. `_bind` copies
        # them, and writes the call's addresses at `pointers`, and its numbers at `numbers`
        launches, others = recorder.words, recorder.other_arguments
        first = self.first_other_word = len(launches.values)
        self.words = np.array([*launches.values, *others.values], np.uint64)
        pointers = launches.pointers + [
            (first + position, pointer) for position, pointer in others.pointers
        ]
        self.pointers = np.array([position for position, _ in pointers], np.int64)
        self.pointer_arrays = np.array([pointer.array for _, pointer in pointers], np.int64)
        offsets = np.array([pointer.offset for _, pointer in pointers], np.int64)
        self.pointer_offsets = offsets.view(np.uint64)
        self.numbers = np.array([position for position, _ in launches.numbers], np.int64)
        self.number_indices = np.array([index for _, index in launches.numbers], np.int64)
        self.maps = recorder.maps  # tensor maps, which depend on addresses: made by `_bind`
        # By addresses, numbers and the stream of a call. There are few keys, because a training
        # loop usually gets the same memory again, and a ring uses some buffers in turn
        self.bound_steps: dict[tuple[Any, ...], BoundSteps] = {}

    @property
    def graph_bytes(self) -> int:
        return sum(steps.graph_bytes for steps in self.bound_steps.values())

    def _place_memory(self, sizes: Sequence[int], caller_array_count: int) -> None:
        """Decide the memory of the arrays that a call makes.

        Each result has separate memory, so that no result keeps the memory of another one alive.
        Small arrays share memory. The workspace of cuBLAS has none here (`cublas.workspace`).
        """
        results = {result.start.array for result in self.results.values()}
        self.separate: list[tuple[int, int]] = []  # (array, bytes)
        self.sharing: list[tuple[int, int]] = []  # (array, offset in the shared memory)
        self.shared_bytes = 0
        for array, size in enumerate(sizes[caller_array_count:], caller_array_count):
            if array in results or size >= LARGE:
                self.separate.append((array, size))
            elif array != self.product_memory:
                self.sharing.append((array, self.shared_bytes))
                self.shared_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def run(self, caller_arrays: Sequence[Array], numbers: Sequence[float]) -> dict[str, Array]:
        """Replay the recording for these arrays and numbers; return the results by name."""
        malloc = cupy.cuda.alloc
        shared = malloc(self.shared_bytes)  # allocated until all steps are queued
        separate = {array: malloc(size) for array, size in self.separate}
        addresses = [array.data.ptr for array in caller_arrays]
        addresses += shared.ptr, *[memory.ptr for memory in separate.values()]

        current = cupy.cuda.get_current_stream()
        caller_captures = current.is_capturing()  # then the caller's graph gets all steps
        if caller_captures:
            note_capture(current)
        stream = current.ptr
        steps_key = caller_captures, identity(stream), *addresses, *numbers
        bound = self.bound_steps.get(steps_key)
        # The first call with these addresses and numbers launches its steps. A later call makes
        # graphs if no stream is under capture, because freeing old graphs would end the capture
        if bound is None:
            starts = self._starts(caller_arrays, shared.ptr, separate)
            bound = self._bind(starts, numbers, stream)
            _store(self.bound_steps, MAX_BOUND_STEPS, steps_key, bound)
        elif not (bound.final or caller_captures):
            with _lock:
                if not capture_under_way():
                    starts = self._starts(caller_arrays, shared.ptr, separate)
                    bound = self._bind_to_graphs(starts, numbers, stream, bound)
                    _free_graphs(bound.graph_bytes)
                    _store(self.bound_steps, MAX_BOUND_STEPS, steps_key, bound)
        for function, arguments in bound.steps:
            function(*arguments)
        return {
            name: cupy.ndarray(
                r.shape, r.dtype, separate[r.start.array] + r.start.offset, r.strides
            )
            for name, r in self.results.items()
        }

    def _starts(
        self, caller_arrays: Sequence[Array], shared: int, separate: Mapping[int, Any]
    ) -> list[int]:  # fmt: skip
        """Addresses of arrays: `caller_arrays` rounded down to 16 bytes (`Recorder.stand_in`)."""
        starts = [array.data.ptr // ADDRESS_MODULUS * ADDRESS_MODULUS for array in caller_arrays]
        starts += [0] * (self.array_count - len(caller_arrays))
        for array, offset in self.sharing:
            starts[array] = shared + offset
        for array, memory in separate.items():
            starts[array] = memory.ptr
        return starts

    def _bind(self, starts: list[int], numbers: Sequence[float], stream: int) -> BoundSteps:
        """All steps without graphs, for arrays that begin at `starts`."""
        words = self.words.copy()
        words[self.pointers] = (
            np.array(starts, np.uint64)[self.pointer_arrays] + self.pointer_offsets
        )
        words[self.numbers] = np.array(numbers, np.float64).view(np.uint64)[self.number_indices]
        others = words[self.first_other_word :].view(np.int64).tolist()
        for position, argument, form in self.maps:
            tensor_map_words = tensor_map(others[argument], *form).view(np.uint64)
            words[position : position + SIZE // 8] = tensor_map_words
        parameters = self.parameters + words.__array_interface__["data"][0]
        parameters_address = parameters.__array_interface__["data"][0]
        bound: list[Any] = []
        for step, function in zip(self.steps, self.functions, strict=True):
            if isinstance(step, Launch):
                shape = step.grid, 1, 1, step.block, 1, 1, step.shared
                first = parameters_address + 8 * step.first
                bound.append((driver.launchKernel, (function, *shape, stream, first, 0)))
            else:
                bound.append((step.do, (stream, *others[step.arguments])))
        return BoundSteps(bound, (words, parameters), not self.may_use_graphs)

    def _bind_to_graphs(
        self, starts: list[int], numbers: Sequence[float], stream: int, plain: BoundSteps
    ) -> BoundSteps:
        """All steps, with CUDA graphs of those that may be captured; `plain` has no graphs.

        A graph contains the addresses of its call's memory, which is allocated until all steps are
        queued. Meanwhile, calls of other threads get other memory, and so have other keys in
        `bound_steps` and other graphs. So two threads never launch one graph at the same time.
        """
        if self.product_memory is not None:
            starts[self.product_memory] = workspace(identity(stream))
            if not starts[self.product_memory]:
                return replace(plain, final=True)
        capture_stream = cupy.cuda.Stream(non_blocking=True)
        steps_to_capture = self._bind(starts, numbers, capture_stream.ptr)
        bound: list[BoundStep] = []
        graphs, nodes = [], 0
        steps = zip(self.steps, plain.steps, steps_to_capture.steps, strict=True)
        for capturable, group in groupby(steps, lambda step: getattr(step[0], "capturable", True)):
            _, group_plain, group_to_capture = zip(*group, strict=True)
            if not capturable or len(group_plain) == 1:
                bound += group_plain
                continue
            try:
                graphs.append(_graph(group_to_capture, capture_stream))
            except RuntimeError:  # the end of another thread's graph has ended this capture
                return replace(plain, final=True)
            nodes += len(group_to_capture)
            bound.append((runtime.graphLaunch, (graphs[-1].graphExec, stream)))
        memory = *plain.memory, graphs  # steps outside of graphs read `plain.memory`
        return BoundSteps(bound, memory, True, nodes * NODE_BYTES, next(_captures))


def _graph(steps: Sequence[BoundStep], stream: Any) -> Any:
    """A CUDA graph of the steps, captured on a stream."""
    with stream:
        stream.begin_capture()
        try:
            for function, arguments in steps:
                function(*arguments)
        finally:
            graph = stream.end_capture()
    return graph
