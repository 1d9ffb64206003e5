"""The mathematics on vectors of length M and N on a GPU, a kernel a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .. import problem as problems
from .. import solve as blocks
from ..problem import Array, Gradients, Problem, Sigmoid, Statistics
from .device import compiler
from .device.abi import SCALAR, SUMS, address, pointers, struct
from .tiled.context import Context

_CONCLUDING = np.dtype(
    [("rows", SUMS), ("columns", SUMS),
     ("vectors", pointers("positive positives upstream bad any")),
     ("row_weight", "f8"), ("column_weight", "f8"), ("scale", SCALAR), ("m", "i8"),
     ("symmetric", "i8"), ("triangle", "i8"), ("two_sided", "i8"), ("lse_is_float", "i8"),
     ("results", pointers("losses row_loss row_lse2 column_loss column_lse2 a b at_positive")),
     ("lses", pointers("row column"))]
)  # fmt: skip
_SPELLING = np.dtype(
    [("positives", "u8"), ("upstream", "u8"), ("value", "f8"), ("symmetric", "i8")]
)

_CONCLUDE = compiler.flatten("conclude.cuh")  # merge, conclude_direction

# The identity of the log-sum-exp fold: (max, sum) = (-inf, 0)
_empty_sums = cupy.ElementwiseKernel(
    "", "float64 max, float64 sum",
    "max = __longlong_as_double(0xfff0000000000000LL); sum = 0;", "infonce_empty_sums",
)  # fmt: skip
# solve.Vectors.merge in place, and solve.Vectors.within
_merge_sums = cupy.ElementwiseKernel(
    "float64 other_max, float64 other_sum", "float64 max, float64 sum",
    """
    const Sum both = merge(Sum{max, sum}, Sum{other_max, other_sum}, [](double x) {
      return exp2(x);
    });
    max = both.max, sum = both.sum;
    """,
    "infonce_merge_sums", preamble=_CONCLUDE,
)  # fmt: skip
_within = cupy.ElementwiseKernel(
    "int64 positive, int64 start, int64 stop", "int64 local",
    "local = positive >= start && positive < stop ? positive - start : -1", "infonce_within",
)  # fmt: skip
# conclude_direction (CuPy has a logaddexp2, which loses small losses)
_conclude = cupy.ElementwiseKernel(
    "float64 max, float64 sum, float64 positive",
    "float64 loss, float64 lse, float64 share, float64 lse2",
    """
    const Direction d = conclude_direction(Sum{max, sum}, positive);
    loss = d.loss, lse = LN_2 * d.lse2, share = d.share, lse2 = d.lse2;
    """,
    "infonce_conclude", preamble=_CONCLUDE,
)  # fmt: skip


class ElementwiseVectors(blocks.Vectors):
    """`solve.Vectors` on CuPy's arrays, what folds merge in one kernel a step."""

    def __init__(self) -> None:
        super().__init__(cupy)

    def identity(self, n: int) -> problems.Sums:
        return problems.Sums(*_empty_sums(size=n))

    def merge(self, sums: problems.Sums, other: problems.Sums) -> None:
        _merge_sums(other.max, other.sum, sums.max, sums.sum)

    def within(self, positives: Array, keys: slice) -> Array:
        return _within(positives, keys.start, keys.stop)

    def direction(self, sums: problems.Sums, positive: Array) -> blocks.Direction:
        loss, lse, share, lse2 = _conclude(sums.max, sums.sum, positive)
        return blocks.Direction(loss, lse, share, height=lse2, at_height=1.0)


