"""A model of the time and memory of a call over ranks, for each exchange, from measured constants.

schedule.py chooses the exchange of "auto" by this model, and benchmarks/ranks/model.py prints it.

Each of n GPUs has b queries and b keys of width D. On each GPU, a call takes 2 b b n D operations
in the log-sum-exp pass (forward) and 6 b b n D in the gradient pass (backward).

**Ring.** Each pass has n steps. In a step, a GPU computes one block and sends the keys of the next:

    step = start + max(operations / rate, latency + bytes / bandwidth)

Forward, keys travel with their ids and column sums; backward, with their factors and dK. The last
transfer, of dK to the rank that owns the keys, overlaps with no computation. Over several nodes, a
ring is as fast as its slowest link.

**Gather.** The forward pass has two blocks, the backward pass has two or a few more. There are four
transfers:

- keys, which overlap with the local block;
- column sums, which overlap with nothing;
- factors, which overlap with nothing;
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
    """The connection of a GPU to the GPUs of its node, or to other nodes."""

    latency: float  # seconds
    bandwidth: float  # bytes a second, one way


@dataclass(frozen=True)
class Machine:
    """The parameters of the model.

    The defaults are for bfloat16 and D = 512. For another cluster, change them here: calls take all
    but `node_gpus` from them. The defaults were measured in benchmarks/results/ring.json; those of
    a gather, in benchmarks/results/exchanges-mpi.json. `across` is an assumption.
    """

    rate: float = 610e12  # operations a second, in large blocks
    start: float = 0.28e-3  # seconds a block: launches, and idle multiprocessors at its end
    inside: Link = Link(20e-6, 168e9)  # NVLink, as measured in shifts of 34 to 67 MB
    across: Link = Link(30e-6, 45e9)  # the network: 400 Gb/s a GPU
    node_gpus: int = 8  # GPUs of a node; `schedule.choose_exchange` sets it for each call
    # the next three: for a gather; a hierarchical exchange uses `gather_call` and `gather_message`
    gather_call: float = 0.17e-3  # seconds a call: the agreement of ranks, and their sums
    gather_block: float = 0.06e-3  # seconds a block, in place of `start`
    gather_message: float = 1.5e-6  # seconds a message to one rank


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a call, in seconds."""

    seconds: float  # of the whole call
    computing: float  # matrix products
    exposed: float  # communication that does not overlap with computation

    @property
    def efficiency(self) -> float:
        """The share of the matrix products in the time of the call."""
        return self.computing / self.seconds


# A gather computes dK of other ranks' keys in several visits, so that dK of one visit travels while
# the next is computed
LEAST_VISIT_BYTES = 2**26  # 64 MiB: the least bytes of dK in each of several visits
MOST_VISITS = 4
# operations for each logit and feature: forward, of the logits; backward, of the logits again, dQ
# and dK
FLOPS = (2, 6)
# NVLink with large messages, for benchmarks/ranks/model.py; `Machine.inside` is NVLink in a ring
NVLINK = Link(20e-6, 300e9)
FEATURE_BYTES, DK_BYTES = 2, 4  # of one number of 16-bit features, and of dK in float32
FORWARD_SUM_BYTES = 16  # max and sum of a column in float64, which travel in the forward pass
FACTOR_BYTES = 24  # reference, factor and bound of a column, which travel in the backward pass
VECTOR_BYTES = 300  # bytes of a row in all vectors: sums, log-sum-exps, factors, positives


def transfer_bytes(rows: float, dim: int) -> tuple[float, float]:
    """Bytes that a rank sends in a forward step, and in a backward step, of a ring.

    `rows` is the number of keys of a rank, and `dim` is their width.
    """
    keys = rows * dim * FEATURE_BYTES
    return keys + FORWARD_SUM_BYTES * rows, keys + FACTOR_BYTES * rows + rows * dim * DK_BYTES


def predict_ring(rows: float, dim: int, ranks: int, machine: Machine | None = None) -> Prediction:
    """A call of clip's loss and gradients by the exchange "ring".

    Each of `ranks` GPUs has `rows` queries and as many keys, of width `dim`.
    """
    machine = machine or Machine()
    _require_positive(rows, dim, ranks)
    slowest_link = machine.inside if ranks <= machine.node_gpus else machine.across
    computing, seconds, starts = 0.0, 0.0, 2 * ranks * machine.start
    for flops, size in zip(FLOPS, transfer_bytes(rows, dim), strict=True):
        block = flops * rows * rows * dim / machine.rate  # seconds
        moving = slowest_link.latency + size / slowest_link.bandwidth if ranks > 1 else 0.0
        seconds += ranks * (machine.start + max(block, moving))
        computing += ranks * block
    if ranks > 1:
        seconds += slowest_link.latency + rows * dim * DK_BYTES / slowest_link.bandwidth
    return Prediction(seconds, computing, seconds - computing - starts)


