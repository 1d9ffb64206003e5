"""Ranks and transports without mpiexec: choices, messages, and a communicator of one's own."""

import dataclasses
import gc
import itertools
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from infonce.distributed import agreement, call, passes, run, schedule
from infonce.distributed.communicators import base, mpi, processes
from infonce.distributed.exchanges.partition import Partition
from infonce.distributed.losses import RANK_OPTIONS
from infonce.distributed.transports import choice
from infonce.kernels.cpu import resources
from infonce.kernels.solve import Vectors

import infonce
from infonce import distributed, spec


class Alone(distributed.Communicator):
    """A communicator of one rank, as small as it can be."""

    rank, size = 0, 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def shift(self, send: Sequence[Any], receive: Sequence[Any], distance: int = 1) -> Any:
        raise AssertionError("one rank has nobody to send to")


class Pair(distributed.Communicator):
    """One of two threads: what a rank sends is in the other's queue."""

    size = 2

    def __init__(self, rank: int, queues: list[queue.Queue[Any]]) -> None:
        self.rank, self.queues = rank, queues

    def allgather(self, value: Any) -> list[Any]:
        self.queues[1 - self.rank].put(value)
        other = self.queues[self.rank].get(timeout=60)
        return [other, value] if self.rank else [value, other]

    def shift(self, send: Sequence[Any], receive: Sequence[Any], distance: int = 1) -> Any:
        self.queues[1 - self.rank].put([array.copy() for array in send])

        def wait() -> None:
            for to, array in zip(receive, self.queues[self.rank].get(timeout=60), strict=True):
                to[...] = array

        return types.SimpleNamespace(wait=wait)


def over_pair(work: Any) -> list[Any]:
    """What `work` returns of each of two ranks: (its communicator, its rows of 12)."""
    queues: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    rows = [slice(0, 5), slice(5, 12)]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: work(Pair(rank, queues), rows[rank]), range(2)))


def test_communicator_of_ones_own() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 12, 5))
    want = infonce.clip_loss_and_grad(x, y, scale=3.0)
    results = over_pair(
        lambda comm, rows: distributed.clip_loss_and_grad(
            x[rows], y[rows], scale=3.0, comm=comm, exchange="ring"
        )
    )
    for got in results:
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-13)
    text = np.concatenate([got.grads.text for got in results])
    np.testing.assert_allclose(text, want.grads.text, rtol=1e-12, atol=1e-15)


