"""Plans, and CUDA graphs of what they ask for again, without a GPU."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
from cupy.cuda import driver, runtime
from infonce.kernels.gpu import fused, plan
from infonce.kernels.gpu.device import cublas, recorder, streams
from infonce.kernels.gpu.device.signatures import POINTER

pytestmark = pytest.mark.extras


class Streams:
    """Stands for CUDA's streams: what is asked of them, in order, and what their graphs hold."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.graphs: list[list[Any]] = []
        self.capturing: list[Any] | None = None
        self.user_captures = False
        self.memory = 1 << 20  # the next address
        self.workspace = 7  # of products in graphs
        self.ends_captures = False  # another thread
        current = SimpleNamespace(ptr=1, is_capturing=lambda: self.user_captures)
        self.current: Any = current
        for module, name, fake in (
            (runtime, "memsetAsync", lambda at, _, size, stream: self.ask(stream, "zeros", at)),
            (runtime, "graphLaunch", lambda graph, stream: self.ask(stream, "graph", graph)),
            (recorder, "gemm_ex", lambda *args, workspace: self.ask(None, "product", workspace)),
            (cupy.cuda.device, "get_cublas_handle", lambda: 0),
            (cupy.cuda, "get_current_stream", lambda: self.current),
            (cupy.cuda, "Stream", lambda non_blocking: self),
            (cupy.cuda, "alloc", self.malloc),
            (runtime, "getDevice", lambda: 0),
            (plan, "device_properties", lambda _: None),
            (plan, "workspace", lambda stream: self.workspace if stream != self.ptr else 0),
            (plan, "_plans", {}),
            (streams, "_captured", {}),
        ):
            patch.setattr(module, name, fake)

    ptr = 9  # of the stream that is captured

    def malloc(self, size: int) -> Any:
        memory = cupy.cuda.UnownedMemory(self.memory, size, None, 0)
        self.memory += size
        return cupy.cuda.MemoryPointer(memory, 0)

    def ask(self, stream: int | None, *what: Any) -> None:
        """Steps under capture are on the stream that is captured."""
        assert stream in (None, self.current.ptr if self.capturing is None else self.ptr)
        (self.asked if self.capturing is None else self.capturing).append(what)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def begin_capture(self) -> None:
        self.capturing = []

    def end_capture(self) -> Any:
        assert self.capturing is not None
        if self.ends_captures:
            self.capturing = None
            raise runtime.CUDARuntimeError(901)
        self.graphs.append(self.capturing)
        self.capturing = None
        return SimpleNamespace(graphExec=len(self.graphs) - 1)


def test_graphs_of_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at the second sight of the same addresses, but for what others do on the stream."""
    cuda = Streams(monkeypatch)

    def exchange(stream: int, at: int) -> None:
        cuda.ask(stream, "exchange", at)

    def build(array: Any, queue: Any) -> dict[str, Any]:
        queue.zeroed_array(4, np.float32)
        queue.gemm(*[0] * 18)
        queue.gemm(*[0] * 18)
        queue.do(exchange, array.data.ptr)
        queue.zeroed_array(4, np.float32)  # one step is no graph
        queue.do(exchange, array.data.ptr)
        queue.zeroed_array(4, np.float32)
        return {"made": queue.zeroed_array(4, np.float32)}

    buffer = cupy.ndarray(4, np.float32, cuda.malloc(16))
    other = cupy.ndarray(4, np.float32, cuda.malloc(16))
    memory = cuda.memory
    kinds = ["zeros", "product", "product", "exchange", "zeros", "exchange", "zeros", "zeros"]

    def ask(array: Any, graphs: bool = True) -> list[Any]:
        cuda.asked, cuda.memory = [], memory  # the same addresses
        plan.run_by_plan(build, array, graphs=graphs)
        return cuda.asked

    for array in (buffer, other):
        rank_key = "exchange", array.data.ptr
        plain = ask(array)
        assert [what for what, _ in plain] == kinds
        assert plain[1:3] == [("product", 0)] * 2
        assert plain[3] == plain[5] == rank_key
        first = [plain[0], *[("product", cuda.workspace)] * 2]
        for _ in range(3):
            cuda.user_captures = True  # a capture of one's own gets no graph
            assert ask(array) == plain
            cuda.user_captures = False
            count = len(cuda.graphs)
            again = ask(array)
            graphs = [number for what, number in again if what == "graph"]
            assert again == [("graph", graphs[0]), *plain[3:6], ("graph", graphs[1])]
            assert [cuda.graphs[number] for number in graphs] == [first, plain[6:]]
        assert count == len(cuda.graphs)
    assert len(cuda.graphs) == 4
    for graphs, workspace, ends in ((False, 7, False), (True, 0, False), (True, 7, True)):
        plan.forget()
        cuda.workspace, cuda.ends_captures = workspace, ends
        for _ in range(3):
            assert [what for what, _ in ask(buffer, graphs)] == kinds
    assert len(cuda.graphs) == 4


def kept() -> set[Any]:
    """The bound steps of all plans, with or without graphs."""
    return {bound for p in plan._plans.values() for bound in getattr(p, "bound_steps", {}).values()}


@pytest.fixture
def ask(cuda: Streams) -> Callable[[int], "plan.BoundSteps"]:
    """Calls the same function twice, for so many elements at addresses of their own; what the plan
    keeps of the call."""

    def build(array: Any, queue: Any) -> dict[str, Any]:
        queue.zeroed_array(2, np.float32)
        return {"made": queue.zeroed_array(len(array), np.float32)}

    def asking(n: int) -> Any:
        before, memory = kept(), cuda.memory
        array = cupy.ndarray(n, np.float32, cuda.malloc(4 * n))
        for _ in range(2):
            cuda.memory = memory + 4 * n
            plan.run_by_plan(build, array, graphs=True)
        return max(kept() - before, key=lambda bound: bound.capture_number, default=None)

    return asking


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_graph_ends_during_a_capture(
    cuda: Streams, ask: Any, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA ends a capture with an error if a graph is freed meanwhile. What has no graph goes, so
    that no more is kept than otherwise. `elsewhere`: later calls are on another stream."""
    monkeypatch.setattr(plan, "MAX_BOUND_STEPS", 2)
    monkeypatch.setattr(plan, "MAX_PLANS", 2)
    with_graph = ask(4)
    (first,) = plan._plans.values()
    assert isinstance(first, plan.Plan)
    assert with_graph.graph_bytes == 2 * plan.NODE_BYTES == first.graph_bytes
    cuda.user_captures = True
    ask(4)
    if elsewhere:
        cuda.current = SimpleNamespace(ptr=5, is_capturing=lambda: False)
    for n in (4, 4, 4, 5, 6, 7):
        ask(n)
        assert len(first.bound_steps) <= 2
        assert len(plan._plans) <= 2
        assert with_graph in kept()
    assert len(cuda.graphs) == 1
    cuda.user_captures = False
    ask(4)
    assert with_graph not in kept()
    assert first in plan._plans.values()
    ask(8)
    assert first not in plan._plans.values()


