"""State of one call on the GPU: precision, operands, how the problem is cut, workspace."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import cupy
import numpy as np

from ...problem import Array, Gradients, Problem
from ...solve import one_pass
from ..config import launch as config
from ..device.abi import SCALAR, address, matrix, scalar_fields, struct
from ..device.launcher import Launcher, device_properties
from ..device.launches import Queue
from .operands import Scratch, Side, in_place, lends

# One pass takes elements 2^(x - height) with a height that need not be the maximum: see
# kernels/cuda/reference_exponents.cuh. Float32 has the exponents for this, float16 has not
ONE_PASS = ("bf16x3", "bf16")


class Context:
    """`ahead`: what another call will gather later, of blocks like these. Both then take workspaces
    of one size, and the pool that memory comes from holds one of them, not two.

    `queue`: runs launches on the current stream, or records them.
    """

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None,
        ahead: Gradients | None = None, queue: Queue | None = None,
    ) -> None:  # fmt: skip
        gradients = gradients or ahead
        device = cupy.cuda.Device()
        self.properties = device_properties(device.id)
        self.precision = config.operands(problem.compute, self.properties)
        self.real = np.dtype(np.float64 if self.precision == "fp64" else np.float32)
        if not config.supported(self.precision, self.properties):
            raise ValueError(
                f'precision: expected "fp32" or "fp64" on a device of compute capability '
                f"{self.properties.capability}, which lacks the tensor cores for "
                f'"{self.precision}"'
            )
        self.launcher = Launcher(device, self.precision, queue or Queue())
        self.tile = config.tile(self.precision, problem.shape[2], self.properties)
        self.query = Side(self.launcher, problem.query, problem.normalize, self.real)
        self.key = (
            self.query
            if problem.symmetric
            else Side(self.launcher, problem.key, problem.normalize, self.real)
        )
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
            rows=problem.bias is not None or (self.online and one_pass(problem, gradients)),
        )  # fmt: skip
        self.statistics_cut, self.cut, size = config.cuts(
            problem.shape, self.needs, problem.workspace, self.tile.block_n, problem.symmetric
        )
        self.scratch = Scratch(size)

    def tiled_kernel(self, name: str, **defines: int) -> Any:
        return self.launcher.kernel(
            f"tiled/{name}.cu", name, self.tile.shared,
            BLOCK_N=self.tile.block_n, STAGES=self.tile.stages, LEVELS=self.tile.levels,
            MIN_BLOCKS=self.tile.min_blocks, **defines,
        )  # fmt: skip

    def sweep_kernel(self, shape: config.Sweep, name: str, panel: bool, **defines: int) -> Any:
        return self.launcher.kernel(
            f"sm90/sweep_{name}.cu", f"sweep_{name}", shape.shared(panel),
            SLABS=shape.slabs, STAGES=shape.stages(panel), WIDE=int(shape.wide),
            NARROW=int(shape.narrow), SHARED=shape.shared(panel), **defines,
        )  # fmt: skip

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
        largest, self.shifts = self.launcher.queue.zeros(2, np.uint32), cupy.empty(3)
        for side in apart:
            (n, d), of = side.features.shape, sides.index(side)
            self.launcher.rows_kernel(
                "find_largest", n, matrix(side.features), n, d, address(largest, of)
            )
            side.shift = address(self.shifts, of)
        of_keys = address(largest, len(sides) - 1)
        self.launcher.kernel("rows.cu", "find_shifts")((1,), (1,), (largest, of_keys, self.shifts))
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
            none = self.launcher.queue.zeros(problem.shape[1] + 1, np.int64)
            return none, none
        if self._queries_of_keys is None:
            m, n, _ = problem.shape
            count = cupy.zeros(n + 1, np.int64)
            self.launcher.vector_kernel("count_queries", m, problem.positives, m, count)
            start = cupy.cumsum(count)
            order, taken = cupy.empty(m, np.int64), start.copy()
            self.launcher.vector_kernel("list_queries", m, problem.positives, m, taken, order)
            self.launcher.vector_kernel("sort_queries", n, start, n, order)
            self._queries_of_keys = order, start
        return self._queries_of_keys

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
        self.launcher.rows_kernel(
            "not_finite", n + m, matrix(self.key.features), n, matrix(queries), m, d,
            address(out), found,
        )  # fmt: skip
        return out
