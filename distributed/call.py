"""One call of a loss over ranks: its checks, the folds, sums over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from infonce.kernels.conclude import weighted
from infonce.kernels.linear import partners
from infonce.kernels.problem import Array, Problem
from infonce.kernels.solve import Solution, solve

from infonce import arrays, dispatch
from infonce.checks import validation
from infonce.checks.call import Request, check
from infonce.checks.rows import row_weights
from infonce.checks.validation import Batch
from infonce.spec import Loss

from . import agreement
from .agreement import Agreed, AgreedError, Statement, agree, failure_of, require_none
from .communicators.base import Communicator
from .communicators.mpi import connect
from .exchanges import blocks
from .exchanges import choice as exchanges
from .folds import FoldsOverRanks, folds_over_ranks
from .partition import Partition
from .transports import choice as transports
from .transports.base import Divisors, Transport, sum_over_ranks, totals

UNBOUNDED = 2**62  # bytes of a workspace: more than any address


def evaluate(
    kind: Loss, given: Sequence[Any], labels: Any, bias: Any, options: Mapping[str, Any],
    rank_options: Mapping[str, Any], with_grad: bool,
) -> Any:  # fmt: skip
    """The result of one call on this rank; `rank_options` are those of distributed/losses.py."""
    timeout = rank_options["timeout"]
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0
    ):
        raise ValueError(f"timeout: expected a positive number of seconds or None, got {timeout!r}")
    ranks = connect(rank_options["comm"])
    ranks.timeout = timeout
    pairs_views = kind.symmetric and not kind.classes  # whose labels are no argument of one process
    if ranks.size == 1 and not (pairs_views and labels is not None):
        _require_options(options, rank_options)
        function = dispatch.loss_and_grad if with_grad else dispatch.loss
        return function(kind, given, labels, bias, options)
    call = _Call(kind, ranks, labels, bias, options, rank_options, with_grad)
    try:
        with arrays.on_stream_of(given[0]):
            result = call.evaluate(given)
    except AgreedError as agreed:
        raise agreed.error from None
    except BaseException as error:
        try:
            ranks.fail(error)  # first: the other ranks wait
        finally:
            if call.transport is not None:
                call.transport.close()
        raise
    if not with_grad:
        arrays.warn_of_lost_gradients(kind, given, bias, options)
    return result


class _Call:
    """One call on one rank."""

    def __init__(
        self, kind: Loss, ranks: Communicator, labels: Any, bias: Any,
        options: Mapping[str, Any], rank_options: Mapping[str, Any], with_grad: bool,
    ) -> None:  # fmt: skip
        self.kind, self.ranks, self.labels, self.bias = kind, ranks, labels, bias
        self.options, self.rank_options, self.with_grad = options, rank_options, with_grad
        self.transport: Transport | None = None
        self.agreed: Agreed  # once they have

    def evaluate(self, given: Sequence[Any]) -> Any:
        known = self.ranks.agreed
        features, request, error, mine = self.first_look(given, known)
        everyone = self.ranks.allgather(mine)
        if known is not None and [terms for terms, _ in everyone] == known.terms:
            agreement.require_same_numbers(everyone)
        else:
            request, known = self.agree(features, request, error, everyone)
            self.ranks.agreed = known
        self.agreed = known
        with arrays.compute_context(features[0]):
            self.transport = transports.make(known.transport, self.ranks)
            if arrays.on_gpu(request.problem.query):
                request.problem = _on_gpu()[0].plain(request.problem)
            if known.tight:
                self.require_room(request)
            try:
                return self.solve(request, given[0])
            except MemoryError as error:
                dispatch.raise_with_advice(error, request.problem)

    # -- checks

    def first_look(self, given: Sequence[Any], known: Agreed | None) -> Any:
        """The arrays, the checked call and its error, as if all ranks had as many rows as in their
        last call; and what this rank states."""
        features = sizes = error = None
        try:
            features, sizes = _sized(self.kind, given)
            if known is not None and known.fits(self.kind, self.ranks.rank, sizes):
                with arrays.compute_context(features[0]):
                    request, mine = self.check(features, sizes, known.queries, known.keys)
                return features, request, None, mine
        except Exception as e:
            error = e
        return features, None, error, agreement.failed(sizes, failure_of(error))

    def agree(
        self, features: list[Array], request: Request, error: Exception | None,
        everyone: list[Statement],
    ) -> tuple[Request, Agreed]:  # fmt: skip
        """The checked call, and what follows from all ranks' statements. Where a rank has not
        checked it, because it does not know the rows of the others, they all check it again."""
        told = agreement.told(everyone)
        sizes = [of.sizes for of in told]
        require_none([of.failure if of.sizes is None else None for of in told], error)
        rows = [[sum(of) if self.kind.joint else of[side] for of in sizes] for side in (0, -1)]
        queries, keys = map(Partition, rows)
        with arrays.compute_context(features[0]):
            if all(of.facts or of.failure for of in told):
                require_none([of.failure for of in told], error)
            else:
                mine = sizes[self.ranks.rank]
                request, everyone = agree(
                    self.ranks, lambda: self.check(features, mine, queries, keys)
                )
            agreed = agreement.agreed(
                everyone, request, queries, keys, self.ranks, self.options, self.rank_options
            )
        return request, agreed

    def check(
        self, features: list[Array], sizes: list[int], queries: Partition, keys: Partition
    ) -> tuple[Request, Statement]:
        """The checked call, and what this rank states."""
        options = self.options
        _require_options(options, self.rank_options)
        naive = options.get("method") == "naive"
        if naive and arrays.on_gpu(features[0]):
            raise ValueError(
                'method: expected "auto" or "tiled" over ranks with arrays on GPUs, got "naive"'
            )
        if not queries.total or not keys.total:
            raise ValueError(
                f"{self.kind.arguments[0]}: expected at least one row over all ranks, got none"
            )
        rows = queries.total // (1 + self.kind.joint)
        batch = Batch(rows, keys.total, queries.starts[self.ranks.rank])
        request = check(self.kind, features, self.labels, self.bias, options, self.with_grad, batch)
        if naive:
            request.problem.workspace = UNBOUNDED
        return request, agreement.statement(
            self.kind, request, features, sizes, self.labels, self.with_grad, options,
            self.rank_options,
        )  # fmt: skip

    def require_room(self, request: Request) -> None:
        """ValueError on all ranks where the workspace of one is too small, before anything is
        sent."""
        exchange, keys = self.agreed.exchange, self.agreed.keys

        def room() -> tuple[None, None]:
            blocks.require_room(blocks.folding(request), exchange, request, keys, self.ranks)
            return None, None

        agree(self.ranks, room)

    # -- the work

    def solve(self, request: Request, like: Any) -> Any:
        agreed = self.agreed
        self.total: float = agreed.queries.total // (1 + self.kind.joint)
        if agreed.weighted and not self.kind.classes:  # of classes later
            self.weigh(request)
        ddp = self.ranks.size if self.rank_options["gradient_scale"] == "ddp" else 1
        if ddp != 1:
            request.problem.upstream = request.problem.upstream * ddp
        problem, gradients = request.problem, request.gradients
        assert self.transport is not None
        solution, self.ddp = None, float(ddp)
        if arrays.on_gpu(problem.query):
            select, planned = _on_gpu()
            problem = select.without_weights(problem, problem.by_row)
            solution = planned.solution(
                agreed.exchange, problem, gradients, agreed.queries, agreed.keys, self.ranks,
                self.transport, self.divisors(request), request.dtype,
            )  # fmt: skip
        if solution is None:
            solution = self.fold(request, problem)
        convert = arrays.converter_to(like)
        if self.with_grad:
            result = dispatch.loss_and_grad_of(self.kind, request, solution, convert)
        else:
            result = convert(dispatch.reduced_loss(request, solution))
        self.transport.finish()
        return result

    def fold(self, request: Request, problem: Problem) -> Solution:
        """The folds over ranks, step by step."""
        gradients, labelled = request.gradients, self.labels is not None
        agreed, folding = self.agreed, blocks.folding(request)
        vectors = folding.vectors
        assert self.transport is not None
        problem.key = vectors.xp.ascontiguousarray(problem.key)
        if not labelled:
            problem.positives = own_positives(vectors.xp, problem, self.first_row)
        folds = folds_over_ranks(
            agreed.exchange, problem, gradients, agreed.keys, self.ranks, self.transport,
            folding.fold_block, labelled, vectors,
        )  # fmt: skip
        if self.kind.classes:
            find_classes(folds, problem, self.first_row)
            self.weigh(request)
        elif self.kind.symmetric and labelled:
            wrong = unpaired(folds, problem, self.first_row)
            agree(self.ranks, lambda: require_pairs(problem, *wrong))
        solution = solve(problem, folds, gradients)
        self.reduce(request, solution, vectors)
        return solution

    @property
    def first_row(self) -> int:
        """Index of this rank's first query in the batch."""
        return self.agreed.queries.starts[self.ranks.rank]

    def weigh(self, request: Request) -> None:
        """Weights of losses, whose mean is divided by the sum over ranks."""
        problem, rows = request.problem, self.total
        weights, mine = problem.weights, float(len(problem.query) // (1 + self.kind.joint))
        if weights is not None:
            assert self.transport is not None
            mine = self.transport.read(weights.sum())
            problem.row_shares, problem.upstream = weights, problem.upstream * weights
        self.total = _sum(self.ranks.allgather(mine)) or 1.0  # no row has a positive: the loss is 0
        if request.reduction == "mean":
            problem.upstream = problem.upstream * (rows / self.total)

    def divisors(self, request: Request) -> Divisors:
        return self.total if request.reduction == "mean" else 1.0, self.ddp

    def reduce(self, request: Request, solution: Solution, vectors: Any) -> None:
        """Sums over ranks."""
        assert self.transport is not None
        loss = solution.loss
        if loss is None and request.reduction != "none":
            loss = weighted(vectors.xp, solution.losses, request.problem.row_shares).sum()
        divisors = self.divisors(request)
        found = totals(self.transport, vectors, loss, solution, divisors, request.dtype)
        if request.metrics and solution.direction_losses is not None:
            rows, columns = solution.direction_losses
            total = self.agreed.queries.total
            metrics = {
                "rows": (rows.sum(), total),
                "columns": (None if columns is None else columns.sum(), total),
            }
            means = sum_over_ranks(self.transport, vectors, metrics, rows.dtype)
            solution.mean_losses = means["rows"], means.get("columns")
        for name, value in found.items():
            setattr(solution, name, value)


def own_positives(xp: Any, problem: Problem, first: int) -> Array:
    """The positives of a shard that has no labels, whose first row is row `first` of the batch."""
    m, own = len(problem.query), xp.arange(len(problem.query))
    return first + ((own + m // 2) % max(m, 1) if problem.symmetric else own)


def find_classes(folds: FoldsOverRanks, problem: Problem, first: int) -> None:
    """The positives of rows, which are on any rank, and the weights of those that have none."""
    own = folds.xp.arange(len(problem.query)) + first
    members = folds.members(problem.classes)
    problem.positives, has_positive = partners(folds.xp, members, own, problem.decoupled)
    problem.weights = row_weights(folds.xp, problem.weights, has_positive)


def unpaired(folds: FoldsOverRanks, problem: Problem, first: int) -> tuple[Array, Array]:
    """Of views, whose labels are each other: whether a row is not the label of its label; and the
    label of its label."""
    xp, mine = folds.xp, folds.xp.arange(len(problem.positives)) + first
    back = folds.take_at_positives(problem, problem.positives)
    wrong = (back != mine) | (problem.positives == mine) | (problem.positives < 0)
    if problem.marks is not None:
        wrong |= xp.isnan(problem.marks)
    return wrong, back


def require_pairs(problem: Problem, wrong: Array, back: Array) -> tuple[None, None]:
    """ValueError where there are `unpaired` rows. Nothing to state to other ranks."""
    if bool(wrong.any()):
        i = int(wrong.argmax())
        raise ValueError(
            f"labels: expected two rows that are each other's label, got "
            f"{int(problem.positives[i])} at position {i}, whose own is {int(back[i])}"
        )
    return None, None


@cache
def _on_gpu() -> tuple[Any, Any]:
    """The modules for arrays on GPUs: an import statement takes time that small batches notice."""
    from infonce.kernels.gpu import select

    from . import planned

    return select, planned


def _require_options(options: Mapping[str, Any], rank_options: Mapping[str, Any]) -> None:
    """ValueError where an option is none that a call over ranks takes."""
    for name, choices in (
        ("gradient_scale", ("global", "ddp")),
        ("transport", transports.CHOICES),
        ("exchange", exchanges.CHOICES),
    ):
        validation.choice(name, rank_options[name], choices)
    require_method(options)


def require_method(options: Mapping[str, Any]) -> None:
    """ValueError where the method is none that a call over ranks takes."""
    if options.get("method") == "fused":
        raise ValueError(
            'method: expected "auto", "tiled" or "naive" over ranks, got "fused": no logits are '
            "kept from one fold to the next"
        )


def _sized(kind: Loss, given: Sequence[Any]) -> tuple[list[Array], list[int]]:
    """The arrays, and how many rows each has. (Arrays that are not 2-d are refused later.)"""
    features = [arrays.native(z, name) for z, name in zip(given, kind.arguments, strict=True)]
    shapes = [tuple(getattr(z, "shape", ())) for z in features]
    return features, [s[0] if len(s) == 2 else 1 for s in shapes]


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN or infinity where a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
