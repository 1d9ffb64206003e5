"""The GPU backend: sweeps or tiled kernels for logits and what becomes of them, else cuBLAS.

A fold visits blocks of the logit matrix that fit the workspace. The log-sum-exp fold writes nothing
but (max, sum) pairs of each tile's rows and columns; the gradient fold writes a panel of dL/dx in
the precision of the operands, and two plain matrix products accumulate dQ and dK from it in float32
(float64). Where dQ alone is wanted, Hopper does both in one fold. Everything is queued on the
caller's current stream; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from . import blocks, compiler, gpu_fused, gpu_naive
from . import launch_config as config
from .arguments import (
    MATRIX,
    SCALAR,
    address,
    matrix,
    matrix_fields,
    pointer,
    pointers,
    scalar_fields,
    struct,
)
from .blocks import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    Ranks,
    Sigmoid,
    SoftmaxGradient,
    Solution,
    Statistics,
)
from .cublas import gemm_ex
from .gpu_operands import Accumulator, Operand, Scratch, Side, in_place
from .gpu_vectors import SUMS, Namespace, Vectors
from .tensor_map import SIZE, tensor_map

PRECISIONS = {p: p.upper() for p in config.OPERAND_BYTES}
# Panels are written in units that bring their largest element near this: float16 has no range
LARGEST_ELEMENT = {"fp16": 8192.0}  # times 4: factors of normalised rows, below 2 each
# One pass takes elements 2^(x - height) with a height that need not be the maximum (heights.cuh):
# this wants the exponents of float32, which float16 has not
ONE_PASS = ("tf32", "bf16")

# cuBLAS's names for types and for the arithmetic of a product
CUDA_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "bf16x3": 14, "bf16": 14, "fp16": 2}
COMPUTE = {"fp64": 70, "fp32": 69, "tf32": 77, "bf16x3": 68, "bf16": 68, "fp16": 68}
OP_N, OP_T = 0, 1

# --- structures that kernels take, as kernels/cuda declares them ----------------------------------

_OPERAND = np.dtype(
    [("data", "u8"), ("stride", "i8"), ("low", "i8"), ("rows", "i8"), ("factor", "u8")]
)
_BLOCK = np.dtype(
    [("q", _OPERAND), ("k", _OPERAND), ("width", "i8"), ("first_row", "i8"),
     ("first_column", "i8"), ("row_tiles", "i8"), ("column_tiles", "i8"), ("positives", "u8"),
     ("query_ids", "u8"), ("key_ids", "u8"), ("symmetric", "i8"), ("triangle", "i8"),
     ("scale", SCALAR)]
)  # fmt: skip
_PANEL = np.dtype([("data", "u8"), ("stride", "i8"), ("low", "i8")])


_FACTORS = pointers("row_height a u column_height v shared")
_FACTOR_SOURCES = pointers("row_lse a at_positive column_lse b column_positive")
_FACTOR_TARGETS = pointers("row_height a u column_height v")
_POSITIVES = np.dtype(
    [("gradient", "u8"), ("partner", "u8"), ("start", "u8"), ("by_partner", "i8"),
     ("z", MATRIX), ("factor", "u8"), ("exponent", "u8")]
)  # fmt: skip
_NULL = np.uint64(0)
_RANGES_SHARED = 16  # offset of Ranges::shared


# --- the device -----------------------------------------------------------------------------------


@cache
def device_properties(index: int) -> config.Device:
    device = cupy.cuda.Device(index)
    attributes = device.attributes
    return config.Device(
        device.compute_capability,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
    )


# --- the backend ----------------------------------------------------------------------------------


class GPU:
    """Blocks of one problem on the current device: see `infonce.kernels.blocks.Backend`."""

    xp = Namespace()

    def __init__(self, problem: Problem, gradients: Gradients | None = None) -> None:
        self.precision = problem.compute
        self.real = np.dtype(np.float64 if self.precision == "fp64" else np.float32)
        self.device = cupy.cuda.Device()
        self.properties = device_properties(self.device.id)
        if not config.supported(self.precision, self.properties):
            raise ValueError(
                f'precision: expected "fp32" or "fp64" on a device of compute capability '
                f"{self.properties.capability}, which lacks the tensor cores for "
                f'"{self.precision}"'
            )
        self.tile = config.tile(self.precision, problem.shape[2], self.properties)
        self.query = Side(self, problem.query, problem.normalize)
        self.key = self.query if problem.symmetric else Side(self, problem.key, problem.normalize)
        # bytes of an element, of each half where there are two, and of a row
        self.item = config.OPERAND_BYTES[self.precision] // (2 if self.precision == "bf16x3" else 1)
        self.width = max(self.query.padded, self.key.padded) * self.item
        extras = problem.normalize or problem.query_ids is not None
        self.sweep = None
        if not config.PORTABLE:
            self.sweep = config.sweep(self.precision, self.width, self.properties, extras)
        # elsewhere log-sum-exps first, then dQ from panels: 3 products
        self.online = self.sweep is not None and self.precision in ONE_PASS
        self.scale = scalar_fields(problem.scale)
        self.bias = scalar_fields(0.0 if problem.bias is None else problem.bias)
        # whether key i belongs to query i
        self.square = not problem.part and (
            problem.symmetric or problem.two_sided or problem.bias is not None
        )
        self.vectors = Vectors(self, problem.query)
        self._queries_of_keys: tuple[Array, Array] | None = None
        self.query_in_place = self.key_in_place = True
        if gradients is not None:
            self.query_in_place = not gradients.add_query and in_place(gradients.query, self.real)
            self.key_in_place = not gradients.want_key or in_place(gradients.key, self.real)
        self.needs = config.Needs(
            precision=self.precision,
            staged_query=not self.query.direct,
            staged_key=not self.key.direct,
            columns=problem.two_sided or problem.symmetric,
            gradient=gradients is not None,
            query_accumulator=gradients is not None and not self.query_in_place,
            key_accumulator=gradients is not None and not problem.symmetric
            and not self.key_in_place,
            sweep=self.sweep,
            rows=problem.bias is not None or (self.online and blocks.one_pass(problem, gradients)),
        )  # fmt: skip
        if problem.symmetric and gradients is not None and not self.query_in_place:
            # the triangle gathers the gradient of all rows
            self.needs = replace(self.needs, key_accumulator=True)
        # Two folds, two ways to cut: without a panel, blocks are larger
        d, block_n = problem.shape[2], self.tile.block_n
        cuts, sizes = [], []
        for needs in (self.needs.of_statistics, self.needs.of_gradient):
            cut = config.cut(problem.shape, needs, problem.workspace, block_n, problem.symmetric)
            cuts.append(cut)
            sizes.append(needs.size(cut, d, block_n))
        self.statistics_cut, self.cut = cuts
        self.scratch = Scratch(max(sizes))

    # -- launching

    def kernel(self, file: str, name: str, shared: int = 0, **defines: int | str) -> Any:
        return compiler.function(
            self.device, file, name, shared, PRECISION=PRECISIONS[self.precision], **defines
        )

    def tiled_kernel(self, name: str, **defines: int) -> Any:
        return self.kernel(
            f"{name}.cu", name, self.tile.shared,
            BLOCK_N=self.tile.block_n, STAGES=self.tile.stages, LEVELS=self.tile.levels,
            MIN_BLOCKS=self.tile.min_blocks, **defines,
        )  # fmt: skip

    def sweep_kernel(self, shape: config.Sweep, name: str, panel: bool, **defines: int) -> Any:
        return self.kernel(
            f"sweep_{name}.cu", f"sweep_{name}", shape.shared(panel),
            SLABS=shape.slabs, STAGES=shape.stages(panel), WIDE=int(shape.wide),
            SHARED=shape.shared(panel), **defines,
        )  # fmt: skip

    def rows_kernel(self, name: str, n: int, *arguments: Any) -> None:
        """One warp a row."""
        self.kernel("rows.cu", name)((-(-n // 8),), (256,), arguments)

    def vector_kernel(self, name: str, n: int, *arguments: Any, threads: int = 1) -> None:
        """So many threads an element."""
        self.kernel("vectors.cu", name)((-(-n * threads // 128),), (128,), arguments)

    @property
    def scale_struct(self) -> Any:
        return struct(SCALAR, *self.scale[:2])

    def queries_of_keys(self, problem: Problem) -> tuple[Array, Array]:
        """Queries in the order of their positive keys, and where each key's begin: [M], [N + 1]."""
        if self._queries_of_keys is None:
            m, n, _ = problem.shape
            count = cupy.zeros(n + 1, np.int64)
            self.vector_kernel("count_queries", m, problem.positives, np.int64(m), count)
            start = cupy.cumsum(count)
            order, taken = cupy.empty(m, np.int64), start.copy()
            self.vector_kernel("list_queries", m, problem.positives, np.int64(m), taken, order)
            self.vector_kernel("sort_queries", n, start, np.int64(n), order)
            self._queries_of_keys = order, start
        return self._queries_of_keys

    # -- what blocks.solve asks for

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        return Grid(blocks.cut(m, self.cut.rows), blocks.cut(n, self.cut.columns), triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return blocks.cut(n, self.cut.key_rows or n)

    def poison(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        found = cupy.zeros(1)
        bad = self.not_finite(problem, found)
        return cupy.broadcast_to(found, problem.shape[:1]) if bad is None else bad + found

    def not_finite(self, problem: Problem, found: Array) -> Array | None:
        """Puts NaN into `found` if a key has a feature that is not finite. [M] zeros and NaN for
        queries, if they are not the keys."""
        m, n, d = problem.shape
        key = matrix(self.key.features)
        self.rows_kernel("not_finite", n, key, np.int64(n), np.int64(d), _NULL, found)
        if problem.symmetric:
            return None
        out, of_queries = cupy.empty(m + 1), matrix(self.query.features)
        self.rows_kernel("not_finite", m, of_queries, np.int64(m), np.int64(d), out, out[m:])
        return out[:m]

    def of_positives(self, problem: Problem, of_keys: Array) -> Array:
        return of_keys[problem.positives]

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics):
            (m, n, _), cut = problem.shape, self.statistics_cut
            grid = replace(grid, rows=blocks.cut(m, cut.rows), columns=blocks.cut(n, cut.columns))
            _StatisticsFold(self, problem, grid, epilogue).run()
            if epilogue.row_rank is not None:
                _RanksFold(self, problem, grid, blocks.ranks_of(epilogue, problem)).run()
        elif isinstance(epilogue, Ranks):
            _RanksFold(self, problem, grid, epilogue).run()
        elif isinstance(epilogue, OnlineSoftmax):
            _OnlineFold(self, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, SoftmaxGradient):
            _SoftmaxFold(self, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, Sigmoid):
            _SigmoidFold(self, problem, grid, epilogue, gradients).run()


class _Fold:
    """One visit of every block of a grid. What happens to a block is the subclasses'."""

    def __init__(self, gpu: GPU, problem: Problem, grid: Grid, phase: str) -> None:
        self.gpu, self.problem, self.grid, self.phase = gpu, problem, grid, phase
        self.rows = max(r.stop - r.start for r in grid.rows)
        self.columns = max(c.stop - c.start for c in grid.columns)
        self.tile: config.Tile | config.Sweep = gpu.sweep or gpu.tile
        gpu.scratch.reset()
        self.query_buffer = gpu.query.buffer(self.rows)
        self.key_buffer = gpu.key.buffer(self.columns)
        self.staged: slice | None = None  # keys that are in the buffer

    def run(self) -> None:
        done, total = 0, len(self.grid)
        for a, rows in enumerate(self.grid.rows):
            self.q = self.gpu.query.block(rows, self.query_buffer)
            for b in self.grid.visits(a):
                columns = self.grid.columns[b]
                if self.staged != columns:
                    self.k = self.gpu.key.block(columns, self.key_buffer)
                    self.staged = columns
                self.block(rows, columns, a, b)
                done += 1
                if self.problem.progress is not None:
                    self.problem.progress(self.phase, done, total)
            self.end_rows(rows)
        self.end()

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        raise NotImplementedError

    def panel_map(self, rows: int) -> Any:
        raise NotImplementedError

    def end_rows(self, rows: slice) -> None:
        """A row panel has met all its columns."""

    def end(self) -> None:
        """All blocks have been visited."""

    def launch(
        self, name: str, rows: slice, columns: slice, arguments: tuple[Any, ...],
        triangle: bool = False, segments: int = 0, **defines: int,
    ) -> None:  # fmt: skip
        """Run a kernel over one block: a tile each, or a sweep in `segments` or as many as suit."""
        gpu, problem, q, k = self.gpu, self.problem, self.q, self.k
        item = gpu.item
        row_tiles, column_tiles = -(-q.rows // config.BLOCK_M), -(-k.rows // self.tile.block_n)
        block = struct(
            _BLOCK,
            (q.data, q.stride * item, q.low * item, q.rows, q.factor),
            (k.data, k.stride * item, k.low * item, k.rows, k.factor),
            gpu.width, rows.start, columns.start, row_tiles, column_tiles,
            address(problem.positives, rows.start),
            address(problem.query_ids, rows.start), address(problem.key_ids, columns.start),
            problem.symmetric, triangle, gpu.scale[:2],
        )  # fmt: skip
        if isinstance(self.tile, config.Tile):
            grid = row_tiles * column_tiles
            kernel, shared = gpu.tiled_kernel(name, **defines), self.tile.shared
            arguments = (block, *arguments)
        else:
            grid = self.tile.blocks(q.rows, k.rows, triangle)
            segments = segments or self.tile.segments(q.rows, k.rows, triangle)
            panel = name != "lse"
            shared = self.tile.shared(panel)
            kernel = gpu.sweep_kernel(
                self.tile, name, panel, IDS=int(problem.query_ids is not None),
                FACTORS=int(problem.normalize), **defines,
            )  # fmt: skip
            box = config.BLOCK_M // 2 if self.tile.wide else config.BLOCK_M
            maps = (
                tensor_map(z.data, z.rows, side.padded * item, z.stride * item, box, gpu.precision)
                for z, side in ((q, gpu.query), (k, gpu.key))
            )
            arguments = (*maps, block, np.int64(segments), *arguments)
            if panel:
                arguments = (*arguments, self.panel_map(q.rows))
        kernel((grid,), (self.tile.threads,), arguments, shared_mem=shared)


# --- log-sum-exp fold -----------------------------------------------------------------------------


class _StatisticsFold(_Fold):
    def __init__(self, gpu: GPU, problem: Problem, grid: Grid, stats: Statistics) -> None:
        super().__init__(gpu, problem, grid, stats.phase)
        self.stats = stats

        def pairs(n: int) -> Array:
            return gpu.scratch.take((n, 2), gpu.real)

        self.row_pairs = pairs(self.tile.row_sums(self.rows, self.columns))
        self.column_pairs = None
        if stats.columns is not None:
            self.column_pairs = pairs(self.tile.column_sums(self.rows, self.columns))

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        stats, problem, tile = self.stats, self.problem, self.tile
        m, n = self.q.rows, self.k.rows
        whole = problem.symmetric and rows == columns  # both (i, j) and (j, i)
        triangle = whole and tile.square and stats.columns is not None
        both = stats.columns is not None and (not whole or triangle)
        row_slots = tile.row_slots(m, n, triangle)
        column_slots = tile.column_slots(m, n, triangle) if both else 0
        column_pairs = self.column_pairs
        if triangle and isinstance(tile, config.Tile):  # one slot a tile, on either side
            column_pairs, column_slots = self.row_pairs, 0
        elif both and isinstance(tile, config.Sweep):  # warpgroups add to what is there
            count = n * column_slots
            self.gpu.vector_kernel("empty_pairs", count, column_pairs, np.int64(count))
        arguments = (
            pointer(stats.positive, rows.start),
            self.row_pairs, np.int64(m), pointer(column_pairs), np.int64(n),
        )  # fmt: skip
        self.launch("lse", rows, columns, arguments, triangle, COLUMNS=int(both))
        self.merge(self.row_pairs, row_slots, stats.rows, rows)
        if column_slots:
            assert stats.columns is not None
            self.merge(column_pairs, column_slots, stats.columns, columns)

    def merge(self, pairs: Array, slots: int, sums: blocks.Sums, of: slice) -> None:
        n = of.stop - of.start
        self.gpu.vector_kernel(
            "merge_pairs", n, pairs, np.int64(slots), np.int64(n), np.int64(n),
            self.gpu.scale_struct, pointer(sums.max, of.start), pointer(sums.sum, of.start),
            threads=4,
        )  # fmt: skip


class _RanksFold(_Fold):
    """Counts against the positives' logits, which the statistics have found."""

    def __init__(self, gpu: GPU, problem: Problem, grid: Grid, ranks: Ranks) -> None:
        super().__init__(gpu, problem, grid, ranks.phase)
        self.ranks, self.tile = ranks, gpu.tile
        self.by_row = self.products(ranks.positive)
        self.by_column = None
        if ranks.column_rank is not None:
            self.by_column = self.products(ranks.column_positive)

    def products(self, positive: Array) -> Array:
        """Logits as the raw products that the kernel compares them with."""
        gpu, n = self.gpu, len(positive)
        out = cupy.empty(n, gpu.real)
        gpu.vector_kernel("to_products", n, positive, np.int64(n), gpu.scale_struct, out)
        return out

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        ranks, of_columns = self.ranks, self.by_column is not None
        arguments = (
            pointer(self.by_row, rows.start),
            pointer(self.by_column, columns.start) if of_columns else _NULL,
            pointer(ranks.row_rank, rows.start),
            pointer(ranks.column_rank, columns.start) if of_columns else _NULL,
        )
        self.launch("ranks", rows, columns, arguments, COLUMNS=int(of_columns))


# --- gradient folds -------------------------------------------------------------------------------


class _GradientFold(_Fold):
    """Panels of dL/dx, and the products that make dQ and dK of them."""

    def __init__(
        self, gpu: GPU, problem: Problem, grid: Grid, phase: str, gradients: Gradients | None
    ) -> None:
        super().__init__(gpu, problem, grid, phase)
        self.gradients = gradients
        self.unit, self.unit_step = cupy.empty(3), 0  # struct Ranges, or one unit a row
        self.at_positive: Array = None  # [M] dL/dx at positives, with `scale` folded in
        d = problem.shape[2]
        self.of_rows = self.of_columns = None
        self.by_rows = gradients is not None and (gradients.want_query or problem.symmetric)
        self.by_columns = gradients is not None and (
            grid.triangle if problem.symmetric else gradients.want_key
        )
        if gradients is None:
            return
        low = 2 if gpu.precision == "bf16x3" else 1
        self.stride = config.panel_stride(self.columns)
        self.panel = gpu.scratch.take((self.rows * self.stride * low * gpu.item,))
        self.panel_low = self.rows * self.stride if low == 2 else 0
        if problem.symmetric and self.by_columns:  # rows gather what columns bring, and the reverse
            self.of_rows = self.of_columns = self.accumulator(
                gradients.query, gpu.query_in_place, slice(0, problem.shape[0]), d
            )
            return
        if self.by_rows:
            self.of_rows = self.accumulator(
                gradients.query, gpu.query_in_place, slice(0, self.rows), d
            )
        if self.by_columns:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            self.of_columns = self.accumulator(gradients.key, gpu.key_in_place, keys, d)

    def accumulator(self, out: Array, in_place: bool, rows: slice, d: int) -> Accumulator:
        if in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        made = self.gpu.scratch.take((rows.stop - rows.start, d), self.gpu.real)
        return Accumulator(made, d, rows.start)

    @property
    def panel_struct(self) -> Any:
        if self.gradients is None:
            return struct(_PANEL, 0, 0, 0)
        return struct(_PANEL, self.panel.data.ptr, self.stride, self.panel_low)

    def panel_map(self, rows: int) -> Any:
        """The panel as a sweep writes it: 16 rows of 128 bytes at a time."""
        if self.gradients is None:
            return np.zeros(SIZE, np.uint8).view(f"V{SIZE}")
        item = self.gpu.item
        return tensor_map(
            self.panel.data.ptr, rows, self.stride * item, self.stride * item, 16,
            self.gpu.precision,
        )  # fmt: skip

    def multiply(self, rows: slice, columns: slice, a: int, b: int) -> None:
        """dQ_a += P K_b and dK_b += P' Q_a."""
        q, k, diagonal = self.q, self.k, self.problem.symmetric and rows == columns
        d = self.problem.shape[2]
        if self.of_rows is not None:
            of = self.of_rows
            if not self.symmetric_sweep and not self.gpu.query_in_place:
                of.first = rows.start  # the panel's own rows are all that it holds
            first = b == self.grid.visits(a)[0] and not (self.symmetric_sweep and a > 0)
            self.product(OP_N, d, q.rows, k.rows, k, of, rows.start, first)
        if self.of_columns is not None and not diagonal:
            self.product(OP_T, d, k.rows, q.rows, q, self.of_columns, columns.start, a == 0)

    @property
    def symmetric_sweep(self) -> bool:
        return self.problem.symmetric and self.grid.triangle

    def product(
        self, op: int, d: int, n: int, k: int, z: Operand, out: Accumulator, row: int,
        first: bool,
    ) -> None:  # fmt: skip
        """out[row : row + n] (+)= P z or P' z. cuBLAS counts columns first: there all this is
        the transpose, out' = z' P'."""
        precision, real = self.gpu.precision, self.gpu.real
        one, zero = np.array(1, real), np.array(0, real)
        item = self.gpu.item
        halves = [(0, 0)]
        if precision == "bf16x3":  # small terms first
            halves = [(self.panel_low, 0), (0, z.low), (0, 0)]
        handle = cupy.cuda.device.get_cublas_handle()
        for panel_half, operand_half in halves:
            gemm_ex(
                handle, OP_N, op, d, n, k, one.ctypes.data,
                z.data + operand_half * item, CUDA_TYPE[precision], z.stride,
                self.panel.data.ptr + panel_half * item, CUDA_TYPE[precision], self.stride,
                (zero if first else one).ctypes.data,
                out.pointer(row), CUDA_TYPE["fp64" if precision == "fp64" else "fp32"], out.stride,
                COMPUTE[precision], -1,
            )  # fmt: skip
            first = False

    def end_rows(self, rows: slice) -> None:
        if self.of_rows is not None:
            assert self.gradients is not None
            partners = address(self.problem.positives), 0, 0
            self.finish(self.of_rows, self.gpu.query, self.gpu.key, rows, partners,
                        self.gradients.query, True, self.gradients.add_query)  # fmt: skip

    def end(self) -> None:
        if self.of_columns is None or self.of_columns is self.of_rows:
            return
        assert self.gradients is not None
        partners = 0, 0, 1
        if not self.gpu.square:
            order, start = self.gpu.queries_of_keys(self.problem)
            partners = address(order), address(start), 1
        for columns in self.grid.columns:
            self.finish(self.of_columns, self.gpu.key, self.gpu.query, columns, partners,
                        self.gradients.key, not self.gradients.want_query)  # fmt: skip

    def finish(
        self, acc: Accumulator, side: Side, other: Side, rows: slice,
        partners: tuple[int, int, int], out: Array, need_dots: bool, add: bool = False,
    ) -> None:  # fmt: skip
        """Rows' gradients are complete: positives, units, normalisation, destination."""
        assert self.gradients is not None
        n, d = rows.stop - rows.start, self.problem.shape[2]
        dots = self.gradients.dots if need_dots else None
        positives = struct(
            _POSITIVES, address(self.at_positive), *partners, matrix_fields(other.features),
            address(other.factor), address(other.exponent),
        )  # fmt: skip
        self.gpu.rows_kernel(
            "finish", n, np.uint64(acc.pointer(rows.start)), np.int64(acc.stride),
            np.int64(rows.start), np.int64(n), np.int64(d), matrix(side.features),
            pointer(side.factor), pointer(side.exponent), positives, self.unit,
            np.int64(self.unit_step), pointer(dots), matrix(out), np.int64(add),
        )  # fmt: skip

    def find_ranges(self, sources: Any, m: int, n: int) -> None:
        """The unit in which panels are written, and whether one exponential serves both sides."""
        largest = LARGEST_ELEMENT.get(self.gpu.precision, 1.0)
        kernel = self.gpu.kernel("vectors.cu", "ranges")
        kernel((1,), (1024,), (sources, np.int64(m), np.int64(n), np.float64(largest), self.unit))


class _SoftmaxFold(_GradientFold):
    def __init__(
        self, gpu: GPU, problem: Problem, grid: Grid, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(gpu, problem, grid, epilogue.phase, gradients)
        m, n, _ = problem.shape
        given = [
            None if v is None else cupy.ascontiguousarray(v, dtype=np.float64)
            for v in (epilogue.row_lse, epilogue.row_factor, epilogue.positive,
                      epilogue.column_lse, epilogue.column_factor, epilogue.column_positive)
        ]  # fmt: skip
        self.two_sided = epilogue.column_lse is not None
        sources = struct(_FACTOR_SOURCES, *map(address, given))
        self.find_ranges(sources, m, n)
        self.at_positive = given[2]
        self.by_row = cupy.empty((3, m), gpu.real)  # height, a, u
        self.by_column = cupy.empty((2, n), gpu.real) if self.two_sided else None  # height, v
        targets = [address(v) for v in self.by_row]
        targets += [0, 0] if self.by_column is None else [address(v) for v in self.by_column]
        gpu.vector_kernel(
            "factors", max(m, n), sources, np.int64(m), np.int64(n), gpu.scale_struct, self.unit,
            struct(_FACTOR_TARGETS, *targets), np.int64(isinstance(self.tile, config.Sweep)),
        )  # fmt: skip

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        item = self.gpu.real.itemsize
        of_rows = [address(v) + rows.start * item for v in self.by_row]
        of_columns = [0, 0]
        if self.by_column is not None:
            of_columns = [address(v) + columns.start * item for v in self.by_column]
        factors = struct(_FACTORS, *of_rows, *of_columns, self.unit.data.ptr + _RANGES_SHARED)
        arguments = factors, self.panel_struct
        self.launch("gradient", rows, columns, arguments, COLUMNS=int(self.two_sided))
        self.multiply(rows, columns, a, b)


class _OnlineFold(_GradientFold):
    """Sums of 2^(x2 - height), and the same times keys, under heights that follow the logits."""

    def __init__(
        self, gpu: GPU, problem: Problem, grid: Grid, epilogue: OnlineSoftmax,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(gpu, problem, grid, epilogue.phase, gradients)
        assert gpu.sweep is not None
        self.epilogue, self.sweep = epilogue, gpu.sweep
        m = problem.shape[0]
        # At 0 unit rows need no other height while their largest logit is within +-40 or so
        self.heights = cupy.zeros(m, gpu.real)
        self.wanted = cupy.empty(-(-self.rows // config.BLOCK_M), np.int32)  # panels, once more
        self.unit, self.unit_step = cupy.empty(m), 1
        self.at_positive = cupy.empty(m)
        self.pairs = gpu.scratch.take((gpu.sweep.row_sums(self.rows, self.columns), 2), gpu.real)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        n, d, start = rows.stop - rows.start, self.problem.shape[2], rows.start
        sums, heights = self.epilogue.rows, pointer(self.heights, start)
        sum_of_rows = pointer(sums.sum, start)

        def sweep(wanted: Any, segments: int) -> np.int64:
            """Returns how many pairs a row has then: one a segment and team."""
            arguments = (
                heights, sum_of_rows, pointer(self.epilogue.positive, start), self.pairs,
                np.int64(n), wanted, self.panel_struct,
            )  # fmt: skip
            self.launch("online", rows, columns, arguments, segments=segments)
            return np.int64(2 * segments)

        acc, acc_stride = 0, 0
        if b > 0 and self.of_rows is not None:
            acc, acc_stride = self.of_rows.pointer(start), self.of_rows.stride
        slots = sweep(_NULL, self.sweep.segments(n, self.k.rows))
        self.panels_kernel(
            "check_heights", n, self.pairs, slots, np.int64(n), self.gpu.scale_struct, heights,
            sum_of_rows, np.uint64(acc), np.int64(acc_stride), np.int64(d), self.wanted,
        )  # fmt: skip
        # Panels whose heights were no good: mostly none, or a few that all multiprocessors share
        slots = sweep(self.wanted, self.sweep.most_segments(n, self.k.rows))
        self.panels_kernel(
            "add_wanted", n, self.pairs, slots, np.int64(n), sum_of_rows, self.wanted
        )
        self.multiply(rows, columns, a, b)

    def panels_kernel(self, name: str, n: int, *arguments: Any) -> None:
        """A block a panel of rows, four threads a row."""
        kernel = self.gpu.kernel("vectors.cu", name)
        kernel((-(-n // config.BLOCK_M),), (4 * config.BLOCK_M,), arguments)

    def end_rows(self, rows: slice) -> None:
        start, n, sums = rows.start, rows.stop - rows.start, self.epilogue.rows
        self.gpu.vector_kernel(
            "end_online", n, pointer(self.heights, start),
            struct(SUMS, address(sums.max, start), address(sums.sum, start)),
            pointer(self.epilogue.positive, start), pointer(self.problem.upstream, start),
            pointer(self.gpu.query.factor, start), np.int64(n),
            np.float64(self.problem.row_weight), self.gpu.scale_struct,
            pointer(self.unit, start), pointer(self.at_positive, start),
        )  # fmt: skip
        super().end_rows(rows)


class _SigmoidFold(_GradientFold):
    def __init__(
        self, gpu: GPU, problem: Problem, grid: Grid, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(gpu, problem, grid, epilogue.phase, gradients)
        self.epilogue = epilogue
        m, n, _ = problem.shape
        factor = cupy.ascontiguousarray(epilogue.row_factor, dtype=np.float64)
        self.find_ranges(struct(_FACTOR_SOURCES, 0, address(factor), 0, 0, 0, 0), m, n)
        self.factor, self.at_positive = factor, cupy.empty(m)
        self.row_factor = cupy.empty(m, gpu.real)
        gpu.vector_kernel("per_unit", m, factor, np.int64(m), self.unit, self.row_factor)
        self.sums = gpu.scratch.take((self.tile.row_sums(self.rows, self.columns), 2), gpu.real)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        gpu, epilogue, n = self.gpu, self.epilogue, rows.stop - rows.start
        arguments = (
            struct(SCALAR, *gpu.bias[:2]), pointer(self.row_factor, rows.start),
            pointer(epilogue.positive, rows.start), self.sums, np.int64(n),
            self.panel_struct,
        )  # fmt: skip
        panel = int(self.gradients is not None)
        self.launch("sigmoid", rows, columns, arguments, PANEL=panel)
        slots = self.tile.row_slots(n, self.k.rows)
        gpu.vector_kernel(
            "add_pairs", n, self.sums, np.int64(slots), np.int64(n), np.int64(n),
            self.unit, pointer(epilogue.losses, rows.start),
            pointer(epilogue.bias_grad, rows.start),
        )  # fmt: skip
        if self.gradients is not None:
            self.multiply(rows, columns, a, b)

    def end_rows(self, rows: slice) -> None:
        start, n = rows.start, rows.stop - rows.start
        self.gpu.vector_kernel(
            "sigmoid_positives", n, pointer(self.epilogue.positive, start),
            pointer(self.factor, start), pointer(self.problem.positives, start), np.int64(n),
            struct(SCALAR, *self.gpu.bias[:2]), pointer(self.at_positive, start),
            pointer(self.epilogue.losses, start), pointer(self.epilogue.bias_grad, start),
        )  # fmt: skip
        super().end_rows(rows)


# --- one call -------------------------------------------------------------------------------------


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    if problem.method == "naive":
        return gpu_naive.solve(blocks.spelled_out(problem, cupy), gradients)
    if problem.method == "fused":
        gpu_fused.require(problem)
    if not problem.ranks and (
        problem.method == "fused" or (problem.method == "auto" and gpu_fused.pays(problem))
    ):
        return gpu_fused.solve(problem, gradients, device_properties(device.id))
    return blocks.solve(problem, GPU(problem, gradients), gradients)
