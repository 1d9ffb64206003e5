"""The passes of a call, each a visit of all blocks of the logit matrix, with kernels and memory.

decisions.py makes a `PassScheduler` from its choices; tiled/run.py runs the `ScheduledPass`es.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...grid import Grid, gradient_visits, slices
from .. import config
from ..config import BlockSizes, Needs, Parts, Sweep, Tile
from .call import Call, LossForm, Purpose
from .matrix_products import count_first_block_sums
from .operands import Operands

CACHED_THREADS = 128  # threads of a thread block of cached_gradient.cu
CACHED_BLOCK_COLUMNS = 8 * CACHED_THREADS  # columns of a thread block of cached_gradient.cu


@dataclass(frozen=True)
class ScheduledKernel:
    """A kernel of a file in kernels/cuda, with the options of its compilation and launch."""

    file: str  # path in kernels/cuda
    name: str
    threads: int  # of a thread block
    options: tuple[tuple[str, Any], ...]  # -D options
    shared: int = 0  # bytes of dynamic shared memory

    @cached_property
    def defines(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class GuideSchedule:
    """How dot products of a guide's features become marks of pairs, which a pass then reads."""

    operands: Operands
    shape: Tile | Sweep  # the work of a thread block
    kernel: ScheduledKernel
    marks_per_pair: int  # 1: a mark for rows; 2: marks for rows and for columns


@dataclass(frozen=True)
class AccumulatorRows:
    """Where rows of dQ, or of dK, accumulate: in their destination, or in the workspace."""

    in_place: bool  # in the destination; then all other fields have their defaults
    rows: int = 0  # rows in the workspace
    first_row: int = 0  # number of the first gradient row that is in the workspace
    overlaid: int = 0  # rows before `first_row` whose accumulators overlay the destination
    dq_copies: int = 1  # accumulators of each row of dQ, whose sum is dQ; 1 for dK
    # overlaid rows that are converted to the dtype of the gradient at a time, after the last block
    # and in the memory of the gradient block
    rows_converted_at_once: int = 0


@dataclass(frozen=True)
class ScheduledPass:
    """A pass: its kernels, its memory, and the gradients that it computes."""

    purpose: Purpose
    grid: Grid
    shape: Tile | Sweep  # the work of a thread block
    kernel: ScheduledKernel
    parts: Parts  # of the workspace
    # variants of `kernel`; None: there is no such variant
    # for blocks on the diagonal, if queries are keys
    diagonal_kernel: ScheduledKernel | None = None
    caching_kernel: ScheduledKernel | None = None  # for blocks whose exponentials it stores
    # computes gradient blocks from cached exponentials, in place of `kernel`
    cached_kernel: ScheduledKernel | None = None
    column_sums: bool = False  # whether columns have log-sum-exps or counts
    gradients: bool = False  # whether the pass computes gradients of features
    dq_accumulator: AccumulatorRows | None = None  # None: this pass does not compute dQ
    # None: this pass does not compute dK. In a triangle it is the object `dq_accumulator`
    dk_accumulator: AccumulatorRows | None = None
    in_registers: bool = False  # dL/dx stays in registers, without gradient blocks

    def choose_kernel(self, is_diagonal: bool, is_cached: bool) -> ScheduledKernel:
        """The kernel of a block. `is_cached`: its exponentials will be stored."""
        variant = (
            self.caching_kernel if is_cached else self.diagonal_kernel if is_diagonal else None
        )
        return variant or self.kernel


@dataclass(frozen=True)
class WorkspaceDivision:
    """How the passes share the workspace: sizes of blocks, and where gradients accumulate."""

    needs: Needs
    statistics: BlockSizes  # of the log-sum-exp pass
    gradient: BlockSizes  # of the gradient pass
    workspace: int  # bytes of all parts, with their alignment
    one_pass: bool  # one pass computes log-sum-exps and gradients
    # whether each accumulates in its destination; true also if it is not wanted
    dq_in_place: bool
    dk_in_place: bool
    dq_copies: int  # accumulators of each row of dQ, whose sum is dQ
    kept_marks: Parts  # a guide's marks of all pairs, kept from pass to pass; {}: of a block