class Summing(Vectors):
    """Steps on vectors whose totals sum the losses of a reduced loss, as on a GPU."""

    def totals(self, problem: Any, losses: Any, *parts: Any) -> Any:
        loss = None if problem.common_share is None else losses.sum()
        return loss, *super().totals(problem, losses, *parts)[1:]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_reduction_over_ranks(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on the loss, also if only one of them sums losses in its totals."""
    x, y = np.random.default_rng(0).standard_normal((2, 12, 5))
    block_runner = run.choose_block_runner

    def with_vectors(request: Any) -> Any:
        vectors = (Summing if len(request.problem.query) == 7 else Vectors)(np)
        return dataclasses.replace(block_runner(request), vectors=vectors)

    monkeypatch.setattr(run, "choose_block_runner", with_vectors)
    want = infonce.clip_loss_and_grad(x, y, scale=3.0, reduction=reduction)
    results = over_pair(
        lambda comm, rows: distributed.clip_loss_and_grad(
            x[rows], y[rows], scale=3.0, comm=comm, exchange="ring", reduction=reduction
        )
    )
    for got, rows in zip(results, (slice(0, 5), slice(5, 12)), strict=True):
        rank_loss = want.loss[rows] if reduction == "none" else want.loss
        np.testing.assert_allclose(got.loss, rank_loss, rtol=1e-13)
        np.testing.assert_allclose(got.grads.scale, want.grads.scale, rtol=1e-12)


@pytest.mark.parametrize("loss", [*spec.LOSSES, "clip of prefixes"])
def test_one_rank_is_one_process(loss: str) -> None:
    """Bit for bit, and without a word to anyone."""
    loss, _, prefixes = loss.partition(" of ")
    x, y = np.random.default_rng(0).standard_normal((2, 12, 5))
    kind, ranks = spec.LOSSES[loss], Alone()
    options: dict[str, Any] = {"scale": 3.0, "normalize": True}
    if prefixes:  # a wide call, whose products have threads
        x, y = np.random.default_rng(0).standard_normal((2, 1500, 96))
        options["dims"] = (32, 96)
    args: list[Any] = [x, y][: len(kind.arguments)]
    args += [np.arange(12) // 3] if kind.classes else []
    args += [np.array(-1.0)] if kind.sigmoid else []
    ranks.allgather = None  # type: ignore[assignment, method-assign]
    want = getattr(infonce, f"{loss}_loss_and_grad")(*args, **options)
    for gradient_scale in ("global", "ddp"):
        got = getattr(distributed, f"{loss}_loss_and_grad")(
            *args, **options, comm=ranks, gradient_scale=gradient_scale
        )
        for a, b in zip((got.loss, *got.grads), (want.loss, *want.grads), strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)
    alone = getattr(distributed, f"{loss}_loss")(*args, **options, comm=ranks)
    assert alone == getattr(infonce, f"{loss}_loss")(*args, **options)


def test_errors_of_one_rank_are_those_of_one_process() -> None:
    x = np.ones((3, 2))
    options: dict[str, Any]
    for args, options, error, words in (
        ((x, x[:2]), {}, ValueError, "^text: expected 3 rows like image"),
        (
            (x,),
            {},
            TypeError,
            r"^infonce.distributed.clip_loss\(\): expected image, text",
        ),
        ((x, x), {"exchange": "all"}, ValueError, "^exchange: expected"),
        ((x, x), {"transport": "post"}, ValueError, "^transport: expected"),
        ((x, x), {"method": "fused"}, ValueError, "^method: expected"),
        ((x, x), {"comm": "world"}, TypeError, "^comm: expected an mpi4py communicator, got str"),
    ):
        with pytest.raises(error, match=words):
            distributed.clip_loss(*args, scale=1.0, **{"comm": Alone(), **options})
    timeout = np.int64(9)
    assert distributed.clip_loss(x, x, scale=1.0, comm=Alone(), timeout=timeout) > 0


@pytest.mark.parametrize("fails", [False, True])
def test_other_ranks_are_told_first(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells the others of an error before it abandons its transfers, which takes time."""
    steps: list[str] = []

    class Told(Alone):
        size = 2

        def allgather(self, value: Any) -> list[Any]:
            return [value, value]

        def fail(self, error: BaseException) -> None:
            steps.append(f"told of {error}")
            if fails:
                raise OSError("nobody hears")

    def solve(*args: Any) -> Any:
        raise ArithmeticError("no more of this")

    transport = types.SimpleNamespace(close=lambda: steps.append("closed"))
    monkeypatch.setattr(call.transports, "make", lambda *_: transport)
    monkeypatch.setattr(run, "solve", solve)
    with pytest.raises(OSError if fails else ArithmeticError):
        distributed.clip_loss(np.ones((2, 2)), np.ones((2, 2)), scale=1.0, comm=Told())
    assert steps == ["told of no more of this", "closed"]


def test_mpi4py_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"mpi4py cannot be imported.*infonce-kernels\[mpi\]"):
        distributed.clip_loss(np.ones((2, 2)), np.ones((2, 2)), scale=1.0)


