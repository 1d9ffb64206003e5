"""Passes over blocks whose logits are MaxSim scores: what NumPy's and CuPy's arrays share.

Scores, and winners, stay from the log-sum-exp pass to the gradient pass if they fit the workspace;
otherwise they are computed again. cpu.py and gpu.py have the products of tokens, the
maxima, and the gradients of tokens from winners.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.array_pass import ArrayPass
from ..arrays.backend import ArrayBlocks
from ..arrays.naive import PairMatrix
from ..epilogues import SoftmaxGradient
from ..grid import slices
from ..linear import Segments, SegmentSums, segment_sums_from_products
from ..norms import Norms
from ..problem import Array, Gradients, Problem, as_sets
from ..solve import Vectors
from .division import Sizes, part_room
from .sizes import TokenCall, TokenSide
from .tokens import TokenRows, Tokens


class TokenPass(ArrayPass):
    """`ArrayPass` whose logits are MaxSim scores, and whose gradients are those of tokens."""

    backend: TokenBlocks

    def _block(self, rows: slice, columns: slice, query: Any, key: Any) -> Array | None:
        self.place = rows.start, columns.start
        return super()._block(rows, columns, query, key)

    def dot_products(self, query: Any, key: Any, out: Array | None = None) -> Array:
        if not isinstance(query, Tokens):  # of a guide
            return super().dot_products(query, key, out)
        assert out is not None
        wants_winners = self.want_key or (self.gradients is not None and self.gradients.want_query)
        self.backend.write_scores(self.problem, query, key, self.place, out, wants_winners)
        return out

    def _add_gradients(
        self, g: Array, query: Any, key: Any, key_norms: Norms, columns: slice, sums: Array | None
    ) -> Array | None:
        gradients, backend = self.gradients, self.backend
        if gradients is None:
            return None

        def put_key(keys: slice, product: Array, part: TokenRows) -> None:
            of_piece = slice(columns.start + keys.start, columns.start + keys.stop)
            if self.key_sums is not None:
                sums_of_keys = self._sums_of_keys(of_piece)
                sums_of_keys += product
            elif gradients.key is not None:
                backend.store(product, part, gradients.key[of_piece], False)

        return backend.add_gradients(
            self.problem, g, query, key, self.place, sums, gradients.want_query,
            put_key if self.want_key else None,
        )  # fmt: skip

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
        self, g: Array, z: Tokens, norms: Norms, rows: slice, is_key_side: bool, out: Array
    ) -> None:
        if out is None:
            return
        assert self.gradients is not None
        backend, out = self.backend, out[rows]
        if not is_key_side:
            backend.store(g, backend.stage_query(self.problem, z), out, self.gradients.add_query)
            return
        starts = backend.starts(z)
        for keys in slices(len(z), backend.division.piece):
            part = backend.stage(self.problem, z[keys])
            backend.store(g[starts[keys.start] : starts[keys.stop]], part, out[keys], False)


class TokenBlocks(ArrayBlocks):
    """Blocks of a problem whose features are `Tokens`."""

    pass_class = TokenPass

    def __init__(self, problem: Problem, gradients: Gradients | None, vectors: Vectors) -> None:
        self.call = describe(problem, gradients)
        self.winner_dtype = np.dtype(np.uint16 if self.call.winner_bytes == 2 else np.int32)
        # by the place of a block: scores; and by the place and the first key of a piece: winners
        self.kept_scores: dict[tuple[int, int], Array] = {}
        self.kept_winners: dict[tuple[tuple[int, int], int], Array] = {}
        # the queries of a row block, and the keys of a block of one piece
        self.staged: dict[str, tuple[Tokens, TokenRows]] = {}
        super().__init__(problem, gradients, vectors, None)  # type: ignore[arg-type]

    # -- what cpu.py and gpu.py implement

    def stage(self, problem: Problem, tokens: Tokens, is_query: bool = False) -> TokenRows:
        """Tokens as operands of products, normalised if the loss normalises."""
        raise NotImplementedError

    def starts(self, tokens: Tokens) -> Array:
        """[M + 1] on the host: the first of each row's tokens in gradients of tokens."""
        raise NotImplementedError

    def score(
        self, query: TokenRows, key: TokenRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        """The scores [m, n] of a piece; and its winners [n, query tokens], the numbers of the key
        tokens with the largest products, if they are wanted."""
        raise NotImplementedError

    def query_gradient(
        self, g: Array, query: TokenRows, key: TokenRows, winners: Array, sums: Array | None
    ) -> Array:
        """`sums` (None: 0) and what a piece with g = scale dL/ds [m, n] adds to the gradient of the
        query tokens."""
        raise NotImplementedError

    def key_gradient(self, g: Array, query: TokenRows, key: TokenRows, winners: Array) -> Array:
        """What a piece with g = scale dL/ds [m, n] adds to the gradient of the key tokens."""
        raise NotImplementedError

    def store(self, g: Array, z: TokenRows, out: Array, add: bool) -> None:
        """Differentiate the complete gradient `g` of unit tokens through their norms, and write it
        to `out` [m, L, D], 0 at tokens that do not count; or add it."""
        raise NotImplementedError

    def find_sizes(self) -> Sizes:
        """The sizes of `call`."""
        raise NotImplementedError

    # -- memory

    def _key_rows(self, problem: Problem, gradients: Gradients | None) -> int:
        self.sizes = self.find_sizes()
        self.most_parts = min(self.sizes.parts, part_room(problem.workspace))
        self.division = self.call.divide(self.sizes)
        return self.division.key_rows

    def _block(self, problem: Problem) -> tuple[int, int]:
        return self.division.rows, self.division.columns

    # -- scores

    def unit_rows(self, problem: Problem, features: Any) -> tuple[Any, Norms]:
        """Of tokens: the tokens themselves, which `stage` normalises piece by piece."""
        if isinstance(features, Tokens):
            return features, None
        return super().unit_rows(problem, features)

    def stage_query(self, problem: Problem, query: Tokens) -> TokenRows:
        """`stage` of the queries of a row block, once for all its blocks."""
        return self._stage_once("query", problem, query)

    def stage_keys(self, problem: Problem, key: Tokens, keys: slice) -> TokenRows:
        """`stage` of a piece of a block's keys, once if the block is one piece."""
        if keys.stop - keys.start < len(key):
            return self.stage(problem, key[keys])
        return self._stage_once("key", problem, key)

    def _stage_once(self, side: str, problem: Problem, tokens: Tokens) -> TokenRows:
        if side not in self.staged or self.staged[side][0] is not tokens:
            self.staged.pop(side, None)  # frees the memory first
            self.staged[side] = tokens, self.stage(problem, tokens, side == "query")
        return self.staged[side][1]

    def write_scores(
        self, problem: Problem, query: Tokens, key: Tokens, place: tuple[int, int], out: Array,
        wants_winners: bool = False,
    ) -> None:  # fmt: skip
        """Write the scores [m, n] of the block at `place` (its first row and key) to `out`.

        `wants_winners`: gradients of the block follow. They need its winners, which stay until then
        if the block is one piece.
        """
        if place in self.kept_scores:
            out[...] = self.kept_scores[place]
            return
        division, staged = self.division, self.stage_query(problem, query)
        wants_winners = division.keeps_winners or (wants_winners and len(key) <= division.piece)
        for keys in slices(len(key), division.piece):
            part = self.stage_keys(problem, key, keys)
            scores, winners = self.score(staged, part, wants_winners)
            out[:, keys] = scores
            if wants_winners:
                self.kept_winners[place, keys.start] = winners
        if division.keeps_scores:
            self.kept_scores[place] = out.copy()

    def winners(
        self, query: TokenRows, key: TokenRows, place: tuple[int, int], first_key: int
    ) -> Array:
        """The winners of a piece, which begins with key `first_key` of the block at `place`."""
        kept = self.kept_winners.get((place, first_key))
        return self.score(query, key, True)[1] if kept is None else kept

    def add_gradients(
        self, problem: Problem, g: Array, query: Tokens, key: Tokens, place: tuple[int, int],
        sums: Array | None, want_query: bool,
        put_key: Callable[[slice, Array, TokenRows], None] | None,
    ) -> Array | None:  # fmt: skip
        """`sums` (None: 0) and what the block at `place` with g = scale dL/ds [m, n] adds to the
        gradient of its queries. `put_key` (None: not wanted) gets the keys of each piece, what the
        block adds to their gradient, and their tokens."""
        staged = self.stage_query(problem, query)
        for keys in slices(len(key), self.division.piece):
            part, g_of_piece = self.stage_keys(problem, key, keys), g[:, keys]
            winners = self.winners(staged, part, place, keys.start)
            if want_query:
                sums = self.query_gradient(g_of_piece, staged, part, winners, sums)
            if put_key is not None:
                put_key(keys, self.key_gradient(g_of_piece, staged, part, winners), part)
        if not self.division.keeps_winners:
            self.kept_winners.clear()
        return sums

    def block_scores(self, problem: Problem, rows: slice, columns: slice) -> Array:
        """The scores [m, n] of a block."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        out, place = self.xp.empty(shape, self.dtype), (rows.start, columns.start)
        self.write_scores(problem, problem.query[rows], problem.key[columns], place, out)
        return out

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
        xp, (m, n, _), grid = self.xp, problem.shape, self.grid(problem, False)
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


def describe(problem: Problem, gradients: Gradients | None) -> TokenCall:
    """The description of a problem whose features are `Tokens`."""
    query, key = (
        # a dtype of the other order of bytes is copied: its name is none of `ITEM`
        TokenSide(
            len(z), z.length, z.dtype.name if z.dtype.isnative else z.dtype.str, z.mask is not None
        )
        for z in (problem.query, problem.key)
    )
    # weights of rows are in the upstream gradient, too, where kernels find them
    has_plain_targets = problem.without_weights().plain_targets
    changes_logits = problem.pair_options.change_logits
    wants_features = gradients is not None and (gradients.want_query or gradients.want_key)
    return TokenCall(
        query, key, problem.shape[2], problem.compute_precision, problem.workspace,
        problem.normalize,
        has_second_pass=wants_features and problem.bias is None,  # a sigmoid has one pass
        wants_key=gradients is not None and gradients.want_key,
        all_keys=problem.compares_with_limits,
        is_plain=has_plain_targets and not changes_logits and problem.progress is None,
    )  # fmt: skip


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
