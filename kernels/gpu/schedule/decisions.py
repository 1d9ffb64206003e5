"""The schedule of a call on a GPU: all decisions before the first launch, by pure functions.

`tiled_schedule` makes the decisions from top to bottom: the precision of operands, the kernels, the
blocks, the parts of the workspace, and the passes in their order. It depends on shapes, dtypes,
strides and options, and reads no array.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from .. import config
from ..config import DeviceProperties, Needs, Parts, Sweep, Tile
from .call import ITEM, Call, LossForm, Matrix
from .fused import TILE, OneLaunch, one_launch
from .method import choose_method
from .operands import OperandRows, Operands, Reading
from .passes import (
    GuideSchedule,
    PassScheduler,
    ScheduledPass,
    WorkspaceDivision,
    scheduled_kernel,
)  # fmt: skip

# Precisions for which one pass computes log-sum-exps and gradients. Its elements 2^(x - r), of
# base-2 logits x, have reference exponents r that are not maxima (sm90/online_references.cuh).
# Bfloat16 has the exponent range of float32, which such elements need, and float16 does not
ONE_PASS_PRECISIONS = ("bf16x3", "bf16")
# By precision, the least K-slices of 128 bytes of a row, all its parts together, for which
# exponentials are cached: more than 512 features in bf16, and more than 320 in fp16x3. Products of
# shorter rows take less time than the cache. Cached exponentials are bfloat16, or float32 (fp16x3)
MIN_CACHED_K_SLICES = {"bf16": 9, "fp16x3": 12}
# The same for a loss with one softmax, if dK is not wanted: its gradient pass takes less time
MIN_CACHED_K_SLICES_OF_DQ = {"bf16": 9, "fp16x3": 20}
# Bytes beyond which larger gradient blocks gain nothing, for calls without a workspace
MAX_DEFAULT_BLOCK_BYTES = 1 << 30
MAX_GROUP_BLOCK_SIDE = 8192  # most rows and columns of a block, if groups leave out blocks


@dataclass(frozen=True)
class Schedule:
    """All decisions about a call, made before the first launch."""

    call: Call
    method: str  # "naive", "fused" or "tiled"
    device: DeviceProperties
    one_launch: OneLaunch | None = None  # of the method fused
    # all other fields are of the method tiled
    operands: Operands | None = None
    tile: Tile | None = None  # the work of a thread block of portable kernels
    sweep: Sweep | None = None  # replaces `tile` in most kernels; None: there are no sweeps
    guide: GuideSchedule | None = None
    teacher: Operands | None = None  # features of the teacher
    passes: tuple[ScheduledPass, ...] = ()
    one_pass: bool = False  # one pass computes log-sum-exps and gradients
    cached_columns: int = 0  # the first columns, whose exponentials are cached between the passes
    # of the workspace, kept from pass to pass: cached exponentials with their references, or marks
    cached: Parts = field(default_factory=dict)
    workspace: int = 0  # bytes of the cached parts and of the largest pass's parts


def schedule(call: Call, device: DeviceProperties) -> Schedule:
    """The schedule of a call on a device."""
    method = choose_method(call)
    if method == "naive":
        return Schedule(call, method, device)
    if method == "fused":
        return Schedule(call, method, device, one_launch=schedule_one_launch(call, device))
    return tiled_schedule(call, device)


@lru_cache(1024)
def tiled_schedule(call: Call, device: DeviceProperties) -> Schedule:
    """The schedule of a tiled call, or of a block over ranks."""
    operands = choose_operands(call, device)
    tile = config.tile_for(
        operands.precision, call.widest, device, call.real_count, call.integer_count, call.guided,
        call.taught,
    )  # fmt: skip
    teacher = choose_teacher(call, operands) if call.taught else None
    guide = choose_guide(call, device) if call.guided else None
    sweep, register_sweep = choose_sweeps(call, operands, teacher, device)
    division = divide_workspace(call, operands, tile, sweep, register_sweep, guide, teacher, device)
    passes = PassScheduler(call, operands, tile, sweep, register_sweep, division).all()
    cached_columns = division.gradient.cached_columns
    cached = division.needs.cached_parts(call.query.rows, cached_columns, call.query.columns)
    cached |= division.kept_marks
    return Schedule(
        call, "tiled", device, None, operands, tile, sweep, guide, teacher, passes,
        division.one_pass, cached_columns, cached, division.workspace,
    )  # fmt: skip


def distillation_schedules(
    call: Call, device: DeviceProperties
) -> tuple[Schedule, Schedule, Schedule]:
    """The schedules of a call with a teacher, in their order: the log-sum-exps of the student, the
    log-sum-exps of the teacher, and the loss with gradients.

    Sweeps compute all passes, or portable kernels do. They round products differently, so that
    exponentials of the one do not add up to 1 with log-sum-exps of the other.
    """
    assert call.teacher_query is not None
    assert call.teacher_key is not None
    distillation = tiled_schedule(call, device)
    student = replace(
        call, teacher_query=None, teacher_key=None, query_gradient=None, key_gradient=None,
        moments=False, portable=distillation.sweep is None,
    )  # fmt: skip
    teacher = replace(student, query=call.teacher_query, key=call.teacher_key)
    return tiled_schedule(student, device), tiled_schedule(teacher, device), distillation


# --- the decisions, in their order ----------------------------------------------------------------


def schedule_one_launch(call: Call, device: DeviceProperties) -> OneLaunch:
    """The launch of a call by the method fused."""
    (m, n, _), dtype = call.shape, call.query.dtype
    if call.key.dtype != dtype:
        dtype = common_dtype(dtype, call.key.dtype)
    tiles = -(-m // TILE) * (call.query_gradient is not None)
    tiles += -(-n // TILE) * (call.key_gradient is not None)
    return one_launch(
        call.shape, dtype, call.compute_precision == "fp64", call.symmetric, call.two_sided,
        call.loss is LossForm.PAIRS, call.normalize, call.ids, tiles, call.workspace,
        device.multiprocessors,
    )  # fmt: skip


def common_dtype(*dtypes: str) -> str:
    """The dtype to which one launch converts queries and keys of different dtypes.

    The fused kernel reads one dtype: the wider of the two, and at least float32, because neither
    float16 nor bfloat16 has all numbers of the other.
    """
    wide = (np.dtype(np.float32 if ITEM[dtype] < 4 else dtype) for dtype in dtypes)
    return np.result_type(*wide).name


def choose_precision(call: Call, device: DeviceProperties) -> str:
    """The precision of the operands. ValueError if the device lacks its arithmetic."""
    operand_precision = config.fastest_operand_precision(call.compute_precision, device)
    # Products are compared with limits. Both passes must leave out the same pairs, so a product has
    # to have the same bits in both, also if one computes x_ji in place of x_ij. A block over ranks
    # (`limits_given`) does not tell whether queries are the keys of the whole call
    if call.pairs.by_products and (call.symmetric or call.limits_given):
        # With two parts, products of a small part of one side and a large part of the other side
        # are added in a fixed order of the sides, so the sums x_ij and x_ji have different orders
        bits_vary = operand_precision in config.OPERAND_PARTS
        # Features of another dtype are divided to fit float16: each block of ranks has a divisor
        all_float16 = call.query.dtype == call.key.dtype == "float16"
        has_divisors = operand_precision in config.FLOAT16 and not all_float16
        if bits_vary or (call.limits_given and has_divisors):
            operand_precision = "fp32"
    if not config.supported(operand_precision, device):
        raise ValueError(
            f'precision: expected "fp32" or "fp64" on a device of compute capability '
            f'{device.capability}, which lacks the tensor cores for "{operand_precision}"'
        )
    return operand_precision


def choose_operands(call: Call, device: DeviceProperties) -> Operands:
    """The operands of all products: their precision, and where kernels read their rows.

    Rows that cannot be read in place are copied once, if the workspace has room for all copies
    (`may_stage_all_rows`); otherwise each pass copies the rows of a block. Queries and keys of
    different dtypes get one precision: one kernel multiplies them, and has one format of operands.
    """
    operand_precision = choose_precision(call, device)
    query, key = (choose_rows(call, z, operand_precision) for z in (call.query, call.key))
    sides = ((query, call.query), (key, call.key))[: 2 - call.symmetric]
    staged_bytes = sum(  # of copies of all rows
        z.rows * side.row_bytes for side, z in sides if side.reading is not Reading.IN_PLACE
    )
    reserved = reserved_bytes(call, operand_precision)
    workspace = config.workspace_of_passes(call.workspace, reserved)
    staged_copy_bytes = staged_bytes if config.may_stage_all_rows(staged_bytes, workspace) else 0
    if staged_copy_bytes:
        query, key = (
            side if side.reading is Reading.IN_PLACE else replace(side, reading=Reading.ONCE)
            for side in (query, key)
        )
    width = product_bytes(operand_precision, query, key)
    return Operands(
        operand_precision, query, key, width,
        config.product_width(call.query.columns, operand_precision), staged_copy_bytes,
    )  # fmt: skip


def reserved_bytes(call: Call, operand_precision: str) -> int:
    """Bytes of the workspace for linear terms, joint losses and own negatives, which passes cannot
    take.

    Sums over the classes of queries and keys are beside the default workspace. The most that there
    can be would take half of it from 65536 rows of 512 features on, so that products get small.
    """
    smoothed_sides = (1 + call.two_sided) * call.smoothing
    class_sums = call.max_class_sums if call.symmetric or call.workspace_given else 0
    item = config.ACCUMULATOR_BYTES[operand_precision]
    term_bytes = config.term_bytes(call.shape, smoothed_sides, class_sums, 1 + call.two_sided, item)
    return call.joint_copy_bytes + sum(call.own_memory.values()) + term_bytes


def choose_rows(call: Call, z: Matrix, operand_precision: str) -> OperandRows:
    """Where kernels read the rows of `z`: in place if they can, otherwise from copies by block.

    Kernels read rows in place if all of these hold:

    - Rows are not normalised. (Copies of such rows are divided by a power of two: cuda/rows.cuh.)
    - Rows have the dtype of operands of this precision. No dtype is that of operands in two parts.
    - Rows begin at multiples of 16 bytes, and have such a multiple: kernels read 16 at a time.
    - The elements of a row are adjacent. Rows do not overlap, but may have gaps between them.
    """
    in_place = (
        not call.normalize and config.READ_IN_PLACE.get(operand_precision) == z.dtype
        and z.has_aligned_rows and z.row_bytes % 16 == 0
        and (z.column_stride == ITEM[z.dtype] or z.columns == 1)
    )  # fmt: skip
    features = z.columns if in_place else config.padded(z.columns, operand_precision)
    # features in float16 fit as they are, and normalised rows are at most 1
    has_divisor = (
        operand_precision in config.FLOAT16 and not call.normalize and z.dtype != "float16"
    )
    reading = Reading.IN_PLACE if in_place else Reading.BY_BLOCK
    return OperandRows(
        reading, features, features * config.OPERAND_BYTES[operand_precision], has_divisor
    )


def product_bytes(operand_precision: str, query: OperandRows, key: OperandRows) -> int:
    """Bytes of one part of a row in products for logits, without zeros that only one side has."""
    return min(query.features, key.features) * config.element_bytes(operand_precision)


def choose_sweeps(
    call: Call, operands: Operands, teacher: Operands | None, device: DeviceProperties
) -> tuple[Sweep | None, Sweep | None]:
    """(the call's sweep, its register sweep), by device, precision and width (`config.sweep_for`).

    Portable kernels compute all passes if the first is None. A register sweep keeps dL/dx in
    registers, and computes only the gradient pass. It has no dK, so queries must be the keys.
    """
    if teacher is not None:
        sweep = config.teacher_sweep(
            operands.precision, operands.part_bytes, teacher.part_bytes, device, call.normalize
        )
        return sweep, None
    if call.portable:
        return None, None
    ids_or_factors = call.normalize or call.ids > 0
    sweep = config.sweep_for(
        operands.precision, operands.part_bytes, device, ids_or_factors, call.moments,
        call.real_count, call.integer_count,
    )  # fmt: skip
    if not (call.symmetric and call.gradient):
        return sweep, None
    return sweep, config.choose_register_sweep(sweep, operands.precision, call.shape[0])


def choose_teacher(call: Call, operands: Operands) -> Operands:
    """The teacher's features as operands, in the precision of the student's operands.

    One kernel multiplies the features of both models, and has one format of operands.
    If their dtypes differ, `_with_one_precision` (distill/solve.py) has chosen fp32 or fp64.
    """
    assert call.teacher_query is not None
    assert call.teacher_key is not None
    query, key = (
        choose_rows(call, z, operands.precision) for z in (call.teacher_query, call.teacher_key)
    )
    return replace(
        operands, query=query, key=key, part_bytes=product_bytes(operands.precision, query, key)
    )


def choose_guide(call: Call, device: DeviceProperties) -> GuideSchedule:
    """How the dot products of the guide's features are computed, and become marks."""
    guide = call.guide_call
    operand_precision = choose_precision(guide, device)
    query, key = (choose_rows(guide, z, operand_precision) for z in (guide.query, guide.key))
    width = product_bytes(operand_precision, query, key)
    columns_too = call.two_sided or call.symmetric  # pairs have marks for columns
    sweep = None
    if operand_precision not in config.OPERAND_PARTS:
        # a guide has no ids; the factors of normalised keys are one more vector of columns
        real_count = guide.real_count + guide.normalize
        sweep = config.sweep_for(operand_precision, width, device, False, real_count=real_count)
    shape = sweep or config.tile_for(operand_precision, guide.shape[2], device, guide.real_count)
    name = "sweep_guide" if sweep else "guide"
    kernel = scheduled_kernel(
        name, guide, operand_precision, shape, gradient=False, COLUMNS=int(columns_too)
    )
    return GuideSchedule(
        Operands(operand_precision, query, key, width, 0, 0), shape, kernel, 1 + columns_too
    )


def divide_workspace(
    call: Call, operands: Operands, tile: Tile, sweep: Sweep | None, register_sweep: Sweep | None,
    guide: GuideSchedule | None, teacher: Operands | None, device: DeviceProperties,
    keeps_no_marks: bool = False,
) -> WorkspaceDivision:  # fmt: skip
    """Whether one pass is enough, the largest blocks that fit, and where gradients accumulate.

    `register_sweep` has no gradient blocks, so it needs no memory for them.
    """
    shape, symmetric = call.shape, call.symmetric
    reserved = reserved_bytes(call, operands.precision)
    room = config.workspace_of_passes(call.workspace, reserved)  # bytes that passes may take

    # where gradients accumulate
    dq, dk, dq_copies = call.query_gradient, call.key_gradient, 1
    if dq is not None and not symmetric:
        dq_copies = config.choose_dq_copies(shape, operands.precision, device.multiprocessors, room)
    dq_in_place = dq is None or (
        dq_copies == 1 and not call.adds_query and accumulates_in_place(dq, operands)
    )
    dk_in_place = dk is None or accumulates_in_place(dk, operands)

    # the arrays of the passes
    one_pass = may_compute_in_one_pass(call, operands, sweep)
    needs_dq_only = call.gradient and dk is None
    writes_gradient = call.gradient and register_sweep is None
    all_rows_gradient = dq if symmetric else dk  # the accumulator has the rows of all blocks
    needs = Needs(
        precision=operands.precision, sweep=sweep, moments=call.moments,
        has_gradient_block=writes_gradient, sums_columns=call.two_sided or symmetric,
        staged_query=operands.query.reading is not Reading.IN_PLACE,
        staged_key=operands.key.reading is not Reading.IN_PLACE,
        staged_copy_bytes=operands.staged_copy_bytes,
        # whether gradient passes sum rows; for one pass with dK, `block_sizes_for_all_keys` sets it
        sums_rows=call.loss is LossForm.PAIRS or call.taught or (one_pass and needs_dq_only),
        dq_copies=0 if dq_in_place else dq_copies,
        dk_in_workspace=writes_gradient and not (dq_in_place if symmetric else dk_in_place),
        overlay_row_bytes=0 if call.adds_query else overlay_bytes(all_rows_gradient, operands),
        marks_per_pair=0 if guide is None else guide.marks_per_pair,
        guide_rows=(0, 0) if guide is None else guide.operands.rows_by_block,
        teacher_rows=None if teacher is None else teacher.rows_by_block,
    )  # fmt: skip

    # marks of all pairs, if they fit a part of the memory
    kept_marks: Parts = {}
    if guide is not None and may_keep_marks(call) and not one_pass:
        marks = config.mark_parts(*shape[:2], guide.marks_per_pair)
        mark_bytes = sum(map(config.align, marks.values()))
        most = room // 4 if call.workspace_given else device.default_memory_limit // 2
        if mark_bytes <= most and not keeps_no_marks:
            kept_marks, needs = marks, replace(needs, marks_per_pair=0)
            room -= mark_bytes if call.workspace_given else 0

    # the largest blocks. If the caller gives no workspace, cached exponentials and one pass with dK
    # for wide rows, which save a matrix product, may take as much memory as the device allows
    may_cache = may_cache_exponentials(call, operands, sweep)
    limit = device.default_memory_limit
    if not may_cache:
        limit = min(limit, MAX_DEFAULT_BLOCK_BYTES) if has_large_blocks(call, sweep) else 0
    extended_room = room if call.workspace_given else max(room, limit)
    sizes = None
    if one_pass and not needs_dq_only:  # one pass with dK needs blocks of all keys
        sizes = config.block_sizes_for_all_keys(shape, needs, extended_room, tile.block_n)
        one_pass = sizes is not None  # otherwise there are two passes
    statistics, gradient, size = sizes or config.choose_block_sizes(
        shape, needs, room if may_cache else extended_room, tile.block_n, symmetric,
        extended_room if may_cache else 0, reserved,
        MAX_GROUP_BLOCK_SIDE if call.host_groups else None,
    )  # fmt: skip
    if kept_marks and any(
        step < shape[1] and step % config.MARKED_COLUMNS
        for step in (statistics.columns, gradient.columns, gradient.dk_rows)
    ):  # the words of marks lie in groups of columns, with which these blocks do not end
        return divide_workspace(
            call, operands, tile, sweep, register_sweep, guide, teacher, device, keeps_no_marks=True
        )
    size += sum(map(config.align, kept_marks.values()))
    return WorkspaceDivision(
        needs, statistics, gradient, size, one_pass, dq_in_place, dk_in_place, dq_copies, kept_marks
    )  # fmt: skip


def has_large_blocks(call: Call, sweep: Sweep | None) -> bool:
    """Whether gradient blocks larger than the default workspace take less time. All must hold:

    - The call is no block over ranks, and wants gradients.
    - Sweeps compute its blocks. On other devices nobody has measured it.
    - Queries are not the keys. If they are, small blocks leave out nearly half of the pairs.
    """
    return call.block is None and call.gradient and sweep is not None and not call.symmetric


def may_keep_marks(call: Call) -> bool:
    """Whether the gradient pass may read the marks of the log-sum-exp pass. All must hold:

    - The call is no block over ranks, has a softmax, and wants gradients.
    - Both passes visit all blocks: queries are not the keys, and no groups leave out blocks.
    """
    return (
        call.block is None and call.gradient and call.loss in (LossForm.ROWS, LossForm.BOTH)
        and not (call.symmetric or call.host_groups)
    )  # fmt: skip


def may_compute_in_one_pass(call: Call, operands: Operands, sweep: Sweep | None) -> bool:
    """Whether one pass may compute log-sum-exps and gradients, if it has room. All must hold:

    - The call is no block over ranks, and wants gradients.
    - The gradients of a row follow from its own sums: there is one softmax, over keys, with few
      options (`Call.loss_follows_from_row_sums` has the list).
    - There is a sweep whose precision has the exponent range of float32 (`ONE_PASS_PRECISIONS`).
    - No groups leave out blocks (`host_groups`): a block with all keys, for dK, meets all groups.
    """
    return (
        call.block is None and call.gradient and call.loss_follows_from_row_sums
        and sweep is not None and operands.precision in ONE_PASS_PRECISIONS and not call.host_groups
    )  # fmt: skip


def may_cache_exponentials(call: Call, operands: Operands, sweep: Sweep | None) -> bool:
    """Whether the log-sum-exp pass may leave exponentials to the gradient pass. All must hold:

    - The call is no block over ranks, and wants gradients.
    - There is a sweep, its precision has a cache, and rows are long enough (`MIN_CACHED_K_SLICES`).
    - The loss is `ROWS` or `BOTH`. `VIEWS` has a triangle, and `PAIRS` no log-sum-exp pass.
    - There is no teacher, and there are no retrieval ranks, whose pass would run between these two.
    - Pairs have no options, which the kernel of cached exponentials does not take. Ids are no such
      option.
    - The call wants dK, or not `may_compute_in_one_pass`: one pass for dQ alone needs no cache.
    """
    dq_only = call.loss is LossForm.ROWS and call.key_gradient is None
    min_by_precision = MIN_CACHED_K_SLICES_OF_DQ if dq_only else MIN_CACHED_K_SLICES
    min_k_slices = min_by_precision.get(operands.precision)
    needs_no_cache = call.key_gradient is None and may_compute_in_one_pass(call, operands, sweep)
    return (
        call.block is None and call.gradient
        and sweep is not None and min_k_slices is not None and sweep.k_slices >= min_k_slices
        and call.loss in (LossForm.ROWS, LossForm.BOTH)
        and not (call.taught or call.retrieval_ranks or call.pair_options or needs_no_cache)
    )  # fmt: skip


def accumulates_in_place(out: Matrix, operands: Operands) -> bool:
    """Whether gradients can accumulate in their destination `out`."""
    return (
        out.dtype == operands.accumulator_dtype and out.has_aligned_rows
        and out.columns == operands.gradient_features and out.column_stride == ITEM[out.dtype]
    )  # fmt: skip


def overlay_bytes(out: Matrix | None, operands: Operands) -> int:
    """Bytes of a row of the destination `out` if accumulators can overlay it, otherwise 0.

    `config.largest_blocks` decides by the room in the workspace whether accumulators overlay `out`.
    A row of `out` must not be longer than a row of accumulators. Otherwise a complete row would
    overwrite accumulators of the next rows, which are not converted yet.
    """
    if out is None or not out.is_contiguous or out.offset:
        return 0
    accumulator_row_bytes = operands.gradient_features * ITEM[operands.accumulator_dtype]
    return out.row_bytes if out.row_bytes <= accumulator_row_bytes else 0
