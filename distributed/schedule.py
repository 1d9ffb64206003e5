"""All decisions of a call over ranks, from the terms of all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from infonce.kernels.grid import least_block_side
from infonce.kernels.problem import Array, Gradients, Problem
from infonce.kernels.targets import guide_width

from infonce.checks import validation
from infonce.checks.call import Request

from . import cost
from .communicators.base import Communicator
from .exchanges.arrays import guide_bytes, numbers_per_key
from .exchanges.base import Exchange
from .exchanges.gather import Gather
from .exchanges.hierarchical import Hierarchical
from .exchanges.partition import Partition
from .exchanges.ring import Ring
from .transports import choice as transports
from .transports.base import Exchanger

EXCHANGES = ("auto", "ring", "gather", "hierarchical")


@dataclass(frozen=True)
class Terms:
    """A rank's part of what a schedule depends on."""

    sizes: list[int] | None  # rows of its arrays; None: it cannot read them
    failure: tuple[str, str] | None = None  # type and message of the error of its checks
    # the fields below have values only if the checks have passed
    facts: bytes = b""  # pickled `agreement._facts`
    offers: dict[str, str | None] = field(default_factory=dict)  # transports
    device: str | None = None  # name of the GPU
    room: int = 0  # bytes for buffers of an exchange
    weighted: bool = False  # whether rows have weights
    positive: bool = True  # whether a weight may be positive


@dataclass(frozen=True)
class Schedule:
    """The decisions of a call, the same on all ranks."""

    joint: bool  # `Loss.joint`: queries and keys are the rows of both arguments
    sizes: list[Any]  # rows of the arrays of each rank
    queries: Partition
    keys: Partition
    exchange: str
    local_size: int | None  # see the function `local_size`
    pieces: int  # number of parts in which a shard goes round a ring
    symmetric: bool  # queries are keys
    transport: str  # its name
    real: np.dtype[Any]  # dtype of sums that travel
    weighted: bool  # whether rows have weights
    may_lack_room: bool  # the workspace may be too small for a block of a rank
    packed_terms: list[bytes] = field(repr=False)  # pickled `Terms` of all ranks

    def is_for(self, joint: bool, rank: int, sizes: list[int]) -> bool:
        """Whether a call with so many rows on this rank may have the same queries and keys."""
        return self.joint == joint and bool(self.sizes[rank] == sizes)


