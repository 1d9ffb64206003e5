"""The guide of a call on a GPU: it marks the pairs of a block that softmaxes leave out."""

from __future__ import annotations

import cupy
import numpy as np

from ...problem import Array, Problem, fast_replace
from ...targets import guide_problem
from .. import config
from ..device.arguments import NATURAL, Fields, address
from ..device.launcher import Launcher
from ..device.launches import Queue
from ..linear import Rows
from ..schedule import Schedule
from ..vectors import TiledVectors
from .operands import OperandSide, find_feature_divisors, launch_over_block, to_products


class Guide:
    """The guide's features as operands, and the limits that their products are compared with."""

    def __init__(self, problem: Problem, schedule: Schedule, queue: Queue) -> None:
        assert schedule.guide is not None
        self.schedule, self.operands = schedule.guide, schedule.guide.operands
        self.launcher = Launcher(cupy.cuda.Device(), self.operands.precision, queue)
        self.real = np.dtype(self.operands.accumulator_dtype)
        side = self.launcher, problem.normalize, self.real
        self.query = OperandSide(*side, problem.guide_query, self.operands.query)
        self.key = self.query
        if not problem.symmetric:
            self.key = OperandSide(*side, problem.guide_key, self.operands.key)
        self.multiprocessors = schedule.device.multiprocessors
        self.feature_divisors = find_feature_divisors(
            self.launcher, [self.query, self.key][: 2 - problem.symmetric], self.multiprocessors
        )
        self.limits: tuple[Array, Array | None] | None = None
        self.row_nans: Array = None

    def is_of(self, problem: Problem) -> bool:
        """Whether the features of a problem are the guide's: see `targets.guide_problem`."""
        return problem.query is self.query.features

    @property
    def linear_rows(self) -> tuple[Rows, Rows]:
        return Rows(self.launcher, self.query), Rows(self.launcher, self.key)

    def find_row_nans(self, problem: Problem, vectors: TiledVectors) -> Array:
        """[M] NaN for rows whose loss depends on a feature of the guide that is not finite, else 0.

        Such a query spoils its own row; or all rows, if columns have a softmax. Such a key spoils
        all rows.
        """
        guide, any_key = guide_problem(problem), cupy.zeros(1)
        rows = vectors.find_row_nans(guide, any_key)
        if problem.two_sided:
            queries = fast_replace(guide, key=guide.query, symmetric=True)
            vectors.find_row_nans(queries, any_key)
        self.row_nans = vectors.add_nans(cupy.zeros(problem.shape[0]), rows, any_key)
        return self.row_nans

    def prepare(self, problem: Problem) -> None:
        """Before the first fold: limits as products, of rows and of columns."""
        bias = 0.0
        if isinstance(self.schedule.shape, config.Sweep):
            width = self.query.features.shape[1] * self.operands.item
            bias = config.sweep_truncation_bias(self.operands.precision, width)
        scale = NATURAL | {
            "factor": 1 + bias,
            "feature_divisors": address(self.feature_divisors, 2),
        }

        def products(limits: Array | None) -> Array | None:
            if limits is None:
                return None
            return to_products(self.launcher, limits, NATURAL, scale, self.real)

        self.limits = products(problem.guide_limits), products(problem.guide_key_limits)
        self.positives = problem.positives

    def mark(
        self, rows: slice, columns: slice, memory: dict[str, Array], staged: dict[str, slice]
    ) -> Fields:
        """Mark the pairs of a block. Returns the fields of struct Block that have the marks."""
        assert self.limits is not None
        query = self.query.block(rows, "guide_query_rows", memory, staged)
        key = self.key.block(columns, "guide_key_rows", memory, staged)
        item, shape = self.operands.item, self.schedule.shape
        marks = {"row_marks": memory["row_marks"], "column_marks": memory.get("column_marks")}
        row_limits, column_limits = self.limits
        block = {
            "q": query.fields(item), "k": key.fields(item), "width": self.operands.width,
            "row_tiles": -(-query.rows // shape.query_tile_rows),
            "column_tiles": -(-key.rows // shape.block_n), "scale": NATURAL,
            "row_limits": address(row_limits, rows.start),
            "column_limits": address(column_limits, columns.start),
            "positives": address(self.positives, rows.start), **NO_OPTIONS,
        }  # fmt: skip
        launch_over_block(
            self.schedule.kernel, shape, self.multiprocessors, (query, self.query),
            (key, self.key), {"block": block, **marks},
        )  # fmt: skip
        return marks


# Fields of struct Block for options of pairs, none of which changes a mark
NO_OPTIONS: Fields = {
    "first_row": 0, "first_column": 0, "set_size": 1, "query_ids": None, "key_ids": None,
    "symmetric": False, "triangle": False,
}  # fmt: skip
