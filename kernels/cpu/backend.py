"""The CPU backend: products of tiles by BLAS, in its own threads, and loops between them.

A pass visits the tiles one after another, so sums and gradients have one order: results are bitwise
the same from run to run for a given number of threads of BLAS.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..arrays.naive import matrix_bytes, solve_whole_matrix
from ..distill.solve import solver_by_passes
from ..epilogues import Epilogue, SoftmaxGradient
from ..grid import Grid, positive_blocks, slices, without_other_groups
from ..linear import Segments, SegmentSums, segment_sums
from ..problem import Array, Gradients, Problem
from ..solve import Solution, allows_online_softmax
from .call_state import CallState
from .one_block import solve_in_one_block
from .operands import DTYPES, Side, dots_at, find_norms, not_finite
from .resources import require_memory
from .schedule import choose_method, decide, divide_into_tiles
from .tiled_pass import VECTORS, TiledPass


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of `problem`: from the full matrix of logits, in one block, or in many."""
    return METHODS[choose_method(problem)](problem, gradients)


def _by_whole_matrix(problem: Problem, gradients: Gradients | None) -> Solution:
    require_memory(problem, matrix_bytes(problem))
    return solve_whole_matrix(problem, gradients, CPU.vectors)


def _in_one_block(problem: Problem, gradients: Gradients | None) -> Solution:
    """Solve in one block. Calls that its compiled code has no case for go by passes: values that
    are not finite, and rows without a positive."""
    solution = solve_in_one_block(problem, gradients)
    return _by_passes(problem, gradients) if solution is None else solution


def _by_passes(problem: Problem, gradients: Gradients | None) -> Solution:
    return solver_by_passes(problem)(problem, CPU(problem, gradients), gradients)


METHODS = {"naive": _by_whole_matrix, "one block": _in_one_block, "tiled": _by_passes}


class CPU:
    """Blocks of one problem on the CPU: see `infonce.kernels.solve.Backend`."""

    vectors = VECTORS
    pass_class: type[TiledPass] = TiledPass

    def __init__(
        self, problem: Problem, gradients: Gradients | None = None, ahead: Gradients | None = None,
        further_tiles: int = 0,
    ) -> None:  # fmt: skip
        """`ahead`, `further_tiles`: see `schedule.decide`."""
        self.dtype = DTYPES[problem.compute_precision]
        self.schedule = decide(problem, gradients, ahead, further_tiles)
        if problem.method == "naive":
            needed = self.schedule.memory.bytes(*self.schedule.tile)
            require_memory(problem, needed)
        sides = self._make_sides(problem, problem.query, problem.key)
        self.call_state = CallState(self.dtype, *sides, self.schedule)
        if problem.auxiliary_query is not None:
            self.call_state.auxiliary_query, self.call_state.auxiliary_key = self._make_sides(
                problem, problem.auxiliary_query, problem.auxiliary_key
            )

    def _make_sides(self, problem: Problem, query: Array, key: Array) -> tuple[Side, Side]:
        query_side = self.make_side(problem, query)
        return query_side, query_side if problem.symmetric else self.make_side(problem, key)

    def make_side(self, problem: Problem, features: Array) -> Side:
        norms = find_norms(features, self.dtype) if problem.normalize else None
        return Side(features, self.dtype, norms)

    def row_nans(self, problem: Problem) -> Array:
        """[M] NaN for a query that is not finite, and for all rows if a key is not finite; else 0.

        Passes do not show all features that are not finite: a pass takes a logit of -inf for an
        excluded pair, and ignores NaN when it looks for the largest logit.
        """
        not_finite_rows = not_finite(problem.query)
        if problem.key is not problem.query:
            not_finite_rows |= not_finite(problem.key).any()
        elif not_finite_rows.any():
            not_finite_rows[:] = True
        call_state = self.call_state
        if call_state.auxiliary_query is not None and call_state.auxiliary_key is not None:
            auxiliary_rows = not_finite(call_state.auxiliary_query.features)
            # if queries are in the softmaxes of columns, one such query affects all rows
            affects_all = (problem.symmetric or problem.two_sided) and auxiliary_rows.any()
            affects_all |= not_finite(call_state.auxiliary_key.features).any()
            not_finite_rows |= auxiliary_rows | affects_all
        return np.where(not_finite_rows, np.nan, 0.0)

    def take_at_positives(self, problem: Problem, per_key: Array) -> Array:
        return per_key[problem.positives]

    def positive_dots(self, problem: Problem) -> Array:
        call_state = self.call_state
        query, key = call_state.query, call_state.key
        # the problem may be `targets.guide_problem`, whose features are the guide's
        if (
            call_state.auxiliary_query is not None
            and problem.query is call_state.auxiliary_query.features
        ):
            query, key = call_state.auxiliary_query, call_state.auxiliary_key or key
        return dots_at(query, key, problem.positives)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        """See `infonce.kernels.linear.Summing`."""
        return segment_sums(
            np, problem, self.call_state.query, self.call_state.key, segments, columns
        )

    def has_online_softmax(self, problem: Problem, gradients: Gradients) -> bool:
        return problem.plain and allows_online_softmax(problem, gradients)

    def grid(self, problem: Problem, triangle: bool) -> Grid:
        return divide_into_tiles(problem, self.schedule.tile, triangle)

    def key_ranges(self, problem: Problem) -> list[slice]:
        n = problem.shape[1]
        return slices(n, self.schedule.dk_accumulator_rows or n)

    # -- the pass

    def run_pass(
        self, problem: Problem, grid: Grid, epilogue: Epilogue, gradients: Gradients | None
    ) -> None:
        if problem.query_groups is not None:
            groups = problem.query_groups, problem.key_groups
            has_positive, ids = positive_blocks(grid, problem.positives), None
            if problem.has_positive_ids:
                ids = problem.query_positive_ids, problem.key_positive_ids
            grid = without_other_groups(grid, groups, has_positive, ids)
        done, total = itertools.count(), len(grid)

        def report() -> None:
            if problem.progress is not None:
                problem.progress(epilogue.phase, next(done), total)

        report()
        self.pass_class(self.call_state, problem, grid, epilogue, gradients).run(report)
        if isinstance(epilogue, SoftmaxGradient):
            self.call_state.release()
