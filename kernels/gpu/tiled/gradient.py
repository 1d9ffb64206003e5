"""The gradient fold: gradient panels (dL/dx of a block), and the products that use them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from ... import problem as problems
from ...problem import LOG2_E, Array, Gradients, Grid, Problem, SoftmaxGradient
from .. import config
from ..device.arguments import Fields, address, matrix
from ..device.signatures import structure
from ..linear import linear_terms
from .context import Context
from .fold import Fold
from .operands import NO_PANEL, Accumulator, Kept, Operand, Panel

# Gradient panels are written in units that bring their largest element near this, as float16
# overflows at 65504. (A quarter of it: factors of normalised rows are below 2 each)
LARGEST_ELEMENT = {"fp16": 8192.0, "fp16x3": 8192.0}
LOW_UNITS = {"fp16x3": 2048.0}  # in which low parts are written: LOW_UNITS of common.cuh
# cuBLAS's names for types and for the arithmetic of a product
CUDA_TYPE = {"fp64": 1, "fp32": 0, "tf32": 0, "fp16": 2, "fp16x3": 2, "bf16": 14, "bf16x3": 14}
COMPUTE = {"fp64": 70, "fp32": 69, "tf32": 77, "fp16": 68, "fp16x3": 68, "bf16": 68, "bf16x3": 68}
OP_N, OP_T = 0, 1
# Which parts of the two operands are multiplied, small terms first. The product of both low parts
# is below float32's rounding
PRODUCTS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}
# Sums of config.LONGEST_SUM terms of the high parts are corrected by their mean truncation bias. A
# sum of 512 terms loses 47 units of 2^-24 of itself if all have one sign, and 9 if signs are mixed.
# It gets back 27, about halfway. `truncation_bias` gives 19.2 (32 steps of 0.6): the factor is the
# ratio of the two.
LONG_SUM_FACTOR = 1.4
# cuBLAS has fast kernels where sizes along contiguous memory are multiples of 16 bytes: of a row of
# the panel too. From so many multiplications on, it pays to multiply the keys that remain apart
WHOLE_BYTES = 16
LARGE_PRODUCT = 2**30
KEPT_THREADS = 128  # of a block of kept_gradient.cu, and the columns that it has
KEPT_COLUMNS = 8 * KEPT_THREADS
# struct FactorSources: vectors of the epilogue
SOURCES = tuple(name for name, _ in structure("vectors.cu", "FactorSources").fields)
RANGES, RANGE_THREADS = structure("vectors.cu", "Ranges"), 1024


@cache  # kept for good: plans hold their addresses
def _host_number(value: float, real: np.dtype[Any]) -> tuple[Array, int]:
    """A factor of a product in the host's memory, and its address."""
    number = np.array(value, real)
    return number, number.ctypes.data


