"""method="naive" on a GPU, with all logits in memory.

A `plain` call, which has no option but `ids` and `normalize`, runs the kernels of
kernels/cuda/naive. All other calls run operations on CuPy's arrays (kernels/arrays/naive.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from ..arrays.naive import matrix_bytes, solve_whole_matrix
from ..epilogues import Statistics, Sums
from ..problem import LOG2_E, Array, Gradients, Problem, materialize_vectors
from ..solve import Solution
from .device import compiler
from .device.arguments import Fields, matrix, scalar, valid_scale, with_strides_in_whole_elements
from .device.signatures import signature
from .vectors import ElementwiseVectors

THREADS = 256  # of a thread block
TILE = 32  # rows and columns of the tile of a matrix product
ROWS, COLUMNS, BOTH = 0, 1, 2  # argument `which` of feature_gradient: dQ, dK, or both if Q is K


def _require_memory(problem: Problem, matrices_bytes: int) -> None:
    """MemoryError if `matrices_bytes` of matrices, unit rows and their gradients do not fit."""
    m, n, d = problem.shape
    needed = matrices_bytes + 2 * (m + n) * d * (8 if problem.compute_precision == "fp64" else 4)
    free = cupy.get_default_memory_pool().free_bytes()
    if needed > free:  # asking the device takes long
        free += cupy.cuda.Device().mem_info[0]
    if needed > free:
        raise MemoryError(
            f'method: "naive" keeps the {m} x {n} logits and needs {needed} bytes on the GPU, of '
            f"which {free} are free"
        )


class _Side:
    """[n] vectors of the rows, or columns, of the logits, by row_losses or column_losses."""

    def __init__(self, n: int) -> None:
        self.gap, self.lse, self.loss, self.top = (cupy.empty(n) for _ in range(4))
        self.rank = cupy.empty(n, np.int64)

    @property
    def fields(self) -> Fields:
        """struct Side."""
        return {"gap": self.gap, "lse": self.lse, "loss": self.loss, "top": self.top,
                "rank": self.rank}  # fmt: skip


def solve_by_naive_arrays(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients from the full matrix of logits, with any options."""
    _require_memory(problem, matrix_bytes(problem))
    problem = replace(problem, scale=valid_scale(problem))
    return solve_whole_matrix(problem, gradients, ElementwiseVectors())


def make_launch(real: np.dtype[Any], id_columns: int) -> Callable[..., None]:
    """A function that launches a kernel of kernels/cuda/naive/naive.cu on so many thread blocks."""
    device = cupy.cuda.Device()
    defines: dict[str, Any] = {"PRECISION": "FP64" if real.itemsize == 8 else "FP32"}
    if id_columns > 1:
        defines["IDS"] = id_columns

    def launch(kernel: str, blocks: int, **arguments: Any) -> None:
        file = "naive/naive.cu"
        function = compiler.function(device, file, kernel, **defines)
        function((blocks,), (THREADS,), tuple(signature(file, kernel).arguments(arguments)))

    return launch


def pair_fields(problem: Problem) -> Fields:
    """struct Pairs."""
    return {
        "positives": problem.positives, "query_ids": problem.query_ids,
        "key_ids": problem.key_ids, "symmetric": problem.symmetric,
    }  # fmt: skip


