"""One call of a loss over ranks: its checks, the folds, sums over the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from infonce.kernels.linear import partners
from infonce.kernels.problem import SILENT, Array, Problem
from infonce.kernels.solve import Solution, solve

from infonce import arrays, dispatch, spec
from infonce.checks import validation
from infonce.checks.call import Batch, Request, check
from infonce.checks.rows import row_weights
from infonce.spec import Loss

from .agreement import AgreedError, agree, failure_of, packed, require_none, require_same
from .communicators.base import Communicator
from .communicators.mpi import connect
from .exchanges import blocks
from .exchanges import choice as exchanges
from .folds import FoldsOverRanks, folds_over_ranks
from .partition import Partition
from .transports import choice as transports
from .transports.base import Transport

# Options that have to be the same on all ranks and are fields of `Problem` by the same name; all
# but the method, which over ranks is always "tiled", and two that are compared as they are resolved
SHARED = [name for name in spec.COMPILED if name not in ("method", "reduction", "precision")]


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
    of_views = kind.symmetric and not kind.classes  # whose labels are no argument of one process
    if ranks.size == 1 and not (of_views and labels is not None):
        _require_options(options, rank_options)
        function = dispatch.loss_and_grad if with_grad else dispatch.loss
        return function(kind, given, labels, bias, options)
    call = _Call(kind, ranks, labels, bias, options, rank_options, with_grad)
    try:
        with arrays.on_stream_of(given[0]), np.errstate(**SILENT):
            result = call.evaluate(given)
    except AgreedError as agreed:
        raise agreed.error from None
    except BaseException as error:
        if call.transport is not None:
            call.transport.close()
        ranks.fail(error)
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
        self.weighted = False  # whether a rank's rows have weights

    def evaluate(self, given: Sequence[Any]) -> Any:
        (features, request, error), everyone = agree(self.ranks, lambda: self.first_look(given))
        known = self.ranks.sizes
        sizes = self.ranks.sizes = [of for of, _, _ in everyone]
        queries, keys = self.partitions(sizes)
        with dispatch.compute_context(features[0]):
            if sizes == known:
                require_none([failure for _, failure, _ in everyone], error)
                facts = [of for _, _, of in everyone]
            else:
                request, facts = agree(self.ranks, lambda: self.check(features, queries, keys))
            self.compare(facts, request, keys)
            self.folding = blocks.folding(request)
            if blocks.tight(request.problem, queries, keys):
                self.require_room(request, keys)
            try:
                return self.solve(request, given[0], queries, keys)
            except MemoryError as error:
                dispatch.raise_with_advice(error, request.problem)

    # -- checks

    def partitions(self, sizes: Sequence[Sequence[int]]) -> tuple[Partition, Partition]:
        """Of queries and keys. The rows of a joint loss are those of both arguments."""
        queries, keys = (
            [sum(of) if self.kind.joint else of[side] for of in sizes] for side in (0, -1)
        )
        return Partition(queries), Partition(keys)

    def first_look(self, given: Sequence[Any]) -> tuple[Any, Any]:
        """The arrays, the checked call and its error, as if all ranks had as many rows as in their
        last call; and for all ranks: this one's rows, its error, `facts`."""
        features, sizes = _sized(self.kind, given)
        known, request, facts, error = self.ranks.sizes, None, None, None
        if known is not None and known[self.ranks.rank] == sizes:
            queries, keys = self.partitions(known)
            try:
                with dispatch.compute_context(features[0]):
                    request, facts = self.check(features, queries, keys)
            except Exception as e:
                error = e
        return (features, request, error), (sizes, failure_of(error), facts)

    def check(
        self, features: list[Array], queries: Partition, keys: Partition
    ) -> tuple[Request, Any]:
        """The checked call, and what has to be the same on all ranks."""
        options = self.options
        _require_options(options, self.rank_options)
        if not queries.total or not keys.total:
            raise ValueError(
                f"{self.kind.arguments[0]}: expected at least one row over all ranks, got none"
            )
        rows = queries.total // (1 + self.kind.joint)
        batch = Batch(rows, keys.total, queries.starts[self.ranks.rank])
        request = check(self.kind, features, self.labels, self.bias, options, self.with_grad, batch)
        return request, self.facts(request, features)

    def facts(self, request: Request, features: list[Array]) -> Any:
        """(facts that have to be the same on all ranks, transports, name of the GPU or None, bytes
        for buffers of an exchange, whether rows have weights, whether a weight may be positive)."""
        problem = request.problem
        on_gpu = arrays.on_gpu(features[0])
        scale, bias = (
            value if isinstance(value, (float, int, type(None))) else "an array on a GPU"
            for value in (problem.scale, problem.bias)
        )
        grad_out = self.options.get("grad_out", 1.0)
        facts: dict[str, Any] = {
            "function": f"{self.kind.name}_loss{'_and_grad' * self.with_grad}",
            **{
                f"{name}: dtype": z.dtype.name
                for name, z in zip(self.kind.arguments, features, strict=True)
            },
            f"{self.kind.arguments[0]}: width": problem.shape[2],
            f"{self.kind.arguments[0]}: place": "a GPU" if on_gpu else "the host",
            "scale": scale,
            "bias": bias,
            "labels": "given" if self.labels is not None else "not given",
            **{
                name: "given" if self.options.get(name) is not None else "not given"
                for name in ("ids", "weights", "key_bias")
            },
            **{name: getattr(problem, name) for name in SHARED},
            "metrics": problem.retrieval_ranks,
            "reduction": request.reduction,
            "precision": problem.compute,
            "offload": request.offload,
            "wrt": sorted(request.wrt),
            "grad_out": float(grad_out) if np.ndim(grad_out) == 0 else "per row",
            "gradient_scale": self.rank_options["gradient_scale"],
            "transport": self.rank_options["transport"],
            "exchange": self.rank_options["exchange"],
            "INFONCE_LOCAL_SIZE": os.environ.get("INFONCE_LOCAL_SIZE"),
        }
        device = None
        if on_gpu:
            from .transports.gpu import device_name

            device = device_name()
        given = self.options.get("weights")
        positive = given is None or on_gpu or bool(np.any(arrays.native(given, "weights")))
        return (
            packed(facts), transports.offers(on_gpu), device, exchanges.room(problem),
            problem.weights is not None, positive,
        )  # fmt: skip

    def compare(self, everyone: list[Any], request: Request, keys: Partition) -> None:
        """ValueError on all ranks where they disagree; choose the exchange and the transport."""
        facts, offered, devices, rooms, weighted, positive = zip(*everyone, strict=True)
        require_same(facts)
        self.weighted = any(weighted)
        if self.options.get("weights") is not None and not any(positive):
            error = "weights: expected a positive sum over all ranks, got zeros alone"
            raise AgreedError(ValueError(error))
        on_gpu = devices[0] is not None
        if on_gpu and self.ranks.size > 1:
            _one_gpu_each(offered, devices, self.ranks)
        try:
            name = transports.choose(self.rank_options["transport"], offered)
            self.exchange = exchanges.choose(
                self.rank_options["exchange"], request.problem, request.gradients, keys,
                self.ranks, rooms,
            )  # fmt: skip
        except ValueError as error:
            raise AgreedError(error) from None
        if self.ranks.size == 1 and on_gpu:
            name = "staged"  # nothing is sent
        self.transport = transports.make(name, self.ranks)

    def require_room(self, request: Request, keys: Partition) -> None:
        """ValueError on all ranks where the workspace of one is too small, before anything is
        sent."""

        def room() -> tuple[None, None]:
            blocks.require_room(self.folding, self.exchange, request, keys, self.ranks)
            return None, None

        agree(self.ranks, room)

    # -- the work

    def solve(self, request: Request, like: Any, queries: Partition, keys: Partition) -> Any:
        self.total: float = queries.total // (1 + self.kind.joint)
        if self.weighted and not self.kind.classes:  # of classes later
            self.weigh(request)
        ddp = self.ranks.size if self.rank_options["gradient_scale"] == "ddp" else 1
        if ddp != 1:
            request.problem.upstream = request.problem.upstream * ddp
        problem, gradients = request.problem, request.gradients
        assert self.transport is not None
        solution = None
        if arrays.on_gpu(problem.query):
            from infonce.kernels.gpu import select

            from . import planned

            problem = select.without_weights(problem, problem.by_row)
            solution = planned.solution(
                self.exchange, problem, gradients, queries, keys, self.ranks, self.transport
            )  # fmt: skip
        if solution is None:
            solution = self.fold(request, problem, queries, keys)
        self.reduce(request, solution, queries, ddp)
        if not self.with_grad:
            return arrays.converter_to(like)(dispatch._reduce(request, solution))
        return dispatch._result(self.kind, request, solution, arrays.converter_to(like))

    def fold(
        self, request: Request, problem: Problem, queries: Partition, keys: Partition
    ) -> Solution:  # fmt: skip
        """The folds over ranks, step by step."""
        gradients, labelled = request.gradients, self.labels is not None
        vectors = self.folding.vectors
        assert self.transport is not None
        problem.key = vectors.xp.ascontiguousarray(problem.key)
        if not labelled:
            m, own = len(problem.query), vectors.xp.arange(len(problem.query))
            own = (own + m // 2) % max(m, 1) if problem.symmetric else own
            problem.positives = own + queries.starts[self.ranks.rank]
        folds = folds_over_ranks(
            self.exchange, problem, gradients, keys, self.ranks, self.transport,
            self.folding.fold_block, labelled, vectors,
        )  # fmt: skip
        if self.kind.classes:
            self.find_classes(folds, request, queries)
        elif self.kind.symmetric and labelled:
            self.check_pairs(folds, problem, queries)
        return solve(problem, folds, gradients)

    def find_classes(self, folds: FoldsOverRanks, request: Request, queries: Partition) -> None:
        """The positives of rows, which are on any rank, and the weights of those that have none."""
        xp, problem = folds.xp, request.problem
        own = xp.arange(len(problem.query)) + queries.starts[self.ranks.rank]
        members = folds.members(problem.classes)
        problem.positives, has_positive = partners(xp, members, own, problem.decoupled)
        problem.weights = row_weights(xp, problem.weights, has_positive)
        self.weigh(request)

    def weigh(self, request: Request) -> None:
        """Weights of losses, whose mean is divided by the sum over ranks."""
        problem, rows = request.problem, self.total
        weights, mine = problem.weights, float(len(problem.query) // (1 + self.kind.joint))
        if weights is not None:
            assert self.transport is not None
            (mine,) = self.transport.read([weights.sum()])
            problem.row_shares, problem.upstream = weights, problem.upstream * weights
        self.total = _sum(self.ranks.allgather(mine)) or 1.0  # no row has a positive: the loss is 0
        if request.reduction == "mean":
            problem.upstream = problem.upstream * (rows / self.total)

    def check_pairs(self, folds: FoldsOverRanks, problem: Problem, queries: Partition) -> None:
        """Views come in pairs: the positive of a row's positive is that row."""
        xp = folds.xp
        mine = xp.arange(len(problem.positives)) + queries.starts[self.ranks.rank]
        back = folds.take_at_positives(problem, problem.positives)
        wrong = (back != mine) | (problem.positives == mine) | (problem.positives < 0)
        if problem.marks is not None:
            wrong |= xp.isnan(problem.marks)

        def require_pairs() -> tuple[None, None]:
            if bool(wrong.any()):
                i = int(wrong.argmax())
                raise ValueError(
                    f"labels: expected two rows that are each other's label, got "
                    f"{int(problem.positives[i])} at position {i}, whose own is {int(back[i])}"
                )
            return None, None

        agree(self.ranks, require_pairs)

    def reduce(self, request: Request, solution: Solution, queries: Partition, ddp: int) -> None:
        """Sums over ranks, in their order: bitwise the same on every rank and in every run."""
        assert self.transport is not None
        loss, shares = solution.loss, request.problem.row_shares
        if loss is None:
            loss = (solution.losses if shares is None else solution.losses * shares).sum()
        sums = {"loss": loss, "scale": solution.scale_grad, "bias": solution.bias_grad}
        if request.metrics and solution.direction_losses is not None:
            rows, columns = solution.direction_losses
            sums |= {"rows": rows.sum(), "columns": None if columns is None else columns.sum()}
        sums = {name: value for name, value in sums.items() if value is not None}
        # read by the transport, whose wait for the device has a limit
        everyone = self.ranks.allgather(self.transport.read(list(sums.values())))
        totals = dict(zip(sums, map(_sum, zip(*everyone, strict=True)), strict=True))
        if request.reduction == "mean":
            totals["loss"] /= self.total
        if "scale" in totals:
            totals["scale"] /= ddp
        if "bias" in totals:
            totals["bias"] /= ddp
        if "rows" in totals:
            means = [totals[name] / queries.total if name in totals else None
                     for name in ("rows", "columns")]  # fmt: skip
            solution.mean_losses = means[0], means[1]
        values = self.transport.write(list(totals.values()), request.dtype)
        self.transport.finish()
        of_batch = dict(zip(totals, values, strict=True))
        solution.loss = of_batch["loss"] if request.reduction != "none" else None
        solution.scale_grad, solution.bias_grad = of_batch.get("scale"), of_batch.get("bias")


def _require_options(options: Mapping[str, Any], rank_options: Mapping[str, Any]) -> None:
    """ValueError where an option is none that a call over ranks takes."""
    for name, choices in (
        ("gradient_scale", ("global", "ddp")),
        ("transport", transports.CHOICES),
        ("exchange", exchanges.CHOICES),
    ):
        validation.choice(name, rank_options[name], choices)
    if (method := options.get("method")) in ("naive", "fused"):
        raise ValueError(
            f'method: expected "auto" or "tiled" over ranks, got {method!r}: no logits of a '
            "batch over ranks are kept"
        )


def _sized(kind: Loss, given: Sequence[Any]) -> tuple[list[Array], list[int]]:
    """The arrays, and how many rows each has. (Arrays that are not 2-d are refused later.)"""
    features = [arrays.native(z, name) for z, name in zip(given, kind.arguments, strict=True)]
    shapes = [tuple(getattr(z, "shape", ())) for z in features]
    return features, [s[0] if len(s) == 2 else 1 for s in shapes]


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN or infinity where a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else float(np.sum(values))


def _one_gpu_each(
    offered: Sequence[dict[str, str | None]], devices: Sequence[Any], ranks: Communicator
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
