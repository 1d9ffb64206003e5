"""The gradient fold: gradient blocks (dL/dx of a block), and the products that use them."""

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
from ..device.signatures import structure
from ..linear import linear_gradients
from ..schedule import CACHED_COLUMNS, Fold
from .buffers import Buffers
from .fold import FoldRun
from .operands import NO_GRADIENT_BLOCK, Accumulator, CachedExponentials, GradientBlock, Operand

# A gradient block is divided by its gradient divisor, which brings the largest element near this
# number, because float16 overflows at 65504. Factors of normalised rows are at most 2 each:
# 8192 x 2 x 2 = 32768
LARGEST_ELEMENT = {"fp16": 8192.0, "fp16x3": 8192.0}
# cuBLAS's names for types and for the arithmetic of a product
CUDA_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "fp16x3": 2, "bf16": 14, "bf16x3": 14}
COMPUTE = {"fp64": 70, "fp32": 69, "tf32": 77, "fp16": 68, "fp16x3": 68, "bf16": 68, "bf16x3": 68}
OP_N, OP_T = 0, 1
# struct FactorSources: vectors of the epilogue
SOURCES = tuple(name for name, _ in structure("vectors.cu", "FactorSources").fields)
RANGES, RANGE_THREADS = structure("vectors.cu", "Ranges"), 1024


@cache  # kept for good: plans hold their addresses
def _host_number(value: float, real: np.dtype[Any]) -> tuple[Array, int]:
    """A factor of a product in the host's memory, and its address."""
    number = np.array(value, real)
    return number, number.ctypes.data


