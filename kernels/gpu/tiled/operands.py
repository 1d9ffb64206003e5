"""Operands of matrix products: features, read in place or staged (copied); gradient blocks."""

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
from ..device.tensor_map import SIZE
from ..schedule import OperandRows, Reading, Schedule, ScheduledKernel


@dataclass
class Operand:
    """Rows of queries or keys in the layout that kernels and cuBLAS read."""

    data: int  # address of the first row
    stride: int  # elements from row to row
    part: int  # elements from part to part of a row, with two parts (bf16x3, fp16x3); else 0
    rows: int  # number of rows
    factor: int  # address of the rows' `Features.factor`; 0: rows are not normalised

    def fields(self, item: int) -> Fields:
        """The fields of struct Operand, in bytes. `item` is the number of bytes of an element."""
        return {"data": self.data, "stride": self.stride * item, "part": self.part * item,
                "rows": self.rows, "factor": self.factor}  # fmt: skip


class Features:
    """The features of queries or keys, and numbers that normalise their rows (`row_norms`).

    Row i of unit norm is factor[i] 2^-exponent[i] times the features. Both arrays are None if rows
    are not normalised. Staged rows are divided by the power of two; the factors multiply products.
    """

    def __init__(
        self, launcher: Launcher, normalize: bool, real: np.dtype[Any], features: Array
    ) -> None:
        self.launcher, self.features = launcher, features
        self.factor = self.exponent = None
        if normalize:
            n, d = features.shape
            self.factor = cupy.empty(n, real)
            self.exponent = cupy.empty(n, np.int32)
            launcher.launch_rows(
                "row_norms", n, z=matrix(features), n=n, d=d, factor=self.factor,
                exponent=self.exponent,
            )  # fmt: skip


class OperandSide(Features):
    """The features of queries or keys as operands of products.

    Kernels read the features in place, or from staged copies in the format of the operands, which
    have all rows or the rows of one block (`Reading`).
    """

    def __init__(
        self, launcher: Launcher, normalize: bool, real: np.dtype[Any], features: Array,
        layout: OperandRows,
    ) -> None:  # fmt: skip
        super().__init__(launcher, normalize, real, features)
        self.layout, self.precision = layout, launcher.precision
        # address of the number by which float16 rows are divided (`find_feature_divisors`); 0: none
        self.feature_divisor = 0
        self.all_rows: Operand | None = None  # once it is known, unless rows are staged by block
        if layout.reading is Reading.IN_PLACE:
            stride = features.strides[0] // features.dtype.itemsize
            self.all_rows = Operand(address(features), stride, 0, len(features), 0)

    def prepare_rows(
        self, rows: slice, name: str, parts: dict[str, Array], staged: dict[str, slice]
    ) -> Operand:
        """The operand of `rows`, the rows of a block.

        If rows are staged by block, they are copied to part `name` of the workspace,
        unless they are there already (`staged`). If all rows are staged, the first call does so.
        """
        if self.layout.reading is Reading.BY_BLOCK:
            if staged.get(name) != rows:
                staged[name] = rows
                return self.stage(rows, parts[name])
            return self.staged_operand(rows, parts[name])
        if self.all_rows is None:
            n = len(self.features)
            self.memory = cupy.empty(n * self.layout.row_bytes, np.uint8)
            self.all_rows = self.stage(slice(0, n), self.memory)
        all_rows, n = self.all_rows, rows.stop - rows.start
        factor = address(self.factor, rows.start)
        offset = rows.start * all_rows.stride * config.element_bytes(self.precision)
        return Operand(all_rows.data + offset, all_rows.stride, all_rows.part, n, factor)

    def staged_operand(self, rows: slice, buffer: Array) -> Operand:
        """The operand of `rows`, whose staged copies are in `buffer`."""
        parts = config.OPERAND_PARTS.get(self.precision, 1)
        part, stride = self.layout.features if parts > 1 else 0, self.layout.features * parts
        factor = address(self.factor, rows.start)
        return Operand(buffer.data.ptr, stride, part, rows.stop - rows.start, factor)

    def stage(
        self, rows: slice, buffer: Array, weight: Array = None, gradient_divisor: Array = None
    ) -> Operand:  # fmt: skip
        """Copy `rows` to `buffer` in the format of operands. Returns the operand.

        If `weight` (of all rows) is given, row i is multiplied by weight[i] / gradient_divisor[0].
        """
        operand = self.staged_operand(rows, buffer)
        self.launcher.launch_rows(
            "stage", operand.rows, self.layout.features, z=matrix(self.features, rows.start),
            n=operand.rows, d=self.features.shape[1], exponent=address(self.exponent, rows.start),
            feature_divisor=self.feature_divisor, weight=address(weight, rows.start),
            gradient_divisor=gradient_divisor, out=buffer, stride=operand.stride, part=operand.part,
        )  # fmt: skip
        return operand

    def tensor_map(self, operand: Operand, box_rows: int) -> Any:
        """The tensor map of an operand with all its parts, of which a sweep copies `box_rows`."""
        item = config.element_bytes(self.precision)
        width = config.OPERAND_PARTS.get(self.precision, 1) * self.layout.features * item
        return self.launcher.queue.tensor_map(
            operand.data, operand.rows, width, operand.stride * item, box_rows, self.precision
        )


