"""Agreement of ranks before any work: errors of one rank are raised on all, calls are the same.

Each rank states its call in two strings of bytes. Its terms follow from shapes, dtypes, devices and
plain options: calls that are alike have the same, which are kept. Where all ranks send the same
terms as for their last call, its schedule holds. Its numbers may be others in each call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from infonce.kernels.problem import Array, Problem
from infonce.kernels.targets import guide_width

from infonce import arrays, spec
from infonce.checks.call import Request, check
from infonce.checks.rows import compared_as
from infonce.checks.validation import Batch
from infonce.spec import ARRAYS, NAMES, Loss

from .communicators.base import Communicator, RankError
from .exchanges.partition import Partition
from .schedule import Schedule, Terms, decide, require_options, room_of
from .transports import choice as transports

BUILTIN = {e.__name__: e for e in (TypeError, ValueError, MemoryError, ImportError, OverflowError)}
Options = Mapping[str, Any]
Statement = tuple[bytes, bytes]  # terms, numbers
# Options that have to be the same on all ranks and are fields of `Problem` by the same name: all
# but four that are compared as they are resolved
RESOLVED = "method", "reduction", "precision", "in_batch"
SHARED = [name for name in spec.COMPILED if name not in RESOLVED]
# so do these of distributed/losses.py, and the prefixes of which a call is one
OF_RANKS = ("gradient_scale", "transport", "exchange", "dims")
MOST_TERMS = 64  # that are kept
UNBOUNDED = 2**62  # bytes of a workspace: more than any address
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


def require_same(everyone: Sequence[Sequence[bytes]]) -> None:
    """`AgreedError` of a ValueError that names the first fact in which a rank differs. Each rank
    has one or more pickled dictionaries of facts, the later in the place of the earlier."""
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


# -- a call, as its rank checks and states it


@dataclass(frozen=True)
class Call:
    """The arguments of this rank's call, but for its features."""

    kind: Loss
    labels: Any
    bias: Any
    options: Options
    rank_options: Options
    with_grad: bool

    def check(
        self, features: list[Array], queries: Partition, keys: Partition, rank: int
    ) -> Request:
        """The checked call, of a batch that is split into these shards."""
        options = self.options
        require_options(options, self.rank_options)
        if not queries.total or not keys.total:
            raise ValueError(
                f"{self.kind.arguments[0]}: expected at least one row over all ranks, got none"
            )
        rows = queries.total // (1 + self.kind.joint)
        batch = Batch(rows, keys.total, queries.starts[rank])
        request = check(self.kind, features, self.labels, self.bias, options, self.with_grad, batch)
        if request.problem.method == "naive":
            if request.on_gpu:
                raise ValueError(
                    'method: expected "auto" or "tiled" over ranks with arrays on GPUs, got "naive"'
                )
            request.problem.workspace = UNBOUNDED
        return request


def agree_on(
    call: Call, features: list[Array], unreadable: Exception | None, ranks: Communicator
) -> tuple[Request, Schedule]:
    """This rank's checked call, and the schedule of all ranks. `AgreedError` on all of them where
    the call of one is refused, or calls differ; `unreadable`: why there are no features."""
    shapes = [tuple(getattr(z, "shape", ())) for z in features]
    sizes = [shape[0] if len(shape) == 2 else 1 for shape in shapes]  # others are refused later
    last, error, stated = ranks.agreed, unreadable, None
    if error is None and last is not None and last.is_for(call.kind.joint, ranks.rank, sizes):
        try:
            request = call.check(features, last.queries, last.keys, ranks.rank)
            stated = statement(call, request, features, sizes)
        except Exception as refusal:
            error = refusal
    if stated is None:
        stated = unchecked(None if unreadable else sizes, error)
    everyone = ranks.allgather(stated)
    if last is not None and [terms for terms, _ in everyone] == last.terms:
        require_same([(numbers,) for _, numbers in everyone])
        return request, last
    terms = unpacked(everyone)
    require_none([of.failure if of.sizes is None else None for of in terms], error)
    rows = [
        [sum(of.sizes or ()) if call.kind.joint else (of.sizes or ())[side] for of in terms]
        for side in (0, call.kind.key_argument)
    ]
    queries, keys = map(Partition, rows)
    if all(of.facts or of.failure for of in terms):
        require_none([of.failure for of in terms], error)
    else:  # a rank has not known the rows of the others: all check their calls again

        def check_again() -> tuple[Request, Statement]:
            request = call.check(features, queries, keys, ranks.rank)
            return request, statement(call, request, features, sizes)

        request, everyone = agree(ranks, check_again)
        terms = unpacked(everyone)
    require_same([(of.facts, numbers) for of, (_, numbers) in zip(terms, everyone, strict=True)])
    try:
        ranks.agreed = decide(
            [of for of, _ in everyone], terms, request, queries, keys, ranks, call.rank_options
        )
    except ValueError as error:
        raise AgreedError(error) from None
    return request, ranks.agreed


