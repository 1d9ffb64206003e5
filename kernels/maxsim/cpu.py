"""MaxSim on the CPU: BLAS multiplies the tokens of a block, and compiled loops take the maxima."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cpu.resources import BLAS, run_loop
from ..grid import slices
from ..norms import Norms, normalization_backward, normalized_rows
from ..problem import Array, Gradients, Problem
from ..solve import Solution, Vectors, solve_by_passes
from . import loops, sizes
from .blocks import TokenBlocks, find_scores
from .division import Sizes
from .tokens import TokenRows, Tokens

TILE_COLUMNS = 1024  # key tokens of a tile of products, unless one key has more
MOST_TILE_ROWS = 1024  # query tokens of a tile


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose features are `Tokens` in host memory."""
    return solve_by_passes(problem, make_blocks(problem, gradients), gradients)


def scores(problem: Problem) -> Array:
    """The scores [M, N] of all pairs of such a problem."""
    return find_scores(make_blocks(problem, None), problem)


def make_blocks(problem: Problem, gradients: Gradients | None) -> TokenBlocks:
    """The backend of the problem."""
    return CPUTokenBlocks(problem, gradients, Vectors(np))


class PackedRows(TokenRows):
    """The unit tokens that count, row after row: `values` [T, D]."""

    def __init__(self, tokens: Tokens, values: Array, norms: Norms = None) -> None:
        super().__init__(tokens, values)
        self.norms = norms
        counts = tokens.counts
        self.token_rows = np.repeat(np.arange(len(tokens)), counts)  # [T] the row of each token
        self.starts = np.concatenate([[0], np.cumsum(counts)])  # [m + 1] of rows in `values`
        divisors = np.maximum(counts, 1) if tokens.takes_mean else np.ones(len(counts))
        self.weights = (1.0 / divisors).astype(values.dtype)  # [m], factors of scores


class CPUTokenBlocks(TokenBlocks):
    """Blocks of a problem whose features are `Tokens` in host memory."""

    def find_sizes(self) -> Sizes:
        return sizes.cpu_sizes(self.call)

    def starts(self, tokens: Tokens) -> Array:
        return np.concatenate([[0], np.cumsum(tokens.counts)])

    def stage(self, problem: Problem, tokens: Tokens, is_query: bool = False) -> PackedRows:
        values, norms = normalized_rows(np, tokens.pack(), problem.normalize, self.dtype)
        return PackedRows(tokens, values, norms)

    def _finite(self, features: Any) -> Array:
        if not isinstance(features, Tokens):
            return super()._finite(features)
        out = np.empty(len(features), bool)
        for rows in slices(len(features), min(self.block)):
            part = PackedRows(features[rows], features[rows].pack())
            bad = part.token_rows[~np.isfinite(part.values).all(axis=1)]  # before their norms
            out[rows] = np.bincount(bad, minlength=len(part)) == 0
        return out

    def score(  # type: ignore[override]
        self, query: PackedRows, key: PackedRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        t, n = len(query.values), len(key)
        best = np.empty((n, t), self.dtype)
        winners = np.empty((n if wants_winners else 0, t), self.winner_dtype)
        for keys in slices(n, max(1, TILE_COLUMNS // key.tokens.length)):
            starts = key.starts[keys.start : keys.stop + 1]
            tokens = key.values[starts[0] : starts[-1]]
            rows = max(
                1, min(MOST_TILE_ROWS, sizes.CPU_TILE_BYTES // (len(tokens) * self.dtype.itemsize))
            )
            for part in slices(t, rows):
                products = BLAS.matmul(tokens, query.values[part].T)
                place = keys.start, part.start
                run_loop(loops.take_maxima, products, starts - starts[0], best, winners, *place)
        scores = np.empty((len(query), n), self.dtype)
        loops.add_tokens(best, query.starts, query.weights, scores)
        return scores, winners

    def query_gradient(  # type: ignore[override]
        self, g: Array, query: PackedRows, key: PackedRows, winners: Array, sums: Array | None
    ) -> Array:
        out = self._from_winners(loops.query_gradient, g, query, key, winners, query, key)
        if sums is None:
            return out
        sums += out
        return sums

    def key_gradient(  # type: ignore[override]
        self, g: Array, query: PackedRows, key: PackedRows, winners: Array
    ) -> Array:
        return self._from_winners(loops.key_gradient, g, query, key, winners, key, query)

    def _from_winners(
        self, loop: Any, g: Array, query: PackedRows, key: PackedRows, winners: Array,
        side: PackedRows, other: PackedRows,
    ) -> Array:  # fmt: skip
        """The gradient of the tokens of `side`, from the tokens of `other`, by a compiled loop."""
        out = np.empty_like(side.values)
        weighted = (g * query.weights[:, None]).astype(self.dtype, copy=False)
        arguments = weighted, query.token_rows, winners, other.values, key.starts
        run_loop(loop, out, *arguments)
        return out

    def store(self, g: Array, z: PackedRows, out: Array, add: bool) -> None:  # type: ignore[override]
        g = normalization_backward(np, g, z.values, z.norms)
        if add:
            g = Tokens(out, z.tokens.mask).pack() + g
        z.tokens.unpack(g, out)
