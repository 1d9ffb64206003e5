"""Exchanges among threads, without a loss: which keys meet which ranks, and where sums go; and the
choice of an exchange."""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_device import Memory
from hypothesis import example, given
from hypothesis import strategies as st
from infonce.distributed import cost, schedule
from infonce.distributed.communicators.processes import Peers, Process
from infonce.distributed.exchanges.base import Round
from infonce.distributed.exchanges.gather import Gather
from infonce.distributed.exchanges.hierarchical import Hierarchical
from infonce.distributed.exchanges.partition import Partition
from infonce.distributed.exchanges.ring import Ring
from infonce.kernels.problem import Problem


class Garbage(Memory):
    """Counted arrays that hold what nobody wrote."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        array[...] = 77
        return array


class Wires:
    """Mail among ranks that are threads; what was sent is kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[tuple[int, int, int], list[Any]] = {}  # by exchange, sender, receiver
        self.arrived = threading.Condition()

    def message(self, *key: int) -> list[Any]:
        with self.arrived:
            if not self.arrived.wait_for(lambda: key in self.sent, 5):
                raise TimeoutError
        return self.sent[key]


class Wire:
    """The transport of one rank. Until the end of an exchange, what is sent may be read and what is
    received may be written at any time: so it is written first, and compared last."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank, self.exchanges = wires, rank, itertools.count()

    def exchange(self, shifts: Any) -> Any:
        number, wires = next(self.exchanges), self.wires
        with wires.arrived:
            for distance, (send, receive) in shifts.items():
                to = number, self.rank, (self.rank + distance) % wires.size
                assert to not in wires.sent, "two shifts to one rank"
                wires.sent[to] = [np.array(array) for array in send]
                for array in receive:
                    array[...] = 99
            wires.arrived.notify_all()

        def wait() -> None:
            for distance, (send, receive) in shifts.items():
                to = number, self.rank, (self.rank + distance) % wires.size
                for array, sent in zip(send, wires.sent[to], strict=True):
                    np.testing.assert_array_equal(array, sent)
                message = wires.message(number, (self.rank - distance) % wires.size, self.rank)
                for into, array in zip(receive, message, strict=True):
                    into[...] = array

        return SimpleNamespace(wait=wait)


def exchange_by_name(
    name: str, xp: Any, rank: int, wire: Wire, keys: Partition, local_size: int, own: Any,
    symmetric: bool,
) -> Any:  # fmt: skip
    if name == "ring":
        return Ring(xp, rank, wire, keys, 1, symmetric)
    if name == "gather":
        return Gather(xp, rank, wire, keys, own)
    return Hierarchical(xp, rank, wire, keys, local_size, own)


@pytest.mark.parametrize("name", ["ring", "gather", "hierarchical"])
@given(
    nodes=st.integers(1, 5), local_size=st.integers(1, 4), seed=st.integers(0, 10**6),
    half=st.booleans(), same_pairs=st.booleans(), with_sums=st.sampled_from([True, True, False]),
)  # fmt: skip
@example(nodes=4, local_size=3, seed=2, half=False, same_pairs=False, with_sums=True)
@example(nodes=2, local_size=2, seed=1, half=True, same_pairs=True, with_sums=True)
def test_every_key_meets_every_rank(
    name: str, nodes: int, local_size: int, seed: int, half: bool, same_pairs: bool, with_sums: bool
) -> None:
    """Once in each of two rounds, in order, and its sums are those of all ranks; or half of them,
    where a pair of shards meets on one rank."""
    n = nodes * local_size
    keys = Partition(np.random.default_rng(seed).integers(0, 4, n).tolist())
    wires = Wires(n)
    met: list[Any] = [[] for _ in range(n)]  # by rank: (keys, whether with sums), of each round
    complete: list[Any] = [[] for _ in range(n)]
    memories = [Garbage() for _ in range(n)]

    def work(rank: int) -> None:
        start, stop = keys.starts[rank : rank + 2]
        own = [np.arange(start, stop), np.arange(start, stop)[:, None] * [1.0, 2.0]]
        wire = Wire(wires, rank)
        exchange = exchange_by_name(name, memories[rank], rank, wire, keys, local_size, own, half)
        for _ in range(2):
            visits: list[tuple[int, bool]] = []
            sums_of_own = np.zeros((stop - start, 4), np.int64)

            def visit(step: Any, arrays: Any, sums: Any, visits: Any = visits) -> None:
                index = np.arange(step.rows.start, step.rows.stop) % max(keys.total, 1)
                np.testing.assert_array_equal(arrays[0], index)
                np.testing.assert_array_equal(arrays[1], index[:, None] * [1.0, 2.0])
                assert not len(step) or step.are_own == bool(set(index) & set(range(start, stop)))
                assert 0 <= step.step < step.steps
                visits += [(int(i), bool(sums)) for i in index]
                for part in sums:
                    part[:] = 0
                    part[: len(index)] = 8**rank * (1 + index[:, None] % 3)

            def combine(sums: Any, others: Any) -> None:
                for mine, theirs in zip(sums, others, strict=True):
                    mine += theirs

            def keep(mine: slice, *parts: Any, into: Any = sums_of_own) -> None:
                for sums in parts:
                    into[mine] += sums[0]

            types = [((4,), np.dtype(np.int64))] * with_sums
            exchange.run(Round(own, visit, types, combine, keep, half, same_pairs))
            met[rank].append(visits)
            complete[rank].append(sums_of_own)

    with ThreadPoolExecutor(n) as pool:
        errors = [future.exception() for future in [pool.submit(work, rank) for rank in range(n)]]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, TimeoutError)):
        raise error  # one that others did not wait for

    for round_index in range(2):
        for key in range(keys.total):
            owner = next(r for r in range(n) if key < keys.starts[r + 1])
            key_sums = [dict(met[r][round_index]).get(key) for r in range(n)]
            for r in range(n):
                assert [i for i, _ in met[r][round_index]].count(key) <= 1
            assert key_sums[owner] is not None
            want = sum(8**r for r in range(n) if key_sums[r]) * (1 + key % 3)
            assert (complete[owner][round_index][key - keys.starts[owner]] == want).all()
            if half:
                continue
            assert key_sums == [with_sums] * n
    if half:
        for round_index, (a, b) in itertools.product(range(2), itertools.combinations(range(n), 2)):
            if not (keys.rows[a] and keys.rows[b]):
                continue
            one, other = (
                dict(met[r][round_index]).get(keys.starts[s]) for r, s in ((a, b), (b, a))
            )
            if with_sums and same_pairs:
                assert {one, other} == {True, None}
            elif with_sums:
                assert {one, other} in ({True, None}, {False})
    row = 24, 32 * with_sums
    if name == "gather":
        room = cost.gather_bytes(keys.rows, *row)
    if name == "hierarchical":
        room = cost.hierarchical_bytes(keys.rows, local_size, *row)
    if name != "ring":
        assert max(memory.peak for memory in memories) <= room
    if name == "hierarchical" and not half:  # what goes from node to node
        entered: Counter[tuple[int, str]] = Counter()
        for (_, source, to), arrays in wires.sent.items():
            if source // local_size != to // local_size:
                for array in arrays:
                    entered[to // local_size, f"{array.dtype} {array.ndim}"] += len(array)
        for node in range(nodes):
            here = sum(keys.rows[node * local_size : (node + 1) * local_size])
            assert entered[node, "float64 2"] == 2 * (keys.total - here)
        sums = sum(entered[node, "int64 2"] for node in range(nodes))
        assert sums == 2 * keys.total * (nodes - 1) * with_sums


def make_ranks(*nodes: str) -> Any:
    peers = Peers([Process(node, node, "", r, "") for r, node in enumerate(nodes)])
    return SimpleNamespace(size=len(nodes), rank=0, peers=peers)


def chosen(
    asked: str, ranks: Any, workspace: int = 2**30, rows: int = 5, on_gpu: bool = False
) -> str:
    problem = Problem(*np.zeros((2, rows, 4)), 1.0, 1.0, workspace=workspace)  # type: ignore[misc]
    keys = Partition([rows] * ranks.size)
    nodes = schedule.group_ranks_by_node(ranks)
    return schedule.choose_exchange(asked, problem, None, on_gpu, keys, nodes, workspace // 2)


def test_hosts_that_a_hierarchical_exchange_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFONCE_LOCAL_SIZE", raising=False)
    for nodes in ("aabb", "aaabbb", "aaa", "abc"):
        assert chosen("hierarchical", make_ranks(*nodes)) == "hierarchical"
    for nodes, words in (("aaabb", r"\[0, 1, 2\], \[3, 4\]"), ("abab", r"\[0, 2\], \[1, 3\]")):
        with pytest.raises(ValueError, match=f"as many ranks on each node.*got .*{words}; exch"):
            chosen("hierarchical", make_ranks(*nodes))
        assert chosen("auto", make_ranks(*nodes)) == "gather"
        assert chosen("ring", make_ranks(*nodes)) == "ring"
    with pytest.raises(ValueError, match=r"workspace: expected at least .* to gather keys"):
        chosen("hierarchical", make_ranks(*"aabb"), workspace=1000)


def test_hosts_by_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(*"aaabbb")
    monkeypatch.setenv("INFONCE_LOCAL_SIZE", "2")
    assert schedule.group_ranks_by_node(ranks) == [[0, 1], [2, 3], [4, 5]]
    for word in ("4", "0", "-2", "two"):
        monkeypatch.setenv("INFONCE_LOCAL_SIZE", word)
        with pytest.raises(ValueError, match=f"a divisor of the 6 ranks, got '{word}'"):
            chosen("ring", ranks)
    monkeypatch.delenv("INFONCE_LOCAL_SIZE")
    assert schedule.group_ranks_by_node(SimpleNamespace(size=3, peers=None)) == [[0, 1, 2]]  # type: ignore[arg-type]


def test_auto_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is hierarchical on GPUs of several hosts if the model says so and its buffers fit."""
    monkeypatch.delenv("INFONCE_LOCAL_SIZE", raising=False)
    asked: list[Any] = []
    monkeypatch.setattr(cost, "fastest", lambda *args: asked.append(args) or args[-1][-1])
    assert chosen("auto", make_ranks(*"aabb"), on_gpu=True) == "hierarchical"
    assert chosen("auto", make_ranks(*"aabbb"), on_gpu=True) == "gather"
    assert chosen("auto", make_ranks(*"aabb"), workspace=100, on_gpu=True) == "ring"
    assert [(call[2], call[3].node_gpus) for call in asked] == [(4, 2), (5, 3), (4, 2)]
