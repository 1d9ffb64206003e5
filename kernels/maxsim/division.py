"""The division of a call on tokens into blocks, within its workspace: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays.backend import BLOCK_ARRAYS
from ..grid import has_few_blocks, make_workspace_error

LEAST_COLUMNS = 16  # keys of a block with all queries


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows and of their tokens, and bytes."""

    queries: int
    keys: int
    features: int
    query_row: int  # bytes of the tokens of a query in a block: operands and gradients
    key_row: int  # bytes of the tokens of a key in a piece, likewise
    key_sums: int  # bytes of sums of gradients of the tokens of a key
    score: int  # bytes of a score
    winners: int  # bytes of the winners of a pair of rows
    maxima: int  # bytes of the maxima of a pair, before they are added up
    fixed: int  # bytes of products of tokens
    parts: int  # bytes of parts of the gradients of queries, which get up to `part_room`
    most_rows: int  # the largest number of queries of the only row block
    most_side: int  # the largest side of a block
    takes_all_scores: bool = False  # kernels compute losses and dL/ds from all scores, in place

    @property
    def pairs(self) -> int:
        return self.queries * self.keys


@dataclass(frozen=True)
class Division:
    """How a call is divided. A block of scores has one or several pieces, some of its keys each,
    whose winners exist at one time."""

    rows: int  # queries of a block
    columns: int  # keys of a block
    piece: int  # keys of a piece
    # keys whose gradients a pass accumulates; 0: each block completes them. They are whole blocks,
    # so that all passes have the same blocks
    key_rows: int
    keeps_scores: bool  # from the log-sum-exp pass to the gradient pass
    keeps_winners: bool

    def has_all_scores(self, sizes: Sizes) -> bool:
        """Whether kernels take losses and dL/ds from all scores, in their memory."""
        is_whole = (self.rows, self.columns) == (sizes.queries, sizes.keys)
        return sizes.takes_all_scores and is_whole


def divide(
    sizes: Sizes, workspace: int, has_second_pass: bool, wants_key: bool, all_keys: bool
) -> Division:
    """The division of a call; ValueError if the workspace has no room for it.

    `has_second_pass`: a gradient pass follows, for which scores and winners may be kept. With
    `all_keys`, gradients of keys are not accumulated in ranges: each pass sees the same blocks.
    """

    def find(room: int) -> Division | None:
        division = _divide(sizes, room, has_second_pass, wants_key, all_keys)
        # what would be kept may leave no room for blocks
        return division or _divide(sizes, room, False, wants_key, all_keys)

    division = find(workspace)
    if division is not None:
        return division
    low, high = workspace, 2 * workspace  # the least workspace, to a thousandth
    while find(high) is None:
        low, high = high, 2 * high
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if find(middle) else (middle, high)
    raise make_workspace_error((sizes.queries, sizes.keys, sizes.features), high, workspace)


def _divide(
    sizes: Sizes, workspace: int, has_second_pass: bool, wants_key: bool, all_keys: bool
) -> Division | None:
    """`divide`; None if the workspace has no room."""
    m, n = sizes.queries, sizes.keys
    room = workspace - sizes.fixed - min(sizes.parts, part_room(workspace))
    if sizes.takes_all_scores:
        division = _divide_all_scores(sizes, workspace, room, has_second_pass)
        if division is not None:
            return division
    keeps_winners = has_second_pass and sizes.pairs * sizes.winners <= workspace // 2
    keeps_scores = has_second_pass and sizes.pairs * sizes.score <= workspace // 8
    room -= sizes.pairs * (keeps_winners * sizes.winners + keeps_scores * sizes.score)

    # One row block with all queries is best: then a block completes the gradients of its keys
    if m <= sizes.most_rows and m * sizes.query_row <= room // 2:
        columns = _fit(n, m * sizes.score * BLOCK_ARRAYS, room // 4)
        if columns >= min(n, LEAST_COLUMNS):
            rest = room - m * sizes.query_row - m * columns * sizes.score * BLOCK_ARRAYS
            piece = _fit_piece(sizes, m, columns, rest)
            if piece:
                if not (keeps_scores or keeps_winners):
                    columns = piece  # a pass with gradients computes scores and winners at once
                return Division(m, columns, piece, 0, keeps_scores, keeps_winners)
    # otherwise gradients of keys accumulate in half of the workspace
    key_rows = 0
    if wants_key:
        key_rows = n if all_keys else min(n, max(1, room // 2 // sizes.key_sums))
        room -= key_rows * sizes.key_sums
    rows = _fit(min(m, sizes.most_side), sizes.query_row, room // 3)
    while rows:
        score_row = rows * sizes.score * BLOCK_ARRAYS
        columns = _fit(min(n, sizes.most_side), score_row, room // 3)
        if columns and has_few_blocks(m, n, rows, columns):
            columns = min(columns, key_rows or n)
            rest = room - rows * sizes.query_row - columns * score_row
            piece = _fit_piece(sizes, rows, columns, rest)
            if piece:
                if key_rows < n:
                    key_rows -= key_rows % columns
                return Division(rows, columns, piece, key_rows, keeps_scores, keeps_winners)
        rows //= 2  # of which a piece, or more columns, may fit
    return None


def _divide_all_scores(
    sizes: Sizes, workspace: int, room: int, has_second_pass: bool
) -> Division | None:
    """One block, if its scores and the tokens of all queries fit the room; else None."""
    m, n = sizes.queries, sizes.keys
    keeps_winners = has_second_pass and sizes.pairs * sizes.winners <= workspace // 2
    room -= m * sizes.query_row + sizes.pairs * (sizes.score + keeps_winners * sizes.winners)
    piece = _fit_piece(sizes, m, n, room)
    if piece < min(n, LEAST_COLUMNS):
        return None
    return Division(m, n, piece, 0, keeps_scores=False, keeps_winners=keeps_winners)


def parts(sizes: Sizes, division: Division, workspace: int) -> dict[str, int]:
    """Bytes of the parts of the workspace, as `_divide` takes them from the room."""
    m, columns, pairs = division.rows, division.columns, division.rows * division.piece
    arrays = 1 if division.has_all_scores(sizes) else BLOCK_ARRAYS
    kept = {
        "kept winners": division.keeps_winners * sizes.pairs * sizes.winners,
        "kept scores": division.keeps_scores * sizes.pairs * sizes.score,
    }
    every = {
        "products of tokens": sizes.fixed,
        "parts of gradients": min(sizes.parts, part_room(workspace)),
        **kept,
        "query tokens": m * sizes.query_row,
        "scores": m * columns * sizes.score * arrays,
        "key gradients": division.key_rows * sizes.key_sums,
        "key tokens of a piece": division.piece * sizes.key_row,
        "winners of a piece": pairs * sizes.winners,
        "maxima and scores of a piece": pairs * (sizes.maxima + 2 * sizes.score),
    }
    return {name: size for name, size in every.items() if size}


def part_room(workspace: int) -> int:
    """The most bytes of parts of the gradients of queries."""
    return workspace // 16


def _fit_piece(sizes: Sizes, rows: int, columns: int, room: int) -> int:
    """The keys of a piece; 0 if one does not fit."""
    of_pair = sizes.winners + sizes.maxima + 2 * sizes.score  # scores; or dL/ds, in two orders
    return _fit(columns, sizes.key_row + rows * of_pair, room)


def _fit(count: int, size: int, room: int) -> int:
    """The largest of count, count / 2, count / 4, ... of which each takes `size` bytes of the room;
    0 if 1 does not fit."""
    while count and count * size > room:
        count //= 2
    return count