class GradientRun(FoldRun):
    """Gradient blocks, and the products that make dQ and dK of them."""

    def __init__(
        self, buffers: Buffers, problem: Problem, fold: Fold, phase: str,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, fold, phase)
        self.gradients = gradients
        # struct Ranges, whose first number is the gradient divisor
        self.ranges = cupy.empty(RANGES.size // 8)
        # [M] if each row of dQ has a gradient divisor of its own
        self.row_divisors: Array = None
        self.positive_gradient: Array = None  # [M] dL/dx at positives, with `scale` folded in
        self.linear: dict[
            bool, Fields
        ] = {}  # struct LinearGradients of queries, and of keys (True)
        self.dq_accumulator = self.dk_accumulator = None
        self.begun: set[tuple[bool, int]] = set()  # see `begins`
        if buffers.cached is not None:
            self.gradient_block = buffers.cached.block
        elif "gradient_block" in self.memory:
            self.gradient_block = GradientBlock(
                self.memory["gradient_block"], self.columns, buffers.precision
            )
        if gradients is None or not fold.gradients:
            return
        dq = dk = self.accumulator(fold.dq_accumulator, gradients.query, "dq_accumulator")
        if fold.dk_accumulator is not fold.dq_accumulator:
            dk = self.accumulator(fold.dk_accumulator, gradients.key, "dk_accumulator")
        self.dq_accumulator, self.dk_accumulator = dq, dk

    def accumulator(
        self, rows: schedule.AccumulatorRows | None, out: Array, name: str
    ) -> Accumulator | None:
        if rows is None:
            return None
        if rows.in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        before, width, real = None, self.buffers.operands.gradient_width, self.buffers.real
        if rows.overlaid:
            before = Accumulator(cupy.ndarray((rows.overlaid, width), real, out.data), width, 0)
        shape = rows.copies, rows.rows, width
        memory = cupy.ndarray(shape, real, self.memory[name].data)
        return Accumulator(memory, width, rows.first_row, before, rows.copies)

    def gradient_arguments(self) -> Fields:
        """The gradient block, as a sweep takes it."""
        if not self.fold.gradients:
            return NO_GRADIENT_BLOCK
        tensor_map = self.gradient_block.map(self.launcher.queue, self.q.rows)
        return {"gradient_block": self.gradient_fields(), "gradient_map": tensor_map}

    def gradient_fields(self) -> Any:
        """The gradient block, as tiles take it."""
        if not self.fold.gradients:
            return NO_GRADIENT_BLOCK["gradient_block"]
        return self.gradient_block.fields

    def multiply(self, rows: slice, columns: slice, a: int, b: int) -> None:
        """dQ_a += P K_b and dK_b += P' Q_a."""
        self.add_to_rows(rows, a)
        if not (self.problem.symmetric and rows == columns):
            self.add_to_columns(self.q, columns, self.begins(self.dk_accumulator, b))

    def begins(self, to: Accumulator | None, block: int) -> bool:
        """Whether a block of rows, or of keys, is the first time in the accumulator: what it holds
        is then overwritten. In a triangle, rows and keys have one accumulator."""
        key = to is self.dk_accumulator, block
        first = key not in self.begun
        self.begun.add(key)
        return first

    def add_to_rows(self, rows: slice, a: int) -> None:
        """dQ_a += P K_b."""
        to = self.dq_accumulator
        if to is None:
            return
        self.begin_rows(to, rows)
        first = self.begins(to, a)
        for keys in self.key_ranges():
            self.product(OP_N, keys, self.k, to, rows.start, first and keys.start == 0)

    def begin_rows(self, to: Accumulator, rows: slice) -> None:
        """An accumulator in the workspace holds the rows of one block, or all rows."""
        wanted = self.fold.dq_accumulator
        if not (self.grid.triangle or wanted is None or wanted.in_place):
            to.first = rows.start

    def add_to_columns(self, q: Operand, columns: slice, first: bool) -> None:
        """dK_b += P' Q_a, with the rows of Q_a in `q`, which are the `first`."""
        to = self.dk_accumulator
        if to is None:
            return
        for keys in self.key_ranges(to.first - columns.start):
            self.product(OP_T, keys, q, to, columns.start + keys.start, first)

    def key_ranges(self, border: int = 0) -> list[slice]:
        operands = self.buffers.operands
        return schedule.key_ranges_of_products(
            self.q.rows, self.k.rows, operands.gradient_width, operands.precision, border
        )

    def product(
        self, op: int, keys: slice, z: Operand, out: Accumulator, row: int, first: bool
    ) -> None:  # fmt: skip
        """Of `keys` of the block, P K to the rows of `out` from `row` on, or P' Q, with K or Q in
        `z`; added to what is there unless it is the `first`. cuBLAS counts columns first: there all
        this is the transpose, out' = K' P' or Q' P."""
        n, k, first_row = self.q.rows, keys.stop - keys.start, keys.start
        if op == OP_T:
            n, k, first_row = k, n, 0
        operands, real, block = self.buffers.operands, self.buffers.real, self.gradient_block
        precision, item, width = operands.precision, operands.item, operands.gradient_width
        operand_type, sum_type = (
            CUDA_TYPE[precision],
            CUDA_TYPE["fp64" if precision == "fp64" else "fp32"],
        )
        apart = 1 if op == OP_N else block.stride  # elements from term to term
        for of in schedule.products(precision, k, out.copies, first):
            batch = of.terms * z.stride, of.terms * apart, out.copy_stride, of.batch
            features = of.feature_part * z.part + (first_row + of.start) * z.stride
            elements = of.gradient_part * block.part + keys.start + of.start * apart
            self.launcher.queue.gemm(
                OP_N, op, width, n, of.terms, _host_number(of.factor, real)[1],
                z.data + features * item, operand_type, z.stride,
                block.data + elements * item, operand_type,
                block.stride, _host_number(0.0 if of.is_first else 1.0, real)[1],
                out.pointer(row) + of.copy * out.copy_stride * real.itemsize, sum_type, out.stride,
                COMPUTE[precision], -1, *(batch if of.batch > 1 else ()),
            )  # fmt: skip

    def end_rows(self, rows: slice) -> None:
        if self.dq_accumulator is not None and not self.grid.triangle:
            assert self.gradients is not None
            self.finish(self.dq_accumulator, rows, self.gradients.query)

    def end(self) -> None:
        """All blocks have added to dK. Rows that overlay their destination are converted in the
        gradient block, in ascending order: they overwrite only accumulators already read."""
        acc, gradients, wanted = self.dk_accumulator, self.gradients, self.fold.dk_accumulator
        if acc is None or wanted is None:
            return
        assert gradients is not None
        out: Array = gradients.query if acc is self.dq_accumulator else gradients.key
        for rows in slices(wanted.overlaid, max(1, wanted.rows_passing)):
            to = out[rows]
            passing = cupy.ndarray(to.shape, to.dtype, self.gradient_block.memory.data)
            self.finish(acc, rows, passing, rows.start)
            self.launcher.queue.copy(to.data, passing.data, to.nbytes)
        self.finish(acc, slice(acc.first, self.grid.columns[-1].stop), out)

    def finish(self, acc: Accumulator, rows: slice, out: Array, first: int = 0) -> None:
        """Completes the gradients of `rows`, of queries or of keys: adds the positives, multiplies
        by the gradient divisor, differentiates through the normalisation, and writes to
        `out`, whose first row is row `first`."""
        buffers, problem, gradients = self.buffers, self.problem, self.gradients
        assert gradients is not None
        n, d = rows.stop - rows.start, problem.shape[2]
        gradient_divisor, divisor_step = self.ranges, 0
        if acc is self.dq_accumulator:
            if self.row_divisors is not None:
                gradient_divisor, divisor_step = self.row_divisors, 1
            side, other, dots, add = buffers.query, buffers.key, gradients.dots, gradients.add_query
            partners = {"partner": problem.positives, "begin": None, "end": None}
        else:
            side, other, add = buffers.key, buffers.query, False
            dots = None if gradients.want_query else gradients.dots
            order = begin = end = None
            if not buffers.has_pairs:
                order, begin, end = buffers.queries_of_keys(problem)
            partners = {"partner": order, "begin": begin, "end": end}
        if acc.copies > 1:
            self.launcher.vectors(
                "add_copies", acc.copy_stride, sums=acc.array, n=acc.copy_stride, copies=acc.copies
            )
        defines = {"FACTORS": int(problem.normalize)}
        if problem.set_size > 1:
            defines["SETS"] = 1
        linear: dict[str, Any] = {}
        if self.linear:
            defines["LINEAR"], linear["linear"] = 1, self.linear[acc is not self.dq_accumulator]
        self.launcher.rows(
            "finish", n, d, file="finish.cu", defines=defines, **linear,
            acc=acc.pointer(rows.start), acc_stride=acc.stride,
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
        """Find the gradient divisor, and whether one exponential serves rows and columns."""
        self.launcher.launch(
            "vectors.cu", "ranges", 1, RANGE_THREADS,
            {
                "f": dict.fromkeys(SOURCES) | vectors, "m": m, "n": n,
                "set_size": self.problem.set_size, "by_factor": by_factor,
                "largest_element": LARGEST_ELEMENT.get(self.buffers.precision, 1.0),
                "out": self.ranges,
            },
        )  # fmt: skip


class SoftmaxRun(GradientRun):
    """The gradient of log-sum-exps that are known. For narrow rows that are queries and keys at
    once, dL/dx stays in registers: the whole square is visited, and each row accumulates its own
    gradient alone."""

    def __init__(
        self, buffers: Buffers, problem: Problem, fold: Fold, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, fold, epilogue.phase, gradients)
        m, n, _ = problem.shape
        given = (getattr(epilogue, name) for name in SOURCES)
        sources: dict[str, Array] = {  # float64 and contiguous, as the kernels take them
            name: None if v is None else cupy.ascontiguousarray(v, dtype=np.float64)
            for name, v in zip(SOURCES, given, strict=True)
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
        one = not epilogue.linear and problem.set_size == 1
        self.find_ranges(m, n, by_factor=not one, **sources)
        self.positive_gradient = sources["positive_gradient"]
        if epilogue.linear:
            sides = (False, fold.dq_accumulator), (True, fold.dk_accumulator)
            self.linear = {
                is_key_side: linear_gradients(
                    epilogue.linear, *buffers.linear_rows, is_key_side, problem.symmetric
                )
                for is_key_side, wanted in sides
                if wanted is not None and not (is_key_side and problem.symmetric)
            }
        columns = sources["column_reference"]
        if columns is not None and pairs is not None and pairs.has_limits:
            self.launcher.launch(
                "vectors.cu", "check_spread", 1, RANGE_THREADS,
                {"row_reference": sources["row_reference"], "column_reference": columns,
                 "m": m, "n": n, "out": self.ranges},
            )  # fmt: skip
        self.row_reference, self.a, self.u = cupy.empty((3, m), buffers.real)
        self.column_reference = self.v = None
        if columns is not None:
            self.column_reference, self.v = cupy.empty((2, n), buffers.real)
        self.launcher.vectors(
            "factors", max(m, n), f=sources, m=m, n=n, scale=self.scale, ranges=self.ranges,
            out={
                "row_reference": self.row_reference, "a": self.a, "u": self.u,
                "column_reference": self.column_reference, "v": self.v,
            },
        )  # fmt: skip

    def factors(self, rows: slice, columns: slice) -> Fields:
        """struct Factors of a block."""
        return {
            "row_reference": address(self.row_reference, rows.start),
            "a": address(self.a, rows.start), "u": address(self.u, rows.start),
            "column_reference": address(self.column_reference, columns.start),
            "v": address(self.v, columns.start),
            "one_exponential": self.ranges.data.ptr + RANGES.offset("one_exponential"),
        }  # fmt: skip

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        factors, cached, wanted = self.factors(rows, columns), self.buffers.cached, None
        if self.fold.in_registers:
            self.add_in_registers(rows, columns, a, factors)
            return
        if cached is not None:
            self.gradient_block = cached.block
            if cached.has(columns):
                self.gradient_block = cached.block.from_column(columns.start)
                wanted = cached.anew
                self.from_cached(cached, rows, columns, factors)
        arguments: Fields = {"factors": factors}
        if isinstance(self.shape, config.Tile):
            arguments["gradient_block"] = self.gradient_block.fields
        else:
            arguments |= {**self.gradient_arguments(), "wanted": wanted}
        self.launch(self.fold.kernel, rows, columns, arguments)
        self.multiply(rows, columns, a, b)

    def from_cached(
        self, cached: CachedExponentials, rows: slice, columns: slice, factors: Fields
    ) -> None:
        """Cached exponentials become the gradient block, except for query tiles that are to be
        computed anew."""
        kernel, strips, n = self.fold.cached_kernel, -(-self.q.rows // config.STRIP), self.k.rows
        assert kernel is not None
        self.launcher.run(
            kernel, strips * -(-n // CACHED_COLUMNS),
            {
                "b": self.block_fields(rows, columns, False), "f": factors,
                "gradient_block": self.gradient_block.fields, "reference_stride": cached.tiles,
                "strips": strips,
                "references": address(cached.references) + 4 * (columns.start // config.BLOCK_M),
            },
        )  # fmt: skip

    def add_in_registers(self, rows: slice, columns: slice, a: int, factors: Fields) -> None:
        """dQ_a += dL/dx K_b, without a gradient block."""
        to = self.dq_accumulator
        assert to is not None
        self.begin_rows(to, rows)
        arguments = {
            "factors": factors, "out": to.pointer(rows.start), "stride": to.stride,
            "columns": self.problem.shape[2], "add": not self.begins(to, a),
        }  # fmt: skip
        self.launch(self.fold.kernel, rows, columns, arguments)
