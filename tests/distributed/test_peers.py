"""Copies between GPUs of a host, with memory of the host in the place of GPUs, and streams that run
as tests say."""

import random
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from gpu_problems import MISSING
from hypothesis import given, settings
from hypothesis import strategies as st
from infonce.distributed.transports import mailboxes, nccl, peers
from infonce.distributed.transports.peers import Copies, Swap, divide_into_pieces
from infonce.kernels.gpu.device import signatures

pytestmark = pytest.mark.extras
SPACE = 2**32  # addresses of a rank; its arrays begin in the middle


class Host:
    """All ranks: their memory, and what each of their streams has still to do. NCCL's transfers
    between them, of which each waits for both of its ranks."""

    def __init__(self, ranks: int, mailbox: int) -> None:
        size = 2**10 + mailbox + 2 * peers.MOST_SWAP_BYTES + 2 * peers.LINE_BYTES
        self.mailboxes = [np.zeros(size, np.uint8) for _ in range(ranks)]
        self.arrays: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        self.queues: list[list[tuple[Any, ...]]] = [[] for _ in range(ranks)]
        # by (source, receiver), what either has begun: (its group, address, bytes)
        self.sends: dict[Any, list[Any]] = defaultdict(list)
        self.receives: dict[Any, list[Any]] = defaultdict(list)

    def library(self, rank: int) -> Any:
        """NCCL as one rank has it: its module and a communicator."""
        groups = self.queues[rank]

        def send(at: int, size: int, kind: int, to: int, stream: int) -> None:
            groups[-1][2].append((self.sends, (rank, to), at, size))

        def receive(at: int, size: int, kind: int, source: int, stream: int) -> None:
            groups[-1][2].append((self.receives, (source, rank), at, size))

        return SimpleNamespace(
            groupStart=lambda: groups.append(("group", [], [])), groupEnd=lambda: None,
            send=send, recv=receive,
        )  # fmt: skip

    def can_transfer(self, left: list[int], transfers: list[Any]) -> bool:
        """Begin the transfers of a group; whether all are complete. `left`: how many are not."""
        if not left:
            left.append(len(transfers))
            for side, link, at, size in transfers:
                side[link].append((left, at, size))
        for _, link, _, _ in transfers:
            while self.sends[link] and self.receives[link]:
                (sends_left, source, size), (receives_left, to, room) = (
                    side[link].pop(0) for side in (self.sends, self.receives)
                )
                assert size == room
                self.at(to, size)[:] = self.at(source, size)
                sends_left[0] -= 1
                receives_left[0] -= 1
        return not left[0]

    def device(self, rank: int) -> Any:
        class Device:
            def copy(_, stream: int, *operands: int) -> None:
                self.queues[rank].append(("copy", *operands))

            def wait(_, stream: int, *operands: int) -> None:
                self.queues[rank].append(("wait", *operands))

            def write(_, stream: int, *operands: int) -> None:
                self.queues[rank].append(("write", *operands))

            def swap(
                _, stream: int, layout: Swap, outgoing: Any, incoming: Any, *sides: int
            ) -> None:
                sent = zip(outgoing, layout.sent, strict=True)
                received = zip(incoming, layout.received, strict=True)
                self.queues[rank].append(("swap", list(sent), list(received), *sides, []))

            def fill(_, at: int, byte: int, size: int) -> None:
                self.at(at, size)[:] = byte

        return Device()

    def array(self, rank: int, values: np.ndarray) -> int:
        """The address of an array on the GPU of `rank` with these values."""
        self.arrays[rank].append(values)
        return rank * SPACE + SPACE // 2 + (len(self.arrays[rank]) - 1) * 2**20

    def at(self, address: int, size: int) -> np.ndarray:
        rank, place = divmod(address, SPACE)
        if place < SPACE // 2:
            memory = self.mailboxes[rank][place : place + size]
        else:
            index, start = divmod(place - SPACE // 2, 2**20)
            memory = self.arrays[rank][index][start : start + size]
        assert len(memory) == size
        return memory

    def run(self, choose: random.Random) -> None:
        """Any stream that can go on does, until none can."""
        while ready := [rank for rank, queue in enumerate(self.queues) if self.can(queue)]:
            rank = choose.choice(ready)
            kind, *operands = self.queues[rank].pop(0)
            if kind == "copy":
                to, source, size = operands
                self.at(to, size)[:] = self.at(source, size)
            elif kind == "write":
                self.at(operands[0], 4).view(np.int32)[:] = operands[1]
            elif kind == "swap":  # the second half of swap.cu
                _, received, _, mine, (number,) = operands
                place = mine + number % 2 * peers.MOST_SWAP_BYTES
                for to, size in received:
                    self.at(to, size)[:] = self.at(place, size)
                    place += -(-size // 16) * 16
                counter = mine + 2 * peers.MOST_SWAP_BYTES + peers.LINE_BYTES
                self.at(counter, 4).view(np.int32)[:] = number

    def can(self, queue: list[tuple[Any, ...]]) -> bool:
        if queue and queue[0][0] == "wait":
            _, at, number, how = queue[0]
            word = self.at(at, 4).view(np.int32)[0]
            return bool(word == number if how == peers.EQUAL else word >= number)
        if queue and queue[0][0] == "group":
            return self.can_transfer(*queue[0][1:])
        if queue and queue[0][0] == "swap":
            _, sent, _, other, mine, begun = queue[0]
            if not begun:  # the first half
                counter = mine + 2 * peers.MOST_SWAP_BYTES + peers.LINE_BYTES
                begun.append(int(self.at(counter, 4).view(np.int32)[0]) + 1)
                place = other + begun[0] % 2 * peers.MOST_SWAP_BYTES
                for array, size in sent:
                    self.at(place, size)[:] = self.at(array, size)
                    place += -(-size // 16) * 16
                self.at(other + 2 * peers.MOST_SWAP_BYTES, 4).view(np.int32)[:] = begun[0]
            return bool(self.at(mine + 2 * peers.MOST_SWAP_BYTES, 4).view(np.int32)[0] >= begun[0])
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
        patch.setattr(peers, "SLOTS_BYTES", peers.LINE_BYTES * lines * peers.SLOTS * (ranks - 1))
        patch.setattr(peers, "MOST_SWAP_BYTES", small)
        host, group = Host(ranks, peers.SLOTS_BYTES), range(ranks)
        mailboxes = {rank: rank * SPACE for rank in group}
        copies = [Copies(rank, mailboxes, host.device(rank)) for rank in group]
        assert [copier.slot_bytes for copier in copies] == [peers.LINE_BYTES * lines] * ranks
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
    for got, want in expected:
        np.testing.assert_array_equal(got, want)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4), rounds=st.integers(1, 3),
    least=st.sampled_from([1, 1000]), small=st.sampled_from([0, 2048]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_exchanges_over_hosts(
    sizes: list[int], rounds: int, least: int, small: int, seed: int
) -> None:
    """Hosts of one to three GPUs exchange with any rank, by copies or by NCCL."""
    choose = random.Random(seed)
    ranks = list(range(sum(sizes)))
    order = choose.choice([ranks, choose.sample(ranks, len(ranks))])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    hosts = [sorted(order[at : at + n]) for at, n in zip(starts, sizes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("SLOTS_BYTES", 2**14),
            ("MOST_SWAP_BYTES", small),
            ("LEAST_COPY_BYTES", least),
        ):
            patch.setattr(peers, name, value)
        for name in ("eventRecord", "streamWaitEvent"):
            patch.setattr(nccl.cupy.cuda.runtime, name, lambda *args: None)
        fabric = Host(len(ranks), peers.SLOTS_BYTES)
        into: Any = SimpleNamespace(
            do=lambda function, *pointers, capturable: function(0, *pointers)
        )
        queued = []
        for rank in ranks:
            host = next(ranks_of_host for ranks_of_host in hosts if rank in ranks_of_host)
            transport: Any = object.__new__(nccl.NCCL)
            transport.ranks = SimpleNamespace(rank=rank, size=len(ranks))
            transport.nccl = transport.communicator = fabric.library(rank)
            transport.stream = transport.ready = transport.done = SimpleNamespace(ptr=0)
            transport.linked = {
                (d, *ranks_of_host) for d in ranks for ranks_of_host in np.ndindex(2, 2)
            }
            transport.timed = []
            if len(host) > 1:
                mailboxes_of_host = {other: other * SPACE for other in host}
                transport.copies = Copies(rank, mailboxes_of_host, fabric.device(rank))
            queued.append(nccl._QueuedNCCL(transport, into))
        expected = []
        for _ in range(rounds):
            distances = choose.sample(ranks[1:], choose.randrange(1, len(ranks)))
            messages = {
                (rank, distance): [
                    choose.choice([0, 8, choose.randrange(1, 5000)])
                    for _ in range(choose.randrange(1, 4))
                ]
                for rank in ranks for distance in distances
            }  # fmt: skip
            for rank in ranks:
                shifts: dict[int, Any] = {}
                for distance in distances:
                    out, back = [], []
                    for i, size in enumerate(messages[rank, distance]):
                        sent = message(rank, distance, i, size)
                        out.append(array_at(fabric.array(rank, sent), size))
                    source = (rank - distance) % len(ranks)
                    for i, size in enumerate(messages[source, distance]):
                        received = np.zeros(size, np.uint8)
                        back.append(array_at(fabric.array(rank, received), size))
                        expected.append((received, message(source, distance, i, size)))
                    shifts[distance] = out, back
                queued[rank].exchange(shifts).wait()
        fabric.run(choose)
    assert fabric.queues == [[] for _ in ranks]
    for got, want in expected:
        np.testing.assert_array_equal(got, want)


def array_at(address: int, size: int) -> Any:
    return SimpleNamespace(nbytes=size, data=SimpleNamespace(ptr=address))


def message(source: int, to: int, i: int, size: int) -> np.ndarray:
    rng = np.random.default_rng([source, to, i, size])
    return rng.integers(0, 256, size, np.uint8)


@given(
    sizes=st.lists(st.integers(1, 3000), max_size=5).map(tuple), lines=st.integers(1, 4)
)  # fmt: skip
def test_pieces(sizes: tuple[int, ...], lines: int) -> None:
    """Every byte once, in order, on lines of a slot, no two in one place."""
    room = lines * peers.LINE_BYTES
    seen = [0] * len(sizes)
    for piece in divide_into_pieces(sizes, room):
        end = 0
        for array, first, size, place in piece:
            assert first == seen[array]
            assert place % peers.LINE_BYTES == 0
            assert place >= end
            end, seen[array] = place + size, first + size
        assert 0 < end <= room
    assert tuple(seen) == sizes
    assert len(divide_into_pieces(sizes, room)) <= -(
        -sum(-(-s // peers.LINE_BYTES) for s in sizes) // lines
    )


def test_waits_of_a_rank_whose_peer_is_gone_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, waits end however many pieces are left."""
    monkeypatch.setattr(peers, "SLOTS_BYTES", peers.LINE_BYTES * peers.SLOTS)
    monkeypatch.setattr(peers, "MOST_SWAP_BYTES", 0)
    host, size = Host(2, peers.SLOTS_BYTES), 5 * peers.LINE_BYTES
    copies = Copies(0, {0: 0, 1: SPACE}, host.device(0))
    addresses = [host.array(0, np.zeros(size, np.uint8)) for _ in range(2)]
    copies.run([Swap(1, (size,), 1, (size,))], addresses, 0)

    def done() -> bool:
        host.run(random.Random(0))
        return not host.queues[0]

    assert not done()
    copies.release(done)
    assert done()


def test_kernel_takes_what_a_swap_hands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its arguments, sides and bytes of arrays included."""
    launches: list[Any] = []
    monkeypatch.setattr(mailboxes, "swap_arrays", lambda blocks, values: launches.append(values))
    device = object.__new__(mailboxes.StreamOperations)  # without a GPU
    device.swap(nullcontext(), Swap(1, (8, 24), 1, (8,)), [256, 512], [1024], SPACE, 0)
    swap = signatures.signature("ranks/swap.cu", "swap")
    swap.require(launches[0])
    for name, field in swap.fields:
        if isinstance(field, signatures.Structure):
            field.require(launches[0][name])


@pytest.mark.gpu
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "")
def test_swap_with_itself() -> None:
    """The kernel, where both ranks are one: arrays of any sizes and places, in turn."""
    import cupy

    mailbox = cupy.zeros(2**20 + peers.SLOTS_BYTES + 3 * peers.MOST_SWAP_BYTES, np.uint8)
    copies = Copies(0, dict.fromkeys((0, 1), mailbox.data.ptr), mailboxes.StreamOperations())
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
        for array, got, size, shift in zip(sent, received, sizes, shifts, strict=True):
            want = np.zeros(size + 16, np.uint8)
            want[16 - shift :][:size] = array.get()[shift:][:size]
            np.testing.assert_array_equal(got.get(), want)
