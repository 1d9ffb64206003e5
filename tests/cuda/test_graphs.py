"""CUDA graphs of what a plan asks for again, without a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy
from cupy.cuda import driver, runtime
from gpu_problems import DEVICES
from infonce.kernels.gpu import plan
from infonce.kernels.gpu.device import recorder
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

    made, workspace = {}, set()
    for array in (given, other):
        of_rank = "exchange", array.data.ptr
        plain = ask(array)
        assert [what for what, _ in plain] == kinds
        assert plain[3] == plain[5] == of_rank
        streams.user_captures = True  # a capture of one's own gets no graph
        assert ask(array) == plain
        streams.user_captures = False
        for _ in range(3):
            count = len(streams.graphs)
            again = ask(array)
            graphs = [number for what, number in again if what == "graph"]
            assert again == [("graph", graphs[0]), *plain[3:6], ("graph", graphs[1])]
            assert [streams.graphs[number] for number in graphs] == [plain[:3], plain[6:]]
        assert count == len(streams.graphs)
        made[array.data.ptr] = graphs
        workspace |= {at for what, at in plain if what == "product"}
    assert len(streams.graphs) == 4
    assert len(workspace) == 1
    assert min(workspace) >= memory  # the call's own
    plan.forget()
    for _ in range(3):
        asked = ask(given, graphs=False)
        assert [what for what, _ in asked] == kinds
        assert ("product", 0) in asked


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
