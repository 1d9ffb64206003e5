"""How a call runs on a GPU: one frozen value, which one pure function makes of what is asked for.

`schedule` is read from top to bottom. It decides each thing once: the method, how operands are
held, which kernels fold, how the logit matrix is cut, what lies in the workspace, and which folds
run in which order. It sees shapes, dtypes, strides and options, never an array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .. import config
from ..config import DeviceProperties, Needs, Sweep, Tile, precision
from .call import ITEM, Call, Loss, Matrix
from .folds import Cut, Fold, Folds, OperandRows, Operands, Part, Reading
from .fused import TILE, OneLaunch, one_launch
from .method import choose_method

# One pass takes elements 2^(x - r) with a reference exponent r that need not be the maximum: see
# kernels/cuda/sm90/reference_exponents.cuh. Bfloat16 has the exponents of float32, float16 has not
ONE_PASS = ("bf16x3", "bf16")
# Exponentials of rows of so many K-slices, or more, are cached: in bfloat16, or in float32 in the
# place of the two float16 parts of dL/dx. Products of shorter rows take less time than the cache
MIN_CACHED_K_SLICES = {"bf16": 9, "fp16x3": 12}
ALIGNMENT = 256  # bytes, of the parts of the workspace
# Bytes that aligning takes: less than ALIGNMENT for each part, of which a fold has at most 10
# (`Needs.parts`), and the cache 2 (`Needs.cached_parts`)
SLACK = 16 * ALIGNMENT


@dataclass(frozen=True)
class Schedule:
    """All that is decided about a call before the first launch."""

    call: Call
    method: str
    device: DeviceProperties
    one_launch: OneLaunch | None = None
    operands: Operands | None = None
    tile: Tile | None = None
    sweep: Sweep | None = None  # in the place of tiles
    folds: tuple[Fold, ...] = ()
    one_pass: bool = False
    cached_columns: int = 0  # whose exponentials the log-sum-exp fold leaves to the gradient fold
    cached: tuple[Part, ...] = ()  # of the workspace, for the exponentials
    workspace: int = 0  # bytes: the cached parts, and those of each fold in turn


def schedule(call: Call, device: DeviceProperties) -> Schedule:
    """How a call runs on a device."""
    method = choose_method(call)
    if method in ("naive", "arrays"):
        return Schedule(call, method, device)
    if method == "fused":
        return Schedule(call, method, device, one_launch=launch_of(call, device))
    return tiled_schedule(call, device)


@lru_cache(1024)
def tiled_schedule(call: Call, device: DeviceProperties) -> Schedule:
    """How a call, or a block of one, runs by folds over blocks."""
    operands = choose_operands(call, device)
    tile = config.tile_for(
        operands.precision, call.shape[2], device, call.limit_and_bias_count, call.groups
    )
    sweep, register_sweep = choose_sweeps(call, operands, device)
    cut = choose_cut(call, operands, tile, sweep, register_sweep, device)
    folds = Folds(call, operands, tile, sweep, register_sweep, cut).all()
    return Schedule(
        call, "tiled", device, None, operands, tile, sweep, folds, cut.one_pass,
        cut.gradient.cached_columns, cached_memory(call, cut), cut.workspace,
    )  # fmt: skip


# --- its decisions, in their order ----------------------------------------------------------------


def launch_of(call: Call, device: DeviceProperties) -> OneLaunch:
    """The launch of a small batch."""
    (m, n, _), dtype = call.shape, call.query.dtype
    if call.key.dtype != dtype:
        dtype = common_dtype(dtype, call.key.dtype)
    tiles = -(-m // TILE) * (call.query_gradient is not None)
    tiles += -(-n // TILE) * (call.key_gradient is not None)
    return one_launch(
        call.shape, dtype, call.compute == "fp64", call.symmetric, call.two_sided,
        call.loss is Loss.PAIRS, call.normalize, call.ids, tiles, call.workspace,
        device.multiprocessors,
    )  # fmt: skip


def common_dtype(*dtypes: str) -> str:
    """The dtype to which one launch converts queries and keys of different dtypes: the wider, and
    float32 at least."""
    wide = (np.dtype(np.float32 if ITEM[dtype] < 4 else dtype) for dtype in dtypes)
    return np.result_type(*wide).name


def choose_precision(call: Call, device: DeviceProperties) -> str:
    """How operands are held."""
    held = config.operand_precision(call.compute, device)
    in_parts = held in config.OPERAND_PARTS
    if call.limits:  # a block over ranks: other blocks have other powers of two for float16
        in_parts = in_parts or (held in config.FLOAT16 and call.query.dtype != "float16")
    if in_parts and call.compares_with_limits and (call.symmetric or call.limits):
        # A product has to be the same number wherever it is computed, x_ji the same as x_ij
        held = "fp32"
    if not config.supported(held, device):
        raise ValueError(
            f'precision: expected "fp32" or "fp64" on a device of compute capability '
            f'{device.capability}, which lacks the tensor cores for "{held}"'
        )
    return held


def choose_operands(call: Call, device: DeviceProperties) -> Operands:
    """Of which numbers products are, and where their rows are read."""
    held = choose_precision(call, device)
    query, key = (choose_rows(call, z, held) for z in (call.query, call.key))
    sides = ((query, call.query), (key, call.key))[: 2 - call.symmetric]
    staged_bytes = sum(
        z.rows * side.row_bytes for side, z in sides if side.reading is not Reading.IN_PLACE
    )
    once = config.staged_once(staged_bytes, room_of(call, held))
    if once:
        query, key = (
            side if side.reading is Reading.IN_PLACE else replace(side, reading=Reading.ONCE)
            for side in (query, key)
        )
    width = min(query.features, key.features) * config.element_bytes(held)
    return Operands(held, query, key, width, config.product_width(call.query.columns, held), once)


def room_of(call: Call, held: str) -> int:
    """Bytes of the workspace that are left to folds beside linear terms and joint losses."""
    beside = beside_folds(call, held)
    return config.left_to_folds(call.workspace, beside)


def beside_folds(call: Call, held: str) -> int:
    sides = (1 + call.two_sided) * call.smoothing
    return call.joint_copy_bytes + config.term_bytes(
        call.shape, sides, call.class_sums, config.ACCUMULATOR_BYTES[held]
    )


def choose_rows(call: Call, z: Matrix, held: str) -> OperandRows:
    """In place, if rows are as kernels load them; else from copies by block."""
    in_place = (
        not call.normalize and config.READ_IN_PLACE.get(held) == z.dtype and z.has_vector_rows
        and z.row_bytes % 16 == 0 and (z.column_stride == ITEM[z.dtype] or z.columns == 1)
    )  # fmt: skip
    features = z.columns if in_place else config.padded(z.columns, held)
    has_divisor = held in config.FLOAT16 and not call.normalize and z.dtype != "float16"
    reading = Reading.IN_PLACE if in_place else Reading.BY_BLOCK
    return OperandRows(reading, features, features * config.OPERAND_BYTES[held], has_divisor)


def choose_sweeps(
    call: Call, operands: Operands, device: DeviceProperties
) -> tuple[Sweep | None, Sweep | None]:
    """The sweep in place of tiles, and the one that keeps dL/dx in registers, where they serve."""
    if precision.PORTABLE:
        return None, None
    extras = call.normalize or call.ids
    sweep = config.sweep_for(
        operands.precision, operands.width, device, extras, call.moments, call.limit_and_bias_count,
        call.groups,
    )  # fmt: skip
    register_sweep = None
    if call.symmetric and call.gradient:
        register_sweep = config.register_sweep(sweep, operands.precision, call.shape[0])
    return sweep, register_sweep


def choose_cut(
    call: Call, operands: Operands, tile: Tile, sweep: Sweep | None, register_sweep: Sweep | None,
    device: DeviceProperties,
) -> Cut:  # fmt: skip
    """The largest blocks whose temporary memory fits the workspace."""
    held, shape, whole_call = operands.precision, call.shape, call.block is None
    room, beside = room_of(call, held), beside_folds(call, held)
    dq_alone = call.gradient and call.key_gradient is None
    one_pass = (
        whole_call and call.gradient and call.one_softmax and sweep is not None
        and held in ONE_PASS and not call.host_groups
    )  # fmt: skip
    dq, dk, dq_copies = call.query_gradient, call.key_gradient, 1
    if dq is not None and not call.symmetric:
        dq_copies = config.sums_at_once(shape, held, device.multiprocessors, room)
    dq_in_place = dq is None or (
        dq_copies == 1 and not call.adds_query and accumulates_in_place(dq, operands)
    )
    dk_in_place = dk is None or accumulates_in_place(dk, operands)
    writes_gradient = call.gradient and register_sweep is None
    all_rows_gradient = dq if call.symmetric else dk  # its accumulator has the rows of all blocks
    needs = Needs(
        precision=held, sweep=sweep, moments=call.moments, gradient=writes_gradient,
        staged_query=operands.query.reading is not Reading.IN_PLACE,
        staged_key=operands.key.reading is not Reading.IN_PLACE,
        staged_once=operands.copied_once,
        columns=call.two_sided or call.symmetric,
        rows=call.loss is Loss.PAIRS or (one_pass and dq_alone),
        dq_accumulators=0 if dq_in_place else dq_copies,
        dk_in_workspace=writes_gradient
        and not (dq_in_place if call.symmetric else dk_in_place),
        overlay_row_bytes=0 if call.adds_query else overlay_bytes(all_rows_gradient, operands),
    )  # fmt: skip
    may_cache = whole_call and call.gradient and may_cache_exponentials(call, held, sweep, dq_alone)
    most = max(room, device.unasked_bytes) if may_cache and not call.workspace_given else room
    blocks = None
    if one_pass and not dq_alone:
        blocks = config.all_keys_blocking(shape, needs, most, tile.block_n)
        one_pass = blocks is not None
    statistics, gradient, size = blocks or config.blockings(
        shape, needs, room, tile.block_n, call.symmetric, most if may_cache else 0, beside
    )
    if call.host_groups:
        statistics, gradient, size = config.small_blockings(
            shape, needs, tile.block_n, (statistics, gradient)
        )
    return Cut(
        needs, statistics, gradient, size + SLACK, one_pass, dq_in_place, dk_in_place, dq_copies
    )


def may_cache_exponentials(
    call: Call, held: str, sweep: Sweep | None, dq_alone: bool
) -> bool:  # fmt: skip
    """Whether the log-sum-exp fold may leave exponentials to the gradient fold:

    - in bfloat16 or float32, which have the exponents that they need;
    - of long rows, whose product takes more time than the cache;
    - of a softmax, unless queries are the keys: a triangle has no cache;
    - without retrieval ranks, whose fold lies between these two;
    - without options of pairs, which the kernel of cached exponentials lacks;
    - not for dQ alone of one softmax, which one pass computes in bfloat16.
    """
    least = MIN_CACHED_K_SLICES.get(held)
    return (
        sweep is not None and least is not None and sweep.k_slices >= least
        and call.loss in (Loss.ROWS, Loss.BOTH)
        and not (call.retrieval_ranks or call.pair_options or (call.one_softmax and dq_alone))
    )  # fmt: skip


def accumulates_in_place(out: Matrix, operands: Operands) -> bool:
    """Whether gradients can accumulate where they are to be written."""
    return (
        out.dtype == operands.accumulator_dtype and out.has_vector_rows
        and out.columns == operands.gradient_width and out.column_stride == ITEM[out.dtype]
    )  # fmt: skip


def overlay_bytes(out: Matrix | None, operands: Operands) -> int:
    """Bytes of a row of the destination where accumulators can overlay it, else 0. Rows may not be
    longer than accumulators: finished ones would overwrite others that are not."""
    if out is None or not out.is_contiguous or out.offset:
        return 0
    accumulator_row_bytes = operands.gradient_width * ITEM[operands.accumulator_dtype]
    return out.row_bytes if out.row_bytes <= accumulator_row_bytes else 0


def cached_memory(call: Call, cut: Cut) -> tuple[Part, ...]:
    """Cached exponentials, and their reference exponents."""
    (m, _, d), columns = call.shape, cut.gradient.cached_columns
    sizes = cut.needs.cached_parts(m, columns, d) if columns else {}
    return tuple(Part(name, size) for name, size in sizes.items())