def test_all_that_is_kept_has_graphs(
    cuda: Streams, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a capture leaves nothing behind."""
    monkeypatch.setattr(plan, "MAX_BOUND_STEPS", 1)
    monkeypatch.setattr(plan, "MAX_PLANS", 1)
    only = ask(4)
    cuda.user_captures = True
    for n in (4, 5):
        asked = len(cuda.asked)
        ask(n)
        assert len(cuda.asked) == asked + 4
        assert kept() == {only}


def test_graphs_of_all_plans_are_bounded(
    cuda: Streams, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new graph replaces the oldest graph of any plan when the limit of bytes is reached."""
    monkeypatch.setattr(plan, "MAX_GRAPH_BYTES", 7 * plan.NODE_BYTES)
    graphs = [ask(n) for n in (4, 5, 4)]
    for n in (6, 5, 4, 7):
        assert kept() == set(graphs)
        assert sum(bound.graph_bytes for bound in kept()) == 6 * plan.NODE_BYTES
        graphs = [*graphs[1:], ask(n)]


def in_threads(number: int, function: Callable[[], Any]) -> list[Any]:
    """The results of `function` in `number` threads that are all alive at once."""
    results: list[Any] = []
    together = threading.Barrier(number, timeout=30)

    def run() -> None:
        results.append(function())
        together.wait()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_default_streams_of_threads(
    cuda: Streams, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has one address for all of them: what a stream's work shares is one thread's."""
    monkeypatch.setattr(fused, "_barriers", {})
    monkeypatch.setattr(fused.cupy, "zeros", lambda *_: object())
    cuda.current = SimpleNamespace(ptr=streams.PER_THREAD, is_capturing=lambda: False)
    barriers = [fused._barrier(0) for _ in range(2)]
    assert barriers[0] is barriers[1]
    for _ in range(2):  # the second three may have the numbers that the first had for Python
        barriers += in_threads(3, lambda: fused._barrier(0))
    assert len(set(barriers)) == 1 + 6
    asked = []

    def workspace(stream: int) -> int:
        asked.append(stream)
        return 7

    monkeypatch.setattr(plan, "workspace", workspace)

    def build(array: Any, queue: Any) -> dict[str, Any]:
        queue.gemm(*[0] * 18)
        queue.gemm(*[0] * 18)
        return {}

    buffer = cupy.ndarray(4, np.float32, cuda.malloc(16))
    memory = cuda.memory

    def call() -> None:
        for _ in range(3):
            cuda.memory = memory
            plan.run_by_plan(build, buffer, graphs=True)

    for _ in range(3):
        in_threads(1, call)
    assert len(set(asked)) == len(asked) == len(cuda.graphs) == 3
    for ptr in (0, 1, 5):  # other streams are what they are to all threads
        cuda.current = SimpleNamespace(ptr=ptr, is_capturing=lambda: False)
        assert len({fused._barrier(0), *in_threads(2, lambda: fused._barrier(0))}) == 1
    monkeypatch.setattr(fused, "MAX_BARRIERS", 4)
    for ptr in range(10, 20):
        cuda.current = SimpleNamespace(ptr=ptr, is_capturing=lambda: False)
        assert fused._barrier(0) is fused._barrier(0)
        assert len(fused._barriers) <= 4


@pytest.mark.parametrize(
    ("capability", "config", "mib"),
    [("75", "", 4), ("80", "", 4), ("89", "", 4), ("90", "", 32), ("100", "", 32), ("120", "", 32),
     ("90", ":4096:8", 4), ("80", ":16:8:8192:2", 8), ("80", ":16:8", 1 / 64),
     ("80", ":0:0", 4), ("80", ":0:1", 1 / 64), ("90", "anything", 32)],
)  # fmt: skip
def test_products_in_graphs_have_what_cublas_has(
    capability: str, config: str, mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cublas.workspace_bytes.cache_clear()
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(cupy.cuda, "Device", lambda _: device)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert cublas.workspace_bytes(0) == mib * 2**20
    cublas.workspace_bytes.cache_clear()


def test_memory_of_products_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each device and stream, for few of them, and none where memory has run out."""
    sizes: list[int] = []
    most = [100]

    def memory(size: int) -> Any:
        if len(sizes) == most[0]:
            raise runtime.CUDARuntimeError(cublas.OUT_OF_MEMORY)
        sizes.append(size)
        return SimpleNamespace(ptr=len(sizes))

    monkeypatch.setattr(cupy.cuda, "Memory", memory)
    monkeypatch.setattr(cublas, "_workspaces", {})
    monkeypatch.setattr(cublas, "workspace_bytes", lambda device: 100 + device)
    device = [0]
    monkeypatch.setattr(runtime, "getDevice", lambda: device[0])
    assert [cublas.workspace(stream) for stream in (5, 6, 5)] == [1, 2, 1]
    device[0] = 1
    numbers = range(cublas.MAX_STREAMS)
    assert [cublas.workspace(stream) for stream in numbers] == [*range(3, len(numbers) + 1), 0, 0]
    assert sizes == [100, 100] + [101] * (cublas.MAX_STREAMS - 2)
    monkeypatch.setattr(cublas, "_workspaces", {})
    most[0] = len(sizes)
    assert cublas.workspace(0) == 0


def test_parameters_of_a_lone_launch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps that are not captured it is no graph: its parameters stay."""
    cuda = Streams(monkeypatch)
    looked: list[int] = []
    monkeypatch.setattr(driver, "launchKernel", lambda *args: looked.append(args[-2]))
    kernel: Any = SimpleNamespace(kernel=SimpleNamespace(ptr=7))

    def build(array: Any, queue: Any) -> dict[str, Any]:
        at = array.data.ptr
        takes: Any = SimpleNamespace(words=lambda _: [[(POINTER, at)]])
        queue.do(lambda stream: None)
        queue.launch(lambda: kernel, takes, 1, 32, 0, {})
        queue.do(lambda stream: None)
        return {}

    buffer = cupy.ndarray(4, np.float32, cuda.malloc(16))
    memory = cuda.memory
    for _ in range(4):
        cuda.memory = memory
        plan.run_by_plan(build, buffer, graphs=True)
        ((arguments,),) = (
            recorded_plan.bound_steps.values() for recorded_plan in plan._plans.values()
        )
        words, parameters, *_ = arguments.memory
        first, start = parameters.ctypes.data, words.ctypes.data
        assert first <= looked[-1] < first + parameters.nbytes
        assert start <= parameters[(looked[-1] - first) // 8] < start + words.nbytes
        assert words[0] == buffer.data.ptr


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", [(), (7, 8, 9, 3)])
def test_arguments_of_cublas(
    cuda: Streams, batch: tuple[int, ...], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS gets its arguments in the order of its headers, from CuPy's wrapper or under
    capture."""
    names = ["transa", "transb", "m", "n", "k", "alpha", "A", "Atype", "lda", "B", "Btype", "ldb",
             "beta", "C", "Ctype", "ldc", "compute", "algo"]  # fmt: skip
    values = dict(zip(names, range(100, 118), strict=True))
    wanted = list(values.values())
    if batch:
        wanted = [*wanted[:9], 7, *wanted[9:12], 8, *wanted[12:16], 9, 3, *wanted[16:]]
    called: dict[str, list[Any]] = {}

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: called.update({name: list(arguments)}) or 0

    class Stream:
        ptr = 0

        def is_capturing(self) -> bool:
            return captured

    monkeypatch.setitem(vars(cupy.cuda), "cublas", Library())  # which need not be there
    monkeypatch.setattr(cupy.cuda, "get_current_stream", Stream)
    monkeypatch.setattr(cublas, "_library", Library)
    monkeypatch.setattr(cublas, "workspace_bytes", lambda _: 4 * 2**20)
    with cupy.cuda.using_allocator(cuda.malloc):
        cublas.gemm_ex(55, *values.values(), *batch)
    name = "gemmStridedBatchedEx" if batch else "gemmEx"
    name = f"cublasG{name[1:]}" if captured else name
    numbers = [getattr(argument, "value", argument) for argument in called[name]]
    assert numbers == [55, *wanted]
    if captured:
        assert called["cublasSetWorkspace_v2"][2].value == 4 * 2**20
