"""Memory of a call on a GPU: workspace, operands as kernels read them, gradient accumulators."""

from __future__ import annotations

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

DIRECT = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16",
          "fp16": "float16"}  # fmt: skip


class Scratch:
    """The workspace of a call: one allocation, which each fold divides anew. Its `Context` owns it;
    it goes back to CuPy's pool with the context, after an error too."""

    ALIGNMENT = 256

    def __init__(self, size: int, queue: Queue) -> None:
        self.size, self.queue = size + 16 * self.ALIGNMENT, queue
        self.memory: Array = None
        self.taken = self.kept = 0

    def reset(self) -> None:
        """A fold begins: all of the memory is free, but for what is kept."""
        if self.memory is None:
            self.memory = self.queue.scratch(self.size)
        self.taken = self.kept

    def keep(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
        """An array for all folds, before the first of them."""
        self.reset()
        array = self.take(shape, dtype)
        self.kept = self.taken
        return array

    def take(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
        """An array in memory that is still free."""
        array = cupy.ndarray(shape, dtype, self.memory.data + self.taken)
        self.taken += -(-array.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        assert self.taken <= self.size
        return array


# --- operands -------------------------------------------------------------------------------------


@dataclass
class Operand:
    """Rows of one side as the tiled kernels and cuBLAS read them."""

    data: int  # address
    stride: int  # elements
    part: int  # elements from part to part of a row (bf16x3, fp16x3)
    rows: int
    factor: int  # address

    def fields(self, item: int) -> Fields:
        """struct Operand; `item`: bytes of an element."""
        return {"data": self.data, "stride": self.stride * item, "part": self.part * item,
                "rows": self.rows, "factor": self.factor}  # fmt: skip


class Side:
    """One side's features: read in place, or staged in the operands' format, all of them once or a
    block at a time."""

    def __init__(
        self, launcher: Launcher, features: Array, normalize: bool, real: np.dtype[Any]
    ) -> None:
        item = features.dtype.itemsize
        self.launcher, self.precision, self.features = launcher, launcher.precision, features
        self.factor = self.exponent = None
        self.shift = 0  # address of the power of two that features are divided by; 0: as they are
        n, d = features.shape
        self.direct = (
            not normalize
            and DIRECT.get(self.precision) == features.dtype.name
            and (features.strides[1] == item or d == 1)
            and d * item % 16 == 0
            and features.strides[0] % 16 == 0
            and features.strides[0] >= d * item
            and features.data.ptr % 16 == 0
        )
        self.padded = d if self.direct else config.padded(d, self.precision)
        self.whole: Operand | None = None  # all rows, where they need not be staged by blocks
        self.stage_once = False
        if self.direct:
            self.whole = Operand(address(features), features.strides[0] // item, 0, n, 0)
        if normalize:
            self.factor = cupy.empty(n, real)
            self.exponent = cupy.empty(n, np.int32)
            launcher.rows(
                "row_norms", n, z=matrix(features), n=n, d=d, factor=self.factor,
                exponent=self.exponent,
            )  # fmt: skip

    @property
    def row_bytes(self) -> int:
        """Of a staged row."""
        return self.padded * config.OPERAND_BYTES[self.precision]

    def staged_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows staged; 0 where they are read in place."""
        return 0 if self.direct else rows * self.row_bytes

    def buffer(self, rows: int, scratch: Scratch) -> Array:
        """Room for staging blocks of `rows` rows; None where they are not staged by blocks."""
        if self.direct or self.stage_once:
            return None
        return scratch.take((self.staged_bytes(rows),))

    def block(self, rows: slice, buffer: Array | None, staged: dict[int, slice]) -> Operand:
        """Rows `rows`, of the whole or staged into `buffer`: unless `staged` says that it has
        them."""
        if buffer is not None:
            return self.stage(rows, buffer, staged)
        if self.whole is None:
            n = len(self.features)
            self.memory = cupy.empty(self.staged_bytes(n), np.uint8)
            self.whole = self.stage(slice(0, n), self.memory, {})
        z, n, factor = self.whole, rows.stop - rows.start, address(self.factor, rows.start)
        offset = rows.start * z.stride * config.element_bytes(self.precision)
        return Operand(z.data + offset, z.stride, z.part, n, factor)

    def stage(
        self, rows: slice, buffer: Array, staged: dict[int, slice], weight: Array = None,
        unit: Array = None,
    ) -> Operand:  # fmt: skip
        """Rows `rows`, copied into `buffer`; each times its `weight`, if given, over `unit`."""
        n, factor = rows.stop - rows.start, address(self.factor, rows.start)
        parts = config.OPERAND_PARTS.get(self.precision, 1)
        part, stride = self.padded if parts > 1 else 0, self.padded * parts
        if staged.get(buffer.data.ptr) != rows:
            staged[buffer.data.ptr] = rows
            self.launcher.rows(
                "stage", n, self.padded, z=matrix(self.features, rows.start), n=n,
                d=self.features.shape[1], exponent=address(self.exponent, rows.start),
                shift=self.shift, weight=address(weight, rows.start), unit=unit, out=buffer,
                stride=stride, part=part,
            )  # fmt: skip
        return Operand(buffer.data.ptr, stride, part, n, factor)


# --- gradient panels ------------------------------------------------------------------------------


class Panel:
    """dL/dx of a block: `columns` elements a row, or in each part of a row."""

    def __init__(self, memory: Array, columns: int, precision: str) -> None:
        self.memory, self.precision, self.first = memory, precision, 0
        self.item = config.element_bytes(precision)
        # elements from part to part of a row, and from row to row
        self.part = config.panel_stride(columns, precision)
        self.stride = config.OPERAND_PARTS.get(precision, 1) * self.part

    def from_column(self, first: int) -> Panel:
        """The same memory without the columns before `first`."""
        panel = copy(self)
        panel.first = self.first + first
        return panel

    @property
    def data(self) -> int:
        """Address of the first element."""
        return int(self.memory.data.ptr) + self.first * self.item

    @property
    def fields(self) -> Fields:
        """struct GradientPanel."""
        return {"data": self.data, "stride": self.stride, "part": self.part}

    def map(self, queue: Queue, rows: int) -> Any:
        """Tensor map of `rows` rows, which a sweep stores in strips of 16."""
        width, stride = (self.stride - self.first) * self.item, self.stride * self.item
        return queue.tensor_map(self.data, rows, width, stride, config.STRIP, self.precision)


NO_PANEL: Fields = {
    "panel": {"data": 0, "stride": 0, "part": 0},
    "panel_map": np.zeros(SIZE, np.uint8).view(f"V{SIZE}"),
}


class Kept:
    """Exponentials of the first columns' logits, which the log-sum-exp fold leaves to the gradient
    fold in the memory of the gradient panel: see kernels/cuda/sm90/sweep_lse.cu."""

    def __init__(
        self, scratch: Scratch, queue: Queue, panel: Panel, rows: int, columns: int
    ) -> None:
        self.panel, self.columns = panel, columns
        self.tiles = -(-columns // config.BLOCK_M)
        self.references = scratch.keep((-(-rows // config.STRIP), self.tiles), np.float32)
        self.anew = queue.zeros(-(-rows // config.BLOCK_M), np.int32)

    def has(self, columns: slice) -> bool:
        """Whether exponentials of a block of these columns are kept."""
        return bool(columns.stop <= self.columns)

    @property
    def fields(self) -> Fields:
        """struct Kept."""
        return {"references": self.references, "stride": self.tiles, "anew": self.anew}


NOTHING_KEPT: Fields = {"references": 0, "stride": 0, "anew": 0}


# --- accumulators ---------------------------------------------------------------------------------


@dataclass
class Accumulator:
    """Unfinished gradients of rows first.., [rows, stride], in the panels' unit: the sum of
    `copies` of them, one after another. Those of rows before `first` may overlay their
    destination: `before`."""

    array: Array
    stride: int
    first: int
    before: Accumulator | None = None
    copies: int = 1

    @property
    def copy_stride(self) -> int:
        """Elements from copy to copy."""
        return int(self.array.size) // self.copies

    def pointer(self, row: int) -> int:
        if self.before is not None and row < self.first:
            return self.before.pointer(row)
        offset = (row - self.first) * self.stride * self.array.dtype.itemsize
        return int(self.array.data.ptr + offset)


def in_place(out: Array | None, width: int, real: np.dtype[Any]) -> bool:
    """Whether gradients can accumulate in their destination, in products of `width` features."""
    return out is not None and (
        out.dtype == real
        and out.shape[1] == width
        and out.strides[1] == real.itemsize
        and out.strides[0] >= width * real.itemsize
        and out.strides[0] % 16 == 0
        and out.data.ptr % 16 == 0
    )


def overlay(out: Array | None, width: int, real: np.dtype[Any]) -> int:
    """Bytes of a row of the destination, where accumulators can overlay it; else 0. Rows may not be
    longer than accumulators: finished ones would overwrite others that are not."""
    if out is None or not out.flags.c_contiguous or out.data.ptr % 16:
        return 0
    row = out.shape[1] * out.dtype.itemsize
    return int(row) if row <= width * real.itemsize else 0
