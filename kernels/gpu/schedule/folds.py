"""Folds: visits of all blocks of the logit matrix, with their kernels and their memory by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from ...problem import Grid, slices
from .. import config
from ..config import Blocking, Needs, Sweep, Tile
from .call import Call, Loss, Purpose
from .matrix_products import sums_of_first_block

KEPT_THREADS = 128  # of a block of kept_gradient.cu, and the columns that it has
KEPT_COLUMNS = 8 * KEPT_THREADS


@dataclass(frozen=True)
class Kernel:
    """A function of a file in kernels/cuda, as it is compiled and launched."""

    file: str
    name: str
    threads: int
    options: tuple[tuple[str, Any], ...]  # -D options
    shared: int = 0  # bytes of dynamic shared memory

    @cached_property
    def defines(self) -> dict[str, Any]:
        return dict(self.options)


class Reading(Enum):
    """Where kernels and cuBLAS read rows of features."""

    IN_PLACE = "in place"
    ONCE = "from one copy of all rows"
    BY_BLOCK = "from copies by block"


@dataclass(frozen=True)
class OperandRows:
    """The rows of queries, or of keys, as operands of products."""

    reading: Reading
    features: int  # of a row, with zeros behind its end
    row_bytes: int
    shifted: bool  # divided by a power of two, for float16


@dataclass(frozen=True)
class Operands:
    """How products are computed: of which numbers, and how wide."""

    precision: str
    query: OperandRows
    key: OperandRows
    width: int  # bytes of a row that a product of logits adds up, of each part
    gradient_width: int  # features of a row in products that make gradients
    copied_once: int  # bytes of copies of all rows

    @property
    def parts(self) -> int:
        """16-bit numbers whose sum an element is."""
        return config.OPERAND_PARTS.get(self.precision, 1)

    @property
    def item(self) -> int:
        """Bytes of an element, of one part."""
        return config.element_bytes(self.precision)

    @property
    def accumulator_dtype(self) -> str:
        return "float64" if self.precision == "fp64" else "float32"


@dataclass(frozen=True)
class Part:
    """A part of the workspace."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Accumulator:
    """Where unfinished gradients of rows add up: in their destination, or in the workspace."""

    in_place: bool
    bytes: int = 0  # of the workspace
    first_row: int = 0  # in the workspace; rows before it overlay the destination
    overlaid: int = 0  # how many do
    copies: int = 1  # sums of parts of the terms, side by side
    rows_passing: int = 0  # overlaid rows that are finished at a time, in the panel's memory


@dataclass(frozen=True)
class Fold:
    """One visit of all blocks of a grid."""

    purpose: Purpose
    grid: Grid
    shape: Tile | Sweep  # of the thread blocks
    kernel: Kernel
    workspace: tuple[Part, ...]
    diagonal_kernel: Kernel | None = None  # for blocks on the diagonal, where queries are keys
    keeping_kernel: Kernel | None = None  # for blocks whose exponentials are kept
    kept_kernel: Kernel | None = None  # makes gradient panels of exponentials that are kept
    column_sums: bool = False
    gradients: bool = False  # of features
    dq_accumulator: Accumulator | None = None  # None: not wanted, or not in this fold
    dk_accumulator: Accumulator | None = None  # of a triangle: the same as that of dQ
    in_registers: bool = False  # dL/dx, which therefore has no panel and no products

    def kernel_of(self, is_diagonal: bool, is_kept: bool) -> Kernel:
        """The kernel of a block."""
        variant = self.keeping_kernel if is_kept else self.diagonal_kernel if is_diagonal else None
        return variant or self.kernel


@dataclass(frozen=True)
class Cut:
    """How the logit matrix is cut, and what the folds need for it."""

    needs: Needs
    statistics: Blocking
    gradient: Blocking
    workspace: int
    one_pass: bool  # one fold for log-sum-exps and gradients
    dq_in_place: bool
    dk_in_place: bool
    dq_copies: int