def unchecked(sizes: list[int] | None, error: Exception | None) -> Statement:
    """What a rank states that has not checked its call, or whose checks have raised `error`."""
    return pickle.dumps(Terms(sizes, failure_of(error))), b""


def unpacked(everyone: Sequence[Statement]) -> list[Terms]:
    """The terms of all ranks."""
    return [pickle.loads(terms) for terms, _ in everyone]


def statement(call: Call, request: Request, features: list[Array], sizes: list[int]) -> Statement:
    """What a rank states of its checked call."""
    options, problem = call.options, request.problem
    guide = _guide_of(problem)
    labelled = "not given" if call.labels is None else "given"
    compared = {
        "labels": compared_as(call.labels) if call.kind.classes else labelled,
        **{name: compared_as(options.get(name)) for name in NAMES},
        "guide": guide,
    }
    weights, weighted = options.get("weights"), problem.weights is not None
    positive = weights is None or request.on_gpu or bool(np.any(arrays.native(weights, "weights")))
    rank_settings = {name: call.rank_options.get(name) for name in OF_RANKS}
    rank_settings["INFONCE_LOCAL_SIZE"] = os.environ.get("INFONCE_LOCAL_SIZE")
    library = os.environ.get(transports.CUDA_AWARE)
    key = request.static, *rank_settings.values(), *compared.values(), library, weighted, positive
    terms = _terms.get(key)
    if terms is None:
        device = None
        if request.on_gpu:
            from .transports.gpu import device_name

            device = device_name()
        facts = _facts(call, request, features, compared) | rank_settings
        terms = pickle.dumps(Terms(
            sizes, None, pickle.dumps(facts), transports.offers(request.on_gpu), device,
            room_of(request), weighted, positive,
        ))  # fmt: skip
        if len(_terms) >= MOST_TERMS:
            _terms.clear()
        _terms[key] = terms
    return terms, pickle.dumps(_numbers(problem, options))


def _guide_of(problem: Problem) -> str:
    if not problem.guided:
        return "not given"
    return f"{problem.guide_key.dtype.name} of width {guide_width(problem)}"


def _facts(
    call: Call, request: Request, features: list[Array], compared: dict[str, str]
) -> dict[str, Any]:
    """What has to be the same on all ranks, in the order in which they are compared; None for
    `_numbers`."""
    kind, problem = call.kind, request.problem
    first = kind.arguments[0]
    return {
        "function": f"{kind.name}_loss{'_and_grad' * call.with_grad}",
        **{
            f"{name}: dtype": z.dtype.name for name, z in zip(kind.arguments, features, strict=True)
        },
        f"{first}: width": problem.shape[2],
        f"{first}: place": "a GPU" if request.on_gpu else "the host",
        "scale": None,
        "bias": None,
        **compared,
        **{name: "given" if call.options.get(name) is not None else "not given" for name in ARRAYS},
        "in_batch": call.options.get("in_batch", True),
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
