"""Transports of GPUs, with recorders in the place of CUDA's functions: mailboxes of copies, who has
them and when they are closed; NCCL, at its start and its end."""

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from infonce.distributed import Communicator, RankError
from infonce.distributed.transports import gpu, mailboxes, nccl, peers
from infonce.kernels.gpu import plan

pytestmark = pytest.mark.extras


class Threads:
    """The ranks of some hosts, a thread each, until one of them raises."""

    def __init__(self, hosts: list[list[int]]) -> None:
        self.hosts, self.size = hosts, sum(map(len, hosts))
        self.values: list[Any] = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=20)

    def rank(self, rank: int) -> Any:
        def allgather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values

        peers = SimpleNamespace(nodes=self.hosts)
        return SimpleNamespace(rank=rank, size=self.size, peers=peers, allgather=allgather)

    def each(self, work: Any) -> list[Any]:
        """The results of `work`, by rank."""

        def on_thread(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(on_thread, range(self.size)))


class Runtime:
    """CUDA's functions for memory that processes share, with handles that are addresses."""

    CUDARuntimeError = nccl.cupy.cuda.runtime.CUDARuntimeError

    def __init__(self) -> None:
        self.next, self.lock = 0, threading.Lock()
        self.allocated: set[int] = set()
        self.mapped: list[int] = []
        self.refuses: set[str] = set()

    def malloc(self, size: int) -> int:
        with self.lock:
            self.next += 2**12
            self.allocated.add(self.next)
            return self.next

    def free(self, at: int) -> None:
        assert at not in self.mapped
        self.allocated.remove(at)

    def memset(self, at: int, byte: int, size: int) -> None:
        assert at in self.allocated

    def deviceSynchronize(self) -> None: ...

    def ipcGetMemHandle(self, at: int) -> bytes:
        if "ipcGetMemHandle" in self.refuses:
            raise RuntimeError("memory that cannot be shared")
        return str(at).encode()

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        with self.lock:
            if "ipcOpenMemHandle" in self.refuses and self.mapped:
                raise RuntimeError("a GPU that is not linked")
            self.mapped.append(int(handle))
            return int(handle)

    def ipcCloseMemHandle(self, at: int) -> None:
        with self.lock:
            self.mapped.remove(at)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    device: Any = SimpleNamespace(read=lambda at, size: np.zeros(size, np.uint8))
    monkeypatch.setattr(mailboxes, "runtime", runtime)
    monkeypatch.setattr(mailboxes, "StreamOperations", lambda: device)
    monkeypatch.setattr(mailboxes, "_try_copies", lambda copies: True)
    monkeypatch.setattr(mailboxes.cupy.cuda, "Device", threading.Lock)  # a context
    return runtime


HOSTS = [[0], [1, 2], [3, 4, 5]]


def test_ranks_without_another_on_their_host_stop_nobody(runtime: Runtime) -> None:
    """All others copy."""
    rank_threads = Threads(HOSTS)
    mailboxes_by_rank = rank_threads.each(lambda rank: mailboxes.connect(rank_threads.rank(rank)))
    assert mailboxes_by_rank[0] is None
    for rank, copies in enumerate(mailboxes_by_rank[1:], 1):
        host = next(ranks for ranks in HOSTS if rank in ranks)
        assert list(copies.mailboxes) == host
        assert all(
            copies.mailboxes[other] == mailboxes_by_rank[other].mailboxes[other] for other in host
        )  # fmt: skip
    assert len(runtime.mapped) == 2 * 1 + 3 * 2
    del mailboxes_by_rank, copies
    gc.collect()
    assert not runtime.mapped  # unmapped with the copies; others may still write to what is there
    assert len(runtime.allocated) == 5


def test_hosts_of_one_gpu_ask_nobody() -> None:
    ranks: Any = SimpleNamespace(rank=0, peers=SimpleNamespace(nodes=[[0], [1]]))
    assert mailboxes.connect(ranks) is None


