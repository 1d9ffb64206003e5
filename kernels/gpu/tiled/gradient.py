"""Runs of gradient passes: gradient blocks P = dL/dx, and their products dQ and dK.

`GradientRun` has the products, for all losses, and `SoftmaxRun` the gradient pass after lse.py.
The other subclasses are in one_pass.py and ../distill/run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from ...epilogues import SoftmaxGradient
from ...grid import slices
from ...linear import LinearTerm
from ...problem import LOG2_E, Array, Gradients, Problem
from .. import config, schedule
from ..device.arguments import Fields, address, matrix
from ..device.cublas import ARITHMETIC, ELEMENT_TYPE, OP_N, OP_T, host_number
from ..gradient_factors import (
    FACTOR_SOURCES,
    LARGEST_ELEMENT,
    RANGE_THREADS,
    GradientFactors,
    allocate_ranges,
    find_ranges,
    range_sources,
)
from ..linear import linear_gradients
from ..schedule import CACHED_BLOCK_COLUMNS, ScheduledPass
from .buffers import Buffers
from .operands import NO_GRADIENT_BLOCK, CachedExponentials, GradientBlock, Operand
from .run import PassRun

FEW_FEATURES = 2**23  # of both sides, whose gradients one launch completes; with more it was slower


@dataclass
class Accumulator:
    """Sums of products, dQ or dK before `GradientRun.finish` completes the gradients.

    They are divided by the gradient divisor, as gradient blocks are. A row of dQ is the sum of its
    `dq_copies`, which `finish` adds up.
    """

    array: Array  # [dq_copies, rows, stride], or the destination of the gradients
    stride: int  # elements from row to row
    first_row: int  # of dQ or dK, in `array`
    overlay: Accumulator | None = None  # has rows before `first_row`, in the gradients' memory
    dq_copies: int = 1  # 1 for dK

    @property
    def copy_stride(self) -> int:
        """Elements from a copy to the next copy."""
        return int(self.array.size) // self.dq_copies

    def pointer(self, row: int) -> int:
        """The address of a row of dQ or dK, in its first copy."""
        if self.overlay is not None and row < self.first_row:
            return self.overlay.pointer(row)
        offset = (row - self.first_row) * self.stride * self.array.dtype.itemsize
        return int(self.array.data.ptr + offset)


class GradientRun(PassRun):
    """A pass that computes gradient blocks P, and adds their products: dQ += P K, dK += P' Q.

    A subclass computes P. Without `scheduled.gradients`, the pass only computes losses.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass, phase: str,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, phase)
        self.gradients = gradients
        self.ranges = allocate_ranges()  # struct Ranges, which begins with the gradient divisor
        # [M] gradient divisors of the rows of dQ; None: they have the divisor of `ranges`
        self.row_divisors: Array = None
        # [M] or [M, set_size] scale * dL/dx at positives, which gradient blocks leave out
        self.positive_gradient: Array = None
        # struct LinearGradients by side: of queries (False), of keys (True)
        self.linear_fields: dict[bool, Fields] = {}
        # None: this pass does not compute the gradient. In a triangle, both are the same object
        self.dq_accumulator = self.dk_accumulator = None
        self.last_sides: list[Fields] = []  # struct Side of the last rows of dQ, for the `end`
        # (whether the sums are of dK, number of the row or column block), once they have a product
        self.begun: set[tuple[bool, int]] = set()
        if buffers.cached is not None:
            self.gradient_block = buffers.cached.block
        elif "gradient_block" in self.parts:
            self.gradient_block = GradientBlock(
                self.parts["gradient_block"], self.largest_columns, buffers.precision
            )
        if gradients is None or not scheduled.gradients:
            return
        dq = dk = self.make_accumulator(scheduled.dq_accumulator, gradients.query, "dq_accumulator")
        if scheduled.dk_accumulator is not scheduled.dq_accumulator:
            dk = self.make_accumulator(scheduled.dk_accumulator, gradients.key, "dk_accumulator")
        self.dq_accumulator, self.dk_accumulator = dq, dk

    def make_accumulator(
        self, rows: schedule.AccumulatorRows | None, out: Array, name: str
    ) -> Accumulator | None:
        """The accumulator of dQ or dK, where the schedule has put it.

        That is `out`, the destination of the gradient; or part `name` of the workspace, after the
        rows that overlay `out`. None: the pass does not compute this gradient.
        """
        if rows is None:
            return None
        if rows.in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        overlay, width, real = None, self.buffers.operands.gradient_features, self.buffers.real
        if rows.overlaid:
            overlay = Accumulator(cupy.ndarray((rows.overlaid, width), real, out.data), width, 0)
        shape = rows.dq_copies, rows.rows, width
        memory = cupy.ndarray(shape, real, self.parts[name].data)
        return Accumulator(memory, width, rows.first_row, overlay, rows.dq_copies)

    def gradient_arguments(self) -> Fields:
        """The arguments of a sweep for the gradient block: struct GradientBlock and tensor map."""
        if not self.scheduled.gradients:
            return NO_GRADIENT_BLOCK
        tensor_map = self.gradient_block.tensor_map(self.launcher.queue, self.query_operand.rows)
        return {"gradient_block": self.gradient_fields(), "gradient_map": tensor_map}

    def gradient_fields(self) -> Any:
        """struct GradientBlock, the argument of a portable kernel; null without gradients."""
        if not self.scheduled.gradients:
            return NO_GRADIENT_BLOCK["gradient_block"]
        return self.gradient_block.fields

    def multiply(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        """Add the products of a block: dQ += P K for its rows, and dK += P' Q for its columns."""
        self.add_to_rows(rows, row_block)
        # a block on the diagonal has the pairs (i, j) and (j, i), so P K has all terms
        if not (self.problem.symmetric and rows == columns):
            is_first = self.begin_sums(self.dk_accumulator, column_block)
            self.add_to_columns(self.query_operand, columns, is_first)

    def begin_sums(self, accumulator: Accumulator | None, block: int) -> bool:
        """Whether the sums of row or column block `block` begin now, so a product overwrites them.

        The next call for the same sums returns False. In a triangle, row block i and column block i
        are the same rows, so they have the same sums.
        """
        accumulator_block = (accumulator is self.dk_accumulator, block)
        is_first = accumulator_block not in self.begun
        self.begun.add(accumulator_block)
        return is_first

    def add_to_rows(self, rows: slice, row_block: int) -> None:
        """dQ += P K for the rows of a block."""
        accumulator = self.dq_accumulator
        if accumulator is None:
            return
        self.move_to_rows(accumulator, rows)
        is_first = self.begin_sums(accumulator, row_block)
        for keys in self.divide_keys():
            overwrites = is_first and keys.start == 0  # later ranges add to the same rows of dQ
            self.add_product(OP_N, keys, self.key_operand, accumulator, rows.start, overwrites)

    def move_to_rows(self, accumulator: Accumulator, rows: slice) -> None:
        """Let the accumulator of dQ begin at `rows`, if it has the rows of one block at a time."""
        memory = self.scheduled.dq_accumulator
        if not (self.grid.triangle or memory is None or memory.in_place):
            accumulator.first_row = rows.start

    def add_to_columns(self, queries: Operand, columns: slice, overwrites: bool) -> None:
        """dK += P' Q for the columns of a block. `overwrites`: dK = P' Q."""
        accumulator = self.dk_accumulator
        if accumulator is None:
            return
        # keys before the accumulator's first row have their sums in its overlay
        for keys in self.divide_keys(accumulator.first_row - columns.start):
            first_row = columns.start + keys.start
            self.add_product(OP_T, keys, queries, accumulator, first_row, overwrites)

    def divide_keys(self, border: int = 0) -> list[slice]:
        """The keys of the block in ranges, each with its own products (`schedule.divide_keys`)."""
        rows, keys, operands = self.query_operand.rows, self.key_operand.rows, self.buffers.operands
        d = operands.gradient_features
        return schedule.divide_keys(rows, keys, d, operands.precision, border)

    def add_product(
        self, op: int, keys: slice, features: Operand, accumulator: Accumulator, row: int,
        overwrites: bool,
    ) -> None:  # fmt: skip
        """Add P K (OP_N) or P' Q (OP_T) of some `keys` of the block to an accumulator.

        `features` is K or Q. The product is added to the rows of dQ or dK from `row` on.
        `overwrites`: the product replaces the numbers there. cuBLAS stores matrices column by
        column, so the arguments of `gemm` describe the transposes: K' P' or Q' P.
        """
        # n rows of sums of k terms
        n, k, first_feature_row = self.query_operand.rows, keys.stop - keys.start, keys.start
        if op == OP_T:
            n, k, first_feature_row = k, n, 0
        operands, real, block = self.buffers.operands, self.buffers.real, self.gradient_block
        precision, item, width = operands.precision, operands.item, operands.gradient_features
        operand_type = ELEMENT_TYPE[precision]
        sum_type = ELEMENT_TYPE["fp64" if precision == "fp64" else "fp32"]
        term_stride = 1 if op == OP_N else block.stride  # elements of P from term to term
        for product in schedule.divide_terms(precision, k, accumulator.dq_copies, overwrites):
            batch = (
                product.terms * features.stride, product.terms * term_stride,
                accumulator.copy_stride, product.batch,
            )  # fmt: skip
            copy_offset = product.dq_copy * accumulator.copy_stride * real.itemsize
            # elements before the first term in the features, and in P
            first_feature = product.feature_part * features.part
            first_feature += (first_feature_row + product.start) * features.stride
            first_element = product.gradient_part * block.part
            first_element += keys.start + product.start * term_stride
            self.launcher.queue.gemm(
                OP_N, op, width, n, product.terms, host_number(product.factor, real)[1],
                features.data + first_feature * item, operand_type, features.stride,
                block.data + first_element * item, operand_type,
                block.stride, host_number(0.0 if product.overwrites else 1.0, real)[1],
                accumulator.pointer(row) + copy_offset,
                sum_type, accumulator.stride,
                ARITHMETIC[precision], -1, *(batch if product.batch > 1 else ()),
            )  # fmt: skip

    def end_rows(self, rows: slice) -> None:
        """Complete dQ of `rows`, unless it is complete only at the `end`, as in a triangle.

        The last rows are completed there too, so that one launch serves them and all of dK.
        """
        if self.dq_accumulator is not None and not self.grid.triangle:
            assert self.gradients is not None
            side = self.side(self.dq_accumulator, rows, self.gradients.query)
            self.last_sides = [side] if rows == self.grid.rows[-1] else []
            if not self.last_sides:
                self.finish(side)

    def end(self) -> None:
        """Complete dK, or dQ in a triangle, after all blocks have added to it.

        Sums may overlay their destination. Then some rows at a time, in ascending order, are
        completed in the memory of the gradient block, which is free now, and copied to the
        destination. A row of the destination is not longer than a row of sums (`overlay_bytes` in
        schedule/decisions.py), so a copy overwrites only sums of rows that are complete.
        """
        accumulator, gradients = self.dk_accumulator, self.gradients
        accumulator_rows = self.scheduled.dk_accumulator
        if accumulator is None or accumulator_rows is None:
            self.finish(*self.last_sides)
            return
        assert gradients is not None
        if accumulator_rows.overlaid:
            self.finish(*self.last_sides)
            self.last_sides = []
        out: Array = gradients.query if accumulator is self.dq_accumulator else gradients.key
        rows_at_once = max(1, accumulator_rows.rows_converted_at_once)
        for rows in slices(accumulator_rows.overlaid, rows_at_once):
            destination = out[rows]
            memory = self.gradient_block.memory.data
            converted = cupy.ndarray(destination.shape, destination.dtype, memory)
            self.finish(self.side(accumulator, rows, converted, rows.start))
            self.launcher.queue.copy(destination.data, converted.data, destination.nbytes)
        # these rows come last: the memory of their gradients had sums of overlaid rows until now
        last_rows = slice(accumulator.first_row, self.grid.columns[-1].stop)
        self.finish(*self.last_sides, self.side(accumulator, last_rows, out))

    def finish(self, *sides: Fields) -> None:
        """Complete the gradients of `sides`, in one launch if their rows are few.

        The kernel multiplies sums by the gradient divisor, adds positives and linear terms, and
        differentiates through the normalisation.
        """
        if not sides:
            return
        d = self.problem.shape[2]
        if len(sides) == 2 and d * sum(side["n"] for side in sides) >= FEW_FEATURES:
            for side in sides:
                self.finish(side)
            return
        one, other = (*sides, sides[0])[:2]
        defines = {"NORM_FACTORS": int(self.problem.normalize)}
        if len(sides) == 2:
            defines["BOTH_SIDES"] = 1
        if self.problem.set_size > 1:
            defines["SETS"] = 1
        if self.linear_fields:
            defines["LINEAR"] = 1
        rows = one["n"]
        if len(sides) == 2:  # a thread block has up to 16 rows of one side
            rows = -(-rows // 16) * 16 + other["n"]
        self.launcher.launch_rows(
            "finish", rows, d, file="finish.cu", defines=defines, one=one, other=other, d=d
        )  # fmt: skip

    def side(
        self, accumulator: Accumulator, rows: slice, out: Array, first_out_row: int = 0
    ) -> Fields:
        """struct Side of `rows`, which are queries or keys, for `finish`.

        Row 0 of `out`, to which the gradients are written, is row `first_out_row`.
        """
        buffers, problem, gradients = self.buffers, self.problem, self.gradients
        assert gradients is not None
        gradient_divisor, divisor_step = self.ranges, 0  # step 0: all rows have the same divisor

        # `side` has the rows. The other side has their partners, with which they form positives
        if accumulator is self.dq_accumulator:
            if self.row_divisors is not None:
                gradient_divisor, divisor_step = self.row_divisors, 1
            side, other, dots, add = buffers.query, buffers.key, gradients.dots, gradients.add_query
            has_list = problem.symmetric or not buffers.paired
            positives = problem.positives if has_list else None
            entries = {"entries": positives, "begin": None, "end": None}
        else:
            side, other, add = buffers.key, buffers.query, False
            dots = None if gradients.want_query else gradients.dots
            order = begin = end = None
            if not buffers.paired:
                order, begin, end = buffers.list_queries_by_key(problem)
            entries = {"entries": order, "begin": begin, "end": end}

        if accumulator.dq_copies > 1:
            sums, size = accumulator.array, accumulator.copy_stride
            self.launcher.launch_vectors(
                "add_dq_copies", size, sums=sums, n=size, dq_copies=accumulator.dq_copies
            )  # fmt: skip
        fields = {
            "acc": accumulator.pointer(rows.start), "acc_stride": accumulator.stride,
            "first": rows.start, "n": rows.stop - rows.start, "z": matrix(side.features),
            "factor": side.factor, "exponent": side.exponent,
            "positives": {
                "gradient": self.positive_gradient, **entries, "set_size": problem.set_size,
                "others": len(other.features), "z": matrix(other.features), "factor": other.factor,
                "exponent": other.exponent,
            },
            "gradient_divisor": gradient_divisor, "divisor_step": divisor_step,
            "feature_divisor": other.feature_divisor, "dots": dots,
            "out": matrix(out, -first_out_row), "add": add,
        }  # fmt: skip
        if self.linear_fields:
            fields["linear"] = self.linear_fields[accumulator is not self.dq_accumulator]
        return fields

    def find_ranges(self, m: int, n: int, by_factor: bool = False, **vectors: Array) -> None:
        """Write `self.ranges`, with `LARGEST_ELEMENT` of the precision: see the function.

        `vectors` are `FACTOR_SOURCES` of M rows and N columns. With float16, elements do not
        overflow, and only elements that are 2^-37 of the largest possible one or less underflow.
        """
        largest = LARGEST_ELEMENT.get(self.buffers.precision, 1.0)
        set_size = self.problem.set_size
        sources = range_sources((m, n), vectors, largest, by_factor, set_size)
        find_ranges(self.launcher, self.ranges, sources)

    def add_linear_terms(self, terms: Sequence[LinearTerm]) -> None:
        """Let `finish` subtract the gradients of linear terms, of the sides that this pass
        computes."""
        if not terms:
            return
        symmetric = self.problem.symmetric
        sides = (False, self.scheduled.dq_accumulator), (True, self.scheduled.dk_accumulator)
        self.linear_fields = {
            is_key_side: linear_gradients(terms, *self.buffers.linear_rows, is_key_side, symmetric)
            for is_key_side, accumulator in sides
            if accumulator is not None and not (is_key_side and symmetric)
        }

    def find_upstream_ranges(self, row_factor: Array) -> None:
        """`find_ranges` of row factors that are upstream gradients, unless they are known."""
        known = self.buffers.vectors.upstream_ranges
        if known is not None:
            self.ranges = known
        else:
            self.find_ranges(*self.problem.shape[:2], row_factor=row_factor)


class SoftmaxRun(GradientRun):
    """The gradient pass of a softmax, whose log-sum-exps are known.

    If narrow rows are queries and keys at once, dL/dx stays in registers. Then the run visits the
    whole square of blocks, and a block adds to the gradients of its rows only, not of its columns.
    """

    def __init__(
        self, buffers: Buffers, problem: Problem, scheduled: ScheduledPass,
        epilogue: SoftmaxGradient, gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(buffers, problem, scheduled, epilogue.phase, gradients)
        m, n, _ = problem.shape
        # Kernels read contiguous float64. They add biases to the logits of both directions, so
        # references need the biases that log-sum-exps do not contain
        vectors = (getattr(epilogue, name) for name in FACTOR_SOURCES)
        sources: dict[str, Array] = {
            name: None if vector is None else cupy.ascontiguousarray(vector, dtype=np.float64)
            for name, vector in zip(FACTOR_SOURCES, vectors, strict=True)
        }
        pair_vectors = self.pair_vectors
        if pair_vectors is not None:
            biases = ("row", pair_vectors.row_bias), ("column", pair_vectors.column_bias)
            for side, bias in biases:
                reference = sources[f"{side}_reference"]
                if bias is not None and reference is not None:
                    biased = cupy.empty(len(bias))
                    buffers.add_bias(reference, bias, LOG2_E, biased)
                    sources[f"{side}_reference"] = biased
        bounded_by_positive = epilogue.bounded_by_positives and problem.set_size == 1
        if buffers.vectors.ranges is not None:
            self.ranges = buffers.vectors.ranges
        else:
            self.find_ranges(m, n, by_factor=not bounded_by_positive, **sources)
        self.positive_gradient = sources["positive_gradient"]
        self.add_linear_terms(epilogue.linear)
        # Limits may leave a pair out of one direction only. Then one exponential serves both only
        # if the log-sum-exps of all rows and columns lie close together
        column_reference = sources["column_reference"]
        if column_reference is not None and problem.compares_with_limits:
            self.launcher.launch(
                "vectors.cu", "check_spread", 1, RANGE_THREADS,
                {"row_reference": sources["row_reference"], "column_reference": column_reference,
                 "m": m, "n": n, "out": self.ranges},
            )  # fmt: skip
        self.factors = GradientFactors(
            self.launcher, buffers.real, (m, n), sources, self.exponent_scale, self.ranges
        )

    def compute_block(self, rows: slice, columns: slice, row_block: int, column_block: int) -> None:
        factors, cached = self.factors.fields(rows, columns), self.buffers.cached
        visited_tiles = None  # the query tiles that the sweep computes; None: all
        if self.scheduled.in_registers:
            self.add_in_registers(rows, columns, row_block, factors)
            return
        if cached is not None:
            self.gradient_block = cached.block
            if cached.has(columns):
                self.gradient_block = cached.block.from_column(columns.start)
                visited_tiles = cached.uncached_tiles
                self.differentiate_cached(cached, rows, columns, factors)
        arguments: Fields = {"factors": factors}
        if isinstance(self.shape, config.Tile):
            arguments["gradient_block"] = self.gradient_block.fields
        else:
            arguments |= {**self.gradient_arguments(), "visited_tiles": visited_tiles}
        self.launch(self.scheduled.kernel, rows, columns, arguments)
        self.multiply(rows, columns, row_block, column_block)

    def differentiate_cached(
        self, cached: CachedExponentials, rows: slice, columns: slice, factors: Fields
    ) -> None:
        """Compute the gradient block from cached exponentials, in their memory.

        The query tiles `cached.uncached_tiles` have none. The sweep computes them afterwards.
        """
        kernel = self.scheduled.cached_kernel
        strips, n = -(-self.query_operand.rows // config.STRIP), self.key_operand.rows
        assert kernel is not None
        self.launcher.launch_scheduled(
            kernel, strips * -(-n // CACHED_BLOCK_COLUMNS),
            {
                "b": self.block_fields(rows, columns, False), "f": factors,
                "gradient_block": self.gradient_block.fields, "reference_stride": cached.tiles,
                "strips": strips,
                # 4 bytes for each key tile of 128 columns
                "references": address(cached.references) + 4 * (columns.start // config.BLOCK_M),
            },
        )  # fmt: skip

    def add_in_registers(
        self, rows: slice, columns: slice, row_block: int, factors: Fields
    ) -> None:  # fmt: skip
        """dQ += P K for the rows of a block, by a kernel that keeps P in registers."""
        accumulator = self.dq_accumulator
        assert accumulator is not None
        self.move_to_rows(accumulator, rows)
        arguments = {
            "factors": factors, "out": accumulator.pointer(rows.start),
            "stride": accumulator.stride, "feature_count": self.problem.shape[2],
            "add": not self.begin_sums(accumulator, row_block),
        }  # fmt: skip
        self.launch(self.scheduled.kernel, rows, columns, arguments)
