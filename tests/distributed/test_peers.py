"""Copies between GPUs of a host, with memory of the host in the place of GPUs, and streams that run
as tests say."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from gpu_problems import MISSING
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.distributed.transports import peers
from infonce.distributed.transports.peers import Copies, Swap, pieces

pytestmark = pytest.mark.extras
SPACE = 2**32  # addresses of a rank; its arrays begin in the middle


class Host:
    """All ranks: their memory, and what each of their streams has still to do."""

    def __init__(self, ranks: int, mailbox: int) -> None:
        size = 2**10 + mailbox + 2 * peers.SMALL + 2 * peers.LINE
        self.mailboxes = [np.zeros(size, np.uint8) for _ in range(ranks)]
        self.arrays: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[Any, ...]]] = [[] for _ in range(ranks)]

    def device(self, rank: int) -> Any:
        class Device:
            def copy(_, stream: int, *of: int) -> None:
                self.queues[rank].append(("copy", *of))

            def wait(_, stream: int, *of: int) -> None:
                self.queues[rank].append(("wait", *of))

            def write(_, stream: int, *of: int) -> None:
                self.queues[rank].append(("write", *of))

            def swap(_, stream: int, of: Swap, outgoing: Any, incoming: Any, *sides: int) -> None:
                sent = zip(outgoing, of.sent, strict=True)
                received = zip(incoming, of.received, strict=True)
                self.queues[rank].append(("swap", list(sent), list(received), *sides, []))

            def fill(_, at: int, byte: int, size: int) -> None:
                self.at(at, size)[:] = byte

        return Device()

    def array(self, rank: int, values: np.ndarray) -> int:
        """Its address."""
        self.arrays[rank].append(values)
        return rank * SPACE + SPACE // 2 + (len(self.arrays[rank]) - 1) * 2**20

    def at(self, address: int, size: int) -> np.ndarray:
        rank, place = divmod(address, SPACE)
        if place < SPACE // 2:
            found = self.mailboxes[rank][place : place + size]
        else:
            index, start = divmod(place - SPACE // 2, 2**20)
            found = self.arrays[rank][index][start : start + size]
        assert len(found) == size
        return found

    def run(self, choose: random.Random) -> None:
        """Any stream that can go on does, until none can."""
        while ready := [rank for rank, queue in enumerate(self.queues) if self.can(queue)]:
            rank = choose.choice(ready)
            kind, *of = self.queues[rank].pop(0)
            if kind == "copy":
                to, source, size = of
                self.at(to, size)[:] = self.at(source, size)
            elif kind == "write":
                self.at(of[0], 4).view(np.int32)[:] = of[1]
            elif kind == "swap":  # the second half of swap.cu
                _, received, _, mine, (number,) = of
                place = mine + number % 2 * peers.SMALL
                for to, size in received:
                    self.at(to, size)[:] = self.at(place, size)
                    place += -(-size // 16) * 16
                self.at(mine + 2 * peers.SMALL + peers.LINE, 4).view(np.int32)[:] = number

    def can(self, queue: list[tuple[Any, ...]]) -> bool:
        if queue and queue[0][0] == "wait":
            _, at, number, how = queue[0]
            word = self.at(at, 4).view(np.int32)[0]
            return bool(word == number if how == peers.EQUAL else word >= number)
        if queue and queue[0][0] == "swap":
            _, sent, _, other, mine, begun = queue[0]
            if not begun:  # the first half
                counter = self.at(mine + 2 * peers.SMALL + peers.LINE, 4).view(np.int32)[0]
                begun.append(int(counter) + 1)
                place = other + begun[0] % 2 * peers.SMALL
                for array, size in sent:
                    self.at(place, size)[:] = self.at(array, size)
                    place += -(-size // 16) * 16
                self.at(other + 2 * peers.SMALL, 4).view(np.int32)[:] = begun[0]
            return bool(self.at(mine + 2 * peers.SMALL, 4).view(np.int32)[0] >= begun[0])
        return bool(queue)


@settings(max_examples=150)
@given(
    ranks=st.integers(2, 6), lines=st.integers(1, 5), rounds=st.integers(1, 6),
    small=st.sampled_from([0, 2048, 8192]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_what_is_sent_arrives(ranks: int, lines: int, rounds: int, small: int, seed: int) -> None:
    """Arrays of any sizes, also none, in slots of a few lines, however streams come to run, and
    although one stream of each rank does everything."""
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "MAILBOX", peers.LINE * lines * peers.SLOTS * (ranks - 1))
        patch.setattr(peers, "SMALL", small)
        host, group = Host(ranks, peers.MAILBOX), range(ranks)
        mailboxes = {rank: rank * SPACE for rank in group}
        copies = [Copies(rank, mailboxes, host.device(rank)) for rank in group]
        assert [of.room for of in copies] == [peers.LINE * lines] * ranks
        expected = []
        for _ in range(rounds):
            sizes = {
                (a, b): tuple(choose.randrange(1, 2500) for _ in range(choose.randrange(6)))
                for a in group for b in group
            }  # fmt: skip
            for rank in group:
                swaps, addresses = [], []
                for distance in range(1, ranks):
                    to, source = (rank + distance) % ranks, (rank - distance) % ranks
                    out, back = sizes[rank, to], sizes[source, rank]
                    swaps.append(Swap(to, out, source, back))
                    for i, size in enumerate(out):
                        addresses.append(host.array(rank, message(rank, to, i, size)))
                    for i, size in enumerate(back):
                        into = np.zeros(size, np.uint8)
                        addresses.append(host.array(rank, into))
                        expected.append((into, message(source, rank, i, size)))
                copies[rank].run(swaps, addresses, 0)
        host.run(choose)
    assert host.queues == [[] for _ in group]
    for found, want in expected:
        np.testing.assert_array_equal(found, want)


def message(source: int, to: int, i: int, size: int) -> np.ndarray:
    rng = np.random.default_rng([source, to, i, size])
    return rng.integers(0, 256, size, np.uint8)


@given(
    sizes=st.lists(st.integers(1, 3000), max_size=5).map(tuple), lines=st.integers(1, 4)
)  # fmt: skip
def test_pieces(sizes: tuple[int, ...], lines: int) -> None:
    """Every byte once, in order, on lines of a slot, no two in one place."""
    room = lines * peers.LINE
    seen = [0] * len(sizes)
    for piece in pieces(sizes, room):
        end = 0
        for array, first, size, place in piece:
            assert first == seen[array]
            assert place % peers.LINE == 0
            assert place >= end
            end, seen[array] = place + size, first + size
        assert 0 < end <= room
    assert tuple(seen) == sizes
    assert len(pieces(sizes, room)) <= -(-sum(-(-s // peers.LINE) for s in sizes) // lines)


def test_waits_of_a_rank_whose_peer_is_gone_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error: however many pieces were to come, and to be taken."""
    monkeypatch.setattr(peers, "MAILBOX", peers.LINE * peers.SLOTS)
    monkeypatch.setattr(peers, "SMALL", 0)
    host, size = Host(2, peers.MAILBOX), 5 * peers.LINE
    copies = Copies(0, {0: 0, 1: SPACE}, host.device(0))
    addresses = [host.array(0, np.zeros(size, np.uint8)) for _ in range(2)]
    copies.run([Swap(1, (size,), 1, (size,))], addresses, 0)

    def done() -> bool:
        host.run(random.Random(0))
        return not host.queues[0]

    assert not done()
    copies.release(done)
    assert done()


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "")
def test_swap_with_itself() -> None:
    """The kernel, where both ranks are one: arrays of any sizes and places, in turn."""
    import cupy

    mailbox = cupy.zeros(2**20 + peers.MAILBOX + 3 * peers.SMALL, np.uint8)
    copies = Copies(0, dict.fromkeys((0, 1), mailbox.data.ptr), peers.Device())
    stream, rng = cupy.cuda.Stream(non_blocking=True), np.random.default_rng(0)
    for sizes in ((1,), (8, 24, 8), (64, 17, 3, 4096), (2**20,), (2**19 - 16, 8, 2**18 + 8), (5,)):
        shifts = [int(shift) for shift in rng.integers(0, 3, len(sizes)) * 8]
        sent = [cupy.asarray(rng.integers(0, 256, size + 16, np.uint8)) for size in sizes]
        received = [cupy.zeros_like(array) for array in sent]
        cupy.cuda.runtime.deviceSynchronize()
        places = [array.data.ptr + shift for array, shift in zip(sent, shifts, strict=True)]
        places += [
            array.data.ptr + 16 - shift for array, shift in zip(received, shifts, strict=True)
        ]
        copies.run([Swap(1, sizes, 1, sizes)], places, stream)
        stream.synchronize()
        for array, found, size, shift in zip(sent, received, sizes, shifts, strict=True):
            want = np.zeros(size + 16, np.uint8)
            want[16 - shift :][:size] = array.get()[shift:][:size]
            np.testing.assert_array_equal(found.get(), want)


