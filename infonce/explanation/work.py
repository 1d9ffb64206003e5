"""The operations and bytes of each step of a schedule, and the least time of each step.

The counts follow the schedule: blocks that are visited, halves of a triangle, cached exponentials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..kernels.arrays.naive import MATRICES_WITH_OPTIONS
from ..kernels.gpu import config
from ..kernels.gpu.schedule import (
    Call,
    GuideSchedule,
    Matrix,
    Operands,
    Purpose,
    Schedule,
    ScheduledPass,
    divide_keys,
    divide_terms,
)
from .devices import DeviceModel


@dataclass(frozen=True)
class Work:
    """One step: a kernel, launched for all blocks of a pass; or its matrix products by cuBLAS."""

    name: str  # of the pass
    kernel: str  # file of the kernel without ".cu"; "cuBLAS: ..." for matrix products
    tile: tuple[int, int] | None  # rows and columns of a tile of logits
    block: tuple[int, int] | None  # rows and columns of the largest block of logits
    blocks: int  # number of blocks; 0 for matrix products
    launches: int
    flops: float  # multiplications and additions of matrix products
    bytes: float  # read and written, if a launch reads each operand once
    seconds: float  # least time, at the peaks of the device


# Parts of an operand (glossary) -> products of parts that make up a product of two operands. With
# two parts, high x high, high x low and low x high; low x low is too small to count
PART_PRODUCTS = {1: 1, 2: 3}


def schedule_work(schedule: Schedule, gpu: DeviceModel) -> Iterator[Work]:
    """The work of all kernels and matrix products of a schedule, in their order.

    Kernels of own negatives come last, although those of the sums run before the gradients.
    """
    yield from _count_work_of_passes(schedule, gpu)
    if schedule.call.own:
        yield from _count_own_work(schedule.call, gpu)


def _count_work_of_passes(schedule: Schedule, gpu: DeviceModel) -> Iterator[Work]:
    """The work of all passes, or of what replaces them."""
    if schedule.method == "naive":
        yield from _count_naive_work(schedule.call, gpu)
    if schedule.one_launch is not None:
        yield _count_one_launch_work(schedule, gpu)
    operands = schedule.operands
    if operands is None:
        return
    for scheduled in schedule.passes:
        # the purpose "log-sum-exp and gradient" is shortened to its first part
        name = scheduled.purpose.value.partition(" and ")[0]
        marks = scheduled is schedule.passes[0] or "row_marks" not in schedule.cached
        if schedule.guide is not None and marks:
            yield _count_guide_work(name, scheduled, schedule.guide, gpu)
        for step in _kernel_and_products(name, scheduled, schedule, operands):
            kernel, blocks, launches, flops, moved = step
            seconds = least_seconds(gpu, operands.precision, flops, moved)
            tile = (scheduled.shape.query_tile_rows, scheduled.shape.block_n) if blocks else None
            block = scheduled.grid.largest if blocks else None
            yield Work(name, kernel, tile, block, blocks, launches, flops, moved, seconds)


def _count_own_work(call: Call, gpu: DeviceModel) -> Iterator[Work]:
    """The work of the kernels of own negatives: their sums and, with gradients of features, theirs.

    Vectors of length M K are left out. If own negatives are rows of a table, each row of it that
    may be used is read once, and the gradient of the whole table is written.
    """
    (m, _, d), queries = call.shape, call.query.rows * call.query.row_bytes
    uses, own = m * call.own, call.query.row_bytes * m * call.own  # own negatives of all rows
    written = own
    if call.table_rows:
        own = call.query.row_bytes * min(uses, call.table_rows)
        written = call.query.row_bytes * call.table_rows
    steps = [("log-sum-exp", "own", 1, 2.0 * uses * d, queries + own)]
    if call.gradient:
        dq = call.query_gradient
        dq_bytes = 0 if dq is None else 2 * dq.rows * dq.row_bytes  # read and written
        in_place = 0 if call.table_rows else written
        moved = queries + own + dq_bytes + in_place
        steps.append(("gradient", "own", 1, (2.0 + 2.0 * (not call.table_rows)) * uses * d, moved))
        if call.table_rows:
            steps.append(("gradient", "own_table", 3, 2.0 * uses * d, queries + written))
    precision = "fp64" if _naive_item(call) == 8 else "fp32"
    for name, kernel, launches, flops, moved in steps:
        seconds = least_seconds(gpu, precision, flops, moved)
        yield Work(name, kernel, None, None, 0, launches, flops, moved, seconds)


def _count_guide_work(
    name: str, scheduled: ScheduledPass, guide: GuideSchedule, gpu: DeviceModel
) -> Work:
    """The work of the guide's kernel, which marks the pairs of all blocks of a pass."""
    operands, shape = guide.operands, guide.shape
    features, row_bytes = operands.part_bytes / operands.item, operands.part_bytes * operands.parts
    flops = moved = 0.0
    for row_block, rows in enumerate(scheduled.grid.rows):
        for column_block in scheduled.grid.visits(row_block):
            columns = scheduled.grid.columns[column_block]
            m, n = rows.stop - rows.start, columns.stop - columns.start
            flops += 2.0 * m * n * features * PART_PRODUCTS[operands.parts]
            # features of the guide are read, and marks, of one bit, are written
            moved += (m + n) * row_bytes + guide.marks_per_pair * m * n / 8
    blocks, seconds = len(scheduled.grid), least_seconds(gpu, operands.precision, flops, moved)
    tile, kernel = (shape.query_tile_rows, shape.block_n), guide.kernel.file.removesuffix(".cu")
    return Work(name, kernel, tile, scheduled.grid.largest, blocks, blocks, flops, moved, seconds)


