"""The passes of a loss on the CPU, with the roundings of a GPU's tensor cores: for measurements.

`infonce.compare` asks how wrong a precision of a GPU is. The passes are those of `ArrayBlocks`, in
float32, with these differences, which docs/numerics.md explains:

- Operands of products are rounded to the precision (`formats.product`), and added up in float32.
  The features of 16-bit precisions come in 16 bits, so only the gradient block is rounded here.
- Positives stay out of the gradient block, and are added to gradients in float32.
- Gradient blocks are divided by the gradient divisor of kernels/cuda/vectors/factors.cuh, so that
  float16 neither overflows nor underflows.

Not emulated: the order of sums, the truncation bias of tensor cores, and fp32 in parts of float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array_pass import ArrayPass
from ..arrays.backend import ArrayBlocks
from ..arrays.formats import product, round_to_format
from ..arrays.naive import PairMatrix
from ..distill.problem import TaughtGradient
from ..distill.solve import solver_by_passes
from ..epilogues import Sigmoid, SoftmaxGradient
from ..grid import Grid
from ..options import PositivePairs
from ..problem import Array, Gradients, Problem, fast_replace, uses_moments
from ..solve import Solution, Vectors
from .operands import Side, find_norms

# the largest element of a gradient block, except 1: see the kernel `ranges`
LARGEST_ELEMENT = {"fp16": 8192.0}
MIN_BOUND_SHARE = 2.0**-60  # see the constant of that name in kernels/cuda/vectors/factors.cuh


def solve(problem: Problem, gradients: Gradients | None, precision: str) -> Solution:
    """Loss and gradients of `problem`, whose features are NumPy arrays, in a GPU's `precision`.

    `precision` is "fp64", "fp32", "tf32", "bf16x3", "bf16" or "fp16".
    """
    if problem.moments or problem.scalar_grads:
        m, n, _ = problem.shape
        problem = fast_replace(problem, moments=uses_moments(m * n, gradients is not None, False))
    backend = EmulatedBlocks(problem, gradients, precision)
    return solver_by_passes(problem)(problem, backend, gradients)


def gradient_divisor(
    epilogue: SoftmaxGradient | Sigmoid, by_factor: bool, largest_element: float
) -> float:
    """The gradient divisor of gradient blocks, as the kernel `ranges` finds it."""
    is_softmax = isinstance(epilogue, SoftmaxGradient)
    share = 1.0 if not is_softmax else 2.0 if by_factor else MIN_BOUND_SHARE
    vectors = [share * epilogue.row_factor]
    if isinstance(epilogue, SoftmaxGradient):
        vectors += [2 * epilogue.positive_gradient]
        if epilogue.column_positive_gradient is not None:
            vectors += [2 * epilogue.column_positive_gradient]
        if by_factor and epilogue.column_factor is not None:
            vectors += [2 * epilogue.column_factor]
    bound = max(float(np.abs(vector).max(initial=0.0)) for vector in vectors)
    return bound / largest_element if 1e-300 < bound < np.inf else 1.0


def _divided(epilogue: SoftmaxGradient, divisor: float) -> SoftmaxGradient:
    """The epilogue of blocks that are divided, except for their positives."""
    column_factor = epilogue.column_factor
    parts: dict[str, Any] = {
        "row_factor": epilogue.row_factor / divisor,
        "column_factor": None if column_factor is None else column_factor / divisor,
    }
    if isinstance(epilogue, TaughtGradient) and epilogue.teacher is not None:
        parts["teacher"] = _divided(epilogue.teacher, divisor)
    return fast_replace(epilogue, **parts)


class EmulatedPass(ArrayPass):
    """`ArrayPass` with rounded products."""

    def __init__(
        self, backend: EmulatedBlocks, problem: Problem, grid: Grid, epilogue: Any,
        gradients: Gradients | None,
    ) -> None:  # fmt: skip
        self.precision = backend.precision
        self.positives: tuple[Array, Array, Array] | None = None  # of a block: rows, columns, dL/dx
        self.divisor = 1.0
        if isinstance(epilogue, SoftmaxGradient | Sigmoid):
            by_factor = isinstance(epilogue, TaughtGradient) or problem.set_size > 1
            by_factor = by_factor or bool(getattr(epilogue, "linear", ()))
            largest = LARGEST_ELEMENT.get(self.precision, 1.0)
            self.divisor = gradient_divisor(epilogue, by_factor, largest)
        if isinstance(epilogue, SoftmaxGradient):  # before factors are rounded to float32
            epilogue = _divided(epilogue, self.divisor)
        super().__init__(backend, problem, grid, epilogue, gradients)

    def dot_products(self, query: Array, key: Array, out: Array | None = None) -> Array:
        if self.precision in ("fp16", "bf16"):  # these features have 16 bits, or norms of such rows
            return super().dot_products(query, key, out)
        rounded = product(query, key.T, self.precision)
        if out is None:
            return rounded
        out[...] = rounded
        return out

    def query_product(self, g: Array, key: Array) -> Array:
        total = self._rounded_product(g, key)
        if self.positives is not None:
            rows, columns, values = self.positives
            np.add.at(total, rows, values[:, None] * key[columns])
        return total

    def key_product(self, g: Array, query: Array) -> Array:
        total = self._rounded_product(g.T, query)
        if self.positives is not None:
            rows, columns, values = self.positives
            np.add.at(total, columns, values[:, None] * query[rows])
        return total

    def _rounded_product(self, g: Array, features: Array) -> Array:
        """The product of a divided gradient block without positives, and of features."""
        if self.precision in ("fp16", "bf16"):
            total = round_to_format(g, self.precision) @ features
        else:
            total = product(g, features, self.precision)
        root = total.dtype.type(np.sqrt(self.divisor))  # the divisor may underflow float32
        total *= root
        total *= root
        return total

    def _gradient(self, *args: Any) -> Array:
        _, _, index, *_ = args
        return self._without_positives(super()._gradient(*args), index)

    def _sigmoid(
        self, sigmoid: Sigmoid, x: PairMatrix, index: Array, rows: slice,
        pairs: PositivePairs | None,
    ) -> Array:  # fmt: skip
        g = self._without_positives(super()._sigmoid(sigmoid, x, index, rows, pairs), index)
        g /= g.dtype.type(self.divisor)
        return g

    def _without_positives(self, g: Array, index: Array) -> Array:
        """g with 0 at the positives, which go to `self.positives`. `index` are positions in g.flat,
        beyond its end for a positive outside of the block."""
        rows, columns = np.divmod(np.unique(index[index < g.size]), g.shape[1])
        self.positives = rows, columns, g[rows, columns]
        g[rows, columns] = 0
        return g


class EmulatedBlocks(ArrayBlocks):
    """`ArrayBlocks` whose passes round products to `precision`."""

    pass_class = EmulatedPass

    def __init__(self, problem: Problem, gradients: Gradients | None, precision: str) -> None:
        super().__init__(problem, gradients, Vectors(np), self._make_side)
        self.precision = precision

    def _make_side(self, features: Array, problem: Problem) -> Side:
        norms = find_norms(features, self.dtype) if problem.normalize else None
        return Side(features, self.dtype, norms)
