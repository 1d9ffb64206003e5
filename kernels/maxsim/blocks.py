"""Passes over blocks whose logits are MaxSim scores: what NumPy's and CuPy's arrays share.

The scores and winners of all blocks stay from the log-sum-exp pass to the gradient pass if they fit
the workspace; otherwise they are computed again. cpu.py and gpu.py have the products of tokens, the
maxima, and the gradients of tokens from winners.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.array_pass import ArrayPass
from ..arrays.backend import BLOCK_ARRAYS, ArrayBlocks
from ..arrays.naive import PairMatrix
from ..epilogues import SoftmaxGradient
from ..grid import has_few_blocks, make_workspace_error
from ..linear import Segments, SegmentSums, segment_sums_from_products
from ..norms import Norms
from ..problem import Array, Gradients, Problem, as_sets
from ..solve import Vectors
from .tokens import TokenRows, Tokens

NORMALIZED_BYTES = 24  # of a feature, while `normalized_rows` divides it in float64
LEAST_COLUMNS = 16  # of a block with all queries
MOST_WINNER = 2**16 - 1  # of uint16


class TokenPass(ArrayPass):
    """`ArrayPass` whose logits are MaxSim scores, and whose gradients are those of tokens."""

    backend: TokenBlocks

    def _block(self, rows: slice, columns: slice, query: Any, key: Any) -> Array | None:
        self.place, self.sides = (rows.start, columns.start), (query, key)
        return super()._block(rows, columns, query, key)

    def dot_products(self, query: Any, key: Any, out: Array | None = None) -> Array:
        if not isinstance(query, TokenRows):  # of a guide
            return super().dot_products(query, key, out)
        assert out is not None
        wants_winners = self.gradients is not None
        scores, self.winners = self.backend.kept_scores(query, key, self.place, wants_winners)
        out[...] = scores
        return out

    def query_product(self, g: Array, key: TokenRows) -> Array:
        return self.backend.query_gradient(g, *self.sides, self.winners)

    def key_product(self, g: Array, query: TokenRows) -> Array:
        return self.backend.key_gradient(g, *self.sides, self.winners)

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
        self.first_key, self.key_starts = keys.start, self.backend.starts(self.problem.key[keys])
        shape = int(self.key_starts[-1]), self.problem.shape[2]
        self.key_sums = self.xp.zeros(shape, self.dtype)

    def _sums_of_keys(self, columns: slice) -> Array:
        first, last = columns.start - self.first_key, columns.stop - self.first_key
        return self.key_sums[self.key_starts[first] : self.key_starts[last]]

    def _store(
        self, g: Array, z: TokenRows, norms: Norms, rows: slice, is_key_side: bool, out: Array
    ) -> None:
        if out is None:
            return
        assert self.gradients is not None
        add = self.gradients.add_query and not is_key_side
        self.backend.store(g, z, norms, out[rows], add)


class TokenBlocks(ArrayBlocks):
    """Blocks of a problem whose features are `Tokens`."""

    pass_class = TokenPass
    tile_bytes: int  # of the products of tokens that exist at one time
    most_side: int  # the largest side of a block, in scores
    most_rows: int  # the largest number of queries of the only row block
    keeps_scores: bool

    def __init__(self, problem: Problem, gradients: Gradients | None, vectors: Vectors) -> None:
        small = problem.key.length <= MOST_WINNER + 1
        self.winner_dtype = np.dtype(np.uint16 if small else np.int32)
        self.kept: dict[tuple[int, int], tuple[Array, Array]] = {}  # by the place of a block
        super().__init__(problem, gradients, vectors, None)  # type: ignore[arg-type]

    # -- what cpu.py and gpu.py implement

    def starts(self, tokens: Tokens) -> Array:
        """[M + 1] on the host: the first of each row's tokens in gradients of tokens."""
        raise NotImplementedError

    def score(
        self, query: TokenRows, key: TokenRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        """The scores [m, n] of a block; and its winners [n, query tokens], the numbers of the key
        tokens with the largest products, if they are wanted."""
        raise NotImplementedError

    def query_gradient(self, g: Array, query: TokenRows, key: TokenRows, winners: Array) -> Array:
        """What a block with g = scale dL/ds [m, n] adds to the gradient of the query tokens."""
        raise NotImplementedError

    def key_gradient(self, g: Array, query: TokenRows, key: TokenRows, winners: Array) -> Array:
        """What a block with g = scale dL/ds [m, n] adds to the gradient of the key tokens."""
        raise NotImplementedError

    def store(self, g: Array, z: TokenRows, norms: Norms, out: Array, add: bool) -> None:
        """Differentiate the complete gradient `g` of unit tokens through their norms, and write it
        to `out` [m, L, D], 0 at tokens that do not count; or add it."""
        raise NotImplementedError

    # -- memory

    def token_bytes(self, problem: Problem, side: Tokens) -> int:
        """Bytes of a token of a block: its copy as an operand, if there is one, and its gradient."""
        copies = self.dtype.itemsize if side.mask is not None else 0
        if problem.normalize:
            copies += NORMALIZED_BYTES
        elif side.dtype != self.dtype:
            copies += self.dtype.itemsize
        return side.shape[1] * (copies + 2 * self.dtype.itemsize)

    def best_bytes(self, problem: Problem) -> int:
        """Bytes of the maxima of a pair of rows, before they are added up to a score."""
        return problem.query.length * self.dtype.itemsize

    def _pair_bytes(self, problem: Problem) -> int:
        """Bytes of the score and the winners of a pair."""
        return self.dtype.itemsize + problem.query.length * self.winner_dtype.itemsize

    def _key_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        """See `ArrayBlocks`. Also sets `block`, and decides whether scores are kept."""
        self.block, key_rows = self._divide(problem, gradients)
        return key_rows

    def _block(self, problem: Problem) -> tuple[int, int]:
        return self.block

    def _divide(self, problem: Problem, gradients: Gradients | None) -> tuple[tuple[int, int], int]:
        """(rows, columns) of a block, and the keys whose gradients a pass accumulates (0: none).

        One row block with all queries is best: then a block completes the gradients of its keys. If
        their tokens do not fit, gradients of keys accumulate in half of the workspace.
        """
        (m, n, d), item = problem.shape, self.dtype.itemsize
        query_bytes = problem.query.length * self.token_bytes(problem, problem.query)
        key_bytes = problem.key.length * self.token_bytes(problem, problem.key)
        pair = item * BLOCK_ARRAYS + self._pair_bytes(problem) + self.best_bytes(problem)
        wants_features = gradients is not None and (gradients.want_query or gradients.want_key)
        is_softmax = problem.bias is None  # a sigmoid has one pass
        kept = m * n * self._pair_bytes(problem)
        self.keeps_scores = wants_features and is_softmax and kept <= problem.workspace // 2
        room = problem.workspace - kept * self.keeps_scores

        def size(rows: int, columns: int) -> int:
            tokens = rows * query_bytes + columns * key_bytes
            return self.tile_bytes + tokens + rows * columns * pair

        columns = min(n, self.most_side)
        while columns > LEAST_COLUMNS and size(m, columns) > room:
            columns //= 2
        if m <= self.most_rows and size(m, columns) <= room:
            return (m, columns), 0
        key_rows = 0
        if gradients is not None and gradients.want_key:
            of_key = problem.key.length * d * item
            key_rows = n if problem.compares_with_limits else min(n, max(1, room // 2 // of_key))
            room -= key_rows * of_key
        side = min(self.most_side, max(m, n))
        while size(min(m, side), min(n, side)) > room:
            smaller = max(1, side // 2)
            if smaller == side or not has_few_blocks(m, n, min(m, smaller), min(n, smaller)):
                least = size(min(m, side), min(n, side)) + problem.workspace - room
                raise make_workspace_error(problem.shape, least, problem.workspace)
            side = smaller
        return (min(m, side), min(n, side)), key_rows

    # -- scores

    def kept_scores(
        self, query: TokenRows, key: TokenRows, place: tuple[int, int], wants_winners: bool
    ) -> tuple[Array, Any]:
        """`score` of the block at `place` (its first row and key), once if scores are kept."""
        if place in self.kept:
            return self.kept[place]
        result = self.score(query, key, wants_winners or self.keeps_scores)
        if self.keeps_scores:
            self.kept[place] = result
        return result

    def block_scores(self, problem: Problem, rows: slice, columns: slice) -> Array:
        """The scores [m, n] of a block."""
        query, _ = self.unit_rows(problem, problem.query[rows])
        key, _ = self.unit_rows(problem, problem.key[columns])
        return self.kept_scores(query, key, (rows.start, columns.start), False)[0]

    def positive_dots(self, problem: Problem) -> Array:
        if not isinstance(problem.query, Tokens):  # of a guide
            return super().positive_dots(problem)
        xp, positives, grid = self.xp, as_sets(problem.positives), self.grid(problem, False)
        out = xp.full(positives.shape, xp.nan)
        for rows in grid.rows:
            for columns in grid.columns:
                scores = self.block_scores(problem, rows, columns)
                at = positives[rows] - columns.start
                inside = (at >= 0) & (at < scores.shape[1])
                found = xp.take_along_axis(scores, xp.where(inside, at, 0), axis=1)
                out[rows] = xp.where(inside, found, out[rows])
        return out.reshape(problem.positives.shape)

    def segment_sums(
        self, problem: Problem, segments: Segments, columns: bool
    ) -> tuple[SegmentSums, SegmentSums | None]:
        xp, segments = self.xp, segments.numbered(self.xp)
        (m, n, _), grid = problem.shape, self.grid(problem, False)
        row_sums, column_sums = xp.zeros(m), xp.zeros(n)
        for rows in grid.rows:
            for keys in grid.columns:
                scores = self.block_scores(problem, rows, keys).astype(np.float64)
                scores *= pairs_of_block(segments, rows, keys)
                row_sums[rows] += scores.sum(axis=1)
                column_sums[keys] += scores.sum(axis=0)
        return segment_sums_from_products(
            xp, problem, segments, row_sums, column_sums if columns else None
        )


def pairs_of_block(segments: Segments, rows: slice, columns: slice) -> Array:
    """[m, n] bool: whether row and key of a block are in the same segment."""
    pairs: Array = segments.rows[rows, None] == segments.columns[columns]
    return pairs


def find_scores(blocks: TokenBlocks, problem: Problem) -> Array:
    """The scores [M, N] of all pairs."""
    m, n, _ = problem.shape
    scores, grid = blocks.xp.empty((m, n), blocks.dtype), blocks.grid(problem, False)
    for rows in grid.rows:
        for columns in grid.columns:
            scores[rows, columns] = blocks.block_scores(problem, rows, columns)
    return scores
