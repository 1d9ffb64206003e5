"""Memory of a call on a GPU: workspace, operands, gradient blocks, their factors, accumulators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from ...problem import Array
from .. import config
from ..device.arguments import Fields, address, matrix
from ..device.launcher import Launcher
from ..device.launches import Queue
from ..device.signatures import structure
from ..device.tensor_map import SIZE
from ..schedule import ALIGNMENT, Fold, OperandRows, Part, Reading, Schedule, ScheduledKernel

# struct FactorSources: vectors of the epilogue
SOURCES = tuple(name for name, _ in structure("vectors.cu", "FactorSources").fields)
RANGES, RANGE_THREADS = structure("vectors.cu", "Ranges"), 1024


class Workspace:
    """The workspace of a call: one allocation, which each fold divides into its own parts.

    The cached exponentials come first, and stay from fold to fold. The memory goes back to CuPy's
    pool with the call's buffers, also after an error.
    """

    def __init__(self, schedule: Schedule, queue: Queue) -> None:
        self.schedule, self.queue = schedule, queue
        self.memory: Array = None
        self.staged: dict[str, slice] = {}  # the rows in each staging buffer, by its name
        self.layout: tuple[int, int] | None = None  # rows and columns of a fold's largest block

    def parts(self, parts: Sequence[Part]) -> dict[str, Array]:
        """Divides the workspace: an array of bytes for each part, by name.

        The parts are those of cached exponentials and of a fold. `Folds.memory` of
        kernels/gpu/schedule/folds.py has chosen the names and sizes of a fold.
        """
        if self.memory is None:
            self.memory = self.queue.scratch(self.schedule.workspace)
        arrays, start = {}, 0
        for part in (*self.schedule.cached, *parts):
            arrays[part.name] = cupy.ndarray(part.bytes, np.uint8, self.memory.data + start)
            start += -(-part.bytes // ALIGNMENT) * ALIGNMENT
        assert start <= self.schedule.workspace
        return arrays

    def begin_fold(self, fold: Fold) -> dict[str, Array]:
        """The parts of a fold. Rows that the last fold has staged stay if blocks have its size."""
        if self.layout != fold.grid.largest:
            self.layout, self.staged = fold.grid.largest, {}
        return self.parts(fold.workspace)


# --- operands -------------------------------------------------------------------------------------


@dataclass
class Operand:
    """Rows of queries or keys in the layout that kernels and cuBLAS read."""

    data: int  # address of the first row
    stride: int  # elements from row to row
    part: int  # elements from part to part of a row, with two parts (bf16x3, fp16x3); else 0
    rows: int  # number of rows
    factor: int  # address of the factors that normalise the rows; 0: rows are not normalised

    def fields(self, item: int) -> Fields:
        """The fields of struct Operand. `item` is the number of bytes of an element."""
        return {"data": self.data, "stride": self.stride * item, "part": self.part * item,
                "rows": self.rows, "factor": self.factor}  # fmt: skip


class Features:
    """The features of queries or keys, and the factors that normalise the rows."""

    def __init__(
        self, launcher: Launcher, normalize: bool, real: np.dtype[Any], features: Array
    ) -> None:
        self.launcher, self.features = launcher, features
        self.factor = self.exponent = None
        if normalize:
            n, d = features.shape
            self.factor = cupy.empty(n, real)
            self.exponent = cupy.empty(n, np.int32)
            launcher.rows(
                "row_norms", n, z=matrix(features), n=n, d=d, factor=self.factor,
                exponent=self.exponent,
            )  # fmt: skip


class OperandSide(Features):
    """The features of queries or keys as operands of products.

    Kernels read the features in place, or from staged copies in the format of the operands. Copies
    have all rows, or the rows of one block.
    """

    def __init__(
        self, launcher: Launcher, normalize: bool, real: np.dtype[Any], features: Array,
        form: OperandRows,
    ) -> None:  # fmt: skip
        super().__init__(launcher, normalize, real, features)
        self.form, self.precision = form, launcher.precision
        self.feature_divisor = 0  # address of the side's float16 divisor; 0: none
        self.all_rows: Operand | None = None  # unless rows are staged by block
        if form.reading is Reading.IN_PLACE:
            stride = features.strides[0] // features.dtype.itemsize
            self.all_rows = Operand(address(features), stride, 0, len(features), 0)

    def block(
        self, rows: slice, name: str, memory: dict[str, Array], staged: dict[str, slice]
    ) -> Operand:
        """The operand of `rows`.

        If rows are staged by block, they are copied to buffer `name`, unless the buffer has them.
        """
        if self.form.reading is Reading.BY_BLOCK:
            if staged.get(name) != rows:
                staged[name] = rows
                return self.stage(rows, memory[name])
            return self.operand(rows, memory[name])
        if self.all_rows is None:
            n = len(self.features)
            self.memory = cupy.empty(n * self.form.row_bytes, np.uint8)
            self.all_rows = self.stage(slice(0, n), self.memory)
        all_rows, n, factor = (
            self.all_rows,
            rows.stop - rows.start,
            address(self.factor, rows.start),
        )
        offset = rows.start * all_rows.stride * config.element_bytes(self.precision)
        return Operand(all_rows.data + offset, all_rows.stride, all_rows.part, n, factor)

    def operand(self, rows: slice, buffer: Array) -> Operand:
        """The operand of `rows`, whose copies are in `buffer`."""
        parts = config.OPERAND_PARTS.get(self.precision, 1)
        part, stride = self.form.features if parts > 1 else 0, self.form.features * parts
        factor = address(self.factor, rows.start)
        return Operand(buffer.data.ptr, stride, part, rows.stop - rows.start, factor)

    def stage(
        self, rows: slice, buffer: Array, weight: Array = None, gradient_divisor: Array = None
    ) -> Operand:  # fmt: skip
        """Rows `rows`, copied into `buffer`.

        If `weight` is given, each row is multiplied by its `weight` / `gradient_divisor`.
        """
        operand = self.operand(rows, buffer)
        self.launcher.rows(
            "stage", operand.rows, self.form.features, z=matrix(self.features, rows.start),
            n=operand.rows, d=self.features.shape[1], exponent=address(self.exponent, rows.start),
            feature_divisor=self.feature_divisor, weight=address(weight, rows.start),
            gradient_divisor=gradient_divisor, out=buffer, stride=operand.stride, part=operand.part,
        )  # fmt: skip
        return operand

    def tensor_map(self, operand: Operand, box_rows: int) -> Any:
        """The tensor map of an operand with all its parts."""
        item = config.element_bytes(self.precision)
        width = config.OPERAND_PARTS.get(self.precision, 1) * self.form.features * item
        return self.launcher.queue.tensor_map(
            operand.data, operand.rows, width, operand.stride * item, box_rows, self.precision
        )


def launch_over_block(
    kernel: ScheduledKernel, shape: config.Tile | config.Sweep, multiprocessors: int,
    query: tuple[Operand, OperandSide], key: tuple[Operand, OperandSide], arguments: Fields,
    triangle: bool = False, segments: int = 0,
) -> None:  # fmt: skip
    """Launch a kernel over the block of two operands, with persistent thread blocks.

    A sweep also takes tensor maps of the operands and the number of segments. `segments` is that
    number; 0 for the fastest number.
    """
    (q, query_side), (k, key_side) = query, key
    if isinstance(shape, config.Tile):
        blocks = shape.blocks(q.rows, k.rows, multiprocessors)
    else:
        blocks = shape.blocks(q.rows, k.rows, triangle)
        arguments = {
            "q": query_side.tensor_map(q, shape.query_box),
            "k": key_side.tensor_map(k, config.BLOCK_M),
            "segments": segments or shape.segments(q.rows, k.rows, triangle), **arguments,
        }  # fmt: skip
    query_side.launcher.run(kernel, blocks, arguments)


def find_feature_divisors(
    launcher: Launcher, sides: Sequence[OperandSide], multiprocessors: int
) -> Array | None:
    """Choose float16 divisors of queries and keys, so that operands neither overflow nor underflow.

    Returns an array of three numbers: the two divisors and their product. None: no side has one.
    """
    divided = [side for side in sides if side.form.has_divisor]
    if not divided:
        return None
    largest, divisors = launcher.queue.zeroed_array(2, np.uint32), cupy.empty(3)
    for side in divided:
        (n, d), index = side.features.shape, sides.index(side)
        launcher.rows(
            "find_largest", n, d, most=8 * multiprocessors, z=matrix(side.features), n=n, d=d,
            largest_bits=address(largest, index),
        )  # fmt: skip
        side.feature_divisor = address(divisors, index)
    largest_key = address(largest, len(sides) - 1)
    launcher.launch(
        "rows.cu", "find_feature_divisors", 1, 1,
        {"largest_query": largest, "largest_key": largest_key, "feature_divisors": divisors},
    )  # fmt: skip
    return divisors


def to_products(
    launcher: Launcher, values: Array, value_scale: Fields, logit_scale: Fields, real: np.dtype[Any]
) -> Array:
    """Numbers in the unit of products, from `values` in another unit.

    `values` times `value_scale` are logits. So are the results times `logit_scale`.
    """
    n = len(values)
    out = cupy.empty(n, real)
    launcher.vectors(
        "to_products", n, values=values, value_scale=value_scale, n=n, scale=logit_scale, out=out
    )
    return out


# --- gradient blocks ------------------------------------------------------------------------------


class GradientBlock:
    """dL/dx of a block. A row, or each part of a row, has `columns` elements."""

    def __init__(self, memory: Array, columns: int, precision: str) -> None:
        self.memory, self.precision, self.first = memory, precision, 0
        self.item = config.element_bytes(precision)
        # elements from part to part of a row, and from row to row
        self.part = config.gradient_stride(columns, precision)
        self.stride = config.OPERAND_PARTS.get(precision, 1) * self.part

    def from_column(self, first: int) -> GradientBlock:
        """The same memory without the columns before `first`."""
        rest = copy(self)
        rest.first = self.first + first
        return rest

    @property
    def data(self) -> int:
        """Address of the first element."""
        return int(self.memory.data.ptr) + self.first * self.item

    @property
    def fields(self) -> Fields:
        """struct GradientBlock."""
        return {"data": self.data, "stride": self.stride, "part": self.part}

    def map(self, queue: Queue, rows: int) -> Any:
        """Tensor map of `rows` rows, which a sweep stores in strips of 16."""
        width, stride = (self.stride - self.first) * self.item, self.stride * self.item
        return queue.tensor_map(self.data, rows, width, stride, config.STRIP, self.precision)


NO_GRADIENT_BLOCK: Fields = {
    "gradient_block": {"data": 0, "stride": 0, "part": 0},
    "gradient_map": np.zeros(SIZE, np.uint8).view(f"V{SIZE}"),
}


class CachedExponentials:
    """Exponentials that the log-sum-exp fold stores and the gradient fold reads.

    They belong to the first columns of the logit matrix, and lie in the layout of a gradient block
    (kernels/cuda/sm90/sweep_lse.cu).
    """

    def __init__(self, schedule: Schedule, workspace: Workspace, queue: Queue) -> None:
        assert schedule.operands is not None
        self.columns, m = schedule.cached_columns, schedule.call.shape[0]
        memory = workspace.parts(())
        self.block = GradientBlock(
            memory["exponentials"], self.columns, schedule.operands.precision
        )
        self.tiles = -(-self.columns // config.BLOCK_M)
        self.references = memory["references"]
        # for each query tile, 1 if its exponentials are not cached, because its logits lie too far
        # apart for one reference exponent
        self.uncached_tiles = queue.zeroed_array(-(-m // config.BLOCK_M), np.int32)

    def has(self, columns: slice) -> bool:
        """Whether exponentials of a block of these columns are cached."""
        return bool(columns.stop <= self.columns)

    @property
    def fields(self) -> Fields:
        """struct CachedExponentials."""
        return {"references": self.references, "stride": self.tiles,
                "uncached_tiles": self.uncached_tiles}  # fmt: skip


NOTHING_CACHED: Fields = {"references": 0, "stride": 0, "uncached_tiles": 0}


# --- factors of gradient blocks -------------------------------------------------------------------


def new_ranges() -> Array:
    """Memory for struct Ranges, whose first number is the gradient divisor."""
    return cupy.empty(RANGES.size // 8)


def find_ranges(
    launcher: Launcher, shape: tuple[int, int], vectors: Mapping[str, Array], out: Array,
    largest_element: float = 1.0, by_factor: bool = False, set_size: int = 1,
) -> None:  # fmt: skip
    """Find the gradient divisor, and whether one exponential serves rows and columns."""
    m, n = shape
    launcher.launch(
        "vectors.cu", "ranges", 1, RANGE_THREADS,
        {
            "f": dict.fromkeys(SOURCES) | {**vectors}, "m": m, "n": n, "set_size": set_size,
            "by_factor": by_factor, "largest_element": largest_element, "out": out,
        },
    )  # fmt: skip


class Factors:
    """The vectors a, u and v of kernels/cuda/tiled/gradient.cu, and the rounded references."""

    def __init__(
        self, launcher: Launcher, real: np.dtype[Any], shape: tuple[int, int],
        sources: Mapping[str, Array], scale: Fields, ranges: Array,
    ) -> None:  # fmt: skip
        (m, n), self.ranges = shape, ranges
        self.row_reference, self.a, self.u = cupy.empty((3, m), real)
        self.column_reference = self.v = None
        if sources["column_reference"] is not None:
            self.column_reference, self.v = cupy.empty((2, n), real)
        launcher.vectors(
            "factors", max(m, n), f=sources, m=m, n=n, scale=scale, ranges=ranges,
            out={
                "row_reference": self.row_reference, "a": self.a, "u": self.u,
                "column_reference": self.column_reference, "v": self.v,
            },
        )  # fmt: skip

    def fields(self, rows: slice, columns: slice) -> Fields:
        """The fields of struct Factors for a block."""
        return {
            "row_reference": address(self.row_reference, rows.start),
            "a": address(self.a, rows.start), "u": address(self.u, rows.start),
            "column_reference": address(self.column_reference, columns.start),
            "v": address(self.v, columns.start),
            "one_exponential": self.ranges.data.ptr + RANGES.offset("one_exponential"),
        }  # fmt: skip


# --- accumulators ---------------------------------------------------------------------------------


@dataclass
class Accumulator:
    """Sums of gradients of the rows from `first` on, before `GradientRun.finish` completes them.

    The sums were divided by the gradient divisor. A row is the sum of its `copies` in as many
    arrays [rows, stride], one after another. Rows before `first`, if any, are in `overlay`, which
    lies in the memory of the gradient.
    """

    array: Array
    stride: int
    first: int
    overlay: Accumulator | None = None
    copies: int = 1

    @property
    def copy_stride(self) -> int:
        """Elements from copy to copy."""
        return int(self.array.size) // self.copies

    def pointer(self, row: int) -> int:
        if self.overlay is not None and row < self.first:
            return self.overlay.pointer(row)
        offset = (row - self.first) * self.stride * self.array.dtype.itemsize
        return int(self.array.data.ptr + offset)