def solve_by_naive_kernels(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients from the full matrix of logits, for a `plain` problem."""
    m, n, d = problem.shape
    real = np.dtype(np.float64 if problem.compute_precision == "fp64" else np.float32)
    _require_memory(problem, 2 * m * n * real.itemsize)
    problem = materialize_vectors(problem, cupy)
    symmetric, normalize = problem.symmetric, problem.normalize
    launch = make_launch(real, problem.id_columns)

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // TILE) * -(-columns // TILE)

    # rows u of queries and v of keys, normalised if asked, and logits x
    def unit_rows(z: Array) -> tuple[Array, Array, Array]:
        """Rows [n, d], [n] inverse norms, and [n] NaN flags (NaN or 0) of features."""
        u, inverse, row_nans = cupy.empty(z.shape, real), cupy.empty(len(z)), cupy.empty(len(z))
        features = matrix(with_strides_in_whole_elements(z))
        launch("unit_rows", len(z), z=features, d=d, normalize=normalize, u=u,
               inverse=inverse, row_nans=row_nans)  # fmt: skip
        return u, inverse, row_nans

    u, u_inverse, u_nans = unit_rows(problem.query)
    v, v_inverse, v_nans = (u, u_inverse, u_nans) if symmetric else unit_rows(problem.key)
    scale, _held = scalar(problem.scale)
    x = cupy.empty((m, n), real)
    launch("similarity", tiles(m, n), u=u, v=v, m=m, n=n, d=d, scale=scale,
           pairs=pair_fields(problem), x=x)  # fmt: skip
    wants_gradients = gradients is not None or problem.scalar_grads
    solution, g = solve_logits(problem, launch, x, u_nans, v_nans, wants_gradients)
    solution.logits = x

    def compute_feature_gradient(
        which: int, z: Array, own: Array, inverse: Array, out: Array
    ) -> None:
        """Write to `out` the gradient of the rows `own`: dL/dx times the other side's rows `z`."""
        du = cupy.empty(own.shape, real)
        launch("feature_gradient", tiles(len(own), d), g=g, z=z, m=m, n=n, d=d, which=which,
               scale=scale, out=du)  # fmt: skip
        launch("to_features", len(own), g=du, u=own, d=d, normalize=normalize, inverse=inverse,
               out=matrix(out))  # fmt: skip

    if gradients is not None and gradients.query is not None:
        compute_feature_gradient(BOTH if symmetric else ROWS, v, u, u_inverse, gradients.query)
    if gradients is not None and gradients.key is not None:
        compute_feature_gradient(COLUMNS, u, v, v_inverse, gradients.key)
    return solution


def solve_logits(
    problem: Problem, launch: Callable[..., None], x: Array, query_nans: Array, key_nans: Array,
    wants_gradients: bool, g: Array | None = None,
) -> tuple[Solution, Array | None]:  # fmt: skip
    """The solution of a `plain` problem from its logits x [m, n], -inf at excluded pairs; and
    dL/dx, if it is wanted, in the memory `g`, which may be that of x. NaN flags are NaN or 0: of a
    query, for the loss of its row; of a key, for all losses."""
    (m, n), pairs = x.shape, pair_fields(problem)
    sigmoid = problem.bias is not None
    bias, _held = scalar(problem.bias if sigmoid else 0.0)
    rows = columns = None
    if sigmoid:
        losses = cupy.empty(m)
        launch("sigmoid_losses", m, x=x, n=n, pairs=pairs, bias=bias, loss=losses)
        solution = Solution(losses)
    else:
        rows, positive = _Side(m), cupy.empty(m)
        launch("row_losses", m, x=x, n=n, pairs=pairs, side=rows.fields, positive=positive)
        losses = problem.row_direction_weight * rows.loss
        solution = Solution(losses, rows.lse, direction_losses=(rows.loss, None))
        if problem.two_sided:
            columns = _Side(n)
            # a thread block has 32 columns
            launch("column_losses", -(-n // 32), x=x, m=m, n=n, side=columns.fields)
            solution.losses = losses + problem.column_direction_weight * columns.loss
            solution.column_lse = columns.lse
            solution.direction_losses = rows.loss, columns.loss
        if problem.retrieval_ranks:
            stats = Statistics(Sums(LOG2_E * rows.top, None), None, LOG2_E * positive, rows.rank)
            if problem.symmetric or columns is not None:
                stats.column_rank = (columns or rows).rank
            solution.statistics = stats
    solution.losses = solution.losses + query_nans + key_nans.sum()
    if problem.known_row_nans is not None:
        solution.losses += problem.known_row_nans
    if not wants_gradients:
        return solution, None
    g = cupy.empty_like(x) if g is None else g
    dots, sums = cupy.empty(m), cupy.empty(m)
    launch(
        "logit_gradient", m, x=x, n=n, pairs=pairs, losses=solution.losses,
        upstream=problem.upstream, row_direction_weight=problem.row_direction_weight,
        column_direction_weight=problem.column_direction_weight,
        row_lse=rows and rows.lse, row_gap=rows and rows.gap,
        column_lse=columns and columns.lse, column_gap=columns and columns.gap,
        sigmoid=sigmoid, bias=bias, g=g, dots=dots, sums=sums,
    )  # fmt: skip
    solution.scale_grad = dots.sum() / problem.scale
    if sigmoid:
        solution.bias_grad = sums.sum()
    return solution, g
