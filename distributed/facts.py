"""What ranks tell each other of a call before any work, and what follows from that.

Each rank sends two strings of bytes. Its terms follow from shapes, dtypes, devices and plain
options: calls that are alike have the same, which are kept. Where all ranks send the same terms as
for their last call, what followed from them holds. Its numbers may be others in each call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Problem

from infonce import arrays, spec
from infonce.checks.call import Request
from infonce.spec import Loss

from .agreement import AgreedError, Failure, packed, require_same
from .communicators.base import Communicator
from .exchanges import choice as exchanges
from .partition import Partition
from .transports import choice as transports

Options = Mapping[str, Any]
Statement = tuple[bytes, bytes]  # terms, numbers
# Options that have to be the same on all ranks and are fields of `Problem` by the same name; all
# but the method, which over ranks is always "tiled", and two that are compared as they are resolved
SHARED = [name for name in spec.COMPILED if name not in ("method", "reduction", "precision")]
OF_RANKS = ("gradient_scale", "transport", "exchange")  # so do these of distributed/losses.py
MOST_TERMS = 64  # that are kept
_terms: dict[tuple[Any, ...], bytes] = {}


@dataclass(frozen=True)
class Told:
    """The terms of one rank."""

    sizes: Any  # list of the rows of its arrays; None: it cannot read them
    failure: Failure = None  # of its checks
    facts: bytes = b""  # packed; of a checked call, like what follows
    offers: dict[str, str | None] = field(default_factory=dict)  # transports
    device: str | None = None  # name of the GPU
    room: int = 0  # bytes for buffers of an exchange
    weighted: bool = False  # whether rows have weights
    positive: bool = True  # whether a weight may be positive


@dataclass(frozen=True)
class Agreed:
    """What follows from the terms of all ranks."""

    terms: list[bytes]
    sizes: list[Any]
    queries: Partition
    keys: Partition
    exchange: str
    transport: str  # its name
    weighted: bool


def failed(sizes: list[int] | None, failure: Failure) -> Statement:
    """What a rank states that has no checked call."""
    return packed(Told(sizes, failure)), b""


def statement(
    kind: Loss, request: Request, features: list[Array], sizes: list[int], labelled: bool,
    with_grad: bool, options: Options, rank_options: Options,
) -> Statement:  # fmt: skip
    """What a rank states of its checked call."""
    problem, given = request.problem, options.get("weights")
    on_gpu, weighted = arrays.on_gpu(problem.query), problem.weights is not None
    positive = given is None or on_gpu or bool(np.any(arrays.native(given, "weights")))
    of_ranks = {name: rank_options[name] for name in OF_RANKS}
    of_ranks["INFONCE_LOCAL_SIZE"] = os.environ.get("INFONCE_LOCAL_SIZE")
    library = os.environ.get(transports.CUDA_AWARE)
    key = request.static, *of_ranks.values(), library, weighted, positive
    terms = _terms.get(key)
    if terms is None:
        device = None
        if on_gpu:
            from .transports.gpu import device_name

            device = device_name()
        facts = _facts(kind, request, features, labelled, with_grad, options) | of_ranks
        terms = packed(Told(
            sizes, None, packed(facts), transports.offers(on_gpu), device,
            exchanges.room(problem), weighted, positive,
        ))  # fmt: skip
        if len(_terms) >= MOST_TERMS:
            _terms.clear()
        _terms[key] = terms
    return terms, packed(_numbers(problem, options))


def _facts(
    kind: Loss, request: Request, features: list[Array], labelled: bool, with_grad: bool,
    options: Options,
) -> dict[str, Any]:  # fmt: skip
    """What has to be the same on all ranks, in the order in which they are compared; None for
    `_numbers`."""
    problem, first = request.problem, kind.arguments[0]
    return {
        "function": f"{kind.name}_loss{'_and_grad' * with_grad}",
        **{
            f"{name}: dtype": z.dtype.name for name, z in zip(kind.arguments, features, strict=True)
        },
        f"{first}: width": problem.shape[2],
        f"{first}: place": "a GPU" if arrays.on_gpu(features[0]) else "the host",
        "scale": None,
        "bias": None,
        "labels": "given" if labelled else "not given",
        **{
            name: "given" if options.get(name) is not None else "not given"
            for name in ("ids", "weights", "key_bias")
        },
        **{name: getattr(problem, name) for name in SHARED},
        "metrics": problem.retrieval_ranks,
        "reduction": request.reduction,
        "precision": problem.compute,
        "offload": request.offload,
        "wrt": sorted(request.wrt),
        "grad_out": None,
    }


def _numbers(problem: Problem, options: Options) -> dict[str, Any]:
    """The facts that may be others in each call."""
    scale, bias = (
        value if isinstance(value, (float, int, type(None))) else "an array on a GPU"
        for value in (problem.scale, problem.bias)
    )
    grad_out = options.get("grad_out", 1.0)
    if not isinstance(grad_out, float):
        grad_out = float(grad_out) if np.ndim(grad_out) == 0 else "per row"
    return {"scale": scale, "bias": bias, "grad_out": grad_out}


def told(everyone: Sequence[Statement]) -> list[Told]:
    """The terms of all ranks."""
    return [pickle.loads(terms) for terms, _ in everyone]


def require_same_numbers(everyone: Sequence[Statement]) -> None:
    """`AgreedError` on all ranks that names the first number in which a rank differs."""
    require_same([(numbers,) for _, numbers in everyone])


def agreed(
    everyone: Sequence[Statement], request: Request, queries: Partition, keys: Partition,
    ranks: Communicator, options: Options, rank_options: Options,
) -> Agreed:  # fmt: skip
    """What follows from the statements of all ranks; `AgreedError` on all of them where they
    disagree. It depends on nothing but their terms."""
    parts = told(everyone)
    require_same([(of.facts, numbers) for of, (_, numbers) in zip(parts, everyone, strict=True)])
    if options.get("weights") is not None and not any(of.positive for of in parts):
        error = "weights: expected a positive sum over all ranks, got zeros alone"
        raise AgreedError(ValueError(error))
    devices, offered = [of.device for of in parts], [of.offers for of in parts]
    on_gpu = devices[0] is not None
    if on_gpu and ranks.size > 1:
        _one_gpu_each(offered, devices, ranks)
    try:
        transport = transports.choose(rank_options["transport"], offered)
        exchange = exchanges.choose(
            rank_options["exchange"], request.problem, request.gradients, keys, ranks,
            [of.room for of in parts],
        )  # fmt: skip
    except ValueError as error:
        raise AgreedError(error) from None
    if on_gpu and ranks.size == 1:
        transport = "staged"  # nothing is sent
    return Agreed(
        [terms for terms, _ in everyone], [of.sizes for of in parts], queries, keys, exchange,
        transport, any(of.weighted for of in parts),
    )  # fmt: skip


def _one_gpu_each(
    offered: Sequence[dict[str, str | None]], devices: Sequence[str | None], ranks: Communicator
) -> None:
    """NCCL needs a GPU for each rank: withdraw its offer where two ranks share one."""
    processes = ranks.peers.processes if ranks.peers else []
    machines = [process.machine for process in processes] or [""] * ranks.size
    places = list(zip(machines, devices, strict=True))
    for r, place in enumerate(places):
        if place in places[:r]:
            other = places.index(place)
            offered[r]["nccl"] = (
                f"it shares {place[1]} with rank {other}: more ranks than GPUs, or no "
                "cupy.cuda.Device(rank % gpus).use() on each rank"
            )
