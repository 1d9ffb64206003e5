"""A model of the time and memory of a call over ranks, for each exchange, from measured constants.

Each of n GPUs has b queries and b keys of width D. On each GPU, a call takes 2 b b n D operations
in the forward pass (log-sum-exps) and 6 b b n D in the backward pass (gradients).

**Ring.** Each pass has n steps. In a step, a GPU computes one block and sends the keys of the next:

    step = start + max(operations / rate, latency + bytes / bandwidth)

Forward, keys travel with their ids and column statistics; backward, with their factors and dK. The
last transfer, of dK to the rank that owns the keys, overlaps with no computation. Over several
nodes, a ring is as fast as its slowest link.

**Gather.** The forward pass has two blocks, the backward pass has two or a few more. There are four
transfers:

- keys, which overlap with the local block;
- column statistics;
- factors;
- dK, which overlaps with the backward blocks after the first.

**Hierarchical.** A step visits the keys of one node. The transfers of a step, by NVLink and by the
network, overlap with its block. Blocks take the `start` of the ring. The keys of the first other
node overlap only with the local block. The last transfer of sums overlaps with no computation.
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
    """The parameters of the model.

    The defaults are for bfloat16 and D = 512. They were measured in benchmarks/results/ring.json;
    those of a gather, in benchmarks/results/exchanges-mpi.json.
    """

    rate: float = 610e12  # operations a second, in large blocks
    start: float = 0.28e-3  # seconds a block: launches, and idle multiprocessors at its end
    inside: Link = Link(20e-6, 168e9)  # NVLink, as measured in shifts of 34 to 67 MB
    across: Link = Link(30e-6, 45e9)  # the network: 400 Gb/s a GPU
    gpus: int = 8  # GPUs of a node
    call: float = 0.17e-3  # a gather: seconds a call, for the agreement of ranks and for their sums
    block: float = 0.06e-3  # a gather: seconds a block, in place of `start`
    message: float = 1.5e-6  # a gather: seconds a message to one rank


@dataclass(frozen=True)
class Step:
    """A predicted call, in seconds."""

    seconds: float
    computing: float
    exposed: float  # communication that does not overlap with computation

    @property
    def efficiency(self) -> float:
        return self.computing / self.seconds


# A gather sends dK back in parts of at least CHUNK bytes, and in at most MOST_CHUNKS parts
CHUNK = 2**26
MOST_CHUNKS = 4
FLOPS_PER_LOGIT = (2, 6)  # forward, backward: operations for each logit and feature
NVLINK = Link(20e-6, 300e9)  # large messages
ITEM, DK = 2, 4  # bytes of a feature, and of an element of dK
VECTORS = 300  # bytes a row of all vectors: sums, log-sum-exps, factors, positives


def transfer_bytes(rows: float, dim: int) -> tuple[float, float]:
    """Bytes that a rank sends in a forward step, and in a backward step, of a ring."""
    keys = rows * dim * ITEM
    return keys + 16 * rows, keys + 24 * rows + rows * dim * DK


def predict_ring(rows: float, dim: int, ranks: int, machine: Machine | None = None) -> Step:
    """One call of clip's loss and gradients with `rows` rows of each side on each of `ranks`."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    slowest_link = machine.inside if ranks <= machine.gpus else machine.across
    computing, seconds, starts = 0.0, 0.0, 2 * ranks * machine.start
    for flops, size in zip(FLOPS_PER_LOGIT, transfer_bytes(rows, dim), strict=True):
        block = flops * rows * rows * dim / machine.rate
        moving = slowest_link.latency + size / slowest_link.bandwidth if ranks > 1 else 0.0
        seconds += ranks * (machine.start + max(block, moving))
        computing += ranks * block
    if ranks > 1:
        seconds += slowest_link.latency + rows * dim * DK / slowest_link.bandwidth
    return Step(seconds, computing, seconds - computing - starts)


def _require(rows: float, dim: int, ranks: int) -> None:
    if rows <= 0 or dim < 1 or ranks < 1:
        raise ValueError(f"rows, dim, ranks: expected positive numbers, got {rows}, {dim}, {ranks}")


