"""How long a call over ranks takes, by its exchange, and what memory; from measured constants.

With b rows of each side on each of n GPUs, a call takes 2 b b n D operations forward and 6 b b n D
backward on each. The ring has n steps forward and n backward. While a block is computed the next
one is sent:

    step = start + max(operations / rate, latency + bytes / bandwidth)

Forward, keys are sent with their ids and column statistics; backward, with their factors and dK.
The last transfer, of dK to the owner of its keys, overlaps with nothing.

Over hosts a ring is as fast as its slowest link.

The gather has two blocks forward and two or a few more backward, and four transfers: of keys, which
hide behind the own block; of column statistics; of factors; and of dK, from the end of the first
block backward on.

The hierarchical exchange visits a host at a time: what NVLink and the network carry for one has the
time of its block to hide behind. Its blocks are launched as those of the ring. Nothing overlaps
with the first keys from another host, but for the own block, nor with the way home of the last
sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import sqrt

from infonce.kernels.problem import WORKSPACE


@dataclass(frozen=True)
class Link:
    """The connection of one GPU to the next."""

    latency: float  # seconds
    bandwidth: float  # bytes a second, one way


@dataclass(frozen=True)
class Machine:
    """The parameters of the model. Defaults: bfloat16, D = 512, from benchmarks/results/ring.json;
    what only a gather has, from benchmarks/results/exchanges-mpi.json."""

    rate: float = 610e12  # operations a second, of large blocks
    start: float = 0.28e-3  # seconds a block: launches, and idle multiprocessors at its end
    inside: Link = Link(20e-6, 168e9)  # NVLink, as measured in shifts of 34 to 67 MB
    across: Link = Link(30e-6, 45e9)  # 400 Gb/s a GPU
    gpus: int = 8  # of a host
    call: float = 0.17e-3  # seconds of a call that gathers: agreement of the ranks, sums over them
    block: float = 0.06e-3  # seconds of its blocks, as `start`
    message: float = 1.5e-6  # seconds of a message to one rank


@dataclass(frozen=True)
class Step:
    """A predicted call, in seconds."""

    seconds: float
    computing: float
    exposed: float  # communication that does not overlap with computation

    @property
    def efficiency(self) -> float:
        return self.computing / self.seconds


CHUNK = 2**26  # bytes of sums from which on they go home in parts
MOST_CHUNKS = 4
NVLINK = Link(20e-6, 300e9)  # large messages
ITEM, DK = 2, 4  # bytes of a feature, and of dK's elements
VECTORS = 300  # bytes a row in vectors: sums, log-sum-exps, factors, positives


def transfer_bytes(rows: float, dim: int) -> tuple[float, float]:
    """Bytes of a forward and of a backward step."""
    keys = rows * dim * ITEM
    return keys + 16 * rows, keys + 24 * rows + rows * dim * DK


def predict(rows: float, dim: int, ranks: int, machine: Machine | None = None) -> Step:
    """One call of clip's loss and gradients with `rows` rows of each side on each of `ranks`."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    link = machine.inside if ranks <= machine.gpus else machine.across  # the slowest
    computing, seconds, starts = 0.0, 0.0, 2 * ranks * machine.start
    for share, size in zip((2, 6), transfer_bytes(rows, dim), strict=True):
        block = share * rows * rows * dim / machine.rate
        moving = link.latency + size / link.bandwidth if ranks > 1 else 0.0
        seconds += ranks * (machine.start + max(block, moving))
        computing += ranks * block
    if ranks > 1:
        seconds += link.latency + rows * dim * DK / link.bandwidth
    return Step(seconds, computing, seconds - computing - starts)


def _require(rows: float, dim: int, ranks: int) -> None:
    if rows <= 0 or dim < 1 or ranks < 1:
        raise ValueError(f"rows, dim, ranks: expected positive numbers, got {rows}, {dim}, {ranks}")