def decide(
    packed_terms: Sequence[bytes], terms: Sequence[Terms], request: Request, queries: Partition,
    keys: Partition, ranks: Communicator, rank_options: Mapping[str, Any],
) -> Schedule:  # fmt: skip
    """The schedule of a call, from the terms of all ranks and from what their calls have in
    common. `packed_terms` are the pickled `terms`. ValueError on all ranks if no schedule fits."""
    problem = request.problem
    if not any(rank_terms.positive for rank_terms in terms):
        raise ValueError("weights: expected a positive sum over all ranks, got zeros alone")
    devices = [rank_terms.device for rank_terms in terms]
    offered = [rank_terms.offers for rank_terms in terms]
    if request.on_gpu and ranks.size > 1:
        _one_gpu_each(offered, devices, ranks)
    transport = transports.choose(rank_options["transport"], offered)
    if request.on_gpu and ranks.size == 1:
        transport = "staged"  # nothing is sent
    hosts = hosts_of(ranks)
    exchange = choose_exchange(
        rank_options["exchange"], problem, request.gradients, request.on_gpu, keys, hosts,
        min(rank_terms.room for rank_terms in terms),
    )  # fmt: skip
    real = real_of(problem)
    # a ring has two buffers of keys and three of sums
    key_bytes = problem.shape[2] * (2 * problem.key.dtype.itemsize + 3 * real.itemsize)
    key_bytes += 2 * guide_bytes(problem)
    return Schedule(
        joint=problem.joint,
        sizes=[rank_terms.sizes for rank_terms in terms],
        queries=queries,
        keys=keys,
        exchange=exchange,
        local_size=local_size(hosts),
        pieces=max(1, -(-keys.largest // max(1, problem.workspace // 2 // key_bytes))),
        symmetric=problem.symmetric,
        transport=transport,
        real=real,
        weighted=any(rank_terms.weighted for rank_terms in terms),
        may_lack_room=may_lack_room(problem, queries, keys),
        packed_terms=list(packed_terms),
    )


def real_of(problem: Problem) -> np.dtype[Any]:
    """The dtype of sums that travel."""
    return np.dtype(np.float64 if problem.compute == "fp64" else np.float32)


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
    """ValueError if a call over ranks does not take the method."""
    if options.get("method") == "fused":
        raise ValueError(
            'method: expected "auto", "tiled" or "naive" over ranks, got "fused": no logits are '
            "kept from one fold to the next"
        )


def _one_gpu_each(
    offered: Sequence[dict[str, str | None]], devices: Sequence[str | None], ranks: Communicator
) -> None:
    """Withdraw NCCL's offer of ranks that share a GPU: NCCL needs a GPU for each rank."""
    processes = ranks.peers.processes if ranks.peers else []
    machines = [process.machine for process in processes] or [""] * ranks.size
    gpus = list(zip(machines, devices, strict=True))
    for r, gpu in enumerate(gpus):
        if gpu in gpus[:r]:
            other = gpus.index(gpu)
            offered[r]["nccl"] = (
                f"it shares {gpu[1]} with rank {other}: more ranks than GPUs, or no "
                "cupy.cuda.Device(rank % gpus).use() on each rank"
            )


def hosts_of(ranks: Communicator) -> list[list[int]]:
    """The ranks of each host: INFONCE_LOCAL_SIZE ranks each if it is set, else those whose
    processes are on one machine."""
    setting = os.environ.get("INFONCE_LOCAL_SIZE", "")
    if setting:
        size = int(setting) if setting.isdecimal() else 0
        if not size or ranks.size % size:
            raise ValueError(
                f"INFONCE_LOCAL_SIZE: expected a divisor of the {ranks.size} ranks, got {setting!r}"
            )
        return [list(range(r, r + size)) for r in range(0, ranks.size, size)]
    hosts = ranks.peers.hosts if ranks.peers else []
    return hosts or [list(range(ranks.size))]


def local_size(hosts: list[list[int]]) -> int | None:
    """Number of ranks of each host; None if hosts differ in it, or ranks are not host by host."""
    size = len(hosts[0])
    in_order = [list(range(size * h, size * (h + 1))) for h in range(len(hosts))]
    return size if hosts == in_order else None


def choose_exchange(
    asked: str, problem: Problem, gradients: Gradients | None, on_gpu: bool, keys: Partition,
    hosts: list[list[int]], room: int,
) -> str:  # fmt: skip
    """The exchange of a call: the one that is `asked`, or for "auto" the fastest that fits.

    `room` is the number of bytes for buffers on each rank. ValueError if the exchange that is asked
    does not fit, or needs as many ranks on each host.
    """
    if asked == "ring":
        return asked
    d, item = problem.shape[2], problem.key.dtype.itemsize
    with_sums = gradients is not None and (gradients.want_key or problem.symmetric)
    sums = d * real_of(problem).itemsize if with_sums else 0
    key_and_sum_bytes = d * item + 8 * numbers_per_key(problem), max(sums, 24)
    least_bytes = {"ring": 0, "gather": cost.gather_bytes(keys.rows, *key_and_sum_bytes)}
    size = local_size(hosts)
    if size is not None:
        least_bytes["hierarchical"] = cost.hierarchical_bytes(keys.rows, size, *key_and_sum_bytes)
    elif asked == "hierarchical":
        raise ValueError(
            'exchange: expected as many ranks on each host, one after another, for "hierarchical", '
            f'got hosts with ranks {", ".join(map(str, hosts))}; exchange="ring" takes any'
        )
    if asked != "auto":
        if least_bytes[asked] > room:
            raise ValueError(
                f"workspace: expected at least {2 * least_bytes[asked]} bytes to gather keys of "
                f'width {d} by exchange="{asked}", {keys.total} over {len(keys.rows)} ranks, got '
                f'{problem.workspace}; "ring" takes less'
            )
        return asked
    fitting = [name for name, needed in least_bytes.items() if needed <= room]
    if not on_gpu:
        return "gather" if "gather" in fitting else "ring"
    machine = cost.Machine(gpus=size or max(map(len, hosts)))
    return cost.fastest(keys.largest, d, len(keys.rows), machine, tuple(fitting))


def exchange_of(
    how: Schedule, xp: Any, rank: int, key_arrays: list[Array], transport: Exchanger
) -> Exchange:
    """The exchange of a call, for this rank's arrays of keys."""
    if how.exchange == "hierarchical":
        assert how.local_size is not None
        return Hierarchical(xp, rank, transport, how.keys, how.local_size, key_arrays)
    if how.exchange == "gather":
        return Gather(xp, rank, transport, how.keys, key_arrays)
    return Ring(xp, rank, transport, how.keys, how.pieces, how.symmetric)


# -- memory


def room_of(request: Request) -> int:
    """Bytes that buffers of an exchange may take on this rank.

    They are half of the workspace; if no workspace is given, a share of the GPU's memory if that is
    more.
    """
    problem = request.problem
    half_workspace = int(problem.workspace // 2)
    if problem.workspace_given or not request.on_gpu:
        return half_workspace
    from infonce.kernels.gpu.device.launcher import device_properties

    share: int = device_properties(problem.query.device.id).unasked_bytes
    return max(half_workspace, share)


def may_lack_room(problem: Problem, queries: Partition, keys: Partition) -> bool:
    """Whether the workspace may be too small for a block of a rank; the same on all ranks."""
    if problem.method == "naive":
        return True  # the workspace does not bound the logits of this method
    # linear terms, and copies of a joint loss, take up to half of the workspace
    shares_workspace = problem.linear_terms or problem.joint
    block_bytes = problem.workspace // (2 if shares_workspace else 1)
    enough = enough_room(queries.largest, keys.total, problem.shape[2] + guide_width(problem))
    return bool(block_bytes < enough)


@cache
def enough_room(m: int, n: int, d: int) -> int:
    """An upper bound of the least workspace, in bytes, of a block of up to m rows, n keys and width
    d."""
    side: int = max(128, 2 * least_block_side(m, n))
    return side * (64 * (side + d) + 2**18)
