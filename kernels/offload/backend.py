"""Features and gradients in host memory, logits on a device: for batches larger than its memory.

A pass divides queries and keys into chunks (layout.py). Chunks of one side stay on the device.
Chunks of the other side are streamed: while one chunk is used with all staying chunks, the next is
copied. A block has one streamed chunk and a piece, which is one staying chunk or several
(streamed_pass.py). copies.py copies chunks on a GPU.

| pass | stays | is streamed | products of 2MND operations |
|---|---|---|---|
| log-sum-exp | the smaller side | the other side | 1 |
| dQ and dK, if the smaller side fits with its gradient | that side | the other side | 3 |
| otherwise dQ | queries, dQ | keys | 2 |
| and dK | keys, dK | queries | 2 |

Only complete sums leave the device, so the host needs memory only for features and gradients. The
device's own backend computes a block, and vectors of length M or N are on the device. Copies run
during the products: pieces arrive while the first streamed chunk is used, and leave while the last
is used. A problem fits the device if features and gradients take at most half of the workspace.
Three kinds of problems that fit are copied to the device as a whole before the first pass, because
their products cannot hide copies:

- queries and keys are one chunk each;
- the queries are the keys;
- the loss is a softmax, and one pass may compute the losses and dQ (`allows_online_softmax`).

All other problems are streamed, even if they fit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import solve as blocks
from ..distill.solve import solver_by_passes
from ..epilogues import Epilogue, Sigmoid, SoftmaxGradient, Statistics, Sums
from ..grid import Grid, slices
from ..linear import Segments, SegmentSums, segment_sums
from ..norms import normalized_rows
from ..options import KEY_VECTORS, QUERY_VECTORS
from ..problem import NO_OWN, Array, Gradients, NotFinite, Problem, as_sets
from ..solve import BlockQuestion, Solution, allows_online_softmax
from .chunks import empty_like
from .device import HostCopies, OffloadDevice
from .epilogues import copy_arrays, copy_epilogue, copy_segments, map_arrays
from .layout import Layout, layout, room_for_blocks
from .own import StreamedOwnRows
from .streamed_pass import StreamedCall, StreamedPass


def solve(problem: Problem, gradients: Gradients | None, device: OffloadDevice) -> Solution:
    """Loss and gradients of a problem whose arrays are on the host, computed by `device`."""
    sizes = layout(problem, gradients)
    vectors_on_device = _copy_vectors(device, problem)  # features stay on the host
    with device.copies() as copies:
        # Touch the gradients before all else: the system provides their memory while products run.
        # Not that of a table, to which the host writes itself: `touch` may write old contents later
        to_touch = _destinations(gradients)[: 3 if problem.own_indices is None else 2]
        for to in to_touch:
            if to is not None:
                copies.touch(to)
        room = room_for_blocks(problem, gradients)
        one_chunk = max(problem.shape[:2]) <= sizes.chunk_rows
        # `room` is 0 if features and gradients take more than half of the workspace: then they are
        # streamed. The top of this file has the reason of the other conditions
        if room and (one_chunk or problem.symmetric or allows_online_softmax(problem, gradients)):
            to_copy = replace(vectors_on_device, workspace=room, workspace_given=True)
            solution = _solve_resident(to_copy, gradients, device, copies)
        else:
            backend = Offload(problem, gradients, sizes, device, copies)
            if problem.own is not None:
                vectors_on_device.own_rows = StreamedOwnRows(problem, backend.context)
            solve_by_passes = solver_by_passes(problem)
            solution = solve_by_passes(vectors_on_device, backend, gradients)
    if not problem.retrieval_ranks:  # then no caller needs the statistics
        solution = replace(solution, statistics=None, direction_losses=None)
    on_host: Solution = map_arrays(solution, device.get)
    return on_host


def run_block_pass(
    device: OffloadDevice, problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None = None, to_clear: Sums | None = None,
    ahead: Gradients | None = None,
) -> None:  # fmt: skip
    """`solve.run_block_pass` of a block whose arrays are on the host: a block of a rank.

    `ahead` are the gradients of a later pass of the same block: this pass has chunks of the same
    sizes, so that both leave out the same pairs. None: this pass has larger chunks if they fit.
    """
    problem = replace(problem, classes=None, **NO_OWN)  # blocks do not need them
    if to_clear is not None:
        to_clear.clear()
    if callable(epilogue):
        with device.copies() as copies:
            sizes = layout(problem, gradients)
            epilogue(OffloadOfHost(problem, gradients, sizes, device, copies), problem)
        return
    device_epilogue, device_gradients, dots = copy_epilogue(epilogue, device), gradients, None
    if gradients is not None and gradients.dots is not None:
        dots = device.put(gradients.dots)
        device_gradients = replace(gradients, dots=dots)
    with device.copies() as copies:
        sizes = layout(problem, gradients or ahead)
        backend = Offload(problem, gradients, sizes, device, copies)
        blocks.run_block_pass(
            backend,
            _copy_vectors(device, problem),
            triangle,
            device_epilogue,
            device_gradients,
            not_finite=None,
        )
    if not isinstance(epilogue, SoftmaxGradient):  # the arrays of a SoftmaxGradient do not change
        copy_arrays(epilogue, map_arrays(device_epilogue, device.get))
    if gradients is not None and dots is not None:
        gradients.dots[...] = device.get(dots)
    if not_finite is not None:
        not_finite.rows += device.get(backend.row_nans(problem))


def _copy_vectors(device: OffloadDevice, problem: Problem) -> Problem:
    """The problem with its vectors, but not its features, on the device."""
    others = (
        "upstream", "positives", "label_weights", "weights", "row_shares", "own_indices",
        "own_mask", "own_bias",
    )  # fmt: skip
    host_vectors = {
        name: getattr(problem, name) for name in (*others, *QUERY_VECTORS, *KEY_VECTORS)
    }
    device_vectors = {
        name: device.put(vector)
        for name, vector in host_vectors.items()
        if isinstance(vector, np.ndarray)
    }
    if (classes := problem.classes) is not None:
        rows = device.put(classes.rows)
        columns = rows if classes.columns is classes.rows else device.put(classes.columns)
        device_vectors["classes"] = replace(classes, rows=rows, columns=columns)
    return replace(problem, **device_vectors)


def _solve_resident(
    problem: Problem, gradients: Gradients | None, device: OffloadDevice, copies: HostCopies
) -> Solution:
    """Copy all features to the device, solve the problem there, and copy all gradients back."""
    xp, arriving = device.xp, []

    def empty(array: Array) -> Array:
        return empty_like(xp, array, len(array))

    def copied(array: Array) -> Array:
        target = empty(array)
        arriving.append(copies.arrive(target, array))
        return target

    names = "query", "key", *problem.auxiliary_names, "own"
    arrays = map_arrays(tuple(getattr(problem, name) for name in names), copied)
    for ticket in arriving:
        ticket.wait()
    to = _destinations(gradients)
    device_gradients, results = gradients, map_arrays(to, empty)
    if gradients is not None:
        query, key, own = results
        device_gradients = replace(gradients, query=query, key=key, own=own)
    resident_problem = replace(problem, **dict(zip(names, arrays, strict=True)))
    solution = device.solve(resident_problem, device_gradients)
    for destination, gradient in zip(to, results, strict=True):
        if destination is not None:
            copies.leave(destination, gradient, False)
    return solution


def _destinations(gradients: Gradients | None) -> tuple[Array | None, ...]:
    """The arrays of all gradients; None for one that is not wanted."""
    return () if gradients is None else (gradients.query, gradients.key, gradients.own)


DOT_BYTES = 64  # bytes on the device, for each feature of a row in `Offload.positive_dots`


class Offload:
    """Blocks of one problem between host and device: see `infonce.kernels.solve.Backend`."""

    def __init__(
        self, problem: Problem, gradients: Gradients | None, layout: Layout, device: OffloadDevice,
        copies: HostCopies,
    ) -> None:  # fmt: skip
        self.context = StreamedCall(problem, gradients, layout, device, copies)
        self.vectors, self.layout = device.vectors, layout

    # -- Backend

    def has_online_softmax(self, problem: Problem, gradients: Gradients) -> bool:
        return False  # log-sum-exps first, then the gradients

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        """The grid of blocks, whose rows and columns are chunks.

        With a guide, all passes visit the same blocks, so that they leave out the same pairs. These
        blocks are the whole square, because the gradient pass may have no room for a triangle
        (`key_ranges`).
        """
        m, n, _ = problem.shape
        triangle = triangle and not problem.guided
        return Grid(slices(m, self.layout.chunk_rows), slices(n, self.layout.chunk_rows), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        """Several ranges if queries are the keys and only some stay on the device; else one range.

        If there are several, `solve.run_gradient_pass` visits the whole square of blocks. In a
        triangle, the gradients of all rows would have to stay on the device.
        """
        n, square = problem.shape[1], problem.symmetric and not self.layout.smaller_side_stays
        return slices(n, self.layout.staying_rows if square else n)

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN flags of rows, which the first pass has collected from all blocks."""
        nan_flags = self.context.not_finite.rows + self.context.not_finite.any_key
        return nan_flags + nan_flags.sum() if problem.symmetric else nan_flags

    def positive_dots(self, problem: Problem) -> Array:
        """[M] or [M, P]: the dot products of rows with their positives; as many rows at a time as
        the workspace holds in float64."""
        device, (m, _, d) = self.context.device, problem.shape
        positives = as_sets(device.get(problem.positives))
        dots = device.xp.zeros(positives.shape)

        def on_device(features: Array) -> Array:
            host_dtype = np.float32 if features.dtype.itemsize <= 4 else np.float64
            z = device.put(features.astype(host_dtype))
            return normalized_rows(device.xp, z, problem.normalize, np.dtype(np.float64))[0]

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

    def run_pass(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics) and epilogue.row_rank is not None:
            # first the log-sum-exps: retrieval ranks need the logits of positives
            self.run_pass(problem, grid, replace(epilogue, row_rank=None, column_rank=None), None)
            self.run_pass(problem, grid, epilogue.retrieval_ranks, None)
            return
        if isinstance(epilogue, Statistics) and not grid.triangle and problem.symmetric:
            epilogue = replace(epilogue, columns=None)  # in the whole square, rows meet all keys
        # If both sides are too large to stay, dQ and dK need a pass each: after one span of the
        # staying side, the gradient of a streamed chunk would not be complete
        both_in_one_pass = problem.symmetric or self.layout.smaller_side_stays
        if gradients and gradients.want_query and gradients.want_key and not both_in_one_pass:
            self.run_pass(problem, grid, epilogue, replace(gradients, want_key=False))
            if isinstance(epilogue, Sigmoid):  # losses are complete: the next pass adds to a copy
                epilogue = map_arrays(epilogue, self.context.device.xp.array)
            self.run_pass(problem, grid, epilogue, replace(gradients, want_query=False, dots=None))
            return
        if gradients is not None and gradients.dots is not None:
            gradients.dots[:] = 0
        StreamedPass(self.context, problem, grid, epilogue, gradients).run()


class OffloadOfHost(Offload):
    """An `Offload` that answers questions about a block for a caller with vectors on the host."""

    def positive_dots(self, problem: Problem) -> Array:
        return self.context.device.get(super().positive_dots(problem))

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        device = self.context.device
        sums = super().segment_sums(
            _copy_vectors(device, problem), copy_segments(segments, device), columns
        )
        on_host: tuple[SegmentSums, SegmentSums | None] = map_arrays(sums, device.get)
        return on_host
