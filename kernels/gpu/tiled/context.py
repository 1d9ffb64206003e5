"""State of one call on the GPU: precision, operands, how the problem is cut, workspace."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import cupy
import numpy as np

from ...problem import Array, Gradients, Problem
from ...solve import one_pass, one_softmax
from .. import config
from ..config import precision
from ..device.arguments import Fields, address, matrix, scalar
from ..device.launcher import Launcher, device_properties
from ..device.launches import Queue
from ..linear import Rows, term_bytes
from .operands import Kept, Panel, Scratch, Side, in_place, overlay

# One pass takes elements 2^(x - r) with a reference exponent r that need not be the maximum: see
# kernels/cuda/sm90/reference_exponents.cuh. Bfloat16 has the exponents of float32, float16 has not
ONE_PASS = ("bf16x3", "bf16")
# Exponentials are kept of rows of so many K-slices: in bfloat16, or in float32 in the place of the
# two float16 parts of dL/dx
LEAST_SLICES = {"bf16": 9, "fp16x3": 12}


class Context:
    """What the folds of one call share.

    `ahead`: gradients that a later call will accumulate, of blocks like these. Both calls then take
    workspaces of one size, and the memory pool holds one of them, not two.

    `queue`: runs launches on the current stream, or records them.

    `both_folds`: the call makes log-sum-exps and gradients: there may be one fold for both, or
    exponentials may be kept between the two.
    """

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None,
        ahead: Gradients | None = None, queue: Queue | None = None, both_folds: bool = False,
    ) -> None:  # fmt: skip
        gradients = gradients or ahead
        device = cupy.cuda.Device()
        self.properties = device_properties(device.id)
        self.precision = config.operands(problem.compute, self.properties)
        of_parts = self.precision in config.OPERAND_PARTS
        if problem.limits is not None:  # of a block: others have other powers of two
            of_parts = of_parts or (
                self.precision in config.FLOAT16 and problem.query.dtype != np.float16
            )
        if of_parts and problem.leaves_out and (problem.symmetric or problem.limits is not None):
            # A product has to be the same number wherever it is computed, x_ji the same as x_ij
            self.precision = "fp32"
        self.real = np.dtype(np.float64 if self.precision == "fp64" else np.float32)
        if not config.supported(self.precision, self.properties):
            raise ValueError(
                f'precision: expected "fp32" or "fp64" on a device of compute capability '
                f"{self.properties.capability}, which lacks the tensor cores for "
                f'"{self.precision}"'
            )
        self.launcher = Launcher(device, self.precision, queue or Queue())
        options = (problem.key_bias is not None) + problem.leaves_out
        self.tile = config.tile_for(self.precision, problem.shape[2], self.properties, options)
        self.query = Side(self.launcher, problem.query, problem.normalize, self.real)
        self.key = (
            self.query
            if problem.symmetric
            else Side(self.launcher, problem.key, problem.normalize, self.real)
        )
        self.parts = config.OPERAND_PARTS.get(self.precision, 1)
        # bytes of an element (of one part), and of a row's part; features in gradients' products
        self.item = config.element_bytes(self.precision)
        self.width = min(self.query.padded, self.key.padded) * self.item
        self.product_width = config.product_width(problem.shape[2], self.precision)
        sides = self.sides
        beside = problem.copied + term_bytes(problem, self.real)
        workspace = config.left_to_folds(problem.workspace, beside)
        once = config.staged_once(
            sum(side.staged_bytes(len(side.features)) for side in sides), workspace
        )
        for side in sides:
            side.stage_once = once > 0
        extras = problem.normalize or problem.query_ids is not None
        self.sweep = None
        if not precision.PORTABLE:
            self.sweep = config.sweep_for(
                self.precision, self.width, self.properties, extras, problem.moments, options
            )
        # Without it: log-sum-exps first, then gradients from panels, which is one product more
        self.online = (
            both_folds and gradients is not None and one_softmax(problem)
            and self.sweep is not None and self.precision in ONE_PASS
        )  # fmt: skip
        self.scale, self._scale = scalar(problem.scale)
        self.exponent_scale, self._exponent_scale = self.scale, None
        if problem.hardness:
            self._exponent_scale = cupy.empty(1)
            self.launcher.vectors(
                "raise_scale", 1, scale=self.scale, by=problem.hardness, out=self._exponent_scale
            )
            self.exponent_scale, _ = scalar(self._exponent_scale)
        self.bias, self._bias = scalar(0.0 if problem.bias is None else problem.bias)
        self.paired = problem.paired  # asked before `materialize_vectors` hides the rule
        self.pair_vectors: Any = None  # `block.PairVectors`, made by the first fold that needs them
        self._queries_of_keys: tuple[Array, Array, Array] | None = None
        self.query_in_place = self.key_in_place = True
        self.query_accumulators = 1  # of one row of dQ
        overlay_row = 0
        if gradients is not None:
            if gradients.want_query and not problem.symmetric:
                self.query_accumulators = config.sums_at_once(
                    problem.shape, self.precision, self.properties.multiprocessors,
                    workspace,
                )  # fmt: skip
            accumulated = gradients.query if problem.symmetric else gradients.key
            form = self.product_width, self.real
            overlay_row = 0 if gradients.add_query else overlay(accumulated, *form)
            self.query_in_place = (
                self.query_accumulators == 1
                and not gradients.add_query
                and in_place(gradients.query, *form)
            )
            self.key_in_place = not gradients.want_key or in_place(gradients.key, *form)
        self.in_registers = None  # the sweep that writes no gradient panels
        if problem.symmetric and gradients is not None:
            rows = len(problem.query)
            self.in_registers = config.in_registers(self.sweep, self.precision, rows)
        panels = gradients is not None and self.in_registers is None
        self.needs = config.Needs(
            precision=self.precision,
            staged_query=not self.query.direct,
            staged_key=not self.key.direct,
            columns=problem.two_sided or problem.symmetric,
            gradient=panels,
            query_accumulators=(
                0 if gradients is None or self.query_in_place else self.query_accumulators
            ),
            # of a symmetric loss: the gradient of all rows
            key_accumulator=panels
            and not (self.query_in_place if problem.symmetric else self.key_in_place),
            moments=problem.moments, sweep=self.sweep,
            overlay_row=overlay_row, staged_once=once,
            rows=problem.bias is not None or (self.online and one_pass(problem, gradients)),
        )  # fmt: skip
        room, found = workspace, None
        keep = both_folds and gradients is not None and self._may_keep(problem, gradients)
        if keep and not problem.workspace_given:
            room = max(room, self.properties.share)
        if self.online and gradients is not None and gradients.want_key:
            found = config.all_keys_blocking(problem.shape, self.needs, room, self.tile.block_n)
            self.online = found is not None
        self.statistics_blocking, self.blocking, size = found or config.blockings(
            problem.shape, self.needs, workspace, self.tile.block_n, problem.symmetric,
            room if keep else 0, beside,
        )  # fmt: skip
        self.scratch, self.kept = Scratch(size, self.launcher.queue), None
        # rows that lie staged at an address of the scratch, in a fold's layout: its buffers' rows
        self.staged: dict[tuple[int, int], dict[int, slice]] = {}
        columns = self.blocking.kept
        if columns:
            m, _, d = problem.shape
            memory = self.scratch.keep((self.needs.panel(m, columns, d),))
            panel = Panel(memory, columns, self.precision)
            self.kept = Kept(self.scratch, self.launcher.queue, panel, m, columns)

    def _may_keep(self, problem: Problem, gradients: Gradients) -> bool:
        """Whether keeping exponentials would be right and pay: they need the exponents of bfloat16
        or float32, and products of shorter rows take less time than writing and reading."""
        least = LEAST_SLICES.get(self.precision)
        return (
            self.sweep is not None and least is not None and self.sweep.k_slices >= least
            and not (problem.symmetric or problem.retrieval_ranks or problem.bias is not None)
            and problem.plain_logits
            and not one_pass(problem, gradients)
        )  # fmt: skip

    @property
    def sides(self) -> list[Side]:
        """The sides that differ."""
        return [self.query] if self.key is self.query else [self.query, self.key]

    @cached_property
    def linear_rows(self) -> tuple[Rows, Rows]:
        """Queries and keys, as linear terms see them."""
        rows = [Rows(self.launcher, side) for side in self.sides]
        return rows[0], rows[-1]

    def row_options(self, problem: Problem) -> Fields:
        """struct RowOptions."""
        return {"scale": self.scale, "exponent_scale": self.exponent_scale,
                "margin": problem.margin, "decoupled": problem.decoupled,
                "key_bias": problem.key_bias}  # fmt: skip

    @cached_property
    def logit_scale(self) -> Fields:
        """struct Scale, by which products are multiplied to be logits."""
        bias = 0.0
        if self.sweep is not None:
            width = self.query.features.shape[1] * self.item  # adding zeros cuts nothing off
            bias = config.sweep_truncation_bias(self.precision, width)
        return {**self.exponent_scale, "factor": 1 + bias, "shift": self._scale_features()}

    def _scale_features(self) -> int:
        """Chooses a power-of-two scale per side so that float16 operands neither overflow nor
        underflow. Returns the address of what products are then to be multiplied by; 0: features
        stay as they are."""
        sides = self.sides
        scaled = [side for side in sides if side.features.dtype != np.float16]
        if self.precision not in config.FLOAT16 or self.query.factor is not None or not scaled:
            return 0
        largest, self.shifts = self.launcher.queue.zeros(2, np.uint32), cupy.empty(3)
        for side in scaled:
            (n, d), of = side.features.shape, sides.index(side)
            self.launcher.rows(
                "find_largest", n, d, most=8 * self.properties.multiprocessors,
                z=matrix(side.features), n=n, d=d, found=address(largest, of),
            )  # fmt: skip
            side.shift = address(self.shifts, of)
        of_keys = address(largest, len(sides) - 1)
        self.launcher.launch(
            "rows.cu", "find_shifts", 1, 1,
            {"of_queries": largest, "of_keys": of_keys, "shifts": self.shifts},
        )  # fmt: skip
        return address(self.shifts, 2)

    def to_products(self, values: Array, unit: Fields) -> Array:
        """Logits as the products that kernels have of them: `values` times a number (struct Scale)
        are logits."""
        n = len(values)
        out = cupy.empty(n, self.real)
        self.launcher.vectors(
            "to_products", n, values=values, unit=unit, n=n, scale=self.logit_scale, out=out
        )
        return out

    def add_bias(self, logits: Array, bias: Array, by: float, out: Array) -> Array:
        """out = logits + by * bias."""
        n = len(logits)
        self.launcher.vectors("add_bias", n, x=logits, bias=bias, by=by, n=n, out=out)
        return out

    def queries_of_keys(self, problem: Problem) -> tuple[Array, Array, Array]:
        """Numbers of pairs in `positives`, by their keys, and where each key's begin and end there:
        2 x [N]."""
        if self._queries_of_keys is None:
            launcher, positives = self.launcher, problem.positives
            m, n = positives.size, problem.shape[1]
            zeros = launcher.queue.zeros(n + 1, np.int64)
            begin = end = zeros[:n]
            order = zeros[n:]
            if not problem.no_local_positives:
                begin, taken, order = cupy.empty(n, np.int64), order, cupy.empty(m, np.int64)
                launcher.vectors("count_queries", m, positives=positives, m=m, end=end)
                launcher.vectors("place_queries", n, n=n, begin=begin, end=end, taken=taken)
                launcher.vectors("list_queries", m, positives=positives, m=m, end=end, order=order)
                launcher.vectors("sort_queries", n, begin=begin, end=end, n=n, order=order)
            self._queries_of_keys = order, begin, end
        return self._queries_of_keys

    def not_finite(
        self, problem: Problem, any_key: Array, out: Array | None = None, known: bool = False
    ) -> Array | None:
        """Writes NaN into `any_key` if a key has a feature that is not finite. Returns the same for
        each query, [M] the problem's marks or NaN, in `out` if given; None where queries are the
        keys, or are `known`."""
        m, n, d = problem.shape
        queries = None
        if problem.symmetric or known:
            m, out = 0, None
        else:
            queries, out = self.query.features, cupy.empty(m) if out is None else out
        self.launcher.rows(
            "not_finite", n + m, d, keys=matrix(self.key.features), n=n, queries=matrix(queries),
            m=m, d=d, marks=problem.marks, out=out, any_key_not_finite=any_key,
        )  # fmt: skip
        return out
