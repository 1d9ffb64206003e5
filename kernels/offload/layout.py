"""How the features of a problem are cut for a device: a pure function of shapes and workspace."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Gradients, Problem, least_block_side, workspace_too_small

# Of a panel. With fewer rows a block is done before the host has queued the next, or the panel has
# arrived; with more, less of the work is left to hide the first panel's copy and the last one's
PANEL_ROWS, PANEL_BYTES = 16384, 2**24
ENOUGH_ROWS = 8192  # of a panel, to compute logits once for both gradients
COLUMNS = 4096  # of a block's gradient panel: with fewer, products take longer
ROUND = 128  # a panel of more rows than this has a multiple of it


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
        the panel's gradient, and the gradient of one block."""
        return 2 * self.feature + 2 * self.leaving + 2 * self.accumulator

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
    return RowBytes(d * item, d * real, d * leaving, block_row(m, n, d, item, real))


def block_row(m: int, n: int, d: int, item: int, real: int) -> int:
    """Bytes of operands, of an accumulator, and of a row of the gradient panel."""
    return d * (2 * item + real) + min(COLUMNS, max(m, n)) * item


def layout(problem: Problem, gradients: Gradients | None) -> Layout:
    """The largest panels that fit. ValueError if they are too many (`problem.few_blocks`).

    If the smaller side fits with its gradient, it stays. Otherwise half of the workspace is for
    what stays.
    """
    (m, n, _), workspace = problem.shape, problem.workspace
    row = row_bytes(problem, gradients)
    staying, longest = min(m, n), max(m, n, 1)
    streamed = row.streamed + row.block
    rows = (workspace - staying * row.staying) // streamed
    whole = rows >= min(ENOUGH_ROWS, longest)
    if not whole:
        rows, least = workspace // 2 // streamed, least_block_side(m, n)
        if rows < least:
            raise ValueError(workspace_too_small(problem.shape, 2 * streamed * least, workspace))
    rows = min(rows, max(PANEL_ROWS, PANEL_BYTES // row.feature))
    panel = _even(longest, rows)
    if not whole:
        staying = min(staying, workspace // 2 // row.staying // panel * panel)
        whole = staying == min(m, n)
    block = workspace - staying * row.staying - panel * row.streamed
    features = (workspace - block) // row.feature - 2 * panel
    if features < min(m, n):
        features = features // panel * panel
    return Layout(panel, staying, features, block, whole)


def fits(problem: Problem, gradients: Gradients | None) -> int:
    """The workspace that is left beside all features and gradients; 0 if that is less than half."""
    row, (m, n, _) = row_bytes(problem, gradients), problem.shape
    rows = m if problem.symmetric else m + n
    left = problem.workspace - rows * (row.feature + row.leaving)
    return left if 2 * left >= problem.workspace else 0


def _even(n: int, most: int) -> int:
    """Rows of panels, at most `most`, that cut n rows evenly."""
    rows = -(-n // -(-n // most))
    if rows <= ROUND:
        return rows
    rounded = -(-rows // ROUND) * ROUND
    return min(n, rounded if rounded <= most else most // ROUND * ROUND)
