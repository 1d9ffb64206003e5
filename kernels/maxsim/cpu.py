"""MaxSim on the CPU: passes over blocks whose logits are maxima of products of tokens.

BLAS multiplies the tokens of a block; compiled loops take the maxima, with their winners where
gradients are wanted, and add gradients from winners. The scores and winners of all blocks stay from
the log-sum-exp pass to the gradient pass if they fit the workspace; otherwise they are computed
again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array_pass import ArrayPass
from ..arrays.backend import BLOCK_ARRAYS, ArrayBlocks
from ..arrays.naive import PairMatrix
from ..cpu.resources import BLAS, run_loop
from ..epilogues import SoftmaxGradient
from ..grid import has_few_blocks, make_workspace_error, slices
from ..linear import Segments, SegmentSums, segment_sums_from_products
from ..norms import Norms, normalization_backward, normalized_rows
from ..problem import Array, Gradients, Problem, as_sets
from ..solve import Solution, Vectors, solve_by_passes
from . import loops
from .tokens import TokenRows, Tokens

TILE_BYTES = 2**20  # of a tile of products of tokens
TILE_COLUMNS = 1024  # key tokens of a tile, unless one key has more
MOST_TILE_ROWS = 1024  # query tokens of a tile
MOST_SIDE = 1024  # the largest side of a block, in scores
# The largest number of arrays with the tokens of a block's rows or keys that are alive at once
TOKEN_ARRAYS = 6


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose features are `Tokens` in host memory."""
    return solve_by_passes(problem, TokenBlocks(problem, gradients), gradients)


def scores(query: Tokens, key: Tokens, normalize: bool, precision: str, out: Array) -> None:
    """Write the scores s [M, N] of all pairs to `out`."""
    problem = Problem(query, key, 1.0, 1.0, normalize=normalize, compute_precision=precision)
    blocks = TokenBlocks(problem, None)
    grid = blocks.grid(problem, False)
    for rows in grid.rows:
        for columns in grid.columns:
            out[rows, columns] = blocks.block_scores(problem, rows, columns)


class TokenPass(ArrayPass):
    """`ArrayPass` whose logits are MaxSim scores. Gradients of a block are those of its packed
    tokens."""

    backend: TokenBlocks

    def _block(self, rows: slice, columns: slice, query: Any, key: Any) -> Array | None:
        self.place, self.sides = (rows.start, columns.start), (query, key)
        return super()._block(rows, columns, query, key)

    def dot_products(self, query: Any, key: Any, out: Array | None = None) -> Array:
        if not isinstance(query, TokenRows):  # of a guide
            return super().dot_products(query, key, out)
        assert out is not None
        wants_gradients = self.gradients is not None
        scores, self.winners = self.backend.score(query, key, self.place, wants_gradients)
        out[...] = scores
        return out

    def query_product(self, g: Array, key: TokenRows) -> Array:
        query, _ = self.sides
        return self._from_winners(loops.query_gradient, g, query, key)

    def key_product(self, g: Array, query: TokenRows) -> Array:
        _, key = self.sides
        return self._from_winners(loops.key_gradient, g, key, query)

    def _from_winners(self, loop: Any, g: Array, side: TokenRows, other: TokenRows) -> Array:
        """What a block with g = scale dL/ds adds to the gradient of the tokens of `side`."""
        query, key = self.sides
        out = np.empty_like(side.values)
        arguments = g, query.weights, query.token_rows, self.winners, other.values, key.starts
        run_loop(loop, out, *arguments)
        return out

    def _gradient(self, epilogue: SoftmaxGradient, x: PairMatrix, index: Array, rows: slice,
                  columns: slice, left_out: Any) -> Array:  # fmt: skip
        g = super()._gradient(epilogue, x, index, rows, columns, left_out)
        for term in epilogue.linear:  # no sum of features has them: a score is not linear
            factor = term.row_factor[rows, None]
            if term.column_factor is not None:
                factor = factor + term.column_factor[columns]
            g -= (pairs_of_block(term.segments, rows, columns) * factor).astype(g.dtype)
        return g

    def _begin_linear(self, epilogue: SoftmaxGradient) -> None:
        """`_gradient` has the linear terms."""

    def _begin_key_sums(self, keys: slice, out: Array | None) -> None:
        counts = self.problem.key[keys].counts
        self.first_key, self.key_starts = keys.start, np.concatenate([[0], np.cumsum(counts)])
        self.key_sums = np.zeros((self.key_starts[-1], self.problem.shape[2]), self.dtype)

    def _sums_of_keys(self, columns: slice) -> Array:
        first, last = columns.start - self.first_key, columns.stop - self.first_key
        return self.key_sums[self.key_starts[first] : self.key_starts[last]]

    def _store(
        self, g: Array, z: TokenRows, norms: Norms, rows: slice, is_key_side: bool, out: Array
    ) -> None:
        if out is None:
            return
        g = normalization_backward(np, g, z.values, norms)
        assert self.gradients is not None
        if self.gradients.add_query and not is_key_side:
            packed = z.tokens.with_values(out[rows]).pack()
            g = packed + g
        z.tokens.unpack(g, out[rows])