def predict_gather(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Step:  # fmt: skip
    """`predict_ring` for the exchange "gather"."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    others, nodes = ranks - 1, -(-ranks // machine.gpus)
    neighbours = min(others, -(-ranks // nodes) - 1)  # other ranks of the node

    def moving(row_bytes: float) -> float:
        """Seconds to exchange `row_bytes` bytes a key with every other rank."""
        if not others:
            return 0.0
        size = rows * row_bytes
        far = machine.across
        times = [machine.inside.latency + neighbours * size / machine.inside.bandwidth]
        if others > neighbours:
            times.append(far.latency + (others - neighbours) * size / far.bandwidth)
        return others * machine.message + max(times)

    forward, backward = (flops * rows * rows * dim / machine.rate for flops in FLOPS_PER_LOGIT)
    computing = ranks * (forward + backward)
    blocks = min(2, ranks)
    seconds = machine.call + 2 * blocks * machine.block
    seconds += max(forward, moving(dim * ITEM)) + others * forward
    if others:
        seconds += moving(16) + moving(24)
        chunks = chunk_count(rows * ranks * dim * DK, others)
        seconds += (chunks - 1) * machine.block
        first_chunk = others * backward / chunks  # then its dK is sent
        seconds += max(ranks * backward, first_chunk + moving(dim * DK))
    else:
        seconds += backward
    starts = machine.call + 2 * blocks * machine.block
    return Step(seconds, computing, seconds - computing - starts)


def predict_hierarchical(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Step:  # fmt: skip
    """`predict_ring` for the exchange "hierarchical", a gather inside nodes and a ring of nodes."""
    machine = machine or Machine()
    _require(rows, dim, ranks)
    nodes = -(-ranks // machine.gpus)
    node_ranks = ranks / nodes

    def inside(row_bytes: float) -> float:
        """Seconds to exchange `row_bytes` bytes a key with every other rank of the node."""
        others, link = node_ranks - 1, machine.inside
        latency = link.latency + others * machine.message if others else 0.0
        return latency + others * rows * row_bytes / link.bandwidth

    def across(row_bytes: float) -> float:
        """Seconds to send `row_bytes` bytes a key to another node."""
        link = machine.across
        return link.latency + rows * row_bytes / link.bandwidth if nodes > 1 else 0.0

    computing = 0.0
    starts = machine.call + 2 * (nodes + 1) * machine.start
    seconds = starts
    # bytes a key: vectors that travel with keys, and sums that travel back
    for flops, vectors, sums in zip(FLOPS_PER_LOGIT, (0, 24), (16, dim * DK), strict=True):
        keys = dim * ITEM + vectors
        block = flops * rows * rows * dim / machine.rate
        tick = max(inside(keys + sums), across(keys + sums))
        seconds += max(block, inside(keys) + across(keys)) + max((node_ranks - 1) * block, tick)
        seconds += (nodes - 1) * max(node_ranks * block, tick)
        seconds += inside(sums) + across(sums)  # of the last node: nothing overlaps with them
        computing += ranks * block
    return Step(seconds, computing, seconds - computing - starts)


EXCHANGES: dict[str, Callable[[float, int, int, Machine | None], Step]] = {
    "ring": predict_ring, "gather": predict_gather, "hierarchical": predict_hierarchical,
}  # fmt: skip


def chunk_count(size: float, shards: int) -> int:
    """The number of parts in which a gather sends dK of `size` bytes back to `shards` ranks."""
    return int(max(1, min(size // CHUNK, MOST_CHUNKS, shards)))


def gather_bytes(rows: list[int], key_row: int, sum_row: int) -> int:
    """The most bytes that buffers of a gather take on a rank.

    `rows` are the numbers of keys of all shards. A key takes `key_row` bytes, its sums take
    `sum_row` bytes.
    """
    others = sum(rows) - min(rows)
    return others * (key_row + sum_row) + len(rows) * max(rows) * sum_row


def hierarchical_bytes(rows: list[int], local_size: int, key_row: int, sum_row: int) -> int:
    """`gather_bytes` for the hierarchical exchange.

    Buffers hold the keys of the own node and of three others: keys that arrive, that are gathered,
    and that are in a block. They also hold the sums of two nodes, and shards to add to these sums.
    """
    node = max(sum(rows[r : r + local_size]) for r in range(0, len(rows), local_size))
    return 4 * node * key_row + (2 * node + (local_size + 2) * max(rows)) * sum_row


@cache
def fastest(
    rows: float, dim: int, ranks: int, machine: Machine | None = None,
    among: tuple[str, ...] = tuple(EXCHANGES),
) -> str:  # fmt: skip
    """The exchange that takes the least time. "hierarchical" needs several nodes."""
    gpus = (machine or Machine()).gpus
    if not 1 < gpus < ranks:
        among = tuple(name for name in among if name != "hierarchical")
    return min(among, key=lambda name: EXCHANGES[name](rows, dim, ranks, machine).seconds)


def memory(
    rows: int, dim: int, workspace: int = WORKSPACE, offload: bool = False
) -> float:  # fmt: skip
    """The most bytes that a call of clip takes on each of three or more GPUs.

    The call computes loss and gradients of 16-bit features, `rows` of each side on each GPU. The
    bytes do not include features and gradients. With `offload`, a GPU has no features and no
    gradients.
    """
    if rows <= 0 or dim < 1 or workspace < 1:
        raise ValueError(
            f"rows, dim, workspace: expected positive numbers, got {rows}, {dim}, {workspace}"
        )
    vectors = VECTORS * rows
    if offload:
        panels = rows * dim * (2 * ITEM + 5 * DK) + rows * (rows * ITEM + dim * DK)
        return min(workspace, panels) + vectors
    row = dim * (2 * ITEM + 3 * DK)  # bytes of a row of all buffers
    pieces = -(-rows // max(1, workspace // 2 // row))
    piece = -(-rows // pieces)
    block = rows * (piece * ITEM + dim * DK)  # dL/dx of one block, and its part of dQ
    return min(workspace, block) + piece * row + rows * dim * DK + vectors


def hidden_from(dim: int, link: Link, machine: Machine | None = None) -> float:
    """The least rows on each GPU with which products take as long as transfers over `link`."""
    machine = machine or Machine()
    rows = 0.0
    for flops, size in zip(FLOPS_PER_LOGIT, transfer_bytes(1.0, dim), strict=True):
        # flops b b D / rate = latency + size b / bandwidth
        a, b = flops * dim / machine.rate, size / link.bandwidth
        rows = max(rows, (b + sqrt(b * b + 4 * a * link.latency)) / (2 * a))
    return rows
