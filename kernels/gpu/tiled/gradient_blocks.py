"""Gradient blocks, the factors that a kernel computes one from, and the sums of their products."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from ...problem import Array
from .. import config
from ..device.arguments import Fields, address
from ..device.launcher import Launcher
from ..device.launches import Queue
from ..device.signatures import structure
from ..device.tensor_map import SIZE
from ..schedule import Schedule

# struct FactorSources: vectors of the epilogue
SOURCES = tuple(name for name, _ in structure("vectors.cu", "FactorSources").fields)
RANGES, RANGE_THREADS = structure("vectors.cu", "Ranges"), 1024


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
    """Exponentials that the log-sum-exp pass stores and the gradient pass reads.

    They belong to the first columns of the logit matrix, and lie in the layout of a gradient block
    (kernels/cuda/sm90/sweep_lse.cu).
    """

    def __init__(self, schedule: Schedule, memory: Mapping[str, Array], queue: Queue) -> None:
        assert schedule.operands is not None
        self.columns, m = schedule.cached_columns, schedule.call.shape[0]
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

    The sums were divided by the gradient divisor. Rows of dQ may have several copies, arrays
    [rows, stride] one after another: a row is the sum of its `dq_copies` copies. Rows before
    `first`, if any, are in `overlay`, which lies in the memory of the gradient.
    """

    array: Array
    stride: int
    first: int
    overlay: Accumulator | None = None
    dq_copies: int = 1  # 1 for dK

    @property
    def copy_stride(self) -> int:
        """Elements from a copy to the next copy."""
        return int(self.array.size) // self.dq_copies

    def pointer(self, row: int) -> int:
        if self.overlay is not None and row < self.first:
            return self.overlay.pointer(row)
        offset = (row - self.first) * self.stride * self.array.dtype.itemsize
        return int(self.array.data.ptr + offset)
