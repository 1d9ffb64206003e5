"""Features and gradients in host memory, logits on a device: for batches larger than its memory.

A block (Q_a, K_b) is a panel of queries and a panel of keys that fit the workspace. One panel stays
on the device. The panels of the other side are streamed: while one is used, the next is copied.

| fold | stays | streams | products of 2MND operations |
|---|---|---|---|
| log-sum-exp | Q_a | keys | 1 |
| dQ | Q_a and dQ_a | keys | 2 |
| dK | K_b and dK_b | queries | 2 |

So only complete sums leave the device, and the host needs no memory beyond features and gradients.
(If all keys are one panel, dQ and dK take one fold.) The device's own backend computes a block.
Vectors of length M or N are on the device during a fold, and on the host between folds.
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

PANEL = 128  # a panel of more rows than this has a multiple of it


class Device(Protocol):
    """The device that computes blocks."""

    xp: Any  # cupy, or a module with its functions

    def backend(self, problem: Problem, gradients: Gradients | None) -> Backend:
        """The backend that folds a block whose arrays are on the device."""
        ...

    def put(self, array: Array) -> Array:
        """A copy on the device."""
        ...

    def get(self, array: Array) -> Array:
        """A copy on the host."""
        ...

    def stream(self, features: Array, panels: Sequence[slice]) -> Iterator[tuple[slice, Array]]:
        """(panel, its rows of `features` on the device), one after the other. The memory of a panel
        is overwritten by the next panel but one."""
        ...


class Offload:
    """Blocks of one problem between host and device: see `infonce.kernels.solve.Backend`."""

    vectors = Vectors(np)
    online = False

    def __init__(self, problem: Problem, gradients: Gradients | None, device: Device) -> None:
        self.device = device
        self.real = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
        self.rows = self._panel_rows(problem)
        self.marks = np.zeros(len(problem.query))  # see NotFinite

    def _panel_rows(self, problem: Problem) -> int:
        """Rows of a panel: panels and their gradients take half of the workspace."""
        m, n, d = problem.shape
        item = max(problem.query.dtype.itemsize, problem.key.dtype.itemsize)
        # One panel stays, two stream, one is being stored; gradients: two accumulators, one block's
        row = d * (4 * item + 3 * self.real.itemsize)
        most, least = problem.workspace // 2 // row, least_block_side(m, n)
        if most < least:
            raise ValueError(workspace_too_small(problem.shape, 2 * row * least, problem.workspace))
        most = most // PANEL * PANEL or most
        return int(min(most, max(m, n, 1)))

    # -- Backend

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid(slices(m, self.rows), slices(n, self.rows), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        """Ranges make NT-Xent's gradient visit the whole square: in a triangle the gradients of all
        rows would have to stay on the device."""
        n = problem.shape[1]
        return slices(n, self.rows if problem.symmetric else n)

    def not_finite_marks(self, problem: Problem) -> Array:
        """Marks that the fold of the losses has collected from all blocks."""
        return self.marks

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
            fold.results()  # complete: the second fold must not add to them
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
        self.problem, self.host_epilogue = problem, epilogue
        put = self.device.put
        # Vectors of all blocks
        self.epilogue = _map_arrays(epilogue, put)
        self.positives = put(problem.positives)
        self.ids = [None if v is None else put(v) for v in (problem.query_ids, problem.key_ids)]
        self.marks = put(offload.marks)
        self.done = 0

    def results(self) -> None:
        """Copy the results of the epilogue to the host."""
        get = self.device.get
        if not isinstance(self.host_epilogue, SoftmaxGradient):
            _copy_arrays(self.host_epilogue, _map_arrays(self.epilogue, get))
            self.offload.marks[:] = get(self.marks)

    def by_rows(self, gradients: Gradients | None) -> None:
        """Queries and dQ stay, keys stream."""
        problem, device, d = self.problem, self.device, self.problem.shape[2]
        destination = None if gradients is None else gradients.query
        for a, rows in enumerate(self.grid.rows):
            q, dq = device.put(problem.query[rows]), None
            if destination is not None:
                dq = device.xp.zeros((len(q), d), self.offload.real)
            columns = [self.grid.columns[b] for b in self.grid.visits(a)]
            add = len(columns) > 1
            for block, k in device.stream(problem.key, columns):
                to = None
                if gradients is not None:
                    to = replace(gradients, query=dq, key=None, want_key=False, add_query=add)
                self.block(rows, block, q, k, to)
            if gradients is not None and destination is not None:
                self.store(destination, rows, dq, gradients.add_query)

    def by_columns(self, gradients: Gradients) -> None:
        """Keys and dK stay, queries stream. dQ only if all keys are one panel."""
        problem, device, d = self.problem, self.device, self.problem.shape[2]
        empty, real = device.xp.empty, self.offload.real
        for columns in self.grid.columns:
            k = device.put(problem.key[columns])
            dk, of_block = device.xp.zeros((len(k), d), real), empty((len(k), d), real)
            for rows, q in device.stream(problem.query, self.grid.rows):
                dq = None
                if gradients.query is not None and gradients.want_query:
                    dq = empty((len(q), d), real)
                to = replace(gradients, query=dq, key=of_block, add_query=False)
                self.block(rows, columns, q, k, to)
                dk += of_block
                if dq is not None:
                    self.store(gradients.query, rows, dq, gradients.add_query)
            self.store(gradients.key, columns, dk, False)

    def store(self, target: Array, rows: slice, gradient: Array, add: bool) -> None:
        """Copy the complete gradient of a panel to the host."""
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
        diagonal = rows == columns
        symmetric = problem.symmetric and diagonal
        epilogue = _block_epilogue(self.epilogue, rows, columns)
        block = replace(
            problem,
            query=q,
            key=q if symmetric else k,
            positives=self.vectors.local_positives(self.positives[rows], columns),
            query_ids=None if self.ids[0] is None else self.ids[0][rows],
            key_ids=None if self.ids[1] is None else self.ids[1][columns],
            symmetric=symmetric,
            key_shard=problem.key_shard or not diagonal,
            # Off the diagonal of a triangle, columns are other rows, with their own sums
            column_weight=problem.row_weight if problem.symmetric else problem.column_weight,
            workspace=max(1, problem.workspace // 2),
            progress=None,
        )
        to = gradients
        if gradients is not None and gradients.dots is not None:
            to = replace(gradients, dots=xp.zeros(len(q) if gradients.want_query else len(k)))
        inner = self.device.backend(block, to)
        grid = inner.grid(block, symmetric and self.grid.triangle)
        inner.fold(block, grid, epilogue, to)
        if gradients is not None and to is not None and to.dots is not None:
            gradients.dots[rows if gradients.want_query else columns] += self.device.get(to.dots)
        if isinstance(epilogue, (Statistics, Sigmoid)):
            marks = inner.not_finite_marks(block)
            self.marks[rows] += marks
            if self.grid.triangle and not diagonal:
                self.marks[columns] += marks.sum()
        self.done += 1
        if problem.progress is not None:
            problem.progress(epilogue.phase, self.done, len(self.grid))


# --- epilogues ------------------------------------------------------------------------------------


def _map_arrays(
    epilogue: Epilogue | Sums, function: Any, mapped: dict[int, Any] | None = None
) -> Any:
    """The epilogue with `function` applied to each array. One object in two fields stays one."""
    mapped = {} if mapped is None else mapped
    values = {}
    for f in fields(epilogue):
        value = getattr(epilogue, f.name)
        if value is not None and id(value) not in mapped:
            sums = isinstance(value, Sums)
            mapped[id(value)] = _map_arrays(value, function, mapped) if sums else function(value)
        values[f.name] = None if value is None else mapped[id(value)]
    make: Any = type(epilogue)
    return make(**values)


def _copy_arrays(target: Any, source: Any) -> None:
    """Copy the arrays of one epilogue into those of another."""
    for f in fields(target):
        to, of = getattr(target, f.name), getattr(source, f.name)
        if isinstance(to, Sums):
            _copy_arrays(to, of)
        elif to is not None:
            to[...] = of


def _block_epilogue(epilogue: Epilogue, rows: slice, columns: slice) -> Epilogue:
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
