"""method="naive" on the GPU: kernels/cuda/naive.cu one after the other, the logits in a buffer."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ..problem import LOG2_E, Array, Gradients, Problem, Statistics, Sums
from ..solve import Solution
from .device import compiler
from .device.abi import SCALAR, address, matrix, scalar_fields, struct, whole_strides

THREADS = 256
TILE = 32  # rows and columns of a product's tile
ROWS, COLUMNS, BOTH = 0, 1, 2
_PAIRS = np.dtype(
    [("positives", "u8"), ("query_ids", "u8"), ("key_ids", "u8"), ("symmetric", "i8")]
)
_SIDE = np.dtype([(name, "u8") for name in ("gap", "lse", "loss", "top", "rank")])


class _Side:
    """What the rows, or the columns, know of their logits."""

    def __init__(self, n: int) -> None:
        self.gap, self.lse, self.loss, self.top = (cupy.empty(n) for _ in range(4))
        self.rank = cupy.empty(n, np.int64)
        vectors = self.gap, self.lse, self.loss, self.top, self.rank
        self.struct = struct(_SIDE, *map(address, vectors))


def _require(m: int, n: int, d: int, item: int) -> None:
    """MemoryError where logits, their gradient and the features do not fit."""
    needed = (2 * m * n + 2 * (m + n) * d) * item
    free = cupy.cuda.Device().mem_info[0] + cupy.get_default_memory_pool().free_bytes()
    if needed > free:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes on the GPU, of '
            f"which {free} are free"
        )


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem` from the full matrix of logits."""
    m, n, d = problem.shape
    real = np.dtype(np.float64 if problem.compute == "fp64" else np.float32)
    _require(m, n, d, real.itemsize)
    device = cupy.cuda.Device()
    symmetric, sigmoid = problem.symmetric, problem.bias is not None
    sizes = m, n, d
    normalize = int(problem.normalize)

    def launch(name: str, blocks: int, *arguments: Any) -> None:
        precision = "FP64" if real.itemsize == 8 else "FP32"
        kernel = compiler.function(device, "naive/naive.cu", name, PRECISION=precision)
        kernel((blocks,), (THREADS,), arguments)

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // TILE) * -(-columns // TILE)

    def unit_rows(z: Array) -> tuple[Array, Array, Array]:
        u, inverse, bad = cupy.empty(z.shape, real), cupy.empty(len(z)), cupy.empty(len(z))
        launch("unit_rows", len(z), matrix(whole_strides(z)), sizes[2], normalize, u, inverse, bad)
        return u, inverse, bad

    u, u_inverse, u_bad = unit_rows(problem.query)
    v, v_inverse, v_bad = (u, u_inverse, u_bad) if symmetric else unit_rows(problem.key)
    pairs = struct(
        _PAIRS, address(problem.positives), address(problem.query_ids), address(problem.key_ids),
        symmetric,
    )  # fmt: skip
    scale, _kept = scalar_fields(problem.scale)
    scale_struct = struct(SCALAR, *scale)
    bias, _kept_too = scalar_fields(problem.bias if sigmoid else 0.0)
    bias_struct = struct(SCALAR, *bias)
    x = cupy.empty((m, n), real)
    launch("similarity", tiles(m, n), u, v, *sizes, scale_struct, pairs, x)

    rows = columns = None
    if sigmoid:
        losses = cupy.empty(m)
        launch("sigmoid_losses", m, x, sizes[1], pairs, bias_struct, losses)
        solution = Solution(losses)
    else:
        rows, positive = _Side(m), cupy.empty(m)
        launch("row_losses", m, x, sizes[1], pairs, rows.struct, positive)
        stats = Statistics(Sums(LOG2_E * rows.top, None), None, LOG2_E * positive, rows.rank)
        losses = problem.row_weight * rows.loss
        solution = Solution(losses, rows.lse, None, stats, (rows.loss, None))
        if symmetric:
            stats.column_rank = rows.rank
        if problem.two_sided:
            columns = _Side(n)
            launch("column_losses", -(-n // 32), x, *sizes[:2], columns.struct)
            solution.losses = losses + problem.column_weight * columns.loss
            solution.column_lse = columns.lse
            solution.directions = rows.loss, columns.loss
            stats.column_rank = columns.rank
    solution.losses = solution.losses + u_bad + v_bad.sum()
    solution.logits = x
    if gradients is None:
        return solution

    g, dots, sums = cupy.empty((m, n), real), cupy.empty(m), cupy.empty(m)
    launch(
        "logit_gradient", m, x, sizes[1], pairs, problem.upstream, np.float64(problem.row_weight),
        np.float64(problem.column_weight),
        address(rows.lse if rows else None), address(rows.gap if rows else None),
        address(columns.lse if columns else None), address(columns.gap if columns else None),
        int(sigmoid), bias_struct, g, dots, sums,
    )  # fmt: skip
    solution.scale_grad = dots.sum() / problem.scale
    solution.bias_grad = sums.sum()

    def features(which: Any, z: Array, own: Array, inverse: Array, out: Array) -> None:
        du = cupy.empty(own.shape, real)
        launch("feature_gradient", tiles(len(own), d), g, z, *sizes, which, scale_struct, du)
        launch("to_features", len(own), du, own, sizes[2], normalize, inverse, matrix(out))

    if gradients.query is not None:
        features(BOTH if symmetric else ROWS, v, u, u_inverse, gradients.query)
    if gradients.key is not None:
        features(COLUMNS, u, v, v_inverse, gradients.key)
    return solution