@dataclass(frozen=True)
class Folds:
    """Makes the folds of a call whose operands, kernels and blocks are chosen."""

    call: Call
    operands: Operands
    tile: Tile
    sweep: Sweep | None
    narrow: Sweep | None
    cut: Cut

    def all(self) -> tuple[Fold, ...]:
        """All folds of the call in their order; of a block over ranks, the one that is asked."""
        call, block = self.call, self.call.block
        if block is not None:
            return self.block_folds(block.purpose, block.triangle)
        if call.loss is Loss.PAIRS:
            return self.gradients(Purpose.SIGMOID, False)
        if self.cut.one_pass:
            grid = self.grid(self.cut.gradient, call.symmetric, False)
            if call.key_gradient is not None:
                grid = replace(grid, columns=slices(call.shape[1], call.shape[1]))
            return (self.gradient(Purpose.ONE_PASS, grid, *self.wanted),)
        statistics = self.statistics(call.symmetric and not call.retrieval_ranks, call.two_sided)
        ranks = (self.ranks(statistics.grid, call.two_sided),) if call.retrieval_ranks else ()
        gradients = self.gradients(Purpose.GRADIENT, call.symmetric) if call.gradient else ()
        return (statistics, *ranks, *gradients)

    def block_folds(self, purpose: Purpose | None, triangle: bool) -> tuple[Fold, ...]:
        block = self.call.block
        assert block is not None
        if purpose is None:
            return ()
        if purpose is Purpose.STATISTICS:
            return (self.statistics(triangle, block.column_sums),)
        if purpose is Purpose.RANKS:
            grid = self.grid(self.cut.gradient, self.call.symmetric, triangle)
            return (self.ranks(grid, block.column_sums),)
        return self.gradients(purpose, triangle)

    @property
    def wanted(self) -> tuple[bool, bool]:
        """Whether dQ is, and whether dK is."""
        block = self.call.block
        if block is not None and not block.accumulates:
            return False, False
        return self.call.query_gradient is not None, self.call.key_gradient is not None

    @property
    def two_sided(self) -> bool:
        """Whether gradients have terms of both sides."""
        block = self.call.block
        if block is not None:
            return block.column_sums
        return self.call.two_sided or self.call.symmetric

    # -- kernels and memory

    def kernel(
        self, name: str, shape: Tile | Sweep, *, panel: bool = True, sums: bool = False,
        **defines: Any,
    ) -> Kernel:  # fmt: skip
        """A kernel of tiled/ or sm90/, with the -D options that the call's options add."""
        call = self.call
        made = {"PRECISION": self.operands.precision.upper(), "IDS": int(call.ids),
                "FACTORS": int(call.normalize), **defines}  # fmt: skip
        if call.set_size > 1:
            made["SETS"] = 1
        made |= call.pair_defines(defines.get("COLUMNS", 0))
        if isinstance(shape, Tile):
            made |= {"BLOCK_N": shape.block_n, "WARP_N": shape.warp_n, "STAGES": shape.stages,
                     "LEVELS": shape.levels, "MIN_BLOCKS": shape.min_blocks}  # fmt: skip
            file, shared = f"tiled/{name}.cu", shape.shared
        else:
            made |= config.defines(shape, panel, sums)
            file, shared = f"sm90/{name}.cu", made["SHARED"]
        return Kernel(file, name, shape.threads, tuple(made.items()), shared)

    @property
    def moments(self) -> dict[str, Any]:
        return {"MOMENTS": 1} if self.call.moments else {}

    def partial_sums(self, side: str, number: int) -> tuple[Part, ...]:
        """Pairs of numbers that tiles leave, and their moments."""
        real = config.ACCUMULATOR_BYTES[self.operands.precision]
        pairs = Part(f"{side}_partials", 2 * number * real)
        return (pairs, *[Part(f"{side}_moments", number * real)] * self.call.moments)

    def staging(self, grid: Grid) -> tuple[Part, ...]:
        """Copies of a block's rows of queries and of keys, where these are read by block."""
        rows, columns = grid.largest
        sides = ("query_rows", self.operands.query, rows), ("key_rows", self.operands.key, columns)
        return tuple(
            Part(name, number * side.row_bytes)
            for name, side, number in sides
            if side.reading is Reading.BY_BLOCK
        )

    def grid(self, blocking: Blocking, same_rows: bool, triangle: bool) -> Grid:
        m, n, _ = self.call.shape
        columns = blocking.column_blocks(n)
        return Grid(columns if same_rows else slices(m, blocking.rows), columns, triangle)

    # -- folds

    def statistics(self, triangle: bool, columns: bool) -> Fold:
        """Log-sum-exps of rows, and of columns where they have a softmax."""
        call, shape = self.call, self.sweep or self.tile
        grid = self.grid(self.cut.statistics, False, triangle)
        columns = columns or triangle
        parts = self.staging(grid)
        parts += self.partial_sums("row", shape.row_sums(*grid.largest))
        if columns:
            parts += self.partial_sums("column", shape.column_sums(*grid.largest))

        def kernel(column_sums: bool, keep: bool = False) -> Kernel:
            defines = {"COLUMNS": int(column_sums), **self.moments}
            if isinstance(shape, Tile):
                return self.kernel("lse", shape, **defines)
            defines |= {"MAXIMA": int(call.retrieval_ranks), "KEEP": int(keep)}
            return self.kernel("sweep_lse", shape, panel=keep, sums=True, **defines)

        return Fold(
            Purpose.STATISTICS, grid, shape, kernel(columns), parts, column_sums=columns,
            diagonal_kernel=kernel(columns and shape.square) if call.symmetric else None,
            keeping_kernel=kernel(columns, True) if self.cut.gradient.kept else None,
        )  # fmt: skip

    def ranks(self, grid: Grid, columns: bool) -> Fold:
        """Counts of the logits above those of positives."""
        kernel = self.kernel("ranks", self.tile, COLUMNS=int(columns))
        staging = self.staging(grid)
        return Fold(Purpose.RANKS, grid, self.tile, kernel, staging, column_sums=columns)

    def gradients(self, purpose: Purpose, triangle: bool) -> tuple[Fold, ...]:
        """One fold for all gradients; or dQ first and dK by ranges of keys, if not all of dK can
        accumulate at once."""
        call, blocking = self.call, self.cut.gradient
        n = call.shape[1]
        ranges = slices(n, blocking.key_rows or n)
        want_query, want_key = self.wanted
        triangle = triangle and len(ranges) == 1 and self.narrow is None
        grid = self.grid(blocking, call.symmetric, triangle)
        if call.symmetric or not want_key or len(ranges) == 1:
            return (self.gradient(purpose, grid, want_query, want_key),)
        width = grid.columns[0].stop - grid.columns[0].start
        range_folds = (
            replace(grid, columns=slices(keys.stop, width, keys.start)) for keys in ranges
        )
        first = [self.gradient(purpose, grid, True, False)] * want_query
        return (*first, *(self.gradient(purpose, part, False, True) for part in range_folds))

    def gradient(self, purpose: Purpose, grid: Grid, want_query: bool, want_key: bool) -> Fold:
        """A panel of dL/dx of each block, and the products that make dQ and dK of it."""
        call, cut, shape = self.call, self.cut, self.narrow or self.sweep or self.tile
        rows, columns = grid.largest
        wanted = want_query or want_key
        panel = cut.needs.gradient and wanted
        panel_block = (call.shape[0], cut.gradient.kept) if cut.gradient.kept else (rows, columns)
        panel_bytes = cut.needs.panel(*panel_block, call.shape[2]) if panel else 0
        dq = dk = None
        if grid.triangle and wanted:  # rows and columns add to the same gradients
            dq = dk = self.accumulator(cut.dq_in_place, 0, call.shape[0], panel_bytes)
        else:
            if want_query or (wanted and call.symmetric):
                copies = 1
                if cut.dq_copies > 1:
                    first = grid.columns[0].stop - grid.columns[0].start
                    made = sums_of_first_block(self.operands.precision, first, columns)
                    copies = min(cut.dq_copies, made)
                dq = self.accumulator(cut.dq_in_place, 0, rows, copies=copies)
            if want_key and not call.symmetric:
                keys = grid.columns[0].start, grid.columns[-1].stop
                dk = self.accumulator(cut.dk_in_place, *keys, panel_bytes)
        sums = self.partial_sums("row", shape.row_sums(rows, columns))
        weighted = Part("weighted_queries", rows * self.operands.query.row_bytes)
        sides = ("dq_accumulator", dq), ("dk_accumulator", None if dk is dq else dk)
        memory = (
            *self.staging(grid),
            *[Part("gradient_panel", panel_bytes)] * (panel and not cut.gradient.kept),
            *[Part(name, of.bytes) for name, of in sides if of is not None and not of.in_place],
            *(sums if purpose is not Purpose.GRADIENT else ()),
            *[weighted] * (purpose is Purpose.ONE_PASS and want_key),
        )
        return Fold(
            purpose, grid, shape, self.gradient_kernel(purpose, shape, wanted), memory,
            kept_kernel=self.kept_kernel() if cut.gradient.kept else None, gradients=wanted,
            dq_accumulator=dq, dk_accumulator=dk, in_registers=self.narrow is not None,
        )  # fmt: skip

    def gradient_kernel(self, purpose: Purpose, shape: Tile | Sweep, panel: bool) -> Kernel:
        """The kernel of a fold that makes gradients, or the loss of a sigmoid alone."""
        tiled = isinstance(shape, Tile)
        if purpose is Purpose.ONE_PASS:
            return self.kernel("sweep_online", shape, **self.moments)
        if purpose is Purpose.SIGMOID:
            name = "sigmoid" if tiled else "sweep_sigmoid"
            return self.kernel(name, shape, PANEL=int(panel), **self.moments)
        name = "sweep_narrow" if self.narrow else "gradient" if tiled else "sweep_gradient"
        return self.kernel(name, shape, COLUMNS=int(self.two_sided))

    def kept_kernel(self) -> Kernel:
        options = ("PRECISION", self.operands.precision.upper()), ("COLUMNS", int(self.two_sided))
        return Kernel("sm90/kept_gradient.cu", "kept_gradient", KEPT_THREADS, options)

    def accumulator(
        self, in_place: bool, first: int, end: int, panel_bytes: int = 0, copies: int = 1
    ) -> Accumulator:
        """Of rows from `first` to `end`; where finished rows can pass through the memory of the
        panel, some may overlay the destination."""
        if in_place:
            return Accumulator(in_place=True)
        overlaid = self.cut.gradient.overlaid if panel_bytes else 0
        first += overlaid
        row_bytes = self.cut.needs.accumulator_row(self.call.shape[2])
        passing = panel_bytes // self.cut.needs.overlay_row if overlaid else 0
        size = copies * (end - first) * row_bytes
        return Accumulator(False, size, first, overlaid, copies, passing)