def test_all_ranks_copy_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank lacks, the others know it, and what nobody has mapped is freed."""
    told: list[Any] = []
    freed: list[int] = []
    others: dict[str, Any] = {"hosts": [[0, 1]], "answers": {}}

    class Ranks:
        rank, size = 0, 2

        @property
        def peers(self) -> Any:
            return SimpleNamespace(hosts=others["hosts"])

        def allgather(self, value: Any) -> list[Any]:
            told.append(value)
            return [value, others["answers"].get(len(told), value)]

    def connect(**changes: Any) -> Any:
        others.update({"hosts": [[0, 1]], "answers": {}} | changes)
        told.clear()
        freed.clear()
        return peers.connect(Ranks())  # type: ignore[arg-type]

    mailbox = SimpleNamespace(at=4096, handle=b"a handle")
    monkeypatch.setattr(peers, "_Mailbox", lambda: mailbox)
    monkeypatch.setattr(peers, "Device", lambda: None)
    monkeypatch.setattr(peers, "_try", lambda copies: True)
    monkeypatch.setattr(peers.runtime, "free", freed.append)
    monkeypatch.setattr(peers.runtime, "ipcOpenMemHandle", lambda handle: 2**20)
    made = connect()
    assert made.mailboxes == {0: 4096, 1: 2**20}
    assert told == [b"a handle", True, True]
    assert connect(hosts=[[0], [1]]) is None
    assert not told
    assert connect(answers={1: b""}) is None
    assert freed == [4096]
    for answer in (2, 3):
        assert connect(answers={answer: False}) is None
        assert len(told) == 3
        assert not freed
    monkeypatch.setattr(peers, "_try", lambda copies: False)
    assert connect() is None
    assert told[-1] is False
    monkeypatch.setenv(peers.SWITCH, "0")
    assert connect() is None
    assert told == [b""]