def test_waiting_is_bounded() -> None:
    """For another rank, and for a library."""
    ranks, main = Alone(), threading.get_ident()
    assert ranks.bounded(threading.get_ident, "gloo") != main
    ranks.timeout = 0.05
    with pytest.raises(distributed.RankError, match=r"rank 0 waited 0.05 s for another rank"):
        ranks.until(lambda: False)
    with pytest.raises(distributed.RankError, match=r"rank 0 waited 0.05 s"):
        ranks.bounded(threading.Event().wait, "gloo")
    with pytest.raises(
        distributed.RankError, match="gloo failed on rank 0, and no rank said why: '1'"
    ):
        ranks.bounded(lambda: {}["1"], "gloo")


def test_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen are those of this machine and process namespace; numbers are used again."""
    me = processes.identity()
    if not me.start_time:
        pytest.skip("the system does not tell when processes started")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = processes._read_start_time(child.pid)
        peer = me._replace(pid=child.pid, start_time=started)
        known = [
            me, peer, peer._replace(machine="another"), peer._replace(namespace="pid:[1]"),
            peer._replace(start_time="1"), peer._replace(host_name="another name of this machine"),
        ]  # fmt: skip
        peers = processes.Peers(known)
        assert peers.gone() == {}
        with monkeypatch.context() as patch:
            patch.setattr(processes, "_read_start_time", lambda pid: "1")  # another process by now
            assert list(peers.gone()) == [1, 5]
        child.kill()
        patience = time.monotonic() + 10  # a process that nobody has waited for is gone too
        while not (gone := peers.gone()) and time.monotonic() < patience:
            time.sleep(0.01)
        assert gone[1] == f"rank 1 (process {child.pid} on {me.host_name}) is gone"
        assert child.returncode is None
        assert list(gone) == [1, 5]
    assert list(peers.gone()) == [1, 5]
    assert processes.Peers(known).gone() == {}  # never seen alive


def test_process_of_which_nothing_can_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot look sees no one end."""
    if not processes.identity().start_time:
        pytest.skip("the system does not tell when processes started")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = processes._read_start_time(child.pid)
        peers = processes.Peers([processes.identity()._replace(pid=child.pid, start_time=started)])
        assert list(peers.watched) == [0]

        def fails(path: str) -> Any:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(processes, "open", fails, raising=False)
        assert peers.gone() == {}
        child.kill()


def test_rank_that_ended_is_missed_by_later_calls() -> None:
    ranks: Any = object.__new__(mpi.MPIRanks)
    ranks.MPI, ranks._control = types.SimpleNamespace(Exception=OSError), object()
    ranks._read_messages, ranks._ended = lambda: None, {1: (3, "rank 1 has ended")}
    ranks.peers = types.SimpleNamespace(gone=lambda: {1: "rank 1 is gone"})
    ranks.allgather_count = 3  # its last: it has done its part
    ranks.listen()
    ranks.allgather_count = 4
    with pytest.raises(distributed.RankError, match="rank 1 has ended"):
        ranks.listen()


def test_short_waits_are_not_slept_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep is longer than it should be: none in the first milliseconds."""
    sleeps: list[float] = []
    now = itertools.count(0, 3e-4)
    clock = types.SimpleNamespace(monotonic=lambda: next(now), sleep=sleeps.append)
    monkeypatch.setattr(base, "time", clock)
    for looks, busy, slept in (
        (5, base.BUSY_WAIT, 0),
        (100, base.DEVICE_BUSY_WAIT, 0),
        (200, base.BUSY_WAIT, 180),
    ):
        left = iter(range(looks))
        Alone().until(lambda left=left: next(left, None) is None, busy)  # type: ignore[misc]
        assert slept <= len(sleeps) <= slept + 10 * bool(slept)
    assert max(sleeps) <= 1e-3
    assert sleeps == sorted(sleeps)


def test_memory_is_freed_with_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers do not wait for the garbage collector."""
    rings: list[Any] = []
    start = passes.PassesOverRanks.__init__

    def watched(self: Any, *args: Any) -> None:
        start(self, *args)
        rings.extend((weakref.ref(self), weakref.ref(self.not_finite)))

    monkeypatch.setattr(passes.PassesOverRanks, "__init__", watched)
    x, y = np.random.default_rng(0).standard_normal((2, 12, 5))
    gc.collect()
    gc.disable()
    try:
        for loss in ("clip", "info_nce", "siglip"):
            bias = -1.0 if loss == "siglip" else None
            kind = spec.LOSSES[loss]
            ranks = Alone()
            in_passes = {**RANK_OPTIONS, "exchange": "gather"}
            asked = agreement.RankCall(kind, None, bias, {"scale": 3.0}, in_passes, True)
            request, agreed, _ = agreement.agree_on_schedule(asked, [x, y], None, ranks)
            run.solve(request, agreed, False, False, ranks, choice.make(agreed.transport, ranks))
        alive = [
            reference() for reference in rings
        ]  # before a collection, which the end of this may begin
    finally:
        gc.enable()
    assert alive == [None] * 6


