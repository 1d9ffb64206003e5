"""Features and gradients in host memory, the logits on a device: for batches larger than the
device's memory.

The logit matrix is visited in blocks (Q_a, K_b) of panels that the workspace has room for. One
panel stays on the device while the panels of the other side stream past it, the next on its way
while one is used:

| fold | stays | streams | products of 2MND operations |
|---|---|---|---|
| log-sum-exp | Q_a | keys | 1 |
| dQ | Q_a and dQ_a | keys | 2 |
| dK | K_b and dK_b | queries | 2 |

So no sum leaves the device before it is complete, and of the host's memory nothing is needed beyond
features and gradients. (One panel of keys alone takes dQ and dK in one go.) What happens to a block
is the device's own backend's; vectors of length M or N are on the device during a fold, on the host
between folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from ..problem import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    Problem,
    RetrievalRanks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
    Sums,
    least_block_side,
    slices,
    workspace_too_small,
)
from ..solve import Backend, Vectors, retrieval_ranks_of

PANEL = 128  # rows of a panel are a multiple of this, where there are as many


class Device(Protocol):
    """Where blocks are computed."""

    xp: Any  # cupy, or what behaves like it

    def backend(self, problem: Problem, gradients: Gradients | None) -> Backend:
        """What folds a block whose arrays are on the device."""
        ...

    def put(self, array: Array) -> Array:
        """A copy on the device."""
        ...

    def get(self, array: Array) -> Array:
        """A copy on the host."""
        ...

    def stream(self, features: Array, panels: Sequence[slice]) -> Iterator[tuple[slice, Array]]:
        """Panels of host features on the device, one after the other. A panel's memory may be used
        again when the next but one is asked for."""
        ...


class Offload:
    """Blocks of one problem between host and device: see `infonce.kernels.solve.Backend`."""

    vectors = Vectors(np)
    online = False

    def __init__(self, problem: Problem, gradients: Gradients | None, device: Device) -> None:
        self.device = device
        self.real = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
        self.rows = self._panel_rows(problem)
        self.poisoned = np.zeros(len(problem.query))

    def _panel_rows(self, problem: Problem) -> int:
        """Rows of a panel: what lies on the device for a row is half of the workspace, in all."""
        m, n, d = problem.shape
        item = max(problem.query.dtype.itemsize, problem.key.dtype.itemsize)
        # one panel stays, two stream; gradients of either, a block's share, and as they are stored
        row = d * (4 * item + 3 * self.real.itemsize)
        most, least = problem.workspace // 2 // row, least_block_side(m, n)
        if most < least:
            raise ValueError(workspace_too_small(problem.shape, 2 * row * least, problem.workspace))
        most = most // PANEL * PANEL or most
        return int(min(most, max(m, n, 1)))

    # -- what solve.solve asks for

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid(slices(m, self.rows), slices(n, self.rows), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        """One triangle of panels is no use to gradients: sums of all rows would have to stay."""
        n = problem.shape[1]
        return slices(n, self.rows if problem.symmetric else n)

    def not_finite_marks(self, problem: Problem) -> Array:
        """Gathered by the fold of the losses, which has met all keys."""
        return self.poisoned

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            self.fold(problem, grid, replace(epilogue, row_rank=None, column_rank=None), None)
            self.fold(problem, grid, retrieval_ranks_of(epilogue, problem), None)
            return
        if gradients is not None and gradients.dots is not None:
            gradients.dots[:] = 0
        fold = _Fold(self, problem, grid, epilogue)
        both = gradients is not None and gradients.want_query and gradients.want_key
        if gradients is None or problem.symmetric or not gradients.want_key:
            fold.by_rows(gradients)
        elif both and len(grid.columns) > 1:
            fold.by_rows(replace(gradients, want_key=False))
            fold.results()  # complete: what sums get from now on is of no use
            fold.by_columns(replace(gradients, want_query=False, dots=None))
            return
        else:
            fold.by_columns(gradients)
        fold.results()


class _Fold:
    """One visit of every block of a grid."""

    def __init__(self, offload: Offload, problem: Problem, grid: Grid, epilogue: Epilogue) -> None:
        self.offload, self.device, self.grid = offload, offload.device, grid
        self.vectors = Vectors(self.device.xp)
        self.problem, self.of_host = problem, epilogue
        put = self.device.put
        # vectors, for all blocks
        self.epilogue = _each(epilogue, put)
        self.positives = put(problem.positives)
        self.ids = [None if v is None else put(v) for v in (problem.query_ids, problem.key_ids)]
        self.poisoned = put(offload.poisoned)
        self.done = 0

    def results(self) -> None:
        """What the epilogue has gathered goes to where it belongs."""
        get = self.device.get
        if not isinstance(self.of_host, SoftmaxGradient):
            _into(self.of_host, _each(self.epilogue, get))
            self.offload.poisoned[:] = get(self.poisoned)

    def by_rows(self, gradients: Gradients | None) -> None:
        """Queries stay, and their gradients."""
        problem, device, d = self.problem, self.device, self.problem.shape[2]
        wanted = None if gradients is None else gradients.query
        for a, rows in enumerate(self.grid.rows):
            q, dq = device.put(problem.query[rows]), None
            if wanted is not None:
                dq = device.xp.zeros((len(q), d), self.offload.real)
            columns = [self.grid.columns[b] for b in self.grid.visits(a)]
            several = len(columns) > 1
            for block, k in device.stream(problem.key, columns):
                mine = None
                if gradients is not None:
                    mine = replace(gradients, query=dq, key=None, want_key=False, add_query=several)
                self.block(rows, block, q, k, mine)
            if gradients is not None and wanted is not None:
                self.store(wanted, rows, dq, gradients.add_query)

    def by_columns(self, gradients: Gradients) -> None:
        """Keys stay, and their gradients; those of queries, where wanted, meet all keys at once."""
        problem, device, d = self.problem, self.device, self.problem.shape[2]
        empty, real = device.xp.empty, self.offload.real
        for columns in self.grid.columns:
            k = device.put(problem.key[columns])
            dk, share = device.xp.zeros((len(k), d), real), empty((len(k), d), real)
            for rows, q in device.stream(problem.query, self.grid.rows):
                dq = None
                if gradients.query is not None and gradients.want_query:
                    dq = empty((len(q), d), real)
                mine = replace(gradients, query=dq, key=share, add_query=False)
                self.block(rows, columns, q, k, mine)
                dk += share
                if dq is not None:
                    self.store(gradients.query, rows, dq, gradients.add_query)
            self.store(gradients.key, columns, dk, False)

    def store(self, target: Array, rows: slice, gradient: Array, add: bool) -> None:
        """A panel's gradient is complete."""
        if add:
            target[rows] += self.device.get(gradient)
        else:
            stored = gradient.astype(target.dtype.newbyteorder("="), copy=False)
            target[rows] = self.device.get(stored)

    def block(
        self, rows: slice, columns: slice, q: Array, k: Array, gradients: Gradients | None
    ) -> None:
        """Fold one block whose features are on the device."""
        problem, xp = self.problem, self.device.xp
        own = rows == columns
        symmetric = problem.symmetric and own
        epilogue = _part(self.epilogue, rows, columns)
        block = replace(
            problem,
            query=q,
            key=q if symmetric else k,
            positives=self.vectors.local_positives(self.positives[rows], columns),
            query_ids=None if self.ids[0] is None else self.ids[0][rows],
            key_ids=None if self.ids[1] is None else self.ids[1][columns],
            symmetric=symmetric,
            key_shard=problem.key_shard or not own,
            # the columns of a triangle's block off the diagonal have sums of their own
            column_weight=problem.row_weight if problem.symmetric else problem.column_weight,
            workspace=max(1, problem.workspace // 2),
            progress=None,
        )
        mine = gradients
        if gradients is not None and gradients.dots is not None:
            mine = replace(gradients, dots=xp.zeros(len(q) if gradients.want_query else len(k)))
        inner = self.device.backend(block, mine)
        grid = inner.grid(block, symmetric and self.grid.triangle)
        inner.fold(block, grid, epilogue, mine)
        if gradients is not None and mine is not None and mine.dots is not None:
            gradients.dots[rows if gradients.want_query else columns] += self.device.get(mine.dots)
        if isinstance(epilogue, (Statistics, Sigmoid)):
            not_finite = inner.not_finite_marks(block)
            self.poisoned[rows] += not_finite
            if self.grid.triangle and not own:
                self.poisoned[columns] += not_finite.sum()
        self.done += 1
        if problem.progress is not None:
            problem.progress(epilogue.phase, self.done, len(self.grid))


# --- epilogues ------------------------------------------------------------------------------------


def _each(epilogue: Epilogue | Sums, function: Any, seen: dict[int, Any] | None = None) -> Any:
    """The epilogue with `function` of each of its arrays; what is one object stays one."""
    seen = {} if seen is None else seen
    made = {}
    for f in fields(epilogue):
        value = getattr(epilogue, f.name)
        if value is not None and id(value) not in seen:
            known = _each(value, function, seen) if isinstance(value, Sums) else function(value)
            seen[id(value)] = known
        made[f.name] = None if value is None else seen[id(value)]
    make: Any = type(epilogue)
    return make(**made)


def _into(target: Any, source: Any) -> None:
    """Copy arrays of one dataclass into those of another."""
    for f in fields(target):
        to, of = getattr(target, f.name), getattr(source, f.name)
        if isinstance(to, Sums):
            _into(to, of)
        elif to is not None:
            to[...] = of


def _part(epilogue: Epilogue, rows: slice, columns: slice) -> Epilogue:
    """The epilogue of one block: views of its rows and columns."""
    if isinstance(epilogue, Statistics):
        of_rows, of_columns = (
            None if sums is None else Sums(sums.max[of], sums.sum[of])
            for sums, of in ((epilogue.rows, rows), (epilogue.columns, columns))
        )
        assert of_rows is not None
        return Statistics(of_rows, of_columns, epilogue.positive_logits[rows])
    if isinstance(epilogue, RetrievalRanks):
        part = RetrievalRanks(epilogue.positive_logits[rows], epilogue.row_rank[rows])
        if epilogue.column_rank is not None:
            part.column_positive_logits = epilogue.column_positive_logits[columns]
            part.column_rank = epilogue.column_rank[columns]
        return part
    if isinstance(epilogue, SoftmaxGradient):
        reference, factor, positive = (
            epilogue.column_reference, epilogue.column_factor, epilogue.column_positive_gradient,
        )  # fmt: skip
        if reference is not None and factor is not None:  # key j is the positive of query j
            positive = (epilogue.positive_gradient if positive is None else positive)[columns]
            reference, factor = reference[columns], factor[columns]
        return SoftmaxGradient(
            epilogue.row_reference[rows], epilogue.row_factor[rows], reference, factor,
            epilogue.positive_gradient[rows], positive,
        )  # fmt: skip
    assert isinstance(epilogue, Sigmoid)
    return Sigmoid(*(getattr(epilogue, f.name)[rows] for f in fields(epilogue)))
