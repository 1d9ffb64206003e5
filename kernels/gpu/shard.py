"""The GPU work of one rank, by plans: blocks of its queries with any keys, and its vectors.

distributed/run.py runs one plan for each block and step; distributed/planned.py records all of them
as one plan, with `QueuedVectors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .. import problem as problems
from .. import solve as two_passes
from ..arrays.backend import ArrayBlocks
from ..between_passes import Finalized
from ..direction_losses import DirectionLosses
from ..epilogues import Epilogue, Sigmoid, Statistics, Sums
from ..maxsim.gpu import make_blocks
from ..maxsim.tokens import Tokens
from ..options import KEY_VECTORS, QUERY_VECTORS
from ..problem import Array, Gradients, NotFinite, Problem
from ..solve import BlockQuestion
from . import linear, recorded
from . import plan as gpu_plan
from .device.arguments import Fields, address, matrix, readable_by_kernels, sums_fields
from .device.launcher import Launcher, device_properties
from .device.launches import Queue
from .schedule import BlockPass, Call, tiled_schedule
from .vectors import ElementwiseVectors, TiledVectors


def run_block_pass(
    problem: Problem, triangle: bool, epilogue: Epilogue | BlockQuestion,
    gradients: Gradients | None, not_finite: NotFinite | None = None,
    to_clear: Sums | None = None, ahead: Gradients | None = None,
) -> None:  # fmt: skip
    """`solve.run_block_pass` on the current device.

    `not_finite` gets the NaN flags of the block, and `to_clear` are sums that are set to sums of
    nothing first. `ahead` are the gradients of a later pass of such blocks: this pass takes a
    workspace of the later pass's size, so that CuPy's memory pool keeps one workspace for both.

    Operations on arrays compute blocks with a guide or a teacher. Kernels compute all other blocks.
    A block has a plan if it has none of these: `progress`; a question (`BlockQuestion`) in place of
    an epilogue; linear terms (label smoothing, classes); options of pairs, except ids. Kernels of a
    block without a plan are launched step by step.
    """
    # blocks need no classes or own negatives, and a plan would depend on their arrays
    block = _without_row_terms(problem)
    if _on_arrays(block):
        blocks = _array_blocks(block, gradients)
        two_passes.run_block_pass(
            blocks, block, triangle, epilogue, gradients, not_finite, to_clear
        )
        return
    parts = block, triangle, epilogue, gradients, not_finite, to_clear, ahead
    may_have_plan = problem.progress is None and block.plain_logits
    may_have_plan = may_have_plan and not (problem.has_positive_ids or callable(epilogue))
    if may_have_plan and not getattr(epilogue, "linear", ()):
        gpu_plan.run_by_plan(recorded.block, *parts)
    else:
        recorded.block(*parts, Queue())


def require_room(problem: Problem, gradients: Gradients | None, ahead: Gradients | None) -> None:
    """ValueError if the workspace has no room for a block; for arguments see `run_block_pass`.

    `distributed.run.require_room` calls this before arrays are sent, so that all ranks raise.
    """
    if _on_arrays(problem):
        _array_blocks(problem, gradients)
        return
    block = BlockPass(None, accumulates=gradients is not None)
    properties = device_properties(problem.query.device.id)
    tiled_schedule(
        Call.from_problem(_without_row_terms(problem), gradients or ahead, block), properties
    )


def _without_row_terms(problem: Problem) -> Problem:
    """The problem of a block, in the form that kernels read, without what joins whole rows."""
    plain = problems.fast_replace(problem, classes=None, label_weights=None, **problems.NO_OWN)
    return readable_by_kernels(plain)


def _on_arrays(problem: Problem) -> bool:
    """Whether operations on arrays compute the blocks over ranks: those of a guide, of a teacher,
    and those of scores of tokens (`maxsim.gpu`)."""
    return problem.auxiliary_query is not None or isinstance(problem.query, Tokens)


def _array_blocks(problem: Problem, gradients: Gradients | None) -> ArrayBlocks:
    """The backend that computes blocks by operations on CuPy's arrays."""
    if isinstance(problem.query, Tokens):
        return make_blocks(problem, gradients)
    return ArrayBlocks(problem, gradients, ElementwiseVectors(), linear.GPURows.from_features)


def swap_arrays(blocks: int, arguments: Fields) -> None:
    """Launch the kernel of ranks/swap.cu on the current stream."""
    # the precision is arbitrary: the kernel is the same in all
    launcher = Launcher(cupy.cuda.Device(), "fp32", Queue())
    launcher.launch("ranks/swap.cu", "swap", blocks, 256, arguments)


