"""MaxSim on a GPU: cuBLAS multiplies tiles of tokens, and kernels take maxima and add gradients.

The tokens of keys keep one stride, and those that count come first; the tokens of queries that have
a mask are packed. Kernels read how many there are (kernels/cuda/maxsim/tokens.cu), so that the host
has to know no number of tokens.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from ..gpu.device.arguments import Fields, address, matrix, scalar, valid_scale
from ..gpu.device.cublas import ARITHMETIC, ELEMENT_TYPE, OP_N, OP_T, host_number
from ..gpu.device.launcher import HALF_WARP_ROW, Launcher, device_properties
from ..gpu.device.launches import Queue
from ..gpu.naive import make_launch, pair_fields, solve_logits
from ..gpu.vectors import ElementwiseVectors
from ..grid import slices
from ..problem import Array, Gradients, Problem, fast_replace, materialize_vectors
from ..solve import Solution, solve_by_passes
from . import sizes
from .blocks import TokenBlocks, find_scores
from .division import Sizes
from .sizes import (
    MOST_QUERY_SEGMENTS,
    OPERANDS,
    QUERY_BLOCK,
    QUERY_RESIDENT,
    QUERY_THREADS,
    UNIT,
)
from .tokens import TokenRows, Tokens

TOKENS = "maxsim/tokens.cu"
THREADS, WARPS = 256, 8  # of a thread block
ROWS_PER_BLOCK = 32  # query tokens of a thread block of take_maxima
MOST_TILE_ROWS = 4096  # query tokens of a tile of products
# sm90/maxsim.cu: key tokens of a tile, features of a slice, units and
# threads of a thread block, bytes of its shared memory
SWEEP_TILES = (176, 152, 128, 104, 64)
SLICE = 64
UNITS, SWEEP_THREADS = 12, 512
SWEEP_SHARED = 226 * 1024
MOST_SEGMENTS = 512
SEGMENT_START = 0.5  # time to begin a segment, in keys
PACKED_SHARES = tuple(eighths / 8 for eighths in range(2, 9))  # of query tokens that may count


def solve(problem: Problem, gradients: Gradients | None) -> Solution:
    """Loss and gradients of a problem whose features are `Tokens` on one GPU."""
    problem = fast_replace(problem, scale=valid_scale(problem))
    blocks = make_blocks(problem, gradients)
    if blocks.division.has_all_scores(blocks.sizes):
        return _solve_one_block(problem.without_weights(), blocks, gradients)
    return solve_by_passes(problem, blocks, gradients)


def _solve_one_block(
    problem: Problem, blocks: GPUTokenBlocks, gradients: Gradients | None
) -> Solution:
    """Loss and gradients of a problem without options of logits and targets, from all scores: the
    kernels of the method naive take the place of hundreds of operations on arrays."""
    problem = materialize_vectors(problem, cupy)
    (m, n, _), query, key, place = problem.shape, problem.query, problem.key, (0, 0)
    wants_tokens = gradients is not None and (gradients.want_query or gradients.want_key)
    x = cupy.empty((m, n), blocks.dtype)
    blocks.write_scores(problem, query, key, place, x, wants_tokens)
    launch = make_launch(blocks.dtype, problem.id_columns)
    scale, _held = scalar(problem.scale)
    launch("logits_of_scores", -(-m * n // THREADS), scores=x, m=m, n=n, scale=scale,
           pairs=pair_fields(problem), x=x)  # fmt: skip
    solution, g = solve_logits(
        problem, launch, x, blocks.nans(query), blocks.nans(key),
        gradients is not None or problem.scalar_grads, x,
    )  # fmt: skip
    if gradients is None or not wants_tokens:
        return solution
    g *= problem.scale

    def put_key(keys: slice, product: Array, part: Any) -> None:
        if gradients.key is not None:
            blocks.store(product, part, gradients.key[keys], False)

    sums = blocks.add_gradients(
        problem, g, query, key, place, None, gradients.want_query,
        put_key if gradients.want_key else None,
    )  # fmt: skip
    if sums is not None:
        staged: Any = blocks.stage_query(problem, query)
        blocks.store(sums, staged, gradients.query, gradients.add_query)
    return solution


def scores(problem: Problem) -> Array:
    """The scores [M, N] of all pairs of such a problem."""
    return find_scores(make_blocks(problem, None), problem)


def make_blocks(problem: Problem, gradients: Gradients | None) -> GPUTokenBlocks:
    """The backend of the problem."""
    return GPUTokenBlocks(problem, gradients, ElementwiseVectors())


class StridedRows(TokenRows):
    """Staged tokens, `values` [m L, D]: in each row, those that count come first; or packed.

    `counts` [m] and `order` [m, L] say how many count, and where they are in the caller's rows;
    None: all, in their places. `starts` [m + 1] and `token_rows` [m L] of packed tokens: where
    rows begin, and the row of each token. `factor` and `exponent` are of `row_norms`
    (cuda/rows.cuh).
    """

    counts: Array = None
    order: Array = None
    starts: Array = None
    token_rows: Array = None
    factor: Array = None
    exponent: Array = None
    source: Array = None  # [m L, D] the caller's tokens

    def weights(self, dtype: np.dtype[Any]) -> Array | None:
        """[m] factors of scores, of means over the tokens of a query; None: 1."""
        if not self.tokens.takes_mean:
            return None
        if self.counts is None:
            return cupy.full(len(self), 1.0 / self.tokens.length, dtype)
        return (1.0 / cupy.maximum(self.counts, 1)).astype(dtype)

    @property
    def fields(self) -> Fields:
        """struct Rows of the caller's tokens."""
        norms = address(self.factor), address(self.exponent)
        return {"z": matrix(self.source), "factor": norms[0], "exponent": norms[1]}