def _kernel_and_products(
    name: str, scheduled: ScheduledPass, schedule: Schedule, operands: Operands
) -> Iterator[tuple[str, int, int, float, float]]:
    """(kernel, blocks, launches, operations, bytes) of a pass's kernel, and of its cuBLAS products.

    A second tuple, with 0 blocks, is for the cuBLAS products, if there are any. The kernel does
    2 L D P R operations: L computed logits, D features of the loss and of a teacher, P from
    `PART_PRODUCTS`, and R = 2 if it keeps dL/dx in registers and multiplies it for dQ, else 1.
    """
    item_bytes = config.OPERAND_BYTES[operands.precision]
    computed_logits, read_bytes, cached_bytes, launches = 0.0, 0, 0, 0
    is_gradient = scheduled.purpose is Purpose.GRADIENT
    # the logits of a teacher are computed by the same launches
    teacher = schedule.teacher
    teacher_row_bytes = 0 if teacher is None else teacher.part_bytes * teacher.parts
    products: Counter[tuple[int, int, int, bool, int]] = Counter()  # blocks of each form
    for row_block, rows in enumerate(scheduled.grid.rows):
        for column_block in scheduled.grid.visits(row_block):
            columns = scheduled.grid.columns[column_block]
            m, n = rows.stop - rows.start, columns.stop - columns.start
            on_diagonal = scheduled.grid.triangle and rows == columns and scheduled.column_sums
            is_halved = on_diagonal and scheduled.shape.square  # one triangle of tiles is computed
            is_cached = is_gradient and columns.stop <= schedule.cached_columns
            computed_logits += 0 if is_cached else m * n / (2 if is_halved else 1)
            cached_bytes += m * n * item_bytes * is_cached
            read_bytes += (m + n) * (operands.part_bytes * operands.parts + teacher_row_bytes)
            # a block of one pass has a second launch, `check_references`
            launches += 1 + (scheduled.purpose is Purpose.ONE_PASS)
            if scheduled.dq_accumulator is not None and not scheduled.in_registers:
                products[m, n, 0, False, scheduled.dq_accumulator.dq_copies] += 1
            # if queries are the keys, the product for dQ gives a diagonal block's whole gradient
            dq_is_whole_gradient = schedule.call.symmetric and rows == columns
            dk_accumulator = None if dq_is_whole_gradient else scheduled.dk_accumulator
            if dk_accumulator is not None and not scheduled.in_registers:
                border = min(max(dk_accumulator.first_row - columns.start, 0), n)
                products[m, n, border, True, 1] += 1
    writes_blocks = scheduled.gradients and not scheduled.in_registers
    written_bytes = computed_logits * item_bytes if writes_blocks else 0
    written_bytes += schedule.cached["exponentials"] if scheduled.caching_kernel else 0
    part_bytes = operands.part_bytes + (0 if teacher is None else teacher.part_bytes)
    features = part_bytes / operands.item
    # a kernel that keeps dL/dx in registers computes a second matrix product, which gives dQ
    kernel_products = 1 + scheduled.in_registers
    flops = 2.0 * computed_logits * features * PART_PRODUCTS[operands.parts] * kernel_products
    kernel = scheduled.kernel.file.removesuffix(".cu")
    # cached exponentials are read, and overwritten by gradient blocks
    moved_bytes = read_bytes + written_bytes + 2 * cached_bytes
    yield kernel, len(scheduled.grid), launches, flops, moved_bytes
    if products:
        sides = ("dQ", scheduled.dq_accumulator), ("dK", scheduled.dk_accumulator)
        gradients = " and ".join(side for side, accumulator in sides if accumulator is not None)
        yield f"cuBLAS: {gradients}", 0, *_count_products(products, operands)