def _sums(k: int, longest: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """Sums over k in pieces of at most `longest` terms: where each product starts, its terms, and
    how many such sums follow one another in it."""
    whole = k // longest
    for i in range(0, whole, at_once):
        yield i * longest, longest, min(at_once, whole - i)
    if k % longest:
        yield whole * longest, k % longest, 1


class GradientFold(Fold):
    """Panels of dL/dx, and the products that make dQ and dK of them."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, phase: str,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, phase)
        self.gradients = gradients
        self.unit = cupy.empty(RANGES.size // 8)  # Ranges
        self.row_unit: Array = None  # [M] if each row of dQ has a unit of its own
        self.positive_gradient: Array = None  # [M] dL/dx at positives, with `scale` folded in
        self.of_rows = self.of_columns = None
        self.linear: dict[bool, Fields] = {}  # struct LinearTerms of queries, and of keys (True)
        self.by_rows = gradients is not None and (gradients.want_query or problem.symmetric)
        self.by_columns = gradients is not None and (
            grid.triangle if problem.symmetric else gradients.want_key
        )
        if gradients is None:
            return
        if context.kept is not None:
            self.panel = context.kept.panel
        elif context.needs.gradient:
            size = context.needs.panel(self.rows, self.columns, problem.shape[2])
            self.panel = Panel(context.scratch.take((size,)), self.columns, context.precision)
        if problem.symmetric and self.by_columns:  # rows and columns share one accumulator
            self.of_rows = self.of_columns = self.accumulator(
                gradients.query, context.query_in_place, slice(0, problem.shape[0]),
                context.blocking.overlaid,
            )  # fmt: skip
            return
        if self.by_rows:
            # the first block makes all copies, without the keys that are multiplied apart
            longest = config.LONGEST_SUM.get(context.precision, self.columns)
            first = grid.columns[0].stop - grid.columns[0].start
            first -= first % (WHOLE_BYTES // context.item)
            copies = min(context.query_accumulators, max(1, -(-first // longest)))
            self.of_rows = self.accumulator(
                gradients.query, context.query_in_place, slice(0, self.rows), copies=copies
            )
        if self.by_columns:
            keys = slice(grid.columns[0].start, grid.columns[-1].stop)
            self.of_columns = self.accumulator(
                gradients.key, context.key_in_place, keys, context.blocking.overlaid
            )

    def accumulator(
        self, out: Array, in_place: bool, rows: slice, overlaid: int = 0, copies: int = 1
    ) -> Accumulator:
        if in_place:
            return Accumulator(out, out.strides[0] // out.dtype.itemsize, 0)
        before, width, real = None, self.context.product_width, self.context.real
        if overlaid:
            before = Accumulator(cupy.ndarray((overlaid, width), real, out.data), width, 0)
        first = rows.start + overlaid
        made = self.context.scratch.take((copies, rows.stop - first, width), real)
        return Accumulator(made, width, first, before, copies)

    def panel_arguments(self) -> Fields:
        """The gradient panel of a block, as a sweep takes it."""
        if self.gradients is None:
            return NO_PANEL
        tensor_map = self.panel.map(self.launcher.queue, self.q.rows)
        return {"panel": self.panel.fields, "panel_map": tensor_map}

    def multiply(self, rows: slice, columns: slice, a: int, b: int) -> None:
        """dQ_a += P K_b and dK_b += P' Q_a."""
        self.add_to_rows(rows, a, b)
        if not (self.problem.symmetric and rows == columns):
            self.add_to_columns(self.q, columns, a == 0)

    def add_to_rows(self, rows: slice, a: int, b: int) -> None:
        """dQ_a += P K_b."""
        of = self.of_rows
        if of is None:
            return
        if not self.symmetric_sweep and not self.context.query_in_place:
            of.first = rows.start  # it holds the rows of this panel alone
        first = b == self.grid.visits(a)[0] and not (self.symmetric_sweep and a > 0)
        for keys in self.keys_of_products():
            self.product(OP_N, keys, self.k, of, rows.start, first and keys.start == 0)

    def add_to_columns(self, q: Operand, columns: slice, first: bool) -> None:
        """dK_b += P' Q_a, with the rows of Q_a in `q`, which are the `first`."""
        of = self.of_columns
        if of is None:
            return
        border = of.first - columns.start
        for keys in self.keys_of_products(border):
            self.product(OP_T, keys, q, of, columns.start + keys.start, first)

    def keys_of_products(self, border: int = 0) -> list[slice]:
        """The block's keys as products take them: those before the `border` between two
        accumulators, a multiple of `WHOLE_BYTES`, and the rest."""
        n, rest = self.k.rows, 0
        border = min(max(border, 0), n)
        if self.q.rows * n * self.context.product_width >= LARGE_PRODUCT:
            rest = (n - border) % (WHOLE_BYTES // self.context.item)
        edges = 0, border, n - rest, n
        return [slice(i, j) for i, j in pairwise(edges) if i < j]

    @property
    def symmetric_sweep(self) -> bool:
        return self.problem.symmetric and self.grid.triangle

    def product(
        self, op: int, keys: slice, z: Operand, out: Accumulator, row: int, first: bool
    ) -> None:  # fmt: skip
        """Of `keys` of the block, P K to the rows of `out` from `row` on, or P' Q, with K or Q in
        `z`; added to what is there unless it is the `first`. cuBLAS counts columns first: there all
        this is the transpose, out' = K' P' or Q' P."""
        n, k, first_row = self.q.rows, keys.stop - keys.start, keys.start
        if op == OP_T:
            n, k, first_row = k, n, 0
        precision, item, real = self.context.precision, self.context.item, self.context.real
        panel = self.panel
        given, made = CUDA_TYPE[precision], CUDA_TYPE["fp64" if precision == "fp64" else "fp32"]
        longest, copies = config.LONGEST_SUM.get(precision, k), out.copies
        for panel_part, z_part in PRODUCTS[self.context.parts]:
            large = panel_part == z_part == 0
            unit = 1 / LOW_UNITS.get(precision, 1.0) if panel_part else 1.0
            for start, terms, sums in _sums(k, longest if large or copies > 1 else k, copies):
                if large and precision in config.LONGEST_SUM:
                    unit = 1 + LONG_SUM_FACTOR * config.truncation_bias(precision, terms * item)
                copy, apart = start // longest % copies, 1 if op == OP_N else panel.stride
                new = first and start < copies * longest
                batch = (terms * z.stride, terms * apart, out.copy_stride, sums)
                self.launcher.queue.gemm(
                    OP_N, op, self.context.product_width, n, terms, _host_number(unit, real)[1],
                    z.data + (z_part * z.part + (first_row + start) * z.stride) * item, given,
                    z.stride,
                    panel.data + (panel_part * panel.part + keys.start + start * apart) * item,
                    given, panel.stride, _host_number(0.0 if new else 1.0, real)[1],
                    out.pointer(row) + copy * out.copy_stride * real.itemsize, made, out.stride,
                    COMPUTE[precision], -1, *(batch if sums > 1 else ()),
                )  # fmt: skip
            first = False

    def end_rows(self, rows: slice) -> None:
        if self.of_rows is not None and not self.symmetric_sweep:
            assert self.gradients is not None
            self.finish(self.of_rows, rows, self.gradients.query)

    def end(self) -> None:
        """All panels have added to dK. Rows that overlay their destination are converted in the
        panel's memory, in ascending order: they overwrite only accumulators already read."""
        acc, gradients = self.of_columns, self.gradients
        if acc is None:
            return
        assert gradients is not None
        out: Array = gradients.query if acc is self.of_rows else gradients.key
        if acc.before is not None:
            row_bytes = out.shape[1] * out.dtype.itemsize
            for rows in problems.slices(acc.first, self.panel.memory.nbytes // row_bytes):
                to = out[rows]
                passing = cupy.ndarray(to.shape, to.dtype, self.panel.memory.data)
                self.finish(acc, rows, passing, rows.start)
                self.launcher.queue.copy(to.data, passing.data, to.nbytes)
        self.finish(acc, slice(acc.first, self.grid.columns[-1].stop), out)

    def finish(self, acc: Accumulator, rows: slice, out: Array, first: int = 0) -> None:
        """Completes the gradients of `rows`, of queries or of keys: adds the positives, multiplies
        by the panels' unit, differentiates through the normalisation, and writes to `out`, whose
        first row is row `first`."""
        context, problem, gradients = self.context, self.problem, self.gradients
        assert gradients is not None
        n, d = rows.stop - rows.start, problem.shape[2]
        unit, unit_step = self.unit, 0
        if acc is self.of_rows:
            if self.row_unit is not None:
                unit, unit_step = self.row_unit, 1
            side, other, dots, add = context.query, context.key, gradients.dots, gradients.add_query
            partners = {"partner": problem.positives, "begin": None, "end": None}
        else:
            side, other, add = context.key, context.query, False
            dots = None if gradients.want_query else gradients.dots
            order = begin = end = None
            if not context.paired:
                order, begin, end = context.queries_of_keys(problem)
            partners = {"partner": order, "begin": begin, "end": end}
        if acc.copies > 1:
            self.launcher.vectors(
                "add_copies", acc.copy_stride, sums=acc.array, n=acc.copy_stride, copies=acc.copies
            )
        defines = {"FACTORS": self.options["FACTORS"], **self.sets}
        linear: dict[str, Any] = {}
        if self.linear:
            defines["LINEAR"], linear["linear"] = 1, self.linear[acc is not self.of_rows]
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
            unit=unit, unit_step=unit_step, shift=other.shift, dots=dots,
            out=matrix(out, -first), add=add,
        )  # fmt: skip

    def find_ranges(self, m: int, n: int, by_factor: bool = False, **vectors: Array) -> None:
        """The unit in which panels are written, and whether one exponential serves both sides."""
        self.launcher.launch(
            "vectors.cu", "ranges", 1, RANGE_THREADS,
            {
                "f": dict.fromkeys(SOURCES) | vectors, "m": m, "n": n,
                "set_size": self.problem.set_size, "by_factor": by_factor,
                "largest_element": LARGEST_ELEMENT.get(self.context.precision, 1.0),
                "out": self.unit,
            },
        )  # fmt: skip


class SoftmaxFold(GradientFold):
    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue.phase, gradients)
        m, n, _ = problem.shape
        given = (getattr(epilogue, name) for name in SOURCES)
        sources: dict[str, Array] = {  # float64 and contiguous, as the kernels take them
            name: None if v is None else cupy.ascontiguousarray(v, dtype=np.float64)
            for name, v in zip(SOURCES, given, strict=True)
        }
        self.two_sided = epilogue.column_reference is not None
        pairs = self.pair_vectors
        if pairs is not None:
            for name, own in (("row", pairs.of_rows), ("column", pairs.of_columns)):
                reference = sources[f"{name}_reference"]
                if own is not None and reference is not None:
                    biased = cupy.empty(len(own))
                    context.add_bias(reference, own, LOG2_E, biased)
                    sources[f"{name}_reference"] = biased
        # dL/dx at a positive bounds its row's panel elements, unless it is one of several, or there
        # are linear terms
        one = not epilogue.linear and problem.set_size == 1
        self.find_ranges(m, n, by_factor=not one, **sources)
        self.positive_gradient = sources["positive_gradient"]
        if epilogue.linear:
            self.linear = {
                of_keys: linear_terms(
                    epilogue.linear, *context.linear_rows, of_keys, problem.symmetric
                )
                for of_keys, wanted in ((False, self.by_rows), (True, self.by_columns))
                if wanted and not (of_keys and problem.symmetric)
            }
        columns = sources["column_reference"]
        if columns is not None and pairs is not None and pairs.row_limits is not None:
            self.launcher.launch(
                "vectors.cu", "check_spread", 1, RANGE_THREADS,
                {"row_reference": sources["row_reference"], "column_reference": columns,
                 "m": m, "n": n, "out": self.unit},
            )  # fmt: skip
        self.row_reference, self.a, self.u = cupy.empty((3, m), context.real)
        self.column_reference = self.v = None
        if self.two_sided:
            self.column_reference, self.v = cupy.empty((2, n), context.real)
        self.launcher.vectors(
            "factors", max(m, n), f=sources, m=m, n=n, scale=context.logit_scale,
            ranges=self.unit,
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
            "shared": self.unit.data.ptr + RANGES.offset("shared"),
        }  # fmt: skip

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        factors, of_columns = self.factors(rows, columns), int(self.two_sided)
        kept, wanted = self.context.kept, None
        if kept is not None:
            self.panel = kept.panel
            if kept.has(columns):
                self.panel, wanted = kept.panel.from_column(columns.start), kept.anew
                self.from_kept(kept, rows, columns, factors)
        if isinstance(self.tile, config.Tile):
            tiled: Fields = {"factors": factors, "panel": self.panel.fields}
            self.launch_tiles("gradient", rows, columns, tiled, COLUMNS=of_columns)
        else:
            swept: Fields = {"factors": factors, **self.panel_arguments(), "wanted": wanted}
            self.launch_sweep("sweep_gradient", rows, columns, swept, COLUMNS=of_columns)
        self.multiply(rows, columns, a, b)

    def from_kept(self, kept: Kept, rows: slice, columns: slice, factors: Fields) -> None:
        """The panel of exponentials becomes the gradient panel, but for query panels that are
        wanted anew."""
        strips, n = -(-self.q.rows // config.STRIP), self.k.rows
        self.launcher.launch(
            "sm90/kept_gradient.cu", "kept_gradient", strips * -(-n // KEPT_COLUMNS), KEPT_THREADS,
            {
                "b": self.block_fields(rows, columns, False), "f": factors,
                "panel": self.panel.fields, "reference_stride": kept.tiles, "strips": strips,
                "references": address(kept.references) + 4 * (columns.start // config.BLOCK_M),
            },
            COLUMNS=int(self.two_sided),
        )  # fmt: skip


class NarrowFold(SoftmaxFold):
    """The same for narrow rows that are queries and keys at once: dL/dx stays in registers, and the
    whole square is visited, as each row accumulates its own gradient alone."""

    def __init__(
        self, context: Context, problem: Problem, grid: Grid, epilogue: SoftmaxGradient,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        super().__init__(context, problem, grid, epilogue, gradients)
        assert context.in_registers is not None
        self.tile = context.in_registers

    def block(self, rows: slice, columns: slice, a: int, b: int) -> None:
        of = self.of_rows
        assert of is not None
        if not self.context.query_in_place:
            of.first = rows.start  # it holds the rows of this block alone
        arguments = {
            "factors": self.factors(rows, columns), "out": of.pointer(rows.start),
            "stride": of.stride, "columns": self.problem.shape[2], "add": b > 0,
        }  # fmt: skip
        self.launch_sweep("sweep_narrow", rows, columns, arguments, COLUMNS=int(self.two_sided))
