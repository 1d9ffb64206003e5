"""The gradient folds of the GPU backend: panels of dL/dx, and the products that make gradients of
them."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ... import problem as problems
from ...problem import Array, Gradients, Grid, OnlineSoftmax, Problem, Sigmoid, SoftmaxGradient
from ..config import launch as config
from ..device.abi import MATRIX, SCALAR, SUMS, address, matrix, matrix_fields, pointers, struct
from ..device.tensor_map import SIZE
from .context import Context
from .fold import Fold
from .operands import Accumulator, Operand

# Panels are written in units that bring their largest element near this: float16 has no range.
# (Times 4: factors of normalised rows, below 2 each)
LARGEST_ELEMENT = {"fp16": 8192.0, "fp16x3": 8192.0}
LOW_UNITS = {"fp16x3": 2048.0}  # in which low parts are written: LOW_UNITS of common.cuh
# cuBLAS's names for types and for the arithmetic of a product
CUDA_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "fp16x3": 2, "bf16": 14, "bf16x3": 14}
COMPUTE = {"fp64": 70, "fp32": 69, "tf32": 77, "fp16": 68, "fp16x3": 68, "bf16": 68, "bf16x3": 68}
OP_N, OP_T = 0, 1
# Which parts of the two operands are multiplied, small terms first; others are lost in rounding
PRODUCTS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
# Tensor cores cut off bits when they add: where float32's accuracy is asked for, sums of the large
# parts are of this many terms at most, and get back what they lose on average. A sum of 512 terms
# loses 47 units of 2^-24 of itself if all have one sign, and 9 if signs are mixed: 27 are given
# back, so many times what a sweep's short sums lose a step.
LONGEST_SUM = {"fp16x3": 512}
LOST_BY_PRODUCTS = 1.4

# --- structures that kernels take, as kernels/cuda declares them ----------------------------------

_PANEL = np.dtype([("data", "u8"), ("stride", "i8"), ("part", "i8")])
_FACTORS = pointers("row_height a u column_height v shared")
_FACTOR_SOURCES = pointers("row_height a at_positive column_height b column_positive")
_FACTOR_TARGETS = pointers("row_height a u column_height v")
_POSITIVES = np.dtype(
    [("gradient", "u8"), ("partner", "u8"), ("start", "u8"), ("by_partner", "i8"),
     ("z", MATRIX), ("factor", "u8"), ("exponent", "u8")]
)  # fmt: skip
_RANGES_SHARED = 16  # offset of Ranges::shared
NARROW_ROW = 128  # features of rows that share a warp, two by two: HALF_WARP_ROW of rows.cu


@cache  # all of them: plans keep where they are
def _number(value: float, real: np.dtype[Any]) -> tuple[Array, int]:
    """A factor of a product, and where it is."""
    number = np.array(value, real)
    return number, number.ctypes.data


class GradientFold(Fold):
    """Panels of dL/dx, and the products that make dQ and dK of them."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, phase: str,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, phase)
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
        # elements from row to row of the panel, and from part to part of a row
        self.panel_part = config.panel_stride(self.columns, context.precision)
        self.stride = context.parts * self.panel_part
        if context.needs.gradient:
            self.panel = context.scratch.take((context.needs.panel(self.rows, self.columns, d),))
        if problem.symmetric and self.by_columns:  # rows gather what columns bring, and the reverse
            self.of_rows = self.of_columns = self.accumulator(
                gradients.query, context.query_in_place, slice(0, problem.shape[0]), d,
                context.cut.lent,
            )  # fmt: skip
            return
        if self.by_rows:
            self.of_rows = self.accumulator(
                gradients.query, context.query_in_place, slice(0, self.rows), d
            )
        if self.by_columns:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            self.of_columns = self.accumulator(
                gradients.key, context.key_in_place, keys, d, context.cut.lent
            )

    def accumulator(
        self, out: Array, in_place: bool, rows: slice, d: int, lent: int = 0
    ) -> Accumulator:
        if in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        before = None
        if lent:
            before = Accumulator(cupy.ndarray((lent, d), self.context.real, out.data), d, 0)
        first = rows.start + lent
        made = self.context.scratch.take((rows.stop - first, d), self.context.real)
        return Accumulator(made, d, first, before)

    @property
    def panel_struct(self) -> Any:
        if self.gradients is None:
            return struct(_PANEL, 0, 0, 0)
        return struct(_PANEL, self.panel.data.ptr, self.stride, self.panel_part)

    def panel_map(self, rows: int) -> Any:
        """The panel as a sweep writes it: 16 rows of 128 bytes at a time."""
        if self.gradients is None:
            return np.zeros(SIZE, np.uint8).view(f"V{SIZE}")
        item = self.context.item
        return self.launcher.queue.tensor_map(
            self.panel.data.ptr, rows, self.stride * item, self.stride * item, 16,
            self.context.precision,
        )  # fmt: skip

    def multiply(self, rows: slice, columns: slice, a: int, b: int) -> None:
        """dQ_a += P K_b and dK_b += P' Q_a."""
        q, k, diagonal = self.q, self.k, self.problem.symmetric and rows == columns
        d = self.problem.shape[2]
        if self.of_rows is not None:
            of = self.of_rows
            if not self.symmetric_sweep and not self.context.query_in_place:
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
        precision, item, real = self.context.precision, self.context.item, self.context.real
        given, made = CUDA_TYPE[precision], CUDA_TYPE["fp64" if precision == "fp64" else "fp32"]
        for panel_part, z_part in PRODUCTS[self.context.parts]:
            large = panel_part == z_part == 0
            longest = LONGEST_SUM.get(precision, k) if large else k
            unit = 1 / LOW_UNITS.get(precision, 1.0) if panel_part else 1.0
            for start in range(0, k, longest):
                at = panel_part * self.panel_part + start * (1 if op == OP_N else self.stride)
                terms = min(longest, k - start)
                if large and precision in LONGEST_SUM:
                    unit = 1 + LOST_BY_PRODUCTS * config.lost(precision, terms * item)
                self.launcher.queue.gemm(
                    OP_N, op, d, n, terms, _number(unit, real)[1],
                    z.data + (z_part * z.part + start * z.stride) * item, given, z.stride,
                    self.panel.data.ptr + at * item, given, self.stride,
                    _number(0.0 if first else 1.0, real)[1], out.pointer(row), made,
                    out.stride, COMPUTE[precision], -1,
                )  # fmt: skip
                first = False

    def end_rows(self, rows: slice) -> None:
        if self.of_rows is not None and not self.symmetric_sweep:
            assert self.gradients is not None
            self.finish(self.of_rows, rows, self.gradients.query)

    def end(self) -> None:
        """What all panels gather is complete. What lies in its own destination passes through the
        panel's memory, first rows first: they take the place of rows that have left."""
        acc, gradients = self.of_columns, self.gradients
        if acc is None:
            return
        assert gradients is not None
        out: Array = gradients.query if acc is self.of_rows else gradients.key
        if acc.before is not None:
            row_bytes = out.shape[1] * out.dtype.itemsize
            for rows in problems.cut(acc.first, self.panel.nbytes // row_bytes):
                to = out[rows]
                passing = cupy.ndarray(to.shape, to.dtype, self.panel.data)
                self.finish(acc, rows, passing, rows.start)
                self.launcher.queue.copy(to.data, passing.data, to.nbytes)
        self.finish(acc, slice(acc.first, self.grid.columns[-1].stop), out)

    def finish(self, acc: Accumulator, rows: slice, out: Array, first: int = 0) -> None:
        """Rows' gradients are complete: positives, units, normalisation, destination, which begins
        with row `first`."""
        context, problem, gradients = self.context, self.problem, self.gradients
        assert gradients is not None
        n, d = rows.stop - rows.start, problem.shape[2]
        if acc is self.of_rows:
            side, other, dots, add = context.query, context.key, gradients.dots, gradients.add_query
            partners = address(problem.positives), 0, 0
        else:
            side, other, add = context.key, context.query, False
            dots = None if gradients.want_query else gradients.dots
            partners = 0, 0, 1
            if not context.square:
                order, start = context.queries_of_keys(problem)
                partners = address(order), address(start), 1
        positives = struct(
            _POSITIVES, address(self.at_positive), *partners, *matrix_fields(other.features),
            address(other.factor), address(other.exponent),
        )  # fmt: skip
        warps = -(-n // 2) if d <= NARROW_ROW else n
        self.launcher.rows_kernel(
            "finish", warps, acc.pointer(rows.start), acc.stride, rows.start, n, d,
            matrix(side.features),
            address(side.factor), address(side.exponent), positives, self.unit, self.unit_step,
            other.shift, address(dots), matrix(out, -first), int(add),
        )  # fmt: skip

    def find_ranges(self, sources: Any, m: int, n: int) -> None:
        """The unit in which panels are written, and whether one exponential serves both sides."""
        largest = LARGEST_ELEMENT.get(self.context.precision, 1.0)
        kernel = self.launcher.kernel("vectors.cu", "ranges")
        kernel((1,), (1024,), (sources, m, n, largest, self.unit))


class SoftmaxFold(GradientFold):
    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        m, n, _ = problem.shape
        given = [
            None if v is None else cupy.ascontiguousarray(v, dtype=np.float64)
            for v in (epilogue.row_height, epilogue.row_factor, epilogue.positive,
                      epilogue.column_height, epilogue.column_factor, epilogue.column_positive)
        ]  # fmt: skip
        self.two_sided = epilogue.column_height is not None
        sources = struct(_FACTOR_SOURCES, *map(address, given))
        self.find_ranges(sources, m, n)
        self.at_positive = given[2]
        self.by_row = cupy.empty((3, m), context.real)  # height, a, u
        self.by_column = cupy.empty((2, n), context.real) if self.two_sided else None  # height, v
        targets = [address(v) for v in self.by_row]
        targets += [0, 0] if self.by_column is None else [address(v) for v in self.by_column]
        self.launcher.vector_kernel(
            "factors", max(m, n), sources, m, n, context.logit_scale_struct, self.unit,
            struct(_FACTOR_TARGETS, *targets), int(isinstance(self.tile, config.Sweep)),
        )  # fmt: skip

    def factors(self, rows: slice, columns: slice) -> Any:
        item = self.context.real.itemsize
        of_rows = [address(v) + rows.start * item for v in self.by_row]
        of_columns = [0, 0]
        if self.by_column is not None:
            of_columns = [address(v) + columns.start * item for v in self.by_column]
        return struct(_FACTORS, *of_rows, *of_columns, self.unit.data.ptr + _RANGES_SHARED)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        arguments = self.factors(rows, columns), self.panel_struct
        self.launch("gradient", rows, columns, arguments, COLUMNS=int(self.two_sided))
        self.multiply(rows, columns, a, b)


class NarrowFold(SoftmaxFold):
    """The same for narrow rows that are queries and keys: no panels, and the whole square, as each
    row gathers its own gradient."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue, gradients)
        assert context.narrow is not None
        self.tile = context.narrow

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        of = self.of_rows
        assert of is not None
        if not self.context.query_in_place:
            of.first = rows.start  # the block's own rows are all that it holds
        arguments = (
            self.factors(rows, columns), of.pointer(rows.start), of.stride,
            self.problem.shape[2], int(b > 0),
        )  # fmt: skip
        self.launch("narrow", rows, columns, arguments, COLUMNS=int(self.two_sided))


class OnlineFold(GradientFold):
    """Sums of 2^(x2 - height), and the same times keys, under heights that follow the logits."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: OnlineSoftmax,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        assert context.sweep is not None
        self.epilogue, self.sweep = epilogue, context.sweep
        m = problem.shape[0]
        # At 0 unit rows need no other height while their largest logit is within +-40 or so
        self.heights = self.launcher.queue.zeros(m, context.real)
        self.wanted = cupy.empty(-(-self.rows // config.BLOCK_M), np.int32)  # panels, once more
        self.unit, self.unit_step = cupy.empty(m), 1
        self.at_positive = cupy.empty(m)
        sums = context.sweep.row_sums(self.rows, self.columns)
        self.pairs = context.scratch.take((sums, 2), context.real)

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        n, d, start = rows.stop - rows.start, self.problem.shape[2], rows.start
        sums, heights = self.epilogue.rows, address(self.heights, start)
        sum_of_rows = address(sums.sum, start)

        def sweep(wanted: Any, segments: int) -> int:
            """Returns how many pairs a row has then."""
            arguments = (
                heights, sum_of_rows, address(self.epilogue.positive, start), self.pairs,
                n, wanted, self.panel_struct,
            )  # fmt: skip
            self.launch("online", rows, columns, arguments, segments=segments)
            return self.sweep.segment_slots * segments

        acc, acc_stride = 0, 0
        if b > 0 and self.of_rows is not None:
            acc, acc_stride = self.of_rows.pointer(start), self.of_rows.stride
        slots = sweep(0, self.sweep.segments(n, self.k.rows))
        self.panels_kernel(
            "check_heights", n, self.pairs, slots, n, self.context.logit_scale_struct, heights,
            sum_of_rows, acc, acc_stride, d, self.wanted,
        )  # fmt: skip
        # Panels whose heights were no good: mostly none, or a few that all multiprocessors share
        slots = sweep(self.wanted, self.sweep.most_segments(n, self.k.rows))
        self.panels_kernel("add_wanted", n, self.pairs, slots, n, sum_of_rows, self.wanted)
        self.multiply(rows, columns, a, b)

    def panels_kernel(self, name: str, n: int, *arguments: Any) -> None:
        """A block a panel of rows, four threads a row."""
        kernel = self.launcher.kernel("vectors.cu", name)
        kernel((-(-n // config.BLOCK_M),), (4 * config.BLOCK_M,), arguments)

    def end_rows(self, rows: slice) -> None:
        start, n, sums = rows.start, rows.stop - rows.start, self.epilogue.rows
        self.launcher.vector_kernel(
            "end_online", n, address(self.heights, start),
            struct(SUMS, address(sums.max, start), address(sums.sum, start)),
            address(self.epilogue.positive, start), address(self.problem.upstream, start),
            address(self.context.query.factor, start), n,
            float(self.problem.row_weight), self.context.logit_scale_struct,
            address(self.unit, start), address(self.at_positive, start),
        )  # fmt: skip
        super().end_rows(rows)


class SigmoidFold(GradientFold):
    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: Sigmoid,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        self.epilogue = epilogue
        m, n, _ = problem.shape
        factor = cupy.ascontiguousarray(epilogue.row_factor, dtype=np.float64)
        self.find_ranges(struct(_FACTOR_SOURCES, 0, address(factor), 0, 0, 0, 0), m, n)
        self.factor, self.at_positive = factor, cupy.empty(m)
        self.row_factor = cupy.empty(m, context.real)
        self.launcher.vector_kernel("per_unit", m, factor, m, self.unit, self.row_factor)
        self.sums = context.scratch.take(
            (self.tile.row_sums(self.rows, self.columns), 2), context.real
        )

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        context, epilogue, n = self.context, self.epilogue, rows.stop - rows.start
        arguments = (
            struct(SCALAR, *context.bias), address(self.row_factor, rows.start),
            address(epilogue.positive, rows.start), self.sums, n,
            self.panel_struct,
        )  # fmt: skip
        panel = int(self.gradients is not None)
        self.launch("sigmoid", rows, columns, arguments, PANEL=panel)
        slots = self.tile.row_slots(n, self.k.rows)
        self.launcher.vector_kernel(
            "add_pairs", n, self.sums, slots, n, n,
            self.unit, address(epilogue.losses, rows.start),
            address(epilogue.bias_grad, rows.start),
        )  # fmt: skip
        if self.gradients is not None:
            self.multiply(rows, columns, a, b)

    def end_rows(self, rows: slice) -> None:
        start, n = rows.start, rows.stop - rows.start
        self.launcher.vector_kernel(
            "sigmoid_positives", n, address(self.epilogue.positive, start),
            address(self.factor, start), address(self.problem.positives, start), n,
            struct(SCALAR, *self.context.bias), address(self.at_positive, start),
            address(self.epilogue.losses, start), address(self.epilogue.bias_grad, start),
        )  # fmt: skip
        super().end_rows(rows)