class VectorsOverRanks(ElementwiseVectors):
    """`solve.Vectors` of one rank: each step is a plan (`recorded`), or operations on arrays."""

    def statistics(self, problem: Problem) -> tuple[Problem, Statistics]:
        if not self.has_plan(problem) or problem.retrieval_ranks:
            return super().statistics(problem)
        arrays = self.plan(recorded.begin, problem)
        upstream = arrays.get("upstream", problem.upstream)
        rows, column_sums = (
            Sums(*(arrays.get(f"{side}_{name}") for name in ("max", "sum", "moment")))
            for side in ("row", "column")
        )
        columns = rows if problem.symmetric else column_sums if problem.two_sided else None
        return replace(problem, upstream=upstream), Statistics(rows, columns, arrays["positive"])

    def finalize(
        self, problem: Problem, stats: Statistics, triangle: bool, gradient: bool, backend: Any
    ) -> Finalized:
        if not self.has_plan(problem):
            return super().finalize(problem, stats, triangle, gradient, backend)
        sums = Statistics(stats.rows, stats.columns, stats.positive_logits)
        # a row's partner may be on another rank, so the plan leaves partners out
        without_partners = problems.fast_replace(problem, symmetric=False)
        get = self.plan(recorded.finalize, without_partners, sums, backend.not_finite).get
        rows, columns = (
            DirectionLosses(
                get(f"{side}_loss"), get(f"{side}_lse"), None, get(f"{side}_reference"), 1.0
            )
            for side in ("row", "column")
        )
        positive_gradient = get("positive_gradient")
        if problem.symmetric and gradient:
            positive_gradient = positive_gradient + backend.take_at_positives(
                problem, positive_gradient
            )
        return Finalized(
            get("losses"), rows, columns if problem.two_sided else None, get("row_factor"),
            get("column_factor"), positive_gradient, get("log_scale_grad"),
        )  # fmt: skip

    def totals(
        self, problem: Problem, losses: Array, log_scale_grad: Array | None,
        dots: Array | None, bias_grad: Array | None,
    ) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
        """This rank's sum of losses, if losses are reduced, and gradients of scale and bias."""
        if not self.has_plan(problem):
            return super().totals(problem, losses, log_scale_grad, dots, bias_grad)
        unreduced = problems.fast_replace(problem, common_share=1.0)
        get = self.plan(recorded.totals, unreduced, losses, log_scale_grad, dots, bias_grad).get
        loss = None if problem.common_share is None else get("loss")
        return loss, get("scale_grad"), get("bias_grad")

    def has_plan(self, problem: Problem) -> bool:
        """Whether steps have plans: the shards are not empty, there is no `progress`, and no option
        but `ids` is set (`Problem.plain`). All other steps are operations on arrays."""
        return 0 not in problem.shape and problem.progress is None and problem.plain

    def plan(self, build: gpu_plan.Build, problem: Problem, *parts: Any) -> dict[str, Array]:
        """The arrays, by name, that the step `build` makes, by its plan."""
        return gpu_plan.run_by_plan(build, _bare(problem), *parts)


class QueuedVectors(VectorsOverRanks):
    """`VectorsOverRanks` whose steps go to one queue: the recorder of a plan of the whole call."""

    def __init__(self, problem: Problem, queue: Queue) -> None:
        super().__init__()
        self.queue = queue
        self.tiled = TiledVectors.without_passes(_bare(problem), queue)
        self.launcher = self.tiled.launcher

    def plan(self, build: gpu_plan.Build, problem: Problem, *parts: Any) -> dict[str, Array]:
        arrays = build(_bare(problem), *parts, self.queue)
        return {name: array for name, array in arrays.items() if array is not None}

    def zero_vector(self, n: int) -> Array:
        return self.tiled.zero_vector(n)

    def merge(self, sums: Sums, other: Sums) -> None:
        n = sums.max.size
        self.launcher.launch_vectors(
            "merge_sums", n, sums=sums_fields(sums), other=sums_fields(other), n=n
        )  # fmt: skip

    def sum_over_ranks(self, numbers: Array, divisors: Sequence[float], dtype: Any) -> Array:
        ranks, k = numbers.shape
        out = cupy.empty(k, dtype)
        for i, divisor in enumerate(divisors):
            self.launcher.launch_vectors(
                "sum_over_ranks", 1, numbers=address(numbers[0], i), ranks=ranks, stride=k,
                divisor=divisor, is_float=out.dtype == np.float32, out=address(out, i),
            )  # fmt: skip
        return out

    def shard_positives(self, start: int, m: int) -> Array:
        """[m] int64: the positive of row i of a shard is key start + i of the batch."""
        positives = cupy.empty(m, np.int64)
        self.launcher.launch_vectors("shard_positives", m, start=start, m=m, positives=positives)
        return positives

    def positives_in_block(self, positives: Array, keys: slice, total: int = 0) -> Array:
        n = len(positives)
        out = cupy.empty(n, np.int64)
        self.launcher.launch_vectors(
            "positives_in_block", n, positives=positives, n=n, start=keys.start, stop=keys.stop,
            total=total, out=out,
        )  # fmt: skip
        return out

    def add(self, sums: Array, other: Array) -> None:
        is_float = sums.dtype == np.float32
        self.launcher.launch_vectors(
            "add", sums.size, sums=sums, other=other, n=sums.size, is_float=is_float
        )

    def assign(self, to: Array, sums: Array | float, other: Array | None = None) -> None:
        """to = sums + other (None: nothing is added). If `sums` is a number, `to` gets zeros, and
        `other` is None."""
        if to.ndim == 1:
            assert isinstance(sums, cupy.ndarray)
            self.queue.copy(to.data, sums.data, to.nbytes)
            return
        n, d = to.shape
        array = None if isinstance(sums, float) else sums
        if array is None and to.flags.c_contiguous:
            self.queue.clear(to.data, to.nbytes)
            return
        self.launcher.launch_rows(
            "assign", n, d, file="finish.cu", sums=array, other=other, n=n, d=d, out=matrix(to)
        )

    def sigmoid(self, problem: Problem) -> tuple[Problem, Sigmoid]:
        return self.tiled.sigmoid(problem)

    def losses_with_nans(self, problem: Problem, sigmoid: Sigmoid, backend: Any) -> Array:
        not_finite = backend.not_finite
        return self.tiled.add_nans(sigmoid.losses, not_finite.rows, not_finite.any_key)


_NO_VECTORS = dict.fromkeys(QUERY_VECTORS + KEY_VECTORS)


def _bare(problem: Problem) -> Problem:
    """The problem without fields that steps on vectors do not read, so that plans are shared."""
    return problems.fast_replace(problem, normalize=False, known_row_nans=None, **_NO_VECTORS)