def _count_products(
    products: Mapping[tuple[int, int, int, bool, int], int], operands: Operands
) -> tuple[int, float, float]:
    """The number, operations and bytes of matrix products by cuBLAS, of blocks by their form.

    The form of a block of m x n logits: (m, n, border, is_key_side, dq_copies).

    border : the first key whose accumulator is in the workspace, counted from the first key of the
        block. A border within the block divides the products (`divide_keys`); a border at its first
        key, or outside, divides nothing
    is_key_side : the products compute dK; otherwise dQ
    dq_copies : partial sums of dQ that are computed at once
    """
    precision, width = operands.precision, operands.gradient_features
    sum_bytes, item_bytes = config.ACCUMULATOR_BYTES[precision], operands.item
    number, flops, moved = 0, 0.0, 0.0
    for (m, n, border, is_key_side, dq_copies), blocks in products.items():
        for keys in divide_keys(m, n, width, precision, border):
            rows, terms = m, keys.stop - keys.start
            if is_key_side:
                rows, terms = terms, rows
            for product in divide_terms(precision, terms, dq_copies, overwrites=False):
                number += blocks
                flops += 2.0 * rows * width * product.terms * product.batch * blocks
                operand_bytes = item_bytes * (rows + width) * product.terms
                moved_bytes = operand_bytes + 2 * sum_bytes * rows * width  # sums: read, written
                moved += product.batch * moved_bytes * blocks
    return number, flops, moved


def _count_one_launch_work(schedule: Schedule, gpu: DeviceModel) -> Work:
    """The work of the method fused, which is one launch."""
    launch, call = schedule.one_launch, schedule.call
    assert launch is not None
    m, n, d = call.shape
    features, gradients = _arrays(call)
    logits = m * n / (2 if call.symmetric else 1)  # one triangle, if queries are the keys
    flops = 2.0 * d * (logits + m * n * len(gradients))
    moved = sum(z.rows * z.row_bytes for z in (*features, *gradients))
    # without tensor cores, the kernel multiplies features of 16 bits in float32 too
    seconds = least_seconds(
        gpu, "fp64" if call.compute_precision == "fp64" else "fp32", flops, moved
    )
    return Work("loss and gradient", "fused/fused", (64, 64), (m, n), 1, 1, flops, moved, seconds)


