"""The GPU backend: sweeps or tiled kernels for logits and what becomes of them, else cuBLAS.

A fold visits blocks of the logit matrix that fit the workspace. The log-sum-exp fold writes nothing
but (max, sum) pairs of each tile's rows and columns; the gradient fold writes a panel of dL/dx in
the precision of the operands, and two plain matrix products accumulate dQ and dK from it in float32
(float64). Where dQ alone is wanted, Hopper does both in one fold. Everything is queued on the
caller's current stream; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import cupy
import numpy as np

from ... import problem as problems
from ... import solve as blocks
from ...problem import (
    Array,
    Epilogue,
    Gradients,
    Grid,
    OnlineSoftmax,
    Problem,
    Ranks,
    Sigmoid,
    SoftmaxGradient,
    Statistics,
)
from ...solve import Solution
from .. import fused as gpu_fused
from .. import naive as gpu_naive
from .. import plan as gpu_plan
from ..config import launch as config
from ..device import compiler
from ..device.abi import SCALAR, address, matrix, scalar_fields, struct
from ..device.launches import Queue
from ..vectors import Namespace, Vectors
from .fold import RanksFold, StatisticsFold
from .gradient import NarrowFold, OnlineFold, SigmoidFold, SoftmaxFold
from .operands import Scratch, Side, in_place, lends

PRECISIONS = {p: p.upper() for p in config.OPERAND_BYTES}
# One pass takes elements 2^(x - height) with a height that need not be the maximum: see
# kernels/cuda/reference_exponents.cuh. Float32 has the exponents for this, float16 has not
ONE_PASS = ("bf16x3", "bf16")


# --- the device -----------------------------------------------------------------------------------


@cache
def device_properties(index: int) -> config.Device:
    device = cupy.cuda.Device(index)
    attributes = device.attributes
    return config.Device(
        device.compute_capability,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
    )


# --- the backend ----------------------------------------------------------------------------------


class GPU:
    """Blocks of one problem on the current device: see `infonce.kernels.solve.Backend`.

    `ahead`: what another backend will gather later, of blocks like these. Both then take workspaces
    of one size, and the pool that memory comes from holds one of them, not two.

    `queue`: what is told what to do, the current stream or a plan.
    """

    xp = Namespace()

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None,
        ahead: Gradients | None = None, queue: Queue | None = None,
    ) -> None:  # fmt: skip
        gradients = gradients or ahead
        self.queue = queue or Queue()
        self.device = cupy.cuda.Device()
        self.properties = device_properties(self.device.id)
        self.precision = config.operands(problem.compute, self.properties)
        self.real = np.dtype(np.float64 if self.precision == "fp64" else np.float32)
        if not config.supported(self.precision, self.properties):
            raise ValueError(
                f'precision: expected "fp32" or "fp64" on a device of compute capability '
                f"{self.properties.capability}, which lacks the tensor cores for "
                f'"{self.precision}"'
            )
        self.tile = config.tile(self.precision, problem.shape[2], self.properties)
        self.query = Side(self, problem.query, problem.normalize)
        self.key = self.query if problem.symmetric else Side(self, problem.key, problem.normalize)
        # bytes of an element (of one part), and of a row's part
        self.parts = config.PARTS.get(self.precision, 1)
        self.item = config.OPERAND_BYTES[self.precision] // self.parts
        self.width = max(self.query.padded, self.key.padded) * self.item
        extras = problem.normalize or problem.query_ids is not None
        self.sweep = None
        if not config.PORTABLE:
            self.sweep = config.sweep(self.precision, self.width, self.properties, extras)
        # elsewhere log-sum-exps first, then dQ from panels: 3 products
        self.online = self.sweep is not None and self.precision in ONE_PASS
        self.scale, self._scale = scalar_fields(problem.scale)
        self.bias, self._bias = scalar_fields(0.0 if problem.bias is None else problem.bias)
        self.square = problem.square  # while positives by the loss's rule are not spelled out
        self.vectors = Vectors(self, problem.query)
        self._queries_of_keys: tuple[Array, Array] | None = None
        self.query_in_place = self.key_in_place = True
        lending = 0
        if gradients is not None:
            gathered = gradients.query if problem.symmetric else gradients.key
            lending = 0 if gradients.add_query else lends(gathered, self.real)
            self.query_in_place = not gradients.add_query and in_place(gradients.query, self.real)
            self.key_in_place = not gradients.want_key or in_place(gradients.key, self.real)
        self.narrow = None
        if problem.symmetric and gradients is not None:
            self.narrow = config.narrow(self.sweep, self.precision, len(problem.query))
        panels = gradients is not None and self.narrow is None
        self.needs = config.Needs(
            precision=self.precision,
            staged_query=not self.query.direct,
            staged_key=not self.key.direct,
            columns=problem.two_sided or problem.symmetric,
            gradient=panels,
            query_accumulator=gradients is not None and not self.query_in_place,
            # the triangle gathers the gradient of all rows
            key_accumulator=panels
            and not (self.query_in_place if problem.symmetric else self.key_in_place),
            sweep=self.sweep, lends=lending,
            rows=problem.bias is not None or (self.online and blocks.one_pass(problem, gradients)),
        )  # fmt: skip
        self.statistics_cut, self.cut, size = config.cuts(
            problem.shape, self.needs, problem.workspace, self.tile.block_n, problem.symmetric
        )
        self.scratch = Scratch(size)

    # -- launching

    def kernel(self, file: str, name: str, shared: int = 0, **defines: int | str) -> Any:
        function = compiler.function(
            self.device, file, name, shared, PRECISION=PRECISIONS[self.precision], **defines
        )
        return self.queue.kernel(function)

    def tiled_kernel(self, name: str, **defines: int) -> Any:
        return self.kernel(
            f"tiled/{name}.cu", name, self.tile.shared,
            BLOCK_N=self.tile.block_n, STAGES=self.tile.stages, LEVELS=self.tile.levels,
            MIN_BLOCKS=self.tile.min_blocks, **defines,
        )  # fmt: skip

    def sweep_kernel(self, shape: config.Sweep, name: str, panel: bool, **defines: int) -> Any:
        return self.kernel(
            f"sm90/sweep_{name}.cu", f"sweep_{name}", shape.shared(panel),
            SLABS=shape.slabs, STAGES=shape.stages(panel), WIDE=int(shape.wide),
            NARROW=int(shape.narrow), SHARED=shape.shared(panel), **defines,
        )  # fmt: skip

    def rows_kernel(self, name: str, n: int, *arguments: Any) -> None:
        """One warp a row."""
        self.kernel("rows.cu", name)((-(-n // 8),), (256,), arguments)

    def vector_kernel(self, name: str, n: int, *arguments: Any, threads: int = 1) -> None:
        """So many threads an element."""
        self.kernel("vectors.cu", name)((-(-n * threads // 128),), (128,), arguments)

    @cached_property
    def logit_scale(self) -> tuple[float, int, float, int]:
        """What products are multiplied by to be logits: the scale, and what they lack."""
        value, pointer, _, _ = self.scale
        cut_off = 0.0 if self.sweep is None else config.cut_off(self.precision, self.width)
        return value, pointer, 1 + cut_off, self._shift()

    def _shift(self) -> int:
        """Has features brought to where float16 has all its digits, by a power of two a side. The
        address of what products are to be multiplied by then; 0: features stay as they are."""
        sides = [self.query] if self.key is self.query else [self.query, self.key]
        apart = [side for side in sides if side.features.dtype != np.float16]
        if self.precision not in config.FLOAT16 or self.query.factor is not None or not apart:
            return 0
        largest, self.shifts = self.queue.zeros(2, np.uint32), cupy.empty(3)
        for side in apart:
            (n, d), of = side.features.shape, sides.index(side)
            self.rows_kernel("find_largest", n, matrix(side.features), n, d, address(largest, of))
            side.shift = address(self.shifts, of)
        of_keys = address(largest, len(sides) - 1)
        self.kernel("rows.cu", "find_shifts")((1,), (1,), (largest, of_keys, self.shifts))
        return address(self.shifts, 2)

    @property
    def scale_struct(self) -> Any:
        return struct(SCALAR, *self.scale)

    @property
    def logit_scale_struct(self) -> Any:
        return struct(SCALAR, *self.logit_scale)

    def queries_of_keys(self, problem: Problem) -> tuple[Array, Array]:
        """Queries in the order of their positive keys, and where each key's begin: [M], [N + 1]."""
        if problem.apart:
            none = self.queue.zeros(problem.shape[1] + 1, np.int64)
            return none, none
        if self._queries_of_keys is None:
            m, n, _ = problem.shape
            count = cupy.zeros(n + 1, np.int64)
            self.vector_kernel("count_queries", m, problem.positives, m, count)
            start = cupy.cumsum(count)
            order, taken = cupy.empty(m, np.int64), start.copy()
            self.vector_kernel("list_queries", m, problem.positives, m, taken, order)
            self.vector_kernel("sort_queries", n, start, n, order)
            self._queries_of_keys = order, start
        return self._queries_of_keys

    # -- what blocks.solve asks for

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        m, n, _ = problem.shape
        step, border = self.cut.columns, self.cut.lent
        columns = [*problems.cut(border, step), *problems.cut(n, step, border)]
        rows = columns if problem.symmetric else problems.cut(m, self.cut.rows)
        return Grid(rows, columns, triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return problems.cut(n, self.cut.key_rows or n)

    def poison(self, problem: Problem) -> Array:
        """[M] zeros; NaN for rows whose loss depends on a feature that is not finite."""
        m = problem.shape[0]
        out = self.queue.zeros(m + 1, np.float64)
        bad = self.not_finite(problem, out[m:])
        self.vector_kernel("poison", m, m, out, address(bad), out[m:])
        return out[:m]

    def not_finite(
        self, problem: Problem, found: Array, out: Array | None = None, known: bool = False
    ) -> Array | None:
        """Puts NaN into `found` if a key has a feature that is not finite. [M] zeros and NaN for
        queries, in `out` if that is given, if they are neither the keys nor `known`."""
        m, n, d = problem.shape
        queries = None
        if problem.symmetric or known:
            m, out = 0, None
        else:
            queries, out = self.query.features, cupy.empty(m) if out is None else out
        self.rows_kernel(
            "not_finite", n + m, matrix(self.key.features), n, matrix(queries), m, d,
            address(out), found,
        )  # fmt: skip
        return out

    def of_positives(self, problem: Problem, of_keys: Array) -> Array:
        return of_keys[problem.positives]

    def fold(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if isinstance(epilogue, Statistics):
            (m, n, _), of = problem.shape, self.statistics_cut
            rows, columns = problems.cut(m, of.rows), problems.cut(n, of.columns)
            grid = replace(grid, rows=rows, columns=columns)
            StatisticsFold(self, problem, grid, epilogue).run()
            if epilogue.row_rank is not None:
                RanksFold(self, problem, grid, blocks.ranks_of(epilogue, problem)).run()
        elif isinstance(epilogue, Ranks):
            RanksFold(self, problem, grid, epilogue).run()
        elif isinstance(epilogue, OnlineSoftmax):
            OnlineFold(self, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, SoftmaxGradient) and self.narrow is not None:
            NarrowFold(self, problem, replace(grid, triangle=False), epilogue, gradients).run()
        elif isinstance(epilogue, SoftmaxGradient):
            SoftmaxFold(self, problem, grid, epilogue, gradients).run()
        elif isinstance(epilogue, Sigmoid):
            SigmoidFold(self, problem, grid, epilogue, gradients).run()


# --- one call -------------------------------------------------------------------------------------


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose arrays are on one device, on its current stream."""
    device = problem.query.device
    if device.id != cupy.cuda.runtime.getDevice():
        with device:
            return solve(problem, gradients)
    if problem.method == "naive":
        return gpu_naive.solve(problems.spelled_out(problem, cupy), gradients)
    fused = problem.method == "auto" and not problem.ranks and gpu_fused.pays(problem)
    if problem.method == "fused":
        gpu_fused.require(problem)
        fused = True
    if fused:
        return gpu_fused.solve(problem, gradients, device_properties(device.id))
    if gpu_plan.pays(problem, gradients):
        properties = device_properties(device.id)
        return Solution(**gpu_plan.call(_solve, properties, wide(problem), gradients))
    return blocks.solve(problem, GPU(problem, gradients), gradients)


def wide(problem: Problem) -> Problem:
    """Numbers on the device as kernels read them."""
    made = {
        name: value.astype(np.float64)
        for name, value in (("scale", problem.scale), ("bias", problem.bias))
        if isinstance(value, cupy.ndarray) and value.dtype != np.float64
    }
    return replace(problem, **made) if made else problem


def _solve(problem: Problem, gradients: Gradients | None, queue: Queue) -> dict[str, Array | None]:
    found = blocks.solve(problem, GPU(problem, gradients, queue=queue), gradients)
    return {
        "losses": found.losses if found.loss is None else None, "loss": found.loss,
        "row_lse": found.row_lse, "column_lse": found.column_lse,
        "scale_grad": found.scale_grad, "bias_grad": found.bias_grad,
    }  # fmt: skip
