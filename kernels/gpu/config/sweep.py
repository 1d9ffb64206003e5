"""The shape of sweeps: persistent kernels for Hopper, in kernels/cuda/sm90.

tile.py has the shape of the portable kernels, which run where there is no sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache

from .precision import K_SLICE, OPERAND_PARTS, DeviceProperties
from .tile import BLOCK_M

# Sweeps multiply 16-bit numbers. On Hopper, fp32 and tf32 become fp16x3 and fp16, so that portable
# kernels remain for fp64, and for fp32 where comparisons need products of the same bits
# (`schedule.decisions.choose_precision`)
SWEEP_PRECISIONS = ("fp16x3", "bf16x3", "bf16", "fp16")
STRIP = 16  # rows of a gradient block that a warp has: kernels/cuda/sm90/sweep/strip.cuh
# Most segments that a worker computes in turn, if query tiles have several. It bounds the memory of
# their partial sums (`Sweep.max_row_partials`)
MAX_ROUNDS = 8
# Least and most segments of a query tile of wide rows. Workers compute the segments of eight query
# tiles at a time (QUERY_TILES_AT_ONCE of kernels/cuda/sm90/sweep/layout.cuh). With at least eight
# segments for each, about 64 workers share these rows and keys, which stay in the L2 cache
WIDE_SEGMENTS = 8, 64
# Bytes of column sums that each consumer warpgroup keeps in shared memory: (max, sum) of four
# strips, or (max, sum, moment) of three strips
SUMS_BYTES = 4 * 1024
MOMENTS_BYTES = 4608
GRADIENT_STRIP_BYTES = 8 * 1024  # a strip of the gradient block, for each consumer warpgroup
VECTOR_BYTES = 1024  # a vector of real numbers: 4 bytes x 128 columns of a tile x 2 consumers
IDS_AND_FACTORS_BYTES = 3 * 1024  # ids (8 bytes) and norm factors (4 bytes), for both consumers
NAME_BYTES = 2 * VECTOR_BYTES  # a vector of integers of an option: 8 bytes x 128 x 2
BARRIER_BYTES = 256
# The most stages; for a sweep with dL/dx in registers, the most key tiles that stages hold
MAX_STAGES, MAX_KEY_TILES = 8, 6
LEAST_TEACHER_STAGES = 4  # of a sweep with a teacher: with fewer, products wait for their keys
# The time to begin and end a query tile, relative to the time of the products of one K-slice
QUERY_TILE_COST = 14.0
WIDE_QUERY_TILE_COST = 3.0  # for wide rows, which are not loaded before the first product


class Residency(Enum):
    """The place where a sweep keeps the rows of queries, and dL/dx.

    RESIDENT is for rows of up to 1024 bytes, in all parts. Longer rows do not fit shared memory
    beside the stages. Shared memory would be too slow for streamed products of 128 x 128: hence
    128 x 256 for WIDE, and a cluster, so that each key is loaded once for 256 rows. STREAMED is for
    fp16x3: its sums in two levels take twice the registers, so each consumer is one warpgroup.
    IN_REGISTERS is for narrow rows: `choose_register_sweep` has the conditions.
    """

    RESIDENT = "the query tile stays in shared memory"
    STREAMED = "the pipeline carries K-slices of queries and of keys"
    WIDE = "as STREAMED, 128 x 256 logits a block, and a cluster of two blocks shares the keys"
    IN_REGISTERS = "as RESIDENT, and dL/dx stays in registers, where it is multiplied by the keys"


@dataclass(frozen=True)
class Sweep:
    """The shape of a sweep: its -D options, its shared memory, and the blocks of its launch."""

    k_slices: int  # K-slices of a row, in all its parts
    residency: Residency
    workers: int  # thread blocks, or clusters of two, that run at once
    shared_memory: int  # most bytes of a thread block
    ids_or_factors: bool  # rows and columns have ids, or norm factors
    moments: bool = False  # sums have first moments
    real_count: int = 0  # vectors of real numbers for options of pairs (`Call.real_count`)
    integer_count: int = 0  # vectors of integers for options of pairs (`Call.integer_count`)
    teacher_slices: int = 0  # K-slices of a row of the teacher's features; 0: there is no teacher

    square = True  # query tiles and key tiles have one size, so a sweep can visit a triangle

    @cached_property
    def wide(self) -> bool:
        return self.residency is Residency.WIDE

    @cached_property
    def streamed(self) -> bool:
        return self.residency in (Residency.STREAMED, Residency.WIDE)

    @cached_property
    def in_registers(self) -> bool:
        return self.residency is Residency.IN_REGISTERS

    # -- shared memory

    def stages(self, gradient: bool, sums: bool) -> int:
        """Stages of the pipeline.

        `gradient`: the kernel writes a gradient block. `sums`: the kernel adds up columns. A kernel
        that caches exponentials does both. The kernel of a guide does neither.
        """
        free_bytes = self.shared_memory - self.reserved(gradient, sums) - self.query_tile_bytes
        if self.in_registers:  # whole key tiles, because each is read by two products
            key_tiles = min(MAX_KEY_TILES, free_bytes // self.stage_bytes // self.k_slices)
            return key_tiles * self.k_slices
        stages = min(MAX_STAGES, free_bytes // self.stage_bytes)
        # STREAMED sweeps multiply both parts of the same features together, from two adjacent
        # stages. All other sweeps multiply the K-slices of one stage at a time
        return stages // 2 * 2 if self.residency is Residency.STREAMED else stages

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a K-slice of keys, and one of queries if queries are streamed."""
        return (self.block_n + self.streamed * BLOCK_M) * K_SLICE

    @property
    def query_tile_bytes(self) -> int:
        """Bytes of the queries that stay in shared memory."""
        slices = self.k_slices + self.teacher_slices
        return 0 if self.streamed else slices * self.query_tile_rows * K_SLICE

    def reserved(self, gradient: bool, sums: bool) -> int:
        """Bytes of shared memory for all but the query tile and the stages (see `stages`)."""
        if self.teacher_slices:  # references and factors of both models, weights, normalisation
            vector_bytes = VECTOR_BYTES * (6 + 2 * self.ids_or_factors)
            warpgroup_bytes = GRADIENT_STRIP_BYTES + SUMS_BYTES
            return BARRIER_BYTES + vector_bytes + self.warpgroups * warpgroup_bytes
        number_bytes = VECTOR_BYTES * self.real_count  # numbers of columns
        # Factors of columns; and reference exponents of columns, if there are no numbers. With
        # numbers, kernels read reference exponents from global memory (sm90/sweep/gradient.cuh)
        factor_bytes = VECTOR_BYTES * (1 if self.real_count else 2)
        strip_bytes = 0 if self.in_registers else self.warpgroups * GRADIENT_STRIP_BYTES
        gradient_bytes = factor_bytes + strip_bytes
        sum_bytes = self.warpgroups * (MOMENTS_BYTES if self.moments else SUMS_BYTES)
        extra_bytes = self.ids_or_factors * IDS_AND_FACTORS_BYTES + self.integer_count * NAME_BYTES
        column_bytes = number_bytes + extra_bytes
        return BARRIER_BYTES + gradient * gradient_bytes + sums * sum_bytes + column_bytes

    def shared(self, gradient: bool, sums: bool) -> int:
        """Bytes of dynamic shared memory of the kernel (see `stages`)."""
        stages = self.stages(gradient, sums) * self.stage_bytes
        return self.query_tile_bytes + stages + self.reserved(gradient, sums)

    # -- threads and rows

    @cached_property
    def query_tile_rows(self) -> int:
        """Rows of a query tile."""
        return BLOCK_M // 2 if self.in_registers or self.teacher_slices else self.block_n

    @cached_property
    def block_n(self) -> int:
        """Columns of a key tile."""
        return 2 * BLOCK_M if self.wide else BLOCK_M

    @property
    def query_box(self) -> int:
        """Rows of a TMA box of queries."""
        return min(self.query_tile_rows, BLOCK_M)

    @property
    def cluster(self) -> int:
        """Thread blocks of a worker, which form a cluster if there are two."""
        return 2 if self.wide else 1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups. Two consumers take turns: each is one warpgroup, or two."""
        return 4 if self.residency is Residency.RESIDENT and not self.teacher_slices else 2

    @property
    def threads(self) -> int:
        """Threads of the consumer warpgroups, and of one whose first warp is the producer."""
        return 128 * self.warpgroups + 128

    @property
    def rows_at_once(self) -> int:
        """Queries of all query tiles that run at once."""
        return self.workers * self.query_tile_rows

    def blocks(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Thread blocks of a launch."""
        items = -(-rows // self.query_tile_rows) * self.segments(rows, columns, triangle)
        return min(self.workers, items) * self.cluster

    # -- segments of the keys that a query tile meets, and the partial sums that they leave

    def segments(self, rows: int, columns: int, triangle: bool = False) -> int:
        """The number of segments of a query tile's keys with which the launch ends first.

        With too few segments, workers are idle in the last round. But each segment costs the time
        to begin and end a query tile (`_segments` has the formula).
        """
        if self.in_registers:  # one thread block keeps all sums of a query tile in registers
            return 1
        return _segments(self, *self._tiles(rows, columns), triangle)

    def _tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """The numbers of query tiles and of key tiles."""
        return -(-rows // self.query_tile_rows), -(-columns // self.block_n)

    def max_segments(self, rows: int, columns: int) -> int:
        """The most segments of a query tile's keys, for which `max_row_partials` has room."""
        return _max_segments(self, *self._tiles(rows, columns))

    @property
    def segment_slots(self) -> int:
        """Partial sums that a segment leaves for each row.

        Two consumers that take turns at the tiles of a segment leave one each.
        """
        return 1 if self.streamed else 2

    def row_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each row."""
        return self.segment_slots * self.segments(rows, columns, triangle)

    def column_slots(self, rows: int, columns: int, triangle: bool = False) -> int:
        """Partial sums that a launch leaves for each column.

        There are two for each thread block: one for each 64 rows of its query tiles. With a
        teacher, there is one for each query tile.
        """
        if self.teacher_slices:
            return -(-rows // self.query_tile_rows)
        return 2 * self.blocks(rows, columns, triangle)

    def max_row_partials(self, rows: int, columns: int) -> int:
        """The most partial sums that a launch of up to rows x columns leaves for all its rows.

        A row has `segment_slots` sums, at most two, for each segment of its query tile. A query
        tile has at least one segment, and at most one for each key tile. If it has several, all
        query tiles together have at most MAX_ROUNDS segments for each worker. A launch of fewer
        rows may have more segments for each query tile, and stays within the same bounds.
        """
        if self.wide:  # one sum for each segment, whose number does not depend on rows
            return rows * self.max_segments(rows, columns)
        key_tiles = -(-columns // BLOCK_M)
        # rows of all query tiles, counted once for each segment of their query tile
        segment_rows = min(rows * key_tiles, MAX_ROUNDS * self.workers * BLOCK_M)
        return 2 * max(rows, segment_rows)

    def max_column_partials(self, rows: int, columns: int) -> int:
        """All partial sums that launches of up to rows x columns leave for columns."""
        query_tiles, key_tiles = self._tiles(rows, columns)
        if self.teacher_slices:
            return columns * query_tiles
        return 2 * columns * min(self.workers, query_tiles * key_tiles) * self.cluster


@lru_cache
def defines(sweep: Sweep, gradient: bool, sums: bool) -> dict[str, int]:
    """-D options of a sweep's kernel; for `gradient` and `sums` see `Sweep.stages`."""
    teacher = {"TEACHER_SLICES": sweep.teacher_slices} if sweep.teacher_slices else {}
    return {
        "K_SLICES": sweep.k_slices, "STAGES": sweep.stages(gradient, sums),
        "SHARED": sweep.shared(gradient, sums), "WIDE": int(sweep.wide),
        "IN_REGISTERS": int(sweep.in_registers), **teacher,
    }  # fmt: skip


@lru_cache(4096)
def _segments(sweep: Sweep, query_tiles: int, key_tiles: int, triangle: bool) -> int:
    """The number of segments of a query tile's keys with the least `cost`: of equal costs, the
    least number.

    Workers compute segments in rounds, one each. A round takes the key tiles of a segment, and the
    time to begin and end a query tile, so

        cost = ceil(query tiles * segments / workers)
               * (ceil(key tiles / segments) + query_tile_cost / k_slices).
    """
    if triangle:
        key_tiles = key_tiles // 2 + key_tiles % 2  # the least that a query tile meets
    query_tile_cost = WIDE_QUERY_TILE_COST if sweep.wide else QUERY_TILE_COST

    def cost(segments: int) -> float:
        """The time of a launch, relative to the time of one key tile."""
        rounds = -(-query_tiles * segments // sweep.workers)
        return rounds * (-(-key_tiles // segments) + query_tile_cost / sweep.k_slices)

    most = _max_segments(sweep, query_tiles, key_tiles)
    least = min(WIDE_SEGMENTS[0], most) if sweep.wide else 1
    return min(range(least, most + 1), key=cost)


def _max_segments(sweep: Sweep, query_tiles: int, key_tiles: int) -> int:
    if sweep.wide:
        return min(key_tiles, WIDE_SEGMENTS[1])
    return min(key_tiles, max(1, MAX_ROUNDS * sweep.workers // query_tiles))


@lru_cache
def sweep_for(
    precision: str, width: int, device: DeviceProperties, ids_or_factors: bool,
    moments: bool = False, real_count: int = 0, integer_count: int = 0,
) -> Sweep | None:  # fmt: skip
    """The sweep for rows of `width` bytes in each part.

    None, so that portable kernels run, for devices other than Hopper (compute capability 9.0), with
    INFONCE_KERNELS=portable (`DeviceProperties.has_sweeps`), and for precisions that no sweep has.

    `ids_or_factors`: rows have ids, or norm factors. `moments`: sums have first moments.
    `real_count`, `integer_count`: vectors for options of pairs, as in `Call`.
    """
    if not device.has_sweeps or precision not in SWEEP_PRECISIONS:
        return None
    k_slices = -(-width // K_SLICE) * OPERAND_PARTS.get(precision, 1)
    # 8 K-slices are 1024 bytes; `Residency` has the reasons
    residency = Residency.RESIDENT if k_slices <= 8 else Residency.WIDE
    if precision == "fp16x3":
        residency = Residency.STREAMED
    workers = device.multiprocessors // (2 if residency is Residency.WIDE else 1)
    memory = device.shared_memory
    return Sweep(
        k_slices, residency, workers, memory, ids_or_factors, moments, real_count, integer_count
    )


@lru_cache
def teacher_sweep(
    precision: str, width: int, teacher_width: int, device: DeviceProperties, normalize: bool
) -> Sweep | None:
    """The sweep that multiplies features of a student and of a teacher (sm90/sweep_distill.cu).

    `width`, `teacher_width`: bytes of their rows. Operands must have one 16-bit number a feature,
    and query tiles of both must leave room in shared memory for LEAST_TEACHER_STAGES stages of the
    pipeline. Otherwise None: the kernel is tiled/distill.cu.
    """
    sweep = sweep_for(precision, width, device, normalize)
    if sweep is None or precision in OPERAND_PARTS:
        return None
    slices = -(-teacher_width // K_SLICE)
    taught = replace(
        sweep, residency=Residency.RESIDENT, workers=device.multiprocessors, teacher_slices=slices
    )
    return taught if taught.stages(True, True) >= LEAST_TEACHER_STAGES else None


@lru_cache
def choose_register_sweep(sweep: Sweep | None, precision: str, rows: int) -> Sweep | None:
    """The sweep of the gradient pass that keeps dL/dx in registers (sm90/sweep_narrow.cu).

    The caller has to make sure that queries are the keys, because this sweep computes no dK.
    If all of these hold, the function returns this sweep. Otherwise it returns None, and `sweep`
    or the tile computes the pass:

    - There is a `sweep`, and the precision is bf16 or fp16: operands have one part.
    - Rows have up to 256 bytes. For rows this short, writing a gradient block and reading it twice
      would take longer than the products of all blocks. (This sweep visits no triangle.)
    - At least half of the workers have a query tile, of 64 rows. All other workers are idle,
      because this sweep does not divide the keys of a query tile into segments.
    """
    if sweep is None or sweep.k_slices > 2 or precision not in ("bf16", "fp16"):
        return None
    in_registers = replace(sweep, residency=Residency.IN_REGISTERS)
    return in_registers if rows >= in_registers.rows_at_once // 2 else None