class TokenBlocks(ArrayBlocks):
    """Blocks of a problem whose features are `Tokens` in host memory."""

    pass_class = TokenPass

    def __init__(self, problem: Problem, gradients: Gradients | None) -> None:
        self.winner_dtype = np.dtype(np.uint16 if problem.key.length <= 2**16 else np.int32)
        self.kept: dict[tuple[int, int], tuple[Array, Array]] = {}  # first row, first key -> score
        super().__init__(problem, gradients, Vectors(np), None)  # type: ignore[arg-type]
        m, n, _ = problem.shape
        kept_bytes = m * n * self._pair_bytes(problem)
        wants_features = gradients is not None and (gradients.want_query or gradients.want_key)
        is_softmax = problem.bias is None  # a sigmoid has one pass
        self.keeps_winners = wants_features and is_softmax and kept_bytes <= self.spare_bytes

    def _pair_bytes(self, problem: Problem) -> int:
        """Bytes of the score and the winners of a pair."""
        return self.dtype.itemsize + problem.query.length * self.winner_dtype.itemsize

    def _key_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        if gradients is None or gradients.key is None:
            return 0
        n, key_bytes = len(problem.key), problem.key.length * problem.shape[2] * self.dtype.itemsize
        if problem.compares_with_limits:
            return n
        return min(n, max(1, problem.workspace // 2 // key_bytes))

    def _block(self, problem: Problem) -> tuple[int, int]:
        (m, n, d), item = problem.shape, self.dtype.itemsize
        query_length, key_length = problem.query.length, problem.key.length
        sums = self.key_rows * key_length * d * item
        width = item * (BLOCK_ARRAYS + query_length) + self._pair_bytes(problem)

        def size(side: int) -> int:
            rows, columns = min(m, side), min(n, side)
            tokens = rows * query_length + columns * key_length
            return width * rows * columns + TOKEN_ARRAYS * tokens * d * item + 2 * TILE_BYTES

        side = min(MOST_SIDE, max(m, n))
        while size(side) + sums > problem.workspace:
            smaller = max(1, side // 2)
            if smaller == side or not has_few_blocks(m, n, min(m, smaller), min(n, smaller)):
                raise make_workspace_error(problem.shape, size(side) + sums, problem.workspace)
            side = smaller
        self.spare_bytes = problem.workspace - size(side) - sums
        return min(m, side), min(n, side)

    def unit_rows(self, problem: Problem, features: Any) -> tuple[Any, Norms]:
        if not isinstance(features, Tokens):
            return super().unit_rows(problem, features)
        values, norms = normalized_rows(np, features.pack(), problem.normalize, self.dtype)
        return TokenRows(features, values), norms

    def _finite(self, features: Any) -> Array:
        if not isinstance(features, Tokens):
            return super()._finite(features)
        out = np.empty(len(features), bool)
        for rows in slices(len(features), min(self.block)):
            tokens = features[rows]
            finite = np.isfinite(tokens.pack().astype(self.dtype, copy=False)).all(axis=1)
            out[rows] = np.bincount(tokens.token_rows[~finite], minlength=len(tokens)) == 0
        return out

    # -- scores

    def score(
        self, query: TokenRows, key: TokenRows, place: tuple[int, int], wants_winners: bool
    ) -> tuple[Array, Array]:
        """The scores [m, n] of a block and its winners [n, query tokens], or no winners."""
        if place in self.kept:
            return self.kept[place]
        wants_winners |= self.keeps_winners
        t, n = len(query.values), len(key)
        best = np.empty((n, t), self.dtype)
        winners = np.empty((n if wants_winners else 0, t), self.winner_dtype)
        for keys in self._key_tiles(key):
            starts = key.starts[keys.start : keys.stop + 1]
            tokens = key.values[starts[0] : starts[-1]]
            rows = max(1, min(MOST_TILE_ROWS, TILE_BYTES // (len(tokens) * self.dtype.itemsize)))
            for part in slices(t, rows):
                products = BLAS.matmul(query.values[part], tokens.T)
                place_of_tile = keys.start, part.start
                run_loop(
                    loops.take_maxima, products, starts - starts[0], best, winners, *place_of_tile
                )
        scores = np.empty((len(query), n), self.dtype)
        loops.add_tokens(best, query.starts, query.weights, scores)
        if self.keeps_winners:
            self.kept[place] = scores, winners
        return scores, winners

    def _key_tiles(self, key: TokenRows) -> list[slice]:
        """Ranges of keys whose tokens are the columns of a tile of products."""
        most = max(1, TILE_COLUMNS // max(1, key.tokens.length))
        return slices(len(key), most)

    def block_scores(self, problem: Problem, rows: slice, columns: slice) -> Array:
        """The scores [m, n] of a block."""
        query, _ = self.unit_rows(problem, problem.query[rows])
        key, _ = self.unit_rows(problem, problem.key[columns])
        return self.score(query, key, (rows.start, columns.start), False)[0]

    def positive_dots(self, problem: Problem) -> Array:
        if not isinstance(problem.query, Tokens):  # of a guide
            return super().positive_dots(problem)
        positives = as_sets(problem.positives)
        out = np.full(positives.shape, np.nan)
        grid = self.grid(problem, False)
        for rows in grid.rows:
            for columns in grid.columns:
                at = positives[rows]
                inside = (at >= columns.start) & (at < columns.stop)
                if inside.any():
                    row, number = np.nonzero(inside)
                    scores = self.block_scores(problem, rows, columns)
                    out[rows][row, number] = scores[row, at[inside] - columns.start]
        return out.reshape(problem.positives.shape)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        segments = segments.numbered(np)
        (m, n, _), grid = problem.shape, self.grid(problem, False)
        row_sums, column_sums = np.zeros(m), np.zeros(n)
        for rows in grid.rows:
            for keys in grid.columns:
                scores = self.block_scores(problem, rows, keys).astype(np.float64)
                scores *= pairs_of_block(segments, rows, keys)
                row_sums[rows] += scores.sum(axis=1)
                column_sums[keys] += scores.sum(axis=0)
        return segment_sums_from_products(
            np, problem, segments, row_sums, column_sums if columns else None
        )


def pairs_of_block(segments: Segments, rows: slice, columns: slice) -> Array:
    """[m, n] bool: whether row and key of a block are in the same segment."""
    return np.equal(segments.rows[rows, None], segments.columns[columns])
