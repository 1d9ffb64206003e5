"""Loops over the products of tokens, and over winners, that Numba compiles.

A winner is the number, within its row, of the key token with the largest product: the first of
equal ones. Winners [n, t] have a row for each key, and an entry for each query token of the block.
"""

from __future__ import annotations

import numpy as np

from ..cpu.loops.compilation import compiled
from ..cpu.loops.elementary import next_number, wide_vectors

# rows, and query tokens of take_maxima, that a thread takes at once (`cpu.resources.run_loop`)
CHUNK, TOKENS = 16, 128


@compiled
def take_maxima(  # type: ignore[no-untyped-def]
    products, starts, best, winners, first_key, first_token, counter
):
    """best[j, a] = the largest product of query token a with the tokens of key j, for a tile of
    products [key tokens, query tokens], whose first key and query token are `first_key` and
    `first_token`. The tokens of its keys begin at `starts`. `winners` get their numbers, unless
    they have no rows. A product that is not finite makes the maximum NaN.

    The innermost loops go over query tokens, because maxima element by element vectorise."""
    wide_vectors()
    tokens, zero = products.shape[1], products.dtype.type(0)
    not_finite, number = np.empty(TOKENS, products.dtype), np.empty(TOKENS, np.int32)
    while True:
        begin = next_number(counter) * TOKENS
        if begin >= tokens:
            return
        size = min(TOKENS, tokens - begin)
        for j in range(starts.size - 1):
            top = best[first_key + j, first_token + begin : first_token + begin + size]
            row = products[starts[j], begin : begin + size]
            for a in range(size):
                top[a], not_finite[a], number[a] = row[a], row[a] * zero, 0
            for b in range(1, starts[j + 1] - starts[j]):
                row = products[starts[j] + b, begin : begin + size]
                for a in range(size):
                    not_finite[a] += row[a] * zero  # NaN if a product is not finite
                    wins = row[a] > top[a]
                    top[a] = row[a] if wins else top[a]
                    number[a] = b if wins else number[a]
            for a in range(size):
                if not_finite[a] != 0:
                    top[a] = not_finite[a]
            if winners.shape[0]:
                for a in range(size):
                    winners[first_key + j, first_token + begin + a] = number[a]


@compiled
def add_tokens(best, starts, weights, scores):  # type: ignore[no-untyped-def]
    """scores[i, j] = weights_i times the sum of best[j, a] over the tokens a of query i."""
    for j in range(best.shape[0]):
        for i in range(weights.size):
            total = np.float64(0)
            for a in range(starts[i], starts[i + 1]):
                total += best[j, a]
            scores[i, j] = total * weights[i]


@compiled
def query_gradient(  # type: ignore[no-untyped-def]
    out, g, token_rows, winners, key, key_starts, counter
):
    """out[a] = the sum over keys j of g_ij times the winner of token a in key j, with i
    the query of token a, `token_rows`[a]."""
    wide_vectors()
    while True:
        begin = next_number(counter) * CHUNK
        if begin >= out.shape[0]:
            return
        for a in range(begin, min(begin + CHUNK, out.shape[0])):
            i, total = token_rows[a], out[a]
            total[:] = 0
            for j in range(winners.shape[0]):
                factor, winner = g[i, j], key[key_starts[j] + winners[j, a]]
                for d in range(total.size):
                    total[d] += factor * winner[d]


@compiled
def key_gradient(  # type: ignore[no-untyped-def]
    out, g, token_rows, winners, query, key_starts, counter
):
    """out[b] = the sum over query tokens a whose winner is key token b, of g_ij q_a."""
    wide_vectors()
    while True:
        j = next_number(counter)
        if j >= winners.shape[0]:
            return
        for b in range(key_starts[j], key_starts[j + 1]):
            out[b][:] = 0
        for a in range(winners.shape[1]):
            i, total, token = token_rows[a], out[key_starts[j] + winners[j, a]], query[a]
            factor = g[i, j]
            for d in range(token.size):
                total[d] += factor * token[d]
