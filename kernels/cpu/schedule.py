"""How a call runs on the CPU, decided before anything runs: method, tile and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..distill.problem import TaughtProblem
from ..grid import (
    Grid,
    has_few_blocks,
    least_block_side,
    make_workspace_error,
    slice_runs,
    slices,
)
from ..problem import Array, Gradients, Problem
from .operands import DTYPES, has_blas_layout

# Rows x columns of a tile, the fastest that was measured (benchmarks/NOTES.md): large tiles have
# long products and few sums. Rows of 2^n bytes would all map to the same cache sets
TILE = 2048, 1216
# Side of a tile if one triangle is visited: tiles on the diagonal are computed as a whole, so
# smaller tiles compute fewer pairs twice
TRIANGLE_SIDE = 896
# Tiles of a problem with groups (`slice_runs` divides rows and columns):
GROUP_ROWS = 1024  # largest number of rows of a tile
# A run of rows or columns of one group that is longer than LEAST_RUN is divided into slices of its
# own, so that whole tiles of different groups can be left out
LEAST_RUN = 128
# Largest length of a slice between such runs, which may have several groups: smaller tiles have
# fewer pairs of different groups
MIXED_SIDE = 384
PREFIX_TILE = 1024, 608  # there is a tile of each of several prefixes at once
ONE_BLOCK_LOGITS = 2**20  # largest number of logits of a call in one block

# --- method ---------------------------------------------------------------------------------------


def choose_method(problem: Problem) -> str:
    """The method of a call:

    "naive"      the whole matrix of logits, if the caller asks for it
    "one block"  three products of all rows, for a small batch
    "tiled"      passes over blocks, for other batches, and for all calls with a teacher. With a
                 teacher, the method "naive" makes the whole matrix one tile (`decide`)
    """
    if problem.method == "naive" and not isinstance(problem, TaughtProblem):
        return "naive"
    return "one block" if fits_one_block(problem) else "tiled"


def fits_one_block(problem: Problem) -> bool:
    """Whether `one_block` can compute the problem: all of these hold.

    - There are 1 to 2^20 logits (`ONE_BLOCK_LOGITS`), and D is not 0.
    - The method is "auto" or "fused".
    - The workspace has room for the logits, and for features and gradients of all rows.
    - `loss_follows_from_sums` is true.
    - There are no sets of positives, and `decoupled` and `hardness` are not set.
    - There are no retrieval ranks, no `progress`, no `known_row_nans`, and `key` has all keys.

    So ids, weights, a margin and normalisation are the options that `one_block` implements.
    """
    m, n, d = problem.shape
    if not 0 < m * n <= ONE_BLOCK_LOGITS or d == 0 or problem.method not in ("auto", "fused"):
        return False
    if problem.retrieval_ranks or problem.progress is not None:
        return False
    if (
        problem.set_size > 1
        or not problem.loss_follows_from_sums
        or problem.decoupled
        or problem.hardness
    ):
        return False
    if problem.known_row_nans is not None or problem.key_shard:
        return False
    item = DTYPES[problem.compute_precision].itemsize
    return bool((m * n + 2 * (m + n) * d) * item <= problem.workspace)


# --- passes over blocks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TileMemory:
    """The elements of the buffers of a pass, from which the size of a tile follows."""

    item: int  # bytes of an element
    width: int  # D
    has_guide: bool
    has_teacher: bool
    further_tiles: int  # tiles beside the products of a block: of prefixes, of options
    row_elements: int  # for each row of a tile: copies of features, the accumulator of dQ
    column_elements: int  # for each column of a tile: copies of features
    gradient: bool  # whether a buffer holds products with dL/dx
    has_prefixes: bool  # whether there is a tile of each prefix

    def block_elements(self, m: int, n: int) -> int:
        """Elements of the memory of a block: logits [m, n], and a guide's bits or teacher's logits.

        The bits of a guide take one byte for four rows of a column.
        """
        bits = -(-m // 4) * n if self.has_guide else 0
        return m * n * (1 + self.has_teacher) + -(-bits // self.item)

    def split_block(self, memory: Array, m: int, n: int) -> tuple[Array, Array | None]:
        """The parts of a block's memory: logits [m, n]; a guide's bits or a teacher's logits."""
        x, rest = memory[: m * n].reshape(m, n), memory[m * n :]
        if self.has_teacher:
            return x, rest[: m * n].reshape(m, n)
        if self.has_guide:
            return x, rest.view(np.uint8)[: -(-m // 4) * n].reshape(-1, n)
        return x, None

    def elements(self, bm: int, bn: int) -> int:
        """Elements of all buffers of a pass, for tiles of bm x bn."""
        elements = self.block_elements(bm, bn) + self.further_tiles * bm * bn
        elements += self.row_elements * bm + self.column_elements * bn
        return elements + self.gradient * max(bm, bn) * self.width

    def bytes(self, bm: int, bn: int) -> int:
        """Bytes of all buffers of a pass, for tiles of bm x bn."""
        return self.elements(bm, bn) * self.item


@dataclass(frozen=True)
class CPUSchedule:
    """How the passes of a call run."""

    tile: tuple[int, int]  # rows and columns
    has_gradients: bool  # then a log-sum-exp pass may keep logits for the gradient pass
    dq_in_place: bool  # whether dQ accumulates in its destination
    dk_accumulator_rows: int  # rows of dK in the workspace at once; 0: in their destination
    memory: TileMemory


def decide(
    problem: Problem, gradients: Gradients | None, ahead: Gradients | None = None,
    further_tiles: int = 0,
) -> CPUSchedule:  # fmt: skip
    """The schedule of a call by passes. ValueError if the workspace has no room for a tile.

    `ahead`: gradients of a later pass over ranks, in this pass without gradients. Both passes then
    have the same tiles. `further_tiles`: tiles in addition to those of options.
    """
    dtype = DTYPES[problem.compute_precision]
    dq_in_place = gradients is not None and _accumulates_dq_in_place(problem, gradients, dtype)
    dk_rows = 0 if gradients is None else _dk_accumulator_rows(problem, gradients, dtype)
    has_gradients = gradients is not None or ahead is not None
    memory = tile_memory(problem, has_gradients, dq_in_place, further_tiles)
    m, n, d = problem.shape
    if problem.method == "naive":  # over ranks, or with a teacher: the tile is the whole block
        tile = max(1, m), max(1, n)
    else:
        room = problem.workspace - dk_rows * d * dtype.itemsize  # for tiles
        tile = largest_tile(problem, memory, room)
        if memory.bytes(*tile) > room:
            least = least_workspace(problem, memory, tile, dk_rows)
            raise make_workspace_error(problem.shape, least, problem.workspace)
    return CPUSchedule(tile, gradients is not None, dq_in_place, dk_rows, memory)


def tile_memory(
    problem: Problem, gradient: bool, dq_in_place: bool, further_tiles: int
) -> TileMemory:
    """What the buffers of a pass have to hold."""
    dtype = DTYPES[problem.compute_precision]

    def copied_width(*sides: Array) -> int:
        """The elements of a row of each side, if its rows are copied."""
        return sum(
            z.shape[1]
            for z in sides
            if z is not None and (problem.normalize or not has_blas_layout(z, dtype))
        )

    d = problem.shape[2]
    has_teacher, has_prefixes = isinstance(problem, TaughtProblem), further_tiles > 0
    # the products with the options of rows, and with those of columns
    if not problem.pair_options.same_logits:
        further_tiles += 2 if problem.two_sided or problem.symmetric else 1
    return TileMemory(
        dtype.itemsize,
        d,
        problem.auxiliary_query is not None and not has_teacher,
        has_teacher,
        further_tiles,
        copied_width(problem.query, problem.auxiliary_query) + d * (gradient and not dq_in_place),
        copied_width(problem.key, problem.auxiliary_key),
        gradient,
        has_prefixes,
    )


def largest_tile(problem: Problem, memory: TileMemory, room: int) -> tuple[int, int]:
    """Rows and columns of a tile.

    A tile is halved until it fits in `room` bytes, or until half a tile would make too many blocks
    (`has_few_blocks`).
    """
    m, n, _ = problem.shape
    bm, bn = (TRIANGLE_SIDE, TRIANGLE_SIDE) if problem.symmetric else TILE
    if problem.query_groups is not None:
        bm = min(bm, GROUP_ROWS)
    if problem.symmetric:
        bn = bm
    if memory.has_prefixes:
        bm, bn = min(bm, PREFIX_TILE[0]), min(bn, PREFIX_TILE[1])
    bm, bn = max(1, min(bm, m)), max(1, min(bn, n))
    while memory.bytes(bm, bn) > room:
        smaller = max(1, bm // 2), max(1, bn // 2)
        if smaller == (bm, bn) or not has_few_blocks(m, n, *smaller):
            break
        bm, bn = smaller
    return bm, bn


def least_workspace(
    problem: Problem, memory: TileMemory, smallest_tile: tuple[int, int], dk_rows: int
) -> int:
    """Bytes for the smallest tile that a call may have, and for accumulators of dK beside it."""
    m, n, d = problem.shape
    tile_bytes = memory.bytes(*smallest_tile)
    all_rows = 0 if not dk_rows else m if problem.symmetric else n
    accumulator_bytes = all_rows * d * memory.item
    # Without limits, accumulators take half of the workspace at most (`_dk_accumulator_rows`). So
    # twice the bytes of a tile suffice: a half for the tile, and a half for accumulators. If the
    # accumulators of all rows are smaller than a tile, less suffices: both side by side
    if not problem.compares_with_limits:
        accumulator_bytes = min(tile_bytes, accumulator_bytes)
    return tile_bytes + accumulator_bytes


def _accumulates_dq_in_place(problem: Problem, gradients: Gradients, dtype: np.dtype[Any]) -> bool:
    """Whether dQ can accumulate in its destination.

    All of these hold:

    - dQ is wanted, and has a destination.
    - The destination is contiguous, and has the compute dtype.
    - dQ overwrites the destination (`add_query` is false).
    - The queries are not the keys. (Otherwise other row blocks add to the same rows.)
    """
    out = gradients.query
    if out is None or problem.symmetric or gradients.add_query or not gradients.want_query:
        return False
    return bool(out.dtype == dtype and out.dtype.isnative and out.flags.c_contiguous)


def _dk_accumulator_rows(problem: Problem, gradients: Gradients, dtype: np.dtype[Any]) -> int:
    """How many rows of dK accumulate in the workspace at once; 0: all, in their destination."""
    out = gradients.query if problem.symmetric else gradients.key
    if out is None or (out.dtype == dtype and out.dtype.isnative):
        return 0
    n, d = out.shape
    # With limits (of `false_negative_margin` or a guide), all rows: the gradient pass then has the
    # blocks of the log-sum-exp pass. Gradient passes over ranges of keys would have other blocks.
    # BLAS may round the dot product of a pair differently in another block. A dot product close to
    # its limit could then be above the limit in one pass, and below the limit in the other pass
    if problem.compares_with_limits:
        return int(n)
    # Without limits, half of the workspace at most: the other half is for tiles
    return int(min(n, max(1, problem.workspace // 2 // (d * dtype.itemsize))))


# --- blocks ---------------------------------------------------------------------------------------


def divide_into_tiles(problem: Problem, tile: tuple[int, int], triangle: bool) -> Grid:
    """The tiles of the logit matrix: on the CPU, a block of the `Grid` is one tile.

    With groups, a long run of rows or columns of one group is divided into slices of its own.
    """
    m, n, _ = problem.shape
    rows: Sequence[slice]
    columns: Sequence[slice]
    if problem.query_groups is None:
        rows, columns = map(slices, (m, n), tile)
    else:
        sides, least = (problem.query_groups, problem.key_groups), least_block_side(m, n)
        rows, columns = (
            slice_runs(groups, step, max(LEAST_RUN, least), min(step, MIXED_SIDE))
            for groups, step in zip(sides, tile, strict=True)
        )
    return Grid(rows, columns, triangle)