def launch_over_block(
    kernel: ScheduledKernel, shape: config.Tile | config.Sweep, multiprocessors: int,
    query: tuple[Operand, OperandSide], key: tuple[Operand, OperandSide], arguments: Fields,
    triangle: bool = False, segments: int = 0,
) -> None:  # fmt: skip
    """Launch a kernel over the block of two operands, with as many thread blocks as run at once.

    `query` and `key` are the block's operand and the side that has made it. A sweep also gets
    tensor maps of the operands, and `segments` (0: the fastest number) for each query tile.
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
    query_side.launcher.launch_scheduled(kernel, blocks, arguments)


def find_feature_divisors(
    launcher: Launcher, sides: Sequence[OperandSide], multiprocessors: int
) -> Array | None:
    """Choose float16 divisors of queries and keys, so that operands neither overflow nor underflow.

    A divisor is the power of two that brings the largest feature to [2^14, 2^15), because float16
    overflows at 65504. A side whose features have the dtype float16 needs no divisor
    (`OperandRows.has_divisor`), and its number is 1. Sets `feature_divisor` of all other sides.
    There is one side if queries are the keys. Returns an array of three numbers: the two divisors
    and their product. None: no side has a divisor.
    """
    divided = [side for side in sides if side.layout.has_divisor]
    if not divided:
        return None
    largest, divisors = launcher.queue.zeroed_array(2, np.uint32), cupy.empty(3)
    for side in divided:
        (n, d), index = side.features.shape, sides.index(side)
        # few warps, because each reads the largest number so far
        launcher.launch_rows(
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
    launcher: Launcher, values: Array, value_scale: Fields, exponent_scale: Fields,
    real: np.dtype[Any],
) -> Array:  # fmt: skip
    """Convert `values` to the unit of products, for kernels that compare or add them to products.

    Scales are struct Scale: `values` times `value_scale`, and results times `exponent_scale`, are
    exponents.
    """
    n = len(values)
    out = cupy.empty(n, real)
    launcher.launch_vectors(
        "to_products", n, values=values, value_scale=value_scale, n=n, scale=exponent_scale, out=out
    )
    return out


# --- gradient blocks, the operands of products that compute dQ and dK -----------------------------


class GradientBlock:
    """P = dL/dx of a block, divided by the gradient divisor, in the workspace.

    There is room for `columns` columns. An element has the precision of the operands; with two
    parts (bf16x3, fp16x3), a row has the first part of all elements, then the second part of all.
    """

    def __init__(self, memory: Array, columns: int, precision: str) -> None:
        self.memory, self.precision = memory, precision
        self.first_column = 0  # the column in memory at which the block begins
        self.item = config.element_bytes(precision)  # bytes of an element, or of one of its parts
        # in elements: from part to part of a row, and from row to row
        self.part = config.gradient_stride(columns, precision)
        self.stride = config.OPERAND_PARTS.get(precision, 1) * self.part

    def from_column(self, first: int) -> GradientBlock:
        """A gradient block in the same memory, which begins `first` columns later."""
        rest = copy(self)
        rest.first_column = self.first_column + first
        return rest

    @property
    def data(self) -> int:
        """Address of the first element."""
        return int(self.memory.data.ptr) + self.first_column * self.item

    @property
    def fields(self) -> Fields:
        """The fields of struct GradientBlock."""
        return {"data": self.data, "stride": self.stride, "part": self.part}

    def tensor_map(self, queue: Queue, rows: int) -> Any:
        """The tensor map of `rows` rows, which a sweep stores in strips of 16 rows."""
        width, stride = (self.stride - self.first_column) * self.item, self.stride * self.item
        return queue.tensor_map(self.data, rows, width, stride, config.STRIP, self.precision)


# Arguments of a sweep that writes no gradient block
NO_GRADIENT_BLOCK: Fields = {
    "gradient_block": {"data": 0, "stride": 0, "part": 0},
    "gradient_map": np.zeros(SIZE, np.uint8).view(f"V{SIZE}"),
}


class CachedExponentials:
    """Exponentials that the log-sum-exp pass stores, and of which the gradient pass computes P.

    They belong to the first `columns` columns of the logit matrix, in all rows. They lie in the
    layout of a gradient block, which then overwrites them (kernels/cuda/sm90/sweep_lse.cu).
    """

    def __init__(self, schedule: Schedule, parts: Mapping[str, Array], queue: Queue) -> None:
        assert schedule.operands is not None
        self.columns, m = schedule.cached_columns, schedule.call.shape[0]
        self.block = GradientBlock(parts["exponentials"], self.columns, schedule.operands.precision)
        self.tiles = -(-self.columns // config.BLOCK_M)  # key tiles
        # [strips of 16 rows, tiles] float32: reference exponents, which were subtracted from logits
        self.references = parts["references"]
        # for each query tile, 1 if its exponentials are not cached, because its logits lie too far
        # apart for one reference exponent in each strip and tile; 0 before the pass
        self.uncached_tiles = queue.zeroed_array(-(-m // config.BLOCK_M), np.int32)

    def has(self, columns: slice) -> bool:
        """Whether the exponentials of a block of these columns are cached."""
        return bool(columns.stop <= self.columns)

    @property
    def fields(self) -> Fields:
        """The fields of struct CachedExponentials."""
        return {"references": self.references, "stride": self.tiles,
                "uncached_tiles": self.uncached_tiles}  # fmt: skip


NOTHING_CACHED: Fields = {"references": 0, "stride": 0, "uncached_tiles": 0}