def scheduled_kernel(
    name: str, call: Call, precision: str, shape: Tile | Sweep, *, gradient: bool = True,
    sums: bool = False, **defines: Any,
) -> ScheduledKernel:  # fmt: skip
    """The kernel `name` of tiled/ (for a Tile) or sm90/ (for a Sweep), with its -D options.

    `gradient`, `sums`: a sweep writes gradient blocks, or adds up columns (`Sweep.stages`).
    """
    options = {
        "PRECISION": precision.upper(), "IDS": call.ids,
        "NORM_FACTORS": int(call.normalize), **defines,
    }  # fmt: skip
    if call.set_size > 1:
        options["SETS"] = 1
    options |= call.pair_defines(defines.get("COLUMNS", 0))
    if isinstance(shape, Tile):
        options |= {"BLOCK_N": shape.block_n, "WARP_N": shape.warp_n, "STAGES": shape.stages,
                    "LEVELS": shape.levels, "MIN_BLOCKS": shape.min_blocks}  # fmt: skip
        file, shared = f"tiled/{name}.cu", shape.shared
    else:
        options |= config.defines(shape, gradient, sums)
        file, shared = f"sm90/{name}.cu", options["SHARED"]
    return ScheduledKernel(file, name, shape.threads, tuple(options.items()), shared)