class GPUTokenBlocks(TokenBlocks):
    """Blocks of a problem whose features are `Tokens` on one GPU."""

    def __init__(self, problem: Problem, gradients: Gradients | None, vectors: Any) -> None:
        self.precision, self.key = problem.compute_precision, problem.key
        self.operand = cupy.dtype(OPERANDS[self.precision])
        self.launcher = Launcher(cupy.cuda.Device(), self.precision, Queue())
        self.properties = device_properties(cupy.cuda.Device().id)
        super().__init__(problem, gradients, vectors)
        self.has_sweeps = sizes.has_sweeps(self.call, self.properties)

    def find_sizes(self) -> Sizes:
        return sizes.gpu_sizes(self.call, self.properties)

    def launch(
        self, file: str, kernel: str, blocks: int, arguments: Fields, threads: int = THREADS,
        shared: int = 0, **defines: int,
    ) -> None:  # fmt: skip
        """Launch a kernel of maxsim/."""
        defines["WIDE_WINNERS"] = int(self.winner_dtype.itemsize > 2)
        self.launcher.launch(file, kernel, blocks, threads, arguments, shared, **defines)

    def starts(self, tokens: Tokens) -> Array:
        return np.arange(len(tokens) + 1) * tokens.length

    def stage(self, problem: Problem, tokens: Tokens, is_query: bool = False) -> StridedRows:
        m, length, (_, d) = len(tokens), tokens.length, tokens.shape
        source = cupy.ascontiguousarray(tokens.values).reshape(-1, d)
        staged = StridedRows(tokens, source)
        staged.source = source
        if tokens.mask is not None:
            mask = cupy.ascontiguousarray(tokens.mask)
            staged.counts, staged.order = cupy.empty(m, np.int64), cupy.empty((m, length), np.int32)
            self.launch(TOKENS, "order_tokens", -(-m // WARPS), {
                "mask": address(mask), "rows": m, "tokens": length,
                "order": address(staged.order), "counts": address(staged.counts),
            })  # fmt: skip
            if is_query:
                staged.starts = cupy.empty(m + 1, np.int64)
                staged.token_rows = cupy.empty(m * length, np.int32)
                self.launch(TOKENS, "add_counts", 1, {
                    "counts": address(staged.counts), "rows": m, "starts": address(staged.starts),
                })  # fmt: skip
        if problem.normalize:
            staged.factor = cupy.empty(len(source), self.dtype)
            staged.exponent = cupy.empty(len(source), np.int32)
            self.launcher.launch_rows(
                "row_norms", len(source), z=matrix(source), n=len(source), d=d,
                factor=address(staged.factor), exponent=address(staged.exponent),
            )  # fmt: skip
        elif staged.order is None and source.dtype == self.operand:
            return staged
        staged.values = cupy.empty(source.shape, self.operand)
        lanes = 16 if d <= HALF_WARP_ROW else 32
        self.launch(TOKENS, "stage_tokens", -(-len(source) * lanes // THREADS), {
            "z": staged.fields, "order": address(staged.order), "counts": address(staged.counts),
            "starts": address(staged.starts), "rows": m, "tokens": length, "d": d,
            "operands": matrix(staged.values), "token_rows": address(staged.token_rows),
        })  # fmt: skip
        return staged

    def _finite(self, features: Any) -> Array:
        if not isinstance(features, Tokens):
            return super()._finite(features)
        return cupy.isfinite(self.nans(features))

    def nans(self, features: Tokens) -> Array:
        """[m] NaN flags (NaN or 0) of rows: of a token that counts, or of a key without tokens."""
        m, length, (_, d) = len(features), features.length, features.shape
        mask = None if features.mask is None else cupy.ascontiguousarray(features.mask)
        source = cupy.ascontiguousarray(features.values).reshape(-1, d)
        nans = cupy.empty(m)
        self.launch(TOKENS, "tokens_not_finite", m, {
            "z": matrix(source), "mask": address(mask), "tokens": length, "d": d,
            "wants_tokens": features is self.key, "nans": address(nans),
        })  # fmt: skip
        return nans

    def score(  # type: ignore[override]
        self, query: StridedRows, key: StridedRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        m, n = len(query), len(key)
        weights = query.weights(self.dtype)
        find_maxima = self._sweep if self.has_sweeps else self._maxima_of_tiles
        best, winners = find_maxima(query, key, wants_winners)
        if self.has_sweeps and query.starts is None:
            scores = best.sum(axis=1)
            return scores if weights is None else scores * weights[:, None], winners
        scores = cupy.empty((m, n), self.dtype)
        self.launch(TOKENS, "add_tokens", -(-m * n // THREADS), {
            "best": address(best), "queries": m, "keys": n, "query_tokens": query.tokens.length,
            "starts": address(query.starts), "weights": address(weights), "scores": address(scores),
        })  # fmt: skip
        return scores, winners

    def _maxima_of_tiles(
        self, query: StridedRows, key: StridedRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        """The maxima [n, query tokens] of each query token, and winners, by tiles of products."""
        n, t, key_tokens = len(key), len(query.values), key.tokens.length
        best = cupy.empty((n, t), self.dtype)
        winners = cupy.empty((n, t), self.winner_dtype) if wants_winners else None
        most_products = sizes.GPU_TILE_BYTES // self.dtype.itemsize
        most_rows = max(1, min(t, MOST_TILE_ROWS, most_products // key_tokens))
        columns = max(1, most_products // most_rows // key_tokens)
        products = cupy.empty((most_rows, min(n, columns) * key_tokens), self.dtype)
        for keys in slices(n, columns):
            tokens = key.values[keys.start * key_tokens : keys.stop * key_tokens]
            for part in slices(t, most_rows):
                self._multiply(query.values[part], tokens, products)
                rows, count = part.stop - part.start, keys.stop - keys.start
                at = keys.start * t + part.start
                self.launch(TOKENS, "take_maxima", count * -(-rows // ROWS_PER_BLOCK), {
                    "products": address(products), "stride": products.shape[1], "rows": rows,
                    "keys": count, "key_tokens": key_tokens,
                    "counts": address(key.counts, keys.start), "best": address(best.ravel(), at),
                    "winners": 0 if winners is None else address(winners.ravel(), at),
                    "best_stride": t,
                })  # fmt: skip
        return best, winners

    def _sweep(
        self, query: StridedRows, key: StridedRows, wants_winners: bool
    ) -> tuple[Array, Array | None]:
        """The same by sm90/maxsim.cu; of queries that are not packed, sums of the maxima of units
        [m, units, n]."""
        (m, n), d = (len(query), len(key)), query.values.shape[1]
        query_tokens, key_tokens = query.tokens.length, key.tokens.length
        tile = min(SWEEP_TILES, key=lambda tile: (-(-key_tokens // tile) * tile, -tile))
        slices = -(-d // SLICE)
        stages = min(8, (SWEEP_SHARED - UNITS * UNIT * 128 * slices) // (tile * 128 * slices + 16))
        shared = (UNITS * UNIT + stages * tile) * 128 * slices + 16 * stages + 16
        is_packed, units_per_query = query.starts is not None, -(-query_tokens // UNIT)
        units = -(-m * query_tokens // UNIT) if is_packed else m * units_per_query
        row_tiles = -(-units // UNITS)
        multiprocessors = self.properties.multiprocessors
        shares = PACKED_SHARES if is_packed else (1.0,)
        segments = choose_segments(row_tiles, n, multiprocessors, shares)
        shape = (n, m * query_tokens) if is_packed else (m, units_per_query, n)
        parts = cupy.empty(shape, np.float32)
        winners = cupy.empty((n, m * query_tokens), self.winner_dtype) if wants_winners else None
        maps = {
            f"{name}_map": self.launcher.queue.tensor_map(
                side.values.data.ptr, len(side.values), 2 * d, 2 * d, box_rows, self.precision
            )
            for name, side, box_rows in (("query", query, UNIT), ("key", key, tile))
        }
        self.launcher.launch(
            "sm90/maxsim.cu", "maxsim", min(multiprocessors, row_tiles * segments),
            SWEEP_THREADS, {
                **maps, "query_total": address(query.starts, m), "key_counts": address(key.counts),
                "parts": address(parts), "winners": address(winners), "queries": m,
                "query_tokens": query_tokens, "keys": n, "key_tokens": key_tokens,
                "segments": segments,
            }, shared, KEY_TILE=tile, STAGES=stages, SLICES=slices, WINNERS=int(wants_winners),
            PACKED=int(is_packed),
        )  # fmt: skip
        return parts, winners

    def _multiply(self, query: Array, key: Array, products: Array) -> None:
        """Products [rows, columns] of the tokens, in the first rows and columns of `products`."""
        d, real = query.shape[1], self.dtype
        operand, sums = ELEMENT_TYPE[self.precision], ELEMENT_TYPE[real_precision(real)]
        self.launcher.queue.gemm(
            OP_T, OP_N, len(key), len(query), d, host_number(1.0, real)[1],
            key.data.ptr, operand, d, query.data.ptr, operand, d, host_number(0.0, real)[1],
            products.data.ptr, sums, products.shape[1], ARITHMETIC[self.precision], -1,
        )  # fmt: skip

    def query_gradient(  # type: ignore[override]
        self, g: Array, query: StridedRows, key: StridedRows, winners: Array, sums: Array | None
    ) -> Array:
        d, tokens = query.values.shape[1], len(query.values)
        blocks = -(-tokens // QUERY_BLOCK)
        segments = min(
            MOST_QUERY_SEGMENTS, len(key),
            self.properties.multiprocessors * QUERY_RESIDENT // blocks,
            self.most_parts // (tokens * d * self.dtype.itemsize),
        )  # fmt: skip
        segments = max(1, segments)
        if sums is not None and segments == 1:
            out, adds = sums[None], True
        else:
            out, adds = cupy.empty((segments, tokens, d), self.dtype), False
        g = self._weighted(g, query)  # a name keeps it alive until the launch
        arguments = self._gradient_arguments(g, query, key, winners, out)
        self.launch_gradient(
            "query_gradient", blocks * segments,
            {**arguments, "key": address(key.values), "segments": segments, "add": adds},
            QUERY_THREADS,
        )  # fmt: skip
        if segments == 1:
            return out[0]
        total = out.sum(axis=0)
        if sums is None:
            return total
        sums += total
        return sums

    def key_gradient(  # type: ignore[override]
        self, g: Array, query: StridedRows, key: StridedRows, winners: Array
    ) -> Array:
        d, tokens = key.values.shape[1], key.tokens.length
        out = cupy.empty((len(key.values), d), self.dtype)
        defines, shared = self._sorting(tokens)
        features = 32 * 16 // self.dtype.itemsize
        blocks = len(key) * -(-tokens // defines["TOKENS"]) * -(-d // features)
        g = cupy.ascontiguousarray(self._weighted(g, query).T)
        arguments = self._gradient_arguments(g, query, key, winners, out)
        self.launch_gradient(
            "key_gradient", blocks, {**arguments, "query": address(query.values)},
            32 * defines["WARPS"], shared, **defines,
        )  # fmt: skip
        return out

    def _weighted(self, g: Array, query: StridedRows) -> Array:
        """g [m, n] times the factors of scores, contiguous."""
        weights = query.weights(self.dtype)
        g = g if weights is None else g * weights[:, None]
        return cupy.ascontiguousarray(g.astype(self.dtype, copy=False))

    def _gradient_arguments(
        self, g: Array, query: StridedRows, key: StridedRows, winners: Array, out: Array
    ) -> Fields:
        return {
            "g": address(g), "winners": address(winners), "queries": len(query),
            "keys": len(key), "query_tokens": query.tokens.length,
            "key_tokens": key.tokens.length, "d": out.shape[-1],
            "starts": address(query.starts), "token_rows": address(query.token_rows),
            "out": address(out),
        }  # fmt: skip

    def launch_gradient(
        self, kernel: str, blocks: int, arguments: Fields, threads: int = THREADS, shared: int = 0,
        **defines: int,
    ) -> None:  # fmt: skip
        aligned = arguments["d"] * self.operand.itemsize % 16 == 0
        self.launch(
            "maxsim/gradients.cu", kernel, blocks, arguments, threads, shared, ALIGNED=int(aligned),
            **defines,
        )  # fmt: skip

    def _sorting(self, tokens: int) -> tuple[dict[str, int], int]:
        """The -D options of key_gradient for keys of so many tokens, and its shared memory."""
        real = self.dtype.itemsize
        room = self.properties.shared_memory
        for warps, chunk, most in ((32, 4096, 304), (16, 2048, 152), (16, 1024, 64)):
            count = min(most, -(-tokens // 8) * 8)
            entry = 8 if real == 4 else 16
            shared = 16 * 32 * (count + warps) + chunk * entry + warps * (2 * count + 8) + 4 * count
            shared += 64  # of alignment
            if shared <= room:
                break
        return {"TOKENS": count, "WARPS": warps, "CHUNK": chunk}, shared

    def store(  # type: ignore[override]
        self, g: Array, z: StridedRows, out: Array, add: bool
    ) -> None:
        m, length, (_, d) = len(z), z.tokens.length, z.tokens.shape
        target = out
        if not out.flags.c_contiguous:
            target = cupy.ascontiguousarray(out)
        lanes = 16 if d <= HALF_WARP_ROW else 32
        self.launch(TOKENS, "finish_tokens", -(-m * length * lanes // THREADS), {
            "z": z.fields, "g": address(g), "order": address(z.order), "counts": address(z.counts),
            "starts": address(z.starts), "rows": m, "tokens": length, "d": d,
            "out": matrix(target.reshape(-1, d)), "add": add,
        })  # fmt: skip
        if target is not out:
            out[...] = target


@functools.cache
def choose_segments(
    row_tiles: int, keys: int, multiprocessors: int, shares: tuple[float, ...]
) -> int:
    """The number of segments of keys with which the busiest multiprocessor has the least to do, in
    the mean over the shares of the row tiles that may exist."""
    tiles = [math.ceil(row_tiles * share) for share in shares]

    def work(segments: int) -> float:
        rounds = sum(-(-count * segments // multiprocessors) for count in tiles)
        return rounds * (keys / segments + SEGMENT_START)

    return min(range(1, min(keys, MOST_SEGMENTS) + 1), key=work)


def real_precision(real: np.dtype[Any]) -> str:
    """The precision whose elements are products of this dtype."""
    return "fp64" if real.itemsize == 8 else "fp32"
