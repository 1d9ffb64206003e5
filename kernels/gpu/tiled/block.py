"""Launches over one block of the logit matrix: tiles, or a sweep."""

from __future__ import annotations

from typing import Any

from ...problem import Array, Problem
from .. import config
from ..device.arguments import NATURAL, Fields, address
from .context import Context
from .operands import Operand, Side


class PairVectors:
    """Limits and biases of pairs, as kernels take them (LIMITS and BIAS of kernels/cuda/block.cuh).

    Kernels add the bias of a column to all of its logits, not to those alone of which it is the
    key. That changes no softmax of the column, and adds the bias to its log-sum-exp (`of_columns`).
    Where rows are keys of their columns, so it is with them (`of_rows`).
    """

    def __init__(self, context: Context, problem: Problem) -> None:
        def products(values: Array | None, unit: Fields) -> Array | None:
            return None if values is None else context.to_products(values, unit)

        self.row_limits, self.column_limits = (
            products(dots, context.exponent_scale) for dots in (problem.limits, problem.key_limits)
        )
        self.of_rows, self.of_columns = problem.query_bias, problem.key_bias  # natural units
        self.row_bias, self.column_bias = (
            products(bias, NATURAL) for bias in (self.of_rows, self.of_columns)
        )

    def defines(self, columns: int) -> dict[str, int]:
        """-D options; `columns`: whether columns have a softmax, 0 or 1."""
        made = {}
        if self.row_limits is not None:
            made["LIMITS"] = 1 + columns
        if self.column_bias is not None:
            made["BIAS"] = 1 if self.row_bias is None else 2
        return made

    def fields(self, rows: slice, columns: slice) -> Fields:
        """Fields of struct Block that these options add."""
        made: Fields = {}
        if self.row_limits is not None:
            made["row_limits"] = address(self.row_limits, rows.start)
            made["column_limits"] = address(self.column_limits, columns.start)
        if self.column_bias is not None:
            made["row_bias"] = address(self.row_bias, rows.start)
            made["column_bias"] = address(self.column_bias, columns.start)
        return made


class BlockLauncher:
    """Launches kernels on the queries `q` and the keys `k` of a block."""

    q: Operand
    k: Operand

    def __init__(self, context: Context, problem: Problem) -> None:
        self.context, self.launcher, self.problem = context, context.launcher, problem
        self.tile: config.Tile | config.Sweep = context.sweep or context.tile
        self.scale = context.logit_scale  # before features are staged, which needs it
        if context.pair_vectors is None and not problem.plain_logits:
            context.pair_vectors = PairVectors(context, problem)
        self.pair_vectors: PairVectors | None = context.pair_vectors
        # what kernels are compiled for
        self.sets = {"SETS": 1} if problem.set_size > 1 else {}
        self.options = {
            "IDS": int(problem.query_ids is not None), "FACTORS": int(problem.normalize),
            **self.sets,
        }  # fmt: skip
        # and those kernels that sum
        self.of_sums: dict[str, Any] = {"MOMENTS": 1} if problem.moments else {}

    def launch_tiles(
        self, kernel: str, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, **defines: int,
    ) -> None:  # fmt: skip
        """A kernel of kernels/cuda/tiled: persistent thread blocks, which take several tiles."""
        tile = self.tile
        assert isinstance(tile, config.Tile)
        if self.pair_vectors is not None:
            defines |= self.pair_vectors.defines(defines.get("COLUMNS", 0))
        blocks = tile.blocks(self.q.rows, self.k.rows, self.context.properties.multiprocessors)
        self.launcher.launch(
            f"tiled/{kernel}.cu", kernel, blocks, tile.threads,
            {"block": self.block_fields(rows, columns, triangle), **arguments}, tile.shared,
            BLOCK_N=tile.block_n, WARP_N=tile.warp_n, STAGES=tile.stages, LEVELS=tile.levels,
            MIN_BLOCKS=tile.min_blocks, **self.options, **defines,
        )  # fmt: skip

    def launch_sweep(
        self, kernel: str, rows: slice, columns: slice, arguments: Fields,
        triangle: bool = False, panel: bool = True, sums: bool = False, segments: int = 0,
        **defines: int,
    ) -> None:  # fmt: skip
        """A kernel of kernels/cuda/sm90: persistent thread blocks. `panel` and `sums`: what it
        makes, see `Sweep.stages`; `segments`: into how many each query panel's tiles are cut, 0 for
        the best number."""
        context, sweep, q, k = self.context, self.tile, self.q, self.k
        assert isinstance(sweep, config.Sweep)
        shape = config.defines(sweep, panel, sums)
        if self.pair_vectors is not None:
            defines |= self.pair_vectors.defines(defines.get("COLUMNS", 0))
        self.launcher.launch(
            f"sm90/{kernel}.cu", kernel, sweep.blocks(q.rows, k.rows, triangle), sweep.threads,
            {
                "q": self.operand_map(q, context.query, sweep.query_box),
                "k": self.operand_map(k, context.key, config.BLOCK_M),
                "block": self.block_fields(rows, columns, triangle),
                "segments": segments or sweep.segments(q.rows, k.rows, triangle), **arguments,
            },
            shape["SHARED"],
            **self.options, **shape, **defines,
        )  # fmt: skip

    def operand_map(self, z: Operand, side: Side, box_rows: int) -> Any:
        """Tensor map of an operand, all of its parts."""
        context = self.context
        width = context.parts * side.padded * context.item
        return self.launcher.queue.tensor_map(
            z.data, z.rows, width, z.stride * context.item, box_rows, context.precision
        )

    def block_fields(self, rows: slice, columns: slice, triangle: bool) -> Fields:
        """struct Block."""
        context, problem = self.context, self.problem
        row_tiles, column_tiles = self.tiles()
        fields = {
            "q": self.q.fields(context.item), "k": self.k.fields(context.item),
            "width": context.width, "first_row": rows.start, "first_column": columns.start,
            "row_tiles": row_tiles, "column_tiles": column_tiles,
            "positives": address(problem.positives, rows.start), "set_size": problem.set_size,
            "query_ids": address(problem.query_ids, rows.start),
            "key_ids": address(problem.key_ids, columns.start),
            "symmetric": problem.symmetric, "triangle": triangle, "scale": self.scale,
        }  # fmt: skip
        if self.pair_vectors is not None:
            fields |= self.pair_vectors.fields(rows, columns)
        return fields

    def tiles(self) -> tuple[int, int]:
        """Tiles of the block's rows, and of its columns."""
        return -(-self.q.rows // self.tile.panel_rows), -(-self.k.rows // self.tile.block_n)
