"""Plans, and CUDA graphs of what they ask for again, without a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
from cupy.cuda import driver, runtime
from gpu_problems import DEVICES
from infonce.kernels.gpu import plan
from infonce.kernels.gpu.device import cublas, recorder
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
        for of, name, fake in (
            (runtime, "memsetAsync", lambda at, _, size, stream: self.ask(stream, "zeros", at)),
            (runtime, "graphLaunch", lambda graph, stream: self.ask(stream, "graph", graph)),
            (recorder, "gemm_ex", lambda *of, workspace: self.ask(None, "product", workspace)),
            (cupy.cuda.device, "get_cublas_handle", lambda: 0),
            (cupy.cuda, "get_current_stream", lambda: current),
            (cupy.cuda, "Stream", lambda non_blocking: self),
            (cupy.cuda, "alloc", self.malloc),
            (runtime, "getDevice", lambda: 0),
            (plan, "workspace", lambda stream: self.workspace if stream == 1 else 0),
            (plan, "_plans", {}),
        ):
            patch.setattr(of, name, fake)

    ptr = 2  # of the stream that is captured

    def malloc(self, size: int) -> Any:
        memory = cupy.cuda.UnownedMemory(self.memory, size, None, 0)
        self.memory += size
        return cupy.cuda.MemoryPointer(memory, 0)

    def ask(self, stream: int | None, *what: Any) -> None:
        """Steps under capture are on the stream that is captured."""
        assert stream in (None, 2 if self.capturing is not None else 1)
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
    streams = Streams(monkeypatch)

    def exchange(stream: int, at: int) -> None:
        streams.ask(stream, "exchange", at)

    def build(array: Any, queue: Any) -> dict[str, Any]:
        queue.zeros(4, np.float32)
        queue.gemm(*[0] * 18)
        queue.gemm(*[0] * 18)
        queue.do(exchange, array.data.ptr)
        queue.zeros(4, np.float32)  # one step is no graph
        queue.do(exchange, array.data.ptr)
        queue.zeros(4, np.float32)
        return {"made": queue.zeros(4, np.float32)}

    given = cupy.ndarray(4, np.float32, streams.malloc(16))
    other = cupy.ndarray(4, np.float32, streams.malloc(16))
    memory = streams.memory
    kinds = ["zeros", "product", "product", "exchange", "zeros", "exchange", "zeros", "zeros"]

    def ask(array: Any, graphs: bool = True) -> list[Any]:
        streams.asked, streams.memory = [], memory  # the same addresses
        plan.call(build, DEVICES["sm_90a"], array, graphs=graphs)
        return streams.asked

    for array in (given, other):
        of_rank = "exchange", array.data.ptr
        plain = ask(array)
        assert [what for what, _ in plain] == kinds
        assert plain[1:3] == [("product", 0)] * 2
        assert plain[3] == plain[5] == of_rank
        first = [plain[0], *[("product", streams.workspace)] * 2]
        for _ in range(3):
            streams.user_captures = True  # a capture of one's own gets no graph
            assert ask(array) == plain
            streams.user_captures = False
            count = len(streams.graphs)
            again = ask(array)
            graphs = [number for what, number in again if what == "graph"]
            assert again == [("graph", graphs[0]), *plain[3:6], ("graph", graphs[1])]
            assert [streams.graphs[number] for number in graphs] == [first, plain[6:]]
        assert count == len(streams.graphs)
    assert len(streams.graphs) == 4
    for graphs, workspace, ends in ((False, 7, False), (True, 0, False), (True, 7, True)):
        plan.forget()
        streams.workspace, streams.ends_captures = workspace, ends
        for _ in range(3):
            assert [what for what, _ in ask(given, graphs)] == kinds
    assert len(streams.graphs) == 4


def test_no_graph_ends_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a capture with an error if a graph is freed meanwhile."""
    streams = Streams(monkeypatch)
    monkeypatch.setattr(plan, "MAX_ARGUMENTS", 2)
    monkeypatch.setattr(plan, "MAX_PLANS", 2)

    def build(array: Any, queue: Any) -> dict[str, Any]:
        queue.zeros(2, np.float32)
        return {"made": queue.zeros(len(array), np.float32)}

    def ask(n: int) -> None:
        memory = streams.memory
        given = cupy.ndarray(n, np.float32, streams.malloc(4 * n))
        for _ in range(2):
            streams.memory = memory + 4 * n
            plan.call(build, DEVICES["sm_90a"], given, graphs=True)

    ask(4)
    (first,) = plan._plans.values()
    of_graph = next(iter(first.known.values()))
    assert len(streams.graphs) == 1
    streams.user_captures = True
    for n in (4, 4, 4, 5, 6, 7):
        ask(n)
    assert len(streams.graphs) == 1
    assert of_graph in first.known.values()
    assert first in plan._plans.values()
    streams.user_captures = False
    ask(4)
    assert of_graph not in first.known.values()
    ask(8)
    assert first not in plan._plans.values()


def test_memory_of_products_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each device and stream, for few of them, and none where memory has run out."""
    made: list[int] = []
    most = [100]

    def memory(size: int) -> Any:
        if len(made) == most[0]:
            raise runtime.CUDARuntimeError(cublas.OUT_OF_MEMORY)
        made.append(size)
        return SimpleNamespace(ptr=len(made))

    monkeypatch.setattr(cupy.cuda, "Memory", memory)
    monkeypatch.setattr(cublas, "_workspaces", {})
    device = [0]
    monkeypatch.setattr(runtime, "getDevice", lambda: device[0])
    assert [cublas.workspace(stream) for stream in (5, 6, 5)] == [1, 2, 1]
    device[0] = 1
    streams = range(cublas.MAX_STREAMS)
    assert [cublas.workspace(stream) for stream in streams] == [*range(3, len(streams) + 1), 0, 0]
    assert made == [cublas.WORKSPACE] * cublas.MAX_STREAMS
    monkeypatch.setattr(cublas, "_workspaces", {})
    most[0] = len(made)
    assert cublas.workspace(0) == 0


def test_parameters_of_a_lone_launch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch between two foreign steps is no graph: its parameters stay where it reads them."""
    streams = Streams(monkeypatch)
    looked: list[int] = []
    monkeypatch.setattr(driver, "launchKernel", lambda *of: looked.append(of[-2]))
    kernel: Any = SimpleNamespace(ptr=7)

    def build(array: Any, queue: Any) -> dict[str, Any]:
        at = array.data.ptr
        takes: Any = SimpleNamespace(words=lambda _: [[(POINTER, at)]])
        queue.do(lambda stream: None)
        queue.launch(lambda: kernel, takes, 1, 32, 0, {})
        queue.do(lambda stream: None)
        return {}

    given = cupy.ndarray(4, np.float32, streams.malloc(16))
    memory = streams.memory
    for _ in range(4):
        streams.memory = memory
        plan.call(build, DEVICES["sm_90a"], given, graphs=True)
        ((arguments,),) = (of.known.values() for of in plan._plans.values())
        words, parameters, *_ = arguments.memory
        first, start = parameters.ctypes.data, words.ctypes.data
        assert first <= looked[-1] < first + parameters.nbytes
        assert start <= parameters[(looked[-1] - first) // 8] < start + words.nbytes
        assert words[0] == given.data.ptr


def test_calls_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long to be recorded is asked of the device, each time."""

    def build(queue: Any) -> dict[str, Any]:
        if isinstance(queue, recorder.Recorder):
            raise recorder.TooLong
        return {"asked": 1, "not made": None}

    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    for _ in range(2):
        assert plan.call(build, DEVICES["sm_90a"]) == {"asked": 1}