def predict_gather(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Step:  # fmt: skip
    """As `predict`, of a call that gathers keys."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    others, hosts = ranks - 1, -(-ranks // machine.gpus)
    neighbours = min(others, -(-ranks // hosts) - 1)  # the other ranks of the host

    def moving(bytes_of_row: float) -> float:
        """Seconds to exchange an array of a row a key with every other rank."""
        if not others:
            return 0.0
        size = rows * bytes_of_row
        far = machine.across
        times = [machine.inside.latency + neighbours * size / machine.inside.bandwidth]
        if others > neighbours:
            times.append(far.latency + (others - neighbours) * size / far.bandwidth)
        return others * machine.message + max(times)

    forward, backward = (share * rows * rows * dim / machine.rate for share in (2, 6))
    computing = ranks * (forward + backward)
    blocks = min(2, ranks)
    seconds = machine.call + 2 * blocks * machine.block
    seconds += max(forward, moving(dim * ITEM)) + others * forward
    if others:
        seconds += moving(16) + moving(24)
        chunks = chunks_of(rows * ranks * dim * DK, others)
        seconds += (chunks - 1) * machine.block
        before = others * backward / chunks  # the first dK goes home
        seconds += max(ranks * backward, before + moving(dim * DK))
    else:
        seconds += backward
    starts = machine.call + 2 * blocks * machine.block
    return Step(seconds, computing, seconds - computing - starts)


def predict_hierarchical(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Step:  # fmt: skip
    """As `predict`, of a call whose keys are gathered inside hosts and go round between them."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    hosts = -(-ranks // machine.gpus)
    host_ranks = ranks / hosts

    def inside(bytes_of_row: float) -> float:
        """Seconds to exchange an array of a row a key with every other rank of the host."""
        others, link = host_ranks - 1, machine.inside
        latency = link.latency + others * machine.message if others else 0.0
        return latency + others * rows * bytes_of_row / link.bandwidth

    def across(bytes_of_row: float) -> float:
        """Seconds to send it to another host."""
        link = machine.across
        return link.latency + rows * bytes_of_row / link.bandwidth if hosts > 1 else 0.0

    computing = 0.0
    starts = machine.call + 2 * (hosts + 1) * machine.start
    seconds = starts
    for share, vectors, sums in ((2, 0, 16), (6, 24, dim * DK)):
        keys = dim * ITEM + vectors
        block = share * rows * rows * dim / machine.rate
        tick = max(inside(keys + sums), across(keys + sums))
        seconds += max(block, inside(keys) + across(keys)) + max((host_ranks - 1) * block, tick)
        seconds += (hosts - 1) * max(host_ranks * block, tick)
        seconds += inside(sums) + across(sums)  # of the last host: overlap with nothing
        computing += ranks * block
    return Step(seconds, computing, seconds - computing - starts)


EXCHANGES: dict[str, Callable[[float, int, int, Machine | None], Step]] = {
    "ring": predict, "gather": predict_gather, "hierarchical": predict_hierarchical,
}  # fmt: skip


def chunks_of(size: float, shards: int) -> int:
    """In how many parts sums of `size` bytes over the keys of so many other ranks go home."""
    return int(max(1, min(size // CHUNK, MOST_CHUNKS, shards)))


def gather_bytes(rows: list[int], key_row: int, sum_row: int) -> int:
    """Bytes of a gather's buffers on a rank at most, for shards of so many keys: a key takes
    `key_row` bytes, its sums `sum_row`."""
    others = sum(rows) - min(rows)
    return others * (key_row + sum_row) + len(rows) * max(rows) * sum_row


def hierarchical_bytes(rows: list[int], local_size: int, key_row: int, sum_row: int) -> int:
    """As `gather_bytes`, of the hierarchical exchange: for the keys of the own host and of three
    others, which arrive, are gathered, are folded; for sums of two hosts, and of shards to add."""
    host = max(sum(rows[r : r + local_size]) for r in range(0, len(rows), local_size))
    return 4 * host * key_row + (2 * host + (local_size + 2) * max(rows)) * sum_row


@cache
def fastest(
    rows: float, dim: int, ranks: int, machine: Machine | None = None,
    among: tuple[str, ...] = tuple(EXCHANGES),
) -> str:  # fmt: skip
    """The exchange that takes the least time; the hierarchical one only over several hosts."""
    gpus = (machine or Machine()).gpus
    if not 1 < gpus < ranks:
        among = tuple(name for name in among if name != "hierarchical")
    return min(among, key=lambda name: EXCHANGES[name](rows, dim, ranks, machine).seconds)


def memory(
    rows: int, dim: int, workspace: int = WORKSPACE, offload: bool = False
) -> float:  # fmt: skip
    """Bytes on each of three or more GPUs above features and gradients: what a call of clip's loss
    and gradients with `rows` rows of each side takes at most, in 16 bits.

    With `offload` there are no features nor gradients on a GPU.
    """
    if rows <= 0 or dim < 1 or workspace < 1:
        raise ValueError(
            f"rows, dim, workspace: expected positive numbers, got {rows}, {dim}, {workspace}"
        )
    vectors = VECTORS * rows
    if offload:
        panels = rows * dim * (2 * ITEM + 5 * DK) + rows * (rows * ITEM + dim * DK)
        return min(workspace, panels) + vectors
    row = dim * (2 * ITEM + 3 * DK)  # of buffers
    pieces = -(-rows // max(1, workspace // 2 // row))
    piece = -(-rows // pieces)
    block = rows * (piece * ITEM + dim * DK)  # dL/dx of one block, and its share of dQ
    return min(workspace, block) + piece * row + rows * dim * DK + vectors


def hidden_from(dim: int, link: Link, machine: Machine | None = None) -> float:
    """Rows on each GPU from which transfers over `link` hide behind the products."""
    machine = machine or Machine()
    rows = 0.0
    for share, size in zip((2, 6), transfer_bytes(1.0, dim), strict=True):
        # share b b D / rate = latency + size b / bandwidth
        a, b = share * dim / machine.rate, size / link.bandwidth
        rows = max(rows, (b + sqrt(b * b + 4 * a * link.latency)) / (2 * a))
    return rows
