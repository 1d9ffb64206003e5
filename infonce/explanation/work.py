"""The operations and bytes of each step of a schedule, and the least time of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..kernels.gpu import config
from ..kernels.gpu.schedule import (
    GuideSchedule,
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
    """A kernel over all blocks of a pass, or the matrix products after it."""

    name: str  # name of the pass
    kernel: str
    tile: tuple[int, int] | None  # rows and columns of a tile of logits
    block: tuple[int, int] | None  # rows and columns of the largest block of logits
    blocks: int  # number of blocks
    launches: int
    flops: float  # multiplications and additions
    bytes: float  # bytes read and written, if a launch reads each operand once
    seconds: float  # least time, at the peaks of the device


# parts of an operand -> products of parts that make a product of two operands
PART_PRODUCTS = {1: 1, 2: 3}


def schedule_work(schedule: Schedule, gpu: DeviceModel) -> Iterator[Work]:
    """The work of all kernels and matrix products of a schedule, in their order."""
    if schedule.one_launch is not None:
        yield _count_one_launch_work(schedule, gpu)
    operands = schedule.operands
    if operands is None:
        return
    for scheduled in schedule.passes:
        name = scheduled.purpose.value.partition(" and ")[0]
        if schedule.guide is not None:
            yield _count_guide_work(name, scheduled, schedule.guide, gpu)
        for step in _kernel_and_products(name, scheduled, schedule, operands):
            kernel, blocks, launches, flops, moved = step
            seconds = _seconds(gpu, operands.precision, flops, moved)
            tile = (scheduled.shape.query_tile_rows, scheduled.shape.block_n) if blocks else None
            block = scheduled.grid.largest if blocks else None
            yield Work(name, kernel, tile, block, blocks, launches, flops, moved, seconds)


def _count_guide_work(
    name: str, scheduled: ScheduledPass, guide: GuideSchedule, gpu: DeviceModel
) -> Work:
    """The work of the guide's kernel, which marks the pairs of all blocks of a pass."""
    operands, shape = guide.operands, guide.shape
    flops = moved = 0.0
    for a, rows in enumerate(scheduled.grid.rows):
        for b in scheduled.grid.visits(a):
            m, columns = rows.stop - rows.start, scheduled.grid.columns[b]
            n = columns.stop - columns.start
            flops += 2.0 * m * n * operands.width / operands.item * PART_PRODUCTS[operands.parts]
            moved += (m + n) * operands.width * operands.parts + guide.marks_per_pair * m * n / 8
    blocks, seconds = len(scheduled.grid), _seconds(gpu, operands.precision, flops, moved)
    tile, kernel = (shape.query_tile_rows, shape.block_n), guide.kernel.file.removesuffix(".cu")
    return Work(name, kernel, tile, scheduled.grid.largest, blocks, blocks, flops, moved, seconds)


def _kernel_and_products(
    name: str, scheduled: ScheduledPass, schedule: Schedule, operands: Operands
) -> Iterator[tuple[str, int, int, float, float]]:
    """(kernel, blocks, launches, operations, bytes) of a pass's kernel, and of its products."""
    item = config.OPERAND_BYTES[operands.precision]
    pairs, read, cached, launches = 0.0, 0, 0, 0  # logits, bytes, bytes, number
    is_gradient = scheduled.purpose is Purpose.GRADIENT
    teacher = schedule.teacher  # its products are computed beside those of the student
    teacher_width = 0 if teacher is None else teacher.width * teacher.parts
    cublas_products = _Products(operands)
    for a, rows in enumerate(scheduled.grid.rows):
        for b in scheduled.grid.visits(a):
            columns = scheduled.grid.columns[b]
            m, n = rows.stop - rows.start, columns.stop - columns.start
            is_half = scheduled.grid.triangle and rows == columns and scheduled.column_sums
            is_cached = is_gradient and columns.stop <= schedule.cached_columns
            pairs += 0 if is_cached else m * n / (2 if is_half and scheduled.shape.square else 1)
            cached += m * n * item * is_cached
            read += (m + n) * (operands.width * operands.parts + teacher_width)
            launches += 1 + (scheduled.purpose is Purpose.ONE_PASS)
            if scheduled.dq_accumulator is not None and not scheduled.in_registers:
                cublas_products.add(m, n, 0, False, scheduled.dq_accumulator.dq_copies)
            same = schedule.call.symmetric and rows == columns
            if scheduled.dk_accumulator is not None and not scheduled.in_registers and not same:
                cublas_products.add(m, n, scheduled.dk_accumulator.first_row - columns.start, True)
    written = pairs * item if scheduled.gradients and not scheduled.in_registers else 0
    written += schedule.cached[0].bytes if scheduled.caching_kernel else 0
    features = (operands.width + (0 if teacher is None else teacher.width)) / operands.item
    flops = 2.0 * pairs * features * PART_PRODUCTS[operands.parts] * (1 + scheduled.in_registers)
    kernel = scheduled.kernel.file.removesuffix(".cu")
    blocks = len(scheduled.grid)
    yield kernel, blocks, launches, flops, read + written + 2 * cached
    if cublas_products.number:
        sides = ("dQ", scheduled.dq_accumulator), ("dK", scheduled.dk_accumulator)
        gradients = " and ".join(side for side, accumulator in sides if accumulator is not None)
        yield (
            f"cuBLAS: {gradients}",
            0,
            cublas_products.number,
            cublas_products.flops,
            cublas_products.bytes,
        )


class _Products:
    """The number, operations and bytes of matrix products by cuBLAS."""

    def __init__(self, operands: Operands) -> None:
        self.operands, self.number, self.flops, self.bytes = operands, 0, 0.0, 0.0

    def add(self, m: int, n: int, border: int, is_key_side: bool, dq_copies: int = 1) -> None:
        """Add the products of a block of m x n logits that compute dK, or dQ.

        `border`: the first row of dK in the workspace, counted from the first key of the block.
        """
        precision, width = self.operands.precision, self.operands.gradient_width
        real, item = config.ACCUMULATOR_BYTES[precision], self.operands.item
        for keys in divide_keys(m, n, width, precision, border):
            rows, terms = m, keys.stop - keys.start
            if is_key_side:
                rows, terms = terms, rows
            for product in divide_terms(precision, terms, dq_copies, False):
                self.number += 1
                self.flops += 2.0 * rows * width * product.terms * product.batch
                moved = item * (rows + width) * product.terms + 2 * real * rows * width
                self.bytes += product.batch * moved


def _count_one_launch_work(schedule: Schedule, gpu: DeviceModel) -> Work:
    launch, call = schedule.one_launch, schedule.call
    assert launch is not None
    m, n, d = call.shape
    outs = [out for out in (call.query_gradient, call.key_gradient) if out is not None]
    logits = m * n / (2 if call.symmetric else 1)
    features = [call.query] if call.symmetric else [call.query, call.key]
    flops = 2.0 * d * (logits + m * n * len(outs))
    moved = sum(z.rows * z.row_bytes for z in (*features, *outs))
    # the kernel multiplies in float32, also features of 16 bits: it uses no tensor cores
    seconds = _seconds(gpu, "fp64" if call.compute == "fp64" else "fp32", flops, moved)
    return Work("loss and gradient", "fused/fused", (64, 64), (m, n), 1, 1, flops, moved, seconds)


def _seconds(gpu: DeviceModel, precision: str, flops: float, moved: float) -> float:
    """The least time of a step, at the peaks of the device."""
    # all precisions without a rate of their own multiply 16-bit operands
    rate = gpu.flops.get(precision, gpu.flops["16 bits"])
    return max(flops / rate, moved / gpu.bandwidth)
