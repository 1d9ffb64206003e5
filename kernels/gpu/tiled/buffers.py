"""The data that all passes of one call share on a GPU: workspace, operands, vectors of options.

`GPU` (backend.py) makes them, and the runs of passes (run.py) read them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import cupy
import numpy as np

from ...problem import Array, Problem
from .. import config
from ..device.arguments import NATURAL, Fields, address
from ..device.launcher import Launcher
from ..device.launches import Queue
from ..linear import GPURows
from ..schedule import Schedule, ScheduledPass
from ..vectors import TiledVectors
from .guide import Guide
from .operands import CachedExponentials, OperandSide, find_feature_divisors, to_products


class Workspace:
    """The workspace of a call: one allocation, which each pass divides into parts of its own.

    Cached exponentials and kept marks come first, and stay from pass to pass. The memory goes back
    to CuPy's pool with the call's `Buffers`, also after an error.
    """

    def __init__(self, schedule: Schedule, queue: Queue) -> None:
        self.schedule, self.queue = schedule, queue
        self.memory: Array = None
        self.staged: dict[str, slice] = {}  # the staged rows in a part, by the part's name
        self.largest_block: tuple[int, int] | None = None  # of the last pass: rows, columns

    def divide(self, parts: config.Parts) -> dict[str, Array]:
        """The parts that stay, then `parts`: an array of bytes for each, by its name.

        `PassScheduler.parts` of kernels/gpu/schedule/passes.py has chosen names and sizes.
        """
        if self.memory is None:
            self.memory = self.queue.scratch(self.schedule.workspace)
        arrays, start = {}, 0
        for name, size in (self.schedule.cached | parts).items():
            arrays[name] = cupy.ndarray(size, np.uint8, self.memory.data + start)
            start += config.align(size)
        assert start <= self.schedule.workspace
        return arrays

    def begin_pass(self, scheduled: ScheduledPass) -> dict[str, Array]:
        """The parts of a pass. Rows that the last pass has staged stay if blocks have its size."""
        if self.largest_block != scheduled.grid.largest:
            self.largest_block, self.staged = scheduled.grid.largest, {}
        return self.divide(scheduled.parts)


class PairVectors:
    """The vectors of options of pairs as fields of struct Block (block/options.cuh).

    `column_bias` has the bias of each column's key. Kernels add this bias to all logits of the
    column, so that both directions share one exponential. The bias cancels in the softmax over the
    column. The log-sum-exp of the column contains the bias until `StatisticsRun` subtracts it.
    `row_bias` is None unless queries are the keys. Then the softmax over a column compares the rows
    as keys, and `row_bias` has the bias of each row (`Problem.query_bias`).
    """

    def __init__(self, buffers: Buffers, problem: Problem) -> None:
        self.row_bias, self.column_bias = problem.query_bias, problem.key_bias  # natural logits
        self.positive_tiles: Array | None = None
        if problem.query_pair_weights is not None and buffers.schedule.sweep is not None:
            self.positive_tiles = find_positive_tiles(buffers.launcher, problem)
        # vectors of rows and of columns of the whole matrix, by the names of their fields
        self.rows: Fields = {}
        self.columns: Fields = {}
        for pair in problem.pair_options.vectors:
            query, key = pair.find(problem)
            if pair.unit and not query is key is None:
                row, column = pair.fields
                self.rows[row] = buffers.convert(query, pair.unit)
                self.columns[column] = buffers.convert(key, pair.unit)

    def fields(self, rows: slice, columns: slice) -> Fields:
        """Fields that these options add to struct Block, for a block of the logit matrix."""
        fields: Fields = {name: address(vector, rows.start) for name, vector in self.rows.items()}
        if "query_pair_weights" in fields:
            tiles = self.positive_tiles
            if rows.start % config.BLOCK_M or columns.start % config.BLOCK_M:
                tiles = None  # the block's tiles are no tiles of the matrix: compare ids in all
            row_bytes = 0 if tiles is None else tiles.shape[1]
            fields |= {"positive_tiles": tiles, "positive_tiles_bytes": row_bytes}
        return fields | {
            name: address(vector, columns.start) for name, vector in self.columns.items()
        }


def find_positive_tiles(launcher: Launcher, problem: Problem) -> Array:
    """Find the tiles of 128 rows and 128 columns that have a pair of equal positive ids.

    A sweep compares ids only in these. Returns a bit for each tile: [query tiles, bytes], 8 key
    tiles a byte. A thread block may begin at the rows after the last query tile; they get zeros.
    """
    m, n, _ = problem.shape
    tiles, row_bytes = -(-m // config.BLOCK_M) + 1, -(-n // (8 * config.BLOCK_M))
    out = cupy.empty((tiles, row_bytes), np.uint8)
    launcher.launch(
        "block/positive_tiles.cu", "find_positive_tiles", tiles * -(-row_bytes // 8), 256,
        {"query_ids": problem.query_positive_ids, "m": m, "key_ids": problem.key_positive_ids,
         "n": n, "row_bytes": row_bytes, "tiles": out},
    )  # fmt: skip
    return out


class Buffers:
    """The workspace, operands and vectors of one call.

    `queue` runs launches on the current stream, or records them. `prepare` completes the buffers.
    """

    def __init__(self, problem: Problem, schedule: Schedule, queue: Queue) -> None:
        operands = schedule.operands
        assert operands is not None
        self.schedule, self.operands, self.precision = schedule, operands, operands.precision
        self.real = np.dtype(operands.accumulator_dtype)  # of sums and of vectors in kernels
        self.launcher = Launcher(cupy.cuda.Device(), self.precision, queue)
        side = self.launcher, problem.normalize, self.real
        self.query = OperandSide(*side, problem.query, operands.query)
        self.key = self.query
        if not problem.symmetric:
            self.key = OperandSide(*side, problem.key, operands.key)
        self.guide = Guide(problem, schedule, queue) if schedule.guide is not None else None
        self.vectors = TiledVectors(self.launcher, problem)
        self.scalars = self.vectors.scalars
        # Whether key i is the positive of query i by rule, without a vector. Read here, because
        # `materialize_vectors` later gives the problem a vector also in this case
        self.paired = problem.paired
        self.workspace = Workspace(schedule, queue)
        self.cached: CachedExponentials | None = None
        if schedule.cached_columns:
            self.cached = CachedExponentials(schedule, self.workspace.divide({}), queue)
        # struct Scale, by which kernels multiply products to get exponents: the scale of the logits
        # plus `hardness` (`Problem.exponent_scale`); {} before `prepare`
        self.exponent_scale: Fields = {}
        self.pair_vectors: PairVectors | None = None
        self._queries_by_key: tuple[Array, Array, Array] | None = None

    def prepare(self, problem: Problem) -> None:
        """Find, before the first pass: the feature divisors of float16, then the scale of products,
        then the vectors of options in the unit of products, also those of a guide.

        `GPU.run` calls this, and distill/solve.py for the distillation pass.
        """
        self.feature_divisors = find_feature_divisors(
            self.launcher, self.sides, self.schedule.device.multiprocessors
        )
        self.exponent_scale = {
            **self.scalars.exponent_scale,
            "factor": 1 + self.truncation_bias(problem.shape[2]),
            "feature_divisors": address(self.feature_divisors, 2),
        }
        if not problem.plain_logits or problem.has_positive_ids:
            self.pair_vectors = PairVectors(self, problem)
        if self.guide is not None:
            self.guide.prepare(problem)

    def truncation_bias(self, features: int) -> float:
        """The truncation bias of products of rows of `features` features, without padding, because
        adding its zeros truncates nothing. 0 for portable kernels."""
        if self.schedule.sweep is None:
            return 0.0
        return config.sweep_truncation_bias(self.precision, features * self.operands.item)

    @property
    def sides(self) -> list[OperandSide]:
        """Queries and keys; one side if the queries are the keys."""
        return [self.query] if self.key is self.query else [self.query, self.key]

    @cached_property
    def linear_rows(self) -> tuple[GPURows, GPURows]:
        """Queries and keys, for linear terms."""
        rows = [GPURows(self.launcher, side) for side in self.sides]
        return rows[0], rows[-1]

    def convert(self, values: Array | None, unit: str) -> Array | None:
        """Convert the numbers of an option (`VectorPair.unit`) to the numbers of kernels: dot
        products and logits to the unit of products."""
        if values is None or unit == "integers":
            return values
        if unit == "factors":
            return values.astype(self.real)
        return self.to_products(values, self.scalars.exponent_scale if unit == "dots" else NATURAL)

    def to_products(self, values: Array, value_scale: Fields) -> Array:
        """Convert `values`, which `value_scale` makes logits, to the unit of products."""
        return to_products(self.launcher, values, value_scale, self.exponent_scale, self.real)

    def add_bias(self, logits: Array, bias: Array, by: float, out: Array) -> None:
        """out = logits + by * bias: base-2 logits; `by` is +-log2 e for biases in natural units."""
        n = len(logits)
        self.launcher.launch_vectors("add_bias", n, x=logits, bias=bias, by=by, n=n, out=out)

    def list_queries_by_key(self, problem: Problem) -> tuple[Array, Array, Array]:
        """List the queries of each key: the inverse of `positives`, for dK at positives.

        Returns three arrays. `order` has indices into `positives`, and those of key j are
        order[begin[j] : end[j]], in ascending order; `begin` and `end` are [N].
        """
        if self._queries_by_key is None:
            launcher, positives = self.launcher, problem.positives
            m, n = positives.size, problem.shape[1]
            zeros = launcher.queue.zeroed_array(n + 1, np.int64)
            end, taken = zeros[:n], zeros[n:]
            begin, order = end, taken  # without positives among these keys: empty lists
            if not problem.lacks_positives:
                begin, order = cupy.empty(n, np.int64), cupy.empty(m, np.int64)
                launcher.launch_vectors("count_queries", m, positives=positives, m=m, end=end)
                launcher.launch_vectors("place_queries", n, n=n, begin=begin, end=end, taken=taken)
                launcher.launch_vectors(
                    "list_queries", m, positives=positives, m=m, end=end, order=order
                )
                launcher.launch_vectors("sort_queries", n, begin=begin, end=end, n=n, order=order)
            self._queries_by_key = order, begin, end
        return self._queries_by_key

    def divide_factors(self, factor: Array, ranges: Array) -> Array:
        """`factor` (float64) over the gradient divisor of struct Ranges, in the dtype of sums."""
        n = len(factor)
        out = cupy.empty(n, self.real)
        self.launcher.launch_vectors("divide_factors", n, x=factor, n=n, ranges=ranges, out=out)
        return out

    def add_partial_sums(
        self, partial_sums: Any, moments: Any, slots: int, ranges: Array, scale: Fields,
        rows: slice,
        first_sums: Array, second_sums: Array | None, moment_sums: Array | None,
    ) -> None:  # fmt: skip
        """Add the partial sums (x, y) of a block's tiles, `slots` for each row, to sums of `rows`.

        x goes to `first_sums`, y times the gradient divisor to `second_sums`, moments times the
        divisor to `moment_sums`. The kernel of the same name in vectors/sums.cuh has the formulas.
        """
        n = rows.stop - rows.start
        self.launcher.launch_vectors(
            "add_partial_sums", n, partial_sums=partial_sums, moments=moments, slots=slots,
            stride=n, n=n, gradient_divisor=ranges, scale=scale,
            first_sums=address(first_sums, rows.start),
            second_sums=address(second_sums, rows.start),
            moment_sums=address(moment_sums, rows.start),
        )  # fmt: skip
