"""The guide of a call on a GPU: before a block of the loss, it marks the pairs to leave out.

A pair is left out if its product of the guide's features is above the limit of its row (column).
"""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np

from ...problem import Array, Problem
from .. import config
from ..device.arguments import NATURAL, Fields, address
from ..device.launcher import Launcher
from ..device.launches import Queue
from ..linear import GPURows
from ..schedule import Schedule
from ..vectors import TiledVectors
from .operands import OperandSide, find_feature_divisors, launch_over_block, to_products


class Guide:
    """The guide's features as operands, and the limits with which their products are compared.

    The limit of a row is the largest product with its positives, plus `guide_margin`; infinity
    without a positive. The order of calls: `with_limits` (by `GPU.solve`), `prepare` (by
    `Buffers.prepare`), then `mark` for each block of each pass (by `PassRun.run`). Marks that are
    kept are made in the first pass.
    """

    def __init__(self, problem: Problem, schedule: Schedule, queue: Queue) -> None:
        assert schedule.guide is not None
        # precision and kernels of the guide's products, which may differ from those of the loss
        self.schedule, self.operands = schedule.guide, schedule.guide.operands
        self.launcher = Launcher(cupy.cuda.Device(), self.operands.precision, queue)
        self.real = np.dtype(self.operands.accumulator_dtype)
        side = self.launcher, problem.normalize, self.real
        self.query = OperandSide(*side, problem.guide_query, self.operands.query)
        self.key = self.query
        if not problem.symmetric:
            self.key = OperandSide(*side, problem.guide_key, self.operands.key)
        self.keeps_marks = "row_marks" in schedule.cached
        self.multiprocessors = schedule.device.multiprocessors
        self.feature_divisors = find_feature_divisors(
            self.launcher, [self.query, self.key][: 2 - problem.symmetric], self.multiprocessors
        )
        self.limits: tuple[Array, Array | None] | None = None  # of rows, of columns, as products

    def with_limits(self, problem: Problem, vectors: TiledVectors) -> Problem:
        """The problem with the limits of the guide's products, and with NaN for each loss that
        depends on a feature of the guide that is not finite.

        Such a feature of a query sets the NaN flag of its row, in `known_row_nans`. Such a feature
        of a key sets `vectors.any_key`, which is added to all losses. If columns have a softmax, or
        queries are the keys, such a feature of a query also sets `vectors.any_key`, because the
        softmax of each column has all queries. `TiledVectors.find_row_nans` copies `known_row_nans`
        to the NaN flags of the rows, and `TiledVectors.finalize` adds all flags to the losses. The
        guide's features are in no product of the loss, so gradients get NaN another way: by the
        upstream gradients, to which this method adds all flags.
        """
        (m, n, _), upstream = problem.shape, problem.upstream
        limits, row_nans = cupy.empty(m), None if problem.symmetric else cupy.empty(m)
        query, key = (GPURows(self.launcher, side) for side in (self.query, self.key))
        key_count = 0 if problem.symmetric else n  # keys that the kernel checks after the queries
        self.launcher.launch_rows(
            "guide_limits", m + key_count, file="block/guide_rows.cu", query=query.fields(),
            key=key.fields(), m=m, n=key_count, d=self.query.features.shape[1],
            positives=problem.positives, set_size=problem.set_size, margin=problem.guide_margin,
            two_sided=problem.two_sided, known_row_nans=problem.known_row_nans, limits=limits,
            row_nans=row_nans, any_key_not_finite=vectors.any_key,
        )  # fmt: skip
        spoiled = cupy.empty(len(upstream))
        self.launcher.launch(
            "block/guide_rows.cu", "spoil_upstream", -(-len(upstream) // 128), 128,
            {"n": len(upstream), "upstream": upstream, "row_nans": row_nans,
             "any_key_not_finite": vectors.any_key, "out": spoiled},
        )  # fmt: skip
        both = problem.symmetric or problem.two_sided
        return replace(
            problem, guide_query_limits=limits, guide_key_limits=limits if both else None,
            known_row_nans=row_nans, upstream=spoiled,
        )  # fmt: skip

    def prepare(self, problem: Problem) -> None:
        """Convert the limits to the unit of the kernel's products, before the first pass."""
        truncation_bias = 0.0
        if isinstance(self.schedule.shape, config.Sweep):
            width = self.query.features.shape[1] * self.operands.item
            truncation_bias = config.sweep_truncation_bias(self.operands.precision, width)
        scale = NATURAL | {
            "factor": 1 + truncation_bias,
            "feature_divisors": address(self.feature_divisors, 2),
        }

        rows = to_products(self.launcher, problem.guide_query_limits, NATURAL, scale, self.real)
        # key i is the positive of query i, so a row and its column have the same limit
        self.limits = rows, None if problem.guide_key_limits is None else rows
        self.positives = problem.positives

    def mark(
        self, rows: slice, columns: slice, parts: dict[str, Array], staged: dict[str, slice],
        is_first_pass: bool,
    ) -> Fields:  # fmt: skip
        """Mark the pairs of a block. Returns the fields that the marks add to its struct Block."""
        assert self.limits is not None
        first_word, mark_rows = 0, rows.stop - rows.start
        if self.keeps_marks:  # of all rows, in the order of `mark_word` (cuda/block/options.cuh)
            mark_rows = len(self.query.features)
            groups, beyond = divmod(columns.start, config.MARKED_COLUMNS)
            assert beyond == 0
            first_word = (groups * mark_rows + rows.start) * config.MARK_BYTES
        mark_fields: Fields = {
            name: address(parts.get(name), first_word) for name in ("row_marks", "column_marks")
        } | {"mark_rows": mark_rows}
        if self.keeps_marks and not is_first_pass:
            return mark_fields
        query = self.query.prepare_rows(rows, "guide_query_rows", parts, staged)
        key = self.key.prepare_rows(columns, "guide_key_rows", parts, staged)
        item, shape = self.operands.item, self.schedule.shape
        row_limits, column_limits = self.limits
        block = {
            "q": query.fields(item), "k": key.fields(item), "width": self.operands.part_bytes,
            "row_tiles": -(-query.rows // shape.query_tile_rows),
            "column_tiles": -(-key.rows // shape.block_n), "scale": NATURAL,
            "row_limits": address(row_limits, rows.start),
            "column_limits": address(column_limits, columns.start),
            "positives": address(self.positives, rows.start), **UNUSED_FIELDS,
        }  # fmt: skip
        launch_over_block(
            self.schedule.kernel, shape, self.multiprocessors, (query, self.query),
            (key, self.key), {"block": block, **mark_fields},
        )  # fmt: skip
        return mark_fields


# Values of the fields of struct Block on which no mark depends
UNUSED_FIELDS: Fields = {
    "first_row": 0, "first_column": 0, "set_size": 1, "query_ids": None, "key_ids": None,
    "symmetric": False, "triangle": False,
}  # fmt: skip
