"""Features and gradients in host memory, logits on a device: for batches larger than its memory.

A panel of one side stays on the device, in pieces. The panels of the other side are streamed: while
one meets the pieces, the next is copied. A block (Q_a, K_b) is a streamed panel and a piece.

| fold | stays | streams | products of 2MND operations |
|---|---|---|---|
| log-sum-exp | the smaller side | the other | 1 |
| dQ and dK, if the smaller side fits with its gradient | that side | the other | 3 |
| else dQ | queries, dQ | keys | 2 |
| and dK | keys, dK | queries | 2 |

So only complete sums leave the device, and the host needs no memory beyond features and gradients.
The device's own backend computes a block, and vectors of length M or N are on the device. Copies
run beside the products: pieces that stay arrive while the first panel meets them, and leave while
the last one does. What is small enough has nothing to hide copies behind: it goes to the device as
a whole.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import solve as blocks
from ..epilogues import Epilogue, Sigmoid, SoftmaxGradient, Statistics, Sums, retrieval_ranks_of
from ..grid import Grid, slices
from ..linear import Segments, SegmentSums, segment_sums
from ..problem import KEY_VECTORS, QUERY_VECTORS, Array, Gradients, NotFinite, Problem, as_sets
from ..solve import BlockQuestion, Solution, one_pass
from .device import HostCopies, OffloadDevice
from .epilogues import copy_arrays, map_arrays, on_device, segments_on
from .fold import StreamedCall, StreamedFold
from .layout import Layout, layout, left_beside_all


def solve(problem: Problem, gradients: Gradients | None, device: OffloadDevice) -> Solution:
    """`solve.solve` of a problem whose arrays are on the host."""
    cut, there = layout(problem, gradients), _vectors_on(device, problem)
    with device.copies() as copies:
        for to in (None, None) if gradients is None else (gradients.query, gradients.key):
            if to is not None:
                copies.touch(to)
        room, one_panel = left_beside_all(problem, gradients), max(problem.shape[:2]) <= cut.panel
        if room and (one_panel or problem.symmetric or one_pass(problem, gradients)):
            there = replace(there, workspace=room, workspace_given=True)
            solution = _solve_whole(there, gradients, device, copies)
        else:
            backend = Offload(problem, gradients, cut, device, copies)
            solution = blocks.solve(there, backend, gradients)
    if not problem.retrieval_ranks:  # no one asks for them
        solution = replace(solution, statistics=None, direction_losses=None)
    found: Solution = map_arrays(solution, device.get)
    return found


def fold_block(
    device: OffloadDevice, problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None = None, to_clear: Sums | None = None,
) -> None:  # fmt: skip
    """`solve.fold_block` of a block whose arrays are on the host."""
    problem = replace(problem, classes=None)  # blocks do not look at them
    if to_clear is not None:
        to_clear.clear()
    if callable(epilogue):
        with device.copies() as copies:
            cut = layout(problem, gradients)
            epilogue(OffloadOfHost(problem, gradients, cut, device, copies), problem)
        return
    there, device_gradients, dots = on_device(epilogue, device), gradients, None
    if gradients is not None and gradients.dots is not None:
        dots = device.put(gradients.dots)
        device_gradients = replace(gradients, dots=dots)
    with device.copies() as copies:
        backend = Offload(problem, gradients, layout(problem, gradients), device, copies)
        blocks.fold_block(
            backend,
            _vectors_on(device, problem),
            triangle,
            there,
            device_gradients,
            not_finite=None,
        )
    if not isinstance(epilogue, SoftmaxGradient):
        copy_arrays(epilogue, map_arrays(there, device.get))
    if gradients is not None and dots is not None:
        gradients.dots[...] = device.get(dots)
    if not_finite is not None:
        not_finite.rows += device.get(backend.row_nans(problem))


def _vectors_on(device: OffloadDevice, problem: Problem) -> Problem:
    """The problem with its vectors on the device."""
    names = "upstream", "positives", "weights", "row_shares", *QUERY_VECTORS, *KEY_VECTORS
    host_vectors = {name: getattr(problem, name) for name in names}
    made = {name: device.put(v) for name, v in host_vectors.items() if isinstance(v, np.ndarray)}
    if (classes := problem.classes) is not None:
        rows = device.put(classes.rows)  # those of the columns, too
        made["classes"] = replace(classes, rows=rows, columns=rows)
    return replace(problem, **made)


def _solve_whole(
    problem: Problem, gradients: Gradients | None, device: OffloadDevice, copies: HostCopies
) -> Solution:
    """All features go to the device, and all gradients come from there."""
    xp = device.xp

    def like(array: Array) -> Array:
        return xp.empty(array.shape, array.dtype.newbyteorder("="))

    query = like(problem.query)
    arriving = [copies.arrive(query, problem.query)]
    key = query
    if not problem.symmetric:
        key = like(problem.key)
        arriving.append(copies.arrive(key, problem.key))
    for ticket in arriving:
        ticket.wait()
    there, leaving = gradients, []
    if gradients is not None:
        host_gradients = gradients.query, gradients.key
        device_gradients = [None if z is None else like(z) for z in host_gradients]
        there = replace(gradients, query=device_gradients[0], key=device_gradients[1])
        leaving = [
            (to, z)
            for to, z in zip(host_gradients, device_gradients, strict=True)
            if to is not None
        ]
    solution = device.solve(replace(problem, query=query, key=key), there)
    for to, z in leaving:
        copies.leave(to, z, False)
    return solution


DOT_BYTES = 64  # on the device, of a feature of a row whose dot product is computed


class Offload:
    """Blocks of one problem between host and device: see `infonce.kernels.solve.Backend`."""

    def __init__(
        self, problem: Problem, gradients: Gradients | None, layout: Layout, device: OffloadDevice,
        copies: HostCopies,
    ) -> None:  # fmt: skip
        self.context = StreamedCall(problem, gradients, layout, device, copies)
        self.vectors, self.layout = device.vectors, layout

    # -- Backend

    def online(self, problem: Problem, gradients: Gradients) -> bool:
        return False  # log-sum-exps first, then the gradients

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid(slices(m, self.layout.panel), slices(n, self.layout.panel), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        """Ranges make NT-Xent's gradient visit the whole square: in a triangle the gradients of all
        rows would have to stay on the device."""
        n, square = problem.shape[1], problem.symmetric and not self.layout.whole
        return slices(n, self.layout.staying if square else n)

    def row_nans(self, problem: Problem) -> Array:
        """Marks that the fold of the losses has collected from all blocks."""
        marks = self.context.not_finite.rows + self.context.not_finite.any_key
        return marks + marks.sum() if problem.symmetric else marks

    def positive_dots(self, problem: Problem) -> Array:
        """[M] or [M, P]: the dot products of rows with their positives, some rows at a time."""
        device, (m, _, d) = self.context.device, problem.shape
        positives = as_sets(device.get(problem.positives))
        dots = device.xp.zeros(positives.shape)

        def on_device(features: Array) -> Array:
            host_dtype = np.float32 if features.dtype.itemsize <= 4 else np.float64
            z = device.put(features.astype(host_dtype)).astype(np.float64)
            if not problem.normalize:
                return z
            squares = (z * z).sum(axis=1)[:, None]
            return z / (squares + (squares == 0)) ** 0.5

        for rows in slices(m, max(1, problem.workspace // (DOT_BYTES * d))):
            query = on_device(problem.query[rows])
            for number, row_positives in enumerate(positives[rows].T):
                key = on_device(problem.key[np.maximum(row_positives, 0)])
                dots[rows, number] = (query * key).sum(axis=1)
        return dots.reshape(problem.positives.shape)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        query, key = self.context.linear_rows(problem)
        return segment_sums(self.vectors.xp, problem, query, key, segments, columns)

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            self.fold(problem, grid, replace(epilogue, row_rank=None, column_rank=None), None)
            self.fold(problem, grid, retrieval_ranks_of(epilogue, problem), None)
            return
        at_once = problem.symmetric or self.layout.whole
        if gradients and gradients.want_query and gradients.want_key and not at_once:
            self.fold(problem, grid, epilogue, replace(gradients, want_key=False))
            if isinstance(epilogue, Sigmoid):  # complete: the second fold must not add to it
                epilogue = map_arrays(epilogue, self.context.device.xp.array)
            self.fold(problem, grid, epilogue, replace(gradients, want_query=False, dots=None))
            return
        if gradients is not None and gradients.dots is not None:
            gradients.dots[:] = 0
        StreamedFold(self.context, problem, grid, epilogue, gradients).run()


class OffloadOfHost(Offload):
    """The same for questions of a caller whose vectors are on the host."""

    def positive_dots(self, problem: Problem) -> Array:
        return self.context.device.get(super().positive_dots(problem))

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        device = self.context.device
        there = segments_on(segments, device)
        sums = super().segment_sums(_vectors_on(device, problem), there, columns)
        found: tuple[SegmentSums, SegmentSums | None] = map_arrays(sums, device.get)
        return found
