"""How the features of a problem are cut for a device: a pure function of shapes and workspace."""

from __future__ import annotations

from dataclasses import dataclass

from ..grid import least_block_side, workspace_too_small
from ..problem import Gradients, Problem

# Rows of a panel, or a power of two times as many. Products with gradient panels then fill all
# multiprocessors of Hopper's largest cards: 66 tiles of 128 rows by two of 256 features
WAVE_ROWS = 8448
MOST_WAVES = 4  # in a panel: what is copied before and after all products should be little
FEWEST_PANELS = 3  # of a side that has at least as many waves, for the same reason
PIECE_PANELS = 2  # panels of the side that stays, in a block with a gradient
GRADIENT_PANEL_COLUMNS = 4224  # of a block's gradient panel: with fewer, products take longer
PANEL_ROW_MULTIPLE = 128  # a panel of more rows than this has a multiple of it


@dataclass(frozen=True)
class Layout:
    """How the workspace is divided. A panel of one side stays on the device with its gradient, and
    panels of the other side are streamed."""

    panel: int  # rows of a streamed panel
    staying: int  # rows that stay with an accumulator of their gradient: a multiple of panels
    features: int  # rows that stay in a fold without gradients
    block: int  # bytes for the fold of one block
    whole: bool  # the smaller side stays in all folds


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row on the device."""

    feature: int
    accumulator: int
    leaving: int  # a gradient as it goes to the host
    block: int  # what the fold of a block takes for each row

    @property
    def streamed(self) -> int:
        """Two panels arrive in turns and two gradients leave in turns. There is an accumulator of
        the panel's gradient, and the gradient of one block's keys."""
        return 2 * self.feature + 2 * self.leaving + (1 + PIECE_PANELS) * self.accumulator

    @property
    def staying(self) -> int:
        return self.feature + self.accumulator


def real_bytes(problem: Problem) -> int:
    """Bytes of an element of an accumulator."""
    return 8 if problem.compute == "fp64" else 4


def row_bytes(problem: Problem, gradients: Gradients | None) -> RowBytes:
    m, n, d = problem.shape
    item = max(problem.query.dtype.itemsize, problem.key.dtype.itemsize)
    real = real_bytes(problem)
    out = [] if gradients is None else [gradients.query, gradients.key]
    leaving = max((min(g.dtype.itemsize, real) for g in out if g is not None), default=0)
    if gradients is not None and gradients.add_query:
        leaving = real
    panel_item = max(item, 2 if problem.compute in ("bf16", "fp16") else real)
    return RowBytes(d * item, d * real, d * leaving, block_row_bytes(m, n, d, panel_item, real))


def block_row_bytes(m: int, n: int, d: int, item: int, real: int) -> int:
    """Bytes of the accumulators of a block's queries, and of a row of its gradient panel, whose
    elements have `item` bytes."""
    return PIECE_PANELS * d * real + min(GRADIENT_PANEL_COLUMNS, max(m, n)) * item


def least_workspace(rows: int, row: RowBytes) -> int:
    """Bytes for panels of so many rows, if neither side stays as a whole."""
    return -(-4 * rows * (row.streamed + row.block) // 3)


def layout(problem: Problem, gradients: Gradients | None) -> Layout:
    """The largest panels that fit. ValueError if they are too many (`room.few_blocks`).

    If the smaller side fits with its gradient, it stays. Otherwise a quarter of the workspace is
    for what stays.
    """
    (m, n, _), workspace = problem.shape, problem.workspace
    row = row_bytes(problem, gradients)
    smaller, larger = min(m, n), max(m, n)
    each = row.streamed + row.block
    longest = max(WAVE_ROWS, min(MOST_WAVES * WAVE_ROWS, -(-larger // FEWEST_PANELS)))

    def panel_in(room: int) -> int:
        most, rows = min(room // each, longest), WAVE_ROWS
        while 2 * rows <= most:
            rows *= 2
        return min(rows, most)

    rows, staying = panel_in(workspace - smaller * row.staying), smaller
    whole = rows >= min(WAVE_ROWS, larger)
    if not whole:
        rows, least_rows = panel_in(3 * workspace // 4), least_block_side(m, n)
        if rows < least_rows:
            least_bytes = least_workspace(least_rows, row)
            raise ValueError(workspace_too_small(problem.shape, least_bytes, workspace))
    panel = _even(larger, rows)
    if not whole:
        staying = min(smaller, (workspace - panel * each) // row.staying // panel * panel)
        whole = staying == smaller
    block = workspace - staying * row.staying - panel * row.streamed
    streamed = 2 * panel * (row.feature + row.leaving)
    features = (workspace - block - streamed) // row.feature
    if features < smaller:
        features = features // panel * panel
    return Layout(panel, staying, features, block, whole)


def left_beside_all(problem: Problem, gradients: Gradients | None) -> int:
    """The workspace that is left beside all features and gradients; 0 if that is less than half."""
    arrays = [problem.query] if problem.symmetric else [problem.query, problem.key]
    if gradients is not None:
        arrays += [g for g in (gradients.query, gradients.key) if g is not None]
    left = problem.workspace - sum(array.nbytes for array in arrays)
    return left if 2 * left >= problem.workspace else 0


def _even(n: int, most: int) -> int:
    """Rows of panels, at most `most`, that cut n rows evenly."""
    rows = -(-n // -(-n // max(1, most)))
    if rows <= PANEL_ROW_MULTIPLE:
        return rows
    rounded = -(-rows // PANEL_ROW_MULTIPLE) * PANEL_ROW_MULTIPLE
    return min(n, rounded if rounded <= most else most // PANEL_ROW_MULTIPLE * PANEL_ROW_MULTIPLE)
