"""Agreement of ranks before any work: errors of one rank are raised on all, calls are the same.

Each rank states its call in two strings of bytes, its terms and its numbers. The terms follow from
shapes, dtypes, devices and plain options. Calls with the same of these have the same terms, so the
terms are kept from call to call. If all ranks send the same terms as for their last call, the
schedule of that call holds. The numbers may differ from call to call.
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
# Options of COMPILED have to be the same on all ranks. `_facts` compares the resolved values of
# these four, and for each other option the field of `Problem` with its name.
RESOLVED = "method", "reduction", "precision", "in_batch"
SHARED = [name for name in spec.COMPILED if name not in RESOLVED]
# keywords of distributed/losses.py that have to be the same on all ranks, and `dims`
RANK_KEYWORDS = ("gradient_scale", "transport", "exchange", "dims")
MOST_TERMS = 64  # terms that are kept
UNBOUNDED = 2**62  # bytes of a workspace: more than any address
_terms: dict[tuple[Any, ...], bytes] = {}


class AgreedError(Exception):
    """An error that all ranks raise together: they stay in step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


Failure = tuple[str, str] | None  # type and message


def agree(ranks: Communicator, function: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """Run `function` on each rank, and return its result and the messages of all ranks.

    `function` returns (result for this rank, message for all ranks). An error on any rank is raised
    on all ranks, as `AgreedError`.
    """
    result = error = message = None
    try:
        result, message = function()
    except Exception as e:
        error = e
    outcomes = ranks.allgather((failure_of(error), message))
    require_none([failure for failure, _ in outcomes], error)
    return result, [message for _, message in outcomes]


def failure_of(error: Exception | None) -> Failure:
    """The form in which an error is sent to other ranks."""
    return None if error is None else (type(error).__name__, str(error))


def require_none(failures: Sequence[Failure], error: Exception | None) -> None:
    """Raise the first failure of a rank as `AgreedError`. `error` is this rank's own."""
    for r, failure in enumerate(failures):
        if failure is not None:
            if len(failures) == 1 and error is not None:
                raise AgreedError(error)
            name, text = failure
            raise AgreedError(BUILTIN.get(name, RankError)(f"rank {r}: {text}"))


def require_same(facts_by_rank: Sequence[Sequence[bytes]]) -> None:
    """Raise an `AgreedError` that names the first fact in which a rank differs from rank 0.

    Each rank has one or more pickled dictionaries of facts. A later dictionary replaces facts of
    those before it.
    """
    for r, facts in enumerate(facts_by_rank):
        if facts == facts_by_rank[0]:
            continue
        first, other = _unpack_facts(facts_by_rank[0]), _unpack_facts(facts)
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                error = (
                    f"{name}: expected the same on all ranks, got {first.get(name)!r} on rank 0 "
                    f"and {other.get(name)!r} on rank {r}"
                )
                raise AgreedError(ValueError(error))


def _unpack_facts(packed_facts: Sequence[bytes]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for part in packed_facts:
        facts |= pickle.loads(part)
    return facts


# -- a rank's call: its check and its statement


@dataclass(frozen=True)
class RankCall:
    """The arguments of this rank's call, except its features."""

    kind: Loss
    labels: Any
    bias: Any
    options: Options
    rank_options: Options
    with_grad: bool

    def check(
        self, features: list[Array], queries: Partition, keys: Partition, rank: int
    ) -> Request:
        """Check the call, given the shards of the batch."""
        options = self.options
        require_options(options, self.rank_options)
        if not queries.total or not keys.total:
            raise ValueError(
                f"{self.kind.arguments[0]}: expected at least one row over all ranks, got none"
            )
        rows = queries.total // (2 if self.kind.joint else 1)
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
    call: RankCall, features: list[Array], unreadable: Exception | None, ranks: Communicator
) -> tuple[Request, Schedule]:
    """This rank's checked call, and the schedule of all ranks.

    `unreadable` is the error that reading the features has raised, or None. `AgreedError` on all
    ranks if a rank's call is refused, or if calls differ.
    """
    shapes = [tuple(getattr(z, "shape", ())) for z in features]
    sizes = [shape[0] if len(shape) == 2 else 1 for shape in shapes]  # the checks refuse the others
    last, error, stated = ranks.agreed, unreadable, None
    if error is None and last is not None and last.is_for(call.kind.joint, ranks.rank, sizes):
        try:
            request = call.check(features, last.queries, last.keys, ranks.rank)
            stated = statement(call, request, features, sizes)
        except Exception as refusal:
            error = refusal
    if stated is None:
        stated = unchecked(None if unreadable else sizes, error)
    statements = ranks.allgather(stated)
    if last is not None and [packed for packed, _ in statements] == last.packed_terms:
        require_same([(numbers,) for _, numbers in statements])
        return request, last
    terms = unpack_terms(statements)
    require_none([each.failure if each.sizes is None else None for each in terms], error)
    sizes_by_rank = [each.sizes or [] for each in terms]
    rows = [
        [sum(sizes) if call.kind.joint else sizes[side] for sizes in sizes_by_rank]
        for side in (0, call.kind.key_argument)
    ]
    queries, keys = map(Partition, rows)
    if all(each.facts or each.failure for each in terms):
        require_none([each.failure for each in terms], error)
    else:  # a rank did not know the numbers of rows of the others: all check their calls again

        def check_again() -> tuple[Request, Statement]:
            request = call.check(features, queries, keys, ranks.rank)
            return request, statement(call, request, features, sizes)

        request, statements = agree(ranks, check_again)
        terms = unpack_terms(statements)
    require_same(
        [(each.facts, numbers) for each, (_, numbers) in zip(terms, statements, strict=True)]
    )
    try:
        packed_terms = [packed for packed, _ in statements]
        ranks.agreed = decide(packed_terms, terms, request, queries, keys, ranks, call.rank_options)
    except ValueError as error:
        raise AgreedError(error) from None
    return request, ranks.agreed


def unchecked(sizes: list[int] | None, error: Exception | None) -> Statement:
    """The statement of a rank whose call is not checked, or is refused with `error`."""
    return pickle.dumps(Terms(sizes, failure_of(error))), b""


def unpack_terms(statements: Sequence[Statement]) -> list[Terms]:
    """The terms of all ranks."""
    return [pickle.loads(terms) for terms, _ in statements]


def statement(
    call: RankCall, request: Request, features: list[Array], sizes: list[int]
) -> Statement:
    """The statement of a rank whose call is checked."""
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
    rank_settings = {name: call.rank_options.get(name) for name in RANK_KEYWORDS}
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
    call: RankCall, request: Request, features: list[Array], compared: dict[str, str]
) -> dict[str, Any]:
    """The facts that have to be the same on all ranks, in the order of their comparison. None
    holds the place of a fact that `_numbers` has."""
    kind, problem = call.kind, request.problem
    first = kind.arguments[0]
    return {
        "function": f"{kind.name}_loss{'_and_grad' if call.with_grad else ''}",
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
    """The facts that may differ from call to call."""
    scale, bias = (
        value if isinstance(value, (float, int, type(None))) else "an array on a GPU"
        for value in (problem.scale, problem.bias)
    )
    grad_out = options.get("grad_out", 1.0)
    if type(grad_out) is not float:
        grad_out = float(grad_out) if np.ndim(grad_out) == 0 else "per row"
    return {"scale": scale, "bias": bias, "grad_out": grad_out}
