"""A pass with features in host memory.

The pass divides queries and keys into chunks. A span of one side stays on the device with its
gradient: consecutive chunks, as many as fit. The chunks of the other side are streamed: copied to
the device, used with the span, and replaced. Then the next span stays. backend.py has the passes of
a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..epilogues import Epilogue, Sigmoid, SoftmaxGradient, Statistics
from ..grid import Grid, slices
from ..linear import LinearGradient
from ..options import KEY_VECTORS, QUERY_VECTORS
from ..problem import Array, Gradients, NotFinite, Problem, fast_replace
from .chunks import (
    Arrivals,
    Departures,
    SideRows,
    StreamedSide,
    are_disjoint,
    arrive,
    empty_like,
    longest_chunk_rows,
)
from .device import HostCopies, OffloadDevice, Ticket
from .epilogues import block_epilogue
from .layout import PIECE_CHUNKS, Layout, real_bytes, row_bytes
from .linear import StreamedRows

# (a streamed chunk, the pieces of the span that this chunk meets, in this order). A piece is one
# chunk of the span, or several consecutive chunks. If the streamed chunk is None, the span meets
# itself
Step = tuple[slice | None, Sequence[slice]]


class StreamedCall:
    """Memory and settings that all passes of one call share."""

    def __init__(
        self, problem: Problem, gradients: Gradients | None, layout: Layout, device: OffloadDevice,
        copies: HostCopies,
    ) -> None:  # fmt: skip
        self.device, self.copies, self.layout = device, copies, layout
        self.real = np.dtype(f"f{real_bytes(problem)}")  # dtype of accumulators
        # key i is the positive of query i, so blocks off the diagonal have no positives
        self.on_diagonal = problem.positives is None and not problem.symmetric
        m = len(problem.query)
        nan_flags = device.xp.zeros(m + 1)
        self.not_finite = NotFinite(nan_flags[:m], nan_flags[m:])
        # the arrays of the smaller side on the device, if it stays in all passes
        self.staying_arrays: list[Array] = []
        size = layout.chunk_rows * row_bytes(problem, gradients).leaving
        self.departures = Departures(device.xp, copies, size)

    def linear_rows(self, problem: Problem) -> tuple[StreamedRows, StreamedRows]:
        """Queries and keys, for linear terms."""
        query, key = (
            StreamedRows(self.device, self.copies, features, problem, self.layout.chunk_rows)
            for features in (problem.query, problem.key)
        )
        return query, key


class StreamedPass:
    """One visit of every block of a grid."""

    def __init__(
        self, context: StreamedCall, problem: Problem, grid: Grid, epilogue: Epilogue,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        self.context, self.device = context, context.device
        self.problem, self.grid, self.epilogue, self.gradients = problem, grid, epilogue, gradients
        rows, self.columns = self.make_sides()
        self.keys_stay, staying_rows = self.choose_staying_side()
        sides = rows, self.columns
        self.stay, self.stream = reversed(sides) if self.keys_stay else sides
        self.spans = [(span, self.steps(span)) for span in self.divide_into_spans(staying_rows)]
        self.done = 0  # blocks; for `progress`
        self.total = sum(len(pieces) for _, steps in self.spans for _, pieces in steps)

    def make_sides(self) -> tuple[StreamedSide, StreamedSide]:
        """The arrays of queries and of keys in host memory, and what becomes of their gradients."""
        problem, gradients = self.problem, self.gradients
        queries, keys = [problem.query], [problem.key]
        if problem.auxiliary_key is not None:
            queries.append(problem.auxiliary_query)
            keys.append(problem.auxiliary_key)
        rows, columns = StreamedSide(queries, self.grid.rows), StreamedSide(keys, self.grid.columns)
        if gradients is not None:
            if gradients.want_query:
                rows.to, rows.add = gradients.query, gradients.add_query
            if gradients.want_key and not problem.symmetric:  # dQ has all of a triangle's gradient
                columns.to = gradients.key
            (rows if gradients.want_query else columns).dots = gradients.dots
        if isinstance(self.epilogue, SoftmaxGradient):
            xp, (query, key) = self.device.vectors.xp, self.context.linear_rows(problem)
            for side, is_key_side in ((rows, False), (columns, True)):
                if side.to is not None:
                    side.linear = [
                        LinearGradient(xp, query, key, term, is_key_side, problem.symmetric)
                        for term in self.epilogue.linear
                    ]
        return rows, columns

    def choose_staying_side(self) -> tuple[bool, int]:
        """(whether keys stay on the device, otherwise queries; how many rows stay at once).

        The smaller side stays. Exception: in a pass with gradients, the smaller side may not fit
        (`Layout.smaller_side_stays`). Such a pass computes one gradient, and the side of this
        gradient stays, so that it is complete before it leaves. Queries stay if they are the keys.
        """
        (m, n, _), layout, gradients = self.problem.shape, self.context.layout, self.gradients
        keys_stay, staying_rows = n <= m, layout.staying_rows_without_gradients
        if gradients is not None:
            staying_rows = layout.staying_rows
            if not layout.smaller_side_stays:
                keys_stay = gradients.want_key
        return keys_stay and not self.problem.symmetric, staying_rows

    def divide_into_spans(self, staying_rows: int) -> list[list[slice]]:
        """The spans that stay one after another, each while the other side is streamed."""
        chunks = self.stay.chunks
        all_rows = chunks[-1].stop - chunks[0].start
        chunk_rows = self.context.layout.chunk_rows
        length = len(chunks) if all_rows <= staying_rows else staying_rows // chunk_rows
        return [list(chunks[i : i + length]) for i in range(0, len(chunks), length)]

    def steps(self, span: list[slice]) -> list[Step]:
        """The steps of a span. If queries are the keys, the span meets itself first.

        - A pass without gradients: the first streamed chunk meets single chunks of the span, so
          that work begins when the first chunk of the span has arrived. Later streamed chunks meet
          the whole span.
        - A pass with gradients: the last streamed chunk meets single chunks of the span, so that
          gradients of these chunks leave one by one. Earlier streamed chunks meet pieces of
          PIECE_CHUNKS chunks.
        - With a guide, all pieces are single chunks. All passes then have the same blocks, whose
          products have the same bits. So all passes leave out the same pairs.
        """
        span_rows, chunks = slice(span[0].start, span[-1].stop), self.stream.chunks
        if self.problem.symmetric:  # a triangle leaves out the chunks before the span
            before = [] if self.grid.triangle else [p for p in chunks if p.stop <= span_rows.start]
            chunks = before + [p for p in chunks if p.start >= span_rows.stop]
        steps: list[Step] = [(None, [span_rows])] if self.problem.symmetric else []
        for i, chunk in enumerate(chunks):
            is_first, is_last = not steps, i + 1 == len(chunks)
            if self.problem.guided or (is_first if self.gradients is None else is_last):
                steps.append((chunk, span))
            elif self.gradients is not None:
                steps.append((chunk, self.pieces(span, chunk)))
            else:
                steps.append((chunk, [span_rows]))
        return steps

    def pieces(self, span: list[slice], chunk: slice) -> list[slice]:
        """The pieces of a span. On the diagonal, a piece is one chunk, so blocks share plans."""
        pieces: list[slice] = []
        for i in range(0, len(span), PIECE_CHUNKS):
            chunks = span[i : i + PIECE_CHUNKS]
            piece = slice(chunks[0].start, chunks[-1].stop)
            pieces.extend([piece] if are_disjoint(piece, chunk) else chunks)
        return pieces

    def run(self) -> None:
        """Visit every block."""
        for span, steps in self.spans:
            self.visit(span, steps)

    def visit(self, span: list[slice], steps: Sequence[Step]) -> None:
        """Visit the blocks of a span with the streamed chunks of all steps."""
        chunks = [chunk for chunk, _ in steps if chunk is not None]
        all_pieces = [piece for _, pieces in steps for piece in pieces]
        arrivals = Arrivals(self.device.xp, self.context.copies, self.stream.arrays, chunks)
        staying_span, arriving = self.hold(span)
        stream_accumulator = self.accumulator(self.stream, longest_chunk_rows(chunks))
        block_accumulator = self.accumulator(
            self.columns, longest_chunk_rows(all_pieces if self.keys_stay else chunks)
        )
        for i, (chunk, pieces) in enumerate(steps):
            streamed_part = None
            if chunk is not None:
                streamed_part = SideRows(chunk, arrivals.take(), stream_accumulator).part(chunk)
            for j, piece in enumerate(pieces):
                while arriving and arriving[0][0] < piece.stop:
                    arriving.popleft()[1].wait()
                staying_part = staying_span.part(piece)
                if self.keys_stay:
                    assert streamed_part is not None
                    self.block(streamed_part, staying_part, j == 0, i == 0, block_accumulator)
                else:
                    self.block(staying_part, streamed_part, i == 0, j == 0, block_accumulator)
                if i + 1 == len(steps):
                    for part in slices(piece.stop, self.context.layout.chunk_rows, piece.start):
                        self.leave(self.stay, staying_span.part(part))
            if streamed_part is not None:
                self.leave(self.stream, streamed_part)

    def leave(self, side: StreamedSide, part: SideRows) -> None:
        """Add linear terms to the gradient of a part, and copy it to the host."""
        if part.gradient is not None:
            dots = None if side.dots is None else side.dots[part.rows]
            for term in side.linear:
                features = self.device.rows(part.features, self.problem)
                features.subtract(term.part(part.rows), part.gradient, dots)
        self.context.departures.leave(side, part)

    def hold(self, span: list[slice]) -> tuple[SideRows, deque[tuple[int, Ticket]]]:
        """Begin to copy a span to the device; return the span and its copies: (first row, copy).

        If a side stays in all passes, it is copied once in a call.
        """
        context, arrays = self.context, self.stay.arrays
        start, stop = span[0].start, span[-1].stop
        on_device, arriving = context.staying_arrays, deque[tuple[int, Ticket]]()
        if not on_device:
            on_device = [empty_like(self.device.xp, z, stop - start) for z in arrays]
            for chunk in span:
                targets = [z[chunk.start - start : chunk.stop - start] for z in on_device]
                tickets = arrive(context.copies, targets, arrays, chunk)
                arriving.extend((chunk.start, ticket) for ticket in tickets)
            if context.layout.smaller_side_stays:
                context.staying_arrays = on_device
        accumulator = self.accumulator(self.stay, stop - start)
        return SideRows(slice(start, stop), on_device, accumulator), arriving

    def accumulator(self, side: StreamedSide, rows: int) -> Array | None:
        """Memory for the gradient of `rows` rows of a side; None if no gradient is wanted."""
        if side.to is None:
            return None
        return self.device.xp.empty((rows, self.problem.shape[2]), self.context.real)

    def block(
        self, queries: SideRows, keys: SideRows | None, is_first_of_queries: bool,
        is_first_of_keys: bool, block_accumulator: Array | None,
    ) -> None:  # fmt: skip
        """Compute one block. If `keys` is None, the queries are the keys.

        The first block of some queries, or of some keys, overwrites their gradient. Later blocks
        add to dQ. Their dK goes to `block_accumulator`, and is added to dK after the block.
        """
        problem, gradients, xp = self.problem, self.gradients, self.device.xp
        symmetric = keys is None
        keys = keys or replace(queries, gradient=None)
        rows, columns = queries.rows, keys.rows
        diagonal, lacks_positives = rows == columns, problem.lacks_positives
        if self.context.on_diagonal:
            lacks_positives = lacks_positives or are_disjoint(rows, columns)

        query_name, key_name = problem.auxiliary_names
        block = fast_replace(
            problem,
            **dict(zip(("query", query_name), queries.arrays, strict=False)),
            **dict(zip(("key", key_name), keys.arrays, strict=False)),
            positives=self.device.vectors.positives_in_block(problem.positives[rows], columns),
            **parts(problem, QUERY_VECTORS, rows),
            **parts(problem, KEY_VECTORS, columns),
            symmetric=symmetric,
            key_shard=problem.key_shard or not diagonal,
            lacks_positives=lacks_positives,
            column_direction_weight=problem.block_column_weight,
            workspace=self.context.layout.block_bytes,
            # `leave` adds linear terms, `between_passes` has the rest
            label_smoothing=0.0,
            label_weights=None,
            own=None,
            own_mask=None,
            own_rows=None,
            progress=None,
        )
        to, dk = None, keys.gradient
        if gradients is not None:
            key_gradient = (
                dk
                if is_first_of_keys or block_accumulator is None
                else block_accumulator[: len(keys.features)]
            )
            dots = None
            if gradients.dots is not None:
                total_dots = gradients.dots[rows if gradients.want_query else columns]
                dots = xp.zeros(len(total_dots))
            to = replace(
                gradients, query=queries.gradient, key=key_gradient, want_key=dk is not None,
                add_query=queries.gradient is not None and not is_first_of_queries, dots=dots,
                own=None,
            )  # fmt: skip
        not_finite = None
        if isinstance(self.epilogue, (Statistics, Sigmoid)):
            nan_flags = self.context.not_finite
            not_finite = NotFinite(nan_flags.rows[rows], nan_flags.any_key, not is_first_of_queries)
        epilogue = block_epilogue(self.epilogue, rows, columns)
        triangle = symmetric and self.grid.triangle
        self.device.run_block_pass(block, triangle, epilogue, to, not_finite)
        if to is not None:
            if dk is not None and key_gradient is not dk:
                dk += key_gradient
            if to.dots is not None:
                total_dots += to.dots
        self.done += 1
        if problem.progress is not None:
            problem.progress(self.epilogue.phase, self.done, self.total)


def parts(problem: Problem, names: Sequence[str], rows: slice) -> dict[str, Array]:
    """The elements `rows` of the vectors `names` of a problem; None for a vector it lacks."""
    vectors = {name: getattr(problem, name) for name in names}
    return {name: None if vector is None else vector[rows] for name, vector in vectors.items()}
