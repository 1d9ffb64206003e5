"""The schedule of a call over ranks: all decisions, from the reports of all ranks.

agreement.py gathers the reports and calls `decide`. run.py runs the schedule.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from infonce.kernels.grid import least_block_side
from infonce.kernels.maxsim.tokens import Tokens
from infonce.kernels.problem import Array, Gradients, Problem

from infonce.checks import validation
from infonce.checks.call import Request

from . import cost
from .communicators.base import Communicator
from .exchanges.arrays import auxiliary_bytes, numbers_per_key, row_shape
from .exchanges.base import Exchange
from .exchanges.gather import Gather
from .exchanges.hierarchical import Hierarchical
from .exchanges.partition import Partition
from .exchanges.ring import Ring
from .transports import choice as transports
from .transports.base import Exchanger

EXCHANGES = ("auto", "ring", "gather", "hierarchical")
# The most multiply-adds of the logits of a whole batch that each rank computes. One thread computes
# such a product (`SINGLE` in kernels/cpu/resources.py), so the bits are the same on all ranks of a
# machine
WHOLE_MULTIPLY_ADDS = 2**22
COLUMN_SUM_BYTES = 24  # bytes of a column's max, sum and moment in float64


@dataclass(frozen=True)
class RankReport:
    """A rank's part of the facts from which all ranks decide one schedule."""

    function: str  # that the rank has called
    argument_rows: list[int] | None  # rows of each feature array; None: the arrays are unreadable
    failure: tuple[str, str] | None = None  # type and message of the error of its checks
    # the fields below have values only if the checks have passed
    shared_values: bytes = b""  # pickled result of `agreement._list_shared_values`
    # for each transport None, or the reason why this rank cannot use the transport
    transports: dict[str, str | None] = field(default_factory=dict)
    gpu: str | None = None  # name of the rank's GPU
    exchange_room: int = 0  # bytes that buffers of an exchange may take: `find_exchange_room`
    has_weights: bool = False  # whether rows have weights
    # whether a weight of this rank's rows may be positive; false only if all weights are zeros on
    # the host
    may_be_positive: bool = True


@dataclass(frozen=True)
class RankSchedule:
    """The decisions of a call over ranks, the same on all ranks."""

    joint: bool  # `Loss.joint`: queries and keys are the rows of both arguments
    argument_rows: list[Any]  # for each rank, the number of rows of each of its feature arrays
    queries: Partition  # of all queries into shards of ranks
    keys: Partition  # of all keys into shards of ranks
    exchange: str  # "ring", "gather" or "hierarchical"
    whole_batch: bool  # whether each rank computes the whole loss: whole_batch.py
    local_size: int | None  # number of ranks of each node, or None: see `find_local_size`
    piece_count: int  # number of pieces in which a shard goes round a ring
    symmetric: bool  # queries are keys
    transport: str  # a name of `transports.CHOICES`
    sum_dtype: np.dtype[Any]  # of gradients that travel between ranks: see `choose_sum_dtype`
    weighted: bool  # whether rows of any rank have weights
    may_lack_room: bool  # whether memory may be too small for a block of a rank: `may_lack_room`
    packed_reports: list[bytes] = field(repr=False)  # pickled `RankReport` of all ranks

    def has_shards(self, joint: bool, rank: int, argument_rows: list[int]) -> bool:
        """Whether a call of `rank` has as many rows as in this schedule: `argument_rows` in its
        arrays, and the same `Loss.joint`."""
        return self.joint == joint and bool(self.argument_rows[rank] == argument_rows)

    def repeats(self, rank: int, packed_report: bytes) -> bool:
        """Whether `rank` sent the same report for this schedule."""
        return self.packed_reports[rank] == packed_report