@pytest.mark.parametrize(
    "lacks", ["the switch", "memory", "ipcGetMemHandle", "ipcOpenMemHandle", "a word in time"]
)
@pytest.mark.parametrize("hosts", [[[0, 1]], HOSTS])
def test_all_ranks_copy_or_none(
    lacks: str, hosts: list[list[int]], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a rank lacks, the others know it, and nothing stays mapped or allocated."""
    if lacks == "the switch":
        monkeypatch.setenv(mailboxes.SWITCH, "0")
    elif lacks == "memory":
        monkeypatch.setattr(runtime, "malloc", lambda size: 1 // 0)
    elif lacks == "a word in time":
        last = sum(map(len, hosts)) - 1
        monkeypatch.setattr(mailboxes, "_try_copies", lambda copies: copies.rank != last)
    else:
        runtime.refuses.add(lacks)
    rank_threads = Threads(hosts)
    mailboxes_by_rank = rank_threads.each(lambda rank: mailboxes.connect(rank_threads.rank(rank)))
    assert mailboxes_by_rank == [None] * rank_threads.size
    assert not runtime.mapped
    assert not runtime.allocated


def test_graphs_over_ranks_count_as_others() -> None:
    """While their transport lives, the bytes of all graphs are bounded together."""
    transport = gpu.OnDevice.__new__(gpu.OnDevice)
    transport.plans = plan.OwnedPlans()
    own = object.__new__(plan.Plan)
    own.bound_steps = {
        "a call": SimpleNamespace(graph_bytes=plan.MAX_GRAPH_BYTES, capture_number=0)
    }
    transport.plans["a kind of call"] = own, transport  # as a plan's steps have it
    transport.plans["another kind"] = own
    place, before = id(transport.plans), list(own.bound_steps)
    plan._free_graphs(0)
    assert list(own.bound_steps) == before
    plan._free_graphs(1)
    assert not own.bound_steps
    del transport
    gc.collect()
    assert place not in plan._owned


def test_freed_together(runtime: Runtime) -> None:
    """Each rank's mailbox after all have unmapped it."""
    rank_threads, destroyed = Threads(HOSTS), []

    def use(rank: int) -> None:
        transport: Any = object.__new__(nccl.NCCL)
        transport.ranks = rank_threads.rank(rank)
        transport.plans = {"a plan": transport}
        transport.communicator = SimpleNamespace(destroy=lambda: destroyed.append(rank))
        transport.copies = mailboxes.connect(transport.ranks)
        transport.free()
        assert not transport.plans

    rank_threads.each(use)
    assert sorted(destroyed) == list(range(6))
    assert not runtime.mapped
    assert not runtime.allocated


def test_last_writes_come_before_the_end(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends waits for the words that others write to its mailbox, but not for
    ever."""
    words = [1, 1, 0]
    device: Any = SimpleNamespace(read=lambda at, size: np.array([words[0]], np.uint8))
    monkeypatch.setattr(mailboxes, "StreamOperations", lambda: device)
    monkeypatch.setattr(mailboxes.time, "sleep", lambda _: words.pop(0))
    rank_threads = Threads([[0, 1]])
    for left, waits in ([1, 1, 0], 2), ([1] * 9, 9):
        words[:] = left
        monkeypatch.setattr(mailboxes, "LAST_WRITES", 10.0 if waits == 2 else 0.0)
        mailboxes_by_rank = rank_threads.each(
            lambda rank: mailboxes.connect(rank_threads.rank(rank))
        )
        mailboxes_by_rank[0].close()
        assert len(words) == len(left) - (waits if waits == 2 else 0)
        assert len(runtime.mapped) == 1
        words[:] = [0]
        mailboxes_by_rank[1].close()
        assert not runtime.mapped


@pytest.mark.parametrize("can_flush", [0, 1])
def test_waits_for_data_flush_remote_writes(
    can_flush: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait flushes remote writes if the device can. A word that no data precede needs no
    flush."""
    asked: list[int] = []

    def function(stream: int, at: int, number: int, flags: int) -> int:
        asked.append(flags)
        return 0

    library = SimpleNamespace(cuStreamWaitValue32_v2=function, cuStreamWriteValue32_v2=function)
    monkeypatch.setattr(mailboxes.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(mailboxes.runtime, "getDevice", lambda: 3)

    def attribute(which: int, device: int) -> int:
        assert (which, device) == (mailboxes.runtime.cudaDevAttrCanFlushRemoteWrites, 3)
        return can_flush

    monkeypatch.setattr(mailboxes.runtime, "deviceGetAttribute", attribute)
    device, stream = mailboxes.StreamOperations(), SimpleNamespace(ptr=0)
    device.wait(stream, 64, 1, peers.AT_LEAST)
    device.wait(stream, 64, 0, peers.EQUAL)
    device.write(stream, 64, 1)
    assert asked == [peers.AT_LEAST | can_flush << 30, peers.EQUAL, 0]


def test_name_of_a_gpu_is_the_same_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever place CUDA_VISIBLE_DEVICES gives it."""
    current = [0]

    def device(index: int | None = None) -> Any:
        index = current[0] if index is None else index
        return SimpleNamespace(id=index, pci_bus_id=["0000:1B:00.0", "0000:29:00.0"][index > 1])

    monkeypatch.setattr(gpu.cupy.cuda, "Device", device)
    gpu._name_device.cache_clear()
    names = []
    for current[0] in range(3):
        names.append(gpu.device_name())
    gpu._name_device.cache_clear()
    assert names == ["GPU 0000:1B:00.0"] * 2 + ["GPU 0000:29:00.0"]


def test_an_error_is_told_before_transfers_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is aborted though copies do not end, and whatever fails meanwhile."""
    steps: list[str] = []
    never: Any = SimpleNamespace(done=False)
    stream: Any = SimpleNamespace(record=lambda: never)
    transport: Any = object.__new__(nccl.NCCL)
    transport.ranks = SimpleNamespace(gpu_transports={"nccl": transport})
    transport.call_stream = transport.stream = stream
    transport.plans = {"a plan": transport}

    class Stuck:
        def release(self, done: Any, patience: float) -> None:
            assert not done()
            steps.append(f"{patience:g} s")
            if fails:
                raise OSError("no more of this")

    transport.copies = Stuck()
    transport.communicator = SimpleNamespace(abort=lambda: steps.append("abort"))
    for fails in (False, True):
        steps.clear()
        if fails:
            with pytest.raises(OSError, match="no more"):
                transport.close()
        else:
            transport.close()
        assert steps == ["0.5 s", "abort", "10 s"]
    assert not transport.plans
    assert not vars(transport.ranks)


def test_nccl_connects_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects two ranks in their first exchange. The wait for the other rank has the call's
    timeout."""
    into = SimpleNamespace(do=lambda function, *pointers, capturable: function(0, *pointers))
    monkeypatch.setattr(nccl, "Queue", lambda: into)
    for name in ("eventRecord", "streamWaitEvent"):
        monkeypatch.setattr(nccl.cupy.cuda.runtime, name, lambda *args: None)
    connected, threads = threading.Event(), []

    def connect() -> None:
        threads.append(threading.get_ident())
        connected.wait(5)

    transport: Any = object.__new__(nccl.NCCL)
    ranks = Communicator()
    ranks.rank, ranks.size = 0, 1
    transport.__dict__.update(
        ranks=ranks, linked=set(), device=contextlib.nullcontext(), timers=None, timed=[],
        **dict.fromkeys(("stream", "ready", "done"), SimpleNamespace(ptr=0)),
        nccl=SimpleNamespace(groupStart=lambda: None, groupEnd=connect),
        communicator=SimpleNamespace(
            send=lambda *args: None, recv=lambda *args: None,
            allGather=lambda *args: threads.append(threading.get_ident()),
        ),
    )  # fmt: skip
    array: Any = SimpleNamespace(nbytes=8, data=SimpleNamespace(ptr=0))
    transport.ranks.timeout = 0.05
    with pytest.raises(RankError, match=r"rank 0 waited 0\.05 s"):
        transport.exchange({1: ([array], [array])})
    connected.set()
    transport.ranks.timeout = 10.0
    for distances in ((1,), (1,), (2,), (1,), (1, 2), (1, 3)):
        transport.exchange({distance: ([array], [array]) for distance in distances})
    gathered = nccl._AllGather(8)
    for _ in range(2):
        transport.transfer(gathered, 0, 0, 0)
    here = threading.get_ident()
    known = [thread == here for thread in threads]
    assert known == [False, False, True, False, True, True, False, False, True]


@pytest.mark.parametrize("ranks", [2, 3])
def test_nccl_is_late_in_plans_alone(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, the host takes long to launch what is to hide an exchange."""
    asked: list[str] = []
    for step in ("mark", "transfer", "join"):
        monkeypatch.setattr(nccl.NCCL, step, lambda *_, step=step: asked.append(step))
    stream = SimpleNamespace(ptr=3)
    monkeypatch.setattr(nccl.cupy.cuda, "get_current_stream", lambda: stream)
    transport: Any = object.__new__(nccl.NCCL)
    transport.ranks = SimpleNamespace(rank=0, size=ranks)
    array = SimpleNamespace(nbytes=8, data=SimpleNamespace(ptr=64))
    shifts = {distance: ([array], [array]) for distance in range(1, ranks)}
    for exchanger, late in ((transport, False), (transport.queued(nccl.Queue()), ranks == 2)):
        asked.clear()
        pending = exchanger.exchange(shifts)
        assert asked == ["mark", "transfer"][: 2 - late]
        pending.wait()
        assert asked == ["mark", "transfer", "join"]