@dataclass(frozen=True)
class PassScheduler:
    """Makes the passes of a call, from the choices of decisions.py.

    `sweep` replaces `tile`, and `register_sweep` replaces both in the gradient pass.
    """

    call: Call
    operands: Operands
    tile: Tile
    sweep: Sweep | None
    register_sweep: Sweep | None
    division: WorkspaceDivision

    def all(self) -> tuple[ScheduledPass, ...]:
        """All passes of the call in their order. A block over ranks has one pass."""
        call, block = self.call, self.call.block
        if block is not None:
            return self.block_passes(block.purpose, block.triangle)
        if call.loss is LossForm.PAIRS:
            return self.gradients(Purpose.SIGMOID, False)
        if call.taught:
            return self.gradients(Purpose.DISTILLATION, False)
        if self.division.one_pass:
            grid = self.grid(self.division.gradient, call.symmetric, False)
            if call.key_gradient is not None:  # blocks of all keys (`block_sizes_for_all_keys`)
                grid = replace(grid, columns=slices(call.shape[1], call.shape[1]))
            return (self.gradient(Purpose.ONE_PASS, grid, *self.computed_gradients),)
        # ranks need maxima of all rows, which a triangle does not leave
        statistics = self.statistics(call.symmetric and not call.retrieval_ranks, call.two_sided)
        ranks = (self.ranks(statistics.grid, call.two_sided),) if call.retrieval_ranks else ()
        gradients = self.gradients(Purpose.GRADIENT, call.symmetric) if call.gradient else ()
        return (statistics, *ranks, *gradients)

    def block_passes(self, purpose: Purpose | None, triangle: bool) -> tuple[ScheduledPass, ...]:
        """The passes of a block over ranks."""
        block = self.call.block
        assert block is not None
        if purpose is None:
            return ()
        if purpose is Purpose.STATISTICS:
            return (self.statistics(triangle, block.column_sums),)
        if purpose is Purpose.RETRIEVAL_RANKS:
            grid = self.grid(self.division.gradient, self.call.symmetric, triangle)
            return (self.ranks(grid, block.column_sums),)
        return self.gradients(purpose, triangle)

    @property
    def computed_gradients(self) -> tuple[bool, bool]:
        """(whether dQ, whether dK is computed)."""
        block = self.call.block
        if block is not None and not block.accumulates:
            return False, False
        return self.call.query_gradient is not None, self.call.key_gradient is not None

    @property
    def has_column_terms(self) -> bool:
        """Whether dL/dx of a pair has a term of its column: of the softmax over the column; or, if
        queries are the keys, of the row with the number of the column."""
        block = self.call.block
        if block is not None:
            return block.column_sums
        return self.call.two_sided or self.call.symmetric

    # -- kernels and memory

    def kernel(self, name: str, shape: Tile | Sweep, **options: Any) -> ScheduledKernel:
        """The kernel `name` for the operands of the call."""
        return scheduled_kernel(name, self.call, self.operands.precision, shape, **options)

    @property
    def moments(self) -> dict[str, Any]:
        """The -D option that adds first moments to sums."""
        return {"MOMENTS": 1} if self.call.moments else {}

    def parts(self, grid: Grid, dq_rows: int = 0, dk_rows: int = 0, **needs: Any) -> Parts:
        """The parts of the workspace that a pass uses.

        `dq_rows`, `dk_rows`: rows of accumulators. `needs` replaces fields of `division.needs`.
        """
        return replace(self.division.needs, **needs).parts(
            *grid.largest, self.call.shape[2], self.tile.block_n, dq_rows, dk_rows
        )

    def grid(self, block_sizes: BlockSizes, same_rows: bool, triangle: bool) -> Grid:
        """The grid of blocks of these sizes. `same_rows`: row blocks are column blocks."""
        m, n, _ = self.call.shape
        columns = block_sizes.column_blocks(n)
        return Grid(columns if same_rows else slices(m, block_sizes.rows), columns, triangle)

    # -- passes

    def statistics(self, triangle: bool, columns: bool) -> ScheduledPass:
        """The pass of log-sum-exps of rows, and, with `columns` or in a triangle, of columns."""
        call, shape = self.call, self.sweep or self.tile
        grid = self.grid(self.division.statistics, False, triangle)
        columns = columns or triangle
        parts = self.parts(grid, has_gradient_block=False, sums_rows=True, sums_columns=columns)

        def kernel(column_sums: bool, caches: bool = False) -> ScheduledKernel:
            """The variant of the kernel that adds up columns, or caches exponentials."""
            defines = {"COLUMNS": int(column_sums), **self.moments}
            defines |= {"MAXIMA": int(call.retrieval_ranks)}
            if isinstance(shape, Tile):
                return self.kernel("lse", shape, **defines)
            defines |= {"CACHE": int(caches)}
            return self.kernel("sweep_lse", shape, gradient=caches, sums=True, **defines)

        # in a block on the diagonal, columns have sums only if the launch visits one triangle of
        # the block, for which tiles must be square
        return ScheduledPass(
            Purpose.STATISTICS, grid, shape, kernel(columns), parts, column_sums=columns,
            diagonal_kernel=kernel(columns and shape.square) if call.symmetric else None,
            caching_kernel=kernel(columns, True) if self.division.gradient.cached_columns else None,
        )  # fmt: skip

    def ranks(self, grid: Grid, columns: bool) -> ScheduledPass:
        """The pass of retrieval ranks, which counts the logits above those of positives."""
        kernel = self.kernel("ranks", self.tile, COLUMNS=int(columns))
        parts = self.parts(grid, has_gradient_block=False, sums_rows=False, sums_columns=False)
        return ScheduledPass(
            Purpose.RETRIEVAL_RANKS, grid, self.tile, kernel, parts, column_sums=columns
        )

    def gradients(self, purpose: Purpose, triangle: bool) -> tuple[ScheduledPass, ...]:
        """The gradient passes (`gradient_visits`): several, if dK has no room for all keys.

        If queries are the keys, the pass visits a triangle if all rows have room in the accumulator
        and gradient blocks are written to memory. Otherwise it visits the whole square of blocks,
        and a block adds to the gradients of its rows only.
        """
        call, block_sizes = self.call, self.division.gradient
        n = call.shape[1]
        ranges = slices(n, block_sizes.dk_rows or n)
        triangle = triangle and len(ranges) == 1 and self.register_sweep is None
        grid = self.grid(block_sizes, call.symmetric, triangle)
        visits = gradient_visits(
            grid, ranges, call.symmetric, *self.computed_gradients, purpose is Purpose.SIGMOID
        )
        return tuple(self.gradient(purpose, *visit) for visit in visits)

    def gradient(
        self, purpose: Purpose, grid: Grid, want_query: bool, want_key: bool
    ) -> ScheduledPass:
        """A pass that computes dL/dx of each block, and adds its products to dQ and dK."""
        call, division = self.call, self.division
        shape = self.register_sweep or self.sweep or self.tile
        # of features; without it a sigmoid pass computes only the loss
        wants_gradient, cached = want_query or want_key, division.gradient.cached_columns > 0
        has_gradient_block = division.needs.has_gradient_block and wants_gradient
        dq = dk = None
        if grid.triangle and wants_gradient:  # rows and columns add to the same gradients
            dq = dk = self.all_keys_accumulator(grid, division.dq_in_place)
        else:
            if want_query or (wants_gradient and call.symmetric):
                dq = self.dq_accumulator(grid)
            if want_key and not call.symmetric:
                dk = self.all_keys_accumulator(grid, division.dk_in_place)
        # the memory of the cache is also the gradient block
        parts = self.parts(
            grid, dq.dq_copies * dq.rows if dq else 0, dk.rows if dk and dk is not dq else 0,
            has_gradient_block=has_gradient_block and not cached,
            sums_rows=purpose is not Purpose.GRADIENT,
            sums_columns=purpose is Purpose.DISTILLATION and self.has_column_terms,
            weighted_query=purpose is Purpose.ONE_PASS and want_key,
        )  # fmt: skip
        return ScheduledPass(
            purpose, grid, shape, self.gradient_kernel(purpose, shape, wants_gradient), parts,
            cached_kernel=self.cached_kernel() if cached else None, gradients=wants_gradient,
            dq_accumulator=dq, dk_accumulator=dk, in_registers=self.register_sweep is not None,
        )  # fmt: skip

    def gradient_kernel(
        self, purpose: Purpose, shape: Tile | Sweep, wants_gradient: bool
    ) -> ScheduledKernel:
        """The kernel of a pass that computes gradients, or only the loss of a sigmoid."""
        tiled = isinstance(shape, Tile)
        if purpose is Purpose.ONE_PASS:
            return self.kernel("sweep_online", shape, **self.moments)
        if purpose is Purpose.DISTILLATION:
            name, columns = "distill" if tiled else "sweep_distill", int(self.has_column_terms)
            return self.kernel(
                name, shape, COLUMNS=columns, GRADIENT=int(wants_gradient), **self.moments
            )
        if purpose is Purpose.SIGMOID:
            name = "sigmoid" if tiled else "sweep_sigmoid"
            return self.kernel(name, shape, GRADIENT=int(wants_gradient), **self.moments)
        name = "sweep_narrow" if self.register_sweep else "gradient" if tiled else "sweep_gradient"
        return self.kernel(name, shape, COLUMNS=int(self.has_column_terms))

    def cached_kernel(self) -> ScheduledKernel:
        """The kernel that computes gradient blocks from cached exponentials."""
        options = (
            ("PRECISION", self.operands.precision.upper()),
            ("COLUMNS", int(self.has_column_terms)),
        )
        return ScheduledKernel(
            "sm90/cached_gradient.cu", "cached_gradient", CACHED_THREADS, options
        )

    def dq_accumulator(self, grid: Grid) -> AccumulatorRows:
        """The accumulator of dQ: the rows of one row block, completed before the next row block."""
        if self.division.dq_in_place:
            return AccumulatorRows(in_place=True)
        rows, columns = grid.largest
        first_block_keys = grid.columns[0].stop - grid.columns[0].start
        sums = count_first_block_sums(self.operands.precision, first_block_keys, columns)
        return AccumulatorRows(False, rows, dq_copies=min(self.division.dq_copies, sums))

    def all_keys_accumulator(self, grid: Grid, in_place: bool) -> AccumulatorRows:
        """The accumulator of dK (in a triangle of both gradients): the rows of all keys of a grid.

        The first rows may overlay their destination. After the last block, they are converted in
        the memory of the gradient block.
        """
        if in_place:
            return AccumulatorRows(in_place=True)
        needs, block_sizes, (m, _, d) = self.division.needs, self.division.gradient, self.call.shape
        first, end = grid.columns[0].start, grid.columns[-1].stop
        if not (needs.has_gradient_block and block_sizes.overlaid):
            return AccumulatorRows(False, end - first, first)
        largest = (m, block_sizes.cached_columns) if block_sizes.cached_columns else grid.largest
        rows_at_once = needs.gradient_block_bytes(*largest, d) // needs.overlay_row_bytes
        first += block_sizes.overlaid
        return AccumulatorRows(
            False, end - first, first, block_sizes.overlaid, rows_converted_at_once=rows_at_once
        )
