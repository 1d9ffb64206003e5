"""The sizes of chunks: rows of features that stay on the device, or are copied to it at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ..grid import least_block_side, make_workspace_error
from ..problem import Gradients, Problem

# Chunks have this number of rows, times a power of two, if the workspace has room. The products of
# such a chunk fill the 132 multiprocessors of an H100 or H200: for D = 512, 66 tiles of 128 rows by
# two tiles of 256 features
WAVE_ROWS = 8448
# The first copy comes before all products, and the last copy after them, so chunks are limited:
MOST_WAVES = 4  # times WAVE_ROWS: the largest number of rows of one chunk
FEWEST_CHUNKS = 3  # of a side with at least FEWEST_CHUNKS * WAVE_ROWS rows
PIECE_CHUNKS = 2  # chunks of the staying side in one block, in a pass with gradients
GRADIENT_BLOCK_COLUMNS = 4224  # columns of a gradient block; products of fewer columns are slower
CHUNK_ROW_MULTIPLE = 128  # a chunk of more rows has a multiple of it, unless it is a whole side


@dataclass(frozen=True)
class Layout:
    """The division of the workspace.

    Rows of one side (queries or keys) stay on the device with their gradient, while chunks of the
    other side are streamed: copied to the device, used, and replaced.
    """

    chunk_rows: int  # rows of a streamed chunk
    staying_rows: int  # rows that stay, in a pass with gradients: a multiple of `chunk_rows`
    staying_rows_without_gradients: int  # rows that stay, in a pass without gradients
    block_bytes: int  # bytes for the pass of one block
    smaller_side_stays: bool  # whether all rows of the smaller side stay, in all passes


@dataclass(frozen=True)
class RowBytes:
    """Bytes on the device for one row."""

    feature: int  # the features of the row
    accumulator: int  # the gradient of the row while it accumulates
    leaving: int  # a gradient in the dtype in which it is copied to the host
    block: int  # in the workspace of a block's pass: see `block_row_bytes`

    @property
    def streamed_bytes(self) -> int:
        """Bytes for a row of a streamed chunk.

        There are two buffers for arriving features, two for leaving gradients, an accumulator of
        the chunk's gradient, and a gradient of one block's keys.
        """
        return 2 * self.feature + 2 * self.leaving + (1 + PIECE_CHUNKS) * self.accumulator

    @property
    def staying_bytes(self) -> int:
        """Bytes for a row that stays."""
        return self.feature + self.accumulator


def real_bytes(problem: Problem) -> int:
    """Bytes of an element of an accumulator."""
    return 8 if problem.compute_precision == "fp64" else 4


def row_bytes(problem: Problem, gradients: Gradients | None) -> RowBytes:
    """The bytes of a row of a problem."""
    m, n, d = problem.shape
    item = max(problem.query.dtype.itemsize, problem.key.dtype.itemsize)
    real, auxiliary = real_bytes(problem), problem.auxiliary_width
    feature = d * item
    if auxiliary:
        items = problem.auxiliary_query.dtype.itemsize, problem.auxiliary_key.dtype.itemsize
        feature += auxiliary * max(items)
    out = [] if gradients is None else [gradients.query, gradients.key]
    leaving = max((min(g.dtype.itemsize, real) for g in out if g is not None), default=0)
    if gradients is not None and gradients.add_query:
        leaving = real
    block_item = max(item, 2 if problem.compute_precision in ("bf16", "fp16") else real)
    block = block_row_bytes(m, n, d + auxiliary, block_item, real)
    return RowBytes(feature, d * real, d * leaving, block)


def block_row_bytes(m: int, n: int, width: int, item: int, real: int) -> int:
    """Bytes that the pass of one block takes for each row of a chunk.

    They are PIECE_CHUNKS accumulators of `real` bytes a feature, and a row of the gradient block,
    whose elements have `item` bytes.
    """
    return PIECE_CHUNKS * width * real + min(GRADIENT_BLOCK_COLUMNS, max(m, n)) * item


def least_workspace(rows: int, row: RowBytes) -> int:
    """Bytes of the smallest workspace for chunks of `rows` rows, if no side stays as a whole.

    Three quarters of the workspace are for the chunk and its block, as in `layout`. Blocks of few
    and short rows may need more, because a device pads rows: then the schedule of a block raises
    the error (`divide_workspace` of gpu/schedule).
    """
    return -(-4 * rows * (row.streamed_bytes + row.block) // 3)


def layout(problem: Problem, gradients: Gradients | None) -> Layout:
    """The division of the workspace that has the largest chunks, within two limits of their rows.

    A chunk has at most MOST_WAVES * WAVE_ROWS rows. A side of FEWEST_CHUNKS * WAVE_ROWS rows or
    more has at least FEWEST_CHUNKS chunks. Reason: the first copy precedes all products, and the
    last copy follows them, so no product hides these two copies.
    If the smaller side fits with its gradient, beside a chunk of WAVE_ROWS rows of the other side,
    it stays in all passes. Otherwise a quarter of the workspace is for rows that stay: of the side
    whose gradient a pass computes, so that the gradient is complete before it leaves the device.
    (If a quarter has room for the whole smaller side, that side stays, too.) ValueError if there
    would be too many chunks (`grid.has_few_blocks`).
    """
    (m, n, _), workspace = problem.shape, problem.workspace
    row = row_bytes(problem, gradients)
    smaller, larger = min(m, n), max(m, n)
    bytes_per_row = row.streamed_bytes + row.block
    row_limit = max(WAVE_ROWS, min(MOST_WAVES * WAVE_ROWS, -(-larger // FEWEST_CHUNKS)))

    def chunk_rows_in(room: int) -> int:
        """The rows of the largest chunk that fits `room` bytes with its block."""
        limit, rows = min(room // bytes_per_row, row_limit), WAVE_ROWS
        while 2 * rows <= limit:
            rows *= 2
        return min(rows, limit)

    # the smaller side stays if chunks of the other side then have WAVE_ROWS rows
    rows, staying_rows = chunk_rows_in(workspace - smaller * row.staying_bytes), smaller
    smaller_side_stays = rows >= min(WAVE_ROWS, larger)
    least_rows = least_block_side(m, n)
    if not smaller_side_stays:
        rows = chunk_rows_in(3 * workspace // 4)
        if rows < least_rows:
            least_bytes = least_workspace(least_rows, row)
            raise make_workspace_error(problem.shape, least_bytes, workspace)
    chunk_rows = max(least_rows, _equal_chunk_rows(larger, rows))
    if not smaller_side_stays:
        room = workspace - chunk_rows * bytes_per_row
        staying_rows = min(smaller, room // row.staying_bytes // chunk_rows * chunk_rows)
        # beside chunks of fewer than WAVE_ROWS rows, all of the smaller side may fit
        smaller_side_stays = staying_rows == smaller
    # The rest of the workspace is for blocks. In a pass without gradients, more rows can stay,
    # because rows have no accumulators. Chunks then have two buffers for arriving features; the two
    # for leaving gradients stay allocated in all passes of a call (`StreamedCall.departures`)
    block_bytes = workspace - staying_rows * row.staying_bytes - chunk_rows * row.streamed_bytes
    copy_buffer_bytes = 2 * chunk_rows * (row.feature + row.leaving)
    rows_without_gradients = (workspace - block_bytes - copy_buffer_bytes) // row.feature
    if problem.guided:  # all passes have the same blocks: see `StreamedPass.steps`
        rows_without_gradients = staying_rows
    elif rows_without_gradients < smaller:
        rows_without_gradients = rows_without_gradients // chunk_rows * chunk_rows
    return Layout(chunk_rows, staying_rows, rows_without_gradients, block_bytes, smaller_side_stays)


def room_for_blocks(problem: Problem, gradients: Gradients | None) -> int:
    """Bytes of the workspace for blocks, if all features and gradients are on the device.

    0 if this is less than half of the workspace: then `backend.solve` streams chunks.
    """
    arrays = [problem.query] if problem.symmetric else [problem.query, problem.key]
    if problem.auxiliary_key is not None:
        arrays += [problem.auxiliary_query, problem.auxiliary_key][: len(arrays)]
    arrays.append(problem.own)
    if gradients is not None:
        arrays += [gradients.query, gradients.key, gradients.own]
    left = problem.workspace - sum(array.nbytes for array in arrays if array is not None)
    return left if 2 * left >= problem.workspace else 0


def _equal_chunk_rows(n: int, limit: int) -> int:
    """Rows of a chunk, at most `limit`, such that n rows are divided into chunks of equal size."""
    rows = -(-n // -(-n // max(1, limit)))
    if rows <= CHUNK_ROW_MULTIPLE:
        return rows
    rounded = -(-rows // CHUNK_ROW_MULTIPLE) * CHUNK_ROW_MULTIPLE
    if rounded > limit:
        rounded = limit // CHUNK_ROW_MULTIPLE * CHUNK_ROW_MULTIPLE
    return min(n, rounded)