def test_choice_is_what_all_ranks_have() -> None:
    every = {"nccl": None, "cuda-aware": None, "staged": None}
    without = {**every, "nccl": "CuPy finds no NCCL"}
    assert choice.choose("auto", [every, every]) == "nccl"
    assert choice.choose("auto", [every, without]) == "cuda-aware"
    assert choice.choose("staged", [every, without]) == "staged"
    with pytest.raises(ValueError, match="rank 1: nccl: CuPy finds no NCCL"):
        choice.choose("nccl", [every, without])
    with pytest.raises(ValueError, match="does not carry this kind"):
        choice.choose("nccl", [{"mpi": None}])


def test_cuda_aware_by_explicit_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, want in (("1", True), ("0", False)):
        monkeypatch.setenv("INFONCE_CUDA_AWARE_MPI", value)
        assert choice.cuda_aware() is want
    monkeypatch.setenv("INFONCE_CUDA_AWARE_MPI", "maybe")
    with pytest.raises(ValueError, match="INFONCE_CUDA_AWARE_MPI: expected 0 or 1, got 'maybe'"):
        choice.cuda_aware()


@pytest.mark.extras
def test_cuda_aware_wants_ranks_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other communicators take no GPU arrays, and do not load MPI to ask."""
    pytest.importorskip("cupy")
    monkeypatch.setenv("INFONCE_CUDA_AWARE_MPI", "1")
    over_mpi = choice.gpu_availability(mpi.MPIRanks.over_mpi)
    assert over_mpi["cuda-aware"] is None
    monkeypatch.delenv("INFONCE_CUDA_AWARE_MPI")
    monkeypatch.setattr(choice, "_query_library", lambda: pytest.fail("MPI was loaded"))
    others = choice.gpu_availability(Alone.over_mpi)
    assert others["cuda-aware"] == "the ranks do not communicate by MPI"
    assert others.keys() == over_mpi.keys()


def test_partition() -> None:
    shards = Partition([3, 0, 2])
    assert (shards.total, shards.largest, shards.starts) == (5, 3, [0, 3, 3, 5])
    rows = np.array([0, 4, 2, 3])
    local = [Vectors(np).positives_in_block(rows, shard).tolist() for shard in shards.piece(0, 1)]
    assert local == [[0, -1, 2, -1], [-1] * 4, [-1, 1, -1, 0]]
    pieces = [shards.piece(j, 2) for j in range(2)]
    assert pieces[0] == [slice(0, 1), slice(3, 3), slice(3, 4)]
    assert pieces[1] == [slice(1, 3), slice(3, 3), slice(4, 5)]


def test_messages_have_a_size_that_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "MOST_MESSAGE_BYTES", 100)
    array = np.arange(60.0).reshape(6, 10)
    pieces = mpi._split_into_messages(array)
    assert [p.nbytes for p in pieces] == [100] * 4 + [80]
    pieces[1][:] = 0
    assert array.reshape(-1).view(np.uint8)[100:200].sum() == 0
    assert mpi._split_into_messages(array[:0]) == []


@pytest.mark.extras
def test_gradients_that_get_lost_are_named_at_the_caller_s_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("infonce.arrays._warned", set())
    z = torch.eye(4, requires_grad=True)
    with pytest.warns(UserWarning, match="no gradient will reach image, text") as caught:
        distributed.clip_loss(z, z, scale=2.0, comm=Alone())
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
def test_values_on_a_board() -> None:
    """Ranks that sleep are woken, values may have any length, and too long ones are refused."""
    from infonce.distributed.communicators import board

    size, rounds = 3, 60
    memory = mmap.mmap(-1, size * (board.LINE_BYTES + board.SLOTS * board.SLOT_BYTES))
    pipes = [os.pipe() for _ in range(size)]
    lengths = np.random.default_rng(0).integers(0, 3000, (rounds, size))
    lengths[rounds // 2, 1] = board.SLOT_BYTES + 1

    def work(rank: int) -> list[list[bytes] | None]:
        def until(done: Any, busy_wait: float, block: Any) -> None:
            while not done():
                assert busy_wait == 0.0
                block(100.0)

        ranks: Any = types.SimpleNamespace(rank=rank, size=size, until=until)
        ends = [out if r == rank else into for r, (out, into) in enumerate(pipes)]
        own = board.Board(ranks, memory, ends)
        own.crowded_until = float("inf")
        gathered = []
        for number, length in enumerate(lengths[:, rank].tolist()):
            if number % size == rank:
                time.sleep(5e-3)  # the others sleep meanwhile
            values = own.allgather(bytes([rank + number]) * length)
            gathered.append(None if values is None else list(map(bytes, values)))
        return gathered

    began = time.monotonic()
    with ThreadPoolExecutor(size) as threads:
        for gathered in threads.map(work, range(size)):
            for number, values in enumerate(gathered):
                want = [bytes([r + number]) * n for r, n in enumerate(lengths[number].tolist())]
                assert values == (None if number == rounds // 2 else want)
    assert time.monotonic() - began < 60
    for file in itertools.chain(*pipes):
        os.close(file)


@pytest.mark.parametrize("loss", ["clip", "siglip", "info_nce"])
def test_a_small_batch_on_each_rank(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have the same bits; the rows of a call that is repeated come with the ranks'
    comparison. Values that are not finite go by passes, on all ranks."""
    assert schedule.WHOLE_MULTIPLY_ADDS <= resources.SINGLE
    assert schedule.WHOLE_MULTIPLY_ADDS // 8 < resources.THREADED
    sides = list(np.random.default_rng(0).standard_normal((2, 12, 5)))
    shifts, shift = list[int](), Pair.shift
    monkeypatch.setattr(Pair, "shift", lambda *args: shifts.append(0) or shift(*args))
    bias = [-1.0] if loss == "siglip" else []

    def call(comm: Pair, rows: slice) -> Any:
        function = getattr(distributed, f"{loss}_loss_and_grad")
        parts = [side[rows] for side in sides]
        return [function(*parts, *bias, scale=3.0, comm=comm) for _ in range(2)]

    want = getattr(infonce, f"{loss}_loss_and_grad")(*sides, *bias, scale=3.0)
    results = over_pair(call)
    assert not shifts
    for result in itertools.chain(*results):
        np.testing.assert_allclose(result.loss, want.loss, rtol=1e-15)
        assert result.loss == results[0][0].loss
        assert result.grads.scale == results[0][0].grads.scale
        np.testing.assert_allclose(result.grads.scale, want.grads.scale, rtol=1e-12)
    for i, repeat in itertools.product(range(2), range(2)):
        got = np.concatenate([each[repeat].grads[i] for each in results])
        np.testing.assert_allclose(got, want.grads[i], rtol=1e-11, atol=1e-14)
    sides[0][0, 0] = np.nan
    for result in itertools.chain(*over_pair(call)):
        assert np.isnan(result.loss)
    assert shifts
