"""The run of a gradient pass: gradient blocks P = dL/dx, and their products dQ and dK."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ...epilogues import SoftmaxGradient
from ...grid import slices
from ...problem import LOG2_E, Array, Gradients, Problem
from .. import config, schedule
from ..device.arguments import Fields, address, matrix
from ..linear import linear_gradients
from ..schedule import CACHED_BLOCK_COLUMNS, ScheduledPass
from .buffers import Buffers
from .gradient_blocks import (
    NO_GRADIENT_BLOCK,
    RANGE_THREADS,
    SOURCES,
    Accumulator,
    CachedExponentials,
    Factors,
    GradientBlock,
    find_ranges,
    new_ranges,
)
from .operands import Operand
from .run import PassRun

# A gradient block is divided by its gradient divisor, which brings the largest element near this
# number, because float16 overflows at 65504. The factors that normalise two rows are at most 2
# each: 8192 x 2 x 2 = 32768
LARGEST_ELEMENT = {"fp16": 8192.0, "fp16x3": 8192.0}
# cuBLAS's names for types and for the arithmetic of a product
CUDA_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "fp16x3": 2, "bf16": 14, "bf16x3": 14}
COMPUTE = {"fp64": 70, "fp32": 69, "tf32": 77, "fp16": 68, "fp16x3": 68, "bf16": 68, "bf16x3": 68}
OP_N, OP_T = 0, 1


@cache  # the arrays are never freed, because plans hold their addresses
def _host_number(value: float, real: np.dtype[Any]) -> tuple[Array, int]:
    """A factor of a cuBLAS product as an array in host memory, and its address."""
    number = np.array(value, real)
    return number, number.ctypes.data


class GradientRun(PassRun):
    """Gradient blocks P, and their products dQ += P K and dK += P' Q."""

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, phase: str,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, phase)
        self.gradients = gradients
        # struct Ranges, whose first number is the gradient divisor
        self.ranges = new_ranges()
        # [M] if each row of dQ has a gradient divisor of its own
        self.row_divisors: Array = None
        self.positive_gradient: Array = None  # [M] scale * dL/dx at positives
        # struct LinearGradients of queries (False) and of keys (True)
        self.linear: dict[bool, Fields] = {}
        self.dq_accumulator = self.dk_accumulator = None
        # blocks of accumulators to which products have been added: (whether of dK, block)
        self.begun: set[tuple[bool, int]] = set()
        if buffers.cached is not None:
            self.gradient_block = buffers.cached.block
        elif "gradient_block" in self.memory:
            self.gradient_block = GradientBlock(
                self.memory["gradient_block"], self.columns, buffers.precision
            )
        if gradients is None or not scheduled.gradients:
            return
        dq = dk = self.accumulator(scheduled.dq_accumulator, gradients.query, "dq_accumulator")
        if scheduled.dk_accumulator is not scheduled.dq_accumulator:
            dk = self.accumulator(scheduled.dk_accumulator, gradients.key, "dk_accumulator")
        self.dq_accumulator, self.dk_accumulator = dq, dk

    def accumulator(
        self, rows: schedule.AccumulatorRows | None, out: Array, name: str
    ) -> Accumulator | None:
        """The accumulator `name` of the workspace, or `out` itself, as the schedule says."""
        if rows is None:
            return None
        if rows.in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        overlay, width, real = None, self.buffers.operands.gradient_width, self.buffers.real
        if rows.overlaid:
            overlay = Accumulator(cupy.ndarray((rows.overlaid, width), real, out.data), width, 0)
        shape = rows.dq_copies, rows.rows, width
        memory = cupy.ndarray(shape, real, self.memory[name].data)
        return Accumulator(memory, width, rows.first_row, overlay, rows.dq_copies)

    def gradient_arguments(self) -> Fields:
        """The arguments of a sweep that describe the gradient block."""
        if not self.scheduled.gradients:
            return NO_GRADIENT_BLOCK
        tensor_map = self.gradient_block.map(self.launcher.queue, self.q.rows)
        return {"gradient_block": self.gradient_fields(), "gradient_map": tensor_map}

    def gradient_fields(self) -> Any:
        """The argument of a tiled kernel that describes the gradient block."""
        if not self.scheduled.gradients:
            return NO_GRADIENT_BLOCK["gradient_block"]
        return self.gradient_block.fields

    def multiply(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        """dQ += P K for the rows of a block, and dK += P' Q for its columns."""
        self.add_to_rows(rows, row_block)
        if not (self.problem.symmetric and rows == columns):
            is_first = self.begins(self.dk_accumulator, column_block)
            self.add_to_columns(self.q, columns, is_first)

    def begins(self, accumulator: Accumulator | None, block: int) -> bool:
        """Whether nothing has been added to a block of an accumulator. The block is begun then.

        In a triangle, dQ and dK have one accumulator.
        """
        accumulator_block = accumulator is self.dk_accumulator, block
        is_first = accumulator_block not in self.begun
        self.begun.add(accumulator_block)
        return is_first

    def add_to_rows(self, rows: slice, row_block: int) -> None:
        """dQ += P K for the rows of a block."""
        accumulator = self.dq_accumulator
        if accumulator is None:
            return
        self.begin_rows(accumulator, rows)
        is_first = self.begins(accumulator, row_block)
        for keys in self.key_ranges():
            self.product(
                OP_N, keys, self.k, accumulator, rows.start, is_first and keys.start == 0
            )  # fmt: skip

    def begin_rows(self, accumulator: Accumulator, rows: slice) -> None:
        """Let the accumulator of dQ begin at `rows`, if it holds the rows of one block only."""
        memory = self.scheduled.dq_accumulator
        if not (self.grid.triangle or memory is None or memory.in_place):
            accumulator.first = rows.start

    def add_to_columns(self, queries: Operand, columns: slice, is_first: bool) -> None:
        """dK += P' Q for the columns of a block; `is_first`: nothing has been added before."""
        accumulator = self.dk_accumulator
        if accumulator is None:
            return
        for keys in self.key_ranges(accumulator.first - columns.start):
            self.product(
                OP_T, keys, queries, accumulator, columns.start + keys.start, is_first
            )  # fmt: skip

    def key_ranges(self, border: int = 0) -> list[slice]:
        """The keys of the block, divided as `divide_keys` says."""
        operands = self.buffers.operands
        return schedule.divide_keys(
            self.q.rows, self.k.rows, operands.gradient_width, operands.precision, border
        )

    def product(
        self, op: int, keys: slice, features: Operand, accumulator: Accumulator, row: int,
        is_first: bool,
    ) -> None:  # fmt: skip
        """Add P K (OP_N) or P' Q (OP_T) of some `keys` of the block to an accumulator.

        `features` is K or Q. The sum is in the accumulator's rows from `row` on, and is overwritten
        if the product `is_first`. cuBLAS stores matrices column by column, so its arguments
        describe the transposes: K' P' or Q' P.
        """
        n, k, first_feature_row = self.q.rows, keys.stop - keys.start, keys.start
        if op == OP_T:
            n, k, first_feature_row = k, n, 0
        operands, real, block = self.buffers.operands, self.buffers.real, self.gradient_block
        precision, item, width = operands.precision, operands.item, operands.gradient_width
        operand_type = CUDA_TYPE[precision]
        sum_type = CUDA_TYPE["fp64" if precision == "fp64" else "fp32"]
        term_stride = 1 if op == OP_N else block.stride  # elements of P from term to term
        for product in schedule.divide_terms(precision, k, accumulator.dq_copies, is_first):
            batch = (
                product.terms * features.stride, product.terms * term_stride,
                accumulator.copy_stride, product.batch,
            )  # fmt: skip
            copy_offset = product.dq_copy * accumulator.copy_stride * real.itemsize
            first_feature = product.feature_part * features.part
            first_feature += (first_feature_row + product.start) * features.stride
            first_element = product.gradient_part * block.part
            first_element += keys.start + product.start * term_stride
            self.launcher.queue.gemm(
                OP_N, op, width, n, product.terms, _host_number(product.factor, real)[1],
                features.data + first_feature * item, operand_type, features.stride,
                block.data + first_element * item, operand_type,
                block.stride, _host_number(0.0 if product.is_first else 1.0, real)[1],
                accumulator.pointer(row) + copy_offset,
                sum_type, accumulator.stride,
                COMPUTE[precision], -1, *(batch if product.batch > 1 else ()),
            )  # fmt: skip

    def end_rows(self, rows: slice) -> None:
        if self.dq_accumulator is not None and not self.grid.triangle:
            assert self.gradients is not None
            self.finish(self.dq_accumulator, rows, self.gradients.query)

    def end(self) -> None:
        """Complete dK after all blocks have added to it.

        Rows that overlay their destination are converted in the memory of the gradient block, in
        ascending order, so that they overwrite only accumulators that are complete already.
        """
        accumulator, gradients = self.dk_accumulator, self.gradients
        accumulator_rows = self.scheduled.dk_accumulator
        if accumulator is None or accumulator_rows is None:
            return
        assert gradients is not None
        out: Array = gradients.query if accumulator is self.dq_accumulator else gradients.key
        for rows in slices(
            accumulator_rows.overlaid, max(1, accumulator_rows.rows_converted_at_once)
        ):
            destination = out[rows]
            memory = self.gradient_block.memory.data
            converted = cupy.ndarray(destination.shape, destination.dtype, memory)
            self.finish(accumulator, rows, converted, rows.start)
            self.launcher.queue.copy(destination.data, converted.data, destination.nbytes)
        self.finish(accumulator, slice(accumulator.first, self.grid.columns[-1].stop), out)

    def finish(
        self, accumulator: Accumulator, rows: slice, out: Array, first: int = 0
    ) -> None:  # fmt: skip
        """Complete the gradients of `rows`, which are queries or keys, and write them to `out`.

        The kernel adds the positives, multiplies by the gradient divisor, and differentiates
        through the normalisation. The first row of `out` is row `first`.
        """
        buffers, problem, gradients = self.buffers, self.problem, self.gradients
        assert gradients is not None
        n, d = rows.stop - rows.start, problem.shape[2]
        gradient_divisor, divisor_step = self.ranges, 0
        if accumulator is self.dq_accumulator:
            if self.row_divisors is not None:
                gradient_divisor, divisor_step = self.row_divisors, 1
            side, other, dots, add = buffers.query, buffers.key, gradients.dots, gradients.add_query
            partners = {"partner": problem.positives, "begin": None, "end": None}
        else:
            side, other, add = buffers.key, buffers.query, False
            dots = None if gradients.want_query else gradients.dots
            order = begin = end = None
            if not buffers.paired:
                order, begin, end = buffers.list_queries_by_key(problem)
            partners = {"partner": order, "begin": begin, "end": end}
        if accumulator.dq_copies > 1:
            sums, size = accumulator.array, accumulator.copy_stride
            self.launcher.vectors(
                "add_copies", size, sums=sums, n=size, copies=accumulator.dq_copies
            )  # fmt: skip
        defines = {"FACTORS": int(problem.normalize)}
        if problem.set_size > 1:
            defines["SETS"] = 1
        linear: dict[str, Any] = {}
        if self.linear:
            defines["LINEAR"] = 1
            linear["linear"] = self.linear[accumulator is not self.dq_accumulator]
        self.launcher.rows(
            "finish", n, d, file="finish.cu", defines=defines, **linear,
            acc=accumulator.pointer(rows.start), acc_stride=accumulator.stride,
            first=rows.start, n=n, d=d, z=matrix(side.features), factor=side.factor,
            exponent=side.exponent,
            positives={
                "gradient": self.positive_gradient, **partners, "set_size": problem.set_size,
                "others": len(other.features), "z": matrix(other.features), "factor": other.factor,
                "exponent": other.exponent,
            },
            gradient_divisor=gradient_divisor, divisor_step=divisor_step,
            feature_divisor=other.feature_divisor, dots=dots, out=matrix(out, -first), add=add,
        )  # fmt: skip

    def find_ranges(self, m: int, n: int, by_factor: bool = False, **vectors: Array) -> None:
        """Find the gradient divisor, and whether one exponential serves rows and columns.

        The divisor is a bound of abs(dL/dx) divided by `LARGEST_ELEMENT`. Then float16 does not
        overflow, and only elements that are 2^-37 of the bound or less underflow.
        """
        largest = LARGEST_ELEMENT.get(self.buffers.precision, 1.0)
        set_size = self.problem.set_size
        find_ranges(self.launcher, (m, n), vectors, self.ranges, largest, by_factor, set_size)


class SoftmaxRun(GradientRun):
    """The gradient of a softmax, whose log-sum-exps are known.

    If narrow rows are queries and keys at once, dL/dx stays in registers. Then the run visits the
    whole square of blocks, and each row accumulates only its own gradient.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass,
        epilogue: SoftmaxGradient, gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        m, n, _ = problem.shape
        vectors = (getattr(epilogue, name) for name in SOURCES)
        sources: dict[str, Array] = {  # kernels read contiguous float64
            name: None if vector is None else cupy.ascontiguousarray(vector, dtype=np.float64)
            for name, vector in zip(SOURCES, vectors, strict=True)
        }
        pairs = self.pair_vectors
        if pairs is not None:
            for name, bias in (("row", pairs.row_bias), ("column", pairs.column_bias)):
                reference = sources[f"{name}_reference"]
                if bias is not None and reference is not None:
                    biased = cupy.empty(len(bias))
                    buffers.add_bias(reference, bias, LOG2_E, biased)
                    sources[f"{name}_reference"] = biased
        # dL/dx at a positive bounds its row of the gradient block, unless the row has several
        # positives or linear terms
        bounded_by_positive = not epilogue.linear and problem.set_size == 1
        self.find_ranges(m, n, by_factor=not bounded_by_positive, **sources)
        self.positive_gradient = sources["positive_gradient"]
        if epilogue.linear:
            sides = (False, scheduled.dq_accumulator), (True, scheduled.dk_accumulator)
            self.linear = {
                is_key_side: linear_gradients(
                    epilogue.linear, *buffers.linear_rows, is_key_side, problem.symmetric
                )
                for is_key_side, wanted in sides
                if wanted is not None and not (is_key_side and problem.symmetric)
            }
        column_reference = sources["column_reference"]
        if column_reference is not None and problem.compares_with_limits:
            self.launcher.launch(
                "vectors.cu", "check_spread", 1, RANGE_THREADS,
                {"row_reference": sources["row_reference"], "column_reference": column_reference,
                 "m": m, "n": n, "out": self.ranges},
            )  # fmt: skip
        self.factors = Factors(
            self.launcher, buffers.real, (m, n), sources, self.scale, self.ranges
        )

    def block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        factors, cached = self.factors.fields(rows, columns), self.buffers.cached
        visited_tiles = None
        if self.scheduled.in_registers:
            self.add_in_registers(rows, columns, row_block, factors)
            return
        if cached is not None:
            self.gradient_block = cached.block
            if cached.has(columns):
                self.gradient_block = cached.block.from_column(columns.start)
                visited_tiles = cached.uncached_tiles
                self.from_cached(cached, rows, columns, factors)
        arguments: Fields = {"factors": factors}
        if isinstance(self.shape, config.Tile):
            arguments["gradient_block"] = self.gradient_block.fields
        else:
            arguments |= {**self.gradient_arguments(), "visited_tiles": visited_tiles}
        self.launch(self.scheduled.kernel, rows, columns, arguments)
        self.multiply(rows, columns, row_block, column_block)

    def from_cached(
        self, cached: CachedExponentials, rows: slice, columns: slice, factors: Fields
    ) -> None:
        """Compute the gradient block from cached exponentials.

        The sweep computes the query tiles without a cache, `cached.uncached_tiles`.
        """
        kernel = self.scheduled.cached_kernel
        strips, n = -(-self.q.rows // config.STRIP), self.k.rows
        assert kernel is not None
        self.launcher.run(
            kernel, strips * -(-n // CACHED_BLOCK_COLUMNS),
            {
                "b": self.block_fields(rows, columns, False), "f": factors,
                "gradient_block": self.gradient_block.fields, "reference_stride": cached.tiles,
                "strips": strips,
                "references": address(cached.references) + 4 * (columns.start // config.BLOCK_M),
            },
        )  # fmt: skip

    def add_in_registers(
        self, rows: slice, columns: slice, row_block: int, factors: Fields
    ) -> None:  # fmt: skip
        """dQ += dL/dx K for the rows of a block, without a gradient block in memory."""
        accumulator = self.dq_accumulator
        assert accumulator is not None
        self.begin_rows(accumulator, rows)
        arguments = {
            "factors": factors, "out": accumulator.pointer(rows.start),
            "stride": accumulator.stride, "columns": self.problem.shape[2],
            "add": not self.begins(accumulator, row_block),
        }  # fmt: skip
        self.launch(self.scheduled.kernel, rows, columns, arguments)