class TiledVectors(ElementwiseVectors):
    """The steps of a whole call in a kernel each: kernels/cuda/vectors.cu."""

    def __init__(self, context: Context, features: Array) -> None:
        super().__init__()
        self.context, self.launcher = context, context.launcher
        # results are float64 for float64 features, else float32; the caller converts what differs
        self.double = features.dtype == np.float64 or context.precision == "fp64"
        self.out = np.dtype(np.float64 if self.double else np.float32)
        self.found = cupy.empty(1)

    def spell_out(self, problem: Problem) -> tuple[Problem, Any]:
        """The problem spelled out, by a kernel that is handed this structure."""
        m = problem.shape[0]
        positives, upstream = problem.positives, problem.upstream
        by_rule, same, value = None, None, 0.0
        if positives is None:
            positives = by_rule = cupy.empty(m, np.int64)
        if isinstance(upstream, float):
            value = upstream
            upstream = same = cupy.empty(m)
        spelling = struct(_SPELLING, address(by_rule), address(same), value, problem.symmetric)
        return replace(problem, positives=positives, upstream=upstream), spelling

    def dots(self, n: int) -> Array:
        return cupy.empty(n)  # all are written when gradients are finished

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        if problem.ranks:
            self.found[...] = 0
            return super().statistics(problem)
        m, n, _ = problem.shape
        two_sided = problem.two_sided
        memory = cupy.empty(3 * m + (2 * n if two_sided else 0))
        rows = columns = problems.Sums(memory[:m], memory[m : 2 * m])
        if two_sided:
            columns = problems.Sums(memory[3 * m : 3 * m + n], memory[3 * m + n :])
        positive = memory[2 * m : 3 * m]
        problem, spelling = self.spell_out(problem)
        of_columns = (address(columns.max), address(columns.sum)) if two_sided else (0, 0)
        self.launcher.vector_kernel(
            "begin", max(m, n), struct(SUMS, address(rows.max), address(rows.sum)),
            struct(SUMS, *of_columns), positive, m, n, spelling, self.found,
        )  # fmt: skip
        whole = columns if two_sided or problem.symmetric else None
        return problem, Statistics(rows, whole, positive)

    def clear(self, sums: problems.Sums) -> None:
        """Nothing is folded in yet."""
        n = len(sums.max)
        nothing, spelling = struct(SUMS, 0, 0), struct(_SPELLING, 0, 0, 0.0, 0)
        to = struct(SUMS, address(sums.max), address(sums.sum))
        self.launcher.vector_kernel("begin", n, nothing, to, 0, 0, n, spelling, 0)

    def conclude(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool,
        backend: blocks.Backend | None, poison: problems.Poison | None = None,
    ) -> blocks.Conclusion:  # fmt: skip
        """With `poison` features have been looked at."""
        context, m = self.context, problem.shape[0]
        two_sided = problem.two_sided and stats.columns is not None
        if poison is None:
            poison = problems.Poison(context.not_finite(problem, self.found), self.found)
        out = cupy.empty((8 if two_sided else 5, m))
        lses = cupy.empty((2, m), self.out)
        losses, row_loss, row_lse2, a, at_positive = out[:5]
        column_loss, column_lse2, b = out[5:] if two_sided else (None, None, None)
        columns = stats.columns if two_sided and stats.columns is not None else stats.rows
        results = losses, row_loss, row_lse2, column_loss, column_lse2, a, b, at_positive
        concluding = struct(
            _CONCLUDING, address(stats.rows.max), address(stats.rows.sum),
            address(columns.max), address(columns.sum),
            address(stats.positive), address(problem.positives), address(problem.upstream),
            address(poison.rows), address(poison.all),
            problem.row_weight, problem.column_weight, *context.scale, m, problem.symmetric,
            triangle, two_sided, not self.double, *map(address, results),
            address(lses), address(lses, 1),
        )  # fmt: skip
        self.launcher.vector_kernel("conclude", m, concluding)
        share = None  # of nobody's interest from here on
        return blocks.Conclusion(
            losses, blocks.Direction(row_loss, lses[0], share, row_lse2, 1.0),
            blocks.Direction(column_loss, lses[1], share, column_lse2, 1.0) if two_sided else None,
            a, b, at_positive,
        )  # fmt: skip

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        m = problem.shape[0]
        memory = cupy.empty((4, m))
        problem, spelling = self.spell_out(problem)
        self.launcher.vector_kernel(
            "begin_sigmoid", m, m, problem.upstream, self.context.scale_struct, *memory, spelling,
            self.found,
        )  # fmt: skip
        return problem, Sigmoid(*memory)

    def poisoned(self, problem: Problem, losses: Array, backend: blocks.Backend) -> Array:
        bad, m = self.context.not_finite(problem, self.found), len(losses)
        self.launcher.vector_kernel("poison", m, m, losses, address(bad), self.found)
        return losses

    def totals(
        self, problem: Problem, losses: Array, gradients: Gradients | None,
        of_bias: Array | None = None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        out = cupy.empty(3, self.out)
        dots = None if gradients is None else gradients.dots
        of_bias = None if gradients is None else of_bias
        kernel = self.launcher.kernel("vectors.cu", "totals")
        arguments = (
            losses, len(losses), problem.row_share or 0.0, address(dots),
            0 if dots is None else len(dots),
            2.0 if problem.symmetric else 1.0,  # every pair stands twice in <dZ, z>
            address(of_bias), self.context.scale_struct, out, int(not self.double),
        )  # fmt: skip
        kernel((1,), (1024,), arguments)
        return (
            None if problem.row_share is None else out[0],
            None if dots is None else out[1],
            None if of_bias is None else out[2],
        )