def _require_positive(rows: float, dim: int, ranks: int) -> None:
    if rows <= 0 or dim < 1 or ranks < 1:
        raise ValueError(f"rows, dim, ranks: expected positive numbers, got {rows}, {dim}, {ranks}")


def predict_gather(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Prediction:  # fmt: skip
    """`predict_ring` for the exchange "gather"."""
    machine = machine or Machine()
    _require_positive(rows, dim, ranks)
    others, nodes = ranks - 1, -(-ranks // machine.node_gpus)
    neighbours = min(others, -(-ranks // nodes) - 1)  # other ranks of the node

    def moving(row_bytes: float) -> float:
        """Seconds to exchange `row_bytes` bytes a key with every other rank."""
        if not others:
            return 0.0
        size, network = rows * row_bytes, machine.across
        times = [machine.inside.latency + neighbours * size / machine.inside.bandwidth]
        if others > neighbours:
            times.append(network.latency + (others - neighbours) * size / network.bandwidth)
        return others * machine.gather_message + max(times)

    # seconds of this rank's queries with the keys of one rank, in either pass
    forward, backward = (flops * rows * rows * dim / machine.rate for flops in FLOPS)
    computing = ranks * (forward + backward)
    starts = machine.gather_call + 2 * min(2, ranks) * machine.gather_block
    seconds = starts
    seconds += max(forward, moving(dim * FEATURE_BYTES)) + others * forward
    if others:
        seconds += moving(FORWARD_SUM_BYTES) + moving(FACTOR_BYTES)
        visits = visit_count(rows * ranks * dim * DK_BYTES, others)
        seconds += (visits - 1) * machine.gather_block
        first_visit = others * backward / visits  # after the first visit, its dK is sent
        seconds += max(ranks * backward, first_visit + moving(dim * DK_BYTES))
    else:
        seconds += backward
    return Prediction(seconds, computing, seconds - computing - starts)


def predict_hierarchical(
    rows: float, dim: int, ranks: int, machine: Machine | None = None
) -> Prediction:  # fmt: skip
    """`predict_ring` for the exchange "hierarchical", a gather inside nodes and a ring of nodes."""
    machine = machine or Machine()
    _require_positive(rows, dim, ranks)
    nodes = -(-ranks // machine.node_gpus)
    node_ranks = ranks / nodes  # ranks of a node

    def inside(row_bytes: float) -> float:
        """Seconds to exchange `row_bytes` bytes a key with every other rank of the node."""
        others, link = node_ranks - 1, machine.inside
        latency = link.latency + others * machine.gather_message if others else 0.0
        return latency + others * rows * row_bytes / link.bandwidth

    def across(row_bytes: float) -> float:
        """Seconds to send `row_bytes` bytes a key to another node."""
        link = machine.across
        return link.latency + rows * row_bytes / link.bandwidth if nodes > 1 else 0.0

    computing = 0.0
    starts = machine.gather_call + 2 * (nodes + 1) * machine.start
    seconds = starts
    # bytes a key of vectors that travel with keys, and of sums that travel back
    vector_bytes, sum_bytes = (0, FACTOR_BYTES), (FORWARD_SUM_BYTES, dim * DK_BYTES)
    for flops, vectors, sums in zip(FLOPS, vector_bytes, sum_bytes, strict=True):
        keys = dim * FEATURE_BYTES + vectors  # bytes a key
        block = flops * rows * rows * dim / machine.rate  # seconds, with the keys of one rank
        tick = max(inside(keys + sums), across(keys + sums))  # seconds of a step's transfers
        # the local block and the rest of this node; the other nodes; the sums of the last node
        seconds += max(block, inside(keys) + across(keys)) + max((node_ranks - 1) * block, tick)
        seconds += (nodes - 1) * max(node_ranks * block, tick)
        seconds += inside(sums) + across(sums)
        computing += ranks * block
    return Prediction(seconds, computing, seconds - computing - starts)


EXCHANGES: dict[str, Callable[[float, int, int, Machine | None], Prediction]] = {
    "ring": predict_ring, "gather": predict_gather, "hierarchical": predict_hierarchical,
}  # fmt: skip


def visit_count(size: float, shards: int) -> int:
    """The number of visits in which a gather computes dK of `shards` other ranks. `size` is the
    number of bytes of dK."""
    return int(max(1, min(size // LEAST_VISIT_BYTES, MOST_VISITS, shards)))


def gather_bytes(rows: list[int], key_bytes: int, sum_bytes: int) -> int:
    """The bytes that the buffers of a gather need, on the rank that needs most.

    `rows` are the numbers of keys of all shards. A key takes `key_bytes`, its sums `sum_bytes`.
    """
    other_keys = sum(rows) - min(rows)
    partial_sums = len(rows) * max(rows)  # rows of the sums of this rank's keys, from all ranks
    return other_keys * (key_bytes + sum_bytes) + partial_sums * sum_bytes


def hierarchical_bytes(rows: list[int], local_size: int, key_bytes: int, sum_bytes: int) -> int:
    """`gather_bytes` for the hierarchical exchange.

    Buffers hold the keys of this node and of three others: keys that arrive, that are gathered,
    and that are in a block. They also hold the sums of two nodes, and of `local_size + 2` shards
    whose sums are added.
    """
    node_keys = max(sum(rows[r : r + local_size]) for r in range(0, len(rows), local_size))
    sum_rows = 2 * node_keys + (local_size + 2) * max(rows)
    return 4 * node_keys * key_bytes + sum_rows * sum_bytes


@cache
def fastest(
    rows: float, dim: int, ranks: int, machine: Machine | None = None,
    among: tuple[str, ...] = tuple(EXCHANGES),
) -> str:  # fmt: skip
    """The exchange among `among` that takes the least time for the call of `predict_ring`.

    "hierarchical" is left out unless there are several nodes with several GPUs: it is a gather on
    one node, and a ring over nodes of one GPU.
    """
    node_gpus = (machine or Machine()).node_gpus
    if not 1 < node_gpus < ranks:
        among = tuple(name for name in among if name != "hierarchical")
    return min(among, key=lambda name: EXCHANGES[name](rows, dim, ranks, machine).seconds)


def predict_memory(
    rows: int, dim: int, workspace: int = WORKSPACE, offload: bool = False
) -> float:  # fmt: skip
    """The most bytes that a call of clip by a ring takes on each of three or more GPUs.

    The call computes loss and gradients of 16-bit features, `rows` of each side on each GPU. The
    bytes do not include features and gradients. With `offload`, a GPU has no features and no
    gradients.
    """
    if rows <= 0 or dim < 1 or workspace < 1:
        raise ValueError(
            f"rows, dim, workspace: expected positive numbers, got {rows}, {dim}, {workspace}"
        )
    vectors = VECTOR_BYTES * rows
    if offload:
        # two buffers of features; in float32 two of leaving gradients, and three accumulators
        chunks = rows * dim * (2 * FEATURE_BYTES + 5 * DK_BYTES)
        block = rows * (rows * FEATURE_BYTES + dim * DK_BYTES)
        return min(workspace, chunks + block) + vectors
    key_bytes = dim * (2 * FEATURE_BYTES + 3 * DK_BYTES)  # of one key, in all buffers of the ring
    pieces = -(-rows // max(1, workspace // 2 // key_bytes))  # of a shard
    piece = -(-rows // pieces)  # rows of a piece
    # dL/dx of one block, and its part of dQ
    block = rows * (piece * FEATURE_BYTES + dim * DK_BYTES)
    return min(workspace, block) + piece * key_bytes + rows * dim * DK_BYTES + vectors


def hidden_from(dim: int, link: Link, machine: Machine | None = None) -> float:
    """The least rows on each GPU from which products of a ring take as long as its transfers over
    `link`, so that products hide transfers."""
    machine = machine or Machine()
    rows = 0.0
    for flops, size in zip(FLOPS, transfer_bytes(1.0, dim), strict=True):
        # the positive root b of: flops b b D / rate = latency + size b / bandwidth
        quadratic, linear = flops * dim / machine.rate, size / link.bandwidth
        root = (linear + sqrt(linear * linear + 4 * quadratic * link.latency)) / (2 * quadratic)
        rows = max(rows, root)
    return rows
