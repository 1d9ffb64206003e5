"""Agreement of ranks before any work: errors of one rank are raised on all, calls are the same.

Each rank states its call in two strings of bytes. Its terms follow from shapes, dtypes, devices and
plain options: calls that are alike have the same, which are kept. Where all ranks send the same
terms as for their last call, what followed from them holds. Its numbers may be others in each call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Problem

from infonce import arrays, spec
from infonce.checks.call import Request
from infonce.checks.rows import compared_as
from infonce.spec import NAMES, Loss

from .communicators.base import Communicator, RankError
from .exchanges import blocks
from .exchanges import choice as exchanges
from .partition import Partition
from .transports import choice as transports

BUILTIN = {e.__name__: e for e in (TypeError, ValueError, MemoryError, ImportError, OverflowError)}
Options = Mapping[str, Any]
Statement = tuple[bytes, bytes]  # terms, numbers
# Options that have to be the same on all ranks and are fields of `Problem` by the same name: all
# but three that are compared as they are resolved
SHARED = [name for name in spec.COMPILED if name not in ("method", "reduction", "precision")]
OF_RANKS = ("gradient_scale", "transport", "exchange")  # so do these of distributed/losses.py
MOST_TERMS = 64  # that are kept
_terms: dict[tuple[Any, ...], bytes] = {}


class AgreedError(Exception):
    """An error that all ranks raise together: they stay in step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


Failure = tuple[str, str] | None  # type and message


def agree(ranks: Communicator, function: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """`function` returns a result for this rank and a message for all; this returns the result and
    the messages of all ranks. An error on any rank is raised on all, as `AgreedError`."""
    result = error = message = None
    try:
        result, message = function()
    except Exception as e:
        error = e
    everyone = ranks.allgather((failure_of(error), message))
    require_none([failure for failure, _ in everyone], error)
    return result, [message for _, message in everyone]


def failure_of(error: Exception | None) -> Failure:
    """An error as it is sent to other ranks."""
    return None if error is None else (type(error).__name__, str(error))


def require_none(failures: Sequence[Failure], error: Exception | None) -> None:
    """`AgreedError` of the first rank's failure; `error` is that of this rank."""
    for r, failure in enumerate(failures):
        if failure is not None:
            if len(failures) == 1 and error is not None:
                raise AgreedError(error)
            name, text = failure
            raise AgreedError(BUILTIN.get(name, RankError)(f"rank {r}: {text}"))


def packed(facts: Any) -> bytes:
    """Facts of a call as they are sent, and as `require_same` compares them."""
    return pickle.dumps(facts)


def require_same(everyone: Sequence[Sequence[bytes]]) -> None:
    """`AgreedError` of a ValueError that names the first fact in which a rank differs. Each rank
    has one or more packed dictionaries of facts, the later in the place of the earlier."""
    for r, facts in enumerate(everyone):
        if facts == everyone[0]:
            continue
        first, other = (_together(of) for of in (everyone[0], facts))
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                error = (
                    f"{name}: expected the same on all ranks, got {first.get(name)!r} on rank 0 "
                    f"and {other.get(name)!r} on rank {r}"
                )
                raise AgreedError(ValueError(error))


def _together(packed_facts: Sequence[bytes]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for part in packed_facts:
        facts |= pickle.loads(part)
    return facts


# -- what ranks state


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
    joint: bool  # `Loss.joint`: queries and keys are the rows of both arguments
    sizes: list[Any]
    queries: Partition
    keys: Partition
    exchange: str
    transport: str  # its name
    weighted: bool
    tight: bool  # see `blocks.tight`

    def fits(self, kind: Loss, rank: int, sizes: list[int]) -> bool:
        """Whether a call of this loss with so many rows on this rank may have the same queries and
        keys."""
        return self.joint == kind.joint and bool(self.sizes[rank] == sizes)


def failed(sizes: list[int] | None, failure: Failure) -> Statement:
    """What a rank states that has no checked call."""
    return packed(Told(sizes, failure)), b""


def statement(
    kind: Loss, request: Request, features: list[Array], sizes: list[int], labels: Any,
    with_grad: bool, options: Options, rank_options: Options,
) -> Statement:  # fmt: skip
    """What a rank states of its checked call."""
    labelled = "not given" if labels is None else "given"
    compared = {
        "labels": compared_as(labels) if kind.classes else labelled,
        **{name: compared_as(options.get(name)) for name in NAMES},
    }
    problem, given = request.problem, options.get("weights")
    on_gpu, weighted = arrays.on_gpu(problem.query), problem.weights is not None
    positive = given is None or on_gpu or bool(np.any(arrays.native(given, "weights")))
    rank_settings = {name: rank_options[name] for name in OF_RANKS}
    rank_settings["INFONCE_LOCAL_SIZE"] = os.environ.get("INFONCE_LOCAL_SIZE")
    library = os.environ.get(transports.CUDA_AWARE)
    key = request.static, *rank_settings.values(), *compared.values(), library, weighted, positive
    terms = _terms.get(key)
    if terms is None:
        device = None
        if on_gpu:
            from .transports.gpu import device_name

            device = device_name()
        facts = _facts(kind, request, features, compared, with_grad, options) | rank_settings
        terms = packed(Told(
            sizes, None, packed(facts), transports.offers(on_gpu), device,
            exchanges.room(problem), weighted, positive,
        ))  # fmt: skip
        if len(_terms) >= MOST_TERMS:
            _terms.clear()
        _terms[key] = terms
    return terms, packed(_numbers(problem, options))


def _facts(
    kind: Loss, request: Request, features: list[Array], compared: dict[str, str],
    with_grad: bool, options: Options,
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
        **compared,
        **{
            name: "given" if options.get(name) is not None else "not given"
            for name in ("weights", "key_bias")
        },
        "method": "naive" if problem.method == "naive" else "tiled",
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
    if type(grad_out) is not float:
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
    """What follows from the terms of all ranks, and from nothing else; `AgreedError` on all of them
    where their statements disagree."""
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
        [terms for terms, _ in everyone], request.problem.joint, [of.sizes for of in parts],
        queries, keys, exchange, transport, any(of.weighted for of in parts),
        blocks.tight(request.problem, queries, keys),
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