def decide(
    packed_reports: Sequence[bytes], reports: Sequence[RankReport], request: Request,
    queries: Partition, keys: Partition, ranks: Communicator, rank_options: Mapping[str, Any],
) -> RankSchedule:  # fmt: skip
    """The schedule of a call, from the reports of all ranks and from this rank's `request`.

    The parts of `request` that are read here are equal on all ranks. `packed_reports` are the
    pickled `reports`. ValueError on all ranks if no schedule fits.
    """
    problem = request.problem
    if not any(report.may_be_positive for report in reports):
        raise ValueError("weights: expected a positive sum over all ranks, got only zeros")
    availability = [report.transports for report in reports]
    if request.on_gpu and ranks.size > 1:
        _exclude_shared_gpus(availability, [report.gpu for report in reports], ranks)
    transport = transports.choose(rank_options["transport"], availability)
    if request.on_gpu and ranks.size == 1:
        transport = "staged"  # nothing is sent, and this transport is always available
    nodes = group_ranks_by_node(ranks)
    exchange = choose_exchange(
        rank_options["exchange"], problem, request.gradients, request.on_gpu, keys, nodes,
        min(report.exchange_room for report in reports),
    )  # fmt: skip
    weighted = any(report.has_weights for report in reports)
    lacks_room = may_lack_room(problem, queries, keys)
    # a caller who names an exchange gets it
    others = request.on_gpu or request.offload or weighted or lacks_room
    may_be_whole = rank_options["exchange"] == "auto" and not others
    sum_dtype = choose_sum_dtype(problem)
    # bytes of one key in all buffers of a ring: two buffers have its features, three have sums of
    # its gradient
    features = math.prod(row_shape(problem.key))
    ring_key_bytes = features * (2 * problem.key.dtype.itemsize + 3 * sum_dtype.itemsize)
    ring_key_bytes += 2 * auxiliary_bytes(problem)
    return RankSchedule(
        joint=problem.joint,
        argument_rows=[report.argument_rows for report in reports],
        queries=queries,
        keys=keys,
        exchange=exchange,
        whole_batch=may_be_whole and fits_whole_batch(problem, queries.total, keys.total),
        local_size=find_local_size(nodes),
        # so many pieces that the buffers of one piece take at most half of the workspace
        piece_count=max(1, -(-keys.largest // max(1, problem.workspace // 2 // ring_key_bytes))),
        symmetric=problem.symmetric,
        transport=transport,
        sum_dtype=sum_dtype,
        weighted=weighted,
        may_lack_room=lacks_room,
        packed_reports=list(packed_reports),
    )


def choose_sum_dtype(problem: Problem) -> np.dtype[Any]:
    """The dtype of dQ and dK while they accumulate and travel (vectors of sums are float64)."""
    return np.dtype(np.float64 if problem.compute_precision == "fp64" else np.float32)


# -- transports and exchanges


def require_options(options: Mapping[str, Any], rank_options: Mapping[str, Any]) -> None:
    """ValueError if a call over ranks does not take the value of an option."""
    for name, choices in (
        ("gradient_scale", ("global", "ddp")),
        ("transport", transports.CHOICES),
        ("exchange", EXCHANGES),
    ):
        validation.choice(name, rank_options[name], choices)
    require_method(options)


def require_method(options: Mapping[str, Any]) -> None:
    """ValueError for the method "fused". `agreement.RankCall.check` refuses "naive" on GPUs."""
    if options.get("method") == "fused":
        raise ValueError(
            'method: expected "auto", "tiled" or "naive" over ranks, got "fused": no logits are '
            "kept from one pass to the next"
        )


def _exclude_shared_gpus(
    availability: Sequence[dict[str, str | None]], gpus: Sequence[str | None], ranks: Communicator
) -> None:
    """Mark NCCL as unavailable on ranks that share a GPU: NCCL needs a GPU for each rank."""
    processes = ranks.peers.processes if ranks.peers else []
    # unknown processes count as processes of one machine
    machines = [process.machine for process in processes] or [""] * ranks.size
    machine_gpus = list(zip(machines, gpus, strict=True))
    for rank, gpu in enumerate(machine_gpus):
        if gpu in machine_gpus[:rank]:
            other = machine_gpus.index(gpu)
            availability[rank]["nccl"] = (
                f"it shares {gpu[1]} with rank {other}: more ranks than GPUs, or no "
                "cupy.cuda.Device(rank % gpus).use() on each rank"
            )


def group_ranks_by_node(ranks: Communicator) -> list[list[int]]:
    """The ranks of each node.

    INFONCE_LOCAL_SIZE, if it is set, is the number of ranks on each node: it can divide the ranks
    of one machine into several nodes. Otherwise the ranks whose processes run on one machine are
    the ranks of a node. If the processes of the ranks are unknown, all ranks are on one node.
    """
    setting = os.environ.get("INFONCE_LOCAL_SIZE", "")
    if setting:
        size = int(setting) if setting.isdecimal() else 0
        if not size or ranks.size % size:
            raise ValueError(
                f"INFONCE_LOCAL_SIZE: expected a divisor of the {ranks.size} ranks, got {setting!r}"
            )
        return [list(range(r, r + size)) for r in range(0, ranks.size, size)]
    nodes = ranks.peers.nodes if ranks.peers else []  # empty: unknown processes
    return nodes or [list(range(ranks.size))]


def find_local_size(nodes: list[list[int]]) -> int | None:
    """The number of ranks on each node, from the ranks of each node.

    None if nodes have different numbers of ranks, or if the ranks of a node are not consecutive.
    """
    size = len(nodes[0])
    consecutive = [list(range(size * h, size * (h + 1))) for h in range(len(nodes))]
    return size if nodes == consecutive else None


def choose_exchange(
    exchange: str, problem: Problem, gradients: Gradients | None, on_gpu: bool, keys: Partition,
    nodes: list[list[int]], room: int,
) -> str:  # fmt: skip
    """The exchange of a call: `exchange`, or for "auto" the fastest exchange that fits.

    On GPUs, a model of the machine predicts the times (cost.py). On CPUs there is no model: a
    gather has the fewest messages, so "auto" is a gather if it fits, else a ring.

    `room` is the number of bytes for buffers on each rank, the smallest `find_exchange_room` of all
    ranks. `nodes` are the ranks of each node.
    ValueError if `exchange` does not fit into `room`, or if it is "hierarchical" and nodes do not
    have equal numbers of ranks. A ring always fits: its shards go round in pieces.
    """
    if exchange == "ring":
        return exchange
    d, item = math.prod(row_shape(problem.key)), problem.key.dtype.itemsize
    dk_travels = gradients is not None and (gradients.want_key or problem.symmetric)
    dk_bytes = d * choose_sum_dtype(problem).itemsize if dk_travels else 0
    # bytes of one key in buffers of keys, and in buffers of sums. The sums are the column's in the
    # log-sum-exp pass, and dK in the gradient pass
    key_and_sum_bytes = d * item + 8 * numbers_per_key(problem), max(dk_bytes, COLUMN_SUM_BYTES)
    # exchange -> the bytes that its buffers need on a rank
    buffer_bytes = {"ring": 0, "gather": cost.gather_bytes(keys.rows, *key_and_sum_bytes)}
    size = find_local_size(nodes)
    if size is not None:
        buffer_bytes["hierarchical"] = cost.hierarchical_bytes(keys.rows, size, *key_and_sum_bytes)
    elif exchange == "hierarchical":
        raise ValueError(
            'exchange: expected as many ranks on each node, one after another, for "hierarchical", '
            f'got nodes with ranks {", ".join(map(str, nodes))}; exchange="ring" takes any'
        )
    if exchange != "auto":
        if buffer_bytes[exchange] > room:
            raise ValueError(
                f"workspace: expected at least {2 * buffer_bytes[exchange]} bytes to gather keys "
                f'of width {d} by exchange="{exchange}", {keys.total} over {len(keys.rows)} ranks, '
                f'got {problem.workspace}; "ring" takes less'
            )
        return exchange
    fitting = [name for name, needed in buffer_bytes.items() if needed <= room]
    if not on_gpu:
        return "gather" if "gather" in fitting else "ring"
    # if nodes differ in size, each counts as if it had as many ranks as the largest
    machine = cost.Machine(node_gpus=size or max(map(len, nodes)))
    return cost.fastest(keys.largest, d, len(keys.rows), machine, tuple(fitting))


def fits_whole_batch(problem: Problem, query_count: int, key_count: int) -> bool:
    """Whether each rank computes the whole loss of a batch of so many rows (whole_batch.py).

    The batch is small, no option but `ids` changes logits or targets, and the call has no labels
    and no metrics.
    """
    width = max(problem.shape[2], 8)  # so that one thread computes the loops, too (`THREADED`)
    is_small = query_count * key_count * width <= WHOLE_MULTIPLY_ADDS
    others = problem.retrieval_ranks or problem.positives is not None
    return bool(is_small and problem.plain and not others)


def make_exchange(
    schedule: RankSchedule, xp: Any, rank: int, key_arrays: list[Array], transport: Exchanger
) -> Exchange:
    """The exchange of a call, for this rank's arrays of keys."""
    if schedule.exchange == "hierarchical":
        assert schedule.local_size is not None
        return Hierarchical(xp, rank, transport, schedule.keys, schedule.local_size, key_arrays)
    if schedule.exchange == "gather":
        return Gather(xp, rank, transport, schedule.keys, key_arrays)
    return Ring(xp, rank, transport, schedule.keys, schedule.piece_count, schedule.symmetric)


# -- memory


def find_exchange_room(request: Request) -> int:
    """Bytes that buffers of an exchange may take on this rank.

    The buffers may take as much as half of the workspace. If the caller gives no workspace, they
    may take 1/32 of a GPU's memory (`DeviceProperties.default_memory_limit`), if that is more.
    """
    problem = request.problem
    half_workspace = int(problem.workspace // 2)
    if problem.workspace_given or not request.on_gpu:
        return half_workspace
    from infonce.kernels.gpu.device.launcher import device_properties

    properties = device_properties(problem.query.device.id)
    return max(half_workspace, int(properties.default_memory_limit))


def may_lack_room(problem: Problem, queries: Partition, keys: Partition) -> bool:
    """Whether a block of a rank may need more memory than there is. All ranks get one answer.

    The workspace limits the memory of a block; with method "naive", the machine's free memory does.
    If the answer is true, all ranks call `run.require_room` before arrays are sent, and exchange
    its errors. Most calls have enough room by `enough_room`, and skip that step.
    """
    if problem.method == "naive":
        return True  # a block keeps all its logits, for which the machine's memory may be too small
    if isinstance(problem.key, Tokens):
        return True  # `enough_room` does not know the sizes of tokens of queries, and of products
    # linear terms, and copies of a joint loss, take up to half of the workspace
    shares_workspace = problem.linear_terms or problem.joint
    block_bytes = problem.workspace // (2 if shares_workspace else 1)
    features = math.prod(row_shape(problem.key)) + problem.auxiliary_width
    return bool(block_bytes < enough_room(queries.largest, keys.total, features))


@cache
def enough_room(m: int, n: int, d: int) -> int:
    """A generous upper bound, in bytes, of the least workspace that any block needs.

    The block has up to m rows and n keys, and its features have width d. With the least workspace,
    a backend divides it into squares of `side` logits. The bound has 64 bytes for each logit of a
    square and for each feature of a side's rows, and 256 KiB for each row. Tests compare the bound
    with the workspaces that the backends need.
    """
    side: int = max(128, 2 * least_block_side(m, n))
    return side * (64 * (side + d) + 2**18)