def naive_memory(call: Call) -> dict[str, int]:
    """The memory of the method naive: M x N matrices, rows of features, gradients of one side.

    Kernels keep logits and dL/dx; operations on arrays keep up to MATRICES_WITH_OPTIONS matrices.
    """
    (m, n, d), item = call.shape, _naive_item(call)
    matrices = 1 + (call.gradient or call.moments)
    if not call.plain:
        matrices = MATRICES_WITH_OPTIONS + call.guided
    sizes = {
        "matrices of logits": matrices * m * n * item,
        "query_rows": m * d * item,
        "key_rows": 0 if call.symmetric else n * d * item,
        "gradient_rows": max((out.rows for out in _arrays(call)[1]), default=0) * d * item,
    }
    return {name: size for name, size in sizes.items() if size}


def _count_naive_work(call: Call, gpu: DeviceModel) -> Iterator[Work]:
    """The work of the method naive: kernels of kernels/cuda/naive for a `plain` call, otherwise
    operations on arrays."""
    (m, n, _), precision = call.shape, "fp64" if _naive_item(call) == 8 else "fp32"
    tile, steps = (None, _naive_products) if not call.plain else ((32, 32), _naive_kernels)
    for name, kernel, launches, flops, moved in steps(call):
        seconds = least_seconds(gpu, precision, flops, moved)
        yield Work(name, kernel, tile, (m, n), 1, launches, flops, moved, seconds)


def _naive_kernels(call: Call) -> Iterator[tuple[str, str, int, float, float]]:
    """(pass, kernel, launches, operations, bytes) of the loss by kernels, and of the gradients."""
    (m, n, d), item = call.shape, _naive_item(call)
    sides, outs = _arrays(call)
    matrix, rows = m * n * item, sum(z.rows for z in sides) * d * item
    # rows of each side, then logits, then losses of rows and of columns, which read all logits
    moved = sum(z.rows * z.row_bytes for z in sides) + 2 * rows + matrix
    moved += (1 + call.two_sided) * matrix
    yield "loss", "naive/naive", len(sides) + 2 + call.two_sided, 2.0 * m * n * d, moved
    if not (outs or call.moments):
        return
    # dL/dx, then for each gradient a product and a conversion. If queries are the keys, rows of
    # dL/dx and its columns are multiplied
    products = (2 if call.symmetric else 1) * len(outs)
    moved = 2 * matrix + products * (matrix + rows)
    moved += sum(out.rows * (out.row_bytes + 2 * d * item) for out in outs)
    yield "gradient", "naive/naive", 1 + 2 * len(outs), 2.0 * m * n * d * products, moved


def _naive_products(call: Call) -> Iterator[tuple[str, str, int, float, float]]:
    """The same by operations on arrays: their matrix products. All else they do is left out."""
    (m, n, d), item = call.shape, _naive_item(call)
    _, outs = _arrays(call)
    flops, moved = 2.0 * m * n * d, (m * n + (m + n) * d) * item  # of each product
    products = 1 + call.guided
    yield "loss", "cuBLAS: logits", products, flops * products, moved * products
    sides = ("dQ", call.query_gradient), ("dK", call.key_gradient)
    if outs:
        gradients = " and ".join(side for side, out in sides if out is not None)
        yield "gradient", f"cuBLAS: {gradients}", len(outs), flops * len(outs), moved * len(outs)


def _arrays(call: Call) -> tuple[list[Matrix], list[Matrix]]:
    """The features of a call, and the destinations of their gradients."""
    outs = [out for out in (call.query_gradient, call.key_gradient) if out is not None]
    return [call.query] if call.symmetric else [call.query, call.key], outs


def _naive_item(call: Call) -> int:
    """Bytes of a number in the method naive."""
    return 8 if call.compute_precision == "fp64" else 4


def least_seconds(gpu: DeviceModel, precision: str, flops: float, moved: float) -> float:
    """The least time of a step: of its operations or of its bytes, whichever takes longer."""
    # precisions without a rate of their own multiply operands of 16 bits, at the rate of these
    rate = gpu.flops.get(precision, gpu.flops["16 bits"])
    return max(flops / rate, moved / gpu.bandwidth)
